"""Parsers: one that answers a slip in one line and suggests, and how a package's commands.toml
becomes such parsers. A command names its function as "module:function", which is imported when the
command runs: neither torch nor numba is imported here, so that `--help` stays quick."""

import argparse
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.resources import files
from textwrap import dedent, indent
from typing import Any, NoReturn

Commands = Any  # what add_subparsers returns; argparse keeps its class to itself
CORES = min(os.cpu_count() or 1, 8)  # the default that a table calls "cores"


class Parser(argparse.ArgumentParser):
    """Errors are one line, and suggest."""

    def __init__(self, *, examples: str = "", **options: Any) -> None:
        epilog = "examples:\n" + indent(dedent(examples).strip("\n"), "  ") if examples else None
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(epilog=epilog, allow_abbrev=False, formatter_class=formatter, **options)

    def error(self, message: str) -> NoReturn:
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
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def commands(self) -> Commands:
        return self.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)


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


def add_commands(commands: Commands, package: str) -> None:
    """The commands in a package's table, commands.toml: help, call, examples, `options` (names of
    shared ones), `groups` of options, and options of its own. One without a call has others."""
    table = tomllib.loads((files(package) / "commands.toml").read_text(encoding="utf-8"))
    shared, places = table.pop("options", {}), {"": commands}
    for name, entry in table.items():
        group, _, word = name.rpartition(" ")
        call, examples, text = entry.pop("call", ""), entry.pop("examples", ""), entry["help"]
        texts = {"help": text, "description": f"{text[0].upper()}{text[1:]}.", "examples": examples}
        parser = places[group].add_parser(word, prog=f"lockstep {name}", **texts)
        parser.set_defaults(call=call, parser=parser)
        if not call:  # it prints its help
            places[name] = parser.commands()
        own = {key: words for key, words in entry.items() if isinstance(words, dict)}
        groups = own.pop("groups", {})
        _add_arguments(parser, own | {key: shared[key] for key in entry.get("options", ())})
        for group, options in groups.items():
            _add_arguments(parser.add_argument_group(group), options)


def _add_arguments(place: Any, options: Mapping[str, dict[str, Any]]) -> None:
    """What argparse takes; `least` makes it a whole number from there on, `type` names a TYPE."""
    for name, given in options.items():
        words = dict(given)  # tables share some
        least = words.pop("least", None)
        if least is not None:
            words |= {"type": partial(positive, least=least), "metavar": "N"}
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
    """1, 2, 3, ..., or from `least` on."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number from {least} on; got {text!r}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """N,N,...: whether they rise is the engine's to say."""
    return tuple(positive(part) for part in text.split(","))


def token_bias(text: str) -> tuple[int, float]:
    """ID=X."""
    token, _, amount = text.partition("=")
    try:
        return int(token), float(amount)
    except ValueError:
        rule = f"a token id and a number, like 42=-5; got {text!r}"
        raise argparse.ArgumentTypeError(rule) from None


TYPES: dict[str, Any] = {"int": int, "float": float, "counts": counts, "token bias": token_bias}
