"""A second device, as another author would write it: a table of operations in plain torch, one row
at a time, with bfloat16 activations. Right, slow, and invariant because no row is computed with
another.

Registered as the entry point `rowwise = "rowwise_ops:Ops"` of `lockstep.devices`; its attention is
`rowwise_attention.py`. Nothing of Lockstep is edited or replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.ops import Activation, CosSin, Heads, Routing
from lockstep.sample import formulas as f
from lockstep.sample.sampler import noise_of
from lockstep.types import KV_FORMATS, Choice

LARGEST = {getattr(torch, each.torch_name): each.largest for each in KV_FORMATS.values()}
ELEMENTS = 2**24  # float64 numbers that `compute_logprobs` works on together
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
}


class Packed(NamedTuple):
    """A weight as it was given, [n, k] or [g, n, k], and its bias."""

    weight: Tensor
    bias: Tensor | None


class Routes(NamedTuple):
    """ids int64 and weights float32, [t, k]."""

    ids: Tensor
    weights: Tensor


def rows(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Applies function to row 0 of every operand, to row 1, …: float32 inside, rounded to the dtype
    of the first operand."""
    dtype = operands[0].dtype
    if not len(operands[0]):
        shapes = [x.new_zeros(1, *x.shape[1:]) for x in operands]
        return rows(function, *shapes)[:0]
    made = [function(*(x.float() for x in row)) for row in zip(*operands, strict=True)]
    return torch.stack(made).to(dtype)


def product(row: Tensor, packed: Packed, g: int | None = None) -> Tensor:
    """Returns one row times one weight, rounded, then its bias added."""
    weight = packed.weight if g is None else packed.weight[g]
    y = (weight.double() @ row.double()).to(weight.dtype)
    if packed.bias is None:
        return y
    bias = packed.bias if g is None else packed.bias[g]
    return (y.float() + bias.float()).to(weight.dtype)


def turned(row: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Returns one token's heads [heads, d], rotated."""
    half = len(cos)
    part = row[:, : 2 * half]
    a, b = (part[:, ::2], part[:, 1::2]) if interleaved else part.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, row[:, 2 * half :]), -1)


