"""From logits to tokens: one function, `sample`; and `log_probs`, which serves decode, verify and
prompt rows alike.

A row's token is a function of its logits, its parameters, its position and the tokens before it.
Both compute through a device's table of operations, which gives the same bits everywhere. Called by
the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.ops import Ops
from lockstep.sample.formulas import EMPTY, FLOATS, INFINITE, INTS, MAX_VOCAB, NAN, OK
from lockstep.sample.logits import Row, apply_penalties
from lockstep.sample.noise import counter
from lockstep.sample.params import SamplingParams, resolve_seed
from lockstep.types import RuleError

__all__ = ["Logprobs", "Row", "Sampled", "SamplingParams", "log_probs", "resolve_seed", "sample"]

REASONS = {
    NAN: "a logit is NaN",
    INFINITE: "a logit is +inf, or becomes so under the temperature",
    EMPTY: "no token is left: every logit is -inf after bias, penalties and min_tokens",
}


class Settings(NamedTuple):
    """The rows' parameters, as `Ops.sample_tokens` takes them: float64 [S, 3], int64 [S, 5]."""

    floats: Tensor
    ints: Tensor
    cuts: bool


class Logprobs(NamedTuple):
    """Of S rows: the chosen token's, float32 [S], and the k best tokens, int64 [S, k], with theirs,
    float32 [S, k]. NaN for a bad row."""

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


@dataclass(frozen=True, eq=False)
class Sampled:
    """What was chosen for S rows; tensors on the device of the logits.

    token_ids     int64 [S]; -1 for a row that could not be sampled
    states        int64 [S]; 0 for a good row, otherwise see `errors`
    logprobs      of the rows that asked, in row order (`logprob_rows`); None if none did. Row i
                  asked for the first params.top_logprobs of its columns
    """

    token_ids: Tensor
    states: Tensor
    logprobs: Logprobs | None
    logprob_rows: tuple[int, ...]

    def errors(self) -> dict[int, str]:
        """Row → reason, of the rows that could not be sampled. Waits for the device."""
        return {
            row: REASONS[state] for row, state in enumerate(self.states.tolist()) if state != OK
        }


def sample(ops: Ops, logits: Tensor, rows: Sequence[Row], eos_ids: tuple[int, ...] = ()) -> Sampled:
    """Choose one token per row.

    ops      the table of the device that the logits lie on
    logits   floating, [S, V]: the model's own; not changed
    rows     one description per row of logits; a row of the model may stand twice (n > 1)
    eos_ids  what min_tokens keeps from being chosen, beside each row's stop_token_ids

    A row whose logits hold NaN or +inf, or that has no finite logit left, gets -1 and a reason; the
    others are what they would be without it.
    """
    raw = _checked(logits, len(rows))
    how = settings(rows, raw.shape[1])
    scores = apply_penalties(raw, rows, eos_ids) if any(map(changes, rows)) else raw
    device = raw.device
    tokens, states = ops.sample_tokens(scores, how.floats.to(device), how.ints.to(device), how.cuts)
    tops = [row.params.numbers.top for row in rows]
    wanted = tuple(r for r, top in enumerate(tops) if top is not None)
    if not wanted:
        return Sampled(tokens, states, None, ())
    k = max(top or 0 for top in tops)
    if len(wanted) < len(rows):
        some = torch.tensor(wanted, device=device)
        return Sampled(tokens, states, log_probs(ops, raw[some], tokens[some], k), wanted)
    return Sampled(tokens, states, log_probs(ops, raw, tokens, k), wanted)


def log_probs(ops: Ops, logits: Tensor, token_ids: Tensor, k: int = 0) -> Logprobs:
    """Log-probabilities of `token_ids` (int64 [S]; -1 for none) and of the k best tokens, under
    softmax of the model's own logits.

    Within 1e-8 of the exact value, then rounded once to float32. Ties among the best go to the
    lower id.
    """
    raw = _checked(logits, len(token_ids))
    return Logprobs(*ops.compute_logprobs(raw, token_ids.to(raw.device), k))


def changes(row: Row) -> bool:
    """Whether anything is done to the row's logits before the choice."""
    params = row.params
    return params.numbers.edits or row.position - row.prompt_len < params.min_tokens


def settings(rows: Sequence[Row], vocab_size: int) -> Settings:
    """The rows' parameters as tensors of the host."""
    numbers = [row.params.numbers for row in rows]
    top_k, index, seed = np.array([each.ints for each in numbers], np.int64).reshape(-1, 3).T
    position = np.array([row.position for row in rows], np.int64)
    ints = np.empty((len(rows), INTS), np.int64)
    ints[:, 0] = np.where(top_k > 0, top_k, vocab_size)
    for column, values in enumerate(counter(seed, index, position), 1):
        ints[:, column] = values
    floats = np.array([each.floats for each in numbers], np.float64).reshape(-1, FLOATS)
    cuts = any(each.cuts for each in numbers)
    return Settings(torch.from_numpy(floats), torch.from_numpy(ints), cuts)


def _checked(logits: Tensor, rows: int) -> Tensor:
    """The logits as contiguous float32, one row per description."""
    if (
        logits.ndim != 2
        or len(logits) != rows
        or not logits.is_floating_point()
        or not 1 <= logits.shape[1] <= MAX_VOCAB
    ):
        rule = f"logits are floating numbers [{rows}, V], V from 1 to {MAX_VOCAB}"
        raise RuleError(
            rule, f"{logits.dtype} of {list(logits.shape)}", "Give one row of logits per row"
        )
    return logits.detach().to(torch.float32).contiguous()
