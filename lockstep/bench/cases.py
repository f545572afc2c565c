"""The cases of `bench engine`: what each measures, against whom, and what it has to reach.

A case is data; the function of its kind measures it with what a `Rig` holds: the engine, the peer,
the sizes. Targets are ratios to a peer in the same run (above 1 is better than the peer) or a limit
of the value itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from lockstep.bench import scheduler
from lockstep.bench.machine import Timing, note, turns
from lockstep.bench.rig import Rig
from lockstep.bench.work import Played, Work, mixed_lens, prompts

if TYPE_CHECKING:
    from lockstep.bench.peers import Batching, Peer

MODELS = ("builtin", "100m")
KINDS = ("decode", "mixed", "prefix", "scheduler", "start")
PROMPT = "def binary_search(items, target):"
HIGHER = "tokens per second"  # the one unit of which more is better


@dataclass(frozen=True)
class Case:
    """One measurement. `targets`: the least ratio to each contender; `aims`: where we would like to
    be; `limit`: the largest value."""

    kind: str
    model: str  # "" where no model is involved
    unit: str
    targets: Mapping[str, float] = field(default_factory=dict)
    aims: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.model}".strip()


CASES = (
    Case("decode", "builtin", "ms per token", {"generate": 1.5}),
    Case(
        "mixed",
        "builtin",
        HIGHER,
        {"static": 2.5, "continuous": 1.8},
        {"static": 4.0, "continuous": 3.0},
    ),
    Case("prefix", "builtin", "ms to first token", {"cold": 8.0}),
    Case("decode", "100m", "ms per token", {"generate": 1.0}),
    Case("mixed", "100m", HIGHER, {"continuous": 1.3}),
    Case("prefix", "100m", "ms to first token", {"cold": 8.0}),
    Case("scheduler", "", "ms per step", limit=1.0),
    Case("start", "builtin", "s to first token", limit=6.0),
)


@dataclass(frozen=True)
class Measured:
    """One case: medians, ratios to the others (above 1 is better than they), targets, every run.
    `met` is None if nothing was judged: there is no target, the sizes are small, or others used the
    machine, which can slow a contender twentyfold.
    """

    case: str
    kind: str
    model: str
    unit: str
    values: dict[str, float]
    ratios: dict[str, float]
    targets: dict[str, float]
    aims: dict[str, float]
    limit: float | None
    met: bool | None
    undisturbed: bool
    runs: dict[str, list[float]]
    others: dict[str, list[float]]
    more: dict[str, object]


def measure(case: Case, rig: Rig) -> Measured:
    """Measures one case; the targets count unless the sizes are the small ones."""
    kinds = {
        "decode": decode,
        "mixed": mixed,
        "prefix": prefix,
        "scheduler": schedule,
        "start": start,
    }
    rig.say = lambda text: note(f"{case.name}: {text}")
    timing, more = kinds[case.kind](case.model, rig)
    values = {name: round(timing.median(name), 4) for name in timing.runs}
    mine, sign = values["lockstep"], 1 if case.unit == HIGHER else -1
    ratios = {
        name: round((mine / value) ** sign, 3)
        for name, value in values.items()
        if name != "lockstep"
    }
    return Measured(
        case.name,
        case.kind,
        case.model,
        case.unit,
        values,
        ratios,
        dict(case.targets),
        dict(case.aims),
        case.limit,
        judge(case, values, ratios, rig) if timing.quiet else None,
        timing.quiet,
        {name: [round(v, 4) for v in each] for name, each in timing.runs.items()},
        timing.others,
        more,
    )


def judge(
    case: Case, values: Mapping[str, float], ratios: Mapping[str, float], rig: Rig
) -> bool | None:
    """Whether the targets were reached. A peer that was asked for and gave no number counts as a
    target missed."""
    wanted = {name: least for name, least in case.targets.items() if rig.compares or name in ratios}
    if rig.sizes.small or (not wanted and case.limit is None):
        return None
    return all(ratios.get(name, 0.0) >= least for name, least in wanted.items()) and values[
        "lockstep"
    ] <= (case.limit or float("inf"))


def decode(model: str, rig: Rig) -> tuple[Timing, dict[str, object]]:
    """Batch 1, greedy: the time from the first to the last new token."""
    ours, (prompt_len, new) = rig.ours(model), rig.sizes.decode

    def work(seed: int) -> Work:
        return Work(prompts((prompt_len,), ours.vocab_size, seed), (new,))

    def per_token_ms(played: Played) -> float:
        return (played.seconds - played.first_s) / (new - 1) * 1e3

    rig.say("comparing tokens" if rig.compares else "warming up")
    contenders: dict[str, Callable[[int], float]] = {
        "lockstep": lambda seed: per_token_ms(ours.play(work(seed)))
    }
    first, more = ours.play(work(0)), dict[str, object](prompt_len=prompt_len, new_tokens=new)
    if rig.compares:
        from lockstep.bench.peers import disagreements

        peer = rig.peer(model)
        more["differing"] = {
            "generate": disagreements(peer, work(0), first, peer.generate(work(0)))
        }
        contenders["generate"] = lambda seed: per_token_ms(peer.generate(work(seed)))
    return rig.turns(contenders), more


def mixed(model: str, rig: Rig) -> tuple[Timing, dict[str, object]]:
    """Many requests of mixed lengths at once: new tokens per second of the whole."""
    ours, sizes = rig.ours(model), rig.sizes
    lens, news = mixed_lens(sizes.requests, sizes.ins, sizes.outs)

    def work(seed: int) -> Work:
        return Work(prompts(lens, ours.vocab_size, seed), news)

    def rate(play: Callable[[Work], Played]) -> Callable[[int], float]:
        return lambda seed: sum(news) / play(work(seed)).seconds

    rig.say("comparing tokens" if rig.compares else "warming up")
    trial = work(0).first(sizes.trial)
    first, contenders = ours.play(trial), {"lockstep": rate(ours.play)}
    more: dict[str, object] = {
        "requests": len(lens),
        "prompt_tokens": sum(lens),
        "new_tokens": sum(news),
    }
    if not rig.compares:
        return rig.turns(contenders), more
    from lockstep.bench.peers import disagreements

    peer = rig.peer(model)
    more["differing"] = differing = {
        "static": disagreements(peer, trial, first, peer.generate(trial))
    }
    contenders["static"] = rate(peer.generate)
    with ExitStack() as stack:
        try:
            best, differing["continuous"], more["batching"] = choose(peer, trial, first, rig)
            contenders["continuous"] = rate(
                stack.enter_context(peer.continuous(best, work(0))).play
            )
        except Exception as error:  # whatever it raises on this machine is a result to show
            more["errors"] = {"continuous": f"{type(error).__name__}: {error}"}
        return rig.turns(contenders), more


def choose(
    peer: Peer, trial: Work, mine: Played, rig: Rig
) -> tuple[Batching, int, dict[str, object]]:
    """The fastest settings of continuous batching on this machine, how many requests got other
    tokens, and what was tried."""
    from lockstep.bench.peers import BATCHINGS, disagreements

    settings = {str(b): b for b in BATCHINGS[: 1 if rig.sizes.small else None]}
    differing = [0]

    def rate(batching: Batching) -> Callable[[int], float]:
        def once(_: int) -> float:
            with peer.continuous(batching, trial) as manager:
                played = manager.play(trial)
            differing.append(disagreements(peer, trial, mine, played))
            return trial.new_tokens / played.seconds

        return once

    tried = turns(
        {name: rate(batching) for name, batching in settings.items()}, 1, rig.say, 0
    )  # to rank them, once each is enough
    rates = {name: round(tried.median(name), 1) for name in settings}
    best = max(rates, key=lambda name: rates[name])
    more = {
        "chosen": best,
        "tried_tokens_per_second": rates,
        "undisturbed": tried.quiet,
        "compile": "none: it recompiles for new shapes",
        "block_sharing": False,
    }
    return settings[best], max(differing), more


def prefix(model: str, rig: Rig) -> tuple[Timing, dict[str, object]]:
    """Time to first token of a few new tokens behind a cached prefix, and of the same prompt
    cold."""
    ours, (cached, new) = rig.ours(model), rig.sizes.prefix

    def prompt(seed: int) -> Work:
        return Work(prompts((cached + new,), ours.vocab_size, seed), (1,))

    def cold(seed: int) -> float:
        return ours.play(prompt(2 * seed)).first_s * 1e3

    def warm(seed: int) -> float:
        work = prompt(2 * seed + 1)
        ours.play(Work((work.prompts[0][:cached],), (1,)))
        played = ours.play(work)
        if played.cached != (cached,):
            raise RuntimeError(f"the prefix cache held {played.cached[0]} of {cached} keys")
        return played.first_s * 1e3

    rig.say("warming up")
    cold(0), warm(0)
    return rig.turns({"lockstep": warm, "cold": cold}), {
        "cached_tokens": cached,
        "new_prompt_tokens": new,
    }


def schedule(model: str, rig: Rig) -> tuple[Timing, dict[str, object]]:
    """CPU time of schedule, build, check and commit per step; of each run the slowest of four kinds
    of cache counts."""
    parts: list[dict[str, dict[str, float]]] = []

    def once(seed: int) -> float:
        parts.append(scheduler.measure(rig.sizes.load))
        return max(each["sum"] for each in parts[-1].values()) / 1e3

    timing, load = rig.turns({"lockstep": once}), rig.sizes.load
    return timing, {
        "requests": load.requests,
        "prompt_len": load.prompt_len,
        "steps": load.steps,
        "parts_us": parts[-1],
    }


def start(model: str, rig: Rig) -> tuple[Timing, dict[str, object]]:
    """From running the command to the first byte it writes to stdout, which comes with the first
    token."""
    command = [sys.executable, "-m", "lockstep.cli", "generate", PROMPT, "--max-tokens", "1"]
    exits: list[float] = []

    def once(seed: int) -> float:
        begin = perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.read(1)
            first = perf_counter() - begin
            said = process.communicate()[1]
        exits.append(round(perf_counter() - begin, 3))
        if process.returncode:
            raise RuntimeError(
                f"`lockstep generate` ended with {process.returncode}: "
                f"{said.decode(errors='replace')[-500:]}"
            )
        return first

    rig.say("warming the cache of compiled kernels")
    once(0)
    return rig.turns({"lockstep": once}), {"exit_s": exits[1:]}
