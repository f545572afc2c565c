"""The engine on one GPU: output tokens per second of 256 requests, and decode steps. Run it on the
card.

Shapes of Qwen3-0.6B and 8B with random weights. The requests are those that mini-sglang's offline
benchmark draws: Python's random.seed(0), 256 prompts of randint(100, 1024) ids from randint(0,
10000), then 256 lengths of answers, randint(100, 1024); temperature 0.6, nothing cached. A shorter
round of other prompts runs first, so that the graphs of a measured round exist; the number captured
nonetheless is reported. Idle time is the device's between the last kernel of a step and the first
of the next, by events. Beside every figure is its floor by bandwidth, 4.25 TB/s.

`--gemm free` measures the cost of the order of sums: every GEMM is cuBLAS's own choice for its
rows, and nothing is proven about it.

usage: PYTHONPATH=. python bench/gpu/engine_h200.py [--model 0.6b,8b] [--what run,steps]
           [--gemm free]
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
from pathlib import Path
from typing import Any

import torch

from lockstep.attention.select import select
from lockstep.config import EngineConfig
from lockstep.kernels.cuda import ops
from lockstep.kernels.triton.gemm_choice import Call, torch_gemm
from lockstep.llm.engine import Engine, Parts, load
from lockstep.models import loader
from lockstep.run.runner import Runner
from lockstep.sample.params import SamplingParams

BYTES_PER_S = 4.25e12
COMMON = {
    **{"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "bos_token_id": None},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "eos_token_id": None},
    **{"max_position_embeddings": 40960, "is_encoder_decoder": False, "sliding_window": None},
    "lockstep_states_every_field": True,
}
MODELS = {
    "0.6b": {
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "tie_word_embeddings": True},
    },
    "8b": {
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "tie_word_embeddings": False},
    },
}
MUST = {"0.6b": 20938, "8b": 9118}
STEPS = {"0.6b": ((1, 1024),), "8b": ((1, 1024), (64, 2048))}


def weight_bytes(config: dict[str, Any]) -> int:
    """Returns the bytes that a decode step reads: all weights but the embedding's rows."""
    h, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    layer = h * (heads + 2 * kv) * d + heads * d * h + 3 * h * inner
    return 2 * (config["num_hidden_layers"] * layer + config["vocab_size"] * h)


def key_bytes(config: dict[str, Any]) -> int:
    """Returns the bytes of one token in the cache."""
    return 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def write_config(name: str, folder: str) -> None:
    """Writes a model's shape as a folder for which `load_format="dummy"` draws weights."""
    config = COMMON | MODELS[name]
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    Path(folder, "config.json").write_text(json.dumps(config))


def engine_config(name: str, folder: str, args: argparse.Namespace) -> EngineConfig:
    write_config(name, folder)
    return EngineConfig(
        model=folder,
        device="cuda",
        load_format="dummy",
        max_running_requests=256,
        chunked_prefill_size=args.chunk,
        context_length=2560,
    )


def workload(seed: int, shorter: int = 1) -> list[tuple[list[int], int]]:
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return [(ids, rng.randint(100, 1024) // shorter) for ids in prompts]


def fresh(config: EngineConfig, parts: Parts, overlap: bool | None = None) -> Engine:
    """Returns a new engine, after freeing the memory of the one before."""
    gc.collect()
    torch.cuda.empty_cache()
    return Engine(config, parts, overlap)


class Gaps:
    """The device's time between steps: events before and after every launch."""

    def __init__(self, runner: Runner) -> None:
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event, bool]] = []
        self.run, self.keep = runner.run, runner.keep

        def run(plan: Any, *given: Any) -> Any:
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
            out = self.run(plan, *given)
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self.marks.append((begin, end, plan.bucket.width == 1))
            return out

        runner.run = run

    def told(self) -> dict[str, float]:
        """Returns seconds of steps, and idle seconds between decode steps."""
        torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:])
        idle = [a[1].elapsed_time(b[0]) for a, b in pairs if a[2] and b[2]]
        decode = [a.elapsed_time(b) for a, b, one in self.marks if one]
        other = [a.elapsed_time(b) for a, b, one in self.marks if not one]
        return {
            "decode steps": len(decode),
            "decode_s": sum(decode) / 1e3,
            "other steps": len(other),
            "other_s": sum(other) / 1e3,
            "idle_s": sum(idle) / 1e3,
        }


