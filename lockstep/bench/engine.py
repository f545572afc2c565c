"""`lockstep bench engine`: the whole engine against transformers on the same machine, in the same
run, in fp32.

A case is data; the function of its kind measures it with `Contenders`: the engine, the peer, the
sizes. `contender` defines what is measured, `work` how each contender does it. With `--curves` it
also measures how speed scales, drawn for `docs/` from the document.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from subprocess import PIPE
from time import perf_counter
from typing import Any

from safetensors import safe_open

from lockstep.bench import results, speculative
from lockstep.bench.contender import FULL, QUICK, Measures, Sizes
from lockstep.bench.results import Bench, Measure, Timing, note, run_on_card, tell
from lockstep.bench.work import Ours, Peer, Played, Work, llama_folder, prompts
from lockstep.lab import table
from lockstep.lab.document import Document, publish, read
from lockstep.llm.engine import BUILTIN
from lockstep.types import RuleError

PROMPT = "def binary_search(items, target):"
ENGINE = ("page_size", "chunked_prefill_size", "max_total_tokens")  # recorded options
COMMAND, KEYS = "lockstep bench engine", ("cases", "environment", "repeat", "quick")
Details = dict[str, Any]
Ways = dict[str, Callable[..., float]]
TABLE = table("engine.toml", "lockstep.bench")
CROWD_CONTEXT = 128


def run(args: argparse.Namespace) -> int:
    """Measures, or reads an earlier document. Returns 1 if a target is missed or not judged."""
    if args.speculative:
        return speculative.run(args)
    if args.row:
        remedy = "Add --speculative, or omit --row"
        raise RuleError("--row needs --speculative", f"--row {', '.join(args.row)}", remedy)
    if args.device == "cuda":
        return run_on_card("engine", args, "--gemm", args.gemm)
    document = measure(args) if args.source is None else read(args.source, COMMAND, *KEYS)
    if args.curves:
        if "curves" not in document:
            remedy = "Measure them: `lockstep bench engine --curves --json F`"
            raise RuleError("--from names a document with curves", args.source, remedy)
        for path in draw_curves(document, args.svg_dir):
            tell(f"wrote {path}")
    summary = results.summary(document, every=args.source is not None)
    publish(args, document, [results.markdown(document) if args.markdown else summary])
    return int(results.failed(document))


def measure(args: argparse.Namespace) -> Document:
    """Runs the chosen cases and returns their document."""
    todo, bench = chosen(args.case or (), args.model or ()), Bench(args)
    kinds = {"decode": decode, "mixed": mixed, "prefix": prefix, "start": start}
    compares = args.peer == "transformers"
    document = bench.document | {"peer": args.peer}
    with Contenders(bench, QUICK if args.quick else FULL, compares) as contenders:
        for case in todo:
            kind, model = case["kind"], case["model"]
            note(f"{kind} {model}")
            timing, more = kinds[kind](model, contenders)
            aims = case.get("targets", {}).items()
            asked = {name: least for name, least in aims if compares or name in timing.runs}
            judged = bench.result(timing, case["unit"], asked, limit=case.get("limit"))
            names = {"case": f"{kind} {model}", "kind": kind, "model": model}
            bench.add({**names, **judged, "more": more})
        loaded = dict.fromkeys(case["model"] for case in todo if case["kind"] != "start")
        document["models"] = {model: describe(contenders, model) for model in loaded}
        if args.curves:
            document["curves"] = measure_curves(contenders)
    if compares:
        document["contenders"] = TABLE["contenders"]
    return document


def chosen(kinds: Sequence[str], models: Sequence[str]) -> list[Document]:
    """Returns the cases of engine.toml with these kinds and models; none given means all."""
    of_kind = [case for case in TABLE["cases"] if not kinds or case["kind"] in kinds]
    todo = [case for case in of_kind if not models or case["model"] in models]
    if not todo:
        have = ", ".join(dict.fromkeys(case["model"] for case in of_kind))
        rule = f"{' and '.join(kinds)} is measured with {have}"
        raise RuleError(rule, " and ".join(models), "Omit --model")
    return todo


class Contenders(ExitStack):
    """Models that the cases share, created on first use; leaving `with` removes them."""

    def __init__(self, bench: Bench, sizes: Sizes, compares: bool) -> None:
        super().__init__()
        self.alternate, self.sizes, self.compares = bench.alternate, sizes, compares
        self.folder: Callable[[str], Path] = cache(self._folder)
        self.ours: Callable[[str], Ours] = cache(lambda model: Ours(str(self.folder(model))))
        self.peer: Callable[[str], Peer] = cache(lambda model: Peer(self.folder(model)))

    def measures(self, model: str, play: Callable[[Work], Played] | None = None) -> Measures:
        """Returns the measures of a model: of our engine, or of `play`."""
        ours = self.ours(model)
        return Measures(play or ours.play, ours.vocab_size, self.sizes)

    def _folder(self, model: str) -> Path:
        if model == "builtin":
            return BUILTIN
        note("making the random llama")
        return self.enter_context(llama_folder(self.sizes.small))


def describe(contenders: Contenders, model: str) -> Document:
    ours = contenders.ours(model)
    with safe_open(contenders.folder(model) / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return {
        "model_type": ours.engine.info.model_type,
        "parameters": sum(map(math.prod, shapes)),
        "engine": {key: getattr(ours.config, key) for key in ENGINE},
        "told": ours.engine.startup_report.splitlines()[0],
    }


def decode(model: str, contenders: Contenders) -> tuple[Timing, Details]:
    """Batch 1, greedy: ms per token from the first to the last new token."""
    ours, (prompt_len, new) = contenders.measures(model), contenders.sizes.decode
    work = ours.decode_work(0)
    first, ways = ours.play(work), {"lockstep": ours.decode}
    more: Details = {"prompt_len": prompt_len, "new_tokens": new}
    if contenders.compares:
        peer = contenders.peer(model)
        more["differing"] = {"generate": peer.disagreements(work, first, peer.generate(work))}
        ways["generate"] = contenders.measures(model, peer.generate).decode
    return contenders.alternate(ways).scaled(1e3), more


def mixed(model: str, contenders: Contenders) -> tuple[Timing, Details]:
    """Many requests of mixed lengths together: new tokens per second over the whole run."""
    ours = contenders.measures(model)
    work = ours.mixed_work(0)

    def rate(play: Callable[[Work], Played]) -> Measure:
        return lambda seed: work.new_tokens / contenders.measures(model, play).mixed(seed)

    trial = work.first(contenders.sizes.trial)
    first, ways = ours.play(trial), {"lockstep": rate(ours.play)}
    more: Details = {"requests": len(work.news), "new_tokens": work.new_tokens}
    more["prompt_tokens"] = sum(map(len, work.prompts))
    if not contenders.compares:
        return contenders.alternate(ways), more
    peer = contenders.peer(model)
    more["differing"] = {"static": peer.disagreements(trial, first, peer.generate(trial))}
    ways["static"] = rate(peer.generate)
    with ExitStack() as stack:
        try:
            best, differing, more["batching"] = choose(peer, trial, first, contenders)
            more["differing"]["continuous"] = differing
            ways["continuous"] = rate(stack.enter_context(peer.continuous(best, work)))
        except Exception as error:  # whatever it raises on this machine is reported
            more["errors"] = {"continuous": f"{type(error).__name__}: {error}"}
        return contenders.alternate(ways), more


def choose(
    peer: Peer, trial: Work, first: Played, contenders: Contenders
) -> tuple[Details, int, Details]:
    """Returns the settings of continuous batching that are fastest on this machine, how many
    requests got other tokens than in our `first`, and what was tried."""
    tried, best, differing = dict[str, float](), Details(), 0
    for batching in TABLE["batchings"][: 1 if contenders.sizes.small else None]:
        note(str(batching))
        with peer.continuous(batching, trial) as play:
            played = play(trial)
        differing = max(differing, peer.disagreements(trial, first, played))
        tried[str(batching)] = round(trial.new_tokens / played.seconds, 1)
        if tried[str(batching)] == max(tried.values()):
            best = batching
    more: Details = {"chosen": str(best), "tried_tokens_per_second": tried}
    more |= {"compile": "none: it recompiles for new shapes", "block_sharing": False}
    return best, differing, more


def prefix(model: str, contenders: Contenders) -> tuple[Timing, Details]:
    """Milliseconds to the first token of a short prompt end after a cached prefix, and cold."""
    ours, (cached, new) = contenders.measures(model), contenders.sizes.prefix
    ways = {"lockstep": ours.prefix, "cold": ours.prefill}
    for way in ways.values():
        way(0)
    more: Details = {"cached_tokens": cached, "new_prompt_tokens": new}
    return contenders.alternate(ways).scaled(1e3), more


def start(model: str, contenders: Contenders) -> tuple[Timing, Details]:
    """Seconds from running the command to its first byte on stdout, which is the first token's."""
    command = [sys.executable, "-m", "lockstep.cli", "generate", PROMPT, "--max-tokens", "1"]

    def once(seed: int) -> float:
        begin = perf_counter()
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE) as process:
            if process.stdout is None:
                raise RuntimeError("the command's stdout is not a pipe")
            process.stdout.read(1)
            first, said = perf_counter() - begin, process.communicate()[1]
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {said.decode()[-500:]}")
        return first

    once(0)  # so that the kernels are compiled
    return contenders.alternate({"lockstep": once}), {}


