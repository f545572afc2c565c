"""The cache's two writers on a GPU: this step's K or V rows of a layer, and relocations in all
layers at once.

`write` divides by the scale, clamps and rounds once, in float32; `move` gathers every row of a
column of bytes before it scatters one, so that a row may be both source and target. Knows tensors;
no page, no request. Called by the op table.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.gemm import require
from lockstep.kernels.triton.launch import power_of_2
from lockstep.kernels.triton.rowwise import width
from lockstep.kv.pool import widened

MOVES = 4096  # rows that one program holds in registers between gather and scatter
HELD_WORDS = 16384  # 4-byte words of them per program
LARGEST = 2.0**100  # that is stored: a sum of such has an end in float32, too


# ---- texts ----


@triton.jit
def encode(x, scale, LARGEST: tl.constexpr):
    """Values as they are stored: divided by the scale, clamped to the format's range; NaN stays
    NaN. An infinite value would be one for rows that do not see it: 0 times infinity is NaN."""
    y = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
    y = tl.maximum(y, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(y, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=("x_token", "x_head"))
def write_kernel(x, cache, slots, scale, x_token, x_head, KV_HEADS: tl.constexpr, D: tl.constexpr,
                 LARGEST: tl.constexpr):  # fmt: skip
    """One token per program: its rows of all kv heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    i = tl.arange(0, width(KV_HEADS * D))
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


def write(storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
    """Stores rows [T, kv_heads, d] at int32 `slots` [T] of a storage [slots, kv_heads, d]."""
    require(len(values) == len(slots), "a step writes one row per slot", values, slots)
    require(values.stride(2) == 1, "the columns of a K or V row are contiguous", values)
    x, (_, kv_heads, d) = widened(values, storage.shape[2]), storage.shape
    write_kernel[(len(slots),)](
        x, storage, slots, scale, *x.stride()[:2], KV_HEADS=kv_heads, D=d,
        LARGEST=min(torch.finfo(storage.dtype).max, LARGEST), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def storage_table(storages: Sequence[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Addresses and row lengths in 4-byte words of all storages of a group, and the longest: made
    once, when the pool is."""
    words = [s.shape[1] * s.shape[2] * s.element_size() // 4 for s in storages]
    held = all(s.shape[1] * s.shape[2] * s.element_size() % 4 == 0 for s in storages)
    require(held, "a K or V row is a multiple of 4 bytes", *storages)
    device = storages[0].device
    bases = torch.tensor([s.data_ptr() for s in storages], dtype=torch.int64, device=device)
    return bases, torch.tensor(words, dtype=torch.int32, device=device), max(words)


def move(table: tuple[Tensor, Tensor, int], moves: Tensor) -> None:
    """Relocates rows, moves [M, 2] int32 (from, to), in every storage of `storage_table`, in one
    launch."""
    (bases, row_words, widest), count = table, len(moves)
    require(count <= MOVES, f"a step relocates at most {MOVES} rows of a group", moves)
    rows = power_of_2(count)
    words = max(1, min(64, HELD_WORDS // rows))
    grid = (len(bases), triton.cdiv(widest, words))
    launch = {"ROWS": rows, "WORDS": words, "num_warps": 8, "enable_fp_fusion": False}
    move_kernel[grid](bases, row_words, moves, count, **launch)
