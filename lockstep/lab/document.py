"""The JSON document of a run: environment (without which a measurement is worth nothing), date,
command, results; and the templates that make pages and reports from it. Every command of the lab
and of the benchmarks publishes one. Knows no tensors and runs nothing."""

import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lockstep import __version__, outfile
from lockstep.lab.reverts import ENVIRONMENT_VARIABLE
from lockstep.types import RuleError

PACKAGES = ("torch", "numba", "llvmlite", "numpy", "transformers")
VECTORS = ("avx2", "avx512f")  # vector sets worth naming beside a processor
VERDICTS = ("passed", "refused", "known", "failed")

Document = dict[str, Any]
Filters = Iterable[Callable[..., Any]]


def head() -> Document:
    """Returns the beginning of every document."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"command": command_line(), "date": now, "environment": environment()}


def environment() -> dict[str, str | int]:
    """Returns versions, commit, processor, cores, platform, without importing the packages."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return {
        "lockstep": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        **dict.fromkeys(PACKAGES, "not installed"),
        **{name: found.version for name in PACKAGES for found in distributions(name=name)},
        "cpu": cpu_model(),
        "cores": len(allowed) or os.cpu_count() or 1,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def cpu_model() -> str:
    """Returns the processor's name, with its vector sets that matter."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or "unknown"
    pairs = (line.partition(":") for line in info.read_text(encoding="utf-8").splitlines())
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    name, flags = fields.get("model name", "unknown"), fields.get("flags", "").split()
    return " ".join([name, *(v for v in VECTORS if v in flags)])


def commit() -> str:
    """Returns the package's commit, with + for local changes; "none" outside of a checkout."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    folder = Path(__file__).parent
    try:
        return subprocess.check_output(command, cwd=folder, text=True, stderr=DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def command_line() -> str:
    """Returns the command as typed, without the program's folder."""
    words = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    revert = os.environ.get(ENVIRONMENT_VARIABLE)
    return f"{ENVIRONMENT_VARIABLE}={revert} {words}" if revert else words


def publish(args: Namespace, doc: Any, lines: Iterable[str]) -> None:
    """Writes the document where --json says; prints lines, to stderr if the JSON is on stdout."""
    if args.json:
        write(doc, args.json)
    print("\n".join(lines), file=sys.stderr if args.json == "-" else sys.stdout)


def write(doc: Any, where: str) -> None:
    text = json.dumps(clean(doc), indent=1, allow_nan=False, ensure_ascii=False)
    outfile.write(where, text + "\n")


def clean(value: Any) -> Any:
    """Returns the value as JSON reads it back, with null for numbers that JSON lacks."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def read(where: str, command: str, *keys: str) -> Document:
    """Reads a document that `command --json` wrote and checks that it has these keys."""
    rule, remedy = f"--from names a document of `{command} --json`", "Write one with that command"
    try:
        value = json.loads(Path(where).read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(rule, f"{where}: {error.strerror}", remedy) from None
    except (ValueError, RecursionError):  # the latter if it is nested too deeply
        raise RuleError(rule, f"{where}: not JSON", remedy) from None
    if not isinstance(value, dict) or not set(keys) <= set(value):
        raise RuleError(rule, f"{where} without {', '.join(keys)}", remedy)
    return value


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Aligns columns to their widest entries, two blanks apart."""
    columns = []
    for i, column in enumerate(zip(*rows, strict=True)):
        justify, width = str.rjust if i in right else str.ljust, max(map(len, column))
        columns.append([justify(text, width) for text in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def run_document(cells: Iterable[Document], quick: bool, seconds: float, **more: Any) -> Document:
    """Returns the document of a run that judged `cells`, each as `Result.as_json` gives it."""
    kept = list(cells)
    return {
        **head(),
        "quick": quick,
        "revert": os.environ.get(ENVIRONMENT_VARIABLE, ""),
        "summary": {"seconds": round(seconds, 2), **summary(kept)},
        "cells": clean(kept),
        **clean(more),
    }


def summary(cells: Sequence[Document]) -> Document:
    """Counts verdicts by backend, with the cell that uses most of its tolerance."""
    backends: Document = {}
    for name in dict.fromkeys(c["backend"] for c in cells):
        mine = [c for c in cells if c["backend"] == name]
        used = {i: c["tolerance_used"] for i, c in enumerate(mine) if c["findings"]}
        at = max(used, key=lambda i: math.inf if used[i] is None else used[i], default=None)
        keys = ("cell", "out_error", "lse_error", "tolerance_used")
        backends[name] = {v: sum(c["verdict"] == v for c in mine) for v in VERDICTS}
        backends[name]["worst"] = None if at is None else {key: mine[at][key] for key in keys}
    failed = sum(c["verdict"] == "failed" for c in cells)
    return {"cells": len(cells), "failed": failed, "backends": backends}


def render(name: str, filters: Filters = (), package: str = "lockstep.lab", **values: Any) -> str:
    """Renders the template `name`.j2 of a package. A missing value is an error; HTML is escaped."""
    engine = Environment(
        loader=PackageLoader(package, ""),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    engine.filters.update({f.__name__: f for f in filters})
    return engine.get_template(f"{name}.j2").render(**values)


def text(name: str, package: str = "lockstep.lab", **values: Any) -> list[str]:
    """Renders a template for a terminal and returns its lines."""
    made = render(name, (aligned, number), package, variable=ENVIRONMENT_VARIABLE, **values)
    return made.rstrip("\n").split("\n")


def number(value: float | None) -> str:
    """Formats a number with two significant digits."""
    return "not a number" if value is None else f"{value:.2g}"
