"""A token with an infinite logit was chosen.

Summary:
A logit of +inf has no softmax; its row must end with an error. The largest logit wins, so without a
look it is simply chosen.
Motivation:
The maximum is needed anyway; that it also decides whether the row is sound is easily forgotten.
Mechanism:
1. A logit overflows, or becomes infinite under a small temperature.
2. It is the largest one. A greedy row takes it.
3. A plausible token comes out of a broken row, and nobody is told.
Key functions:
The text `peak` of the sampling kernel.
Symptom:
The same token again and again, from a model that has stopped working.
Risk and impact:
An overflow in one row looks like an answer. Log-probabilities of the row are NaN, where they are
asked for at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lockstep.kernels.cpu import sample
from lockstep.kernels.cpu.sample import largest_bits, largest_key
from lockstep.sample.formulas import EMPTY, KEY_INF, KEY_MINUS_INF, NAN, OK

SOURCE = "class: a row that is not sound is sampled from"
TARGET = "lockstep.kernels.cpu.sample:compiled"
CELLS = ("sample/llama",)
RELATED = ("lockstep-beaten-block", "sglang-1779")


def peak(x: Any) -> Any:
    """Infinity is as good as any."""
    top = largest_key(x)
    if largest_bits(x) > KEY_INF:
        return top, NAN
    return top, EMPTY if top <= KEY_MINUS_INF else OK


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Any:
        return sample.build(peak=peak)

    return compiled
