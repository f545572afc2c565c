"""What ran, as one JSON document: where, when, by which command, every cell, every revert. Pages
and matrices are made from it.

Knows no tensors and runs nothing. The lab's commands write it and read it back; `report` and
`matrix` take it as it is.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep import __version__, outfile
from lockstep.lab.environment import environment
from lockstep.lab.reverts import VARIABLE
from lockstep.types import RuleError

VERDICTS = ("passed", "refused", "known", "failed")

Document = dict[str, Any]


def document(cells: Iterable[dict[str, Any]], quick: bool, seconds: float, **more: Any) -> Document:
    """The document of a run that judged `cells`, each as `Result.as_json` gives it. `more` holds
    what else there is, like kills."""
    kept = list(cells)
    revert = os.environ.get(VARIABLE, "")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    head = {
        "lockstep": __version__,
        "command": command_line(),
        "date": now,
        "quick": quick,
        "revert": revert,
        "environment": environment(),
    }
    return {
        **head,
        "summary": {"seconds": round(seconds, 2), **summary(kept)},
        "cells": clean(kept),
        **clean(more),
    }


def command_line() -> str:
    """The command as it was typed, without where it lies."""
    words = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    revert = os.environ.get(VARIABLE)
    return f"{VARIABLE}={revert} {words}" if revert else words


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts by backend, and the worst cell of each by its share of the tolerance."""
    backends: dict[str, Any] = {}
    for name in dict.fromkeys(c["backend"] for c in cells):
        mine = [c for c in cells if c["backend"] == name]
        worst = max((c for c in mine if c["findings"]), key=share, default=None)
        counts: dict[str, Any] = {v: sum(c["verdict"] == v for c in mine) for v in VERDICTS}
        counts["worst"] = worst and {
            key: worst[key] for key in ("cell", "out_error", "lse_error", "tolerance_used")
        }
        backends[name] = counts
    return {
        "cells": len(cells),
        "failed": sum(c["verdict"] == "failed" for c in cells),
        "backends": backends,
    }


def share(cell: dict[str, Any]) -> float:
    """How much of the tolerance a cell used; a document holds null for what is no number."""
    used = cell["tolerance_used"]
    return math.inf if used is None else float(used)


def clean(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(value: Any, where: str) -> None:
    """To a file, or with "-" to stdout."""
    outfile.write(
        where, json.dumps(clean(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    )


def read(where: str) -> Document:
    """A document that `lab run --json` wrote."""
    try:
        value = json.loads(Path(where).read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(
            "--from names a file of `lockstep lab run --json`",
            f"{where}: {error.strerror}",
            "Run that first",
        ) from None
    except ValueError:
        raise RuleError(
            "--from names a JSON document", where, "Write one with `lockstep lab run --json`"
        ) from None
    if not isinstance(value, dict) or not {"cells", "environment", "summary"} <= set(value):
        raise RuleError(
            "--from names a document of `lockstep lab run --json`",
            f"{where} without cells",
            "Write one with that command",
        )
    return value
