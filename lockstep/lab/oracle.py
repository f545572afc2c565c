"""The attention oracle: float64 attention over logical tokens, and how far a device may be from it.
The tolerance is derived, not guessed: docs/numerics.md."""

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.lab.features import Feature
from lockstep.lab.options import CPU, Device
from lockstep.lab.recipes import Script, leaf_uids
from lockstep.order import SPLIT_LEN, tile_len
from lockstep.types import AttnSpec, GroupSpec, Layout

U = 2.0**-24
LAMBDA = 6.0
LARGEST = {"float8_e4m3": 448.0, "float16": 65504.0}  # what a cache clamps to
# on a GPU no cache stores an infinity, which rows that do not see it would multiply by 0
GPU_LARGEST = {**LARGEST, "bfloat16": 2.0**100}
KINDS = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
KINDS["float8_e4m3"] = torch.float8_e4m3fn


class Rows(NamedTuple):
    """q, k, v of every token in one layer. A latent group's v is a part of its k."""

    q: Tensor
    k: Tensor
    v: Tensor


class Answer(NamedTuple):
    """Per token: out [N, heads, d_v], lse [N, heads], their tolerances. NaN where not a row."""

    out: Tensor
    lse: Tensor
    out_tol: Tensor
    lse_tol: Tensor


