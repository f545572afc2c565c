"""The cache's two writers on a GPU: this step's K or V rows of a layer, and relocations in all
layers at once.

`write` divides by the scale, clamps and rounds once, in float32; `move` gathers every row of a
column of bytes before it scatters one, so that a row may be both source and target. Knows tensors;
no page, no request. Called by the op table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.launch import power_of_2
from lockstep.kv.pool import widened
from lockstep.types import RuleError

MOVES = 4096  # rows that one program holds in registers between gather and scatter
HELD_WORDS = 16384  # 4-byte words of them per program


# ---- texts ----


@triton.jit
def encode(x, scale, LARGEST: tl.constexpr):
    """Values as they are stored: divided by the scale, clamped to the format's range; NaN stays
    NaN. An infinite value would be one for rows that do not see it: 0 times infinity is NaN."""
    y = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
    y = tl.maximum(y, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(y, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=("x_token", "x_head"))
def write_kernel(
    x, cache, slots, scale, x_token, x_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token per program: its rows of all kv heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < KV_HEADS * D
    value = tl.load(x + token * x_token + (i // D) * x_head + i % D, mask=inside, other=0.0)
    stored = encode(value, scale, LARGEST).to(cache.dtype.element_ty)
    tl.store(cache + slot * (KV_HEADS * D) + i, stored, mask=inside)


@triton.jit(do_not_specialize=("count",))
def move_kernel(bases, row_words, moves, count, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """`count` rows of one storage and one run of WORDS 4-byte words per program: all are read
    before one is written."""
    storage = tl.program_id(0)
    words = tl.load(row_words + storage)
    base = tl.load(bases + storage).to(tl.pointer_type(tl.int32))
    column = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    row = tl.arange(0, ROWS)
    real = (row < count)[:, None] & (column < words)[None, :]
    source = tl.load(moves + 2 * row, mask=row < count, other=0).to(tl.int64)
    target = tl.load(moves + 2 * row + 1, mask=row < count, other=0).to(tl.int64)
    held = tl.load(base + source[:, None] * words + column[None, :], mask=real, other=0)
    tl.debug_barrier()  # gather all, then scatter all
    tl.store(base + target[:, None] * words + column[None, :], held, mask=real)


# ---- calls ----


def largest(dtype: torch.dtype) -> float:
    """Values are clamped to ± this: what the format holds, and so far below float32's end that a
    sum of them has one too."""
    return min(torch.finfo(dtype).max, 2.0**100)


def write(storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
    """Stores rows [T, kv_heads, d] at int32 `slots` [T] of a storage [slots, kv_heads, d]."""
    if len(values) != len(slots):
        rule, got = "a step writes one row per slot", f"{len(slots)} slots, {len(values)} rows"
        raise RuleError(rule, got, "Pass all rows")
    if values.stride(2) != 1:
        rule, got = "the columns of a K or V row are contiguous", f"strides {values.stride()}"
        raise RuleError(rule, got, "Make them contiguous")
    if len(slots):
        x, (_, kv_heads, d) = widened(values, storage.shape[2]), storage.shape
        write_kernel[(len(slots),)](
            x, storage, slots, scale, *x.stride()[:2], KV_HEADS=kv_heads, D=d,
            LARGEST=largest(storage.dtype), BLOCK=power_of_2(kv_heads * d), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip


def storage_table(storages: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Addresses and row lengths in 4-byte words of all storages of a group: made once, when the
    pool is."""
    row_bytes = [s.shape[1] * s.shape[2] * s.element_size() for s in storages]
    if any(n % 4 for n in row_bytes):
        rule, got = "a K or V row is a multiple of 4 bytes", f"rows of {row_bytes} bytes"
        raise RuleError(rule, got, "Use head sizes that are multiples of 8")
    bases = torch.tensor([s.data_ptr() for s in storages], dtype=torch.int64, device=device)
    return bases, torch.tensor([n // 4 for n in row_bytes], dtype=torch.int32, device=device)


def move(table: tuple[Tensor, Tensor], widest_words: int, moves: Tensor) -> None:
    """Relocates rows, moves [M, 2] int32 (from, to), in every storage of `storage_table`, in one
    launch."""
    count = len(moves)
    if count > MOVES:
        rule = f"a step relocates at most {MOVES} rows of a group"
        raise RuleError(rule, str(count), "Schedule fewer tree requests per step")
    if not count:
        return
    rows = power_of_2(count)
    words = max(1, min(64, HELD_WORDS // rows))
    grid = (len(table[0]), -(-widest_words // words))
    launch = {"ROWS": rows, "WORDS": words, "num_warps": 8, "enable_fp_fusion": False}
    move_kernel[grid](*table, moves, count, **launch)
