"""The command `lockstep`: options, help, and errors a person can read. What a command does is
written where it belongs.

Importing this, and `--help`, touch neither torch nor numba: every command imports what it needs
when it runs. A user's mistake is one line on stderr and exit code 2; a red result is exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from lockstep import __version__, outfile
from lockstep.types import RuleError

EXAMPLES = {
    "lockstep": """
      lockstep generate "def fib(n):"                    the built-in model continues your text
      lockstep check-env                                 what is installed, which backends work
      lockstep lab run --quick --html lab.html           the quick matrix, and a page to look at
      lockstep lab show cpu/decode/window                one cell, step by step
      lockstep bench attention --json attention.json     speed of the attention backends
      lockstep bench engine --json engine.json           speed of the whole engine, against transformers

    LOCKSTEP_REVERT=NAME in the environment runs any command with that historical bug put back (`lockstep lab reverts --list`).""",
    "lockstep generate": """
      lockstep generate "def binary_search(items, target):"
      lockstep generate --temperature 0.8 --seed 7 --n 3 "class Stack:" --json -
      lockstep generate --model ./my-model --file prompts.txt --max-tokens 64 --json out.json""",
    "lockstep lab": """
      lockstep lab run --quick
      lockstep lab reverts
      lockstep lab show cpu/decode/window --step 1""",
    "lockstep lab run": """
      lockstep lab run                                   every cell of cpu and reference
      lockstep lab run --quick --html build/lab.html     a handful of features, fewer properties, and a page
      lockstep lab run --backend cpu --recipe decode --feature window
      lockstep lab run --backend theirs --json -         somebody else's backend, as one JSON document""",
    "lockstep lab reverts": """
      lockstep lab reverts                               put every bug back; the lab must go red each time
      lockstep lab reverts --name NAME --html kill.html
      lockstep lab reverts --from lab.json --html lab.html    one page with the matrix of an earlier `lab run --json lab.json`""",
    "lockstep lab matrix": """
      lockstep lab matrix                                run every cell, write docs/matrix.md and docs/known-failures.md
      lockstep lab matrix --from lab.json                the same from an earlier `lab run --json lab.json`
      lockstep lab matrix --check                        are the pages what this code may claim? (runs nothing)
      lockstep lab matrix --check --from lab.json        are the pages what was found?""",
    "lockstep lab fuzz": """
      lockstep lab fuzz --traces 10000 --json fuzz.json
      lockstep lab fuzz --first 4711 --traces 1          one trace again""",
    "lockstep lab golden": """
      lockstep lab golden                                do all recorded answers still have their bits?
      lockstep lab golden --write                        add the answers that the file does not have yet""",
    "lockstep lab mutate": """
      lockstep lab mutate plan --count 20 --seed 8       20 small mutants of lockstep/plan; who notices them?
      lockstep lab mutate lockstep/kv/pages.py --list    the mutants and their diffs, nothing run
      lockstep lab mutate sched --mutant 7b430d4da2f6 --again    one of them once more
      lockstep lab mutate --json bench/results/lab-mutate.json   all seven packages; a run that was ended goes on""",
    "lockstep lab interrupts": """
      lockstep lab interrupts --count 2000 --json interrupts.json
      lockstep lab interrupts --count 100 --aimed lines  and one at every line that a call and a recovery execute""",
    "lockstep lab show": """
      lockstep lab show cpu/verify-tree/dense            the whole story
      lockstep lab show cpu/verify-tree/dense --step 1   one step, every row
      LOCKSTEP_REVERT=NAME lockstep lab show cpu/decode/window --no-checks""",
    "lockstep bench attention": """
      lockstep bench attention --quick
      lockstep bench attention --threads 2 --repeat 20 --json bench/results/attention.json""",
    "lockstep bench engine": """
      lockstep bench engine --quick                      everything once, small: does it run?
      lockstep bench engine --device cpu --peer transformers --curves --json bench/results/engine-cpu.json
      lockstep bench engine --case decode --case mixed --model builtin --repeat 5
      lockstep bench engine --from bench/results/engine-cpu.json --markdown""",
    "lockstep bench compare": """
      lockstep bench compare --base HEAD~1 --case attention
      lockstep bench compare --base 0d88767 --repeat 7 --json bench/results/compare.json""",
    "lockstep kernels": """
      lockstep kernels --list
      lockstep kernels --compile sm_90 --jobs 2          every GPU kernel variant, without a GPU
      lockstep kernels --compile sm_90 --only "attend 128/128" --json kernels.json""",
    "lockstep check-env": """
      lockstep check-env --json -""",
}


