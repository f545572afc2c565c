"""y = x Wᵀ + b in float32: every element is one fma chain over K, ascending, plus the bias at last.

So a row of y depends on its own row of x and on nothing else. Weights are packed into panels of [K
+ 1, PANEL], whose last row is the bias. A micro-kernel (loops.py) keeps the accumulators of a few
rows times one panel in registers. Weights that bfloat16 represents exactly, as most checkpoints'
are, stay bfloat16 in memory: half as many bytes to read. Called through the table in ops.py.
"""

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.cpu import threads
from lockstep.kernels.cpu.loops import PANEL, PANEL_ROWS, products
from lockstep.kernels.cpu.routing import Routes
from lockstep.kernels.cpu.threads import ENTRIES, SHARES, UNITS, empty, int64_at, prefetch_rows

UNIT_ROWS = 96  # most rows of x that one unit of work multiplies by one panel
UNITS_PER_THREAD = 4  # wanted, so that threads finish at about the same time
WEIGHTS_PER_NS = 4  # that one thread reads from memory


@dataclass(frozen=True, eq=False)
class Panels:
    """Packed weights, [groups, panels, k + 1, PANEL]; n columns of a group are not padding."""

    numbers: Tensor
    n: int

    @cached_property
    def layout(self) -> tuple[int, int, int, int, int]:
        """(groups, panels per group, k, bytes per number, address of the first number)."""
        groups, panels, depth, _ = self.numbers.shape
        return groups, panels, depth - 1, self.numbers.itemsize, self.numbers.data_ptr()


def pack(weight: Tensor, bias: Tensor | None) -> Panels:
    """Packs weight [n, k] or [groups, n, k] and its bias: as bfloat16 if exact, else float32."""
    n, k = weight.shape[-2:]
    weights = weight.reshape(-1, n, k)
    biases = [None] * len(weights) if bias is None else bias.view(-1, n)
    groups = [_panels(w, b) for w, b in zip(weights, biases)]
    if any(group.dtype is torch.float32 for group in groups):
        groups = [group.float() for group in groups]
    return Panels(torch.stack(groups) if len(groups) > 1 else groups[0][None], n)


def _panels(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Packs one weight [n, k] into [panels, k + 1, PANEL], with zeros after column n."""
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
    """Multiplies all rows by one weight."""
    strides = x.stride()
    if strides[-1] != 1 or (len(strides) == 3 and strides[1] != x.shape[2]):
        x = x.contiguous()
    return _run(x, packed, empty(x.shape[0], packed.n), x.shape[0], (0, 0, 0))


def batched_linear(x: Tensor, packed: Panels) -> Tensor:
    """Multiplies x[:, head] by the weight of that head."""
    x = x if x.stride(2) == 1 else x.contiguous()
    strides = (4 * x.stride(1), 4 * packed.n, 0)
    return _run(x, packed, empty(*x.shape[:2], packed.n), x.shape[0], strides)


def grouped_linear(x: Tensor, packed: Panels, routes: Routes) -> Tensor:
    """Multiplies rows [indptr[g], indptr[g + 1]) by the weight of expert g."""
    x = x if x.stride(1) == 1 else x.contiguous()
    bounds = (0, 0, routes.indptr.data_ptr())
    return _run(x, packed, empty(x.shape[0], packed.n), min(x.shape[0], 1), bounds)


def _run(x: Tensor, packed: Panels, y: Tensor, rows: int, groups: tuple[int, int, int]) -> Tensor:
    """Fills and returns y. `groups`: bytes from one group's x to the next, the same for y, and the
    address of the groups' row bounds, int64 [groups + 1] (0: every group has all rows)."""
    x_group, y_group, bounds = groups
    strides = (4 * x.stride(0), 4 * y.stride(0), x_group, y_group)
    all_rows = x.shape[0] if bounds else 0
    call = prepared(packed.layout, packed.n, strides, rows, all_rows, threads.setting())
    call.run((0, x.data_ptr()), (3, y.data_ptr()), (13, bounds))
    return y


@lru_cache(4096)
def prepared(
    layout: tuple[int, ...], n: int, strides: tuple[int, ...], rows: int, all_rows: int, _: Any
) -> threads.Call:
    """Builds a call without the addresses of x, y and bounds; the last argument, `threads.setting`,
    is only a cache key. `all_rows`: total rows if each is in one group (with bounds), else 0."""
    (count, panels, depth, item, address), (x_stride, y_stride, *group_strides) = layout, strides
    passes = -(-all_rows // PANEL_ROWS) if all_rows else -(-rows // PANEL_ROWS) * count
    cost_ns = panels * PANEL * depth * passes // WEIGHTS_PER_NS
    team = threads.team(count * panels * -(-rows // PANEL_ROWS), cost_ns)
    each = unit_rows(rows, count * panels, team)
    chunks = -(-rows // each)
    where = (0, x_stride, address, 0, y_stride)
    entries = (*where, rows, depth, n, panels, chunks, item, *group_strides, 0, each)
    return threads.Call(work(), entries, count * panels * chunks, team, cost_ns)


def unit_rows(rows: int, panels: int, team: int) -> int:
    """Returns the rows of a unit: fewer if the panels alone would not keep all threads busy."""
    few = min(-(-UNITS_PER_THREAD * team // panels), -(-rows // PANEL_ROWS)) if team > 1 else 1
    chunks = max(few, -(-rows // UNIT_ROWS), 1)
    return -(-max(rows, 1) // (chunks * PANEL_ROWS)) * PANEL_ROWS


@threads.njit(**threads.OPTIONS)
def unit(at: Any, nth: Any, worker: Any) -> None:
    """Multiplies `each` rows (with bounds: all of a group) by one panel. Entries: `prepared`."""
    record = int64_at(at + ENTRIES)
    x, x_stride, packed, y, y_stride, rows, depth, n, panels, chunks, item = (
        record[0], record[1], record[2], record[3], record[4], record[5], record[6], record[7],
        record[8], record[9], record[10],
    )  # fmt: skip
    x_group, y_group, bounds, each = record[11], record[12], record[13], record[14]
    shares, count = int64_at(at)[SHARES], int64_at(at)[UNITS]
    share = nth % shares  # its units are neighbours, so they read few panels
    place = share * (count // shares) + min(share, count % shares) + nth // shares
    panel, row = place // chunks, place % chunks * each
    group, last = panel // panels, min(row + each, rows)
    if bounds:
        row, last = int64_at(bounds)[group], int64_at(bounds)[group + 1]
    weight, column = packed + panel * (depth + 1) * PANEL * item, panel % panels * PANEL
    x_at, y_at = x + group * x_group, y + group * y_group + 4 * column
    prefetch_rows(at, x_at, x_stride, row, min(row + PANEL_ROWS, last), 4 * depth)
    while row < last:
        some = min(PANEL_ROWS, last - row)
        x_row, y_row = x_at + row * x_stride, y_at + row * y_stride
        prefetch_rows(at, x_at, x_stride, row + some, min(row + some + PANEL_ROWS, last), 4 * depth)
        products(some, item, x_row, x_stride, weight, depth, y_row, y_stride, n - column)
        row += some


work = cache(partial(threads.kernel, "GEMM", unit))  # the kernel, compiled once per process
