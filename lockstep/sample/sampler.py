"""From logits to tokens: `sample`; and `log_probs`, for decode, verify and prompt rows alike.

A row's token is a function of its logits, its parameters, its position and the tokens before it.
While the same completions decode, their parameters are one value (`RowParams`) and positions move
alone. Both compute through a device's table. Called by the engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.ops import Ops, sent
from lockstep.sample.formulas import EMPTY, FLOATS, INFINITE, INTS, MAX_VOCAB, NAN, OK
from lockstep.sample.logits import NO_TOKENS, Row, apply_penalties
from lockstep.sample.noise import counter
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError

REASONS = {
    NAN: "a logit is NaN",
    INFINITE: "a logit is +inf, or becomes so under the temperature",
    EMPTY: "no token is left: every logit is -inf after bias, penalties and min_tokens",
}


@dataclass(frozen=True, eq=False)
class RowParams:
    """Whom S rows are for, as arrays: made once for completions that are sampled together."""

    params: tuple[SamplingParams, ...]  # of one completion each (n = 1), their seeds resolved
    prompt_lens: NDArray[np.int64]  # [S]
    min_tokens: NDArray[np.int64]  # [S]
    floats: Tensor  # float64 [S, 3], on the host: temperature, top-p, ln of min-p
    ints: NDArray[np.int64]  # [3, S]: top-k (0: all), index, seed
    edits: NDArray[np.bool_]  # [S]: whether bias or penalties change the logits
    plain: bool  # whether nothing ever changes the logits of any row
    cuts: bool  # whether top-k or top-p keep some tokens only, in any row
    logprob_rows: tuple[int, ...]  # rows that ask for log-probabilities
    top: int  # and of how many of the best at most

    @classmethod
    def of(cls, params: Sequence[SamplingParams], prompt_lens: Sequence[int]) -> Self:
        numbers, least = [each.numbers for each in params], [each.min_tokens for each in params]
        floats = torch.tensor([each.floats for each in numbers], dtype=torch.float64)
        tops = {r: each.top for r, each in enumerate(numbers) if each.top is not None}
        return cls(
            params=tuple(params),
            prompt_lens=np.array(prompt_lens, np.int64),
            min_tokens=np.array(least, np.int64),
            floats=floats.reshape(-1, FLOATS),
            ints=np.array([each.ints for each in numbers], np.int64).reshape(-1, 3).T,
            edits=np.array([each.edits for each in numbers], np.bool_),
            plain=not any(each.edits for each in numbers) and not any(least),
            cuts=any(each.cuts for each in numbers),
            logprob_rows=tuple(tops),
            top=max(tops.values(), default=0),
        )


class RowBatch(NamedTuple):
    """S rows of a step: what `Row` says of one. `token_ids` has those of penalised rows, by row."""

    how: RowParams
    positions: NDArray[np.int64]  # [S]
    token_ids: Mapping[int, NDArray[np.int32]]

    @classmethod
    def of(cls, rows: "RowBatch | Sequence[Row]") -> "RowBatch":
        """From one value per row."""
        if isinstance(rows, RowBatch):
            return rows
        how = RowParams.of([row.params for row in rows], [row.prompt_len for row in rows])
        positions = np.array([row.position for row in rows], np.int64)
        return cls(how, positions, {r: row.token_ids for r, row in enumerate(rows)})

    def row(self, r: int) -> Row:
        position, prompt_len = int(self.positions[r]), int(self.how.prompt_lens[r])
        return Row(self.how.params[r], position, prompt_len, self.token_ids.get(r, NO_TOKENS))


class Settings(NamedTuple):
    """The rows' parameters, as `Ops.sample_tokens` takes them: float64 [S, 3], int64 [S, 5]."""

    floats: Tensor
    ints: Tensor
    cuts: bool

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        if device.type == "cpu":
            return self
        return self._replace(floats=self.floats.to(device), ints=self.ints.to(device))


class Logprobs(NamedTuple):
    """Of S rows, NaN for a bad one: the chosen token's, and the k best tokens with theirs."""

    chosen: Tensor  # float32 [S]
    top_ids: Tensor  # int64 [S, k]
    top: Tensor  # float32 [S, k]


