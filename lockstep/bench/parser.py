"""The commands of `lockstep bench`: what `commands.toml` beside this file says of them. Imports
nothing heavy; `cli` calls it."""

from __future__ import annotations

from lockstep.lab.parser import add_table
from lockstep.options import Commands, command


def add(commands: Commands) -> None:
    """`lockstep bench ...`."""
    bench = command(commands, "lockstep bench", "measure speed")
    add_table(bench.commands(), "lockstep.bench", "bench ")
