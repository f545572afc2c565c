"""y = x Wᵀ + b in float32: every element of y is one fma chain over K, ascending, and then its
bias.

So a row of y depends on its own row of x and on nothing else, by construction: not on the number of
rows, their places, the threads or the processor. Weights are packed once into panels, [K + 1,
PANEL] each, whose last row is the bias; a micro-kernel holds the chains of a few rows and one panel
in registers. Shapes change speed, never bits. Weights that are bfloat16 numbers, as those of most
checkpoints are, stay bfloat16 in memory: they are widened as they are loaded, which is exact, and
half as many bytes have to come.

One kernel serves `linear`, one weight for all rows; `batched_linear`, a weight per head; and
`grouped_linear`, a weight per expert, whose rows lie together. Called through the table, ops.py.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba.extending import intrinsic
from torch import Tensor

from lockstep.kernels.cpu import threads
from lockstep.kernels.cpu.lanes import (
    F32,
    I32,
    I64,
    at,
    call_ir,
    constant,
    fma_ir,
    int64_at,
    load_ir,
    splat_ir,
    types,
)
from lockstep.kernels.cpu.loops import VECTOR_BYTES, VECTORS, counted, row_addresses
from lockstep.kernels.cpu.threads import ENTRIES, TEAM, UNITS, claim, empty
from lockstep.order import LANES

ROWS = 6  # of a full micro-kernel: 24 of 32 zmm registers, or 12 of 16 ymm registers
PANEL = LANES * VECTORS
UNIT_ROWS = 96  # rows of x that one unit of work multiplies with one panel, at most
UNITS_PER_THREAD = 4  # so that threads end at about the same time
WEIGHTS_PER_NS = 4  # of one thread, as they come from memory


class Panels(NamedTuple):
    """Packed weights: [groups, panels, k + 1, PANEL], of which n columns are real."""

    numbers: Tensor
    n: int


def pack(weight: Tensor, bias: Tensor | None) -> Panels:
    """weight [n, k], bias [n], or [g, n, k] and [g, n]; bfloat16 if that loses nothing, else
    float32."""
    n, k = weight.shape[-2:]
    biases = [None] * weight.numel() if bias is None else bias.view(-1, n)
    groups = [_panels(w, b) for w, b in zip(weight.reshape(-1, n, k), biases)]
    if any(group.dtype is torch.float32 for group in groups):
        groups = [group.float() for group in groups]
    return Panels(torch.stack(groups) if len(groups) > 1 else groups[0][None], n)


def _panels(weight: Tensor, bias: Tensor | None) -> Tensor:
    """[panels, k + 1, PANEL], zeros beyond n."""
    n, k = weight.shape
    panels = -(-n // PANEL)
    padded = torch.zeros(panels * PANEL, k + 1)
    padded[:n, :k] = weight
    if bias is not None:
        padded[:n, k] = bias
    narrow = padded.to(torch.bfloat16)
    kept = narrow if torch.equal(narrow.float(), padded) else padded
    return kept.view(panels, PANEL, k + 1).transpose(1, 2).contiguous()


def linear(x: Tensor, packed: Panels) -> Tensor:
    """x float32 [t, k] → [t, n]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    y = empty(x.shape[0], packed.n)
    _run(x, packed, y, 4 * packed.n, x.shape[0], (0, 0, 0))
    return y


def batched_linear(x: Tensor, packed: Panels) -> Tensor:
    """x float32 [t, g, k] → [t, g, n], a weight for each g."""
    x = x if x.stride(2) == 1 else x.contiguous()
    y = empty(*x.shape[:2], packed.n)
    _run(x, packed, y, 4 * packed.n * x.shape[1], x.shape[0], (4 * x.stride(1), 4 * packed.n, 0))
    return y


def grouped_linear(x: Tensor, packed: Panels, indptr: Tensor) -> Tensor:
    """x float32 [rows, k] → [rows, n]: rows indptr[g] to indptr[g + 1], int64, with weight g."""
    x = x if x.stride(1) == 1 else x.contiguous()
    y = empty(x.shape[0], packed.n)
    _run(x, packed, y, 4 * packed.n, min(x.shape[0], 1), (0, 0, indptr.data_ptr()))
    return y


