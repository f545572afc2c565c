"""The recipes of the engine's cells: what may happen to a request in a serving engine, none of
which may change a bit of its answer. They stand in engine_recipes.toml; `tell` plays the stories
there, and what needs more than stories is a function here.

A harness compares every request with its recomputation; a recipe looks at what else must hold.
Lengths sit one below, at and above a page.
"""

import random
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import count, pairwise, product
from pkgutil import resolve_name
from typing import Any

from lockstep.attention.base import Backend
from lockstep.lab import table
from lockstep.lab.engine_harness import EngineHarness, Injected, InstrumentedEngine, same_bits
from lockstep.lab.recompute import Order
from lockstep.lab.tiny import EOS, Letters, words
from lockstep.llm.generation import Generation
from lockstep.sample.params import SamplingParams

Options = dict[str, Any]  # of an engine
Entries = Sequence[Any]  # of engine_recipes.toml
PAGE = 8
GIVEN = table("engine_params.toml")
PARAMS = {name: SamplingParams.from_dict({**GIVEN["plain"], **own}) for name, own in GIVEN.items()}
PLAIN, GREEDY, CUT, PENALISED, SCORED, THREE, EAGER = PARAMS.values()
# few and wide: a launch is recorded by one step and replayed by others that are fuller or emptier
GRIDS = {"bucket_sizes": (8, 64), "request_bucket_sizes": (4, 17), "emit_bucket_sizes": (16,)}
REPLAYS = 8  # of an engine, at least


@dataclass(frozen=True)
class Story:
    """An entry of `stories` in engine_recipes.toml."""

    name: str  # the property that it looks at
    engines: Sequence[Options] = ({},)  # a fresh one of each for the whole story
    orders: Sequence[int] = ()  # these, in this order; without any, all
    at: Sequence[int] = ()  # when each of them is given
    aborts: Sequence[tuple[int, int]] = ()  # (which of them, before which step)
    alone: bool = False  # each order on an engine of its own
    preempt: bool = False  # everybody, or one, loses its pages after every second step
    preempted: str = ""  # what its preemptions are counted as besides
    ends: Sequence[int] = ()  # how the requests end, one after the other
    cold: bool = False  # no prompt is found in a cache
    full: bool = False  # not in a quick run

    def play(self, rig: EngineHarness, orders: Sequence[Order], engine: Options) -> None:
        chosen = [orders[i] for i in self.orders or range(len(orders))]
        for i, step in enumerate(self.at):
            chosen[i] = replace(chosen[i], at=step)
        for i, step in self.aborts:
            chosen[i] = replace(chosen[i], abort=step)
        if rig.oracle.encoder is not None:  # nobody scores a source
            chosen = [order for order in chosen if order.params.prompt_logprobs is None]
        groups = [[order] for order in chosen] if self.alone else [chosen]
        for options, group in product(self.engines, groups):
            before = rig.counters["preempted"]
            disturb = every_second if self.preempt else None
            jobs = rig.story(self.name, group, disturb, **{**engine, **options})
            if self.preempted:
                rig.counters[self.preempted] += rig.counters["preempted"] - before
            if self.cold:
                expect_hits(rig, "prompts that nobody had", jobs, (0,) * len(jobs))
            if self.ends:
                fault = f"requests ended in the order {rig.ended}"
                rig.check("order", rig.ended == list(self.ends), fault)


def tell(
    rig: EngineHarness,
    quick: bool,
    orders: Entries = (),
    stories: Entries = (),
    engine: Options | None = None,
    play: str = "",
) -> None:
    """A recipe: its stories, on engines that have `engine` in common, then what it names."""
    made = [order(**each) if isinstance(each, dict) else order(*each) for each in orders]
    for story in (Story(**each) for each in stories):
        if not (quick and story.full):
            story.play(rig, made, engine or {})
    if play:
        resolve_name(f"lockstep.lab.{play}")(rig, quick)


def order(
    tokens: int, params: str = "plain", seed: int = 0, then: Sequence[int] = (), **rest: Any
) -> Order:
    """An entry of `orders`."""
    return Order((*words(tokens, seed or tokens), *then), PARAMS[params], **rest)


