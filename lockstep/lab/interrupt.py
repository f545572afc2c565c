"""Interrupts at any moment: afterwards every page is accounted for and every answer has its bits.

A trial has an engine that has been through all earlier trials, a bystander request whose stream has
been started, and a call that a KeyboardInterrupt strikes: by a timer, in a thread, or by a trace
function. `lockstep lab interrupts` and tests run it; docs/lab.md describes the ways.
"""

import ctypes
import random
import signal
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import tee
from pathlib import Path
from timeit import timeit
from types import FrameType
from typing import Any, NamedTuple

import torch

from lockstep.attention import select
from lockstep.config import EngineConfig
from lockstep.kv.prefix import HELD
from lockstep.lab import document, table
from lockstep.lab.tiny import BART, CONTEXT, LLAMA, QWEN3, Tiny, parts, words
from lockstep.llm.api import LLM
from lockstep.llm.engine import Engine
from lockstep.llm.output import Chunk, Output
from lockstep.progress import Progress
from lockstep.sample.params import SamplingParams

MODELS = (LLAMA, QWEN3, BART)
PACKAGE = Path(__file__).parent.parent
ENGINE = tuple(str(path) for path in PACKAGE.iterdir() if path.name not in ("lab", "bench"))
TRACED = tuple(str(PACKAGE / name) for name in ("llm", "sched", "kv", "run"))  # packages with state
CHUNK = 24  # rows of a step, and the longest source or embedded prompt
ITEMS = [[5], [6, 7, 8], [9, 5, 6, 7, 8, 9, 10]]
AGAIN_S = 0.002  # a second interrupt follows the first within this time
BYSTANDER = (  # its stream was started before the interrupt
    [3 + i for i in range(20)],
    SamplingParams(max_tokens=14, temperature=0.8, seed=77, n=2, logprobs=1, stop=("thx",)),
)

Answer = tuple[Any, ...]
PublicCall = Callable[[LLM], Answer]  # a call of the public surface
Event = tuple[str, str, int, int]  # file, function, line, bytecode (-1 for a whole line)
Strike = Callable[[Iterator[Any]], "Strikes"]  # gets the bystander's stream, to read or not


def answered(kind: str, prompts: list[list[int]], params: SamplingParams, llm: LLM) -> Answer:
    """Makes a call of some kind and returns its answer in comparable form."""
    if kind == "stream":
        chunks, n = list(llm.stream(prompts[0], params)), params.n
        ends = sorted((c.index, c.finish_reason) for c in chunks if c.finish_reason)
        ids = [sum((c.token_ids for c in chunks if c.index == i), ()) for i in range(n)]
        return texts_of(chunks, n), ids, ends
    if kind == "items":
        return tuple(scores.tobytes() for scores in llm.score(prompts[0], ITEMS))
    if kind == "embed":
        return (llm.embed([prompt[:CHUNK] for prompt in prompts]).tobytes(),)
    levels = [i % 2 for i in range(len(prompts))]
    return tuple(map(bits, llm.generate(prompts, params, priority=levels)))


class Trial(NamedTuple):
    model: str
    way: str
    where: tuple[str, ...]  # innermost engine functions at each interrupt of the call
    faults: tuple[str, ...]


def engine(tiny: Tiny, **options: Any) -> Engine:
    """Returns an engine for a tiny model, with chunks, evictions and preemptions in every trial."""
    tight = {"page_size": 4, "max_total_tokens": 96, "chunked_prefill_size": CHUNK}
    given = {"context_length": CONTEXT, "max_running_requests": 6, **tight, **options}
    return Engine(EngineConfig.from_names(given), parts(tiny, select.load("cpu")))


def wishes(tiny: Tiny) -> list[PublicCall]:
    """Returns the calls of the table. For an encoder-decoder, sources are short and not scored."""
    stem, out = words(30, 5), list[PublicCall]()
    for call in table("interrupt_calls.toml")["calls"]:
        prompts = [[*stem[:count], last] for count, last in call["prompts"]]
        kind, params = call["kind"], {"logprobs": 2, **call["params"]}
        if tiny is BART:
            prompts = [prompt[-CHUNK:] for prompt in prompts]
            kind = kind.replace("embed", "items")
            params.pop("prompt_logprobs", None)
        out.append(partial(answered, kind, prompts, SamplingParams.from_dict(params)))
    return out


def texts_of(chunks: Sequence[Chunk], n: int) -> list[str]:
    """Returns the streamed text of each completion."""
    return ["".join(c.text for c in chunks if c.index == i) for i in range(n)]


def bits(output: Output) -> Answer:
    """Returns everything in an output but the count of cached tokens."""
    answer: list[Any] = [output.prompt_top_logprobs]
    for c in output.completions:
        answer += [c.index, c.text, c.token_ids, c.finish_reason, c.top_logprobs, c.error]
    floats = [output.prompt_logprobs, *(c.logprobs for c in output.completions)]
    return (*answer, *(None if each is None else each.tobytes() for each in floats))


