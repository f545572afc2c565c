"""`lockstep bench engine`: the whole engine against transformers on the same machine, in the same
run, in fp32.

Runs the cases that were asked for, prints one line each, and writes one JSON document with every
run; `--from` prints and draws from such a document again. `cli` calls `run`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from safetensors import safe_open

from lockstep.bench import curves, gpu, results
from lockstep.bench.cases import CASES, Case, Contenders, measure
from lockstep.bench.contender import FULL, QUICK
from lockstep.bench.machine import place, set_threads, tell
from lockstep.lab.document import Document, publish, read
from lockstep.types import RuleError

ENGINE = ("page_size", "chunked_prefill_size", "max_total_tokens")  # what of it is told
COMMAND, KEYS = "lockstep bench engine", ("cases", "environment", "repeat", "quick")


def run(args: argparse.Namespace) -> int:
    """Measures, or reads what was measured; prints and writes. Returns 1 if a target was missed, or
    could not be judged."""
    if args.device == "cuda":
        return gpu.run("engine", args, "--gemm", args.gemm)
    document = bench(args) if args.source is None else read(args.source, COMMAND, *KEYS)
    if args.curves:
        if "curves" not in document:
            remedy = "Measure them: `lockstep bench engine --curves --json F`"
            raise RuleError("--from names a document with curves", args.source, remedy)
        for path in curves.draw(document["curves"], document["environment"], args.svg_dir):
            tell(f"wrote {path}")
    show = results.markdown if args.markdown else results.plain if args.source else results.summary
    publish(args, document, [show(document)])
    return int(results.failed(document))


def bench(args: argparse.Namespace) -> Document:
    """Runs the chosen cases; each is told on stderr when it is done."""
    todo = chosen(args.case or (), args.model or ())
    sizes, runs = (QUICK, args.repeat or 1) if args.quick else (FULL, args.repeat or 3)
    document: Document = {
        "environment": place(set_threads(args.threads)),
        "quick": args.quick,
        "repeat": runs,
        "peer": args.peer,
        "cases": [],
    }
    with Contenders(sizes, runs, args.peer == "transformers") as contenders:
        for case in todo:
            document["cases"].append(measure(case, contenders))
            tell(results.line(document["cases"][-1]))
        loaded = dict.fromkeys(c.model for c in todo if c.kind != "start")
        document["models"] = {model: describe(contenders, model) for model in loaded}
        if args.curves:
            document["curves"] = curves.measure(contenders)
    if args.peer == "transformers":
        from lockstep.bench.peers import DESCRIPTIONS

        document["contenders"] = DESCRIPTIONS
    return document


def chosen(kinds: Sequence[str], models: Sequence[str]) -> list[Case]:
    """The cases of these kinds and models; none given means all."""
    of_kind = [c for c in CASES if not kinds or c.kind in kinds]
    todo = [c for c in of_kind if not models or c.model in models]
    if not todo:
        have = ", ".join(dict.fromkeys(c.model for c in of_kind))
        rule = f"{' and '.join(kinds)} is measured with {have}"
        raise RuleError(rule, " and ".join(models), "Drop --model")
    return todo


def describe(contenders: Contenders, model: str) -> Document:
    """What was loaded, and what the engine chose at start."""
    ours = contenders.ours(model)
    with safe_open(contenders.folder(model) / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return {
        "model_type": ours.engine.info.model_type,
        "parameters": sum(map(math.prod, shapes)),
        "engine": {key: getattr(ours.config, key) for key in ENGINE},
        "told": ours.engine.startup_report.splitlines()[0],
    }
