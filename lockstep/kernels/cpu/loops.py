"""The inner loops as LLVM IR: copying keys or values from the pool into a tile, scores of a few
rows against a tile, adding a tile's values to a few rows, and a few rows times a panel of weights.

A row of the pool is given by the code of its format (`types.KV_FORMATS`) and an entry in a table of
int64 byte addresses, whatever the page size; widening to float32 is exact. A micro-kernel keeps
`rows` x `vectors` accumulators in registers, each one fma chain: its shape changes no bit. Knows
addresses and strides in bytes. Called by attend.py and gemm.py.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from typing import Any

from llvmlite import ir
from numba.core import cgutils, registry

from lockstep.kernels.cpu import lanes
from lockstep.kernels.cpu.lanes import F32, I8, I16, I32, I64, VECTOR, constant, load_ir, store_ir
from lockstep.order import LANES
from lockstep.types import KV_FORMATS

variable: Any = cgutils.alloca_once_value  # numba gives it no types
VECTOR_BYTES = 4 * LANES
# the target that is compiled for: triple, processor, features
TARGET: tuple[str, ...] = registry.cpu_target.target_context.codegen().magic_tuple()
WIDE = "+avx512f" in TARGET[2]
ROWS = 4  # rows of a full micro-kernel
VECTORS = 4 if WIDE else 1  # its width: 16 of 32 zmm registers, or 8 of 16 ymm registers
Shapes = Iterable[tuple[int, int]]
Vectors = Callable[[Any], list[Any]]  # emits the load of an index's vectors and returns them
PIECE = 4  # elements of a key that are transposed together: one 128-bit lane of floats
STEP = 8  # columns per iteration: head sizes are multiples of 8
FLOAT32 = KV_FORMATS["float32"].code
RAW = {4: F32, 2: I16, 1: I8}  # LLVM type of an element by its bytes: float32, or raw bits
PANEL_ROWS = 6  # of a GEMM's full micro-kernel: 24 of 32 zmm registers, or 12 of 16 ymm registers
PANEL = LANES * VECTORS  # and its columns
FORMATS = {2: "bfloat16", 4: "float32"}  # of a panel, by the bytes of a number
SHAPES = [(rows, width) for rows in range(1, ROWS + 1) for width in (1, 2, 4) if width <= VECTORS]


def row_addresses(builder: Any, base: Any, stride: Any, rows: int) -> list[Any]:
    """Emits the addresses base, base + stride, base + 2*stride, ..."""
    return [builder.add(base, builder.mul(stride, I64(r))) for r in range(rows)]


def switch_ir(builder: Any, key: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """Emits every case, and a run-time jump to the one that `key` names, or past all cases."""
    done = builder.append_basic_block("done")
    choice = builder.switch(key, done)
    for number, emit in cases.items():
        block = builder.append_basic_block("case")
        choice.add_case(I64(number), block)
        builder.position_at_end(block)
        emit()
        builder.branch(done)
    builder.position_at_end(done)


def each_shape(
    builder: Any, rows: Any, width: Any, shapes: Shapes, emit: Callable[[int, int], None]
) -> None:
    """Emits one loop per shape (rows, width) of a micro-kernel, and a run-time jump to one."""
    key = builder.add(builder.mul(rows, I64(16)), width)
    switch_ir(builder, key, {16 * r + w: partial(emit, r, w) for r, w in shapes})


@lanes.ir_function(lanes.integers(9))
def scores(
    builder: Any, rows: Any, vectors: Any, q: Any, q_stride: Any, keys: Any, keys_stride: Any,
    depth: Any, s: Any, s_stride: Any,
) -> None:  # fmt: skip
    """Computes s[r][j] = fma chain over c in [0, depth) of q[r][c] * keys[c][j], from 0."""

    def loop(rows: int, vectors: int) -> None:
        def column(c: Any) -> list[Any]:
            return load_row(builder, builder.add(keys, builder.mul(c, keys_stride)), vectors)

        q_rows = row_addresses(builder, q, q_stride, rows)
        zeros = [constant(VECTOR, 0.0)] * (rows * vectors)
        sums = chains(builder, q_rows, (I64(0), depth), zeros, column)
        store_rows(builder, sums, row_addresses(builder, s, s_stride, rows), vectors)

    each_shape(builder, rows, vectors, SHAPES, loop)


@lanes.ir_function(lanes.integers(11))
def values(
    builder: Any, rows: Any, vectors: Any, p: Any, p_stride: Any, table: Any, first: Any,
    last: Any, acc: Any, acc_stride: Any, column: Any, alpha: Any,
) -> None:  # fmt: skip
    """Computes acc[r][column + j] = acc * alpha[r], then an fma chain over keys [first, last) of
    p[r][key] * v[key][column + j]. Row `key` of v is at table[key]; `column` is in bytes."""

    def loop(rows: int, vectors: int) -> None:
        p_rows = row_addresses(builder, p, p_stride, rows)
        acc_rows = row_addresses(builder, builder.add(acc, column), acc_stride, rows)
        start = []
        for r, row in enumerate(acc_rows):
            scale = lanes.splat_ir(builder, load_ir(builder, alpha, 4 * r, of=F32))
            start += [builder.fmul(x, scale) for x in load_row(builder, row, vectors)]

        def value(key: Any) -> list[Any]:
            entry = builder.add(table, builder.mul(key, I64(8)))
            row = builder.add(load_ir(builder, entry, of=I64, align=8), column)
            return load_row(builder, row, vectors)

        sums = chains(builder, p_rows, (first, last), start, value)
        store_rows(builder, sums, acc_rows, vectors)

    each_shape(builder, rows, vectors, SHAPES, loop)


@lanes.ir_function(lanes.integers(9))
def products(
    builder: Any, rows: Any, item: Any, x: Any, x_stride: Any, panel: Any, depth: Any, y: Any,
    y_stride: Any, columns: Any,
) -> None:  # fmt: skip
    """Computes y[r][j] = fma chain over k in [0, depth) of x[r][k] * panel[k][j], from 0, plus
    panel[depth][j]; stores the first `columns`. `item`: bytes per number of the panel, 4 or 2."""

    def loop(count: int, size: int) -> None:
        number = ir.VectorType(RAW[size], LANES)

        def weights(k: Any) -> list[Any]:
            row = builder.add(panel, builder.mul(k, I64(PANEL * size)))
            places = range(0, PANEL * size, LANES * size)
            raw = [load_ir(builder, row, place, of=number, align=size) for place in places]
            return [widen_ir(builder, each, FORMATS[size]) for each in raw]

        x_rows = row_addresses(builder, x, x_stride, count)
        zeros = [constant(VECTOR, 0.0)] * (count * VECTORS)
        sums = chains(builder, x_rows, (I64(0), depth), zeros, weights)
        for j, bias in enumerate(weights(depth)):
            mask = lanes.below_ir(builder, builder.sub(columns, I64(LANES * j)))
            for r, row in enumerate(row_addresses(builder, y, y_stride, count)):
                total = builder.fadd(sums[r * VECTORS + j], bias)
                place = lanes.at(builder, row, VECTOR_BYTES * j)
                name, args = "llvm.masked.store.v16f32.p0", [total, place, I32(4), mask]
                lanes.call_ir(builder, name, ir.VoidType(), args)

    each_shape(builder, rows, item, product(range(1, PANEL_ROWS + 1), FORMATS), loop)


def chains(
    builder: Any, rows: list[Any], span: tuple[Any, Any], start: list[Any], vectors_at: Vectors
) -> list[Any]:
    """Emits the fma chains over i in span of rows[r][i] * vectors_at(i), each from its `start`."""
    sums = [variable(builder, x) for x in start]  # LLVM promotes them to registers
    with cgutils.for_range_slice(builder, *span, I64(1)) as (i, _):
        vectors, offset = vectors_at(i), builder.mul(i, I64(4))
        for r, row in enumerate(rows):
            factor = lanes.splat_ir(builder, load_ir(builder, builder.add(row, offset), of=F32))
            for x, total in zip(vectors, sums[r * len(vectors) :]):
                before = builder.load(total, typ=VECTOR)
                builder.store(lanes.math_ir(builder, "fma", factor, x, before), total)
    return [builder.load(total, typ=VECTOR) for total in sums]


def load_row(builder: Any, address: Any, vectors: int) -> list[Any]:
    """Emits loads of consecutive vectors from an address."""
    return [load_ir(builder, address, VECTOR_BYTES * j) for j in range(vectors)]


def store_rows(builder: Any, sums: list[Any], rows: list[Any], vectors: int) -> None:
    """Emits stores of each row's accumulators to its address."""
    for r, row in enumerate(rows):
        for j in range(vectors):
            store_ir(builder, row, sums[r * vectors + j], VECTOR_BYTES * j)


