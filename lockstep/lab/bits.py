"""`lockstep lab bits`: models of real shapes, served by every path that an engine may take. How
many log-probabilities differ in a bit?

The reference serves all requests at once: whole prompts, nothing cached before, no launch recorded,
every step settled before the next. A path serves them again in one other way, and counts what shows
that it was taken: an equality whose path was not taken proves nothing. A path is a name, options of
an engine and counters, so that one more (speculation) is one more entry. Weights are drawn from a
config alone. Beside the bits stands the distance to transformers in a wider dtype (`lab.distance`).
`--small` plays the same on models of a few thousand weights, which CI does.
"""

import gc
import json
import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.config import EngineConfig
from lockstep.lab import document, isolate, oracle_draft, speculative_bits
from lockstep.lab.commands import picked
from lockstep.lab.distance import MOST_RATIO, Distance, measure
from lockstep.lab.engine_harness import InstrumentedEngine
from lockstep.lab.options import Device
from lockstep.lab.tiny import configs
from lockstep.llm.engine import Engine, Parts, load
from lockstep.progress import Progress
from lockstep.sample.params import SamplingParams

MODEL_S = 900.0  # a model that takes longer has hung
SMALL = ("qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3")  # of the golden ones
LEAST = {"model": 10_000, "path": 125_000}  # log-probabilities, where shapes are real ones
Answers = list[NDArray[np.int32]]  # of every request: tokens, then the bits of their logprobs


@dataclass(frozen=True)
class Sizes:
    """The requests, and how cramped the paths are."""

    requests: int = 64
    prompt: tuple[int, int] = (64, 512)
    new: tuple[int, int] = (256, 512)
    running: int = 15  # one below a bucket
    chunk: int = 200
    page: int = 64
    few_tokens: int = 14_000  # in a cache that is too small
    judged: tuple[int, int] = (4, 384)  # prompts, and tokens of each, for the distance

    @property
    def room(self) -> int:
        """Keys of all requests together."""
        return self.requests * (self.prompt[1] + self.new[1] + self.page)