def orders_of(*pairs: tuple[int, SamplingParams], late: int = 0) -> list[Order]:
    """Prompts of these lengths, each its own; `late` steps between one and the next."""
    return [Order(words(n, n), params, at=late * i) for i, (n, params) in enumerate(pairs)]


def hit(rig: EngineHarness, quick: bool) -> None:
    """The same prompt cold and warm; then the same tokens in another order."""
    engine = rig.engine(page_size=PAGE)
    lengths = (PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE + 1)
    for n in lengths[:3] if quick else lengths:
        order = Order(words(n, 100 + n), PLAIN)
        cold, warm = (rig.play("hit", engine, [order])[0] for _ in range(2))
        expect_hits(rig, f"{n} tokens", (cold, warm), (0, (n - 1) // PAGE * PAGE))
    prompt = words(29, 7)
    (first,) = rig.play("hit", engine, [Order(prompt, PLAIN)])
    turn = (*prompt, *first.output("").token_ids, *words(3, 8))
    same_tokens = (*prompt[:PAGE], *reversed(prompt[PAGE : 2 * PAGE]), *prompt[2 * PAGE :])
    for what, order, hits in (
        ("a second turn", Order(turn, CUT), 32),
        ("a block reversed", Order(same_tokens, CUT), PAGE),
        ("scores", Order(turn, SCORED), 0),
        ("another tenant", Order(prompt, GREEDY, tenant="another"), 0),
    ):
        expect_hits(rig, what, rig.play("hit", engine, [order]), (hits,))
    twins = [Order(words(39, 9), replace(PLAIN, seed=s), at=s) for s in range(3)]
    rig.story("hit", twins, page_size=4, chunked_prefill_size=PAGE + 3)


def expect_hits(
    rig: EngineHarness, what: str, jobs: Sequence[Generation], hits: tuple[int, ...]
) -> None:
    """Exactly so many tokens of each prompt were found in the cache."""
    have = tuple(job.output("").cached_tokens for job in jobs)
    rig.check("hits", have == hits, f"{what}: {have} tokens found, not {hits}")


def evict(rig: EngineHarness, quick: bool) -> None:
    """Prefixes come, go in part, and come again, windows first."""
    stems, rng = [words(n, 200 + n) for n in (41, 30)], random.Random(3)
    menu = [
        Order(stem[:n], replace(PLAIN, max_tokens=m))
        for stem in stems
        for n, m in ((13, 1), (22, 9), (len(stem), 5))
    ]
    cached: dict[tuple[Any, int], int] = {}

    def counting(engine: InstrumentedEngine, step: object) -> None:
        """Pages that left the tree, as far as the next step shows it."""
        tree = engine.scheduler.tree
        for g in tree.groups:
            gone = cached.get((engine, g), 0) - tree.cached(g)
            rig.counters["evicted_pages"] += max(0, gone)
            cached[engine, g] = tree.cached(g)

    for page, total in ((4, 60), (2, 56)):
        engine = rig.engine(
            page_size=page, max_total_tokens=total, max_running_requests=2, chunked_prefill_size=10
        )
        engine.watchers.append(counting)
        orders = [replace(rng.choice(menu), at=3 * i) for i in range(24 if quick else 40)]
        rig.play("evict", engine, orders)


def every_second(engine: InstrumentedEngine, jobs: list[Generation], step: int) -> None:
    """Everybody, or one, loses its pages."""
    running = [r for r in engine.scheduler.running if r.missing_len < len(r.tokens)]
    many = {0: len(running), 2: 1}.get(step % 4, 0)
    for request in running[:many]:
        engine.scheduler._preempt(request)


def several(rig: EngineHarness, quick: bool) -> None:
    """They are n requests: forked in the middle of a page and at its end, alone and in company."""
    for n in (PAGE - 1, PAGE, PAGE + 2):
        prompt, engine = words(n, 300 + n), rig.engine(page_size=PAGE)
        jobs = rig.play("n", engine, [Order(prompt, THREE), Order(words(5, 1), PLAIN)])
        ids = [c.token_ids for c in jobs[0].output("").completions]
        rig.check("distinct", len(set(ids)) > 1, "all completions are the same")
        for i in (1, 2):
            (alone,) = rig.play("n", engine, [Order(prompt, replace(THREE, n=1, sample_index=i))])
            same = alone.output("").token_ids == ids[i]
            rig.check("n", same, f"completion {i} is another one alone")


def score(rig: EngineHarness, quick: bool) -> None:
    """Of a prompt and its generated answer, those of the generation: cold, warm, in chunks."""
    prompt, engine = words(21, 14), rig.engine(page_size=PAGE)
    (job,) = rig.play("score", engine, [Order(prompt, PLAIN)])
    made = job.output("")
    whole = (*prompt, *made.token_ids)
    order = Order(whole, replace(PLAIN, prompt_logprobs=2, seed=0), score=True)
    for place in (engine, rig.engine(page_size=4, chunked_prefill_size=5)):
        (scored,) = rig.play("score", place, [order])
        scores = scored.output("").prompt_logprobs
        same = scores is not None and same_bits(scores[len(prompt) :], made.logprobs)
        rig.check("score", same, "a score is not the log-probability of generation")
        rig.counters["scored_tokens"] += 0 if scores is None else len(scores)
    rig.play("score", engine, [Order(whole, SCORED), Order(whole[:17], replace(SCORED, n=2), at=1)])
    tight: Options = {"page_size": 4, "chunked_prefill_size": 5, "max_total_tokens": 48}
    for place in (engine, rig.engine(**tight, disable_radix_cache=True)):
        items(rig, place, prompt, job)


def stream(rig: EngineHarness, quick: bool) -> None:
    for n in (6,) if quick else (6, 9, 12):
        order = Order(words(n, 400 + n), replace(PLAIN, seed=n, max_tokens=24))
        (job,) = rig.story("stream", [order])
        ids = job.output("").token_ids
        text = rig.oracle.text(order.prompt, ids, order.params)[0]
        rig.counters["characters"] += len(text)
        places = (text[i : i + 3] for i in range(9, len(text) - 3))
        stop = next((three for three in places if "\ufffd" not in three), text[9:12])
        stopped = replace(order, params=replace(order.params, stop=(stop, "never"), n=2))
        rig.story("stream", [stopped])
        last = rig.oracle.text(order.prompt, ids[:12], order.params)[0][-1:]
        held = replace(order, params=replace(order.params, max_tokens=12, stop=last + "~"))
        rig.story("stream", [held, order])  # one ends with text held back, one goes on
    # prompts that end in broken and in unfinished characters, or in nothing; spaces behind tokens
    # without text
    space, half, rest = map(Letters.TOKENS.index, (b" ", "€".encode()[:1], "é".encode()[1:]))
    blank = replace(PLAIN, max_tokens=24, logit_bias={EOS: 6.0, space: 6.0})
    tails = ((rest,), (half,), (half, rest), (EOS,) * 9)
    orders = [
        Order((*words(5, 420 + i), *tail), replace(blank, seed=i)) for i, tail in enumerate(tails)
    ]
    for job in rig.story("stream", orders):
        ids = job.output("").token_ids
        rig.counters["spaces_after_nothing"] += sum(pair == (EOS, space) for pair in pairwise(ids))


def encoder(rig: EngineHarness, quick: bool) -> None:
    """Items behind a source."""
    source = words(21, 21)
    (job,) = rig.story("score", [Order(source, PLAIN)])
    items(rig, rig.engine(), source, job)


def items(
    rig: EngineHarness, engine: InstrumentedEngine, prompt: tuple[int, ...], made: Generation
) -> None:
    """A generation's answer, given as an item beside others, has the generation's bits."""
    answer = made.output("").completions[0]
    wanted = [answer.token_ids, words(5, 15), answer.token_ids[:1], words(9, 16)]
    forks = engine.scheduler.counters["forked"]
    job = engine.add_items(prompt, wanted)
    engine.finish()
    done = job.output("").completions
    ids = [c.token_ids for c in done]
    rig.check("items", ids == list(map(tuple, wanted)), f"the items' tokens became {ids}")
    for item, completion in zip(wanted, done, strict=True):
        want = rig.item_scores(prompt, item)
        fault = f"an item of {len(item)} is not its recomputation"
        rig.check("items", same_bits(completion.logprobs, want), fault)
    same = same_bits(done[0].logprobs, answer.logprobs)
    rig.check("items", same, "an item is not the generation it repeats")
    rig.counters["item_forks"] += engine.scheduler.counters["forked"] - forks


def replayed(rig: EngineHarness, quick: bool) -> None:
    """Requests around a page come one by one, fork, and leave again: most steps are replays of a
    launch that was recorded with other lengths, other slots and other pads."""
    growing = [
        Order(words(n, i), replace(PLAIN, seed=i, max_tokens=4 + 3 * (i % 4)), at=i)
        for i, n in enumerate((3, 7, 8, 9, 15, 16, 17, 5))
    ]
    # one after the other: a fork's launch is replayed with other moves, and with fewer (8, 8, 6, 4)
    short = replace(THREE, max_tokens=6)
    forking = [
        Order(words(n, i), replace(short, seed=n), at=9 * i) for i, n in enumerate((12, 12, 11, 10))
    ]
    later = [replace(order, at=order.at + 10) for order in growing[:4]]
    stories = [
        (growing, 4, 1024),
        (forking, 8, 1024),
        ([*forking, *later], 8, 1024),
        ([*growing, *later], 1, 1024),
        ([*forking, *growing], 8, 96),
    ]
    graphs = rig.parts.backend.caps.graphs  # one that cannot be recorded runs the same steps
    for orders, page, total in stories[:2] if quick else stories:
        sizes: Options = {**GRIDS, "page_size": page, "max_total_tokens": total}
        engine = rig.engine(graphs=graphs, chunked_prefill_size=64, **sizes)
        rig.play("replay", engine, sorted(orders, key=lambda order: order.at))
        tapes = engine.runner.tapes.values()
        replays = sum(tape.replays for tape in tapes)
        rig.counters.update(recorded_launches=len(tapes), replays=replays)
        # a graph holds a decoding step; a tape any
        least = REPLAYS // 2 if engine.on_gpu else REPLAYS
        enough = replays >= least or not engine.runner.graphs
        rig.check("replay", enough, f"{replays} replays of {len(tapes)} launches")


def error(rig: EngineHarness, quick: bool) -> None:
    """Some layers are written: the engine goes on, nothing is lost, everybody has its bits."""
    decoder = rig.oracle.encoder is None
    pairs = ((19, PENALISED), (26, CUT), (12, THREE), (21, PLAIN))
    orders = [Order(words(n, 30 + n), p, at=2 * i) for i, (n, p) in enumerate(pairs)]
    orders += [Order(words(23, 31), SCORED, at=3)] if decoder else []
    moments = [(0, 5), (1, 2, 3, 17), (8,), (11, 12, 25), tuple(range(1, 60, 4))]
    for calls in moments[:2] if quick else moments:
        engine = rig.engine(page_size=4, chunked_prefill_size=PAGE + 3 if decoder else 64)
        engine.runner.backend = failing(engine.runner.backend, calls)
        jobs = rig.play("error", engine, orders)
        taken = f"{len(jobs)} of {len(orders)} requests were taken in"
        rig.check("error", len(jobs) == len(orders), taken)
        rig.note("error", [f"request {i} never ended" for i, j in enumerate(jobs) if not j.done])


def failing(backend: Backend, calls: Collection[int]) -> Backend:
    """A backend that raises at the given calls of `attend`, and is what it was otherwise."""
    made, number = copy(backend), count()

    def attend(*args: Any) -> Any:
        if (call := next(number)) in calls:
            raise Injected(f"on purpose, at call {call}")
        return backend.attend(*args)

    made.attend = attend  # type: ignore[assignment,method-assign]
    return made
