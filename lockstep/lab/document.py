"""What ran, as one JSON document: where, when, by which command, and what came out. Pages and
tables are made from it.

Knows no tensors and runs nothing. Every command of the lab and of the benchmarks publishes one;
`report` and `matrix` take that of `lab run` as it is.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep import outfile
from lockstep.lab.environment import environment
from lockstep.lab.reverts import VARIABLE
from lockstep.types import RuleError

VERDICTS = ("passed", "refused", "known", "failed")

Document = dict[str, Any]


def head() -> Document:
    """What every document begins with."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"command": command_line(), "date": now, "environment": environment()}


def command_line() -> str:
    """The command as it was typed, without where it lies."""
    words = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    revert = os.environ.get(VARIABLE)
    return f"{VARIABLE}={revert} {words}" if revert else words


def publish(args: Namespace, doc: Any, lines: Iterable[str]) -> None:
    """The document where --json says, the lines for people; with `--json -` stdout holds the
    document alone and the lines go to stderr."""
    if args.json:
        write(doc, args.json)
    print("\n".join(lines), file=sys.stderr if args.json == "-" else sys.stdout)


def write(value: Any, where: str) -> None:
    """To a file, or with "-" to stdout."""
    outfile.write(
        where, json.dumps(clean(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    )


def clean(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(where: str, command: str, *keys: str) -> Document:
    """A document that `command --json` wrote: it has these keys."""
    rule, remedy = f"--from names a document of `{command} --json`", "Write one with that command"
    try:
        value = json.loads(Path(where).read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(rule, f"{where}: {error.strerror}", remedy) from None
    except ValueError:
        raise RuleError(rule, f"{where}: no JSON", remedy) from None
    if not isinstance(value, dict) or not set(keys) <= set(value):
        raise RuleError(rule, f"{where} without {', '.join(keys)}", remedy)
    return value


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Columns as wide as their widest entry, two blanks between them."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            x.rjust(w) if i in right else x.ljust(w)
            for i, (x, w) in enumerate(zip(row, wide, strict=True))
        ).rstrip()
        for row in rows
    ]


def of_run(cells: Iterable[Document], quick: bool, seconds: float, **more: Any) -> Document:
    """The document of a run that judged `cells`, each as `Result.as_json` gives it. `more` holds
    what else there is, like kills."""
    kept = list(cells)
    return {
        **head(),
        "quick": quick,
        "revert": os.environ.get(VARIABLE, ""),
        "summary": {"seconds": round(seconds, 2), **summary(kept)},
        "cells": clean(kept),
        **clean(more),
    }


def summary(cells: Sequence[Document]) -> Document:
    """Counts by backend, and the worst cell of each by its share of the tolerance."""
    backends: Document = {}
    for name in dict.fromkeys(c["backend"] for c in cells):
        mine = [c for c in cells if c["backend"] == name]
        worst = max((c for c in mine if c["findings"]), key=share, default=None)
        counts: Document = {v: sum(c["verdict"] == v for c in mine) for v in VERDICTS}
        counts["worst"] = worst and {
            key: worst[key] for key in ("cell", "out_error", "lse_error", "tolerance_used")
        }
        backends[name] = counts
    failed = sum(c["verdict"] == "failed" for c in cells)
    return {"cells": len(cells), "failed": failed, "backends": backends}


def share(cell: Document) -> float:
    """How much of the tolerance a cell used; a document holds null for what is no number."""
    used = cell["tolerance_used"]
    return math.inf if used is None else float(used)
