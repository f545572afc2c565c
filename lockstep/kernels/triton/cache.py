"""Launches of the cache's writers on a GPU: `write` for one layer of a group, `move` for all of its
layers in one launch.

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


def write(
    storages: Sequence[Tensor],
    slots: Tensor,
    k: Tensor,
    v: Tensor | None,
    scales: tuple[float, float],
) -> None:
    """Stores rows k [T, kv_heads, d_qk] (and v, unless the row is latent) at int32 `slots` [T] of
    storages [slots, kv_heads, d]."""
    from lockstep.kernels.triton.kv import write_kernel

    keys = storages[0]
    has_v = len(storages) > 1
    values, given = (storages[1], v) if has_v else (keys, k)
    if given is None or len(k) != len(slots) or len(given) != len(slots):
        got = f"{len(slots)} slots, {len(k)} K rows, {None if given is None else len(given)} V rows"
        raise RuleError("a step writes one K and one V row per slot", got, "Pass all rows")
    if k.stride(2) != 1 or given.stride(2) != 1:
        rule = "the columns of a K or V row are contiguous"
        raise RuleError(rule, f"strides {k.stride()} and {given.stride()}", "Make them contiguous")
    if not len(slots):
        return
    k, given = widened(k, keys.shape[2]), widened(given, values.shape[2])
    kv_heads, d_qk, d_v = k.shape[1], k.shape[2], given.shape[2]
    write_kernel[(len(slots),)](
        k, given, keys, values, slots, *scales, *k.stride()[:2], *given.stride()[:2],
        KV_HEADS=kv_heads, D_QK=d_qk, D_V=d_v, HAS_V=has_v, FP8=keys.dtype is torch.float8_e4m3fn,
        BLOCK=power_of_2(kv_heads * max(d_qk, d_v)), num_warps=4, enable_fp_fusion=False,
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
    move_kernel[grid](
        table[0],
        table[1],
        moves,
        count,
        ROWS=rows,
        WORDS=words,
        num_warps=8,
        enable_fp_fusion=False,
    )