class Parser(argparse.ArgumentParser):
    """Errors are one line, and suggest."""

    def __init__(self, **options: Any) -> None:
        examples = EXAMPLES.get(options.get("prog", ""))
        lines = [line.removeprefix("    ") for line in (examples or "").splitlines()]
        epilog = "examples:" + "\n".join(lines) if examples else None
        super().__init__(
            **options,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            allowed = re.findall(r"[\w-]+", wrong[2])
            message = (
                f"{self._argument(message)}{wrong[1]!r} is none of "
                f"{', '.join(allowed)}{suggestion(wrong[1], allowed)}"
            )
        print(
            f"{self.prog}: {message}{'' if message.endswith('?') else '.'} See `{self.prog} "
            "--help`.",
            file=sys.stderr,
        )
        raise SystemExit(2)

    def _argument(self, message: str) -> str:
        option = re.match(r"argument (--[\w-]+)", message)
        return f"{option[1]}: " if option else ""

    def options(self) -> list[str]:
        """Every option this parser knows."""
        return [
            name
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--")
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Parses, runs, and turns errors of the user into one line. Returns the exit code."""
    args, extra = make_parser().parse_known_args(argv)
    if extra:
        wrong = next((word for word in extra if word.startswith("-")), extra[0]).partition("=")[0]
        kind = "unknown option" if wrong.startswith("-") else "unexpected argument"
        args.parser.error(f"{kind} {wrong}{suggestion(wrong, args.parser.options())}")
    try:
        check_outputs(args)
        if args.lab:
            be_patient()
        return with_revert(args.call, args)
    except RuleError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def check_outputs(args: argparse.Namespace) -> None:
    """What a command will write can be written: found out before its work, not after."""
    given = {
        f"--{name}": vars(args)[name]
        for name in ("json", "html")
        if vars(args).get(name) is not None
    }
    for option, where in given.items():
        outfile.check(option, where)
    if vars(args).get("curves"):
        outfile.check("--svg-dir", os.path.join(args.svg_dir, "curves.svg"))
    files = [os.path.realpath(where) for where in given.values() if where != "-"]
    if len(files) > len(set(files)):
        raise RuleError(
            "--json and --html name two files",
            given["--json"],
            "Choose another place for one of them",
        )


def be_patient() -> None:
    """The lab's own threads sleep while they wait; it has to be said before torch or numba start
    any."""
    from lockstep.lab import isolate

    os.environ.setdefault(*isolate.WAITING)


def with_revert(call: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Runs a command; with the bug that LOCKSTEP_REVERT names, and then says so."""
    if not os.environ.get("LOCKSTEP_REVERT"):
        return call(args)
    from lockstep.lab import reverts

    with reverts.from_environment() as revert:
        if revert is not None:
            print(
                f"lockstep: {reverts.VARIABLE}={revert.name}: {revert.target} is the old one: "
                f"{revert.title}",
                file=sys.stderr,
                flush=True,
            )
        return call(args)


def suggestion(word: str, allowed: Sequence[str]) -> str:
    """`. Did you mean X?`, if there is an X."""
    close = get_close_matches(word, allowed, 1, 0.5)
    return f". Did you mean {close[0]}?" if close else ""


def make_parser() -> Parser:
    """All commands."""
    parser = Parser(
        prog="lockstep",
        description="LLM inference with the same bits every time, and the lab that proves it.",
    )
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    parser.set_defaults(call=lambda args: _help(parser), parser=parser, lab=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    _generate(commands)
    _lab(commands)
    _bench(commands)
    _kernels(commands)
    env = _command(
        commands,
        "lockstep check-env",
        "versions, processor, backends and why they work or not",
        check_env,
    )
    _json(env)
    return parser


def _generate(commands: Any) -> None:
    parser = _command(commands, "lockstep generate", "continue prompts with a model", generate)
    parser.add_argument(
        "prompt", nargs="*", metavar="PROMPT", help="text to continue; several run as one batch"
    )
    parser.add_argument(
        "--file", metavar="F", help="one more prompt per line of this file; - for stdin"
    )
    parser.add_argument("--quiet", action="store_true", help="do not say what was chosen at start")
    _json(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--model", metavar="M", help="a folder or a hub id (default: the built-in model)"
    )
    for name, says in (
        ("device", "cpu"),
        ("dtype", "float32"),
        ("kv-cache-dtype", "float32, bfloat16 or float8_e4m3"),
        ("attention-backend", "by name"),
    ):
        engine.add_argument(f"--{name}", metavar="X", help=says)
    for name in (
        "page-size",
        "chunked-prefill-size",
        "max-running-requests",
        "max-total-tokens",
        "context-length",
    ):
        engine.add_argument(f"--{name}", type=positive, metavar="N")
    engine.add_argument(
        "--mem-fraction-static", type=float, metavar="X", help="of free memory, for the cache"
    )
    engine.add_argument(
        "--bucket-sizes",
        type=rising,
        metavar="N,N",
        help="pad steps up to these counts of rows and requests",
    )
    engine.add_argument(
        "--disable-radix-cache", action="store_true", default=None, help="share no prefixes"
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="new tokens (default: 128)"
    )
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    for name, kind in (
        ("top-p", float),
        ("top-k", int),
        ("min-p", float),
        ("seed", int),
        ("n", int),
        ("logprobs", int),
    ):
        sampling.add_argument(f"--{name}", type=kind, metavar="X")
    sampling.add_argument(
        "--stop", action="append", metavar="S", help="end before this string; repeatable"
    )
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    for name in ("presence-penalty", "frequency-penalty", "repetition-penalty"):
        sampling.add_argument(f"--{name}", type=float, metavar="X")
    sampling.add_argument(
        "--min-tokens", type=int, metavar="N", help="no end before so many new tokens"
    )
    sampling.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        metavar="ID=X",
        help="add X to a token's logit; repeatable",
    )


def generate(args: argparse.Namespace) -> int:
    """`generate`."""
    from lockstep.llm import commands

    return commands.generate(args)


def _lab(commands: Any) -> None:
    lab = _command(commands, "lockstep lab", "measure the promise, and prove that it is measured")
    lab.set_defaults(lab=True)
    kinds = lab.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    run = _command(kinds, "lockstep lab run", "judge cells: backend x recipe x feature", lab_run)
    _backends(run)
    for name, what in (("recipe", "kind of step"), ("feature", "kind of model")):
        run.add_argument(
            f"--{name}",
            action="append",
            metavar=name[0].upper(),
            help=f"only this {what}; repeatable, or with commas",
        )
    run.add_argument(
        "--quick",
        action="store_true",
        help="a handful of features and fewer properties, in about a minute",
    )
    _outputs(run)
    _no_checks(run)
    kills = _command(
        kinds,
        "lockstep lab reverts",
        "put historical bugs back and see the lab go red",
        lab_reverts,
    )
    kills.add_argument(
        "--name", action="append", metavar="N", help="only this revert; repeatable, or with commas"
    )
    kills.add_argument(
        "--backend", default="cpu", metavar="B", help="the backend to run them on (default: cpu)"
    )
    _from(kills)
    _outputs(kills)
    matrix = _command(
        kinds, "lockstep lab matrix", "write docs/matrix.md and docs/known-failures.md", lab_matrix
    )
    _backends(matrix)
    matrix.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 if the pages differ from what is generated",
    )
    matrix.add_argument(
        "--docs", default="docs", metavar="DIR", help="where the pages are (default: docs)"
    )
    _from(matrix)
    _workers(matrix)
    fuzz = _command(
        kinds,
        "lockstep lab fuzz",
        "random traces of the whole engine: every request must be its lone run",
        lab_fuzz,
    )
    fuzz.add_argument(
        "--traces", type=positive, default=300, metavar="N", help="how many (default: 300)"
    )
    fuzz.add_argument(
        "--first",
        type=whole,
        default=0,
        metavar="N",
        help="number of the first one: a trace is a function of its number",
    )
    _json(fuzz)
    _workers(fuzz)
    golden = _command(
        kinds, "lockstep lab golden", "recorded answers: has any bit changed?", lab_golden
    )
    golden.add_argument(
        "--file",
        default="tests/golden.json",
        metavar="F",
        help="the record (default: tests/golden.json)",
    )
    golden.add_argument(
        "--write",
        action="store_true",
        help="add what is missing; a recorded answer is never replaced",
    )
    _json(golden)
    _mutate(
        _command(
            kinds,
            "lockstep lab mutate",
            "small mutants of the engine: does any test or cell notice?",
            lab_mutate,
        )
    )
    struck = _command(
        kinds,
        "lockstep lab interrupts",
        "interrupts at any moment: every answer must keep its bits",
        lab_interrupts,
    )
    struck.add_argument(
        "--count",
        type=positive,
        default=100,
        metavar="N",
        help="interrupts that strike (default: 100)",
    )
    struck.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="number of the first trial (default: 0)"
    )
    struck.add_argument(
        "--aimed",
        choices=("lines", "bytecodes"),
        help="then one at each of those that a call executes",
    )
    _json(struck)
    show = _command(
        kinds,
        "lockstep lab show",
        "one cell, step by step: plans, pages, every row against its answer",
        lab_show,
    )
    show.add_argument("cell", metavar="CELL", help="backend/recipe/feature, like cpu/decode/window")
    show.add_argument("--step", type=whole, metavar="N", help="only this step, in full")
    _no_checks(show)
    _json(show)