def values(
    groups: tuple[GroupSpec, ...], tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[list[Rows]]:
    """Draws random values for every token, group and layer, in the dtype of activations."""
    gen = torch.Generator().manual_seed(seed)
    out = []
    for spec in groups:
        shapes = ((spec.heads, spec.d_qk), (spec.kv_heads, spec.d_qk), (spec.kv_heads, spec.d_v))
        narrower = spec.layout is Layout.FRESH and spec.d_v < spec.d_qk
        shares_v = narrower or spec.layout is Layout.LATENT
        layers = []
        for _ in spec.layers:
            q, k, v = (torch.randn(tokens, *shape, generator=gen).to(dtype) for shape in shapes)
            layers.append(Rows(q, k, k[..., : spec.d_v] if shares_v else v))
        out.append(layers)
    return out


def overflowed(rows: list[list[Rows]], tokens: list[int]) -> list[list[Rows]]:
    """Returns the same rows with infinities in the values of `tokens`: in the first column, and in
    one beyond the first vector of 16. One sign per column, so a row that sees several still has an
    answer."""

    def overflow(each: Rows) -> Rows:
        v = each.v.clone()
        v[tokens, :, 0] = torch.inf
        v[tokens, :, min(20, v.shape[2] - 1)] = -torch.inf
        return each._replace(v=v)

    return [[overflow(each) for each in layers] for layers in rows] if tokens else rows


def rounded(kv_dtype: str, x: Tensor, scale: float, device: Device = CPU) -> Tensor:
    """Returns what a cache stores for x, by the lab's own account of the storage formats."""
    kept, largest = x.float() / scale, GPU_LARGEST if device.name == "cuda" else LARGEST
    if kv_dtype in largest:
        kept = kept.clamp(-largest[kv_dtype], largest[kv_dtype])
    return kept.to(KINDS[kv_dtype])


def stored(
    spec: GroupSpec, attn: AttnSpec, rows: Rows, device: Device = CPU
) -> tuple[Tensor, Tensor]:
    """Returns K and V as read back from the cache, in float64."""
    k = rounded(spec.kv_dtype, rows.k, attn.k_scale, device).double() * attn.k_scale
    v = rounded(spec.kv_dtype, rows.v, attn.v_scale, device).double() * attn.v_scale
    return k, v


def answers(
    feature: Feature, script: Script, rows: list[list[Rows]], unit: float = U
) -> list[list[Answer]]:
    """Returns each token's answer, per group and layer; `unit` is the activations' roundoff."""
    n = len(script.parents)
    out = []
    for g, spec in enumerate(feature.groups(16)):
        per_layer = []
        for attn, mine in zip(spec.layers, rows[g], strict=True):
            k, v = stored(spec, attn, mine, feature.device)
            shapes = ((n, spec.heads, spec.d_v), *[(n, spec.heads)] * 3)
            blank = [torch.full(shape, float("nan"), dtype=torch.float64) for shape in shapes]
            for begin, path, keys in row_sets(feature, script, g):
                for at in range(begin, len(path), 128):
                    some = path[at : at + 128]
                    q = mine.q[some].double()
                    result = _attend(spec, attn, q, (k[keys], v[keys]), at, unit)
                    for whole, part in zip(blank, result, strict=True):
                        whole[some] = part
            per_layer.append(Answer(*blank))
        out.append(per_layer)
    return out


def row_sets(feature: Feature, script: Script, g: int) -> list[tuple[int, list[int], list[int]]]:
    """Returns (begin, path, keys) of group g: rows path[begin:], once each; keys by position."""
    encoders = set(script.encoder_uids.values())
    only_encodes = g in feature.encode and g not in feature.decode
    crosses = g in feature.encode and g in feature.decode
    sets, done = [], set[int]()
    for uid in leaf_uids(script):
        path = script.path(uid)
        if feature.encode and (tuple(path) in encoders) != only_encodes:
            continue
        begin = sum(u in done for u in path)
        done.update(path)
        keys = list(script.encoder_uids[script.owner[uid]]) if crosses else path
        sets.append((begin, path, keys))
    return sets


def _attend(
    spec: GroupSpec, attn: AttnSpec, q: Tensor, keys: tuple[Tensor, Tensor], begin: int, unit: float
) -> tuple[Tensor, ...]:
    k, v = (t.repeat_interleave(spec.group_size, 1) for t in keys)
    n = len(k)
    dots, sizes = torch.einsum("qhd,khd->hqk", q, k), torch.einsum("qhd,khd->hqk", q.abs(), k.abs())
    scores = dots * attn.scale
    off = attn.scale * (LAMBDA * spec.d_qk**0.5 + 1) * U * sizes + 4 * U * scores.abs()
    if attn.soft_cap is not None:
        scores = attn.soft_cap * torch.tanh(scores / attn.soft_cap)
        off = off + 4 * U * attn.soft_cap
    p, j = torch.arange(begin, begin + len(q))[:, None], torch.arange(n)[None, :]
    sees = (j <= p) & (j > p - (spec.window or n + begin + 1)) | (not spec.causal)
    scores, off = scores.masked_fill(~sees, -torch.inf), off.masked_fill(~sees, 0)
    sinks = torch.full((spec.heads, len(q), 1), -torch.inf, dtype=torch.float64)
    if attn.sinks is not None:
        sinks[:] = torch.tensor(attn.sinks, dtype=torch.float64)[:, None, None]
    lse = torch.logsumexp(torch.cat((scores, sinks), 2), 2)
    weights = torch.exp(scores - lse[..., None])
    out, mass = weighted(weights, v)
    delta = off.amax(2).T
    rescales = n // tile_len(spec.d_qk, spec.d_v) + n // SPLIT_LEN + 2
    grain = (LAMBDA * n**0.5 + 2 * rescales + 16) * U
    narrow = unit if unit > U else 0.0  # float32's rounding is part of the grain
    out_tol = mass.amax(2) * (2 * delta + 2 * grain + 2 * narrow) + 1e-30
    return out, lse.T, out_tol, delta + grain + 4 * U * lse.T.abs()


def weighted(weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums [q, h, d] of weights [h, q, k] times v [k, h, d], and of weights times |v|.
    An infinity counts only for the rows that see its key."""
    infinite = v.isinf()
    finite = v.masked_fill(infinite, 0.0)
    out, mass = (torch.einsum("hqk,khd->qhd", weights, x) for x in (finite, finite.abs()))
    if bool(infinite.any()):
        signs = torch.einsum("hqk,khd->qhd", (weights > 0).double(), v.sign() * infinite)
        out = torch.where(signs == 0, out, signs * torch.inf)
    return out, mass