def _run(
    x: Tensor, packed: Panels, y: Tensor, y_stride: int, rows: int, groups: tuple[int, int, int]
) -> None:
    """One call. groups: bytes from one group's x to the next, the same of y, and where the rows of
    each group begin; 0: all rows are in every group."""
    numbers = packed.numbers
    count, panels, depth = numbers.shape[0], numbers.shape[1], numbers.shape[2] - 1
    passes = -(-(x.shape[0] if groups[2] else rows) // ROWS)
    cost_ns = panels * PANEL * depth * (passes if groups[2] else passes * count) // WEIGHTS_PER_NS
    team = threads.team(count * panels * -(-rows // ROWS), cost_ns)
    each = unit_rows(rows, count * panels, team)
    chunks = -(-rows // each)
    where = (x.data_ptr(), 4 * x.stride(0), numbers.data_ptr(), y.data_ptr(), y_stride)
    sizes = (rows, depth, packed.n, panels, chunks, numbers.itemsize)
    entries = (*where, *sizes, *groups, each)
    threads.run(work(), entries, count * panels * chunks, team, cost_ns)


def unit_rows(rows: int, panels: int, team: int) -> int:
    """Rows of a unit: fewer where panels alone would not keep all threads busy."""
    few = min(-(-UNITS_PER_THREAD * team // panels), -(-rows // ROWS)) if team > 1 else 1
    chunks = max(few, -(-rows // UNIT_ROWS), 1)
    return -(-max(rows, 1) // (chunks * ROWS)) * ROWS


@functools.cache
def work() -> Any:
    """The compiled kernel of this machine."""
    return threads.c_function("GEMM", units)


def units(at: Any, worker: Any) -> None:
    """Take units, a panel and some rows each, until none is left. The entries are `_run`'s."""
    record = int64_at(at + ENTRIES)
    x, x_stride, packed, y, y_stride, rows, depth, n, panels, chunks, item = (
        record[0], record[1], record[2], record[3], record[4], record[5], record[6], record[7],
        record[8], record[9], record[10],
    )  # fmt: skip
    x_group, y_group, bounds, each = record[11], record[12], record[13], record[14]
    team, count = int64_at(at)[TEAM], int64_at(at)[UNITS]
    claimed = claim(at, worker)
    while claimed >= 0:
        whose, nth = claimed % team, claimed // team  # a share is neighbours: of few panels
        unit = whose * (count // team) + min(whose, count % team) + nth
        panel, row = unit // chunks, unit % chunks * each
        group, last = panel // panels, min(row + each, rows)
        if bounds:
            row, last = int64_at(bounds)[group], int64_at(bounds)[group + 1]
        weight, column = packed + panel * (depth + 1) * PANEL * item, panel % panels * PANEL
        x_at, y_at = x + group * x_group, y + group * y_group + 4 * column
        while row < last:
            some = min(ROWS, last - row)
            x_row, y_row = x_at + row * x_stride, y_at + row * y_stride
            chains(some, item, x_row, x_stride, weight, depth, y_row, y_stride, n - column)
            row += some
        claimed = claim(at, worker)


def _chains(typingctx: Any, rows: Any, item: Any, x: Any, x_stride: Any, panel: Any, depth: Any,
            y: Any, y_stride: Any, columns: Any) -> Any:  # fmt: skip
    """y[r][j] = fma chain over k in [0, depth) of x[r][k] * panel[k][j], from 0, plus
    panel[depth][j]; `columns` of them are stored.

    `item` is the size of the panel's numbers: 4, float32, or 2, bfloat16.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows, item, x, x_stride, panel, depth, y, y_stride, columns = args

        def loop(count: int, size: int) -> None:
            x_rows = row_addresses(builder, x, x_stride, count)

            def body(k: Any, sums: list[Any]) -> list[Any]:
                here, offset = (
                    builder.add(panel, builder.mul(k, I64(PANEL * size))),
                    builder.mul(k, I64(4)),
                )
                loaded = [weights_ir(builder, here, j, size) for j in range(VECTORS)]
                factors = [
                    splat_ir(builder, load_ir(builder, builder.add(row, offset), of=F32))
                    for row in x_rows
                ]
                return [
                    fma_ir(builder, f, w, sums[r * VECTORS + j])
                    for r, f in enumerate(factors)
                    for j, w in enumerate(loaded)
                ]

            zero = constant(ir.VectorType(F32, LANES), 0.0)
            sums = counted(builder, I64(0), depth, [zero] * (count * VECTORS), body)
            bias = builder.add(panel, builder.mul(depth, I64(PANEL * size)))
            for j in range(VECTORS):
                add, mask = weights_ir(builder, bias, j, size), below(builder, columns, LANES * j)
                for r, row in enumerate(row_addresses(builder, y, y_stride, count)):
                    store_masked(
                        builder,
                        builder.fadd(sums[r * VECTORS + j], add),
                        builder.add(row, I64(VECTOR_BYTES * j)),
                        mask,
                    )

        done = builder.append_basic_block("done")
        choice = builder.switch(builder.add(builder.mul(rows, I64(8)), item), done)
        for count, size in itertools.product(range(1, ROWS + 1), (2, 4)):
            block = builder.append_basic_block("rows")
            choice.add_case(I64(8 * count + size), block)
            builder.position_at_end(block)
            loop(count, size)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), emit


def weights_ir(builder: Any, address: Any, j: int, size: int) -> Any:
    """Vector j of a panel's row as float32: a bfloat16 is the upper half of one."""
    if size == 4:
        return load_ir(builder, address, VECTOR_BYTES * j)
    halves = load_ir(
        builder, address, 2 * LANES * j, of=ir.VectorType(ir.IntType(16), LANES), align=2
    )
    wide = ir.VectorType(I32, LANES)
    return builder.bitcast(
        builder.shl(builder.zext(halves, wide), constant(wide, 16)), ir.VectorType(F32, LANES)
    )


def below(builder: Any, count: Any, first: int) -> Any:
    """Mask of the lanes j with first + j < count."""
    index = ir.Constant(ir.VectorType(I64, LANES), [I64(first + j) for j in range(LANES)])
    return builder.icmp_signed("<", index, splat_ir(builder, count))


def store_masked(builder: Any, value: Any, address: Any, mask: Any) -> None:
    """Store the lanes of `value` that `mask` names."""
    call_ir(
        builder,
        "llvm.masked.store.v16f32.p0",
        ir.VoidType(),
        [value, at(builder, address), I32(4), mask],
    )


chains: Any = intrinsic(_chains)
