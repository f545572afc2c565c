"""The GEMM of `gemm.py` for sm_90, warp-specialised, in Gluon: same order, same bits; the plain
kernel is its twin.

A program walks tiles of the output, as many programs as multiprocessors. One producer warp fetches
both operands by TMA into a ring; two consumer warpgroups take half the tile's rows each, and leave
through TMA stores that run under the next tile. Rows past the last are zeros on the way in and
clipped on the way out. Called by `gemm.py` only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lockstep.kernels.triton.gemm import Tile
from lockstep.types import RuleError


@gluon.jit
def place(index, row_tiles, column_tiles, GROUP: gl.constexpr):
    """`gemm.tile_at`."""
    per_group = GROUP * column_tiles
    first = (index // per_group) * GROUP
    size = gl.minimum(row_tiles - first, GROUP)
    within = index % per_group
    return first + within % size, within // size


@gluon.jit
def produce(x_desc, w_desc, x_ring, w_ring, full, empty, row_tiles, column_tiles, K: gl.constexpr, ROWS: gl.constexpr,
            COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Both operands of every step of every tile, as far ahead as there is room."""
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place(index, row_tiles, column_tiles, GROUP)
        for k in range(0, K, DEPTH):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (ROWS + COLUMNS) * DEPTH * 2)
            tma.async_copy_global_to_shared(
                w_desc, [column_tile * COLUMNS, k], full.index(stage), w_ring.index(stage)
            )
            for half in gl.static_range(2):
                at = row_tile * ROWS + half * (ROWS // 2)
                tma.async_copy_global_to_shared(
                    x_desc, [at, k], full.index(stage), x_ring.index(stage * 2 + half)
                )
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def consume(y_desc, x_ring, w_ring, room, full, empty, row_tiles, column_tiles, HALF: gl.constexpr, K: gl.constexpr,
            ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Rows of half HALF of every tile: products of a step run while the step before is given
    back."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    stage = 0
    phase = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = place(index, row_tiles, column_tiles, GROUP)
        total = gl.zeros([ROWS // 2, COLUMNS], gl.float32, layout=LAYOUT)
        before = stage
        for k in range(0, K, DEPTH):
            mbarrier.wait(full.index(stage), phase)
            weights = w_ring.index(stage).permute([1, 0])
            token = warpgroup_mma(x_ring.index(stage * 2 + HALF), weights, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[token])
            mbarrier.arrive(empty.index(before), pred=k > 0)
            before = stage
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index(before))
        tma.store_wait(0)
        room.store(total.to(room.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(
            y_desc, [row_tile * ROWS + HALF * (ROWS // 2), column_tile * COLUMNS], room
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["row_tiles"])
def gemm_hopper_kernel(x_desc, w_desc, y_desc, row_tiles, N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr,
                       COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Shared memory, barriers, and who does what."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    HALF: gl.constexpr = ROWS // 2
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, HALF, DEPTH], WIDE)
    w_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, COLUMNS, DEPTH], WIDE)
    room = gl.allocate_shared_memory(x_desc.dtype, [2, HALF, COLUMNS], WIDE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    column_tiles = (N + COLUMNS - 1) // COLUMNS
    gl.warp_specialize([
        (consume, (y_desc, x_ring, w_ring, room.index(0), full, empty, row_tiles, column_tiles, 0, K, ROWS, COLUMNS, DEPTH, STAGES, GROUP)),
        (consume, (y_desc, x_ring, w_ring, room.index(1), full, empty, row_tiles, column_tiles, 1, K, ROWS, COLUMNS, DEPTH, STAGES, GROUP)),
        (produce, (x_desc, w_desc, x_ring, w_ring, full, empty, row_tiles, column_tiles, K, ROWS, COLUMNS, DEPTH, STAGES, GROUP)),
    ], [4, 1], [232, 24])  # fmt: skip


def serves(n: int, k: int, tile: Tile) -> bool:
    """Whether the kernel can do a weight: the copy engine wants rows of whole 16-byte pieces, a
    step a multiple of 64."""
    return k % 8 == 0 and n % 8 == 0 and tile.depth % 64 == 0 and tile.rows == 128


def arguments(
    x: Tensor, w: Tensor, y: Tensor, tile: Tile
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """What the kernel takes, by position and by name."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    (rows, k), n = x.shape, w.shape[0]
    if not serves(n, k, tile):
        raise RuleError(
            "N and K are multiples of 8, tiles 128 rows, steps multiples of 64",
            f"{n}, {k}, {tile}",
            "Take a plain tile",
        )
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    half = tile.rows // 2
    positional = (
        TensorDescriptor.from_tensor(x, [half, tile.depth], layout),
        TensorDescriptor.from_tensor(w, [tile.columns, tile.depth], layout),
        TensorDescriptor.from_tensor(y, [half, tile.columns], layout),
        triton.cdiv(rows, tile.rows),
    )
    named = {
        "N": n,
        "K": k,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "STAGES": tile.stages,
        "GROUP": tile.group,
    }
    return positional, named | {"num_warps": 4, "enable_fp_fusion": False}


def launch(x: Tensor, w: Tensor, y: Tensor, tile: Tile) -> Tensor:
    """One launch; shapes were checked by `gemm.gemm`."""
    positional, named = arguments(x, w, y, tile)
    work = positional[3] * triton.cdiv(w.shape[0], tile.columns)
    programs = min(work, torch.cuda.get_device_properties(x.device).multi_processor_count)
    gemm_hopper_kernel[(programs,)](*positional, **named)
    return y
