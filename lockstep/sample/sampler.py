"""From logits to tokens: `sample`; and `log_probs`, for decode, verify and prompt rows alike.

    bias, penalties, min_tokens     `apply_penalties`: sparse, on a copy
    temperature, top-k, top-p,      `Ops.sample_tokens`: a kernel of the device
    min-p, noise, argmax
    log-probabilities               `Ops.compute_logprobs`: of the model's own logits

A row's token is a function of its logits, its parameters, its position and the tokens before it.
While the same completions decode, their parameters stay one value (`RowParams`) and only positions
change. Called by the engine and by draft models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.ops import Ops, to_device
from lockstep.sample import formulas as f
from lockstep.sample.params import SamplingParams
from lockstep.types import RuleError

REASONS = {
    f.NAN: "a logit is NaN",
    f.INFINITE: "a logit is +inf, or becomes so under the temperature",
    f.EMPTY: "no token is left: every logit is -inf after bias, penalties and min_tokens",
}
NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


class Row(NamedTuple):
    """What one row of logits is sampled with."""

    params: SamplingParams  # of one completion (n = 1), its seed resolved
    position: int  # of the token to be chosen: the number of tokens before it
    prompt_len: int = 0  # tokens of the prompt
    token_ids: NDArray[np.int32] = NO_TOKENS  # int32 [position], in order; empty unless penalised


@dataclass(frozen=True, eq=False)
class RowParams:
    """The parameters of S rows as arrays: made once for completions that are sampled together."""

    params: tuple[SamplingParams, ...]  # of one completion each (n = 1), their seeds resolved
    prompt_lens: NDArray[np.int64]  # [S]
    min_tokens: NDArray[np.int64]  # [S]
    floats: Tensor  # float64 [S, 3], on the host: temperature, top-p, ln of min-p
    ints: NDArray[np.int64]  # [3, S]: top-k (0: all), index, seed
    edits: NDArray[np.bool_]  # [S]: whether bias or penalties change the logits
    plain: bool  # whether nothing ever changes the logits of any row
    cuts: bool  # whether top-k or top-p may exclude tokens, in any row
    logprob_rows: tuple[int, ...]  # rows that ask for log-probabilities
    top: int  # the most best tokens whose log-probabilities a row asks for

    @classmethod
    def of(cls, params: Sequence[SamplingParams], prompt_lens: Sequence[int]) -> Self:
        numbers, least = [each.numbers for each in params], [each.min_tokens for each in params]
        floats = torch.tensor([each.floats for each in numbers], dtype=torch.float64)
        tops = {r: each.top for r, each in enumerate(numbers) if each.top is not None}
        return cls(
            params=tuple(params),
            prompt_lens=np.array(prompt_lens, np.int64),
            min_tokens=np.array(least, np.int64),
            floats=floats.reshape(-1, f.FLOATS),
            ints=np.array([each.ints for each in numbers], np.int64).reshape(-1, 3).T,
            edits=np.array([each.edits for each in numbers], np.bool_),
            plain=not any(each.edits for each in numbers) and not any(least),
            cuts=any(each.cuts for each in numbers),
            logprob_rows=tuple(tops),
            top=max(tops.values(), default=0),
        )


class RowBatch(NamedTuple):
    """`Row` for S rows of a step. `token_ids` has the tokens of penalised rows, by row."""

    how: RowParams
    positions: NDArray[np.int64]  # [S]
    token_ids: Mapping[int, NDArray[np.int32]]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "RowBatch":
        """Makes a batch from one value per row."""
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


class Logprobs(NamedTuple):
    """Log-probabilities of S rows, NaN for a bad one: of the chosen and of the k best tokens."""

    chosen: Tensor  # float32 [S]
    top_ids: Tensor  # int64 [S, k]
    top: Tensor  # float32 [S, k]


@dataclass(frozen=True, eq=False)
class Sampled:
    """The tokens chosen for S rows; tensors on the device of the logits."""

    token_ids: Tensor  # int64 [S]; -1 for a row that could not be sampled
    states: Tensor  # int64 [S]; 0 for a good row, otherwise see `errors`
    logprobs: Logprobs | None  # of the rows that asked, in order; None if none did
    logprob_rows: tuple[int, ...]

    def errors(self) -> dict[int, str]:
        """Returns row → reason for rows that could not be sampled. Waits for the device."""
        states = self.states.cpu().numpy()
        return {row: REASONS[int(states[row])] for row in np.flatnonzero(states != f.OK).tolist()}


def sample(ops: Ops, logits: Tensor, batch: RowBatch, eos_ids: tuple[int, ...] = ()) -> Sampled:
    """Chooses one token per row of the model's own logits, floating [S, V], which are not modified;
    min_tokens keeps `eos_ids` from being chosen, as well as each row's stop_token_ids. A row whose
    logits contain NaN or +inf, or that has no finite logit left, gets -1 and a reason."""
    raw = _checked(logits, len(batch.positions))
    scores = apply_penalties(raw, batch, eos_ids)
    floats, ints, cuts = settings(batch, raw.shape[1])
    numbers = (to_device(floats, raw.device), to_device(ints, raw.device))
    tokens, states = ops.sample_tokens(scores, *numbers, cuts)
    return with_logprobs(ops, raw, batch.how, tokens, states)


def with_logprobs(ops: Ops, raw: Tensor, how: RowParams, tokens: Tensor, states: Tensor) -> Sampled:
    """Returns the rows' `tokens` and `states` with the log-probabilities that they ask for."""
    wanted, k = how.logprob_rows, how.top
    if not wanted:
        return Sampled(tokens, states, None, ())
    if len(wanted) == len(tokens):
        return Sampled(tokens, states, log_probs(ops, raw, tokens, k), wanted)
    some = to_device(torch.tensor(wanted), raw.device)
    return Sampled(tokens, states, log_probs(ops, raw[some], tokens[some], k), wanted)


