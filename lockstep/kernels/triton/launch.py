"""Launches attention: shapes, strides and constants of one call as the kernels' arguments. `Tuning`
is what may be chosen freely: it changes speed, never bits. Knows tensors, and no plan."""

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
    stages: int  # tiles in flight; the warp-specialised kernels count those of head size 128
    parts: bool  # a program per split, folded by the last to arrive
    fold_rows: int = 4
    fold_depth: int = 4
    registers: int | None = None  # at most so many per thread
    # "plain" (attend.py), or a warp-specialised twin: "prefill" (blocks of 128 tokens of one head),
    # "decode" (16 rows), "latent" (64 rows)
    kernel: str = "plain"


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


@dataclass(frozen=True, eq=False)
class Call:
    """One layer's attention: q [T, heads, d_qk]; keys k [slots, kv_heads, d_qk] and v [slots,
    kv_heads, d_v]; out [T, heads, d_v], lse [T, heads]; where keys are, how they score, in which
    order; whether k and v are one row, and whether rows name keys one by one."""

    q: Tensor
    keys: tuple[Tensor, Tensor]
    out: Tensor
    lse: Tensor
    at: Addresses
    scoring: Scoring
    order: AttentionOrder
    latent: bool
    tree: bool


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


def multiprocessors(device: torch.device) -> int:
    """Of the card; 1 where there is none."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def scratch(part_rows: int, counters: int, d_v: int, device: torch.device) -> Scratch:
    """Room for `part_rows` rows of parts and, for a latent cache, the state of every program."""
    rows = max(part_rows, 1) + (64 * multiprocessors(device) if d_v > 256 else 0)
    return Scratch(
        torch.empty(rows * 2, dtype=torch.float32, device=device),
        torch.empty(rows * power_of_2(d_v), dtype=torch.float32, device=device),
        torch.zeros(max(counters, 1), dtype=torch.int32, device=device),
    )


def eighths(tensor: Tensor, name: str) -> tuple[int, int]:
    """The strides of rows and heads in units of 8 elements, as kernels take them."""
    row, head, column = tensor.stride()
    if row % 8 or head % 8 or column != 1:
        rule = f"{name} has contiguous heads at multiples of 8 elements"
        raise RuleError(rule, f"strides {tensor.stride()}", "Make it contiguous")
    return row // 8, head // 8


def launch(call: Call, table: Tensor, room: Scratch, tuning: Tuning) -> None:
    """One launch over the items of `table`."""
    kernels = {"plain": plain, "prefill": prefill, "decode": decode, "latent": latent}
    kernels[tuning.kernel](call, table, room, tuning)


def plain(call: Call, table: Tensor, room: Scratch, tuning: Tuning) -> None:
    """Any number of rows, any feature."""
    from lockstep.kernels.triton.attend import attend_kernel

    q, (k, v), at, scoring, splits = call.q, call.keys, call.at, call.scoring, call.order.splits
    mul, shift = divider(at.page_size)
    d_qk, d_v, (da, db) = q.shape[2], call.out.shape[2], pieces(q.shape[2])
    attend_kernel[(len(table) * k.shape[1],)](
        q, k, v, call.out, call.lse, scoring.sinks2, table, at.positions, at.start,
        at.tail_indptr, at.tail_slots, at.page_ids, room.ml, room.acc, room.counters,
        scoring.c, scoring.pre, scoring.v_scale, q.shape[1], k.shape[1], scoring.window,
        int(scoring.causal), at.page_size, mul, shift,
        splits.count0, splits.len0, splits.count1, splits.len1, splits.len2,
        *eighths(q, "q"), *eighths(k, "k"), *eighths(v, "v"),
        D_QK=d_qk, DA=da, DB=db, D_V=d_v, DV=power_of_2(d_v), LATENT=call.latent and d_v == da,
        CAP=scoring.pre != 0.0, TREE=call.tree, PART=tuning.parts, ROWS=tuning.rows,
        TILE=call.order.tile, FOLD_ROWS=tuning.fold_rows, FOLD_DEPTH=tuning.fold_depth,
        num_warps=tuning.warps, num_stages=tuning.stages, enable_fp_fusion=False,
    )  # fmt: skip


def boxes(tensor: Tensor, rows: int, columns: int) -> Any:
    """How the copy engine sees a tensor of rows: boxes of `rows` by `columns`."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(tensor.view(len(tensor), -1), [rows, columns], layout)


