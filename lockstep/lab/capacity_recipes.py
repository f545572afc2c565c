"""The recipes of what is exactly full: an arena, a bucket, a context, a cache; and of experts with
equal scores.

At its capacity a thing works, one beyond it says so with both numbers, and one below is nothing
special. What is right is counted here by plain arithmetic. Called by the engine's cells; knows no
story.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lockstep.lab.engine_harness import EngineHarness, InstrumentedEngine, engine_recipe, one_model
from lockstep.lab.recompute import Order
from lockstep.lab.tiny import CONTEXT, LLAMA, QWEN3, VOCAB
from lockstep.ops import Routing
from lockstep.plan.bucket import Buckets
from lockstep.plan.build import Work, build
from lockstep.run.arena import Arena
from lockstep.run.step import layout_of
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import ScheduledStep
from lockstep.types import AttnSpec, GroupSpec, Layout, RuleError

SIZES = (2, 5, 9)
ORDER = Order(
    tuple(range(3, 24)), SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, ignore_eos=True)
)
EXPERTS = (4, 16, 17, 24, 64)  # up to 16 torch's unstable sorts happen to be stable


@engine_recipe(
    "capacity",
    *("full_arenas", "full_buckets", "full_contexts", "full_caches"),
    applies_to=lambda tiny: tiny is LLAMA or tiny is QWEN3,  # all keys kept, and some dropped
)
def capacity(rig: EngineHarness, quick: bool) -> None:
    """Arenas, buckets, contexts and caches that are exactly full.

    And others that just do not suffice.
    """
    arena(rig)
    buckets(rig)
    context(rig)
    cache(rig)


def expect(rig: EngineHarness, what: str, said: str, rule: str, counter: str) -> None:
    """What suffices says nothing; what does not suffice says so by its rule."""
    fine = said.startswith(f"RuleError: {rule}") if rule else not said
    rig.check("capacity", fine, f"{what}: {said or 'no error'}")
    rig.counters[counter] += 1


def image_len(engine: InstrumentedEngine, step: ScheduledStep) -> int:
    """Numbers of a step's image."""
    return layout_of(engine._plan(step), engine.parts.backend).length


def arena(rig: EngineHarness) -> None:
    """The same request with an arena as large as its largest plan, and with one that lacks a
    number."""
    lens: list[int] = []
    roomy = rig.engine()
    roomy.watchers.append(lambda engine, step: lens.append(image_len(engine, step)))
    rig.play("capacity", roomy, [ORDER])
    most = max(lens, default=0)
    for lacking in (0, 1):
        engine = rig.engine()
        engine.runner.arena = Arena(most - lacking, torch.device("cpu"))
        rule = f"a step's image has at most {most - 1} numbers; got {most}." if lacking else ""
        what = f"an arena of {most - lacking} for {most} numbers"
        expect(rig, what, outcome(engine), rule, "full_arenas")


def context(rig: EngineHarness) -> None:
    """Prompt and new tokens that fill the context to its last position, and one more of either."""
    new = ORDER.params.max_tokens or 0
    for over in (0, 1):
        order = replace(ORDER, prompt=words(CONTEXT - new + over))
        if not over:
            rig.play("capacity", rig.engine(), [order])
        rule = f"prompt and new tokens fit into the context of {CONTEXT}; got "
        rule = f"{rule}{CONTEXT - new + 1} + {new}." if over else ""
        what = f"{len(order.prompt)} + {new} tokens"
        expect(rig, what, outcome(rig.engine(), order), rule, "full_contexts")


def cache(rig: EngineHarness) -> None:
    """A cache with just the pages that a request's keys need, and one with a page less. Its last
    token needs none."""
    keys, size = len(ORDER.prompt) + (ORDER.params.max_tokens or 0) - 1, 4
    for lacking in (0, 1):
        tokens = (-(-keys // size) - lacking) * size
        engine = rig.engine(max_total_tokens=tokens, page_size=size, max_running_requests=1)
        rule = "a request fits into the cache alone" if lacking else ""
        what = f"a cache of {tokens} for {keys} keys"
        expect(rig, what, outcome(engine), rule, "full_caches")


def words(count: int) -> tuple[int, ...]:
    """A prompt of so many tokens."""
    return tuple(3 + (7 * i + i * i) % (VOCAB - 3) for i in range(count))


def outcome(engine: InstrumentedEngine, order: Order = ORDER) -> str:
    """What running an order raises, or nothing."""
    try:
        engine.add(order.prompt, order.params)
        engine.finish()
    except Exception as error:  # an error of another kind than the rule's is what is looked for
        return f"{type(error).__name__}: {error}"
    return ""


def buckets(rig: EngineHarness) -> None:
    """Every count from 1 to one beyond the largest bucket, of requests and of rows."""
    kinds: tuple[tuple[str, Callable[[int], tuple[int, ...]]], ...] = (
        ("requests", lambda n: (1,) * n),
        ("tokens", lambda n: (n - 1, 1)),
    )
    for what, lengths in kinds:
        for n in range(3, SIZES[-1] + 2):
            have = padded(what, lengths(n))
            want = next((str(size) for size in SIZES if size >= n), "")
            full = f"a step has at most {SIZES[-1]} {what}; got {n}. Schedule less, or allow a "
            want = want or f"{full}larger bucket."
            held = f"buckets of {SIZES}, at and beyond"
            rig.check("capacity", have == want, f"{n} {what}: {have}, not {want}", held)
            rig.counters["full_buckets"] += n in SIZES


def padded(what: str, lengths: tuple[int, ...]) -> str:
    """How many requests or tokens a step of requests of these lengths is padded to, or why it is
    not."""
    spec = GroupSpec(Layout.FRESH, 1, 1, 8, 8, (AttnSpec(scale=1.0),))
    plan = build([spec], [Work(cached_len=0, new_len=n, pages=(None,)) for n in lengths])
    try:
        return str(getattr(Buckets(SIZES).fit(plan), what))
    except RuleError as error:
        return str(error)


@engine_recipe("experts", "tied_rows", applies_to=one_model)
def experts(rig: EngineHarness, quick: bool) -> None:
    """The choice of experts: ties.

    Routers of every kind, with scores that are often equal, against a sort by score and id.
    """
    gen = torch.Generator().manual_seed(5)
    for count in EXPERTS:
        logits = torch.randint(0, 4, (40, count), generator=gen).float()
        ranked = [sorted(range(count), key=lambda e: (-row[e], e))[:3] for row in logits.tolist()]
        for score in ("softmax", "sigmoid", "chosen"):
            routing = Routing(k=3, experts=count, score=score)
            ids = rig.device.ops.route(logits.to(rig.device.place), routing, None).ids
            wrong = sum(a != b for a, b in zip(ids.tolist(), ranked, strict=True))
            fault = f"{count} experts by {score}: {wrong} rows"
            rig.check("ties", not wrong, fault, "equal experts by the smaller id")
            rig.counters["tied_rows"] += sum(len(set(row)) < count for row in logits.tolist())


RECIPES = (capacity, experts)