class Subject:
    """A fresh engine under interrupts, and the answers that it must give."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny, self.llm, self.wishes = tiny, LLM.of(engine(tiny)), wishes(tiny)
        # an undisturbed engine: no cache, no neighbours, room for every request
        calm = LLM.of(engine(tiny, disable_radix_cache=True, max_total_tokens=2048))
        self.answers = [wish(calm) for wish in self.wishes]
        prompt, params = BYSTANDER
        self.bystander = bits(calm.generate([prompt], params)[0])
        self.seconds = [timeit(partial(wish, self.llm), number=1) for wish in self.wishes]


class Strikes:
    """The outcomes of the victim's calls: where they were struck, or their answers."""

    def __init__(self) -> None:
        self.where: list[str] = []
        self.returned: list[Answer] = []

    def call(self, wish: PublicCall, llm: LLM, trace: "Aim | None" = None) -> bool:
        """Makes the call; returns whether it was struck."""
        before = sys.gettrace()
        sys.settrace(trace or before)
        try:
            self.returned.append(wish(llm))
            return False
        except KeyboardInterrupt as error:
            frames = traceback.extract_tb(error.__traceback__)
            inside = [(Path(f.filename), f.name) for f in frames if f.filename.startswith(ENGINE)]
            named = [f"{file.parent.name}/{file.stem}.{name}" for file, name in inside]
            self.where.append(named[-1] if named else "lab")
            return True
        finally:
            sys.settrace(before)


def by_timer(
    subject: Subject, number: int, rng: random.Random, stream: object, calls: int = 1
) -> Strikes:
    """Strikes like Ctrl-C, at a random moment of the call. With several `calls`, each later one is
    struck too, within AGAIN_S of the one before."""
    first_s, left, strikes = rng.uniform(0, 1.2 * subject.seconds[number]) + 1e-6, calls, Strikes()

    def strike(*_: object) -> None:
        nonlocal left
        left -= 1
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, AGAIN_S))
        if left >= 0:
            raise KeyboardInterrupt

    # Python drops an interrupt in a destructor, and its report must not be struck itself
    unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None
    before = signal.signal(signal.SIGALRM, strike)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, first_s)
            while calls and strikes.call(subject.wishes[number], subject.llm):
                calls -= 1
        finally:
            left = 0
    except KeyboardInterrupt:  # between calls: in the lab's own code
        left = 0
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    sys.unraisablehook = unraisable
    return strikes


def in_thread(subject: Subject, number: int, rng: random.Random, stream: Iterator[Any]) -> Strikes:
    """Interrupts a call in a thread, while this one reads the bystander's stream, or not."""
    strikes = Strikes()

    def work() -> None:
        with suppress(KeyboardInterrupt):  # in the lab's own code
            strikes.call(subject.wishes[number], subject.llm)

    thread = threading.Thread(target=work)
    end = time.perf_counter() + rng.uniform(0, 1.5 * subject.seconds[number])
    thread.start()
    reads = rng.random() < 0.5
    while time.perf_counter() < end and thread.is_alive():
        reads = reads and next(stream, None) is not None
        time.sleep(0 if reads else 1e-4)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    )
    thread.join()
    return strikes


WAYS: dict[str, Callable[..., Strikes]] = {"timer": by_timer, "thread": in_thread}
WAYS["again"] = partial(by_timer, calls=3)


