"""Launches attention: shapes, strides and constants of one call turned into the kernel's arguments.

Knows torch tensors and the kernel; knows no plan. `Tuning` is what may be chosen freely (block,
warps, stages): it changes speed, never bits. Called by the backend's `attend`, by the tests and by
the benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.order import AttentionOrder
from lockstep.types import INT32_MAX, RuleError

OUTSIDE = 1 << 30  # a row that no tensor has: TMA fills zeros


@dataclass(frozen=True)
class Tuning:
    """The launch shape of one kernel variant."""

    rows: int  # flat rows (token, head) per block
    warps: int
    stages: int
    parts: bool  # a program per split, folded by the last to arrive
    fold_rows: int = 4
    fold_depth: int = 4
    registers: int | None = None  # at most so many per thread
    hopper: bool = False  # the warp-specialised kernel: blocks of 128 tokens of one head


@dataclass(frozen=True)
class Shape:
    """What a variant is compiled for besides its tuning."""

    d_qk: int
    d_v: int
    tile: int
    latent: bool = False
    cap: bool = False
    tree: bool = False

    def constants(self, tuning: Tuning) -> dict[str, Any]:
        """The kernel's compile-time values."""
        da, db = pieces(self.d_qk)
        return {
            "D_QK": self.d_qk,
            "DA": da,
            "DB": db,
            "D_V": self.d_v,
            "DV": power_of_2(self.d_v),
            "LATENT": self.latent and self.d_v == da,
            "CAP": self.cap,
            "TREE": self.tree,
            "PART": tuning.parts,
            "ROWS": tuning.rows,
            "TILE": self.tile,
            "FOLD_ROWS": tuning.fold_rows,
            "FOLD_DEPTH": tuning.fold_depth,
        }


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where keys are: int32 tensors of the plan's image, on the device."""

    positions: Tensor  # [T]
    start: Tensor  # [T]
    tail_indptr: Tensor  # [T+1]
    tail_slots: Tensor
    page_ids: Tensor
    page_size: int


@dataclass(frozen=True, eq=False)
class Scoring:
    """How a layer scores (`attention.base`): exp2(c * x), x the dot product or, where pre is not 0,
    tanh(pre * dot product)."""

    c: float
    pre: float
    v_scale: float
    sinks2: Tensor  # [heads] float32
    window: int = INT32_MAX
    causal: bool = True


@dataclass(frozen=True, eq=False)
class Scratch:
    """Room for parts. `counters` is zero before and after every launch."""

    ml: Tensor  # float32
    acc: Tensor  # float32
    counters: Tensor  # int32


