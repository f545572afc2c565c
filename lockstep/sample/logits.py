"""What happens to logits between the model and the choice, in one order; and log-probabilities.

    bias, penalties, min_tokens     `apply_penalties`: sparse, on a copy
    temperature, top-k, top-p,      `sample_tokens`: with tensors, for a table of any device; the
    min-p, noise, argmax            CPU has the same in one kernel
    log-probabilities               `compute_logprobs`: of the model's own logits, before all that

Tokens are ordered by score and then by id, everywhere. Probabilities are integers in units of
2^-42: their sums are exact and have no order. Knows rows and tensors, not requests.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.sample import formulas as f
from lockstep.sample.noise import noise
from lockstep.sample.params import SamplingParams

ELEMENTS = 2**24  # of float64 that `compute_logprobs` works on at a time
NO_TOKENS: NDArray[np.int32] = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


class Row(NamedTuple):
    """One row of logits, and whom it is for."""

    params: SamplingParams  # of one completion (n = 1), its seed resolved
    position: int  # of the token to be chosen: the number of tokens before it
    prompt_len: int = 0  # how many of these are the prompt
    token_ids: NDArray[np.int32] = NO_TOKENS  # int32 [position], in order; none unless penalised


# ---- bias, penalties, min_tokens ----


def apply_penalties(logits: Tensor, rows: Sequence[Row], eos_ids: tuple[int, ...]) -> Tensor:
    """`logits` themselves if no row asks for a change, otherwise a changed copy."""
    biases = _entries([tuple(zip(*row.params.biases)) for row in rows], logits.device)
    penalties = _entries([_penalties(row) for row in rows], logits.device, 2)
    forbidden = _entries([_forbidden(row, eos_ids) for row in rows], logits.device)
    if not any(len(at) for at, _, _ in (biases, penalties, forbidden)):
        return logits
    out = logits.clone()
    at, ids, (bias,) = biases
    out[at, ids] += bias
    at, ids, (repetition, minus) = penalties
    x = out[at, ids]
    out[at, ids] = torch.where(x > 0, x / repetition, x * repetition) - minus
    at, ids, _ = forbidden
    out[at, ids] = -torch.inf
    return out


def _penalties(row: Row) -> tuple[Any, ...]:
    """(ids, repetition, what to take off), of every token before this one."""
    params = row.params
    if not params.penalised or not row.position:
        return ()
    count = len(row.token_ids)
    assert count == row.position, f"{count} tokens before position {row.position}"
    ids, inverse = np.unique(row.token_ids, return_inverse=True)
    counts = np.bincount(inverse[row.prompt_len :], minlength=len(ids))
    minus = counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    return ids, np.full(len(ids), params.repetition_penalty), minus


def _forbidden(row: Row, eos_ids: tuple[int, ...]) -> tuple[Any, ...]:
    """(ids, filler) of the tokens that would end the generation too early."""
    params = row.params
    if row.position - row.prompt_len >= params.min_tokens:
        return ()
    ids = {*params.stop_ids, *(() if params.ignore_eos else eos_ids)}
    return sorted(ids), [0.0] * len(ids)


def _entries(
    per_row: Sequence[tuple[Any, ...]], device: torch.device, values: int = 1
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(row, id, values) of all rows behind one another. A row names an id once."""
    some = [(r, *columns) for r, columns in enumerate(per_row) if columns]
    places = np.repeat([r for r, *_ in some], [len(ids) for _, ids, *_ in some])
    columns = [
        np.concatenate([NO_TOKENS, *(entry[c] for entry in some)]) for c in range(1, 2 + values)
    ]
    at, ids = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (places, columns[0]))
    return at, ids, [torch.from_numpy(x.astype(np.float32)).to(device) for x in columns[1:]]


# ---- the order of tokens ----


def keys(scores: Tensor) -> Tensor:
    """float32 as int64 in the same order; -0 and 0 are one."""
    bits = (scores + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)


def ranks(scores: Tensor) -> Tensor:
    """int64 [S, V]: smaller is better, by score, then by id (low bits). No two are equal."""
    order = keys(scores)
    ids = torch.arange(scores.shape[1], device=scores.device)
    return ((order.amax(1, keepdim=True) - order) << f.ID_BITS) | ids


