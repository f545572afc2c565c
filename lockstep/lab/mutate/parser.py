"""The options of `lockstep lab mutate`. Imports nothing heavy; `lab.parser` calls it."""

from __future__ import annotations

from lockstep.options import Commands, command, flag, json_file, number, several, value

MODULES = (
    "packages or files of lockstep, like plan or lockstep/plan/build.py (default: plan kv "
    "attention sample sched llm run)"
)


def add(commands: Commands) -> None:
    """`lockstep lab mutate`."""
    parser = command(
        commands,
        "lockstep lab mutate",
        "small mutants of the engine: does any test or cell notice?",
        call="lockstep.lab.mutate.command:run",
        examples="""
        lockstep lab mutate plan --count 20 --seed 8       20 mutants of lockstep/plan; who notices?
        lockstep lab mutate lockstep/kv/pages.py --list    the mutants and their diffs, nothing run
        lockstep lab mutate sched --mutant 7b430d4da2f6 --again    one of them once more
        lockstep lab mutate --json bench/results/lab-mutate.json
                                             all seven packages; a run that was ended goes on""",
    )
    parser.add_argument("module", nargs="*", metavar="MODULE", help=MODULES)
    number(parser, "--count", "mutants of each module", 20)
    number(parser, "--seed", "the draw is a function of it", 0, least=0)
    several(parser, "--skip", "W", "no mutants of files with this in their path")
    several(parser, "--mutant", "ID", "only this one of the draw")
    flag(parser, "--again", "try mutants again that an earlier run has tried")
    flag(parser, "--alone", "only against what reaches them: survivors do not meet the rest")
    flag(parser, "--stale", "keep the map of who reaches what though sources have changed")
    several(parser, "--units", "W", "only test files and recipes with this in their name")
    flag(parser, "--list", "print the mutants, run nothing")
    value(parser, "--work", "DIR", "map, trees and journals", default="build/mutate")
    verdicts = "bench/results/lab-mutate-verdicts.json"
    value(parser, "--verdicts", "F", "what was found out about survivors", default=verdicts)
    number(parser, "--workers", "processes, each with a tree of its own", 1)
    json_file(parser)
