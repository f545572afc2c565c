"""The recipes of the engine's cells: what may happen to a request in a serving engine without
changing a bit of its answer, and options that must take effect or be refused. They are entries of
engine_recipes.toml, whose stories `play_recipe` plays; other needs are functions here.

The harness compares every request with its recomputation; a recipe checks what else must be true.
Lengths are one below, at and above a page. An option that is dropped on the way changes no bit and
raises nothing, so recipes check its effect, and sizes that are exactly full or one beyond.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lockstep.attention.base import Backend
from lockstep.config import EngineConfig
from lockstep.lab import table
from lockstep.lab.engine_harness import EngineHarness, Injected, InstrumentedEngine, same_bits
from lockstep.lab.guard import Guarded
from lockstep.lab.recompute import Answer, StoryRequest
from lockstep.lab.tiny import LLAMA, Letters, save, words
from lockstep.llm.api import LLM
from lockstep.llm.generation import Generation
from lockstep.models import loader
from lockstep.ops import Routing
from lockstep.plan.bucket import Buckets
from lockstep.run.kind import GENERATE
from lockstep.run.step import Arena
from lockstep.sample.params import SamplingParams

Options = dict[str, Any]  # engine options
Entries = Sequence[Any]  # entries of engine_recipes.toml
PARAM_ENTRIES = table("engine_params.toml")
PARAMS = {
    name: SamplingParams.from_dict({**PARAM_ENTRIES["plain"], **own})
    for name, own in PARAM_ENTRIES.items()
}
PLAIN, GREEDY, SCORED, THREE = (PARAMS[name] for name in ("plain", "greedy", "scored", "three"))
EXPERTS = (4, 16, 17, 24, 64)  # up to 16, torch's unstable sort happens to be stable


@dataclass(frozen=True)
class Story:
    """An entry of `stories` in engine_recipes.toml."""

    name: str  # the property that is checked
    engines: Sequence[Options] = ({},)  # the story runs once per entry, on a fresh engine
    orders: Sequence[int] = ()  # indices in playing order; empty: all
    at: Sequence[int] | int = ()  # the step at which each arrives, or the steps between them
    aborts: Sequence[tuple[int, int]] = ()  # (index, step before which it is aborted)
    alone: bool = False  # each order on an engine of its own
    preempt: bool = False  # every second step, all requests or one are preempted
    counted: Mapping[str, str] = field(default_factory=dict)  # counter -> a second name for it
    raises: Sequence[int] = ()  # calls of `attend` that raise, with some layers written
    ends: Sequence[int] = ()  # the order in which the requests must end
    hits: Sequence[int] = ()  # cached tokens that each prompt must find
    distinct: bool = False  # completions differ, and depend on their index alone
    replays: int = 0  # the least number of launches replayed with other lengths and slots
    complete: bool = False  # every request is accepted, and ends
    rule: str = ""  # the RuleError that the engine raises instead
    full: bool = False  # skipped in a quick run

    def chosen(self, orders: Sequence[StoryRequest]) -> list[StoryRequest]:
        chosen = [orders[i] for i in self.orders or range(len(orders))]
        steps = self.at
        if isinstance(steps, int):
            steps = [steps * i for i in range(len(chosen))]
        for i, step in enumerate(steps):
            chosen[i] = replace(chosen[i], at=step)
        for i, step in self.aborts:
            chosen[i] = replace(chosen[i], abort=step)
        return chosen

    def play(self, rig: EngineHarness, orders: Sequence[StoryRequest], engine: Options) -> None:
        chosen = self.chosen(orders)
        if rig.oracle.encoder is not None:  # a source is not scored, and is read whole
            chosen = [order for order in chosen if order.params.prompt_logprobs is None]
            rows = max(len(order.prompt) for order in chosen)
            if engine.get("chunked_prefill_size", rows) < rows:
                engine = {**engine, "chunked_prefill_size": rows}
        groups = [[order] for order in chosen] if self.alone else [chosen]
        for options, group in product(self.engines, groups):
            self.judge(rig, group, rig.engine(**{**engine, **options}))

    def judge(
        self, rig: EngineHarness, orders: list[StoryRequest], engine: InstrumentedEngine
    ) -> None:
        """Plays the story on one engine and checks what else it states."""
        if self.rule:
            self._refused(rig, orders[0], engine)
            return
        before = Counter(rig.counters)
        if self.raises:
            engine.runner.backend = failing(engine.runner.backend, self.raises)
        disturb = preempt_every_second_step if self.preempt else None
        jobs = rig.play(self.name, engine, orders, disturb)
        for name, other in self.counted.items():
            rig.counters[other] += rig.counters[name] - before[name]
        if self.complete:
            taken = f"{len(jobs)} of {len(orders)} requests were accepted"
            rig.check(self.name, len(jobs) == len(orders), taken)
            lost = [f"request {i} never ended" for i, job in enumerate(jobs) if not job.done]
            rig.note(self.name, lost)
        if self.ends:
            fault = f"requests ended in the order {rig.ended}"
            rig.check("order", rig.ended == list(self.ends), fault)
        if self.hits:
            have = [job.output("").cached_tokens for job in jobs]
            fault = f"{self.name}: {have} cached tokens found, not {self.hits}"
            rig.check("hits", have == list(self.hits), fault)
        if self.distinct:
            self._distinct(rig, jobs)
        if self.replays and engine.runner.graphs:
            # a GPU's graphs hold only decoding steps, tapes any step
            replays, least = engine.seen["replays"], self.replays // (2 if engine.on_gpu else 1)
            rig.check(self.name, replays >= least, f"{replays} replays, not {least} or more")

    def _refused(self, rig: EngineHarness, order: StoryRequest, engine: InstrumentedEngine) -> None:
        """Checks that the engine refuses an order that is too large, by its rule."""
        try:
            order.add_to(engine)
            engine.finish()
            rig.note(self.name, [f"the engine did not raise: {self.rule}"])
        except Exception as error:  # any error but the rule's is a fault
            said = f"{type(error).__name__}: {error}"
            rig.check(self.name, said.startswith(f"RuleError: {self.rule}"), said)

    def _distinct(self, rig: EngineHarness, jobs: Sequence[Generation]) -> None:
        """Checks that completions of a prompt differ, and that each depends on its index alone."""
        known: dict[tuple[Any, int], Any] = {}
        for job in jobs:
            done = job.output("").completions
            many = len({c.token_ids for c in done})
            rig.check("distinct", len(done) == 1 or many > 1, "all completions are the same")
            for c in done:
                same = known.setdefault((job.prompt_ids, c.index), c.token_ids) == c.token_ids
                rig.check(self.name, same, f"completion {c.index} differs when requested alone")


def play_recipe(
    rig: EngineHarness,
    quick: bool,
    orders: Entries = (),
    stories: Entries = (),
    engine: Options | None = None,
    play: str = "",
) -> None:
    """Plays a recipe: its stories, on engines with the options `engine`, then function `play`."""
    made: list[StoryRequest] = []
    for entry in orders:
        given = {"tokens": entry[0], "params": entry[1]} if isinstance(entry, list) else {**entry}
        first = given.pop("after", None)
        made.append(order(**given))
        if first is not None:
            made[-1] = continuing(made[first], rig.oracle.completions(made[first])[0], made[-1])
    for story in (Story(**each) for each in stories):
        if not (quick and story.full):
            story.play(rig, made, engine or {})
    if play:
        resolve_name(f"lockstep.lab.{play}")(rig, quick)


def order(
    tokens: int = 0, params: str = "plain", seed: int = 0, then: Sequence[int] = (), **rest: Any
) -> StoryRequest:
    """Returns the request of an entry of `orders`. One that is `open` ends with the context."""
    wish = replace(PARAMS[params], **rest.pop("but", {}))
    if rest.pop("open", False):
        wish = replace(wish, max_tokens=None)
    rest["items"] = tuple(words(*item) for item in rest.get("items", ()))
    return StoryRequest((*words(tokens, seed or tokens), *then), wish, **rest)


def continuing(first: StoryRequest, answer: Answer, order: StoryRequest) -> StoryRequest:
    """Returns `order` after another's prompt and answer, or with the answer among its items."""
    said = tuple(answer.token_ids)
    if order.items:
        items = (said, said[:1], *order.items)
        return replace(order, prompt=first.prompt, items=items, generated=tuple(answer.logprobs))
    prompt = (*first.prompt, *said, *order.prompt)
    generated = tuple(answer.logprobs) if order.score else ()
    return replace(order, prompt=prompt, generated=generated)