FEW = Sizes(
    requests=7,
    prompt=(3, 40),
    new=(5, 16),
    running=3,
    chunk=7,
    page=8,
    few_tokens=96,
    judged=(2, 24),
)


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens answer it."""

    prompt: list[int]
    params: SamplingParams


Serve = Callable[[InstrumentedEngine, Sequence[Request], Answers], Answers]


def serve(engine: InstrumentedEngine, requests: Sequence[Request], want: Answers) -> Answers:
    """The requests, all given at once."""
    jobs = [engine.add(each.prompt, each.params) for each in requests]
    while engine.busy:
        engine.step()
    outs = [job.output("") for job in jobs]
    return [bits_of(out.token_ids, out.logprobs) for out in outs]


def serve_twice(engine: InstrumentedEngine, requests: Sequence[Request], want: Answers) -> Answers:
    """The prompts first, for one token each; then all of it, on what is cached."""
    serve(engine, [replace(r, params=replace(r.params, max_tokens=1)) for r in requests], want)
    return serve(engine, requests, want)


def serve_drafted(
    engine: InstrumentedEngine, requests: Sequence[Request], want: Answers
) -> Answers:
    """With drafts that know the answers, and err as often as they are told to."""
    known = {f"#{i}": each[: len(each) // 2].tolist() for i, each in enumerate(want)}
    oracle_draft.install(engine, known, oracle_draft.RIGHT)
    have = serve(engine, requests, want)
    engine.seen.update(engine.runner.replays())
    return have


def score(engine: InstrumentedEngine, requests: Sequence[Request], want: Answers) -> Answers:
    """The answers of the reference as parts of prompts: log-probabilities of prefill."""
    answers = [each[: len(each) // 2].tolist() for each in want]
    how = SamplingParams(prompt_logprobs=True, seed=0)
    jobs = [
        engine.add([*request.prompt, *answer], how, scores_only=True)
        for request, answer in zip(requests, answers, strict=True)
    ]
    while engine.busy:
        engine.step()
    found = [job.output("").prompt_logprobs for job in jobs]
    engine.seen["scored_tokens"] += sum(map(len, answers))
    return [
        bits_of(answer, scores if scores is None else scores[-len(answer) :])
        for answer, scores in zip(answers, found, strict=True)
    ]


def bits_of(token_ids: Sequence[int], logprobs: Any) -> NDArray[np.int32]:
    """Tokens, then the bits of their log-probabilities; no bits where these never came."""
    bits = np.zeros(0) if logprobs is None else np.asarray(logprobs, np.float32)
    return np.concatenate((np.array(token_ids, np.int32), bits.astype(np.float32).view(np.int32)))


@dataclass(frozen=True)
class PathTaken:
    """One other way to serve. `options(sizes)` are the engine's; None leaves graphs and overlap as
    the device has them. `counters` must be above 0 afterwards."""

    counters: tuple[str, ...]
    options: Callable[[Sizes], Mapping[str, Any]] = lambda sizes: {}
    overlap: bool | None = None
    serve: Serve = serve


def recorded(sizes: Sizes) -> dict[str, Any]:
    """Steps are padded, so that a launch is recorded by one and replayed by others."""
    grid = (8, sizes.chunk * 8)
    padded = {"bucket_sizes": grid, "request_bucket_sizes": (sizes.requests + 1,)}
    on_cpu = {**padded, "chunked_prefill_size": grid[1], "max_running_requests": sizes.requests}
    return {"graphs": True, **(on_cpu if sizes == FEW else {})}


PATHS = {
    "batch": PathTaken(("batched_steps",), lambda s: {"max_running_requests": s.running}),
    "chunk": PathTaken(("cut_prompts",), lambda s: {"chunked_prefill_size": s.chunk}),
    "prefix": PathTaken(
        ("hit_tokens",), lambda s: {"disable_radix_cache": False}, serve=serve_twice
    ),
    "page": PathTaken(("other_pages",), lambda s: {"page_size": s.page}),
    "graph": PathTaken(("replays",), recorded, overlap=False),
    "preemption": PathTaken(("preempted",), lambda s: {"max_total_tokens": s.few_tokens}),
    "overlap": PathTaken(("late_ids",), lambda s: {"graphs": False}, overlap=True),
    "prefill = decode": PathTaken(("scored_tokens",), serve=score),
}


ORACLE = "oracle"  # of --speculative, on these shapes
ORACLE_SHAPES = ("qwen3-8b", "gemma3-4b", "deepseek-v3")
DRAFTED = PathTaken(
    oracle_draft.COUNTERS, lambda s: oracle_draft.OPTIONS, overlap=True, serve=serve_drafted
)
EVERY_PATH = {**PATHS, ORACLE: DRAFTED}


@dataclass(frozen=True)
class Job:
    """One model by some paths, in a process of its own."""

    name: str
    config: Mapping[str, Any]
    device: Device
    sizes: Sizes
    paths: tuple[str, ...]


@dataclass
class Found:
    """What a path came to."""

    log_probabilities: int
    from_decode_steps: int
    differ: int
    counters: dict[str, int]
    seconds: float


@dataclass
class ModelFound:
    """What a model came to."""

    name: str
    paths: dict[str, Found] = field(default_factory=dict)
    distance: Distance | None = None
    seconds: float = 0.0


def requests_of(sizes: Sizes, vocab: int) -> list[Request]:
    """Sampled, greedy and cut ones, of many lengths; a few share their beginnings."""
    rng, out = random.Random(7), list[Request]()
    stem = [rng.randrange(2, vocab) for _ in range(sizes.prompt[1])]
    for at in range(sizes.requests):
        length = rng.randint(*sizes.prompt)
        own = [rng.randrange(2, vocab) for _ in range(length)]
        prompt = [*stem[: length // 2], *own[length // 2 :]] if at % 4 == 0 else own
        params = SamplingParams(
            max_tokens=rng.randint(*sizes.new),
            temperature=0.0 if at % 5 == 0 else 0.6,
            top_p=0.9 if at % 8 == 3 else 1.0,
            seed=at,
            logprobs=0,
            ignore_eos=True,
        )
        out.append(Request(prompt, params))
    return out


def engine_of(parts: Parts, config: EngineConfig, overlap: bool | None) -> InstrumentedEngine:
    """A fresh engine, when the one before has given its memory back."""
    give_back()
    return InstrumentedEngine(config, parts, overlap)


def give_back() -> None:
    """Memory that nobody names any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def play(job: Job) -> ModelFound | isolate.Died:
    """A model; what it raises is its own fault, and no end of the run."""
    try:
        return measured(job)
    except Exception as error:
        return isolate.Died(f"{type(error).__name__}: {error}")


