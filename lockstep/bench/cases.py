"""The cases of `bench engine`: what each measures, against whom, and what it has to reach.

A case is data; the function of its kind measures it with `Contenders`: the engine, the peer, the
sizes. Targets are ratios to a peer in the same run (above 1 is better than the peer) or a limit of
the value itself. What is measured is written in `contender`, what transformers does in `peers`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from subprocess import PIPE
from time import perf_counter
from typing import TYPE_CHECKING, Any

from lockstep.bench.contender import Measures, Sizes
from lockstep.bench.machine import Measure, Timing, alternate, note
from lockstep.bench.results import HIGHER, Result, result
from lockstep.bench.work import Ours, Played, Work
from lockstep.llm.engine import BUILTIN

if TYPE_CHECKING:
    from lockstep.bench.peers import Batching, Peer

PROMPT = "def binary_search(items, target):"
Details = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One measurement. `targets`: the least ratio to each contender; `limit`: the largest value."""

    kind: str
    model: str
    unit: str
    targets: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None


CASES = (
    Case("decode", "builtin", "ms per token", {"generate": 1.5}),
    Case("mixed", "builtin", HIGHER, {"static": 2.5, "continuous": 1.8}),
    Case("prefix", "builtin", "ms to first token", {"cold": 8.0}),
    Case("decode", "100m", "ms per token", {"generate": 1.0}),
    Case("mixed", "100m", HIGHER, {"continuous": 1.3}),
    Case("prefix", "100m", "ms to first token", {"cold": 8.0}),
    Case("start", "builtin", "s to first token", limit=6.0),
)


class Contenders:
    """What the cases share: models, made and loaded when first asked for. `with` removes what was
    made."""

    def __init__(self, sizes: Sizes, runs: int, peer: bool) -> None:
        self.sizes, self.runs, self.compares = sizes, runs, peer
        self.on_progress: Callable[[str], None] = note
        self._stack = ExitStack()
        self.folder: Callable[[str], Path] = cache(self._folder)
        self.ours: Callable[[str], Ours] = cache(self._ours)
        self.peer: Callable[[str], Peer] = cache(self._peer)

    def __enter__(self) -> Contenders:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measures(self, model: str, play: Callable[[Work], Played] | None = None) -> Measures:
        """What is measured with a model: of ours, or of whoever plays."""
        ours = self.ours(model)
        return Measures(play or ours.play, ours.vocab_size, self.sizes)

    def alternate(self, measures: Mapping[str, Measure]) -> Timing:
        """Measures by turns, as often as was asked for; a quick run takes what it gets."""
        return alternate(measures, self.runs, self.on_progress, 0 if self.sizes.small else 3)

    def differing(self, model: str, work: Work, first: Played, theirs: Played) -> int:
        """How many requests got other tokens from the peer than in our `first`."""
        from lockstep.bench.peers import disagreements

        return disagreements(self.peer(model), work, first, theirs)

    def _folder(self, model: str) -> Path:
        if model == "builtin":
            return BUILTIN
        from lockstep.bench.peers import llama_folder

        self.on_progress("making the random llama")
        return self._stack.enter_context(llama_folder(self.sizes.small))

    def _ours(self, model: str) -> Ours:
        self.on_progress("loading the model")
        return Ours(str(self.folder(model)))

    def _peer(self, model: str) -> Peer:
        from lockstep.bench.peers import Peer

        self.on_progress("loading the model into transformers")
        return Peer(self.folder(model))


def measure(case: Case, contenders: Contenders) -> Result:
    """Measures one case; the targets count unless the sizes are the small ones."""
    kinds = {"decode": decode, "mixed": mixed, "prefix": prefix, "start": start}
    name = f"{case.kind} {case.model}"
    contenders.on_progress = lambda text: note(f"{name}: {text}")
    timing, more = kinds[case.kind](case.model, contenders)
    return {
        **{"case": name, "kind": case.kind, "model": case.model},
        **result(
            timing,
            case.unit,
            case.targets,
            limit=case.limit,
            absent=not contenders.compares,
            quick=contenders.sizes.small,
        ),
        "more": more,
    }


