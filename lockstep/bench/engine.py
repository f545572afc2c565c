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

import numba
import torch

from lockstep.bench import curves, table
from lockstep.bench.cases import CASES, Case, measure
from lockstep.bench.machine import place, tell
from lockstep.bench.rig import FULL, QUICK, Rig
from lockstep.lab.document import write
from lockstep.types import RuleError

Document = dict[str, Any]

TIMED = ("decode", "mixed", "prefix")  # the cases that load a model into this process


def run(args: argparse.Namespace) -> int:
    """Measures, or reads what was measured; prints and writes. Returns 1 if a target was missed, or
    could not be judged."""
    document = read(args.source) if args.source else bench(args)
    if args.curves:
        if "curves" not in document:
            raise RuleError(
                "--from names a document with curves",
                args.source,
                "Measure them: `lockstep bench engine --curves --json F`",
            )
        for path in curves.draw(document["curves"], document["environment"], args.svg_dir):
            tell(f"wrote {path}")
    if args.json:
        write(document, args.json)
    if args.json != "-":
        print(
            table.markdown(document)
            if args.markdown
            else table.plain(document)
            if args.source
            else table.summary(document)
        )
    return int(
        any(case["met"] is False for case in document["cases"])
        or bool(table.open_targets(document))
    )


def bench(args: argparse.Namespace) -> Document:
    """Runs the chosen cases; each is told on stderr when it is done."""
    todo = chosen(args.case or (), args.model or ())
    threads = set_threads(args.threads)
    sizes, runs = (QUICK, args.repeat or 1) if args.quick else (FULL, args.repeat or 3)
    document: Document = {
        "environment": place(threads),
        "quick": args.quick,
        "repeat": runs,
        "peer": args.peer,
        "cases": [],
    }
    with Rig(sizes, runs, args.peer == "transformers") as rig:
        for case in todo:
            document["cases"].append(asdict(measure(case, rig)))
            tell(table.line(document["cases"][-1]))
        document["models"] = {
            model: describe(rig, model)
            for model in dict.fromkeys(c.model for c in todo if c.kind in TIMED)
        }
        if args.curves:
            document["curves"] = curves.measure(rig)
    if args.peer == "transformers":
        from lockstep.bench.peers import SAYS

        document["contenders"] = SAYS
    return document


def chosen(kinds: Sequence[str], models: Sequence[str]) -> list[Case]:
    """The cases of these kinds and models; none given means all. A case without a model belongs to
    every model."""
    todo = [
        c
        for c in CASES
        if (not kinds or c.kind in kinds) and (not models or c.model in models or not c.model)
    ]
    if not todo:
        have = ", ".join(dict.fromkeys(c.model for c in CASES if c.kind in kinds))
        raise RuleError(
            f"{' and '.join(kinds)} is measured with {have}", " and ".join(models), "Drop --model"
        )
    return todo


def describe(rig: Rig, model: str) -> dict[str, object]:
    """What was loaded, and what the engine chose at start."""
    from safetensors import safe_open

    with safe_open(rig.folder(model) / "model.safetensors", "pt") as file:
        sizes = [torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys()]  # noqa: SIM118 (it is no dict)
    info, config = rig.ours(model).engine.info, rig.ours(model).config
    options = {
        "page_size": config.page_size,
        "chunked_prefill_size": config.chunked_prefill_size,
        "cache_tokens": config.max_total_tokens,
    }
    told = rig.ours(model).engine.told.splitlines()[0]
    return {
        "model_type": info.model_type,
        "parameters": sum(sizes),
        "engine": options,
        "told": told,
    }


def set_threads(count: int | None) -> int:
    """The same number for torch and for our kernels; without one, torch's own."""
    wanted, most = count or torch.get_num_threads(), int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if wanted > most:
        raise RuleError(
            f"--threads is at most the {most} cores", str(wanted), "Leave it out for all of them"
        )
    torch.set_num_threads(wanted)
    numba.set_num_threads(wanted)
    return wanted


def read(where: str) -> Document:
    """A document that `bench engine --json` wrote."""
    remedy = "Write one with `lockstep bench engine --json F`"
    try:
        value = json.loads(Path(where).read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(
            "--from names a file of `lockstep bench engine --json`",
            f"{where}: {error.strerror}",
            remedy,
        ) from None
    except ValueError:
        raise RuleError("--from names a JSON document", where, remedy) from None
    if not isinstance(value, dict) or not {"cases", "environment", "repeat", "quick"} <= set(value):
        raise RuleError(
            "--from names a document of `lockstep bench engine --json`",
            f"{where} without cases",
            remedy,
        )
    return value
