"""The options of `lockstep generate`: what to continue, on which engine, sampled how.

Knows their names and kinds; whether values make sense is for `EngineConfig` and `SamplingParams` to
say. Imports nothing heavy; `cli` calls it.
"""

from __future__ import annotations

import argparse

from lockstep.options import (
    Commands,
    Parser,
    command,
    flag,
    json_file,
    number,
    positive,
    several,
    value,
)
from lockstep.types import KV_FORMATS

ENGINE = {
    "--model": ("M", "a folder or a hub id (default: the built-in model)"),
    "--device": ("X", "by name: whose operations (default: a GPU, or the CPU)"),
    "--dtype": ("X", "of activations (default: the device's own)"),
    "--kv-cache-dtype": ("X", f"one of {', '.join(KV_FORMATS)} (default: as activations)"),
    "--load-format": ("X", "auto, or dummy: random weights of a config alone"),
    "--attention-backend": ("X", "by name"),
}
LIMITS = (
    "--page-size",
    "--chunked-prefill-size",
    "--max-running-requests",
    "--max-total-tokens",
    "--context-length",
)
SAMPLING = {
    "--top-p": float,
    "--top-k": int,
    "--min-p": float,
    "--seed": int,
    "--n": int,
    "--logprobs": int,
    "--presence-penalty": float,
    "--frequency-penalty": float,
    "--repetition-penalty": float,
}


def add(commands: Commands) -> None:
    """`lockstep generate`."""
    parser = command(
        commands,
        "lockstep generate",
        "continue prompts with a model",
        call="lockstep.llm.commands:generate",
        examples="""
        lockstep generate "def binary_search(items, target):"
        lockstep generate --temperature 0.8 --seed 7 --n 3 "class Stack:" --json -
        lockstep generate --model ./my-model --file prompts.txt --max-tokens 64 --json out.json""",
    )
    prompt = "text to continue; several run as one batch"
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help=prompt)
    value(parser, "--file", "F", "one more prompt per line of this file; - for stdin")
    flag(parser, "--quiet", "do not say what was chosen at start")
    json_file(parser)
    _engine(parser)
    _sampling(parser)


def _engine(parser: Parser) -> None:
    group = parser.add_argument_group("engine")
    for name, (metavar, help) in ENGINE.items():
        value(group, name, metavar, help)
    for name in LIMITS:
        number(group, name)
    memory = "of free memory, for the cache"
    group.add_argument("--mem-fraction-static", type=float, metavar="X", help=memory)
    buckets = "pad steps up to these counts of rows and requests"
    group.add_argument("--bucket-sizes", type=counts, metavar="N,N", help=buckets)
    flag(group, "--disable-radix-cache", "share no prefixes", default=None)


def _sampling(parser: Parser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="new tokens (default: 128)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    for name, kind in SAMPLING.items():
        group.add_argument(name, type=kind, metavar="X")
    several(group, "--stop", "S", "end before this string")
    flag(group, "--ignore-eos", default=None)
    least = "no end before so many new tokens"
    group.add_argument("--min-tokens", type=int, metavar="N", help=least)
    bias = "add X to a token's logit; repeatable"
    group.add_argument("--logit-bias", type=token_bias, action="append", metavar="ID=X", help=bias)


def counts(text: str) -> tuple[int, ...]:
    """N,N,...: whether they rise is the engine's to say."""
    return tuple(positive(part) for part in text.split(","))


def token_bias(text: str) -> tuple[int, float]:
    """ID=X."""
    token, _, amount = text.partition("=")
    try:
        return int(token), float(amount)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a token id and a number, like 42=-5; got {text!r}"
        ) from None
