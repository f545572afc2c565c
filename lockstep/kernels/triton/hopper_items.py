"""Items on sm_90, in Gluon: a row of the table, where its rows go, and `deliver`, which writes the
output, or a part that the last of its block to arrive folds. For `hopper_decode.py` and
`hopper_latent.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from lockstep.kernels.triton.hopper import aggregate, finish, fold


@aggregate
class Item:
    """Tiles [begin, end) of positions [lo, hi), from split `split` on, for rows [row_begin,
    row_end); `row` is its place in the table."""

    row: gl.tensor
    entry: gl.tensor
    row_begin: gl.tensor
    row_end: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    split: gl.tensor
    begin: gl.tensor
    end: gl.tensor


@aggregate
class Output:
    """Where the rows of one kv head go, and the scratch for parts."""

    out: gl.tensor
    lse: gl.tensor
    sinks2: gl.tensor
    part_ml: gl.tensor
    part_acc: gl.tensor
    counters: gl.tensor
    v_scale: gl.tensor
    heads: gl.tensor
    kv_heads: gl.tensor


@gluon.jit
def load_item(items, n, splits, TILE: gl.constexpr):
    """The n-th item."""
    row = items + n * 12
    lo = gl.load(row + 3)
    hi = gl.load(row + 4)
    split = gl.load(row + 5)
    begin = gl.maximum(splits.end(split - 1), lo // TILE)
    end = gl.minimum(splits.end(gl.load(row + 6) - 1), (hi + TILE - 1) // TILE)
    return Item(row, gl.load(row), gl.load(row + 1), gl.load(row + 2), lo, hi, split, begin, end)


@gluon.jit
def all_seen(positions, it, group, window, causal):
    """[lo, hi) of the positions that every row of the item sees."""
    first = gl.load(positions + it.row_begin // group) + 1
    last = gl.load(positions + (it.row_end - 1) // group) + 1
    return gl.maximum(last - window, 0), gl.where(causal != 0, first, it.hi)


@gluon.jit
def visible(s, tile, seen, lo, hi, TILE: gl.constexpr):
    """-inf where a row does not see a key; nothing to do where all see all, `seen`."""
    if (tile * TILE < seen[0]) | (tile * TILE + TILE > seen[1]):
        column = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, s.type.layout))
        mask = (column[None, :] >= lo[:, None]) & (column[None, :] < hi[:, None])
        s = gl.where(mask, s, float("-inf"))
    return s


@gluon.jit
def store_queries(
    room, q, it, group, kv_head, q_token8, q_head8, first,
    ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Columns [first, first + D) of a block's rows into shared memory, zeros past its end."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    f = it.row_begin + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    at = (f // group).to(gl.int64) * (q_token8 * 8) + (kv_head * group + f % group) * (q_head8 * 8)
    mask = (f < it.row_end)[:, None] & (d < D)[None, :]
    room.store(gl.load(q + at[:, None] + (first + d)[None, :], mask=mask, other=0.0))
    fence_async_shared()


@gluon.jit
def row_ends(positions, it, group, causal, ROWS: gl.constexpr, ROW: gl.constexpr):
    """Per row, the end of what it sees; 0 past the block's end."""
    f = it.row_begin + gl.arange(0, ROWS, layout=ROW)
    last = gl.load(positions + f // group, mask=f < it.row_end, other=-1)
    return gl.where(f < it.row_end, gl.where(causal != 0, last + 1, it.hi), 0)


@gluon.jit
def write_rows(to, it, M, L, A, r, D: gl.constexpr):
    """Rows r of a block: sink, division, scale, one rounding, store."""
    group = to.heads // to.kv_heads
    f = it.row_begin + r
    head = (gl.program_id(0) % to.kv_heads) * group + f % group
    sink2 = gl.load(to.sinks2 + head, mask=f < it.row_end, other=float("-inf"))
    y, ln = finish(M, L, A, sink2, to.v_scale)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, A.type.layout))
    at = (f // group).to(gl.int64) * to.heads + head
    gl.store(to.lse + at, ln, mask=f < it.row_end)
    at = gl.convert_layout(at, gl.SliceLayout(1, A.type.layout))
    f = gl.convert_layout(f, gl.SliceLayout(1, A.type.layout))
    mask = (f < it.row_end)[:, None] & (d < D)[None, :]
    gl.store(to.out + at[:, None] * D + d[None, :], y.to(to.out.dtype.element_ty), mask=mask)


@gluon.jit
def write_part(to, m, l, a, first, rows, ROWS: gl.constexpr, D: gl.constexpr):
    """One split's state into the scratch, rows [first, first + rows)."""
    r = gl.arange(0, ROWS, layout=m.type.layout)
    gl.store(to.part_ml + 2 * (first + r).to(gl.int64), m, mask=r < rows)
    gl.store(to.part_ml + 2 * (first + r).to(gl.int64) + 1, l, mask=r < rows)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, a.type.layout))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, a.type.layout))
    at = (first + r).to(gl.int64)[:, None] * D + d[None, :]
    gl.store(to.part_acc + at, a, mask=(r < rows)[:, None] & (d < D)[None, :])


@gluon.jit
def fold_parts(to, it, part, parts, D: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr):
    """The parts of a block, folded in ascending order, WARPS rows and DEPTH parts at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    rows = it.row_end - it.row_begin
    for row in range(0, rows, WARPS):
        r = row + gl.arange(0, WARPS, layout=ROW)
        M = gl.full([WARPS], float("-inf"), gl.float32, layout=ROW)
        L = gl.zeros_like(M)
        A = gl.zeros([WARPS, D], gl.float32, layout=LAYOUT)
        for nth in range(0, parts, DEPTH):
            for i in gl.static_range(DEPTH):
                at = (part + (nth + i) * rows + r).to(gl.int64)
                real = (r < rows) & (nth + i < parts)
                ml = to.part_ml + 2 * at
                m = gl.load(ml, mask=real, other=float("-inf"), cache_modifier=".cg")
                l = gl.load(ml + 1, mask=real, other=0.0, cache_modifier=".cg")
                acc = to.part_acc + at[:, None] * D + d[None, :]
                mask = real[:, None] & (d < D)[None, :]
                a = gl.load(acc, mask=mask, other=0.0, cache_modifier=".cg")
                M, L, A = fold(M, L, A, m, l, a)
        write_rows(to, it, M, L, A, r, D)


@gluon.jit
def deliver(
    to, it, M, L, A, ROWS: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr
):
    """The output, or the part and, if it is the last of its block, the fold of all parts."""
    parts = gl.load(it.row + 9)
    rows = it.row_end - it.row_begin
    kv_head = gl.program_id(0) % to.kv_heads
    if parts == 1:
        write_rows(to, it, M, L, A, gl.arange(0, ROWS, layout=M.type.layout), D)
    else:
        part = gl.load(it.row + 7) * to.kv_heads + kv_head * parts * rows
        write_part(to, M, L, A, part + gl.load(it.row + 8) * rows, rows, ROWS, D)
        gl.thread_barrier()  # every thread's part is written before one of them says so
        counter = to.counters + gl.load(it.row + 10) * to.kv_heads + kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
            gl.store(counter, 0)  # ready for the next launch
            fold_parts(to, it, part, parts, D, WARPS, DEPTH)