def preempt_every_second_step(engine: InstrumentedEngine, _: object, step: int) -> None:
    """Preempts every running request, or one, alternating."""
    running = [r for r in engine.scheduler.running if r.missing_len < len(r.tokens)]
    many = {0: len(running), 2: 1}.get(step % 4, 0)
    for request in running[:many]:
        engine.scheduler._preempt(request)


def stream(rig: EngineHarness, quick: bool) -> None:
    for n in (6,) if quick else (6, 9, 12):
        order = StoryRequest(words(n, 400 + n), replace(PLAIN, seed=n, max_tokens=24))
        (job,) = rig.play("stream", rig.engine(), [order])
        ids = job.output("").token_ids
        text = rig.oracle.text(order.prompt, ids, order.params)[0]
        rig.counters["characters"] += len(text)
        places = (text[i : i + 3] for i in range(9, len(text) - 3))
        stop = next((three for three in places if "\ufffd" not in three), text[9:12])
        stopped = replace(order, params=replace(order.params, stop=(stop, "never"), n=2))
        rig.play("stream", rig.engine(), [stopped])
        last = rig.oracle.text(order.prompt, ids[:12], order.params)[0][-1:]
        held = replace(order, params=replace(order.params, max_tokens=12, stop=last + "~"))
        rig.play("stream", rig.engine(), [held, order])  # one ends with text held back