@dataclass(frozen=True, eq=False)
class Sampled:
    """What was chosen for S rows; tensors on the device of the logits."""

    token_ids: Tensor  # int64 [S]; -1 for a row that could not be sampled
    states: Tensor  # int64 [S]; 0 for a good row, otherwise see `errors`
    logprobs: Logprobs | None  # of the rows that asked, in order; None if none did
    logprob_rows: tuple[int, ...]

    def errors(self) -> dict[int, str]:
        """Row → reason, of the rows that could not be sampled. Waits for the device."""
        states = self.states.cpu().numpy()
        return {row: REASONS[int(states[row])] for row in np.flatnonzero(states != OK).tolist()}


def sample(
    ops: Ops, logits: Tensor, rows: RowBatch | Sequence[Row], eos_ids: tuple[int, ...] = ()
) -> Sampled:
    """Choose one token per row of the model's own logits, floating [S, V], which stay as they are;
    min_tokens keeps `eos_ids` from being chosen, beside each row's stop_token_ids. A row whose
    logits hold NaN or +inf, or that has no finite logit left, gets -1 and a reason."""
    batch = RowBatch.of(rows)
    scores = raw = _checked(logits, len(batch.positions))
    edited = changes(batch)
    if edited:
        scores = raw.clone()
        scores[edited] = apply_penalties(raw[edited], [batch.row(r) for r in edited], eos_ids)
    how = settings(batch, raw.shape[1]).to(raw.device)
    tokens, states = ops.sample_tokens(scores, *how)
    return described(ops, raw, batch.how, tokens, states)


def described(ops: Ops, raw: Tensor, how: RowParams, tokens: Tensor, states: Tensor) -> Sampled:
    """What was chosen for rows of logits, with the log-probabilities that they ask for."""
    wanted, k = how.logprob_rows, how.top
    if not wanted:
        return Sampled(tokens, states, None, ())
    if len(wanted) == len(tokens):
        return Sampled(tokens, states, log_probs(ops, raw, tokens, k), wanted)
    some = sent(torch.tensor(wanted), raw.device)
    return Sampled(tokens, states, log_probs(ops, raw[some], tokens[some], k), wanted)


def log_probs(ops: Ops, logits: Tensor, token_ids: Tensor, k: int = 0) -> Logprobs:
    """Of `token_ids` (int64 [S]; -1 for none) and of the k best tokens, under softmax of the
    model's own logits: within 1e-8, then rounded once to float32. Ties go to the lower id."""
    raw = _checked(logits, len(token_ids))
    return Logprobs(*ops.compute_logprobs(raw, token_ids.to(raw.device), k))


def changes(batch: RowBatch) -> list[int]:
    """The rows to whose logits anything is done before the choice."""
    how = batch.how
    if how.plain:
        return []
    early = batch.positions - how.prompt_lens < how.min_tokens
    rows: list[int] = np.flatnonzero(how.edits | early).tolist()
    return rows


def settings(rows: RowBatch | Sequence[Row], vocab_size: int) -> Settings:
    """The rows' parameters as tensors of the host."""
    how, positions, _ = RowBatch.of(rows)
    top_k, index, seed = how.ints
    ints = np.empty((len(positions), INTS), np.int64)
    ints[:, 0] = np.where(top_k > 0, top_k, vocab_size)
    for column, values in enumerate(counter(seed, index, positions), 1):
        ints[:, column] = values
    return Settings(how.floats, torch.from_numpy(ints), how.cuts)


def _checked(logits: Tensor, rows: int) -> Tensor:
    """The logits as contiguous float32, one row per description."""
    fits = logits.ndim == 2 and len(logits) == rows and 1 <= logits.shape[1] <= MAX_VOCAB
    if not fits or not logits.is_floating_point():
        rule = f"logits are floating numbers [{rows}, V], V from 1 to {MAX_VOCAB}"
        got = f"{logits.dtype} of {list(logits.shape)}"
        raise RuleError(rule, got, "Give one row of logits per row")
    if logits.dtype is torch.float32 and logits.is_contiguous() and not logits.requires_grad:
        return logits
    return logits.detach().to(torch.float32).contiguous()