def measure_curves(contenders: Contenders) -> Details:
    """Measures how speed scales with the number of requests and with the context length."""
    sizes, builtin = contenders.sizes, contenders.ours("builtin")

    def step_seconds(curve: Details, ours: Ours, crowd: tuple[int, int], ways: Ways) -> Details:
        """Returns seconds per step of each way, for `crowd` = (requests, keys). Prompts are in our
        cache; each is the beginning of the prompt used at a longer context."""
        (count, context), steps = crowd, sizes.steps
        note(f"curve, {count} of {context} keys")
        length = min(context - steps // 2, ours.engine.context_length - steps - count // 16 - 4)
        many = tuple(prompts((length,), ours.vocab_size, 10_000 + i)[0] for i in range(count))
        ours.prime(many)
        measures = {name: lambda _, way=way: way(many, steps) for name, way in ways.items()}
        timing = contenders.alternate(measures)
        curve["undisturbed"] = curve.get("undisturbed", True) and timing.undisturbed
        return {name: timing.median(name) for name in ways}

    context = min(CROWD_CONTEXT, max(sizes.contexts))
    ways: Ways = {"Lockstep": builtin.step_s}
    if contenders.compares:
        ways["transformers, static batch"] = contenders.peer("builtin").step_s
    crowds = Details(x=list(sizes.crowds), unit="new tokens per second", context=context, lines={})
    for count in sizes.crowds:
        for name, seconds in step_seconds(crowds, builtin, (count, context), ways).items():
            crowds["lines"].setdefault(name, []).append(round(count / seconds, 1))
    contexts = Details(x=list(sizes.contexts), unit="ms per step", lines={})
    for row in TABLE["by_context"]:
        label, count, ours = row["label"], row["requests"], contenders.ours(row["model"])
        for context in (c for c in sizes.contexts if c <= ours.engine.context_length):
            found = step_seconds(contexts, ours, (count, context), {label: ours.step_s})
            contexts["lines"].setdefault(label, []).append(round(found[label] * 1e3, 3))
    return {"requests": crowds, "context": contexts}


def draw_curves(document: Document, folder: str) -> list[Path]:
    """Writes the curves as SVG, legible on light and dark pages, and returns the files' paths."""
    import matplotlib
    from matplotlib.figure import Figure

    where = "{cpu}, {threads} threads, fp32, commit {commit}".format_map(document["environment"])
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for name, picture in TABLE["pictures"].items():
        curve, title = document["curves"][name], picture["title"]
        with matplotlib.rc_context({**TABLE["style"], "svg.hashsalt": title}):
            figure = Figure(figsize=(6.4, 3.7), layout="constrained")
            axes = figure.subplots()
            for label, values in curve["lines"].items():  # a line may end early
                axes.plot(curve["x"][: len(values)], values, marker="o", label=label)
            axes.set_xscale("log", base=2)
            axes.set_yscale(picture["y_scale"])
            axes.set_xticks(curve["x"], [f"{x:,}" for x in curve["x"]])
            axes.set(xlabel=picture["x_label"], ylabel=curve["unit"])
            axes.set_title(where, fontsize="x-small")
            axes.yaxis.set_major_formatter("{x:,g}")
            if picture["y_scale"] == "linear":
                axes.set_ylim(bottom=0)
            axes.grid(axis="y", alpha=0.3)
            axes.legend(frameon=False)
            figure.suptitle(title.format_map(curve))
            paths.append(Path(folder) / picture["file"])
            figure.savefig(paths[-1], format="svg", transparent=True, metadata={"Date": None})
    return paths
