"""A worker: one thread's memory, and the loop that takes units of work until none is left.

Plain texts, like unit.py's. A call's arguments arrive as one int64 record (see `unpack`), so that the heavy code is compiled as one C
function, apart from the small parallel loop that starts it on every thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from lockstep.kernels.cpu.lanes import address, float32_at, int32_at, int64_at, take
from lockstep.kernels.cpu.unit import Job, Scratch, Sizes, Unit, run_unit
from lockstep.order import LANES

ALIGN = 64
ARRAYS = 16  # of a call: two entries each, the byte address and the number of elements
SIZES = 2 * ARRAYS  # where the integers of a call begin in the record
COUNTER = SIZES + len(Sizes._fields)  # units taken so far
RECORD = COUNTER + 1


def padded(n: Any, unit: Any) -> Any:
    """n rounded up to a multiple of `unit`."""
    return (n + unit - 1) // unit * unit


def scratch_areas(sizes: Any, rows: Any) -> Any:
    """Floats of each area of Scratch, in order: q, keys, v, p, acc, total, zeros, and each of the five per-row arrays."""
    d_qk, d_v = padded(sizes.d_qk, LANES), padded(sizes.d_v, LANES)
    tile = sizes.tile
    return rows * d_qk, sizes.d_qk * tile, tile * d_v, rows * tile, rows * d_v, rows * d_v, d_qk, padded(rows, LANES)


def scratch_size(sizes: Any, rows: Any) -> Any:
    """Floats of a worker's memory."""
    q, keys, v, p, acc, total, zeros, per_row = scratch_areas(sizes, rows)
    return q + keys + v + p + acc + total + zeros + 5 * per_row + ALIGN // 4


def carve(sizes: Any, memory: Any, whole: Any, rows: Any) -> Any:
    """Lay a worker's Scratch into its two arrays, float32 and int64."""
    n_q, n_keys, n_v, n_p, n_acc, n_total, n_zeros, per_row = scratch_areas(sizes, rows)
    first = (ALIGN - address(memory) % ALIGN) % ALIGN // 4
    q = address(memory) + 4 * first
    keys = q + 4 * n_q
    v = keys + 4 * n_keys
    p = v + 4 * n_v
    acc = p + 4 * n_p
    total = acc + 4 * n_acc
    zeros = total + 4 * n_total
    end = first + n_q + n_keys + n_v + n_p + n_acc + n_total + n_zeros
    memory[end - n_zeros : end] = 0
    state = memory[end : end + 5 * per_row].reshape((5, per_row))
    tile, spans = sizes.tile, whole[2 * sizes.tile :]
    q_stride, v_stride = 4 * padded(sizes.d_qk, LANES), 4 * padded(sizes.d_v, LANES)
    return Scratch(
        q, keys, v, p, acc, total, zeros, q_stride, v_stride, 4 * tile,
        state[0], state[1], state[2], state[3], state[4],
        spans[:rows], spans[rows:], whole[:tile], whole[tile : 2 * tile],
    )  # fmt: skip


def most_tokens(blocks: Any) -> Any:
    """Tokens of the largest block."""
    most = np.int64(0)
    for block in range(blocks.shape[0]):
        most = max(most, np.int64(blocks[block, 2]) - np.int64(blocks[block, 1]))
    return most


def ints(record: Any, i: Any) -> Any:
    """Array i of the record, int32."""
    return carray(int32_at(record[2 * i]), (record[2 * i + 1],))


def floats(record: Any, i: Any) -> Any:
    """Array i of the record, float32."""
    return carray(float32_at(record[2 * i]), (record[2 * i + 1],))


def unpack(record: Any) -> Any:
    """The Job in a record. The arrays, in order: q, k, v, out, lse2, Table, Rows, blocks, sink2, consts (as in attend.py)."""
    r = record[SIZES:]
    sizes = Sizes(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7], r[8], r[9], r[10], r[11], r[12], r[13])
    blocks, consts = ints(record, 13), floats(record, 15)
    return Job(
        record[0], record[2], record[4], record[6], floats(record, 4),
        ints(record, 5), ints(record, 6), ints(record, 7), ints(record, 8), ints(record, 9), ints(record, 10),
        ints(record, 11), ints(record, 12), blocks.reshape((blocks.size // 3, 3)), floats(record, 14), sizes,
        consts[0], consts[1], consts[2],
    )  # fmt: skip


def work(at: Any) -> None:
    """Take units of the record at address `at` until none is left, last blocks first: under causality they see the most keys."""
    record = carray(int64_at(at), (RECORD,))
    job = unpack(record)
    sizes = job.sizes
    rows = most_tokens(job.blocks) * sizes.group
    memory = np.empty(scratch_size(sizes, rows), np.float32)
    whole = np.empty(2 * sizes.tile + 2 * rows, np.int64)
    scratch = carve(sizes, memory, whole, rows)
    n_blocks = job.blocks.shape[0]
    taken = take(at + 8 * COUNTER)
    while taken < n_blocks * sizes.kv_heads:
        block = n_blocks - 1 - taken // sizes.kv_heads
        request, begin, end = job.blocks[block, 0], job.blocks[block, 1], job.blocks[block, 2]
        run_unit(job, scratch, Unit(np.int64(request), np.int64(begin), np.int64(end), taken % sizes.kv_heads))
        taken = take(at + 8 * COUNTER)
    memory[0] = 0  # the last use: scratch holds addresses of it, not references
