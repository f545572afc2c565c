"""A worker: one thread's memory, and the loop that takes units of work until none is left.

Plain texts, like unit.py's. A call's arguments arrive as one int64 record (see `unpack`), so that
the heavy code is compiled as one C function, which every thread runs (threads.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.kernels.cpu.lanes import address, float32_at, int32_at, int64_at
from lockstep.kernels.cpu.threads import ENTRIES, claim
from lockstep.kernels.cpu.unit import KernelArgs, Scratch, Sizes, Unit, run_unit
from lockstep.order import LANES

# Of a call's entries: addresses of arrays up to the blocks, how many blocks there are, two more
# arrays, the integers of Sizes, the workers' memory, bytes of each and tokens of the largest block.
BLOCKS = 14
SIZES = BLOCKS + 3
MEMORY = SIZES + len(Sizes._fields)


def padded(n: Any, unit: Any) -> Any:
    """n rounded up to a multiple of `unit`."""
    return (n + unit - 1) // unit * unit


def areas(sizes: Any, rows: Any) -> Any:
    """Floats of each area of Scratch, in order: q, keys, v, p, acc, total, zeros, and each of the
    five per-row arrays."""
    d_qk, d_v = padded(sizes.d_qk, LANES), padded(sizes.d_v, LANES)
    tile = sizes.tile
    return (
        rows * d_qk,
        sizes.d_qk * tile,
        tile * d_v,
        rows * tile,
        rows * d_v,
        rows * d_v,
        d_qk,
        padded(rows, LANES),
    )


def memory_bytes(sizes: Any, rows: Any) -> Any:
    """A worker's memory, a multiple of 64."""
    q, keys, v, p, acc, total, zeros, per_row = areas(sizes, rows)
    floats = q + keys + v + p + acc + total + zeros + 5 * per_row
    return padded(4 * floats + 8 * (2 * sizes.tile + 2 * rows), 64)


def carve(sizes: Any, q: Any, rows: Any) -> Any:
    """Lay a worker's Scratch into its memory, which begins at address q."""
    n_q, n_keys, n_v, n_p, n_acc, n_total, n_zeros, n_row = areas(sizes, rows)
    keys = q + 4 * n_q
    v = keys + 4 * n_keys
    p = v + 4 * n_v
    acc = p + 4 * n_p
    total = acc + 4 * n_acc
    zeros = total + 4 * n_total
    state = zeros + 4 * n_zeros
    tables = state + 20 * n_row
    for i in range(n_zeros):
        float32_at(zeros)[i] = 0
    tile = sizes.tile
    spans = tables + 16 * tile
    q_stride, v_stride = 4 * padded(sizes.d_qk, LANES), 4 * padded(sizes.d_v, LANES)
    return Scratch(
        q, keys, v, p, acc, total, zeros, q_stride, v_stride, 4 * tile,
        float32_at(state), float32_at(state + 4 * n_row),
        float32_at(state + 8 * n_row), float32_at(state + 12 * n_row),
        float32_at(state + 16 * n_row),
        int64_at(spans), int64_at(spans + 8 * rows),
        int64_at(tables), int64_at(tables + 8 * tile),
    )  # fmt: skip


def unpack(record: Any) -> Any:
    """The KernelArgs in a call's entries. The arrays, in order: q, k, v, out, lse2, Table, Rows,
    blocks; sink2, consts (as in attend.py)."""
    z = SIZES
    sizes = Sizes(
        record[z], record[z + 1], record[z + 2], record[z + 3], record[z + 4], record[z + 5],
        record[z + 6], record[z + 7], record[z + 8], record[z + 9], record[z + 10], record[z + 11],
        record[z + 12],
    )  # fmt: skip
    consts = float32_at(record[16])
    return KernelArgs(
        record[0], record[1], record[2], record[3], float32_at(record[4]), int32_at(record[5]),
        int32_at(record[6]), int32_at(record[7]), int32_at(record[8]), int32_at(record[9]),
        int32_at(record[10]), int32_at(record[11]), int32_at(record[12]), int32_at(record[13]),
        float32_at(record[15]), sizes, consts[0], consts[1], consts[2],
    )  # fmt: skip


def work(at: Any, worker: Any) -> None:
    """Do units of the record at address `at` until none is left, last blocks first: under causality
    they see the most keys. A worker's share is of one kv head, where the threads divide so."""
    record = int64_at(at + ENTRIES)
    job = unpack(record)
    sizes, blocks = job.sizes, record[BLOCKS]
    mine = record[MEMORY] + worker * record[MEMORY + 1]
    scratch = carve(sizes, mine, record[MEMORY + 2] * sizes.group)
    unit = claim(at, worker)
    while unit >= 0:
        block = int32_at(address(job.blocks) + 12 * (blocks - 1 - unit // sizes.kv_heads))
        request, begin, end = np.int64(block[0]), np.int64(block[1]), np.int64(block[2])
        run_unit(job, scratch, Unit(request, begin, end, unit % sizes.kv_heads))
        unit = claim(at, worker)
