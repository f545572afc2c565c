"""`lockstep bench engine`: the whole engine against transformers on the same machine, in the same
run, in fp32.

Runs the cases that were asked for, prints one line each, and writes one JSON document with every
run; `--from` prints and draws from such a document again. `cli` calls `run`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lockstep.bench import curves, table
from lockstep.bench.cases import CASES, Case, Contenders, measure
from lockstep.bench.contender import FULL, QUICK
from lockstep.bench.machine import place, set_threads, tell
from lockstep.lab.document import write
from lockstep.types import RuleError

Document = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Measures, or reads what was measured; prints and writes. Returns 1 if a target was missed, or
    could not be judged."""
    document = read(args.source) if args.source else bench(args)
    if args.curves:
        if "curves" not in document:
            remedy = "Measure them: `lockstep bench engine --curves --json F`"
            raise RuleError("--from names a document with curves", args.source, remedy)
        for path in curves.draw(document["curves"], document["environment"], args.svg_dir):
            tell(f"wrote {path}")
    if args.json:
        write(document, args.json)
    if args.json != "-":
        show = table.markdown if args.markdown else table.plain if args.source else table.summary
        print(show(document))
    missed = any(case["met"] is False for case in document["cases"])
    return int(missed or bool(table.open_targets(document)))


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
            document["cases"].append(asdict(measure(case, contenders)))
            tell(table.line(document["cases"][-1]))
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


def describe(contenders: Contenders, model: str) -> dict[str, object]:
    """What was loaded, and what the engine chose at start."""
    from safetensors import safe_open

    with safe_open(contenders.folder(model) / "model.safetensors", "pt") as file:
        names = file.keys()
        sizes = [torch.Size(file.get_slice(name).get_shape()).numel() for name in names]
    ours = contenders.ours(model)
    return {
        "model_type": ours.engine.info.model_type,
        "parameters": sum(sizes),
        "engine": {
            "page_size": ours.config.page_size,
            "chunked_prefill_size": ours.config.chunked_prefill_size,
            "cache_tokens": ours.config.max_total_tokens,
        },
        "told": ours.engine.startup_report.splitlines()[0],
    }


def read(where: str) -> Document:
    """A document that `bench engine --json` wrote."""
    remedy = "Write one with `lockstep bench engine --json F`"
    rule = "--from names a document of `lockstep bench engine --json`"
    try:
        value = json.loads(Path(where).read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(rule, f"{where}: {error.strerror}", remedy) from None
    except ValueError:
        raise RuleError("--from names a JSON document", where, remedy) from None
    if not isinstance(value, dict) or not {"cases", "environment", "repeat", "quick"} <= set(value):
        raise RuleError(rule, f"{where} without cases", remedy)
    return value