def _mutate(parser: Parser) -> None:
    modules = (
        "packages or files of lockstep, like plan or lockstep/plan/build.py (default: plan kv "
        "attention sample sched llm run)"
    )
    parser.add_argument("module", nargs="*", metavar="MODULE", help=modules)
    parser.add_argument(
        "--count",
        type=positive,
        default=20,
        metavar="N",
        help="mutants of each module (default: 20)",
    )
    parser.add_argument(
        "--seed",
        type=whole,
        default=0,
        metavar="N",
        help="the draw is a function of it (default: 0)",
    )
    parser.add_argument(
        "--skip",
        action="append",
        metavar="W",
        help="no mutants of files with this in their path; repeatable",
    )
    parser.add_argument(
        "--mutant", action="append", metavar="ID", help="only this one of the draw; repeatable"
    )
    parser.add_argument(
        "--again", action="store_true", help="try mutants again that an earlier run has tried"
    )
    parser.add_argument(
        "--alone",
        action="store_true",
        help="only against what reaches them: survivors do not meet the rest",
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="keep the map of who reaches what though sources have changed",
    )
    parser.add_argument(
        "--units",
        action="append",
        metavar="W",
        help="only test files and recipes with this in their name; repeatable",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument(
        "--work",
        default="build/mutate",
        metavar="DIR",
        help="map, trees and journals (default: build/mutate)",
    )
    verdicts = "bench/results/lab-mutate-verdicts.json"
    parser.add_argument(
        "--verdicts",
        default=verdicts,
        metavar="F",
        help=f"what was found out about survivors (default: {verdicts})",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        default=1,
        metavar="N",
        help="processes, each with a tree of its own (default: 1)",
    )
    _json(parser)


def _bench(commands: Any) -> None:
    bench = _command(commands, "lockstep bench", "measure speed")
    kinds = bench.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    attention = _command(
        kinds, "lockstep bench attention", "the attention backends", bench_attention
    )
    engine = _command(
        kinds,
        "lockstep bench engine",
        "the whole engine, against transformers in the same run",
        bench_engine,
    )
    for parser in (attention, engine):
        parser.add_argument(
            "--device", choices=("cpu",), default="cpu", help="where to run (default: cpu)"
        )
        parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
        parser.add_argument(
            "--threads",
            type=positive,
            metavar="N",
            help="threads of every contender (default: all cores)",
        )
        parser.add_argument(
            "--repeat", type=positive, metavar="N", help="measurements per case (default: 3)"
        )
        _json(parser)
    engine.add_argument(
        "--peer",
        choices=("transformers", "none"),
        default="transformers",
        help="against whom (default: transformers)",
    )
    engine.add_argument(
        "--model",
        action="append",
        choices=("builtin", "100m"),
        help="only with this model; repeatable (default: both)",
    )
    cases = ("decode", "mixed", "prefix", "scheduler", "start")
    engine.add_argument(
        "--case", action="append", choices=cases, help="only this case; repeatable (default: all)"
    )
    engine.add_argument(
        "--curves", action="store_true", help="also measure how speed scales, and draw it"
    )
    engine.add_argument(
        "--svg-dir",
        default="docs",
        metavar="DIR",
        help="where the curves are drawn (default: docs)",
    )
    engine.add_argument(
        "--from",
        dest="source",
        metavar="F",
        help="run nothing: print and draw from an earlier `--json F`",
    )
    engine.add_argument(
        "--markdown", action="store_true", help="print the results as a table for a page"
    )
    compare = _command(
        kinds,
        "lockstep bench compare",
        "this tree against an older commit, taking turns in one run",
        bench_compare,
    )
    compare.add_argument("--base", required=True, metavar="REV", help="the commit to compare with")
    compare.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="only cases that begin so; repeatable (default: all)",
    )
    compare.add_argument(
        "--repeat", type=positive, metavar="N", help="turns of each side (default: 5)"
    )
    compare.add_argument(
        "--starts",
        type=positive,
        default=1,
        metavar="N",
        help="processes of each side, one after another (default: 1)",
    )
    compare.add_argument(
        "--quick", action="store_true", help="take disturbed turns as they are: does it run?"
    )
    _json(compare)


