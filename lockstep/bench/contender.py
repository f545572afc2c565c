"""One version of Lockstep as a process that is told what to measure, a JSON line at a time.

`bench compare` starts it twice, with two source trees on the path, and lets the two take turns. So
it is written against what both trees have: the package it imports may be older than this file. A
request is `{"case": name, "seed": n}` and the answer `{"seconds": x}`; a case is prepared when it
is first asked for. Run as a script; knows no clock but its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.bench.work import Ours

BLOCK_S = 0.15  # of calls of microseconds per turn
LEAST_CALLS = 3
Measure = Callable[[int], float]


def main() -> int:
    """Answers until stdin ends. An error is an answer too."""
    folders = json.loads(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, float | str]
        try:
            answer = {"seconds": prepare(request["case"], folders)(request["seed"])}
        except Exception as error:  # shown by the other side, which then drops the case
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    return 0


_prepared: dict[str, Measure] = {}


def prepare(case: str, folders: Mapping[str, str]) -> Measure:
    """What measures a case; only the last case of the kernels is kept, models stay loaded."""
    if case not in _prepared:
        kind, _, rest = case.partition(" ")
        for old in [name for name in _prepared if name.startswith("attention ")]:
            del _prepared[old]
        if kind == "attention":
            _prepared[case] = attention(rest)
        elif kind == "scheduler":
            _prepared[case] = scheduler()
        elif kind in ("start", "load"):
            _prepared[case] = fresh_process(kind, folders[rest])
        else:
            _prepared[case] = engine(kind, folders[rest])
    return _prepared[case]


def attention(name: str) -> Measure:
    """The median of one call of the kernel."""
    from lockstep.bench.attention import cases, contenders

    case = next(c for c in cases(False) if c.name == name)
    call = contenders(case)["lockstep"]

    def measure(seed: int) -> float:
        call()
        times: list[float] = []
        end = perf_counter() + BLOCK_S
        while perf_counter() < end or len(times) < LEAST_CALLS:
            begin = perf_counter()
            call()
            times.append(perf_counter() - begin)
        return median(times)

    return measure


def scheduler() -> Measure:
    """Schedule, build, check and commit of a step: the slowest of four kinds of cache."""
    from lockstep.bench.rig import FULL
    from lockstep.bench.scheduler import measure

    return lambda seed: max(parts["sum"] for parts in measure(FULL.load).values()) / 1e6


def engine(kind: str, folder: str) -> Measure:
    """Decode, mixed or prefix, as `bench engine` measures them; seconds, so that less is better."""
    from lockstep.bench.rig import FULL
    from lockstep.bench.work import Work, mixed_lens, prompts

    ours = load(folder)

    def decode(seed: int) -> float:
        prompt_len, new = FULL.decode
        played = ours.play(Work(prompts((prompt_len,), ours.vocab_size, seed), (new,)))
        return (played.seconds - played.first_s) / (new - 1)

    def mixed(seed: int) -> float:
        lens, news = mixed_lens(FULL.requests, FULL.ins, FULL.outs)
        return ours.play(Work(prompts(lens, ours.vocab_size, seed), news)).seconds

    def prefix(seed: int) -> float:
        cached, new = FULL.prefix
        work = Work(prompts((cached + new,), ours.vocab_size, seed), (1,))
        ours.play(Work((work.prompts[0][:cached],), (1,)))
        return ours.play(work).first_s

    def prefill(seed: int) -> float:
        return ours.play(Work(prompts((FULL.prefix[0],), ours.vocab_size, seed), (1,))).first_s

    kinds: dict[str, Measure] = {
        "decode": decode,
        "mixed": mixed,
        "prefix": prefix,
        "prefill": prefill,
    }
    return kinds[kind]


@cache
def load(folder: str) -> Ours:
    """The engine of a folder, as a user has it."""
    from lockstep.bench.work import Ours

    return Ours(folder)


def fresh_process(kind: str, folder: str) -> Measure:
    """Loading a model, or the first byte of `lockstep generate`, in a process of its own."""
    program = (
        "import sys, time; from lockstep import LLM; import lockstep.llm.engine; import torch;"
        "begin = time.perf_counter(); LLM(sys.argv[1], max_total_tokens=4096);"
        "print(time.perf_counter() - begin)"
    )
    words = ["-m", "lockstep.cli", "generate", "def f(x):", "--max-tokens", "1", "--model", folder]

    def loading(seed: int) -> float:
        command = [sys.executable, "-c", program, folder]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def first_byte(seed: int) -> float:
        begin = perf_counter()
        with subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            return perf_counter() - begin

    return loading if kind == "load" else first_byte


if __name__ == "__main__":
    sys.exit(main())
