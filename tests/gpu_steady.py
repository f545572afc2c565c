"""A GPU at work for a long time: what is compiled, waited for and held after the warm-up. A
program.

An engine with graphs and overlap serves requests that arrive and end, for thousands of steps.
Counted after a warm-up of the same kind: kernels that Triton compiled, graphs captured, waits for
the device (one per step is right), implicit synchronisations in steps of decoding rows (none is
right), and bytes of GPU memory. Then the arena: an image staged for one step must not be
overwritten by the next one, although the GPU is far behind. Prints one JSON object.

usage: python tests/gpu_steady.py [--steps 10000] [--model qwen3]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import warnings
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import triton
from gpu_engine_cells import save

from lockstep.config import EngineConfig
from lockstep.llm.engine import Engine, load
from lockstep.run.step import Arena
from lockstep.sample.params import SamplingParams

RUNNING = 8
WARM_STEPS = 2500


class Traffic:
    """Adds requests of many lengths, each a function of its number."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.count = engine, 0

    def add_requests(self) -> None:
        """Adds requests, so that there are never fewer than RUNNING - 2."""
        while len(self.engine.generations) < RUNNING - 2 + self.count % 3:
            rng = random.Random(self.count % 97)
            prompt = [rng.randrange(self.engine.info.vocab_size) for _ in range(rng.randint(1, 90))]
            params = SamplingParams(
                max_tokens=rng.randint(20, 700),
                temperature=rng.choice((0.0, 0.7)),
                logprobs=rng.choice((None, None, 0)),
                seed=self.count,
                ignore_eos=True,
            )
            self.engine.add(prompt, params)
            self.count += 1


def steady(engine: Engine, steps: int) -> dict[str, Any]:
    """Runs this many steps after a warm-up. Returns what was counted."""
    counts: Counter[str] = Counter()
    traffic = Traffic(engine)
    for _ in range(WARM_STEPS):
        traffic.add_requests()
        engine.step()
    traffic.count = 0  # the same requests again
    synchronize, run = torch.cuda.Event.synchronize, engine.runner.run
    width: list[int] = []

    def counted(event: Any) -> None:
        counts["waits"] += 1
        synchronize(event)

    def noted(plan: Any, *given: Any) -> Any:
        width.append(plan.bucket.width)
        return run(plan, *given)

    def compiled(**_: Any) -> None:
        counts["compiled"] += 1

    torch.cuda.Event.synchronize = counted
    triton.knobs.runtime.jit_cache_hook = compiled
    engine.runner.run = noted
    torch.cuda.set_sync_debug_mode("warn")
    held, graphs = [torch.cuda.memory_allocated()], len(engine.runner.tapes)
    reserved, resident = torch.cuda.memory_reserved(), rss()
    try:
        for step in range(steps):
            traffic.add_requests()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                engine.step()
            kind = "decode" if width and width[-1] == 1 else "other"
            counts[f"{kind} steps"] += 1
            waited = [each for each in said if "synchroniz" in str(each.message)]
            counts[f"synchronising calls in {kind} steps"] += len(waited)
            counts.update(f"at {Path(e.filename).name}:{e.lineno}" for e in waited)
            if step % 500 == 499:
                held.append(torch.cuda.memory_allocated())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.Event.synchronize = synchronize
        triton.knobs.runtime.jit_cache_hook = None
    return {
        **{"steps": steps, "requests": traffic.count},
        **{"kernels compiled": counts.pop("compiled", 0), **counts},
        "graphs captured": len(engine.runner.tapes) - graphs,
        "bytes allocated, every 500 steps": held,
        "bytes reserved, before and after": [reserved, torch.cuda.memory_reserved()],
        "resident KB of the host, before and after": [resident, rss()],
    }


def rss() -> int:
    """Returns the peak resident memory of the process, in KB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def staging() -> str:
    """Stages images while the GPU sleeps. Returns "" if each arrives as it was written."""
    arena, seen = Arena(1 << 16, torch.device("cuda")), []
    torch.cuda._sleep(200_000_000)
    for value in range(1, 6):
        arena.host(1 << 16)[:] = value
        seen.append(arena.load(1 << 16).clone())
    wrong = [at for at, image in enumerate(seen, 1) if not bool((image == at).all())]
    return f"images {wrong} were written over before they were copied" if wrong else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--model", default="qwen3")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        save(args.model, Path(folder))
        config = EngineConfig(
            model=folder,
            device="cuda",
            load_format="dummy",
            max_total_tokens=16384,
            max_running_requests=RUNNING,
            context_length=1024,
        )
        engine = Engine(config, load(config))
    report = {"staging": staging(), **steady(engine, args.steps)}
    allocated = np.array(report["bytes allocated, every 500 steps"])
    report["flat"] = bool(allocated[-1] <= allocated[: len(allocated) // 2 + 1].max())
    print(json.dumps(report))


if __name__ == "__main__":
    main()
