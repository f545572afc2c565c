"""The options of `lockstep lab ...` and `lockstep check-env`.

Knows their names and kinds; whether there is such a cell or backend is for `commands` to say.
Imports nothing heavy; `cli` calls it.
"""

from __future__ import annotations

import os

from lockstep.lab.mutate import parser as mutate
from lockstep.options import Commands, Parser, command, flag, json_file, number, several, value


def add(commands: Commands) -> None:
    """`lockstep lab ...`."""
    lab = command(
        commands,
        "lockstep lab",
        "measure the promise, and prove that it is measured",
        examples="""
        lockstep lab run --quick
        lockstep lab reverts
        lockstep lab show cpu/decode/window --step 1""",
    )
    lab.set_defaults(lab=True)
    kinds = lab.commands()
    for add_one in (_run, _reverts, _matrix, _fuzz, _golden, mutate.add, _interrupts, _show):
        add_one(kinds)


def add_check_env(commands: Commands) -> None:
    """`lockstep check-env`."""
    parser = command(
        commands,
        "lockstep check-env",
        "versions, processor, backends and why they work or not",
        call="lockstep.lab.check_env:run",
        examples="lockstep check-env --json -",
    )
    json_file(parser)


def _run(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep lab run",
        "judge cells: backend x recipe x feature",
        call="lockstep.lab.commands:run",
        examples="""
        lockstep lab run                                   every cell of cpu and reference
        lockstep lab run --quick --html build/lab.html     few features and properties, and a page
        lockstep lab run --backend cpu --recipe decode --feature window
        lockstep lab run --backend theirs --json -         somebody else's, as one JSON document""",
    )
    _backends(parser)
    several(parser, "--recipe", "R", "only this kind of step, or several with commas")
    several(parser, "--feature", "F", "only this kind of model, or several with commas")
    flag(parser, "--quick", "a handful of features and fewer properties, in about a minute")
    _device(parser)
    _outputs(parser)
    _no_checks(parser)


def _reverts(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep lab reverts",
        "put historical bugs back and see the lab go red",
        call="lockstep.lab.commands:kills",
        examples="""
        lockstep lab reverts                   put every bug back; the lab must go red each time
        lockstep lab reverts --name NAME --html kill.html
        lockstep lab reverts --from lab.json --html lab.html
                                               one page with the matrix of an earlier `lab run`""",
    )
    several(parser, "--name", "N", "only this revert, or several with commas")
    value(parser, "--backend", "B", "the backend to run them on", default="cpu")
    _device(parser)
    _from(parser)
    _outputs(parser)


def _matrix(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep lab matrix",
        "write docs/matrix.md and docs/known-failures.md",
        call="lockstep.lab.commands:pages",
        examples="""
        lockstep lab matrix                            run every cell, write both pages
        lockstep lab matrix --from lab.json            the same from an earlier `lab run --json`
        lockstep lab matrix --check                    are they what this code may claim? (no run)
        lockstep lab matrix --check --from lab.json    are they what was found?""",
    )
    _backends(parser)
    flag(parser, "--check", "write nothing; exit 1 if the pages differ from what is generated")
    value(parser, "--docs", "DIR", "where the pages are", default="docs")
    _from(parser)
    _workers(parser)


def _fuzz(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep lab fuzz",
        "random traces of the whole engine: every request must be its lone run",
        call="lockstep.lab.commands:traces",
        examples="""
        lockstep lab fuzz --traces 10000 --json fuzz.json
        lockstep lab fuzz --first 4711 --traces 1          one trace again""",
    )
    number(parser, "--traces", "how many", 300)
    first = "number of the first one: a trace is a function of its number"
    number(parser, "--first", first, 0, least=0)
    value(parser, "--backend", "B", "the attention backend", default="cpu")
    _device(parser)
    json_file(parser)
    _workers(parser)


def _golden(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep lab golden",
        "recorded answers: has any bit changed?",
        call="lockstep.lab.golden:run",
        examples="""
        lockstep lab golden             do all recorded answers still have their bits?
        lockstep lab golden --write     add the answers that the file does not have yet""",
    )
    value(parser, "--file", "F", "the record", default="tests/golden.json")
    flag(parser, "--write", "add what is missing; a recorded answer is never replaced")
    _device(parser)
    json_file(parser)


def _interrupts(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep lab interrupts",
        "interrupts at any moment: every answer must keep its bits",
        call="lockstep.lab.commands:interrupts",
        examples="""
        lockstep lab interrupts --count 2000 --json interrupts.json
        lockstep lab interrupts --count 100 --aimed lines
                                        and one at every line that a call and a recovery execute""",
    )
    number(parser, "--count", "interrupts that strike", 100)
    number(parser, "--seed", "number of the first trial", 0, least=0)
    aimed = "then one at each of those that a call executes"
    parser.add_argument("--aimed", choices=("lines", "bytecodes"), help=aimed)
    json_file(parser)


def _show(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep lab show",
        "one cell, step by step: plans, pages, every row against its answer",
        call="lockstep.lab.commands:cell_story",
        examples="""
        lockstep lab show cpu/verify-tree/dense            the whole story
        lockstep lab show cpu/verify-tree/dense --step 1   one step, every row
        LOCKSTEP_REVERT=NAME lockstep lab show cpu/decode/window --no-checks""",
    )
    cell = "backend/recipe/feature, like cpu/decode/window"
    parser.add_argument("cell", metavar="CELL", help=cell)
    number(parser, "--step", "only this step, in full", least=0)
    _device(parser)
    _no_checks(parser)
    json_file(parser)


def _backends(parser: Parser) -> None:
    backend = "repeatable, or with commas (default: cpu,reference)"
    parser.add_argument("--backend", action="append", metavar="B", help=backend)


def _device(parser: Parser) -> None:
    value(parser, "--device", "D", "where cells are computed", default="cpu")
    value(parser, "--dtype", "T", "of activations; without it the device's first")


def _from(parser: Parser) -> None:
    source = "take the cells from a JSON document of an earlier `lab run`"
    parser.add_argument("--from", dest="source", metavar="F", help=source)


def _workers(parser: Parser) -> None:
    most = min(os.cpu_count() or 1, 8)
    number(parser, "--workers", "processes; 0 runs everything in this one", most, least=0)


def _no_checks(parser: Parser) -> None:
    flag(parser, "--no-checks", "do not check plans before they run: for bugs that a check stops")


def _outputs(parser: Parser) -> None:
    value(parser, "--html", "F", "write a page to look at")
    flag(parser, "--list", "list what would run")
    json_file(parser)
    _workers(parser)
