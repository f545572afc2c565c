"""A token with an infinite logit was chosen.

Summary:
A row with a logit of +inf has no softmax and must end with an error. Without a check the largest
logit wins, and the token is chosen.
Motivation:
The maximum is needed anyway; that it also decides whether the row is valid is easily forgotten.
Mechanism:
1. A logit overflows, or becomes infinite after division by a small temperature.
2. It is the largest one, so a greedy row takes it.
3. A broken row yields a plausible token, and no error is reported.
Key functions:
The kernel function `peak` of the sampling kernel.
Symptom:
The same token again and again, from a model that has stopped working.
Risk and impact:
An overflow in one row looks like an answer. The row's log-probabilities are NaN, if they are
requested at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lockstep.kernels.cpu import sample
from lockstep.kernels.cpu.sample import largest_bits, largest_key
from lockstep.sample.formulas import EMPTY, KEY_INF, KEY_MINUS_INF, NAN, OK

SOURCE = "class: sampling from an invalid row"
TARGET = "lockstep.kernels.cpu.sample:compiled"
CELLS = ("sample/llama",)
RELATED = ("lockstep-beaten-block", "sglang-1779")


def peak(x: Any) -> Any:
    """Accepts a maximum of +inf as a valid score."""
    top = largest_key(x)
    if largest_bits(x) > KEY_INF:
        return top, NAN
    return top, EMPTY if top <= KEY_MINUS_INF else OK


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Any:
        return sample.build(peak=peak)

    return compiled
