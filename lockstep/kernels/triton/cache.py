"""Launches of the cache's writers on a GPU: `write` for one storage, `move` for all of a group.

Knows torch tensors and `kv.py`; the pool on a GPU calls these where the one on a CPU indexes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.kernels.triton.launch import power_of_2
from lockstep.kv.pool import widened
from lockstep.types import RuleError

MOVES = 4096  # rows that one program holds in registers between gather and scatter
HELD_WORDS = 16384  # 4-byte words of them per program


def largest(dtype: torch.dtype) -> float:
    """Values are clamped to ± this: what the format holds, and so far below float32's end that a
    sum of them has one too."""
    return min(torch.finfo(dtype).max, 2.0**100)


def write(storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
    """Stores rows [T, kv_heads, d] at int32 `slots` [T] of a storage [slots, kv_heads, d]."""
    from lockstep.kernels.triton.kv import write_kernel

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
        rule = "a K or V row is a multiple of 4 bytes"
        got = f"rows of {row_bytes} bytes"
        raise RuleError(rule, got, "Use head sizes that are multiples of 8")
    bases = torch.tensor([s.data_ptr() for s in storages], dtype=torch.int64, device=device)
    return bases, torch.tensor([n // 4 for n in row_bytes], dtype=torch.int32, device=device)


def move(table: tuple[Tensor, Tensor], widest_words: int, moves: Tensor) -> None:
    """Relocates rows, moves [M, 2] int32 (from, to), in every storage of `storage_table`, in one
    launch."""
    from lockstep.kernels.triton.kv import move_kernel

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