def _kernels(commands: Any) -> None:
    parser = _command(
        commands,
        "lockstep kernels",
        "the GPU kernels: list them, compile them without a GPU",
        kernels,
    )
    parser.add_argument(
        "--compile",
        choices=("sm_90",),
        metavar="ARCH",
        help="compile for sm_90; print registers, spills, shared memory",
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="processes (default: 1)"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="only variants whose name has this text; repeatable",
    )
    parser.add_argument("--list", action="store_true", help="list what would be compiled")
    _json(parser)


def kernels(args: argparse.Namespace) -> int:
    """`kernels`."""
    from lockstep.kernels.triton import compile

    return compile.run(args)


def _command(
    commands: Any, prog: str, says: str, call: Callable[[argparse.Namespace], int] | None = None
) -> Parser:
    """A sub-command; one without a call of its own prints its help."""
    parser: Parser = commands.add_parser(
        prog.rpartition(" ")[2], prog=prog, help=says, description=says[0].upper() + says[1:] + "."
    )
    parser.set_defaults(call=call or (lambda args: _help(parser)), parser=parser)
    return parser


def _help(parser: Parser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _backends(parser: Parser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        metavar="B",
        help="repeatable, or with commas (default: cpu,reference)",
    )


def _json(parser: Parser) -> None:
    parser.add_argument(
        "--json", metavar="F", help="write one JSON document; - for stdout, and nothing else there"
    )


def _from(parser: Parser) -> None:
    parser.add_argument(
        "--from",
        dest="source",
        metavar="F",
        help="take the cells from a JSON document of an earlier `lab run`",
    )


def _workers(parser: Parser) -> None:
    count = min(os.cpu_count() or 1, 8)
    parser.add_argument(
        "--workers",
        type=whole,
        default=count,
        metavar="N",
        help=f"processes; 0 runs everything in this one (default: {count})",
    )


def _no_checks(parser: Parser) -> None:
    parser.add_argument(
        "--no-checks",
        action="store_true",
        help="do not check plans before they run: for bugs that a check would stop",
    )


def _outputs(parser: Parser) -> None:
    parser.add_argument("--html", metavar="F", help="write a page to look at")
    parser.add_argument("--list", action="store_true", help="list what would run")
    _json(parser)
    _workers(parser)


def whole(text: str) -> int:
    """0, 1, 2, ..."""
    return _count(text, 0)


def positive(text: str) -> int:
    """1, 2, 3, ..."""
    return _count(text, 1)


def rising(text: str) -> tuple[int, ...]:
    """N,N,...: whether they rise is the engine's to say."""
    return tuple(positive(part) for part in text.split(","))


def bias(text: str) -> tuple[int, float]:
    """ID=X."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a token id and a number, like 42=-5; got {text!r}"
        ) from None


def _count(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number from {least} on; got {text!r}")
    return int(text)


def lab_run(args: argparse.Namespace) -> int:
    """`lab run`."""
    from lockstep.lab import commands

    return commands.run(args)


def lab_reverts(args: argparse.Namespace) -> int:
    """`lab reverts`."""
    from lockstep.lab import commands

    return commands.kills(args)


def lab_matrix(args: argparse.Namespace) -> int:
    """`lab matrix`."""
    from lockstep.lab import commands

    return commands.pages(args)


def lab_fuzz(args: argparse.Namespace) -> int:
    """`lab fuzz`."""
    from lockstep.lab import commands

    return commands.traces(args)


def lab_golden(args: argparse.Namespace) -> int:
    """`lab golden`."""
    from lockstep.lab import golden

    return golden.run(args)


def lab_mutate(args: argparse.Namespace) -> int:
    """`lab mutate`."""
    from lockstep.lab.mutate import command

    return command.run(args)


def lab_interrupts(args: argparse.Namespace) -> int:
    """`lab interrupts`."""
    from lockstep.lab import commands

    return commands.interrupts(args)


def lab_show(args: argparse.Namespace) -> int:
    """`lab show`."""
    from lockstep.lab import commands

    return commands.cell_story(args)


def bench_attention(args: argparse.Namespace) -> int:
    """`bench attention`."""
    from lockstep.bench import attention

    return attention.run(args)


def bench_engine(args: argparse.Namespace) -> int:
    """`bench engine`."""
    from lockstep.bench import engine

    return engine.run(args)


def bench_compare(args: argparse.Namespace) -> int:
    """`bench compare`."""
    from lockstep.bench import compare

    return compare.run(args)


def check_env(args: argparse.Namespace) -> int:
    """`check-env`."""
    from lockstep.lab import document

    found = inspect_env()
    if args.json:
        document.write(found, args.json)
    if args.json == "-":
        return 0
    for name, value in found["environment"].items():
        print(f"{name:<12} {value}")
    print(f"{'threads':<12} {found['threads']}")
    print(f"{'kernels':<12} {found['kernels']}")
    for name, backend in found["backends"].items():
        print(
            f"{name:<12} {'available' if backend['available'] else 'NOT available'}: "
            f"{backend['reason']}"
        )
    return 0


def inspect_env() -> dict[str, Any]:
    """What `check-env` tells."""
    from lockstep.attention import select
    from lockstep.lab.environment import environment

    backends: dict[str, Any] = {}
    for name in select.names():
        try:
            caps = select.load(name).caps
            bits = (
                f"bits promised over {', '.join(sorted(caps.invariances))}"
                if caps.invariances
                else "values only"
            )
            backends[name] = {
                "available": True,
                "reason": f"{', '.join(sorted(caps.devices))}; order {caps.order}; {bits}",
            }
        except (
            Exception
        ) as error:  # a backend of somebody else's that cannot be imported is a reason to show
            backends[name] = {"available": False, "reason": f"{type(error).__name__}: {error}"}
    return {
        "environment": environment(),
        "threads": _threads(),
        "kernels": _kernel_folder(),
        "backends": backends,
    }


def _threads() -> int:
    """What torch has is what the kernels use."""
    import torch

    return torch.get_num_threads()


def _kernel_folder() -> str:
    """Where the compiled CPU kernel is kept, and whether it is there."""
    from lockstep.kernels.cpu import cache

    folder = cache.folder()
    count = len(list(folder.rglob("*.nbc"))) if folder.is_dir() else 0
    return (
        f"{folder} ({count} compiled)"
        if count
        else f"{folder} (nothing yet: the first run compiles)"
    )


if __name__ == "__main__":
    sys.exit(main())
