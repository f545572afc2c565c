"""What the parsers of all commands share: a parser that answers a slip in one line and suggests,
and the kinds of option there are.

Knows argparse and no command; imports neither torch nor numba, so that `--help` stays quick. A
command names its function as "module:function", which is imported when the command runs. The
module `parser` of each package adds that package's commands; `cli` joins them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from textwrap import dedent, indent
from typing import Any, NoReturn

Commands = Any  # what add_subparsers returns; argparse keeps its class to itself
Container = Any  # a parser or a group of its options: the same
Text = str | None


class Parser(argparse.ArgumentParser):
    """Errors are one line, and suggest."""

    def __init__(self, *, examples: str = "", **options: Any) -> None:
        epilog = "examples:\n" + indent(dedent(examples).strip("\n"), "  ") if examples else None
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(epilog=epilog, allow_abbrev=False, formatter_class=formatter, **options)

    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            option = re.match(r"argument (--[\w-]+)", message)
            place = f"{option[1]}: " if option else ""
            allowed = re.findall(r"[\w-]+", wrong[2])
            hint = suggestion(wrong[1], allowed)
            message = f"{place}{wrong[1]!r} is none of {', '.join(allowed)}{hint}"
        stop = "" if message.endswith("?") else "."
        print(f"{self.prog}: {message}{stop} See `{self.prog} --help`.", file=sys.stderr)
        raise SystemExit(2)

    def options(self) -> list[str]:
        """Every option this parser knows."""
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def commands(self) -> Commands:
        """Where sub-commands are added."""
        return self.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)


def command(
    commands: Commands, prog: str, description: str, *, call: str = "", examples: str = ""
) -> Parser:
    """A sub-command; one without a "module:function" of its own prints its help."""
    sentence = description[0].upper() + description[1:] + "."
    texts = {"help": description, "description": sentence, "examples": examples}
    parser: Parser = commands.add_parser(prog.rpartition(" ")[2], prog=prog, **texts)
    parser.set_defaults(call=call, parser=parser)
    return parser


def function(args: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """What the parsed command calls, imported now."""
    if not args.call:
        return print_help
    module, _, name = args.call.partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(import_module(module), name)
    return found


def print_help(args: argparse.Namespace) -> int:
    """A command that wants another word behind it."""
    args.parser.print_help(sys.stderr)
    return 2


def suggestion(word: str, allowed: Sequence[str]) -> str:
    """`. Did you mean X?`, if there is an X."""
    close = get_close_matches(word, allowed, 1, 0.5)
    return f". Did you mean {close[0]}?" if close else ""


def flag(parser: Container, name: str, help: Text = None, default: bool | None = False) -> None:
    """An option without a value."""
    parser.add_argument(name, action="store_true", default=default, help=help)


def value(
    parser: Container, name: str, metavar: str, help: Text = None, default: Text = None
) -> None:
    """An option with a text behind it."""
    parser.add_argument(name, metavar=metavar, default=default, help=_with(help, default))


def number(
    parser: Container, name: str, help: Text = None, default: int | None = None, *, least: int = 1
) -> None:
    """An option with a whole number behind it, from `least` (0 or 1) on."""
    kind = positive if least else whole
    parser.add_argument(name, type=kind, metavar="N", default=default, help=_with(help, default))


def several(parser: Container, name: str, metavar: str, help: str) -> None:
    """An option that may be given more than once."""
    parser.add_argument(name, action="append", metavar=metavar, help=f"{help}; repeatable")


def json_file(parser: Container) -> None:
    """Where the document goes."""
    value(parser, "--json", "F", "write one JSON document; - for stdout, and nothing else there")


def whole(text: str) -> int:
    """0, 1, 2, ..."""
    return positive(text, least=0)


def positive(text: str, least: int = 1) -> int:
    """1, 2, 3, ..., or from `least` on."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number from {least} on; got {text!r}")
    return int(text)


def _with(help: Text, default: object) -> str | None:
    return help if default is None else f"{help} (default: {default})"
