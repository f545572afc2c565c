"""Speculation on one GPU against plain decoding, in the same run. Run it on the card.

The shape of Qwen3-8B with random weights, and an EAGLE-3 head of that shape (32,000 of its tokens),
also random, which runs for its cost: its guesses are replaced by those of an oracle, the recorded
plain continuation with errors by seed, so that a draft of depth 3 yields 3.0 tokens per verify.
Everything else is the engine's own: graphs, waits, its choice of depth, the acceptance rule. The
draft that always errs is the same with no guess right.

Requests have prompts of 512 random ids, temperature 0.6. Both engines decode them alternately.
Timed are the tokens after each request's first `skip`, while all requests run. The answers are
compared, tokens and bits of log-probabilities. Beside each ratio: tokens per verify, the share of
guesses accepted, launches that were replayed, and where the time goes: milliseconds of the device
per replayed step of each kind (a chain includes its extend), and of the host per round.

usage: PYTHONPATH=. python bench/gpu/speculative_h200.py [--batches 1,64,256] [--out F]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_h200 import write_config

from lockstep.config import EngineConfig
from lockstep.lab.oracle_draft import OPTIONS, RIGHT, Oracle, random_head
from lockstep.llm.engine import Engine, load
from lockstep.llm.generation import Generation
from lockstep.sample.params import SamplingParams

PROMPT, NEW, SKIP, WINDOW, FIRST = 512, 320, 16, 192, 64
MUST = {1: 2.0, 64: 1.4, 256: 0.97}
ERRS_MUST = 0.95


def config_of(folder: str, batch: int) -> EngineConfig:
    write_config("8b", folder)
    return EngineConfig(
        model=folder,
        device="cuda",
        load_format="dummy",
        max_running_requests=batch,
        chunked_prefill_size=16384,
        context_length=1024,
        max_total_tokens=batch * 1024,
        disable_radix_cache=True,
    )


def requests_of(batch: int, new: int = NEW) -> list[tuple[str, list[int], SamplingParams]]:
    rng = random.Random(batch)
    wish = {"max_tokens": new, "temperature": 0.6, "logprobs": 0, "ignore_eos": True}
    return [
        (f"#{i}", [rng.randrange(151936) for _ in range(PROMPT)], SamplingParams(seed=i, **wish))
        for i in range(batch)
    ]


def begun(engine: Engine, batch: int, skip: int) -> list[Generation]:
    """Adds all requests and steps until each has `skip` tokens."""
    jobs = [engine.add(ids, how, request_id=name) for name, ids, how in requests_of(batch)]
    while min(len(job.completions[0].token_ids) for job in jobs) < skip:
        engine.step()
    torch.cuda.synchronize()
    return jobs


def made(jobs: list[Generation]) -> int:
    return sum(len(job.completions[0].token_ids) for job in jobs)


def timed(engine: Engine, batch: int, skip: int, phases: Any = nullcontext) -> float:
    """Returns milliseconds per token of the batch while all requests run."""
    jobs = begun(engine, batch, skip)
    with phases():
        begin, had = time.perf_counter(), made(jobs)
        while made(jobs) < had + WINDOW * batch and len(engine.generations) == batch:
            engine.step()
        torch.cuda.synchronize()
        ms = (time.perf_counter() - begin) * 1e3 / ((made(jobs) - had) / batch)
    for job in jobs:
        engine.abort(job)
    return ms


def whole(engine: Engine, batch: int) -> dict[str, tuple[Any, ...]]:
    """Returns all answers, computed to their ends."""
    jobs = begun(engine, batch, 1)
    while engine.busy:
        engine.step()
    outs = {job.request.spec.request_id: job.output("") for job in jobs}
    return {n: (o.token_ids, o.logprobs.tobytes(), o.speculated) for n, o in outs.items()}


class Phases:
    """The device's time in replayed steps of each kind, by events, and the host's in the parts of a
    round. A context manager, which returns itself when called."""

    def __init__(self, engine: Engine) -> None:
        self.marks: list[tuple[str, Any, Any]] = []
        self.host: dict[str, float] = defaultdict(float)
        self.engine, self.recorded = engine, engine.runner._replay_or_record
        self.clocked = {
            "propose": (engine.speculation, "propose"),
            "launch": (engine, "_launch"),
            "prepare": (engine.speculation, "launched"),
            "settle": (engine, "_settle"),
            "settled": (engine.speculation, "settled"),
            "accept": (engine, "_result"),
            "write": (engine, "_write"),
            "schedule": (engine.scheduler, "schedule"),
        }
        self.methods = {n: getattr(o, m) for n, (o, m) in self.clocked.items()}
        self.wait = torch.cuda.Event.synchronize

    def __call__(self) -> Phases:
        return self

    def __enter__(self) -> Phases:
        def recorded(signature: Any, launch: Any) -> Any:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = self.recorded(signature, launch)
            end.record()
            self.marks.append((signature.step_name, begin, end))
            return out

        def clocked(name: str, method: Any) -> Any:
            def call(*given: Any, **named: Any) -> Any:
                begin = time.perf_counter()
                out = method(*given, **named)
                self.host[name] += time.perf_counter() - begin
                return out

            return call

        self.engine.runner._replay_or_record = recorded
        for name, (owner, method) in self.clocked.items():
            setattr(owner, method, clocked(name, self.methods[name]))
        torch.cuda.Event.synchronize = clocked("wait", self.wait)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.runner._replay_or_record = self.recorded
        for name, (owner, method) in self.clocked.items():
            setattr(owner, method, self.methods[name])
        torch.cuda.Event.synchronize = self.wait

    def told(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        device: dict[str, float] = defaultdict(float)
        count: dict[str, int] = defaultdict(int)
        for name, begin, end in self.marks:
            device[name] += begin.elapsed_time(end)
            count[name] += 1
        rounds = count["verify"] + count["generate"]
        return {
            "steps": dict(count),
            "device_ms_per_step": {n: round(ms / count[n], 3) for n, ms in device.items()},
            "host_ms_per_round": {n: round(s * 1e3 / rounds, 3) for n, s in self.host.items()},
        }


def measure(
    name: str, batch: int, plain: Engine, engine: Engine, want: Any, right: float, repeat: int
) -> dict[str, Any]:
    """Measures one row of the table."""
    errs = right == 0.0
    draft = engine.speculation.draft
    answers = {n: each[0] for n, each in want.items()}
    engine.speculation.draft = Oracle(draft, answers, right)
    got = whole(engine, batch)
    differ = sum(got[n][:2] != want[n][:2] for n in want)
    before = engine.runner.replays.copy()
    skip, ways = FIRST if errs else SKIP, {"plain": plain, "speculative": engine}
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeat):
        for way, each in ways.items():
            taken[way].append(timed(each, batch, skip))
    replays = engine.runner.replays - before
    phases = Phases(engine)
    timed(engine, batch, skip, phases)
    deepest = {} if errs else at_depth(engine, batch, skip)
    engine.speculation.draft = draft
    drafted, accepted, verifies = map(sum, zip(*(each[2] for each in got.values()), strict=True))
    ratio = statistics.median(taken["plain"]) / statistics.median(taken["speculative"])
    must = ERRS_MUST if errs else MUST[batch]
    row = {
        **{"case": name, "batch": batch, "ratio": round(ratio, 3), "must": must},
        **{"met": ratio >= must, "differing_answers": differ, "ms_per_token": dict(taken)},
        **{"drafted": drafted, "accepted": accepted, "verifies": verifies},
        "tokens_per_verify": round(1 + accepted / max(verifies, 1), 3),
        **{"replays": dict(replays), **phases.told()},
        "always as deep as can be": deepest,
    }
    print(json.dumps(row), flush=True)
    return row


def at_depth(engine: Engine, batch: int, skip: int) -> dict[str, Any]:
    """Measures the same with every draft at full depth."""
    adaptive, engine.speculation.adaptive = engine.speculation.adaptive, False
    phases = Phases(engine)
    ms = timed(engine, batch, skip, phases)
    engine.speculation.adaptive = adaptive
    return {"ms_per_token": ms, **phases.told()}


def profiled(engine: Engine, batch: int) -> None:
    """Prints where the host's time goes."""
    import cProfile
    import io
    import pstats

    jobs, host = begun(engine, batch, SKIP), cProfile.Profile()
    host.enable()
    for _ in range(40):
        engine.step()
    host.disable()
    for job in jobs:
        engine.abort(job)
    for order in ("tottime", "cumulative"):
        text = io.StringIO()
        pstats.Stats(host, stream=text).sort_stats(order).print_stats(45)
        print(text.getvalue()[:9000], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--fixed", action="store_true", help="always as deep as can be")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    args = parser.parse_args()
    begin, rows, parts = time.perf_counter(), list[dict[str, Any]](), None
    for batch in map(int, args.batches.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(folder, batch)
            parts = parts or replace(load(config), draft=random_head)
            plain, engine = (Engine(each, parts) for each in (config, replace(config, **OPTIONS)))
        print(f"at {time.perf_counter() - begin:.0f} s: batch {batch}", flush=True)
        engine.speculation.adaptive = not args.fixed
        want = whole(plain, batch)
        told = (plain, engine, want)
        rows.append(measure(f"oracle, batch {batch}", batch, *told, RIGHT, args.repeat))
        if batch < 256:
            rows.append(measure(f"always wrong, batch {batch}", batch, *told, 0.0, args.repeat))
        if args.profile:
            draft, answers = engine.speculation.draft, {n: each[0] for n, each in want.items()}
            engine.speculation.draft = Oracle(draft, answers, RIGHT)
            engine.speculation.adaptive = False
            profiled(engine, batch)
        print(f"at {time.perf_counter() - begin:.0f} s", flush=True)
        del plain, engine, told
        gc.collect()
        torch.cuda.empty_cache()
        document = {"command": "lockstep bench speculative --device cuda", "rows": rows}
        document["card"] = torch.cuda.get_device_name()
        Path(args.out, "speculative-h200.json").write_text(json.dumps(document, indent=1))
    return 0 if all(row["met"] and not row["differing_answers"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