def log_probs(ops: Ops, logits: Tensor, token_ids: Tensor, k: int = 0) -> Logprobs:
    """Returns log-probabilities of `token_ids` (int64 [S]; -1: none) and of the k best tokens under
    softmax of the logits: within 1e-8, then rounded once to float32. Ties go to the lower id."""
    raw = _checked(logits, len(token_ids))
    return Logprobs(*ops.compute_logprobs(raw, token_ids.to(raw.device), k))


def edited_rows(batch: RowBatch) -> list[int]:
    """Returns the rows whose logits are changed before a token is chosen."""
    how = batch.how
    if how.plain:
        return []
    early = batch.positions - how.prompt_lens < how.min_tokens
    rows: list[int] = np.flatnonzero(how.edits | early).tolist()
    return rows


def apply_penalties(logits: Tensor, batch: RowBatch, eos_ids: tuple[int, ...]) -> Tensor:
    """Applies bias, penalties and min_tokens to a copy; `logits` themselves if no row needs it."""
    edited = {r: batch.row(r) for r in edited_rows(batch)}
    if not edited:
        return logits
    out, device = logits.clone(), logits.device
    biases = {r: np.array(row.params.biases).reshape(-1, 2).T for r, row in edited.items()}
    at, ids, bias = _entries(biases, device)
    out[at, ids] += bias
    penalties = {r: _penalties(row) for r, row in edited.items()}
    at, ids, repetition, minus = _entries(penalties, device)
    x = out[at, ids]
    out[at, ids] = torch.where(x > 0, x / repetition, x * repetition) - minus
    forbidden = {r: _forbidden(row, eos_ids) for r, row in edited.items()}
    at, ids = _entries(forbidden, device)
    out[at, ids] = -torch.inf
    return out


def _penalties(row: Row) -> NDArray[np.float64]:
    """Returns [3, n]: ids, repetition penalty and amount to take off, of distinct tokens so far."""
    params = row.params
    if not params.penalised or not row.position:
        return np.empty((3, 0))
    count = len(row.token_ids)
    assert count == row.position, f"{count} tokens before position {row.position}"
    ids, inverse = np.unique(row.token_ids, return_inverse=True)
    counts = np.bincount(inverse[row.prompt_len :], minlength=len(ids))
    minus = counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    return np.stack((ids, np.full(len(ids), params.repetition_penalty), minus))


def _forbidden(row: Row, eos_ids: tuple[int, ...]) -> NDArray[np.int64]:
    """Returns the ids of tokens that would end the generation too early, [1, n]."""
    params = row.params
    if row.position - row.prompt_len >= params.min_tokens:
        return np.empty((1, 0), np.int64)
    ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    return np.array([sorted(ids)], np.int64)


def _entries(per_row: Mapping[int, NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Joins each row's [ids and numbers, tokens] into tensors: row, id, and each of the numbers."""
    counts = [columns.shape[1] for columns in per_row.values()]
    rows, columns = np.repeat(list(per_row), counts), np.hstack(list(per_row.values()))
    at, ids, *numbers = torch.from_numpy(np.vstack((rows, columns))).to(device)
    return [at.long(), ids.long(), *(each.float() for each in numbers)]


def settings(batch: RowBatch, vocab_size: int) -> Settings:
    """Returns the rows' parameters as tensors on the host."""
    how, positions, _ = batch
    top_k, index, seed = how.ints
    columns = (np.where(top_k > 0, top_k, vocab_size), *f.counter(seed, index, positions))
    return Settings(how.floats, torch.from_numpy(np.stack(columns, 1)), how.cuts)


def _checked(logits: Tensor, rows: int) -> Tensor:
    """Returns the logits as contiguous float32; raises unless they are floating [rows, V]."""
    fits = logits.ndim == 2 and len(logits) == rows and 1 <= logits.shape[1] <= f.MAX_VOCAB
    if not fits or not logits.is_floating_point():
        rule = f"logits are floating numbers [{rows}, V], V from 1 to {f.MAX_VOCAB}"
        got = f"{logits.dtype} of {list(logits.shape)}"
        raise RuleError(rule, got, "Give one row of logits per row")
    if logits.dtype is torch.float32 and logits.is_contiguous() and not logits.requires_grad:
        return logits
    return logits.detach().to(torch.float32).contiguous()


def noise_of(counters: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the noise, float32 [S, n], of counters int64 [S, 4] and token_ids int64 [S, n]."""
    position, index, low, high = (column[:, None] for column in counters.unbind(1))
    words: Any = f.philox(token_ids // 4, position, index, 0, low, high)
    word = torch.stack(words, -1).gather(-1, (token_ids % 4)[..., None])[..., 0]
    result: Tensor = f.gumbel(word).to(torch.float32)
    return result
