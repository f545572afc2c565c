"""Launch shapes: rows of a block, warps, and who is split over programs, by lengths and head sizes.
Speed only: no entry changes a bit. The figures behind the table are in `docs/performance.md`."""

import numpy as np
from numpy.typing import NDArray

from lockstep.kernels.triton.items import Rows
from lockstep.kernels.triton.launch import Tuning
from lockstep.order import AttentionOrder
from lockstep.types import GroupSpec, Layout

FEW = 16  # rows (token, head) of a request that still make one small block
PROGRAMS = 264  # two per multiprocessor: fewer whole blocks than this are split over programs
WHOLE = 1.05  # times a multiprocessor's share of all keys: a request up to this is not split
TOKENS = 96  # rows of a request from which a block of 128 tokens is worth while
PREFILL_ITEMS = 100  # of those, fewer are left to the plain kernel


def few(spec: GroupSpec, tree: bool = False) -> Tuning:
    """One small block per request and kv head, a program per split. A tree's second loop needs
    twice the registers."""
    if narrow(spec):
        return some(spec, tree)
    warps = 8 if tree else 4
    if spec.d_v > 256:
        return Tuning(rows=16, warps=warps, stages=2, parts=True, fold_rows=1)
    if spec.d_v > 128:
        return Tuning(rows=16, warps=warps, stages=4, parts=True, fold_rows=2)
    return Tuning(rows=16, warps=warps, stages=4, parts=True)


def some(spec: GroupSpec, tree: bool = False) -> Tuning:
    """Blocks of 64 rows, a program per split."""
    if tree and spec.d_v > 128 and not narrow(spec):
        return few(spec, tree)
    if spec.d_v > 256:
        return Tuning(rows=64, warps=8, stages=1 if narrow(spec) else 2, parts=True, fold_rows=1)
    warps = 4 if max(spec.d_qk, spec.d_v) < 128 and not tree else 8
    return Tuning(rows=64, warps=warps, stages=2, parts=True, fold_rows=2)


def many(spec: GroupSpec, tree: bool = False) -> Tuning:
    """Whole blocks, folded as they go; a tree is always parts."""
    if tree or (spec.d_v > 256 and narrow(spec)):
        return some(spec, tree)
    if spec.d_v > 256:
        return Tuning(rows=32, warps=8, stages=1, parts=False)
    if spec.d_v > 128:
        return Tuning(rows=64, warps=4, stages=2, parts=False)
    if any(attn.soft_cap is not None for attn in spec.layers):  # tanh needs registers too
        return Tuning(rows=64, warps=8, stages=2, parts=False)
    return Tuning(rows=128, warps=8, stages=3, parts=False)


def narrow(spec: GroupSpec) -> bool:
    """Keys of one byte: blocks under 64 rows would use mma.sync, whose operands, widened in
    registers, are regrouped along K."""
    return spec.kv_dtype == "float8_e4m3"


DECODE = Tuning(rows=16, warps=4, stages=3, parts=True, registers=128, kernel="decode")
PREFILL = Tuning(rows=128, warps=4, stages=2, parts=False, kernel="prefill")
LATENT = Tuning(rows=64, warps=8, stages=2, parts=True, kernel="latent")

Choice = tuple[Tuning, NDArray[np.int64], NDArray[np.bool_]]  # requests, and which are split


def serves(spec: GroupSpec, tree: bool, order: AttentionOrder) -> bool:
    """Whether the warp-specialised kernels can do a group: head sizes, pages and features that they
    know."""
    dense = spec.layout in (Layout.DENSE, Layout.CROSS) and spec.d_qk == spec.d_v
    latent = spec.layout is Layout.LATENT and (spec.d_qk, spec.d_v) == (576, 512)
    return (
        ((dense and spec.d_qk in (64, 128)) or latent)
        and spec.page_size in (16, 32, 64, 128)
        and spec.page_size <= order.tile
        and spec.kv_dtype == "bfloat16"
        and not tree
        and all(attn.soft_cap is None for attn in spec.layers)
    )


def group_of(spec: GroupSpec, tuning: Tuning) -> int:
    """Query heads that share a block's rows: those of a kv head, or one where a block is tokens of
    one head."""
    return 1 if tuning.kernel == "prefill" else spec.group_size


def split_up(spec: GroupSpec, rows: Rows, requests: NDArray[np.int64], tuning: Tuning) -> Choice:
    """Requests of which those are split over programs that have more keys than a multiprocessor's
    share of all that is read, so that one would be busy when the others are done."""
    first, end = rows.q_indptr[requests], rows.q_indptr[requests + 1]
    keys = (rows.hi[end - 1] - rows.lo[first]).astype(np.int64)
    blocks = -(-((end - first) * spec.group_size) // tuning.rows) * spec.kv_heads
    return tuning, requests, keys * (PROGRAMS // 2) > WHOLE * int((keys * blocks).sum())


def most_split(spec: GroupSpec, tuning: Tuning, width: int = 1) -> int:
    """Blocks of `width` rows per request that `split_up` may split, at most: their keys together
    are all that is read."""
    blocks = -(-spec.group_size * width // tuning.rows)
    return int(PROGRAMS // 2 / (WHOLE * blocks * spec.kv_heads)) * blocks


def choose(
    spec: GroupSpec, rows: Rows, hopper: bool, tree: bool, order: AttentionOrder
) -> list[Choice]:
    """Launch shapes, the requests each serves, and which of those are split over programs.
    `hopper`: the warp-specialised kernels may be used."""
    hopper = hopper and serves(spec, tree, order)
    lens = np.diff(rows.q_indptr).astype(np.int64)
    if hopper and spec.layout is Layout.LATENT:
        return [split_up(spec, rows, np.flatnonzero(lens), LATENT)]
    flat = lens * spec.group_size
    if hopper and len(flat) and 0 < flat.min() and flat.max() <= FEW:  # all there is to most steps
        return [split_up(spec, rows, np.arange(len(flat)), DECODE)]
    small = (lens > 0) & (flat <= FEW)
    long = (lens >= TOKENS) & ~small & (hopper and spec.causal and spec.window is None)
    if int((-(-lens[long] // PREFILL.rows)).sum()) * spec.heads < PREFILL_ITEMS:
        long &= False
    rest = (lens > 0) & ~small & ~long
    whole = many(spec, tree)
    blocks = int((-(-flat[rest] // whole.rows)).sum()) * spec.kv_heads
    chosen = [alike(some(spec, tree) if blocks < PROGRAMS else whole, rest), alike(PREFILL, long)]
    if hopper and small.any():
        chosen.insert(0, split_up(spec, rows, np.flatnonzero(small), DECODE))
    else:
        chosen.insert(0, alike(few(spec, tree), small))
    return [choice for choice in chosen if len(choice[1])]


def alike(tuning: Tuning, mask: NDArray[np.bool_]) -> Choice:
    """Requests that are all split over programs, or none of them."""
    requests = np.flatnonzero(mask)
    return tuning, requests, np.full(len(requests), tuning.parts)