def power_of_2(n: int) -> int:
    """The power of two at or above n, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def pieces(d_qk: int) -> tuple[int, int]:
    """A head size as one or two powers of two, walked one after the other: 128 = 128 + 0, 192 = 128
    + 64, 576 = 512 + 64."""
    first = max(16, 1 << (d_qk.bit_length() - 1))
    rest = d_qk - first
    return (first, 0) if rest <= 0 else (first, power_of_2(rest))


def divider(page_size: int) -> tuple[int, int]:
    """(mul, shift): p // page_size == (2 * p * mul >> 32) >> shift for every 0 <= p < 2**31, and
    mul fits in 32 bits."""
    shift = (page_size - 1).bit_length()
    return -(-(1 << (31 + shift)) // page_size), shift


def scratch(part_rows: int, counters: int, d_v: int, device: torch.device) -> Scratch:
    """Room for `part_rows` rows of parts."""
    rows = max(part_rows, 1)
    return Scratch(
        torch.empty(rows * 2, dtype=torch.float32, device=device),
        torch.empty(rows * power_of_2(d_v), dtype=torch.float32, device=device),
        torch.zeros(max(counters, 1), dtype=torch.int32, device=device),
    )


def eighths(tensor: Tensor, axis: int, name: str) -> int:
    """A stride in units of 8 elements, as the kernel takes it."""
    stride = tensor.stride(axis)
    if stride % 8 or tensor.stride(2) != 1:
        rule = f"{name} has contiguous heads at multiples of 8 elements"
        raise RuleError(rule, f"strides {tensor.stride()}", "Make it contiguous")
    return stride // 8


def attend(
    q: Tensor, keys: tuple[Tensor, Tensor], out: Tensor, lse: Tensor, table: Tensor, at: Addresses, scoring: Scoring, room: Scratch,
    shape: Shape, order: AttentionOrder, tuning: Tuning,
) -> None:  # fmt: skip
    """One launch. q [T, heads, d_qk]; keys k [slots, kv_heads, d_qk], v [slots, kv_heads, d_v]; out
    [T, heads, d_v], lse [T, heads]."""
    from lockstep.kernels.triton.attend import attend_kernel

    k, v = keys
    heads, kv_heads, splits = q.shape[1], k.shape[1], order.splits
    mul, shift = divider(at.page_size)
    attend_kernel[(len(table) * kv_heads,)](
        q, k, v, out, lse, scoring.sinks2, table, at.positions, at.start, at.tail_indptr, at.tail_slots, at.page_ids,
        room.ml, room.acc, room.counters, scoring.c, scoring.pre, scoring.v_scale,
        heads, kv_heads, scoring.window, int(scoring.causal), at.page_size, mul, shift,
        splits.count0, splits.len0, splits.count1, splits.len1, splits.len2,
        eighths(q, 0, "q"), eighths(q, 1, "q"), eighths(k, 0, "k"), eighths(k, 1, "k"), eighths(v, 0, "v"), eighths(v, 1, "v"),
        **shape.constants(tuning),
        num_warps=tuning.warps, num_stages=tuning.stages, maxnreg=tuning.registers, enable_fp_fusion=False,
    )  # fmt: skip


def page_descriptors(keys: tuple[Tensor, Tensor], page_size: int) -> tuple[Any, Any, Any]:
    """How the copy engine sees K and V: a box is 64 columns of a page. Also the layout of such a
    box."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k, v = (
        TensorDescriptor.from_tensor(x.view(x.shape[0], -1), [page_size, 64], layout) for x in keys
    )
    return k, v, layout


def tiles_of(order: AttentionOrder) -> tuple[int, int, int, int, int]:
    """The split rule, lengths in tiles."""
    splits, tile = order.splits, order.tile
    return (
        splits.count0,
        splits.len0 // tile,
        splits.count1,
        splits.len1 // tile,
        splits.len2 // tile,
    )


def prefill(
    q: Tensor, keys: tuple[Tensor, Tensor], out: Tensor, lse: Tensor, table: Tensor, at: Addresses, scoring: Scoring,
    order: AttentionOrder, programs: int,
) -> None:  # fmt: skip
    """One launch of the warp-specialised prefill; `table` holds blocks of 128 tokens (group 1).
    `tuning.hopper_serves` says when it may."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from lockstep.kernels.triton.hopper import prefill_kernel

    tokens, heads, d = q.shape
    k, v, layout = page_descriptors(keys, at.page_size)
    rows = TensorDescriptor.from_tensor(q.view(tokens, -1), [64, d], layout)
    prefill_kernel[(min(programs, len(table) * heads),)](
        rows, k, v, out, lse, scoring.sinks2, table, at.page_ids, scoring.c, scoring.v_scale,
        heads, heads // keys[0].shape[1], len(table) * heads, *tiles_of(order), OUTSIDE,
        D=d, TILE=order.tile, STAGES=2 if d == 128 else 3, PAGE=at.page_size, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def decode(
    q: Tensor, keys: tuple[Tensor, Tensor], out: Tensor, lse: Tensor, table: Tensor, at: Addresses, scoring: Scoring, room: Scratch,
    order: AttentionOrder, programs: int,
) -> None:  # fmt: skip
    """One launch of the warp-specialised kernel for few rows; `table` holds parts of blocks of at
    most 16 rows."""
    from lockstep.kernels.triton.hopper_decode import decode_kernel

    _, heads, d = q.shape
    kv_heads = keys[0].shape[1]
    k, v, _ = page_descriptors(keys, at.page_size)
    work = len(table) * kv_heads
    decode_kernel[(min(programs, work),)](
        q, k, v, out, lse, scoring.sinks2, table, at.positions, at.page_ids, room.ml, room.acc, room.counters, scoring.c, scoring.v_scale,
        heads, kv_heads, scoring.window, int(scoring.causal), work, eighths(q, 0, "q"), eighths(q, 1, "q"), *tiles_of(order), OUTSIDE,
        D=d, TILE=order.tile, STAGES=3 if d == 128 else 6, PAGE=at.page_size, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
