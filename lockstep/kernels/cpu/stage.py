"""From the pool into a tile: exact widening to float32, and the transposition of keys by shuffles.

A row of the pool is in one of `types.KV_FORMATS`, known by its code. Every cast is exact. The loops
are LLVM IR and take the rows as a table of int64 byte addresses, so pages of any size look the same
to them.

Knows element formats, no positions and no visibility. Called by unit.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from lockstep.kernels.cpu.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    constant,
    integers,
    ir_function,
    load_ir,
    shuffle_ir,
    store_ir,
)
from lockstep.kernels.cpu.loops import VECTOR_BYTES, counted, switched
from lockstep.order import LANES
from lockstep.types import KV_FORMATS

# elements of one key that travel together through the transposition: one 128-bit lane of floats
PIECE = 4
STEP = 8  # columns per iteration: head sizes are multiples of 8
FLOAT32 = KV_FORMATS["float32"].code


def raw_type(item: int) -> Any:
    """The LLVM element type as it is loaded: float, or the bits of a narrow format."""
    return {4: F32, 2: I16, 1: I8}[item]


def widen_ir(builder: Any, raw: Any, kind: str) -> Any:
    """A vector of raw elements to float32, exactly."""
    if kind == "float32":
        return raw
    count = raw.type.count
    bits, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)
    if kind == "bfloat16":
        return builder.bitcast(builder.shl(builder.zext(raw, bits), constant(bits, 16)), floats)
    if kind == "float16":
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), count)), floats)
    # e4m3 has 4 exponent bits with bias 7; as the low exponent bits of a half (bias 15) the value
    # is 2^-8 of it, subnormals included
    half_bits = ir.VectorType(I16, count)
    wide = builder.zext(raw, half_bits)
    size = builder.and_(wide, constant(half_bits, 0x7F))
    sign = builder.shl(builder.and_(wide, constant(half_bits, 0x80)), constant(half_bits, 8))
    half = builder.or_(builder.shl(size, constant(half_bits, 7)), sign)
    value = builder.fmul(widen_ir(builder, half, "float16"), constant(floats, 256.0))
    is_nan = builder.icmp_unsigned("==", size, constant(half_bits, 0x7F))
    return builder.select(is_nan, constant(floats, float("nan")), value)


def transpose_ir(builder: Any, rows: list[Any]) -> list[Any]:
    """Four vectors of 4-element pieces to four vectors of columns: a 4 x 4 transposition inside
    every 128-bit lane."""
    lanes = range(0, LANES, PIECE)

    def pick(a: Any, b: Any, index: tuple[int, int, int, int]) -> Any:
        """Elements 0..3 of the index name a's lane, 4..7 b's."""
        own = [i if i < PIECE else LANES + i - PIECE for i in index]
        return shuffle_ir(builder, a, b, [lane + i for lane in lanes for i in own])

    pairs = [
        [pick(rows[0], rows[1], index), pick(rows[2], rows[3], index)]
        for index in ((0, 4, 1, 5), (2, 6, 3, 7))
    ]
    return [pick(a, b, index) for a, b in pairs for index in ((0, 1, 4, 5), (2, 3, 6, 7))]


def concat_ir(builder: Any, parts: list[Any]) -> Any:
    """Vectors laid end to end (a power of two of them)."""
    while len(parts) > 1:
        count = parts[0].type.count
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [shuffle_ir(builder, a, b, range(2 * count)) for a, b in pairs]
    return parts[0]


def each_format(builder: Any, code: Any, emit: Callable[[str, int], None]) -> None:
    """What `emit(name, bytes of an element)` writes, for whichever format has the code."""
    cases = {known.code: partial(emit, kind, known.nbytes) for kind, known in KV_FORMATS.items()}
    switched(builder, code, cases)


@ir_function(integers(5))
def transposed(builder: Any, code: Any, table: Any, depth: Any, keys: Any, stride: Any) -> None:
    """keys[c][j] = column c of the row at table[j], for 16 rows and `depth` columns; `stride` is in
    bytes."""
    row = [load_ir(builder, table, 8 * j, of=I64, align=8) for j in range(LANES)]

    def loop(kind: str, item: int) -> None:
        piece = ir.VectorType(raw_type(item), PIECE)

        def body(step: Any, carried: list[Any]) -> list[Any]:
            offset = builder.mul(step, I64(STEP * item))
            here = [builder.add(each, offset) for each in row]
            for part in range(0, STEP, PIECE):
                raw = [load_ir(builder, x, part * item, of=piece, align=item) for x in here]
                joined = [concat_ir(builder, raw[i::PIECE]) for i in range(PIECE)]
                mixed = [widen_ir(builder, each, kind) for each in joined]
                for i, column in enumerate(transpose_ir(builder, mixed)):
                    index = builder.add(builder.mul(step, I64(STEP)), I64(part + i))
                    store_ir(builder, column, builder.add(keys, builder.mul(index, stride)))
            return []

        counted(builder, I64(0), builder.sdiv(depth, I64(STEP)), [], body)

    each_format(builder, code, loop)


@ir_function(integers(4))
def widened(builder: Any, code: Any, source: Any, depth: Any, target: Any) -> None:
    """`depth` elements to float32; where it is 8 past a multiple of 16 the last 8 floats become
    0."""
    whole = builder.sdiv(depth, I64(LANES))

    def load(kind: str, item: int, index: Any, count: int) -> Any:
        address = builder.add(source, builder.mul(index, I64(LANES * item)))
        raw = load_ir(builder, address, of=ir.VectorType(raw_type(item), count), align=item)
        return widen_ir(builder, raw, kind)

    def save(floats: Any, index: Any) -> None:
        offset = builder.mul(index, I64(VECTOR_BYTES))
        store_ir(builder, floats, builder.add(target, offset))

    def loop(kind: str, item: int) -> None:
        def body(i: Any, carried: list[Any]) -> list[Any]:
            save(load(kind, item, i, LANES), i)
            return []

        counted(builder, I64(0), whole, [], body)
        with builder.if_then(builder.icmp_signed("<", builder.mul(whole, I64(LANES)), depth)):
            half = load(kind, item, whole, STEP)
            zeros = constant(ir.VectorType(F32, STEP), 0.0)
            save(concat_ir(builder, [half, zeros]), whole)

    each_format(builder, code, loop)