def states(scores: Tensor) -> Tensor:
    """int64 [S]: whether there is anything to choose from in a row."""
    top = scores.amax(1)
    state = torch.where(top == torch.inf, f.INFINITE, torch.where(top == -torch.inf, f.EMPTY, f.OK))
    return torch.where(scores.isnan().any(1), f.NAN, state)


def weights(scores: Tensor, top: Tensor) -> Tensor:
    """int64: exp(score - top) in units of 2^-FRACTION. `top` is the row's best score."""
    result: Tensor = f.weight(scores.to(torch.float64) - top.to(torch.float64))
    return result


# ---- temperature, top-k, top-p, min-p, noise, argmax ----


def cut(scores: Tensor, top_k: Tensor, top_p: Tensor, min_log: Tensor) -> Tensor:
    """-inf where top-k, top-p or min-p do not keep a token. scores float32 [S, V] without NaN; one
    entry per row of the others. Top-p keeps the shortest beginning of the order that has at least
    the fraction top_p of the weight that top-k left."""
    vocab, top = scores.shape[1], scores.amax(1, keepdim=True)
    order = ranks(scores)
    best, _ = order.sort(1)
    sorted_weights = weights(scores.gather(1, best & f.ID_MASK), top)
    kept = torch.arange(vocab, device=scores.device) < top_k[:, None]
    sorted_weights = sorted_weights * kept
    total = sorted_weights.sum(1, keepdim=True)
    needed = torch.ceil(f.wide_float(total) * top_p[:, None]).to(torch.int64)  # as in the kernel
    needed = needed.minimum(total).clamp(min=1)
    kept &= (sorted_weights.cumsum(1) - sorted_weights < needed) | (top_p[:, None] >= 1)
    last = best.gather(1, kept.sum(1, keepdim=True) - 1)
    likely = scores.to(torch.float64) - top.to(torch.float64) >= min_log[:, None]
    return torch.where((order <= last) & likely, scores, -torch.inf)


def first_best(scores: Tensor) -> Tensor:
    """The token with the largest score, the lowest id among equals."""
    return ranks(scores).amin(1) & f.ID_MASK


def sample_tokens(
    logits: Tensor, floats: Tensor, ints: Tensor, cuts: bool = True
) -> tuple[Tensor, Tensor]:
    """`Ops.sample_tokens` with tensors. A row with nothing to choose gets NO_TOKEN."""
    greedy = floats[:, 0] == 0
    temperature = torch.where(greedy, 1.0, floats[:, 0]).to(torch.float32)
    scores = logits / temperature[:, None] + 0.0
    state = states(scores)
    scores = torch.where((state == f.OK)[:, None], scores, 0.0)
    kept = cut(scores, ints[:, 0], floats[:, 1], floats[:, 2])
    noisy = kept + noise(ints[:, 1:], logits.shape[1])
    tokens = first_best(torch.where(greedy[:, None], scores, noisy))
    return torch.where(state == f.OK, tokens, f.NO_TOKEN), state


# ---- log-probabilities ----


def compute_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`Ops.compute_logprobs` with tensors, a few rows at a time. NO_TOKEN: none."""
    few = max(1, ELEMENTS // logits.shape[1])
    starts = range(0, max(1, len(logits)), few)
    parts = [_logprobs(logits[i : i + few], tokens[i : i + few], k) for i in starts]
    chosen, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return chosen, top_ids, top


def _logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    good = (states(logits) == f.OK)[:, None]
    scores = torch.where(good, logits, 0.0)
    top = scores.amax(1, keepdim=True)
    total = f.wide_float(weights(scores, top).sum(1, keepdim=True))
    log_sum: Tensor = f.ln(total * 2.0**-f.FRACTION)
    top_ids = ranks(scores).topk(k, 1, largest=False).values & f.ID_MASK
    ids = torch.cat((tokens.clamp(min=0)[:, None], top_ids), 1)
    below_top = scores.gather(1, ids).to(torch.float64) - top.to(torch.float64)
    logs = torch.where(good, (below_top - log_sum + 0.0).to(torch.float32), torch.nan)
    return (
        torch.where(tokens >= 0, logs[:, 0], torch.nan),
        torch.where(good, top_ids, f.NO_TOKEN),
        logs[:, 1:],
    )