class Ops:
    """The table of operations; `lockstep.ops.Ops` states what each one does."""

    dtypes = ("bfloat16",)
    device = torch.device("cpu")
    machine = "torch"
    gemm_order = Choice("float64", "a dot product of float64 numbers per element")

    def __init__(self, dtype: str = "bfloat16") -> None:
        self.dtype = getattr(torch, dtype)

    # ---- GEMM

    def pack(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return Packed(weight.clone(), None if bias is None else bias.clone())

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        if not len(x):
            return x.new_zeros(0, len(packed.weight))
        return torch.stack([product(row, packed) for row in x.flatten(1)])

    def batched_linear(self, x: Tensor, packed: Packed) -> Tensor:
        t, heads = x.shape[:2]
        if not t:
            return x.new_zeros(0, heads, packed.weight.shape[1])
        each = [product(row[g], packed, g) for row in x for g in range(heads)]
        return torch.stack(each).view(t, heads, -1)

    def grouped_linear(self, x: Tensor, packed: Packed, routes: Routes) -> Tensor:
        experts = routes.ids.flatten().tolist()
        if not experts:
            return x.new_zeros(0, packed.weight.shape[1])
        return torch.stack([product(row, packed, e) for row, e in zip(x, experts, strict=True)])

    # ---- experts

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Routes:
        chosen = [choose(row, routing, correction) for row in logits]
        if not chosen:
            return Routes(torch.zeros(0, routing.k).long(), torch.zeros(0, routing.k))
        return Routes(*(torch.stack(column) for column in zip(*chosen, strict=True)))

    def dispatch(self, x: Tensor, routes: Routes) -> Tensor:
        return x.repeat_interleave(routes.ids.shape[1], 0)

    def combine(self, parts: Tensor, routes: Routes) -> Tensor:
        slots = parts.view(*routes.ids.shape, -1)
        return rows(added, slots, routes.weights)

    # ---- rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows(lambda row: F.rms_norm(row, row.shape[-1:], weight, eps), x)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total, self.rms_norm(total, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return rows(lambda row: F.layer_norm(row, row.shape[-1:], weight, bias, eps), x)

    def rope_cos_sin(self, positions: Tensor, freqs: Tensor, factor: float) -> CosSin:
        angles = (positions.float()[:, None] * freqs).double()
        return CosSin(angles.cos().float() * factor, angles.sin().float() * factor)

    def rope(self, x: Tensor, cos_sin: CosSin, interleaved: bool) -> Tensor:
        return rows(lambda row, c, s: turned(row, c, s, interleaved), x, *cos_sin)

    def qk_norm_rope(
        self, x: Tensor, heads: Heads, weights: Tensor | None, cos_sin: CosSin
    ) -> tuple[Tensor, Tensor, Tensor]:
        counts = (heads.heads, heads.kv_heads, heads.kv_heads)
        *parts, v = x.view(len(x), sum(counts), heads.d).split(counts, 1)
        if weights is not None:
            pairs = zip(parts, weights, strict=True)
            parts = [self.rms_norm(part, weight, heads.eps) for part, weight in pairs]
        q, k = (self.rope(part, cos_sin, heads.interleaved) for part in parts)
        return q, k, v

    def activate(self, x: Tensor, act: Activation) -> Tensor:
        return rows(FUNCTIONS[act], x)

    def act_and_mul(self, x: Tensor, act: Activation) -> Tensor:
        gate, up = x.chunk(2, -1)
        return rows(lambda g, u: FUNCTIONS[act](g) * u, gate, up)

    def clamped_swiglu(self, x: Tensor, alpha: float, limit: float) -> Tensor:
        def gated(gate: Tensor, up: Tensor) -> Tensor:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * gate * torch.sigmoid(alpha * gate)

        return rows(gated, *x.chunk(2, -1))

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return rows(lambda row: torch.tanh(row / cap) * cap, x)

    def pool(self, x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        if not spans:
            return torch.zeros(0, x.shape[1])
        means = torch.stack([sum(x[a:b].double()) / (b - a) for a, b in spans])
        return torch.stack([F.normalize(mean, dim=0) for mean in means]).float()

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch.stack([x[row] for row in rows.tolist()]) if len(rows) else x[:0].clone()

    def spread_columns(self, x: Tensor, columns: Tensor, size: int) -> Tensor:
        return x.new_full((len(x), size), -torch.inf).index_copy_(1, columns, x)

    # ---- the cache

    def kv_write(self, storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
        largest = LARGEST[storage.dtype]
        for slot, row in zip(slots.tolist(), values.float() / scale, strict=True):
            row = row if largest is None else row.clamp(-largest, largest)
            storage[slot] = F.pad(row, (0, storage.shape[2] - row.shape[1])).to(storage.dtype)

    def kv_move(self, storages: Sequence[Tensor], moves: Tensor) -> None:
        for storage in storages:
            bits = storage.view(torch.uint8)
            bits[moves[:, 1].long()] = bits[moves[:, 0].long()]

    # ---- sampling: the formulas that all devices share

    def sample_tokens(
        self, logits: Tensor, floats: Tensor, ints: Tensor, cuts: bool
    ) -> tuple[Tensor, Tensor]:
        return sample_tokens(logits, floats, ints)

    def compute_logprobs(
        self, logits: Tensor, token_ids: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return compute_logprobs(logits, token_ids, k)


class StaleSlotOps(Ops):
    """The same table with a bug: after the first write to a storage, the first row of a step goes
    to the slot that the previous step's first row had."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__(dtype)
        self.last: dict[int, int] = {}

    def kv_write(self, storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
        if len(slots):
            slots, where = slots.clone(), storage.data_ptr()
            now = int(slots[0])
            slots[0] = self.last.get(where, now)
            self.last[where] = now
        super().kv_write(storage, slots, values, scale)


def choose(logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns ids and weights of one row's experts."""
    scores: Any = {"softmax": lambda x: x.softmax(0), "sigmoid": torch.sigmoid}
    scored = scores.get(routing.score, lambda x: x)(logits)
    ranked = scored if correction is None else scored + correction
    if routing.groups > 1:
        grouped = ranked.view(routing.groups, -1)
        best = grouped.sort(-1, descending=True).values
        pairs = correction is not None and best.shape[1] > 1
        top = best[:, :2].sum(-1) if pairs else best[:, 0]
        keep = top.argsort(descending=True, stable=True)[: routing.keep]
        masked = torch.full_like(grouped, -torch.inf)
        masked[keep] = grouped[keep]
        ranked = masked.flatten()
    ids = ranked.argsort(descending=True, stable=True)[: routing.k]
    weights = scored[ids].softmax(0) if routing.score == "chosen" else scored[ids]
    if routing.norm:
        weights = weights / (weights.sum() + routing.floor)
    return ids, weights * routing.scale


def added(slots: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of one row's parts times their weights, in order."""
    total = torch.zeros_like(slots[0])
    for part, weight in zip(slots, weights, strict=True):
        total = total + part * weight
    return total


# ---- the order of tokens ----


def keys(scores: Tensor) -> Tensor:
    """Returns float32 scores as int64 in the same order; -0 and 0 are equal."""
    bits = (scores + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)


def ranks(scores: Tensor) -> Tensor:
    """Returns int64 [S, V]: smaller is better, by score, then by id (low bits). No two are
    equal."""
    order = keys(scores)
    ids = torch.arange(scores.shape[1], device=scores.device)
    return ((order.amax(1, keepdim=True) - order) << f.ID_BITS) | ids


def states(scores: Tensor) -> Tensor:
    """Returns int64 [S]: whether a row has anything to choose from."""
    top = scores.amax(1)
    state = torch.where(top == torch.inf, f.INFINITE, torch.where(top == -torch.inf, f.EMPTY, f.OK))
    return torch.where(scores.isnan().any(1), f.NAN, state)


def weights(scores: Tensor, top: Tensor) -> Tensor:
    """Returns exp(score - top) as int64, in units of 2^-FRACTION. `top` is the row's best score."""
    result: Tensor = f.weight(scores.to(torch.float64) - top.to(torch.float64))
    return result


# ---- temperature, top-k, top-p, min-p, noise, argmax ----


def cut(scores: Tensor, top_k: Tensor, top_p: Tensor, min_log: Tensor) -> Tensor:
    """Returns scores with -inf where top-k, top-p or min-p drop a token. scores float32 [S, V]
    without NaN; the others have one entry per row. Top-p keeps the shortest prefix of the order
    that has at least the fraction top_p of the weight that top-k left."""
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
    """Returns the token with the largest score, the lowest id among equals."""
    return ranks(scores).amin(1) & f.ID_MASK


def noise(counters: Tensor, vocab_size: int) -> Tensor:
    """Returns float32 [S, vocab_size] for counters int64 [S, 4]."""
    ids = torch.arange(vocab_size, device=counters.device).expand(len(counters), -1)
    return noise_of(counters, ids)


def sample_tokens(logits: Tensor, floats: Tensor, ints: Tensor) -> tuple[Tensor, Tensor]:
    """`Ops.sample_tokens` with tensors. A row with nothing to choose from gets NO_TOKEN."""
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
    """`Ops.compute_logprobs` with tensors, a few rows at a time. NO_TOKEN asks for no token's."""
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