class Aim:
    """A trace function that records the events of the traced packages and interrupts event `at`."""

    def __init__(self, at: int = -1, opcodes: bool = False) -> None:
        self.at, self.opcodes = at, opcodes
        self.events: list[Event] = []

    def __call__(self, frame: FrameType, kind: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        if kind == "call":
            frame.f_trace_opcodes = self.opcodes
        if kind == ("opcode" if self.opcodes else "line"):
            code, place = frame.f_code, frame.f_lasti if self.opcodes else -1
            self.events.append((code.co_filename, code.co_name, frame.f_lineno, place))
            if len(self.events) - 1 == self.at:
                raise KeyboardInterrupt
        return self


def trial(subject: Subject, seed: int) -> Trial:
    """Runs trial number `seed` on the engine."""
    rng = random.Random(seed)
    way = rng.choice(("timer", "timer", "again", "thread"))
    number = rng.randrange(len(subject.wishes))
    return judged(subject, way, number, partial(WAYS[way], subject, number, rng), rng)


def judged(subject: Subject, way: str, number: int, strike: Strike, rng: random.Random) -> Trial:
    """Starts a bystander, strikes, and checks everything afterwards."""
    llm, faults = subject.llm, list[str]()
    prompt, params = BYSTANDER
    read, streamed = tee(llm.stream(prompt, params))
    for _ in range(rng.randint(1, 6)):
        next(read)
    (job,) = llm.engine.generations.values()
    strikes = strike(read)

    def check(holds: bool, fault: str) -> None:
        faults.extend([] if holds else [fault])

    try:
        right = subject.answers[number]
        check(all(a == right for a in strikes.returned), "a call that was not interrupted differs")
        llm.engine.check()
        others = [other for other in llm.engine.generations.values() if other is not job]
        check(not others, f"{len(others)} requests of the interrupted call remain")
        again = rng.randrange(len(subject.wishes))
        same = subject.wishes[again](llm) == subject.answers[again]
        check(same, f"call {again} of the table differs afterwards")
        for _ in read:
            pass
        check(bits(job.output("")) == subject.bystander, "the bystander's answer differs")
        texts = [c.text for c in job.output("").completions]
        check(texts_of(list(streamed), params.n) == texts, "the bystander's stream differs")
        faults += check_idle(llm.engine)
    except Exception as error:  # whatever a broken engine raises
        faults.append(f"{type(error).__name__}: {error}")
    return Trial(subject.tiny.name, way, tuple(strikes.where), tuple(faults))


def check_idle(engine: Engine) -> list[str]:
    """Checks that an idle engine's pages are free or cached, and that no request is left."""
    engine.check()
    scheduler = engine.scheduler
    queues = (engine.generations, scheduler.running, scheduler.waiting, scheduler.embeds)
    left = sum(map(len, queues))
    return [f"{left} requests remain"] if left else []


def run(subjects: dict[Tiny, Subject], count: int, seed: int) -> Iterator[Trial]:
    """Yields trials, alternating between subjects, until `count` interrupts have struck."""
    struck, models = 0, list(subjects)
    while struck < count:
        tiny = models[seed % len(models)]
        done = trial(subjects[tiny], seed)
        yield done
        struck, seed = struck + len(done.where), seed + 1
        if done.faults:
            subjects[tiny] = Subject(tiny)


def sweep(
    tiny: Tiny, opcodes: bool, second: bool, seed: int = 0, part: tuple[int, int] = (0, 1)
) -> Iterator[Trial]:
    """Strikes every line, or every bytecode, that a call executes: a trial each. With `second`, an
    earlier call was struck while a step's result was being written, and the recovery from that is
    struck. `part` = (i, n) takes every n-th event, from the i-th on."""
    rng, made = random.Random(seed), Subject(tiny)
    number = 1  # several prompts and completions
    wish, plain, noted = made.wishes[number], Aim(), Aim(opcodes=opcodes)
    Strikes().call(wish, made.llm, plain)
    writing = [i for i, event in enumerate(plain.events) if event[1] == "write"]

    def strike(aim: Aim, stream: object) -> Strikes:
        strikes = Strikes()
        if second:
            strikes.call(wish, made.llm, Aim(writing[len(writing) // 2]))
        strikes.call(wish, made.llm, aim)
        return strikes

    yield judged(made, "noted", number, partial(strike, noted), rng)
    seen, moments = noted.events, dict[Event, list[int]]()
    if second:
        del seen[1 + max(i for i, event in enumerate(seen) if event[1] == "_recover") :]
    for i, event in enumerate(seen):
        moments.setdefault(event, []).append(i)
    aims = [rng.choice(each) for each in moments.values()]  # one occurrence of each event
    way = "recovery" if second else "aimed"
    for at in aims[part[0] :: part[1]]:
        yield judged(made, way, number, partial(strike, Aim(at, opcodes)), rng)


def command(args: Namespace) -> int:
    """Runs `lab interrupts`: at random, then, if requested, at every line or bytecode."""
    begin, trials = time.perf_counter(), list[Trial]()
    torch.set_num_threads(1)
    subjects = {tiny: Subject(tiny) for tiny in MODELS}
    with Progress(args.count, "lab interrupts") as bar:
        for done in run(subjects, args.count, args.seed):
            trials.append(done)
            for _ in range(min(len(done.where), args.count - bar.n)):
                bar.step(done.model, bool(done.faults))
    counters = (each.llm.engine.scheduler.counters for each in subjects.values())
    engines = sum(counters, Counter(trials=len(trials)))
    sweeps = [(tiny, second) for tiny in MODELS for second in (False, True)] if args.aimed else []
    with Progress(len(sweeps), f"lab interrupts at {args.aimed or 'no lines'}") as bar:
        for tiny, second in sweeps:
            trials += sweep(tiny, args.aimed == "bytecodes", second, args.seed)
            bar.step(tiny.name)
    struck = Counter(f"{t.model} {t.way}" for t in trials for _ in t.where)
    faults = [
        f"trial {number}, {t.model} {t.way} in {t.where}: {fault}"
        for number, t in enumerate(trials, 1)
        for fault in t.faults
    ]
    doc = {
        **document.head(),
        **{"seed": args.seed, "interrupts": struck.total(), "trials": len(trials)},
        "faults": faults[:100],
        "broken": len(faults),
        "leaked": sum(HELD in fault for fault in faults),
        "struck": dict(sorted(struck.items())),
        "functions": dict(Counter(w for t in trials for w in t.where).most_common()),
        "engines": dict(sorted(engines.items())),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    document.publish(args, doc, document.text("interrupts.txt", doc=doc))
    return int(bool(faults))
