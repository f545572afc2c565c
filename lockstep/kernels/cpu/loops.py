"""The two inner loops as LLVM IR: scores of a few rows against a tile, and values of a tile into a
few rows.

A micro-kernel holds `rows` x `vectors` accumulators in registers. Its shape is free: every
accumulator is one fma chain, over the head size for a score and over the keys for an output column,
so no shape changes a bit. Shapes are chosen for the register file at hand.

Knows addresses and strides in bytes, no masks, no pages, no softmax. Called by unit.py; gemm.py and
stage.py use its helpers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import registry
from numba.extending import intrinsic

from lockstep.kernels.cpu.lanes import (
    F32,
    I64,
    constant,
    fma_ir,
    load_ir,
    splat_ir,
    store_ir,
    types,
)
from lockstep.order import LANES

VECTOR_BYTES = 4 * LANES
TARGET: tuple[str, ...] = (
    registry.cpu_target.target_context.codegen().magic_tuple()
)  # triple, processor, features: as compiled for
WIDE = "+avx512f" in TARGET[2]
ROWS = 4  # rows of a full micro-kernel
VECTORS = 4 if WIDE else 1  # its width: 16 of 32 zmm registers, or 8 of 16 ymm registers
SHAPES = [
    (rows, vectors) for rows in range(1, ROWS + 1) for vectors in (1, 2, 4) if vectors <= VECTORS
]


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


def shaped(builder: Any, rows: Any, vectors: Any, emit: Callable[[int, int], None]) -> None:
    """Emit one loop per micro-kernel shape and jump to the one asked for at run time."""
    done = builder.append_basic_block("shaped")
    choice = builder.switch(builder.add(builder.mul(rows, I64(16)), vectors), done)
    for shape in SHAPES:
        block = builder.append_basic_block("shape")
        choice.add_case(I64(shape[0] * 16 + shape[1]), block)
        builder.position_at_end(block)
        emit(*shape)
        builder.branch(done)
    builder.position_at_end(done)


def _scores(
    typingctx: Any,
    rows: Any,
    vectors: Any,
    q: Any,
    q_stride: Any,
    keys: Any,
    keys_stride: Any,
    d: Any,
    s: Any,
    s_stride: Any,
) -> Any:
    """s[r][j] = fma chain over c in [0, d) of q[r][c] * keys[c][j], from 0, for `rows` rows and
    `vectors` x 16 keys."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        q, q_stride, keys, keys_stride, depth, s, s_stride = args[2:]

        def loop(rows: int, vectors: int) -> None:
            q_rows = row_addresses(builder, q, q_stride, rows)

            def body(d: Any, sums: list[Any]) -> list[Any]:
                here, offset = (
                    builder.add(keys, builder.mul(d, keys_stride)),
                    builder.mul(d, I64(4)),
                )
                return multiply(
                    builder, [builder.add(row, offset) for row in q_rows], here, sums, vectors
                )

            zero = constant(ir.VectorType(F32, LANES), 0.0)
            sums = counted(builder, I64(0), depth, [zero] * (rows * vectors), body)
            store_rows(builder, sums, row_addresses(builder, s, s_stride, rows), vectors)

        shaped(builder, args[0], args[1], loop)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), emit


def _values(
    typingctx: Any, rows: Any, vectors: Any, p: Any, p_stride: Any, table: Any, first: Any,
    last: Any, acc: Any, acc_stride: Any, column: Any, alpha: Any,
) -> Any:  # fmt: skip
    """acc[r][column + j] = acc * alpha[r], then an fma chain over the keys [first, last) of
    p[r][key] * v[key][column + j].

    Row `key` of v lies at table[key] (int64 byte addresses); `column` is in bytes; alpha holds one
    float32 per row.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        p, p_stride, table, first, last, acc, acc_stride, column, alpha = args[2:]

        def loop(rows: int, vectors: int) -> None:
            p_rows = row_addresses(builder, p, p_stride, rows)
            acc_rows = row_addresses(builder, builder.add(acc, column), acc_stride, rows)
            start = []
            for r in range(rows):
                scale = splat_ir(builder, load_ir(builder, alpha, 4 * r, of=F32))
                start += [
                    builder.fmul(load_ir(builder, acc_rows[r], VECTOR_BYTES * j), scale)
                    for j in range(vectors)
                ]

            def body(key: Any, sums: list[Any]) -> list[Any]:
                row = load_ir(
                    builder, builder.add(table, builder.mul(key, I64(8))), of=I64, align=8
                )
                offset = builder.mul(key, I64(4))
                return multiply(
                    builder,
                    [builder.add(x, offset) for x in p_rows],
                    builder.add(row, column),
                    sums,
                    vectors,
                )

            store_rows(builder, counted(builder, first, last, start, body), acc_rows, vectors)

        shaped(builder, args[0], args[1], loop)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), emit


def multiply(
    builder: Any, factors: list[Any], vector: Any, sums: list[Any], vectors: int
) -> list[Any]:
    """One link of every chain: the float at each of the addresses `factors` times the vectors at
    address `vector`."""
    loaded = [load_ir(builder, vector, VECTOR_BYTES * j) for j in range(vectors)]
    following = []
    for r, factor in enumerate(factors):
        one = splat_ir(builder, load_ir(builder, factor, of=F32))
        following += [
            fma_ir(builder, one, loaded[j], sums[r * vectors + j]) for j in range(vectors)
        ]
    return following


def store_rows(builder: Any, sums: list[Any], rows: list[Any], vectors: int) -> None:
    """Write the accumulators of each row to its address."""
    for r, row in enumerate(rows):
        for j in range(vectors):
            store_ir(builder, sums[r * vectors + j], row, VECTOR_BYTES * j)


scores: Any = intrinsic(_scores)
values: Any = intrinsic(_values)
