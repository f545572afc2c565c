"""Measures of an engine, and a process that takes them, one JSON line at a time.

`bench engine` calls `Measures`. `bench compare` and `bench step` run this file as a script with one
source tree or another on the path: the package it imports may be older than this file. A request is
`{"case": name, "seed": n}`, the answer `{"seconds": x}` and further values.
"""

import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from lockstep.bench.work import Ours, Played, Work, mixed_lens, prompts

BLOCK_S = 0.15  # length of a block of microsecond calls
Answer = dict[str, Any]
Sizes = SimpleNamespace  # amounts to measure, explained in contender.toml

# read beside this file: the package on the path may be an older one
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FULL, QUICK = (Sizes(**TABLE["sizes"][name]) for name in ("full", "quick"))
PARTS: dict[str, list[str]] = TABLE["parts"]
NOT_HOST = ("model", "sample", "publish")  # a device's parts, and publishing, which needs no lock


@dataclass(frozen=True)
class Measures:
    """One contender's times, in seconds, for work that is a function of a seed."""

    play: Callable[[Work], Played]
    vocab_size: int
    sizes: Sizes

    def decode_work(self, seed: int) -> Work:
        return work(self.sizes.decode[:1], self.sizes.decode[1:], self.vocab_size, seed)

    def decode(self, seed: int) -> float:
        """Batch 1, greedy: seconds per token from the first to the last new token."""
        played = self.play(self.decode_work(seed))
        return (played.seconds - played.first_s) / float(self.sizes.decode[1] - 1)

    def mixed_work(self, seed: int) -> Work:
        lens, news = mixed_lens(self.sizes.requests, self.sizes.ins, self.sizes.outs)
        return work(lens, news, self.vocab_size, seed)

    def mixed(self, seed: int) -> float:
        return self.play(self.mixed_work(seed)).seconds

    def prefix(self, seed: int) -> float:
        """Seconds to the first token of a short prompt end after a cached prefix."""
        cached, new = self.sizes.prefix
        whole = work((cached + new,), (1,), self.vocab_size, 2 * seed + 1)
        self.play(Work((whole.prompts[0][:cached],), (1,)))
        played = self.play(whole)
        if played.cached != (cached,):
            raise RuntimeError(f"{played.cached[0]} of {cached} keys were in the prefix cache")
        return played.first_s

    def prefill(self, seed: int) -> float:
        """Seconds to the first token of such a prompt, uncached: it has seeds of its own."""
        prompt = work((sum(self.sizes.prefix),), (1,), self.vocab_size, 1_000_000 + seed)
        return self.play(prompt).first_s


def work(lens: Sequence[int], news: Sequence[int], vocab_size: int, seed: int) -> Work:
    return Work(prompts(lens, vocab_size, seed), tuple(news))


class HostTimes:
    """Where time goes, as in `Engine.step`: each part's, without that of the parts it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]  # stack: seconds in parts called by each active part

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Times the functions of PARTS inside the block, in every module that imported them."""
        with ExitStack() as stack:
            for part, names in PARTS.items():
                for home, attribute, old in (each for name in names for each in homes(name)):
                    stack.enter_context(patch.object(home, attribute, self.timed(part, old)))
            yield

    def step(self, step: Callable[[], object]) -> dict[str, float]:
        """Returns the seconds of one step by part; "other" is outside of all parts."""
        self.seconds = dict.fromkeys([*PARTS, "other"], 0.0)
        self.timed("other", step)()
        host = sum(s for part, s in self.seconds.items() if part not in NOT_HOST)
        return {**self.seconds, "host": host}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function wrapped so that its time counts for `part`."""

        def timed(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            begin = perf_counter()
            try:
                return function(*args, **options)
            finally:
                took = perf_counter() - begin
                self.seconds[part] = self.seconds.get(part, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        return timed


def homes(name: str) -> list[tuple[Any, str, Any]]:
    """Returns (owner, attribute, function) where a function is stored; [] in a tree without it."""
    where, _, path = name.partition(":")
    try:
        owner: Any = importlib.import_module(f"lockstep.{where}")
    except ModuleNotFoundError:
        return []
    *classes, attribute = path.split(".")
    for each in classes:
        owner = getattr(owner, each, None)
    old = vars(owner).get(attribute) if owner is not None else None
    modules = [module for n, module in list(sys.modules.items()) if n.startswith("lockstep.")]
    places = [owner] if classes else modules
    found = [(home, key) for home in places if old for key, v in vars(home).items() if v is old]
    return [(home, key, old) for home, key in found]


def host_times(ours: Ours, sizes: Sizes) -> Answer:
    """Returns medians and means by part of a decode step, in seconds; "host" is all that neither a
    device does nor publishing. Prompts differ only at their ends, so they are soon in the cache; a
    third of the requests is sampled."""
    from lockstep.sample.params import SamplingParams

    requests, keys, steps = sizes.host
    engine, times, slack = ours.crowd, HostTimes(), 4 + requests // 16
    common = prompts((keys - 20,), ours.vocab_size, 7)
    ours.prime(common)
    jobs = []
    for i, end in enumerate(prompts((16,) * requests, ours.vocab_size, 8)):
        sampled, most = float(i % 3 == 0), steps + slack + 8
        how = SamplingParams(max_tokens=most, temperature=sampled, ignore_eos=True, seed=i)
        jobs.append(engine.add((*common[0], *end), how))
    for _ in range(slack):
        engine.step()
    with times.watching():
        each = [times.step(engine.step) for _ in range(steps)]
    for job in jobs:
        engine.abort(job)
    parts = {part: [row[part] for row in each] for part in each[0]}
    return {
        "seconds": median(parts["host"]),
        "medians": {part: median(values) for part, values in parts.items()},
        "means": {part: fmean(values) for part, values in parts.items()},
    }


def main() -> None:
    """Answers requests until stdin ends. An error is an answer too."""
    folders = json.loads(sys.argv[1])
    for line in sys.stdin:
        try:
            answer = measure(**json.loads(line), folders=folders)
        except Exception as error:  # shown by the parent, which then drops the case
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


load = cache(Ours)


def measure(case: str, seed: int, folders: Mapping[str, str]) -> Answer:
    kind, _, rest = case.partition(" ")
    if kind == "step":
        return host_times(load(folders["builtin"]), FULL)
    if kind == "attention":
        return {"seconds": block_median(attention(rest), BLOCK_S)}
    if kind == "load":
        return {"seconds": load_s(folders[rest])}
    ours = load(folders[rest])
    return {"seconds": getattr(Measures(ours.play, ours.vocab_size, FULL), kind)(seed)}


@lru_cache(maxsize=1)
def attention(name: str) -> Callable[[], object]:
    """Returns a call of the kernel; keys and values of the last case only are kept."""
    from lockstep.bench.attention import cases, contenders

    return contenders(next(case for case in cases(False) if case.name == name))["lockstep"]


def block_median(call: Callable[[], object], seconds: float) -> float:
    """Returns seconds per call: the median of a block of at least three calls."""
    call()
    times: list[float] = []
    end = perf_counter() + seconds
    while perf_counter() < end or len(times) < 3:
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return median(times)


def load_s(folder: str) -> float:
    """Returns the seconds that loading a model takes in a process of its own."""
    program = (
        "import sys, time; from lockstep import LLM; import lockstep.llm.engine; import torch;"
        "begin = time.perf_counter(); LLM(sys.argv[1], max_total_tokens=4096);"
        "print(time.perf_counter() - begin)"
    )
    command = [sys.executable, "-c", program, folder]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
