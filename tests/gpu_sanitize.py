"""Every kernel of the GPU once or twice, on small shapes, to be watched by compute-sanitizer.

There is one engine per model, for dense heads of 64 and 128, a latent cache, experts, sinks and
windows: prompts on both sides of a tile, some decoded tokens, a fork, log-probabilities, cuts and
penalties. There is no certificate and no comparison of GEMMs at load; both launch thousands of
kernels.

`--control` launches a kernel of two groups of warps that uses no shared memory of its own: what a
tool reports there concerns how Triton hands arguments over. racecheck counts how often each thread
has met others at a barrier, and takes a later read by a thread that has met fewer times for a race.
So it reports the word through which Triton hands over as soon as the kernel's own warps have a
barrier of their own, before (`before`) or beside the other group (`default`); not if only the other
group has one (`worker`) or neither has (`plain`). `--judge` prints what a report contains besides
that word.

usage: compute-sanitizer --tool racecheck --kernel-name kns=_kernel \\
           python tests/gpu_sanitize.py [--models NAME,NAME] [--graphs] [--control WHERE]
       python tests/gpu_sanitize.py --judge REPORT
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from gpu_engine_cells import save
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lockstep.attention.select import select
from lockstep.config import EngineConfig
from lockstep.kernels.cuda import ops
from lockstep.kernels.triton import launch
from lockstep.llm.engine import Engine, Parts
from lockstep.models import loader
from lockstep.sample.params import SamplingParams

PLAIN = SamplingParams(max_tokens=3, temperature=0.8, seed=1, logprobs=2, ignore_eos=True)
KINDS = (
    PLAIN,
    replace(PLAIN, top_k=5, top_p=0.9),
    replace(PLAIN, temperature=0.0, frequency_penalty=0.5),
    replace(PLAIN, n=2),
    replace(PLAIN, prompt_logprobs=1),
)
BARRIERS = ("plain", "before", "default", "worker")  # which group has its own barriers


@gluon.jit
def summed(x, turns):
    """Sums with the four warps of a group, which meet at a barrier of their own."""
    for _ in range(0, turns):
        x = gl.sum(x + gl.arange(0, 512, layout=gl.BlockedLayout([1], [32], [4], [0])), 0)
    return x


@gluon.jit
def first(out, a, b, turns, SUMS: gl.constexpr):
    if SUMS:
        a = summed(a, turns)
    gl.store(out + gl.program_id(0), a + b)


@gluon.jit
def second(out, a, b, turns, SUMS: gl.constexpr):
    if SUMS:
        a = summed(a, turns)
    gl.store(out + 8 + gl.program_id(0), a - b)


@gluon.jit
def control_kernel(out, given, turns, WHERE: gl.constexpr):
    a, b = gl.load(given + gl.program_id(0)), gl.load(given)
    if WHERE == 1:
        for _ in range(0, turns):
            gl.thread_barrier()
    gl.warp_specialize(
        [(first, (out, a, b, turns, WHERE == 2)), (second, (out, a, b, turns, WHERE == 3))],
        [4], [40],
    )  # fmt: skip


def control(where: str) -> None:
    """Launches two groups of warps that each write a number, with arguments handed over as usual.
    Except for `plain`, one of them has barriers of its own, as a reduction has; for `before`, the
    kernel's warps have them before there are two groups."""
    out = torch.zeros(16, dtype=torch.int32, device="cuda")
    given = torch.arange(3, 11, dtype=torch.int32, device="cuda")
    for _ in range(4):
        control_kernel[(8,)](out, given, 20, WHERE=BARRIERS.index(where), num_warps=4)
    print(f"control: {out.tolist()}", file=sys.stderr, flush=True)


def unexpected_places(report: str) -> list[str]:
    """Returns the places of a report other than those where a kernel begins or hands over."""
    here, found = Path(__file__).parent, list[str]()
    folders = (here, here.parent / "lockstep" / "kernels" / "triton")
    for name, line in re.findall(r"in (\w+\.py):(\d+)", report):
        path = next(each / name for each in folders if (each / name).exists())
        text = path.read_text("utf-8").splitlines()[int(line) - 1]
        if not re.match(r"def \w+_kernel\(|    gl\.warp_specialize\(", text):
            found.append(f"{name}:{line} {text.strip()}")
    return found


def engine_of(name: str, graphs: bool) -> Engine:
    """Returns an engine without certificate and without comparison of GEMMs."""
    with TemporaryDirectory() as folder:
        save(name, Path(folder))
        config = EngineConfig(
            model=folder,
            device="cuda",
            load_format="dummy",
            max_total_tokens=2048,
            max_running_requests=4,
            chunked_prefill_size=200,
            context_length=1024,
            graphs=graphs,
        ).settled("bfloat16")
        loaded = loader.load(folder, EngineConfig(device="cuda", load_format="dummy"))
    groups = loaded.model.groups(config.page_size, config.kv_cache_dtype)
    backend, reason = select(None, groups, "cuda", "bfloat16")
    parts = Parts(loaded.model, loaded.info, None, backend, reason, "none")
    return Engine(config, parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="qwen3,llama,deepseek_v3,gpt_oss")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--control", choices=BARRIERS)
    parser.add_argument("--judge", type=Path)
    args = parser.parse_args()
    if args.judge:
        report = args.judge.read_text("utf-8")
        places = "\n".join(sorted({*unexpected_places(report)})) or "nothing besides the hand-over"
        return print(f"{args.judge.name}: {report.count('Race reported')} hazards, {places}")
    if args.control:
        return control(args.control)
    launch.PREFILL_ITEMS = 1  # short prompts reach the prefill kernel
    ops.GRID = (1, 16)  # row counts whose GEMMs are compared at load
    for name in args.models.split(","):
        begin, rng = time.time(), np.random.default_rng(3)
        engine = engine_of(name, args.graphs)
        jobs = [
            engine.add(rng.integers(0, engine.info.vocab_size, n).tolist(), params)
            for n, params in zip((130, 5, 600, 64, 20), KINDS, strict=True)
        ]
        while engine.busy:
            engine.step()
        tokens = [job.output("").token_ids for job in jobs]
        print(f"{name}: {tokens[0]} ({time.time() - begin:.1f} s)", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