# ---- from the pool into a tile ----


def widen_ir(builder: Any, raw: Any, kind: str) -> Any:
    """Converts a vector of raw elements of a format to float32, exactly."""
    if kind == "float32":
        return raw
    count = raw.type.count
    bits, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)
    if kind == "bfloat16":
        return builder.bitcast(builder.shl(builder.zext(raw, bits), constant(bits, 16)), floats)
    if kind == "float16":
        return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), count)), floats)
    # e4m3 has 4 exponent bits with bias 7; as the low exponent bits of a half (bias 15) they make
    # 2^-8 of the value, subnormals included
    half_bits = ir.VectorType(I16, count)
    wide = builder.zext(raw, half_bits)
    size = builder.and_(wide, constant(half_bits, 0x7F))
    sign = builder.shl(builder.and_(wide, constant(half_bits, 0x80)), constant(half_bits, 8))
    half = builder.or_(builder.shl(size, constant(half_bits, 7)), sign)
    value = builder.fmul(widen_ir(builder, half, "float16"), constant(floats, 256.0))
    is_nan = builder.icmp_unsigned("==", size, constant(half_bits, 0x7F))
    return builder.select(is_nan, constant(floats, float("nan")), value)


def transpose_ir(builder: Any, rows: list[Any]) -> list[Any]:
    """Transposes the 4 x 4 floats in each 128-bit lane of four vectors: pieces to columns."""

    def pick(a: Any, b: Any, index: tuple[int, int, int, int]) -> Any:
        """Shuffles each 128-bit lane: indices 0..3 select from a's lane, 4..7 from b's."""
        own = [i if i < PIECE else LANES + i - PIECE for i in index]
        places = [lane + i for lane in range(0, LANES, PIECE) for i in own]
        return lanes.shuffle_ir(builder, a, b, places)

    a, b, c, d = rows
    pairs = [(pick(a, b, index), pick(c, d, index)) for index in ((0, 4, 1, 5), (2, 6, 3, 7))]
    return [pick(x, y, index) for x, y in pairs for index in ((0, 1, 4, 5), (2, 3, 6, 7))]


