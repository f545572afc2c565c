"""The recipe of recorded launches: engines whose steps are replayed answer with the bits of the
recomputation.

Batches grow and shrink within few and wide buckets, so that most steps are replays of a launch that
was recorded with other lengths, other slots and other pads; forks move keys, and pages change hands
and are poisoned in between. Called by `stories`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.lab.engine_harness import (
    EngineHarness,
    InstrumentedEngine,
    engine_recipe,
    every_model,
)
from lockstep.lab.recompute import Order
from lockstep.lab.tiny import words
from lockstep.sample.params import SamplingParams

PLAIN = SamplingParams(max_tokens=12, temperature=0.8, seed=5, logprobs=2, ignore_eos=True)
THREE = replace(PLAIN, n=3, seed=11, max_tokens=6)
# few and wide: a launch is recorded by one step and replayed by others that are fuller or emptier
GRIDS: dict[str, Any] = {
    "bucket_sizes": (8, 64),
    "request_bucket_sizes": (4, 17),
    "emit_bucket_sizes": (16,),
    "chunked_prefill_size": 64,
}
REPLAYS = 8  # of an engine, at least


@engine_recipe("engine-replay", "steps", "forked", "batched_steps", applies_to=every_model)
def replayed(rig: EngineHarness, quick: bool) -> None:
    """Launches that are recorded and replayed.

    Requests one below, at and above a page come one by one, fork, and leave again.
    """
    lengths = (3, 7, 8, 9, 15, 16, 17, 5)
    growing = [
        Order(words(n, i), replace(PLAIN, seed=i, max_tokens=4 + 3 * (i % 4)), at=i)
        for i, n in enumerate(lengths)
    ]
    # one after the other: a fork's launch is replayed with other moves, and with fewer (8, 8, 6, 4)
    forking = [
        Order(words(n, i), replace(THREE, seed=n), at=9 * i) for i, n in enumerate((12, 12, 11, 10))
    ]
    later = [replace(order, at=order.at + 10) for order in growing[:4]]
    play(rig, growing, page_size=4)
    play(rig, forking, page_size=8)
    if not quick:
        play(rig, [*forking, *later], page_size=8)
        play(rig, [*growing, *later], page_size=1)
        play(rig, [*forking, *growing], page_size=8, max_total_tokens=96)


def play(rig: EngineHarness, orders: list[Order], **options: Any) -> None:
    """One engine. A backend that cannot be recorded runs the same steps."""
    graphs = rig.parts.backend.caps.graphs
    engine = rig.engine(graphs=graphs, **GRIDS, **options)
    rig.play("replay", engine, sorted(orders, key=lambda order: order.at))
    count(rig, engine)


def count(rig: EngineHarness, engine: InstrumentedEngine) -> None:
    """Most steps were replays."""
    tapes = engine.runner.tapes.values()
    replays = sum(tape.replays for tape in tapes)
    rig.counters["recorded_launches"] += len(tapes)
    rig.counters["replays"] += replays
    few = engine.runner.graphs and replays < REPLAYS
    rig.note("replay", [f"{replays} replays of {len(tapes)} launches"] if few else [])
