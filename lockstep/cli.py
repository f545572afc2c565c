"""The command `lockstep`: joins the parsers of the packages, and runs what was asked for. A user's
mistake is one line on stderr and exit code 2; a red result is exit code 1. Importing this, and
`--help`, touch neither torch nor numba: a command's function is imported when it runs."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from lockstep import __version__, outfile
from lockstep.options import Parser, add_commands, function, suggestion
from lockstep.types import RuleError

EXAMPLES = """
lockstep generate "def fib(n):"                    the built-in model continues your text
lockstep check-env                                 what is installed, which backends work
lockstep lab run --quick --html lab.html           the quick matrix, and a page to look at
lockstep lab show cpu/decode/window                one cell, step by step
lockstep bench attention --json attention.json     speed of the attention backends
lockstep bench engine --json engine.json           speed of the engine, against transformers

LOCKSTEP_REVERT=NAME in the environment runs any command with that historical bug put back
(`lockstep lab reverts --list`)."""


def make_parser() -> Parser:
    parser = Parser(
        prog="lockstep",
        description="LLM inference with the same bits every time, and the lab that proves it.",
        examples=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    parser.set_defaults(call="", parser=parser)
    commands = parser.commands()
    for package in ("llm", "lab", "bench", "kernels"):
        add_commands(commands, f"lockstep.{package}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args, extra = make_parser().parse_known_args(argv)
    if extra:
        wrong = next((word for word in extra if word.startswith("-")), extra[0]).partition("=")[0]
        kind = "unknown option" if wrong.startswith("-") else "unexpected argument"
        args.parser.error(f"{kind} {wrong}{suggestion(wrong, args.parser.options())}")
    try:
        check_outputs(args)
        if args.call.startswith("lockstep.lab."):
            # its threads sleep while they wait: said before torch or numba start any
            from lockstep.lab import isolate

            os.environ.setdefault(*isolate.WAITING)
        return with_revert(function(args), args)
    except RuleError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "lockstep":
            raise
        rule, got = "what this command needs is installed", f"no module {error.name}"
        needed = RuleError(rule, got, "Try: pip install 'lockstep-llm[lab,bench,gpu]'")
        print(f"lockstep: {needed}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def check_outputs(args: argparse.Namespace) -> None:
    """What a command will write can be written: found out before its work, not after."""
    named = {f"--{name}": vars(args).get(name) for name in ("json", "html")}
    given = {option: where for option, where in named.items() if where is not None}
    for option, where in given.items():
        outfile.check(option, where)
    if vars(args).get("curves"):
        outfile.check("--svg-dir", os.path.join(args.svg_dir, "curves.svg"))
    files = [os.path.realpath(where) for where in given.values() if where != "-"]
    if len(files) > len(set(files)):
        rule = "--json and --html name two files"
        raise RuleError(rule, given["--json"], "Choose another place for one of them")


def with_revert(call: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a command; with the bug that LOCKSTEP_REVERT names, and then says so."""
    if not os.environ.get("LOCKSTEP_REVERT"):
        return call(args)
    from lockstep.lab import reverts

    with reverts.from_environment() as revert:
        if revert is not None:
            name = f"lockstep: {reverts.VARIABLE}={revert.name}: {revert.target} is the old one"
            print(f"{name}: {revert.title}", file=sys.stderr, flush=True)
        return call(args)


if __name__ == "__main__":
    sys.exit(main())