def concat_ir(builder: Any, parts: list[Any]) -> Any:
    """Concatenates vectors (a power of two of them)."""
    while len(parts) > 1:
        count = parts[0].type.count
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [lanes.shuffle_ir(builder, a, b, range(2 * count)) for a, b in pairs]
    return parts[0]


def each_format(builder: Any, code: Any, emit: Callable[[str, int], None]) -> None:
    """Emits `emit(name, bytes of an element)` for every format; `code` selects at run time."""
    cases = {known.code: partial(emit, kind, known.nbytes) for kind, known in KV_FORMATS.items()}
    switch_ir(builder, code, cases)


@lanes.ir_function(lanes.integers(5))
def transposed(builder: Any, code: Any, table: Any, depth: Any, keys: Any, stride: Any) -> None:
    """Sets keys[c][j] to column c of the row at table[j], for 16 rows and `depth` columns."""
    row = [load_ir(builder, table, 8 * j, of=I64, align=8) for j in range(LANES)]

    def loop(kind: str, item: int) -> None:
        piece = ir.VectorType(RAW[item], PIECE)
        with cgutils.for_range(builder, builder.sdiv(depth, I64(STEP))) as steps:
            offset = builder.mul(steps.index, I64(STEP * item))
            here = [builder.add(each, offset) for each in row]
            for part in range(0, STEP, PIECE):
                raw = [load_ir(builder, x, part * item, of=piece, align=item) for x in here]
                joined = [concat_ir(builder, raw[i::PIECE]) for i in range(PIECE)]
                mixed = [widen_ir(builder, each, kind) for each in joined]
                for i, column in enumerate(transpose_ir(builder, mixed)):
                    index = builder.add(builder.mul(steps.index, I64(STEP)), I64(part + i))
                    store_ir(builder, builder.add(keys, builder.mul(index, stride)), column)

    each_format(builder, code, loop)


@lanes.ir_function(lanes.integers(4))
def widened(builder: Any, code: Any, source: Any, depth: Any, target: Any) -> None:
    """Copies `depth` (a multiple of 8) elements as float32; pads to a multiple of 16 with zeros."""
    whole = builder.sdiv(depth, I64(LANES))

    def load(kind: str, item: int, index: Any, count: int) -> Any:
        address = builder.add(source, builder.mul(index, I64(LANES * item)))
        raw = load_ir(builder, address, of=ir.VectorType(RAW[item], count), align=item)
        return widen_ir(builder, raw, kind)

    def save(floats: Any, index: Any) -> None:
        store_ir(builder, builder.add(target, builder.mul(index, I64(VECTOR_BYTES))), floats)

    def loop(kind: str, item: int) -> None:
        with cgutils.for_range(builder, whole) as each:
            save(load(kind, item, each.index, LANES), each.index)
        with builder.if_then(builder.icmp_signed("<", builder.mul(whole, I64(LANES)), depth)):
            half = load(kind, item, whole, STEP)
            save(concat_ir(builder, [half, constant(half.type, 0.0)]), whole)

    each_format(builder, code, loop)
