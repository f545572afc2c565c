"""The two inner loops as LLVM IR: scores of a few rows against a tile, and values of a tile into a
few rows.

A micro-kernel holds `rows` x `vectors` accumulators in registers. Its shape is free: every
accumulator is one fma chain, over the head size for a score and over the keys for an output column,
so no shape changes a bit. Shapes are chosen for the register file at hand.

Knows addresses and strides in bytes, no masks, no pages, no softmax. Called by unit.py; gemm.py and
stage.py use its helpers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from numba.core import registry

from lockstep.kernels.cpu.lanes import (
    F32,
    I64,
    VECTOR,
    constant,
    fma_ir,
    integers,
    ir_function,
    load_ir,
    splat_ir,
    store_ir,
)
from lockstep.order import LANES

VECTOR_BYTES = 4 * LANES
# triple, processor, features: as compiled for
TARGET: tuple[str, ...] = registry.cpu_target.target_context.codegen().magic_tuple()
WIDE = "+avx512f" in TARGET[2]
ROWS = 4  # rows of a full micro-kernel
VECTORS = 4 if WIDE else 1  # its width: 16 of 32 zmm registers, or 8 of 16 ymm registers
Shapes = Sequence[tuple[int, int]]
SHAPES = [(rows, width) for rows in range(1, ROWS + 1) for width in (1, 2, 4) if width <= VECTORS]


def counted(
    builder: Any,
    first: Any,
    last: Any,
    carried: list[Any],
    body: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """`for i in [first, last)`: body(i, carried) gives the next carried values; their values after
    the loop come back."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(first, before)
    values = [builder.phi(x.type) for x in carried]
    for phi, x in zip(values, carried, strict=True):
        phi.add_incoming(x, before)
    builder.cbranch(builder.icmp_signed("<", index, last), inside, after)
    builder.position_at_end(inside)
    following = body(index, values)
    index.add_incoming(builder.add(index, I64(1)), builder.block)
    for phi, x in zip(values, following, strict=True):
        phi.add_incoming(x, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def row_addresses(builder: Any, base: Any, stride: Any, rows: int) -> list[Any]:
    """base, base + stride, base + 2*stride, ..."""
    return [builder.add(base, builder.mul(stride, I64(r))) for r in range(rows)]


def switched(builder: Any, key: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """Emits every case, and a jump to the one that `key` names at run time."""
    done = builder.append_basic_block("done")
    choice = builder.switch(key, done)
    for number, emit in cases.items():
        block = builder.append_basic_block("case")
        choice.add_case(I64(number), block)
        builder.position_at_end(block)
        emit()
        builder.branch(done)
    builder.position_at_end(done)


def shaped(
    builder: Any, rows: Any, width: Any, shapes: Shapes, emit: Callable[[int, int], None]
) -> None:
    """One loop per shape of a micro-kernel, (rows, width)."""
    key = builder.add(builder.mul(rows, I64(16)), width)
    switched(builder, key, {16 * r + w: partial(emit, r, w) for r, w in shapes})


@ir_function(integers(9))
def scores(
    builder: Any, rows: Any, vectors: Any, q: Any, q_stride: Any, keys: Any, keys_stride: Any,
    depth: Any, s: Any, s_stride: Any,
) -> None:  # fmt: skip
    """s[r][j] = fma chain over c in [0, depth) of q[r][c] * keys[c][j], from 0, for `rows` rows and
    `vectors` x 16 keys."""

    def loop(rows: int, vectors: int) -> None:
        q_rows = row_addresses(builder, q, q_stride, rows)

        def body(c: Any, sums: list[Any]) -> list[Any]:
            here = builder.add(keys, builder.mul(c, keys_stride))
            return multiply(builder, q_rows, c, load_row(builder, here, vectors), sums)

        zeros = [constant(VECTOR, 0.0)] * (rows * vectors)
        sums = counted(builder, I64(0), depth, zeros, body)
        store_rows(builder, sums, row_addresses(builder, s, s_stride, rows), vectors)

    shaped(builder, rows, vectors, SHAPES, loop)


@ir_function(integers(11))
def values(
    builder: Any, rows: Any, vectors: Any, p: Any, p_stride: Any, table: Any, first: Any,
    last: Any, acc: Any, acc_stride: Any, column: Any, alpha: Any,
) -> None:  # fmt: skip
    """acc[r][column + j] = acc * alpha[r], then an fma chain over the keys [first, last) of
    p[r][key] * v[key][column + j].

    Row `key` of v lies at table[key] (int64 byte addresses); `column` is in bytes; alpha holds one
    float32 per row.
    """

    def loop(rows: int, vectors: int) -> None:
        p_rows = row_addresses(builder, p, p_stride, rows)
        acc_rows = row_addresses(builder, builder.add(acc, column), acc_stride, rows)
        start = []
        for r, row in enumerate(acc_rows):
            scale = splat_ir(builder, load_ir(builder, alpha, 4 * r, of=F32))
            start += [builder.fmul(x, scale) for x in load_row(builder, row, vectors)]

        def body(key: Any, sums: list[Any]) -> list[Any]:
            entry = builder.add(table, builder.mul(key, I64(8)))
            row = builder.add(load_ir(builder, entry, of=I64, align=8), column)
            return multiply(builder, p_rows, key, load_row(builder, row, vectors), sums)

        store_rows(builder, counted(builder, first, last, start, body), acc_rows, vectors)

    shaped(builder, rows, vectors, SHAPES, loop)


def multiply(
    builder: Any, rows: list[Any], index: Any, vectors: list[Any], sums: list[Any]
) -> list[Any]:
    """One link of every chain: the float with this index of each row, an address, times the
    vectors."""
    offset, following = builder.mul(index, I64(4)), []
    for r, row in enumerate(rows):
        factor = splat_ir(builder, load_ir(builder, builder.add(row, offset), of=F32))
        own = sums[r * len(vectors) :]
        following += [fma_ir(builder, factor, x, own[j]) for j, x in enumerate(vectors)]
    return following


def load_row(builder: Any, address: Any, vectors: int) -> list[Any]:
    """So many vectors from an address."""
    return [load_ir(builder, address, VECTOR_BYTES * j) for j in range(vectors)]


def store_rows(builder: Any, sums: list[Any], rows: list[Any], vectors: int) -> None:
    """Write the accumulators of each row to its address."""
    for r, row in enumerate(rows):
        for j in range(vectors):
            store_ir(builder, sums[r * vectors + j], row, VECTOR_BYTES * j)
