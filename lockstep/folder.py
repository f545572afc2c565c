"""Reads a model's folder, which is not trusted: files by plain names that stay inside it, texts of
a bounded size, JSON objects. Used by `models.loader` and `text`. No torch."""

import json
import math
import os
from pathlib import Path
from typing import Any

from lockstep.types import RuleError

TEXT_BYTES = 64 << 20


def has(folder: Path, name: str) -> bool:
    """Whether the folder has an entry of this name, even a broken link, which cannot be read."""
    return os.path.lexists(folder / name)


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in the folder, or in the blobs that the hub cache links to."""
    path, rule = folder / name, "a model's files are inside its folder"
    if not name or Path(name).name != name or name in (".", ".."):
        raise RuleError(rule, repr(name), "Use plain file names")
    roots = [folder.resolve()]
    if folder.parent.name == "snapshots":
        roots.append((folder.parent.parent / "blobs").resolve())
    there = Path(os.path.realpath(path))  # does not raise for a link to itself
    if not any(there.is_relative_to(root) for root in roots):
        raise RuleError(rule, f"{name} → {there}", "Replace the link by the file")
    return path


def read_text(folder: Path, name: str) -> str:
    path = inside(folder, name)
    if not path.is_file():
        raise RuleError(f"a model folder holds {name}", str(folder), "Check the path")
    if path.stat().st_size > TEXT_BYTES:
        rule = f"{name} is at most {TEXT_BYTES} bytes"
        raise RuleError(rule, str(path.stat().st_size), "Check the file")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{error.object[error.start]:02X} at {error.start}"
        raise RuleError(f"{name} is text in UTF-8", got, "Download the model again") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Returns a JSON object of the folder; raises if a number is not finite."""

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise RuleError(f"numbers in {name} are finite", number, "Check the file")
        return float(number)

    text = read_text(folder, name)
    try:
        value = json.loads(text, parse_float=finite, parse_constant=finite)
    except RuleError:
        raise
    except (ValueError, RecursionError) as error:
        raise RuleError(f"{name} is JSON", str(error), "Check the file") from error
    if not isinstance(value, dict):
        raise RuleError(f"{name} is a JSON object", type(value).__name__, "Check the file")
    return value
