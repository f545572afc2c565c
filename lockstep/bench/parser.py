"""The options of `lockstep bench ...`. Imports nothing heavy; `cli` calls it."""

from __future__ import annotations

from lockstep.options import Commands, Parser, command, flag, json_file, number, value

CASES = ("decode", "mixed", "prefix", "start")
SWITCHES = "gemm, row kernels, threads, sampler, steady_until_len, plain build"


def add(commands: Commands) -> None:
    """`lockstep bench ...`."""
    kinds = command(commands, "lockstep bench", "measure speed").commands()
    for add_one in (_attention, _engine, _kernels, _threads, _step, _compare):
        add_one(kinds)


def _attention(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep bench attention",
        "the attention backends",
        call="lockstep.bench.attention:run",
        examples="""
        lockstep bench attention --quick
        lockstep bench attention --threads 2 --repeat 20 --json bench/results/attention.json""",
    )
    _measured(parser)


def _engine(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep bench engine",
        "the whole engine, against transformers in the same run",
        call="lockstep.bench.engine:run",
        examples="""
        lockstep bench engine --quick                      everything once, small: does it run?
        lockstep bench engine --curves --json bench/results/engine-cpu.json
        lockstep bench engine --case decode --case mixed --model builtin --repeat 5
        lockstep bench engine --from bench/results/engine-cpu.json --markdown""",
    )
    _measured(parser)
    peers, peer = ("transformers", "none"), "against whom (default: transformers)"
    parser.add_argument("--peer", choices=peers, default=peers[0], help=peer)
    models, model = ("builtin", "100m"), "only with this model; repeatable (default: both)"
    parser.add_argument("--model", action="append", choices=models, help=model)
    case = "only this case; repeatable (default: all)"
    parser.add_argument("--case", action="append", choices=CASES, help=case)
    flag(parser, "--curves", "also measure how speed scales, and draw it")
    value(parser, "--svg-dir", "DIR", "where the curves are drawn", default="docs")
    source = "run nothing: print and draw from an earlier `--json F`"
    parser.add_argument("--from", dest="source", metavar="F", help=source)
    flag(parser, "--markdown", "print the results as a table for a page")


def _measured(parser: Parser) -> None:
    """What both measurements ask."""
    device = "where to run (default: cpu)"
    parser.add_argument("--device", choices=("cpu",), default="cpu", help=device)
    flag(parser, "--quick", "fewer and smaller cases")
    number(parser, "--threads", "threads of every contender (default: all cores)")
    number(parser, "--repeat", "measurements per case (default: 3)")
    json_file(parser)


def _kernels(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep bench kernels",
        "what each kernel and short cut is worth: on and off in one run",
        call="lockstep.bench.kernels:run",
        examples="""
        lockstep bench kernels --json bench/results/kernels-cpu.json
        lockstep bench kernels --case gemm --case sampler""",
    )
    _measured(parser)
    case = f"only switches that begin so; repeatable (default: all of {SWITCHES})"
    parser.add_argument("--case", action="append", metavar="NAME", help=case)


def _threads(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep bench threads",
        "two engines at once, Python beside a prefill, and 1, 2, 4, ... threads",
        call="lockstep.bench.threads:run",
        examples="""
        lockstep bench threads --quick
        lockstep bench threads --json bench/results/threads-cpu.json""",
    )
    _measured(parser)


def _step(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep bench step",
        "host time of a decode step by part, beside an older commit's",
        call="lockstep.bench.compare:run_step",
        examples="""
        lockstep bench step --base 0af2e59 --json bench/results/step.json""",
    )
    parser.add_argument("--base", metavar="REV", help="the commit to compare with (default: none)")
    number(parser, "--repeat", "turns of each side (default: 5)")
    flag(parser, "--quick", "take disturbed turns as they are: does it run?")
    json_file(parser)


def _compare(commands: Commands) -> None:
    parser = command(
        commands,
        "lockstep bench compare",
        "this tree against an older commit, taking turns in one run",
        call="lockstep.bench.compare:run",
        examples="""
        lockstep bench compare --base HEAD~1 --case attention
        lockstep bench compare --base 0d88767 --repeat 7 --json bench/results/compare.json""",
    )
    parser.add_argument("--base", required=True, metavar="REV", help="the commit to compare with")
    case = "only cases that begin so; repeatable (default: all)"
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help=case)
    number(parser, "--repeat", "turns of each side (default: 5)")
    number(parser, "--starts", "processes of each side, one after another", 1)
    flag(parser, "--quick", "take disturbed turns as they are: does it run?")
    json_file(parser)
