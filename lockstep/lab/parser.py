"""The commands of `lockstep lab` and `lockstep check-env`: what `commands.toml` beside this file
says of them, as parsers.

Knows how such a table reads; whether there is such a cell or backend is for `commands` to say.
Imports nothing heavy; `cli` calls it, and `bench.parser` for its own table.
"""

from __future__ import annotations

import os
import tomllib
from functools import partial
from importlib.resources import files
from typing import Any

from lockstep.options import Commands, Parser, command, positive

CORES = min(os.cpu_count() or 1, 8)  # the default that a table calls "cores"
EXAMPLES = """
lockstep lab run --quick
lockstep lab reverts
lockstep lab show cpu/decode/window --step 1"""


def add(commands: Commands) -> None:
    """`lockstep lab ...`."""
    about = "measure the promise, and prove that it is measured"
    lab = command(commands, "lockstep lab", about, examples=EXAMPLES)
    lab.set_defaults(lab=True)
    add_table(lab.commands(), "lockstep.lab", "lab ")


def add_check_env(commands: Commands) -> None:
    """`lockstep check-env`."""
    add_table(commands, "lockstep.lab", "check-env")


def add_table(commands: Commands, package: str, begin: str) -> None:
    """The commands in a package's table whose names begin so."""
    table = tomllib.loads((files(package) / "commands.toml").read_text(encoding="utf-8"))
    for name, entry in table.items():
        if not name.startswith(begin):
            continue
        call, examples = entry["call"], entry["examples"]
        parser = command(commands, f"lockstep {name}", entry["help"], call=call, examples=examples)
        own = {key: words for key, words in entry.items() if isinstance(words, dict)}
        shared = {key: table["options"][key] for key in entry["options"]}
        for key, words in {**own, **shared}.items():
            _add_argument(parser, key, **words)


def _add_argument(parser: Parser, name: str, least: int | None = None, **words: Any) -> None:
    if least is not None:
        words |= {"type": partial(positive, least=least), "metavar": "N"}
    if words.get("default") == "cores":
        words["default"] = CORES
    if words.get("action") == "append":
        words["help"] += "; repeatable"
    elif "default" in words:
        words["help"] += f" (default: {words['default']})"
    parser.add_argument(name, **words)