def failing(backend: Backend, calls: Collection[int]) -> Backend:
    """Returns the backend, altered to raise at the given calls of `attend`."""
    made, number = copy(backend), count()

    def attend(*args: Any) -> Any:
        if (call := next(number)) in calls:
            raise Injected(f"on purpose, at call {call}")
        return backend.attend(*args)

    made.attend = attend  # type: ignore[assignment,method-assign]
    return made


def ends(rig: EngineHarness, quick: bool) -> None:
    """Checks ends at the first stop string from min_tokens on, and at stop tokens."""
    stories = []
    for seed in (62, 64):
        order = StoryRequest(words(11, seed), replace(PLAIN, max_tokens=16))
        (plain,) = rig.play("end", rig.engine(), [order])
        ids = plain.output("").token_ids
        kinds = []
        for at in range(2, 9 if quick else 13):  # a stop string that token number `at` completes
            stop = Letters.spell(ids[at - 1 : at])
            if stop.isascii() and stop:
                kept = replace(order.params, stop=stop.decode())
                kinds += [replace(kept, min_tokens=m) for m in (at - 1, at, at + 1)]
        for at in (0, 2, 5):
            kinds.append(replace(order.params, stop_token_ids=ids[at : at + 1], min_tokens=at + 3))
        stories += [replace(order, params=params) for params in kinds]
    rig.play("end", rig.engine(), stories)


