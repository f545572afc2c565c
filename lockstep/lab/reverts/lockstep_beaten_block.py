"""A block of tokens that could still win was skipped.

Summary:
The noise of a row is made for 256 tokens at a time; a block whose best score cannot catch up with
the best sum so far is not looked at.
The largest noise there is was left out of that comparison.
Motivation:
Most of a large vocabulary is far behind, and skipping it is what makes the choice fast.
Mechanism:
1. The first block has a token whose score plus noise is 9.
2. The best score of the second block is 4. Its noise may be up to 22.9, so it might win.
3. Without that margin 4 < 9 ends the matter: no token of a later block is ever chosen over a lucky
   one of an earlier block.
Key functions:
The text `beaten` of the sampling kernel, which `noisy_best` asks for every block.
Symptom:
Plausible tokens from a wrong distribution, for vocabularies above 256 only: tokens with small ids
are chosen too often.
Risk and impact:
Every sampled answer of every real model. Tests with small vocabularies have one block and see
nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lockstep.kernels.cpu import sample
from lockstep.kernels.cpu.sample import MINUS_INF

SOURCE = "class: a shortcut without its margin"
TARGET = "lockstep.kernels.cpu.sample:compiled"
CELLS = ("sample/llama",)
RELATED = ("sglang-33423", "lockstep-noisy-tie")


def beaten(bound: Any, best: Any) -> Any:
    """Scores against a sum."""
    return bound == MINUS_INF or bound < best


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Any:
        return sample.build(beaten=beaten)

    return compiled