def decode(model: str, contenders: Contenders) -> tuple[Timing, Details]:
    """Batch 1, greedy: the time from the first to the last new token."""
    ours, (prompt_len, new) = contenders.measures(model), contenders.sizes.decode
    contenders.on_progress("comparing tokens" if contenders.compares else "warming up")
    work = ours.decode_work(0)
    first, ways = ours.play(work), {"lockstep": ours.decode}
    more: Details = {"prompt_len": prompt_len, "new_tokens": new}
    if contenders.compares:
        generate = contenders.peer(model).generate
        more["differing"] = {"generate": contenders.differing(model, work, first, generate(work))}
        ways["generate"] = contenders.measures(model, generate).decode
    return contenders.alternate(ways).scaled(1e3), more


def mixed(model: str, contenders: Contenders) -> tuple[Timing, Details]:
    """Many requests of mixed lengths at once: new tokens per second of the whole."""
    ours = contenders.measures(model)
    work = ours.mixed_work(0)

    def rate(play: Callable[[Work], Played]) -> Measure:
        return lambda seed: work.new_tokens / contenders.measures(model, play).mixed(seed)

    contenders.on_progress("comparing tokens" if contenders.compares else "warming up")
    trial = work.first(contenders.sizes.trial)
    first, ways = ours.play(trial), {"lockstep": rate(ours.play)}
    more: Details = {
        "requests": len(work.news),
        "prompt_tokens": sum(map(len, work.prompts)),
        "new_tokens": work.new_tokens,
    }
    if not contenders.compares:
        return contenders.alternate(ways), more
    peer = contenders.peer(model)
    static = contenders.differing(model, trial, first, peer.generate(trial))
    more["differing"], ways["static"] = {"static": static}, rate(peer.generate)
    with ExitStack() as stack:
        try:
            best, differing, more["batching"] = choose(model, trial, first, contenders)
            more["differing"]["continuous"] = differing
            ways["continuous"] = rate(stack.enter_context(peer.continuous(best, work)))
        except Exception as error:  # whatever it raises on this machine is a result to show
            more["errors"] = {"continuous": f"{type(error).__name__}: {error}"}
        return contenders.alternate(ways), more


def choose(
    model: str, trial: Work, first: Played, contenders: Contenders
) -> tuple[Batching, int, Details]:
    """The fastest settings of continuous batching on this machine, how many requests got other
    tokens than in our `first`, and what was tried."""
    from lockstep.bench.peers import BATCHINGS

    settings = {str(b): b for b in BATCHINGS[: 1 if contenders.sizes.small else None]}
    differing = [0]

    def rate(batching: Batching) -> Measure:
        def once(_: int) -> float:
            with contenders.peer(model).continuous(batching, trial) as play:
                played = play(trial)
            differing.append(contenders.differing(model, trial, first, played))
            return trial.new_tokens / played.seconds

        return once

    ways = {name: rate(batching) for name, batching in settings.items()}
    tried = alternate(ways, 1, contenders.on_progress, 0)  # to rank them, once each is enough
    rates = {name: round(tried.median(name), 1) for name in settings}
    best = max(rates, key=lambda name: rates[name])
    more: Details = {
        "chosen": best,
        "tried_tokens_per_second": rates,
        "undisturbed": tried.undisturbed,
        "compile": "none: it recompiles for new shapes",
        "block_sharing": False,
    }
    return settings[best], max(differing), more


def prefix(model: str, contenders: Contenders) -> tuple[Timing, Details]:
    """Time to first token of a few new tokens behind a cached prefix, and of the same prompt
    cold."""
    ours, (cached, new) = contenders.measures(model), contenders.sizes.prefix
    contenders.on_progress("warming up")
    ways = {"lockstep": ours.prefix, "cold": ours.cold}
    for way in ways.values():
        way(0)
    more: Details = {"cached_tokens": cached, "new_prompt_tokens": new}
    return contenders.alternate(ways).scaled(1e3), more


def start(model: str, contenders: Contenders) -> tuple[Timing, Details]:
    """From running the command to the first byte it writes to stdout, which comes with the first
    token."""
    command = [sys.executable, "-m", "lockstep.cli", "generate", PROMPT, "--max-tokens", "1"]

    def once(seed: int) -> float:
        begin = perf_counter()
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE) as process:
            if process.stdout is None:
                raise RuntimeError("its stdout is no pipe")
            process.stdout.read(1)
            first, said = perf_counter() - begin, process.communicate()[1]
        if process.returncode:
            raise RuntimeError(f"it ended with {process.returncode}: {said.decode()[-500:]}")
        return first

    contenders.on_progress("warming the cache of compiled kernels")
    once(0)
    return contenders.alternate({"lockstep": once}), {}
