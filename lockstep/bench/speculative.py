"""`lockstep bench speculative`: the built-in model with drafts against itself without, in one run.

One request at a time. A draft's cost is all that it adds: its own rows, the wider steps, the states
that are kept. Prompts are the beginnings of held-out files (held_out.json), or text that repeats.
The draft that always errs is the head with its guesses replaced, so its cost is the head's. The
answers are compared: tokens and bits of log-probabilities. A row is a case of `CASES`; the document
receives it as soon as it is measured. `cli` calls `run`.
"""

import argparse
import sysconfig
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from lockstep.bench import results
from lockstep.bench.contender import HostTimes
from lockstep.bench.results import Bench, Result, Timing, alternate, note, run_on_card, tell
from lockstep.config import EngineConfig
from lockstep.lab import table
from lockstep.lab.document import read, write
from lockstep.llm.engine import Engine, Parts, load
from lockstep.llm.output import Output, Speculated
from lockstep.sample.params import SamplingParams
from lockstep.sched.request import DraftTree
from lockstep.spec.draft import Draft, DraftRequest
from lockstep.spec.model_draft import ModelDraft
from lockstep.types import RuleError

HELD_OUT = table("held_out.json", "lockstep.bench")
BEGIN_ID = 0  # a token that the built-in model never writes in the middle of a file
BLOCK = 40  # lines that a repeating prompt has twice, then begins once more
QUICK = (2, 16)  # prompts, new tokens of each
NEW, FIRST = 256, 64  # new tokens; the first ones are not timed if a draft always errs


@dataclass(frozen=True)
class Case:
    """A row of speculative.toml."""

    name: str
    algorithm: str
    temperature: float
    least: float
    repeats: bool = False
    errs: bool = False


CASES = [Case(**row) for row in table("speculative.toml", "lockstep.bench")["cases"]]


