"""`lockstep kernels`: compiles every variant of `kernels.triton.variants` for sm_90, without a GPU,
and checks its registers and shared memory. binaries.toml has the limits."""

import json
import sys
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import triton

from lockstep import outfile
from lockstep.kernels.triton.variants import inspect, variants
from lockstep.lab import table
from lockstep.types import RuleError

TITLES = ("registers", "stack_bytes", "loop_spills", "shared_bytes", "wgmma", "mma")
LIMITS = table("binaries.toml")


def run(args: Namespace) -> int:
    """Lists variants, or compiles them and prints their costs."""
    only = args.only or [""]
    chosen = {n: v for n, v in variants().items() if any(text in n for text in only)}
    if not chosen:
        rule = "--only names kernel variants"
        raise RuleError(rule, repr(args.only), "See `lockstep kernels --list`")
    if args.list or args.compile is None:
        outfile.write(args.json or "-", json.dumps([*chosen]) if args.json else "\n".join(chosen))
        return 0
    say = partial(print, flush=True, file=sys.stderr if args.json == "-" else sys.stdout)
    compiler = f"Triton {triton.__version__}, {args.jobs} processes"
    say(f"{len(chosen)} variants for {args.compile}, {compiler}")
    say(f"{'variant':<40}", *(f"{title:>12}" for title in TITLES))
    reports, faults, begin = [], 0, time.perf_counter()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for name, costs in zip(chosen, pool.map(inspect, chosen.values()), strict=True):
            wrong = fault(name, costs)
            say(f"{name:<40}", *(f"{costs[title]:>12}" for title in TITLES), wrong)
            reports.append({"name": name, **costs})
            faults += wrong != ""
    say(f"{len(reports)} variants in {time.perf_counter() - begin:.0f} s, {faults} with a fault")
    if args.json:
        outfile.write(args.json, json.dumps(reports, indent=1))
    return min(faults, 1)


def fault(name: str, costs: dict[str, int]) -> str:
    """Returns what is wrong with a variant, or ""."""
    spills, most = LIMITS["loop_spills"].items(), LIMITS["shared_bytes"]
    if costs["loop_spills"] > next((n for begin, n in spills if name.startswith(begin)), 0):
        return f"{costs['loop_spills']} accesses to spilled registers in a hot loop"
    if costs["shared_bytes"] > most:
        return f"{costs['shared_bytes']} bytes of shared memory; at most {most}"
    return ""