def serve(engine: Engine, work: list[tuple[list[int], int]]) -> float:
    """Returns the seconds until all requests are done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for at, (ids, new) in enumerate(work):
        engine.add(ids, SamplingParams(max_tokens=new, temperature=0.6, seed=at, ignore_eos=True))
    while engine.busy:
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def run(name: str, parts: Parts, config: EngineConfig) -> dict[str, Any]:
    """Measures the 256 requests."""
    engine = fresh(config, parts)
    print(engine.startup_report, flush=True)
    warm = serve(engine, workload(1, 8))
    known, gaps = len(engine.runner.tapes), Gaps(engine.runner)
    work = workload(0)
    seconds = serve(engine, work)
    tokens = sum(new for _, new in work)
    found = {
        **{"seconds": seconds, "warm_seconds": warm, "output_tokens": tokens},
        **{"output_tokens_per_s": tokens / seconds, "must": MUST[name]},
        **{"graphs": len(engine.runner.tapes), "captured in between": 0},
        **gaps.told(),
    }
    found["captured in between"] = len(engine.runner.tapes) - known
    found["idle_share"] = found["idle_s"] / max(found["decode_s"] + found["idle_s"], 1e-9)
    return found


def step(
    name: str, parts: Parts, config: EngineConfig, requests: int, keys: int
) -> dict[str, float]:
    """Measures a decode step of `requests` with `keys` each: the engine's, its graph's."""
    engine = fresh(config, parts)
    rng = random.Random(5)
    for at in range(requests):
        ids = [rng.randint(0, 10000) for _ in range(keys - 40)]
        engine.add(ids, SamplingParams(max_tokens=128, temperature=0.6, seed=at, ignore_eos=True))
    taken: list[float] = []
    while engine.busy:
        before = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - before)
        if len(taken) > 60 + requests * keys // config.chunked_prefill_size:
            break
    torch.cuda.synchronize()
    graph = max(engine.runner.tapes.values(), key=lambda graph: graph.replays)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(20):
        begin.record()
        graph._graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    print(kernels(graph._graph.replay, 5), flush=True)
    shape = COMMON | MODELS[name]
    floor = (weight_bytes(shape) + requests * keys * key_bytes(shape)) / BYTES_PER_S * 1e3
    device, whole = statistics.median(times), statistics.median(taken[-32:]) * 1e3
    return {
        **{"requests": requests, "keys": keys, "step_ms": whole, "graph_ms": device},
        **{"floor_ms": floor, "of floor": floor / whole, "graph of floor": floor / device},
    }


class FreeGemm(dict[int, Call]):
    """Torch's call for any number of rows, in any order of sums."""

    def get(self, rows: int, default: Any = None) -> Call:
        return torch_gemm


def load_free(config: EngineConfig) -> Parts:
    """Loads the model with such GEMMs and without a certificate: its rows depend on their batch."""
    ops.choose = lambda weight, library, grid: FreeGemm()
    drawn = EngineConfig(device="cuda", load_format="dummy")
    loaded = loader.load(config.model, drawn)
    settled = config.settled("bfloat16")
    groups = loaded.model.groups(settled.page_size, settled.kv_cache_dtype)
    backend, why = select(None, groups, "cuda", "bfloat16")
    return Parts(loaded.model, loaded.info, None, backend, why, "none")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="0.6b,8b")
    parser.add_argument("--what", default="steps,run")
    parser.add_argument("--chunk", type=int, default=16384)
    parser.add_argument("--gemm", choices=("canonical", "free"), default="canonical")
    parser.add_argument("--profile", action="store_true", help="kernels of decode steps by time")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    args = parser.parse_args()
    result: dict[str, Any] = {}
    for name in args.model.split(","):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            config = engine_config(name, folder, args)
            parts = load(config) if args.gemm == "canonical" else load_free(config)
        found = result[name] = {"load_s": time.perf_counter() - begin, "gemm": args.gemm}
        print(name, found, flush=True)
        if "steps" in args.what:
            found["steps"] = []
            for requests, keys in STEPS[name]:
                found["steps"].append(step(name, parts, config, requests, keys))
                print(name, json.dumps(found["steps"][-1]), flush=True)
        if "run" in args.what:
            found["run"] = run(name, parts, config)
            print(name, json.dumps(found["run"]), flush=True)
        if args.profile:
            profile(parts, config)
        del parts
        torch.cuda.empty_cache()
    Path(args.out, "engine-h200.json").write_text(json.dumps(result, indent=1))


def kernels(call: Any, steps: int) -> str:
    """Returns microseconds per step by kernel, and launches of each."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda each: -each.device_time_total)
    total = sum(each.device_time_total for each in rows) / steps
    lines = [
        f"{each.device_time_total / steps:9.1f} us {each.count / steps:7.1f} x  {each.key[:90]}"
        for each in rows[:22]
    ]
    return "\n".join([f"{total:9.1f} us a step in all", *lines])


def profile(parts: Parts, config: EngineConfig) -> None:
    """Prints where the time of decode steps goes, on the device and on the host."""
    import cProfile
    import io
    import pstats

    engine = fresh(config, parts)
    for at, (ids, new) in enumerate(workload(0)):
        engine.add(ids, SamplingParams(max_tokens=new, temperature=0.6, seed=at, ignore_eos=True))
    for _ in range(40):
        engine.step()
    host = cProfile.Profile()
    host.enable()
    for _ in range(30):
        engine.step()
    host.disable()
    text = io.StringIO()
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(40)
    print(kernels(engine.step, 10), text.getvalue()[:7000], flush=True)


if __name__ == "__main__":
    main()