def measured(job: Job) -> ModelFound:
    """The reference, then every path."""
    begin, sizes, found = time.perf_counter(), job.sizes, ModelFound(job.name)
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(job.config), encoding="utf-8")
        plain = EngineConfig(
            model=folder,
            device=job.device.name,
            dtype=job.device.dtype,
            load_format="dummy",
            graphs=False,
            disable_radix_cache=True,
            max_running_requests=sizes.requests,
            chunked_prefill_size=8 * sizes.prompt[1],
            max_total_tokens=sizes.room,
            context_length=sizes.prompt[1] + sizes.new[1] + 1,
        )
        parts = replace(load(plain), draft=oracle_draft.random_head)
    requests = requests_of(sizes, parts.info.vocab_size)
    want = serve(engine_of(parts, plain, False), requests, [])
    for name in job.paths:
        found.paths[name] = by_path(EVERY_PATH[name], parts, plain, sizes, requests, want)
    if job.paths == (ORACLE,):
        found.seconds = round(time.perf_counter() - begin, 1)
        return found
    engine = engine_of(parts, plain, False)
    prompts = [[i % 7 + 2, *each.prompt * 9][: sizes.judged[1]] for i, each in enumerate(requests)]
    scores = prompt_scores(engine, prompts[: sizes.judged[0]])
    del engine, parts
    give_back()
    found.distance = measure(job.config, job.device, prompts[: sizes.judged[0]], scores)
    found.seconds = round(time.perf_counter() - begin, 1)
    return found