def spoil(draft: Draft) -> None:
    """Replaces all tokens of the draft's trees, so that none is ever right."""
    propose = draft.propose

    def wrong(requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = propose(requests)
        return [DraftTree((BEGIN_ID,) * len(t.token_ids), t.parents) for t in trees]

    draft.propose = wrong  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> int:
    """Measures, prints, writes JSON. Returns 1 if a target is missed or not judged."""
    if args.device == "cuda":
        return run_on_card("speculative", args)
    chosen, bench = picked(args.row), Bench(args)
    parts, document = load(EngineConfig(device="cpu")), bench.document
    kept = args.json not in (None, "-")
    have = {} if len(chosen) == len(CASES) or not kept else earlier(args.json)
    for case in chosen:
        have[case.name] = measure(case, parts, bench)
        document["cases"] = [have[each.name] for each in CASES if each.name in have]
        if kept:
            write(document, args.json)
        tell(f"{results.line(have[case.name])}  {have[case.name]['more']}")
    return bench.publish()


def picked(names: Sequence[str] | None) -> list[Case]:
    """Returns the rows whose names begin with one of `names`; all, if none are given."""
    chosen = [case for case in CASES if not names or case.name.startswith(tuple(names))]
    if not chosen:
        rule = f"--row is the beginning of a row: {'; '.join(case.name for case in CASES)}"
        raise RuleError(rule, ", ".join(names or ()), "Omit it for all rows")
    return chosen


def earlier(where: str) -> dict[str, Result]:
    """Returns the rows that the document already has, by case."""
    if not Path(where).is_file():
        return {}
    cases = read(where, "lockstep bench speculative", "cases")["cases"]
    return {case["case"]: case for case in cases}


def watch(engine: Engine) -> HostTimes:
    """Times an engine's phases from now on. draft: proposing chains or trees; extend: the draft's
    rows for committed tokens, and the states kept for them; verify: the target's steps, plain ones
    too; wait: waiting for their samples, and accepting."""
    times, speculation = HostTimes(), engine.speculation
    assert speculation is not None, "an algorithm is named"
    methods: list[tuple[Any, str, str]] = [(speculation, "propose", "draft")]
    methods += [(speculation, "settled", "extend")]
    methods += [(engine, "_launch", "verify"), (engine, "_result", "wait")]
    if isinstance(speculation.draft, ModelDraft):
        methods += [(speculation.draft, "_extend", "extend")]
    for owner, name, phase in methods:
        setattr(owner, name, times.timed(phase, getattr(owner, name)))
    return times


def measure(case: Case, parts: Parts, bench: Bench) -> Result:
    """Returns milliseconds per token over a case's prompts, each measured alternately with and
    without the draft, so that slow changes of the machine affect both."""
    options = {"speculative_algorithm": case.algorithm}
    plain, guessing = (engine(parts, chosen) for chosen in ({}, options))
    assert guessing.speculation is not None, "an algorithm is named"
    if case.errs:
        spoil(guessing.speculation.draft)
    count, new = QUICK if bench.args.quick else (32, NEW)
    prompts = repeating(parts, count) if case.repeats else held_out(parts, count)
    wish = SamplingParams(
        max_tokens=new, temperature=case.temperature, seed=1, logprobs=0, ignore_eos=True
    )
    skip = min(FIRST, new // 2) if case.errs else 1
    sides = {"plain": plain, "lockstep": guessing}
    for each in sides.values():
        play(each, prompts[0], wish, skip)
    answers, guessed = defaultdict[str, dict[int, Any]](dict), dict[int, Speculated]()

    def timed(name: str, engine: Engine, seed: int) -> float:
        nth = (seed - 1) // (bench.tries + 1)
        seconds, output = play(engine, prompts[nth], wish, skip)
        scores = output.completions[0].logprobs
        answers[name][nth] = output.token_ids, None if scores is None else scores.tobytes()
        if engine is guessing:
            guessed[nth] = output.speculated
        return 1e3 * seconds

    contenders = {name: partial(timed, name, each) for name, each in sides.items()}
    timing = Timing()
    for run in range(bench.runs):
        note(f"{case.name}: {len(prompts)} prompts, run {run + 1} of {bench.runs}")
        laps = alternate(contenders, len(prompts), bench.tries)
        for name in contenders:
            timing.add(name, fmean(laps.others[name]), fmean(laps.runs[name]))
    if answers["plain"] != answers["lockstep"]:
        raise RuleError("speculation changes no bit", f"a difference: {case.name}", "Report it")
    judged = bench.result(timing, "ms per token", {"plain": case.least})
    phases = watch(guessing)  # only now: its overhead would count against one side
    for prompt in prompts[: count // 4]:
        play(guessing, prompt, wish, skip)
    whole = sum(phases.seconds.values())
    more = {
        **Speculated(*map(sum, zip(*guessed.values(), strict=True)))._asdict(),
        "tokens": count * new,
        "phases": {name: round(s / whole, 3) for name, s in phases.seconds.items()},
    }
    return {"case": case.name, "kind": "speculative", "model": "builtin", **judged, "more": more}


def engine(parts: Parts, options: dict[str, Any]) -> Engine:
    """Returns an engine without a prefix cache: every run computes its prompts."""
    return Engine(EngineConfig(device="cpu", disable_radix_cache=True, **options), parts)


def play(
    engine: Engine, prompt: Sequence[int], wish: SamplingParams, skip: int
) -> tuple[float, Output]:
    """Returns seconds per token after the first `skip`, and the output."""
    job = engine.add(prompt, wish)
    completion = job.completions[0]
    while len(completion.token_ids) < skip:
        engine.step()
    begin, had = perf_counter(), len(completion.token_ids)
    while engine.busy:
        engine.step()
    seconds = perf_counter() - begin
    output = job.output("")
    return seconds / (len(output.token_ids) - had), output


def held_out(parts: Parts, count: int) -> list[list[int]]:
    """Returns the beginnings of files that neither model nor head was trained on."""
    texts = [library(name) for name in HELD_OUT["files"][:count]]
    return [ids_of(parts, text)[: HELD_OUT["prompt_len"]] for text in texts]


def repeating(parts: Parts, count: int) -> list[list[int]]:
    """Returns prompts of a block of lines twice, then its first lines once more."""
    texts = [library(name).splitlines(keepends=True) for name in HELD_OUT["files"]]
    blocks = [lines[:BLOCK] for lines in texts if len(lines) >= BLOCK][:count]
    return [ids_of(parts, "".join(block * 2 + block[:2]))[-1200:] for block in blocks]


def library(name: str) -> str:
    """Returns a file of the running Python's standard library."""
    path = Path(sysconfig.get_path("stdlib")) / name
    if not path.is_file():
        rule = f"the standard library has {name}"
        raise RuleError(rule, str(path.parent), "Use Python 3.11 with its test files")
    return path.read_text("utf-8")


def ids_of(parts: Parts, text: str) -> list[int]:
    """Tokenizes as in training: a file begins with its mark."""
    assert parts.tokenizer is not None, "the built-in model has one"
    return [BEGIN_ID, *parts.tokenizer.encode(text, False)]
