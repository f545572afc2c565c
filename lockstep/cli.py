"""The command `lockstep`: makes parsers from each package's commands.toml and runs a command. A
user's mistake gives one line on stderr, with a suggestion, and exit code 2; a red result gives exit
code 1. A command names its function as "module:function", which is imported when it runs: importing
this module, and `--help`, import neither torch nor numba."""

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pkgutil import resolve_name
from textwrap import dedent, indent
from typing import Any, NoReturn

from lockstep import __version__, outfile
from lockstep.types import RuleError, did_you_mean

Commands = Any  # what add_subparsers returns: a private class of argparse
PRINT_HELP = "lockstep.cli:print_help"  # the call of a command that needs a subcommand
CORES = min(os.cpu_count() or 1, 8)  # the default that a table calls "cores"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a suggestion."""

    def __init__(self, *, examples: str = "", **options: Any) -> None:
        epilog = "examples:\n" + indent(dedent(examples).strip("\n"), "  ") if examples else None
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(epilog=epilog, allow_abbrev=False, formatter_class=formatter, **options)

    def error(self, message: str, hint: str = "") -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            option = re.match(r"argument (--[\w-]+)", message)
            place = f"{option[1]}: " if option else ""
            allowed = re.findall(r"[\w-]+", wrong[2])
            hint = did_you_mean(wrong[1], allowed, "")
            message = f"{place}{wrong[1]!r} is none of {', '.join(allowed)}"
        sentences = (f"{self.prog}: {message}.", hint, f"See `{self.prog} --help`.")
        print(" ".join(filter(None, sentences)), file=sys.stderr)
        raise SystemExit(2)

    def options(self) -> list[str]:
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def commands(self) -> Commands:
        return self.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)


def make_parser() -> Parser:
    parser = Parser(prog="lockstep", **read_table("lockstep"))
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    parser.set_defaults(call=PRINT_HELP, parser=parser)
    commands = parser.commands()
    for package in ("llm", "lab", "bench", "kernels"):
        add_commands(commands, f"lockstep.{package}")
    return parser


def print_help(args: argparse.Namespace) -> int:
    args.parser.print_help(sys.stderr)
    return 2


def read_table(package: str) -> dict[str, Any]:
    return tomllib.loads((files(package) / "commands.toml").read_text(encoding="utf-8"))


def add_commands(commands: Commands, package: str) -> None:
    """Adds the commands of a package's commands.toml: help, call, examples, `options` (names of
    shared ones), `groups` of options, and own options. One without a call has subcommands."""
    table, places = read_table(package), {"": commands}
    shared = table.pop("options", {})
    for name, entry in table.items():
        group, _, word = name.rpartition(" ")
        examples, text = entry.pop("examples", ""), entry["help"]
        texts = {"help": text, "description": f"{text[0].upper()}{text[1:]}.", "examples": examples}
        parser = places[group].add_parser(word, prog=f"lockstep {name}", **texts)
        parser.set_defaults(call=entry.get("call", PRINT_HELP), parser=parser)
        if "call" not in entry:
            places[name] = parser.commands()
        own = {key: words for key, words in entry.items() if isinstance(words, dict)}
        groups = own.pop("groups", {})
        _add_arguments(parser, own | {key: shared[key] for key in entry.get("options", ())})
        for group, options in groups.items():
            _add_arguments(parser.add_argument_group(group), options)


def _add_arguments(place: Any, options: Mapping[str, dict[str, Any]]) -> None:
    """Adds options from argparse's keywords; `least`: a whole number >= it; `type`: see TYPES."""
    for name, given in options.items():
        words = dict(given)  # a copy: commands share some
        if "least" in words:
            words |= {"type": partial(positive, least=words.pop("least")), "metavar": "N"}
        elif "type" in words:
            words |= {"type": TYPES[words["type"]], "metavar": words.get("metavar", "X")}
        if words.get("default") == "cores":
            words["default"] = CORES
        if words.get("action") == "append":
            words["help"] += "; repeatable"
        elif "default" in words:
            words["help"] += f" (default: {words['default']})"
        place.add_argument(name, **words)


def positive(text: str, least: int = 1) -> int:
    """Parses a whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number of at least {least}; got {text!r}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Parses N,N,...; the engine checks that they rise."""
    return tuple(positive(part) for part in text.split(","))


def token_bias(text: str) -> tuple[int, float]:
    """Parses ID=X."""
    token, _, amount = text.partition("=")
    try:
        return int(token), float(amount)
    except ValueError:
        raise argparse.ArgumentTypeError(f"an id and a number, like 42=-5; got {text!r}") from None


TYPES: dict[str, Any] = {"int": int, "float": float, "counts": counts, "token bias": token_bias}


def main(argv: Sequence[str] | None = None) -> int:
    args, extra = make_parser().parse_known_args(argv)
    if extra:
        wrong = next((word for word in extra if word.startswith("-")), extra[0]).partition("=")[0]
        kind = "unknown option" if wrong.startswith("-") else "unexpected argument"
        args.parser.error(f"{kind} {wrong}", did_you_mean(wrong, args.parser.options(), ""))
    try:
        check_outputs(args)
        if args.call.startswith("lockstep.lab."):
            # makes waiting threads sleep: set before torch or numba start any
            from lockstep.lab import isolate

            os.environ.setdefault(*isolate.WAITING)
        return with_revert(args)
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
    except BrokenPipeError:  # the reader has closed its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def check_outputs(args: argparse.Namespace) -> None:
    """Raises unless the files that a command will write can be written: before its work begins."""
    named = {f"--{name}": vars(args).get(name) for name in ("json", "html")}
    given = {option: where for option, where in named.items() if where is not None}
    for option, where in given.items():
        outfile.check(option, where)
    if vars(args).get("curves"):
        outfile.check("--svg-dir", os.path.join(args.svg_dir, "curves.svg"))
    if given and vars(args).get("list"):
        raise RuleError("--list only prints names", " ".join(given), "Leave one of them out")
    files = [os.path.realpath(where) for where in given.values() if where != "-"]
    if len(files) > len(set(files)):
        raise RuleError("--json and --html name two files", given["--json"], "Change one of them")


def with_revert(args: argparse.Namespace) -> int:
    """Imports and runs a command, with the bug that LOCKSTEP_REVERT names, if any, and says so."""
    call: Callable[[argparse.Namespace], int] = resolve_name(args.call)
    name = os.environ.get("LOCKSTEP_REVERT")
    if not name:
        return call(args)
    from lockstep.lab import reverts

    revert = reverts.load(name)
    notice = f"lockstep: LOCKSTEP_REVERT={name}: {revert.target} has its old bug: {revert.title}"
    print(notice, file=sys.stderr, flush=True)
    with reverts.swapped(revert):
        return call(args)


if __name__ == "__main__":
    sys.exit(main())