def by_path(
    path: PathTaken,
    parts: Parts,
    plain: EngineConfig,
    sizes: Sizes,
    requests: Sequence[Request],
    want: Answers,
) -> Found:
    """The requests by one path, against the reference."""
    begin = time.perf_counter()
    config = replace(plain, **{"graphs": None, **path.options(sizes)})
    engine = engine_of(parts, config, path.overlap)
    have = path.serve(engine, requests, want)
    counters = Counter(engine.seen) + Counter(engine.scheduler.counters)
    counters["replays"] = sum(tape.replays for tape in engine.runner.tapes.values())
    counters["cut_prompts"] = max(0, engine.seen["chunks"] - len(requests))
    pages = sum(int(pool.num_pages) for pool in engine.runner.pools if pool is not None)
    counters["other_pages"] = pages if config.page_size != plain.page_size else 0
    tokens = sum(len(each) // 2 for each in want)
    return Found(
        log_probabilities=tokens,
        from_decode_steps=tokens - len(requests),
        differ=sum(differing(a, b) for a, b in zip(have, want, strict=True)),
        counters={name: int(counters[name]) for name in (*path.counters, "replays", "steps")},
        seconds=round(time.perf_counter() - begin, 1),
    )


def differing(have: NDArray[np.int32], want: NDArray[np.int32]) -> int:
    """Log-probabilities that differ in a bit, or whose tokens do; all of them where one is no
    number or some never came."""
    n = len(want) // 2
    if have.shape != want.shape or bool(np.isnan(want[n:].view(np.float32)).any()):
        return n
    return int(((have != want)[:n] | (have != want)[n:]).sum())


def prompt_scores(engine: Engine, prompts: Sequence[list[int]]) -> list[NDArray[np.float32]]:
    """Log-probabilities of every token of a prompt but the first."""
    how = SamplingParams(prompt_logprobs=True, seed=0)
    jobs = [engine.add(ids, how, scores_only=True) for ids in prompts]
    while engine.busy:
        engine.step()
    return [np.asarray(job.output("").prompt_logprobs, np.float32)[1:] for job in jobs]


def faults(
    found: Sequence[ModelFound], paths: Sequence[str], least: Mapping[str, int]
) -> list[str]:
    """What speaks against the claim, in words."""
    out = []
    for model in found:
        for name, path in model.paths.items():
            where = f"{model.name}, {name}:"
            idle = [each for each in EVERY_PATH[name].counters if path.counters[each] == 0]
            if path.differ:
                out.append(f"{where} {path.differ} of {path.log_probabilities:,} differ")
            if idle:
                out.append(f"{where} {', '.join(idle)} is 0: the path was not taken")
            if path.log_probabilities < least["model"]:
                out.append(f"{where} {path.log_probabilities:,}, not {least['model']:,}")
        far = model.distance
        if far is not None and far.judged and far.ratio > MOST_RATIO:
            out.append(f"{model.name}: {far.ratio:.2f} times as far as transformers is")
    for name in paths:
        total = sum(model.paths[name].log_probabilities for model in found)
        if total < least["path"]:
            out.append(f"{name}: {total:,} over all models, not {least['path']:,}")
    return out


def command(args: Namespace) -> int:
    """`lab bits`."""
    drafted = args.speculative == ORACLE
    if args.speculative and not drafted:
        return speculative_bits.command(args)
    every = configs("golden_models.json" if args.small else "bits_models.json")
    every = {name: every[name] for name in (SMALL if args.small else every)}
    some = [name for name in every if not drafted or args.small or name in ORACLE_SHAPES]
    names = picked("a model is one of the lab's shapes", args.model, list(every)) or some
    paths = picked("a path is one that an engine takes", args.path, list(PATHS)) or list(PATHS)
    device, sizes = Device.of(args.device, args.dtype), FEW if args.small else Sizes()
    if drafted:
        paths, shorter = [ORACLE], replace(sizes, requests=args.prompts, new=(64, 96))
        sizes = sizes if args.small else shorter
    jobs = [Job(name, every[name], device, sizes, tuple(paths)) for name in names]
    found = [] if args.source is None else earlier(args.source, names)
    whole = not args.small and len(names) + len(found) == len(every)
    least = LEAST if whole else {"model": 0 if args.small else LEAST["model"], "path": 0}
    least = {"model": 0, "path": 0} if drafted else least
    died, doc = list[str](), document.head()
    doc |= {"device": asdict(device), "sizes": asdict(sizes)}
    with Progress(len(jobs), "lab bits") as bar:
        for job, answer in isolate.run(play, jobs, args.workers, lambda _: MODEL_S):
            gone = isinstance(answer, isolate.Died)
            if gone:
                died.append(f"{job.name}: {answer.reason}")
            else:
                found.append(answer)
            doc["models"] = {m.name: asdict(m) for m in found}
            doc["log_probabilities"] = {
                name: sum(m.paths[name].log_probabilities for m in found) for name in paths
            }
            doc["faults"] = [*died, *faults(found, paths, least)]
            if args.json not in (None, "-"):
                document.write(doc, args.json)  # what is there, should a model take too long
            bar.step(job.name, gone)
    wrong = doc["faults"]
    document.publish(args, doc, [*table(found, paths), *(wrong or ["no bit differs"])])
    return 1 if wrong else 0


def earlier(where: str, names: Sequence[str]) -> list[ModelFound]:
    """The models of an earlier document, without those that are measured again."""
    doc = document.read(where, "lockstep lab bits", "models", "sizes")
    return [
        ModelFound(
            name=name,
            paths={path: Found(**told) for path, told in each["paths"].items()},
            distance=each["distance"] and Distance(**each["distance"]),
            seconds=each["seconds"],
        )
        for name, each in doc["models"].items()
        if name not in names
    ]


def table(found: Sequence[ModelFound], paths: Sequence[str]) -> list[str]:
    """One line per model: how many log-probabilities differ by each path."""
    rows = [["model", "log-probabilities", *paths, "distance", "transformers'", "ratio", "s"]]
    for model in found:
        far = model.distance
        told = [f"{far.ours:.3g}", f"{far.theirs:.3g}", f"{far.ratio:.2f}"] if far else ["-"] * 3
        counts = [f"{model.paths[name].differ}" for name in paths]
        most = max((path.log_probabilities for path in model.paths.values()), default=0)
        rows.append([model.name, f"{most:,}", *counts, *told, f"{model.seconds:.0f}"])
    return document.aligned(rows, right=range(1, len(rows[0])))
