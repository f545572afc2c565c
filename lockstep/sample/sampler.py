"""From logits to tokens: one function, `sample`; and `log_probs`, which serves decode, verify and
prompt rows alike.

A row's token is a function of its logits, its parameters, its position and the tokens before it. On
the CPU both run in one compiled kernel; elsewhere in the tensor operations of logits.py, which give
the same bits. Called by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu import sample as kernel
from lockstep.kernels.cpu import sample_rows
from lockstep.kernels.cpu.sample import EMPTY, INFINITE, MAX_VOCAB, NAN, OK
from lockstep.sample import logits as plain
from lockstep.sample.logits import Logprobs, Row, Settings
from lockstep.sample.noise import counter
from lockstep.sample.params import SamplingParams, resolve_seed
from lockstep.types import RuleError

__all__ = ["Logprobs", "Row", "Sampled", "SamplingParams", "log_probs", "resolve_seed", "sample"]

MIN_P = 1e-300  # below it, min_p keeps every token with a finite logit
REASONS = {
    NAN: "a logit is NaN",
    INFINITE: "a logit is +inf, or becomes so under the temperature",
    EMPTY: "no token is left: every logit is -inf after bias, penalties and min_tokens",
}


@dataclass(frozen=True, eq=False)
class Sampled:
    """What was chosen for S rows; tensors on the device of the logits.

    token_ids  int64 [S]; -1 for a row that could not be sampled
    states     int64 [S]; 0 for a good row, otherwise see `errors`
    logprobs   of the rows that asked, in row order (`logprob_rows`); None if none did. Row i asked for the first
               params.top_logprobs of its columns
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


def sample(logits: Tensor, rows: Sequence[Row], eos_ids: tuple[int, ...] = ()) -> Sampled:
    """Choose one token per row.

    logits   floating, [S, V]: the model's own; not changed
    rows     one description per row of logits; a row of the model may stand twice (n > 1)
    eos_ids  what min_tokens keeps from being chosen, beside each row's stop_token_ids

    A row whose logits hold NaN or +inf, or that has no finite logit left, gets -1 and a reason; the
    others are what they would be without it.
    """
    raw = _checked(logits, len(rows))
    how = (
        _greedy(len(rows))
        if all(row.params.greedy for row in rows)
        else settings(rows, raw.shape[1])
    )
    scores = plain.edited(raw, rows, eos_ids) if any(map(changes, rows)) else raw
    tokens, states = _choose(scores, how)
    wanted = tuple(r for r, row in enumerate(rows) if row.params.top_logprobs is not None)
    if not wanted:
        return Sampled(tokens, states, None, ())
    k = max(row.params.top_logprobs or 0 for row in rows)
    if len(wanted) < len(rows):
        some = torch.tensor(wanted, device=raw.device)
        return Sampled(tokens, states, log_probs(raw[some], tokens[some], k), wanted)
    return Sampled(tokens, states, log_probs(raw, tokens, k), wanted)


def log_probs(logits: Tensor, token_ids: Tensor, k: int = 0) -> Logprobs:
    """Log-probabilities of `token_ids` (int64 [S]; -1 for none) and of the k best tokens, under
    softmax of the model's own logits.

    Within 1e-8 of the exact value, then rounded once to float32. Ties among the best go to the
    lower id.
    """
    raw = _checked(logits, len(token_ids))
    if raw.device.type != "cpu":
        return plain.described(raw, token_ids, k)
    rows = len(raw)
    chosen, top_ids, top = (
        np.empty(rows, np.float32),
        np.empty((rows, k), np.int64),
        np.empty((rows, k), np.float32),
    )
    sample_rows.describe_rows(raw.numpy(), token_ids.contiguous().numpy(), chosen, top_ids, top)
    return Logprobs(*map(torch.from_numpy, (chosen, top_ids, top)))


def changes(row: Row) -> bool:
    """Whether anything is done to the row's logits before the choice."""
    params = row.params
    return bool(params.logit_bias) or params.penalised or row.generated_len < params.min_tokens


def settings(rows: Sequence[Row], vocab_size: int) -> Settings:
    """The rows' parameters as arrays."""
    floats, ints = np.empty((len(rows), 3)), np.empty((len(rows), 5), np.int64)
    for r, row in enumerate(rows):
        params = row.params
        assert params.n == 1, f"row {r} has n={params.n}: one row per completion"
        if params.seed is None and not params.greedy:
            raise RuleError(
                "a sampled row has a seed", f"None in row {r}", "Call resolve_seed once per request"
            )
        min_log = float(kernel.ln(np.float64(params.min_p))) if params.min_p >= MIN_P else -np.inf
        floats[r] = params.temperature, params.top_p, min_log
        ints[r] = (
            params.top_k if params.top_k > 0 else vocab_size,
            *counter(params.seed or 0, params.sample_index, row.position),
        )
    return Settings(floats, ints)


def _greedy(rows: int) -> Settings:
    return Settings(np.tile([0.0, 1.0, -np.inf], (rows, 1)), np.zeros((rows, 5), np.int64))


def _choose(logits: Tensor, how: Settings) -> tuple[Tensor, Tensor]:
    """(tokens, states) by the kernel of the CPU, or with tensors."""
    if logits.device.type != "cpu":
        return plain.chosen(logits, how)
    rows = len(logits)
    tokens, states = np.empty(rows, np.int64), np.empty(rows, np.int64)
    sample_rows.choose_rows(logits.numpy(), how.floats, how.ints, tokens, states)
    return torch.from_numpy(tokens), torch.from_numpy(states)


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