def texts(rig: EngineHarness, quick: bool) -> None:
    """Checks calls with text: a prompt gets its special tokens, an item that follows gets none."""
    llm = LLM.of(rig.engine())
    letters, text, items = Letters(), "the end", (" of it", "s", "in é")
    begin = tuple(letters.encode(text))
    for item, scores in zip(items, llm.score(text, items), strict=True):
        want = rig.item_scores(begin, tuple(letters.encode(item, add_special=False)))
        fault = f"{item!r} is not scored as the tokens of its text"
        rig.check("items", same_bits(scores, want), fault)
        rig.counters["items"] += 1
    (out,) = llm.generate(text, PLAIN)
    became = out.prompt_token_ids
    rig.check("items", became == begin, f"{text!r} has the tokens {became}, not {begin}")
    same = same_bits(llm.score(text)[1:], rig.oracle.scores(begin)[0])
    rig.check("items", same, f"{text!r} is not scored as its tokens")


def folder(rig: EngineHarness, quick: bool) -> None:
    """Checks a model from a folder: its bits, and end tokens by generation_config.json first."""
    order = StoryRequest(words(13, 80), replace(PLAIN, max_tokens=24))
    (free,) = rig.oracle.completions(order)
    end = free.token_ids[7]
    with TemporaryDirectory() as place:
        save(LLAMA, Path(place), rig.device, eos_token_id=[end])
        options = EngineConfig(device=rig.device.name, dtype=rig.device.dtype)
        model, info = loader.load(place, options)
    fault = f"the end tokens are {info.eos_token_ids}, not {(end,)}"
    rig.check("eos", info.eos_token_ids == (end,), fault)
    engine = rig.engine()
    engine.info = replace(info, folder=Path("tiny"))
    engine.kinds[GENERATE] = replace(engine.kinds[GENERATE], model=model, forward=model)
    job = engine.add(order.prompt, replace(order.params, ignore_eos=False))
    engine.finish()
    have, n = job.output(""), free.token_ids.index(end) + 1
    want = free.token_ids[:n]
    same = list(have.token_ids) == want and same_bits(have.logprobs, free.logprobs[:n])
    fault = f"{have.token_ids}, not {want}, or log-probabilities differ"
    rig.check("folder", same, fault)
    rig.counters["folders"] += 1


def capacity(rig: EngineHarness, quick: bool) -> None:
    """Checks that arenas and buckets of exactly the needed size work, and smaller ones do not."""
    order = StoryRequest(words(21), replace(GREEDY, max_tokens=4))
    # a graph keeps the arena that it was captured with
    roomy, *engines = (rig.engine(graphs=False) for _ in range(5))
    roomy.runner.arena = guarded = Guarded(rig.device)  # type: ignore[assignment]
    rig.play("capacity", roomy, [order])
    most = max(guarded.images)
    engines[0].runner.arena = Arena(most, rig.device.place)
    engines[1].runner.arena = Arena(most - 1, rig.device.place)
    engines[2].runner.buckets, engines[3].runner.buckets = Buckets((21,)), Buckets((20,))
    image = f"a step's image has at most {most - 1} numbers; got {most}."
    rules = ("", image, "", "a step has at most 20 tokens; got 21.")
    for engine, rule in zip(engines, rules, strict=True):
        Story("capacity", complete=not rule, rule=rule).judge(rig, [order], engine)
    rig.counters.update(full_arenas=1, full_buckets=1)


def routes(rig: EngineHarness, quick: bool) -> None:
    """Checks routers of every kind, on scores with many ties, against a sort by score and id."""
    gen = torch.Generator().manual_seed(5)
    for experts in EXPERTS:
        logits = torch.randint(0, 4, (40, experts), generator=gen).float()
        ranked = [sorted(range(experts), key=lambda e: (-row[e], e))[:3] for row in logits.tolist()]
        for score in ("softmax", "sigmoid", "chosen"):
            routing = Routing(k=3, experts=experts, score=score)
            ids = rig.device.ops.route(logits.to(rig.device.place), routing, None).ids
            wrong = sum(a != b for a, b in zip(ids.tolist(), ranked, strict=True))
            rig.check("ties", not wrong, f"{experts} experts by {score}: {wrong} rows differ")
            rig.counters["tied_rows"] += sum(len(set(row)) < experts for row in logits.tolist())