def tiles_of(order: AttentionOrder) -> tuple[int, int, int, int, int]:
    """The split rule, lengths in tiles."""
    splits, tile = order.splits, order.tile
    lens = (splits.len0 // tile, splits.len1 // tile, splits.len2 // tile)
    return splits.count0, lens[0], splits.count1, lens[1], lens[2]


def prefill(call: Call, table: Tensor, room: Scratch, tuning: Tuning) -> None:
    """Blocks of 128 tokens of one head: a program per multiprocessor walks them."""
    from lockstep.kernels.triton.hopper_prefill import prefill_kernel

    q, (k, v), at, scoring = call.q.contiguous(), call.keys, call.at, call.scoring
    heads, d = q.shape[1:]
    work = len(table) * heads
    prefill_kernel[(min(multiprocessors(q.device), work),)](
        boxes(q, 64, d), boxes(k, at.page_size, 64), boxes(v, at.page_size, 64), call.out,
        call.lse, scoring.sinks2, table, at.page_ids, scoring.c, scoring.v_scale, heads,
        heads // k.shape[1], work, *tiles_of(call.order), OUTSIDE,
        D=d, TILE=call.order.tile, STAGES=tuning.stages * 128 // d, PAGE=at.page_size,
        num_warps=tuning.warps, enable_fp_fusion=False,
    )  # fmt: skip


def decode(call: Call, table: Tensor, room: Scratch, tuning: Tuning) -> None:
    """Blocks of at most 16 rows, or parts of them."""
    from lockstep.kernels.triton.hopper_decode import decode_kernel

    q, (k, v), at, scoring = call.q, call.keys, call.at, call.scoring
    heads, d = q.shape[1:]
    decode_kernel[(len(table) * k.shape[1],)](
        q, boxes(k, at.page_size, 64), boxes(v, at.page_size, 64), call.out, call.lse,
        scoring.sinks2, table, at.positions, at.page_ids, room.ml, room.acc, room.counters,
        scoring.c, scoring.v_scale, heads, k.shape[1], scoring.window, int(scoring.causal),
        *eighths(q, "q"), *tiles_of(call.order), OUTSIDE,
        D=d, TILE=call.order.tile, STAGES=tuning.stages * 128 // d, PAGE=at.page_size,
        num_warps=tuning.warps, maxnreg=tuning.registers, enable_fp_fusion=False,
    )  # fmt: skip


def latent(call: Call, table: Tensor, room: Scratch, tuning: Tuning) -> None:
    """Blocks of at most 64 rows over a latent cache: a program per multiprocessor walks them."""
    from lockstep.kernels.triton.hopper_latent import latent_kernel

    q, (k, _), at, scoring = call.q, call.keys, call.at, call.scoring
    programs = min(multiprocessors(q.device), len(table))
    state_row = len(room.acc) // call.out.shape[2] - multiprocessors(q.device) * tuning.rows
    latent_kernel[(programs,)](
        q, boxes(k, at.page_size, 64), call.out, call.lse, scoring.sinks2, table, at.positions,
        at.page_ids, room.ml, room.acc, room.counters, scoring.c, scoring.v_scale,
        q.shape[1], 1, scoring.window, int(scoring.causal), len(table), state_row,
        *eighths(q, "q"), *tiles_of(call.order), OUTSIDE, PAGE=at.page_size,
        num_warps=tuning.warps, enable_fp_fusion=False,
    )  # fmt: skip
