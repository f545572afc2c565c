"""The two writers of the KV cache on a GPU: `write` stores this step's K or V rows of a layer,
`move` relocates rows in all layers in one launch.

`write` divides by the scale, clamps and rounds once, in float32. `move` gathers a column of words
of all rows before it scatters any, so that a row may be both source and target. Knows tensors, no
pages and no requests. Called by the op table.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.gemm import require
from lockstep.kernels.triton.rowwise import width
from lockstep.kv.pool import pad_columns
from lockstep.plan.build import next_power_of_2

MOVES = 4096  # most rows that one program holds in registers between gather and scatter
HELD_WORDS = 16384  # most 4-byte words of these rows per program
LARGEST = 2.0**100  # largest stored magnitude: sums of such values stay finite in float32, too


# ---- kernels ----


@triton.jit(do_not_specialize=("x_token", "x_head"))
def write_kernel(x, cache, slots, scale, x_token, x_head, KV_HEADS: tl.constexpr, D: tl.constexpr,
                 LARGEST: tl.constexpr):  # fmt: skip
    """Writes one token per program: its rows of all kv heads, divided by the scale, clamped to
    ±LARGEST; NaN stays NaN. An infinite value would affect rows that do not see it, because 0 times
    infinity is NaN."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    i = tl.arange(0, width(KV_HEADS * D))
    inside = i < KV_HEADS * D
    value = tl.load(x + token * x_token + (i // D) * x_head + i % D, mask=inside, other=0.0)
    value = tl.div_rn(value.to(tl.float32), tl.zeros_like(value).to(tl.float32) + scale)
    value = tl.maximum(value, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    value = tl.minimum(value, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(cache + slot * (KV_HEADS * D) + i, value.to(cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("count",))
def move_kernel(bases, row_words, moves, count, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Moves WORDS 4-byte words of `count` rows of one storage per program; reads all before it
    writes any."""
    storage = tl.program_id(0)
    words = tl.load(row_words + storage)
    base = tl.load(bases + storage).to(tl.pointer_type(tl.int32))
    column = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    row = tl.arange(0, ROWS)
    real = (row < count)[:, None] & (column < words)[None, :]
    source = tl.load(moves + 2 * row, mask=row < count, other=0).to(tl.int64)
    target = tl.load(moves + 2 * row + 1, mask=row < count, other=0).to(tl.int64)
    held = tl.load(base + source[:, None] * words + column[None, :], mask=real, other=0)
    tl.debug_barrier()  # every thread has read before any thread writes
    tl.store(base + target[:, None] * words + column[None, :], held, mask=real)


# ---- calls ----


def write(storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
    """Stores values [T, kv_heads, d] at int32 `slots` [T] of a storage [slots, kv_heads, d]."""
    require(values.stride(2) == 1, "the columns of a K or V row are contiguous", values)
    x, (_, kv_heads, d) = pad_columns(values, storage.shape[2]), storage.shape
    write_kernel[(len(slots),)](
        x, storage, slots, scale, *x.stride()[:2], KV_HEADS=kv_heads, D=d,
        LARGEST=min(torch.finfo(storage.dtype).max, LARGEST), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@cache
def on_device(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns addresses or lengths of storages as a tensor, copied to the device once."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def move(storages: Sequence[Tensor], moves: Tensor) -> None:
    """Relocates rows in every storage in one launch; moves [M, 2] int32 (source, target slot).
    More rows than MOVES are gathered in memory, storage by storage."""
    count = len(moves)
    if count == 0:
        return
    if count > MOVES:
        source, target = moves.long().unbind(1)
        for storage in storages:
            table = storage.flatten(1).view(torch.int32)
            table.index_copy_(0, target, table.index_select(0, source))
        return
    row_words = tuple(s.stride(0) * s.element_size() // 4 for s in storages)
    bases = on_device(tuple(s.data_ptr() for s in storages), torch.int64, moves.device)
    rows = next_power_of_2(max(count, 16))
    words = min(64, HELD_WORDS // rows)
    grid = (len(storages), triton.cdiv(max(row_words), words))
    launch = {"ROWS": rows, "WORDS": words, "num_warps": 8, "enable_fp_fusion": False}
    lengths = on_device(row_words, torch.int32, moves.device)
    move_kernel[grid](bases, lengths, moves, count, **launch)
