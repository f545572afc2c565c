"""Launch shapes: how many rows a block has, how many warps, and who is split over programs. Speed
only: no entry changes a bit.

Chosen by lengths and head sizes, on the host, in the backend's `lower`. The figures behind the
table are in `docs/performance.md`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.kernels.triton.items import Rows
from lockstep.kernels.triton.launch import Tuning
from lockstep.order import AttentionOrder, Splits
from lockstep.types import GroupSpec, Layout

FEW = 16  # rows (token, head) of a request that still make one small block
PROGRAMS = 264  # two per multiprocessor: fewer whole blocks than this are split over programs
# splits of small blocks up to which the warp-specialised kernel is faster: it fetches a whole split
# at once
LONE_ITEMS = 264
TOKENS = 96  # rows of a request from which a block of 128 tokens is worth while
HOPPER_ITEMS = 100


def few(spec: GroupSpec, tree: bool = False) -> Tuning:
    """One small block per request and kv head, a program per split. A tree's second loop needs
    twice the registers."""
    if narrow(spec):
        return some(spec, tree)
    if spec.d_v > 256:
        return Tuning(rows=16, warps=8 if tree else 4, stages=2, parts=True, fold_rows=1)
    return Tuning(
        rows=16, warps=8 if tree else 4, stages=4, parts=True, fold_rows=4 if spec.d_v <= 128 else 2
    )


def some(spec: GroupSpec, tree: bool = False) -> Tuning:
    """Blocks of 64 rows, a program per split."""
    if tree and spec.d_v > 128 and not narrow(spec):
        return few(spec, tree)
    if spec.d_v > 256:
        return Tuning(
            rows=64, warps=8, stages=1 if narrow(spec) or tree else 2, parts=True, fold_rows=1
        )
    return Tuning(
        rows=64,
        warps=4 if max(spec.d_qk, spec.d_v) < 128 and not tree else 8,
        stages=2,
        parts=True,
        fold_rows=2,
    )


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


HOPPER_ROWS = Tuning(rows=16, warps=4, stages=3, parts=True, hopper=True)
HOPPER_TOKENS = Tuning(rows=128, warps=4, stages=2, parts=False, hopper=True)


def hopper_serves(spec: GroupSpec, tree: bool, order: AttentionOrder) -> bool:
    """Whether the warp-specialised kernels can do a group: head sizes, pages and features that they
    know."""
    return (
        spec.layout in (Layout.DENSE, Layout.CROSS)
        and spec.d_qk == spec.d_v
        and spec.d_qk in (64, 128)
        and order.tile == 128
        and spec.page_size in (16, 32, 64, 128)
        and spec.kv_dtype == "bfloat16"
        and not tree
        and all(attn.soft_cap is None for attn in spec.layers)
    )


def lone(spec: GroupSpec, rows: Rows, small: NDArray[np.bool_], splits: Splits) -> bool:
    """Whether the small requests have so few splits, over all kv heads, that each can have a
    multiprocessor of its own, or nearly."""
    first = rows.q_indptr[:-1][small]
    if not len(first):
        return False
    count = splits.index(np.maximum(rows.hi[first], 1) - 1) - splits.index(rows.lo[first]) + 1
    return int(count.sum()) * spec.kv_heads <= LONE_ITEMS


def group_of(spec: GroupSpec, tuning: Tuning) -> int:
    """Query heads that share a block's rows: those of a kv head, or one where a block is tokens of
    one head."""
    return 1 if tuning.hopper and not tuning.parts else spec.group_size


def choose(
    spec: GroupSpec, rows: Rows, hopper: bool, tree: bool, splits: Splits
) -> list[tuple[Tuning, NDArray[np.int64]]]:
    """Launch shapes and the requests each serves. `hopper`: the warp-specialised kernels may be
    used."""
    lens = np.diff(rows.q_indptr).astype(np.int64)
    flat = lens * spec.group_size
    small = (lens > 0) & (flat <= FEW)
    long = (lens >= TOKENS) & ~small & (hopper and spec.causal and spec.window is None)
    if int((-(-lens[long] // HOPPER_TOKENS.rows)).sum()) * spec.heads < HOPPER_ITEMS:
        long &= False
    rest = (lens > 0) & ~small & ~long
    whole = many(spec, tree)
    blocks = int((-(-flat[rest] // whole.rows)).sum()) * spec.kv_heads
    little = HOPPER_ROWS if hopper and lone(spec, rows, small, splits) else few(spec, tree)
    chosen = (
        (little, small),
        (some(spec, tree) if blocks < PROGRAMS else whole, rest),
        (HOPPER_TOKENS, long),
    )
    return [(tuning, np.flatnonzero(mask)) for tuning, mask in chosen if mask.any()]
