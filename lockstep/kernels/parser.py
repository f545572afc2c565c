"""The options of `lockstep kernels`. Imports nothing heavy; `cli` calls it."""

from __future__ import annotations

from lockstep.options import Commands, command, flag, json_file, number, several


def add(commands: Commands) -> None:
    """`lockstep kernels`."""
    parser = command(
        commands,
        "lockstep kernels",
        "the GPU kernels: list them, compile them without a GPU",
        call="lockstep.kernels.triton.compile:run",
        examples="""
        lockstep kernels --list
        lockstep kernels --compile sm_90 --jobs 2          every variant, without a GPU
        lockstep kernels --compile sm_90 --only "attend 128/128" --json kernels.json""",
    )
    arch = "compile for sm_90; print registers, spills, shared memory"
    parser.add_argument("--compile", choices=("sm_90",), metavar="ARCH", help=arch)
    number(parser, "--jobs", "processes", 1)
    several(parser, "--only", "TEXT", "only variants whose name has this text")
    flag(parser, "--list", "list what would be compiled")
    json_file(parser)
