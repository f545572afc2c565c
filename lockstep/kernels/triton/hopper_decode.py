"""Attention of few rows per request over paged keys for sm_90, warp-specialised, in Gluon: the
parts of `attend.py`, which is its twin.

One CTA per multiprocessor walks (item, kv head): one split of a block of at most 16 rows. Two
producer warps keep rings of tiles full by TMA, across items, so that bytes are always under way;
four warps score, weigh and add, the keys of a tile dealt over them. The last CTA of a block to
arrive folds its parts in ascending order. Head size 64 or 128, tiles of 128, pages of 16 to 128
keys, window and sinks; no cap, no tree. Compared with the twin over all rows, bit for bit. Called
by `launch.py` only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from lockstep.kernels.triton.hopper import (
    LN2,
    blank_page,
    divide,
    fold,
    piece,
    share,
    split_end,
    weigh,
)

RUNTIME = (
    "heads",
    "kv_heads",
    "window",
    "causal",
    "work",
    "q_token8",
    "q_head8",
    "count0",
    "len0",
    "count1",
    "len1",
    "len2",
    "outside",
)


@gluon.jit
def tile_range(item, count0, len0, count1, len1, len2, TILE: gl.constexpr):
    """(first tile, end tile, lowest and end position) of an item."""
    split = gl.load(item + 5)
    lo = gl.load(item + 3)
    hi = gl.load(item + 4)
    begin = gl.maximum(split_end(split - 1, count0, len0, count1, len1, len2), lo // TILE)
    end = gl.minimum(split_end(split, count0, len0, count1, len1, len2), (hi + TILE - 1) // TILE)
    return begin, end, lo, hi


@gluon.jit
def page_row(page_ids, entry, nth, first, last, outside, PAGE: gl.constexpr):
    """Where page `nth` of a request begins in the pool; outside of it for a page that no row sees,
    which makes zeros."""
    page = gl.load(page_ids + entry + gl.minimum(gl.maximum(nth, first), last))
    return gl.where((nth >= first) & (nth <= last), page * PAGE, outside)


@gluon.jit
def page_rows(page_ids, entry, tile, first, last, outside, COUNT: gl.constexpr, PAGE: gl.constexpr):
    """The rows of a tile's pages, eight of them; the first COUNT count."""
    nth = tile * COUNT
    r0 = page_row(page_ids, entry, nth, first, last, outside, PAGE)
    r1, r2, r3, r4, r5, r6, r7 = r0, r0, r0, r0, r0, r0, r0
    if COUNT > 1:
        r1 = page_row(page_ids, entry, nth + 1, first, last, outside, PAGE)
    if COUNT > 2:
        r2 = page_row(page_ids, entry, nth + 2, first, last, outside, PAGE)
        r3 = page_row(page_ids, entry, nth + 3, first, last, outside, PAGE)
    if COUNT > 4:
        r4 = page_row(page_ids, entry, nth + 4, first, last, outside, PAGE)
        r5 = page_row(page_ids, entry, nth + 5, first, last, outside, PAGE)
        r6 = page_row(page_ids, entry, nth + 6, first, last, outside, PAGE)
        r7 = page_row(page_ids, entry, nth + 7, first, last, outside, PAGE)
    return r0, r1, r2, r3, r4, r5, r6, r7


@gluon.jit
def fetch_page(desc, pages, full, stage, i, row, col, COUNT: gl.constexpr, PANELS: gl.constexpr):
    """Starts the copies of one page: a box per 64 columns."""
    if i < COUNT:
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                desc,
                [row, col + panel * 64],
                full,
                pages.index((stage * PANELS + panel) * COUNT + i),
            )


@gluon.jit
def fetch_tile(desc, pages, full, stage, rows, col, COUNT: gl.constexpr, PANELS: gl.constexpr):
    """Starts the copies of one tile."""
    for i in gl.static_range(COUNT):
        fetch_page(desc, pages, full, stage, i, rows[i], col, COUNT, PANELS)


@gluon.jit
def producer(desc, pages, full, empty, items, page_ids, kv_heads, work, outside, count0, len0, count1, len1, len2,
             D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """The keys, or the values, of every item, as far ahead as the ring has room; page ids a tile
    ahead of that."""
    COUNT: gl.constexpr = TILE // PAGE
    g = 0
    for n in range(0, share(work)):
        w = piece(n, work)
        item = items + (w // kv_heads) * 12
        col = (w % kv_heads) * D
        entry = gl.load(item)
        begin, end, lo, hi = tile_range(item, count0, len0, count1, len1, len2, TILE)
        first = lo // PAGE
        last = (hi + PAGE - 1) // PAGE - 1
        rows = page_rows(page_ids, entry, begin, first, last, outside, COUNT, PAGE)
        for tile in range(begin, end):
            stage = g % STAGES
            ahead = page_rows(page_ids, entry, tile + 1, first, last, outside, COUNT, PAGE)
            mbarrier.wait(empty.index(stage), ((g // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), TILE * D * 2)
            fetch_tile(desc, pages, full.index(stage), stage, rows, col, COUNT, D // 64)
            rows = ahead
            g += 1


@gluon.jit
def visible(s, tile, lo, hi, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """-inf where a row does not see a key."""
    column = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(
        (column[None, :] >= lo[:, None]) & (column[None, :] < hi[:, None]), s, float("-inf")
    )


@gluon.jit
def step(q, k_ring, v_ring, k_full, v_full, k_empty, v_empty, o, m, l, c, i, tile, lo, hi,
         MASK: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """The tile in ring place i."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=2)
    stage = i % STAGES
    phase = (i // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    k = k_ring.index(stage).permute([1, 0]).load(RIGHT)
    s = mma_v2(q, k, gl.zeros([ROWS, TILE], gl.float32, layout=MMA))
    mbarrier.arrive(k_empty.index(stage))
    mbarrier.wait(v_full.index(stage), phase)
    v = v_ring.index(stage).load(RIGHT)
    if MASK:
        s = visible(s, tile, lo, hi, TILE, MMA)
    w, alpha, m, l = weigh(s, m, l, c, MASK, ROWS, TILE, MMA)
    o = mma_v2(gl.convert_layout(w.to(q.dtype), LEFT), v, o * alpha[:, None])
    mbarrier.arrive(v_empty.index(stage))
    return o, m, l


@gluon.jit
def attend_split(q, k_ring, v_ring, v_pages, k_full, v_full, k_empty, v_empty, c, g, begin, end, lo, hi, cut, full, hi_all,
                 ROWS: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
                 MMA: gl.constexpr):  # fmt: skip
    """Tiles [begin, end), of which those below `full` are seen whole by every row unless `cut`.
    Returns maximum, sum and values."""
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    l = gl.zeros([ROWS], gl.float32, layout=ROW)
    o = gl.zeros([ROWS, D], gl.float32, layout=MMA)
    plain = gl.minimum(end, gl.where(cut, begin, gl.maximum(full, begin)))
    for tile in range(begin, plain):
        o, m, l = step(q, k_ring, v_ring, k_full, v_full, k_empty, v_empty, o, m, l, c, g + tile - begin, tile, lo, hi,
                       False, ROWS, TILE, STAGES, MMA)  # fmt: skip
    for tile in range(plain, end):
        if (tile * TILE + TILE > hi_all) & (hi_all % PAGE != 0):
            i = g + tile - begin
            mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
            blank_page(v_pages, i % STAGES, hi_all - tile * TILE, TILE, D, PAGE)
        o, m, l = step(q, k_ring, v_ring, k_full, v_full, k_empty, v_empty, o, m, l, c, g + tile - begin, tile, lo, hi,
                       True, ROWS, TILE, STAGES, MMA)  # fmt: skip
    m = gl.fma(
        m,
        gl.full([ROWS], 1.0, gl.float32, layout=ROW) * c,
        gl.zeros([ROWS], gl.float32, layout=ROW),
    )
    return m, l, o


@gluon.jit
def load_queries(
    q, row_begin, row_end, group, kv_head, q_token8, q_head8, ROWS: gl.constexpr, D: gl.constexpr
):
    """A block's rows, zeros past its end."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    f = row_begin + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    at = (f // group).to(gl.int64) * (q_token8 * 8) + (kv_head * group + f % group) * (q_head8 * 8)
    return gl.load(
        q + at[:, None] + d[None, :], mask=(f < row_end)[:, None] & (d < D)[None, :], other=0.0
    )


@gluon.jit
def row_ends(
    positions, row_begin, row_end, group, hi_all, causal, ROWS: gl.constexpr, ROW: gl.constexpr
):
    """Per row, the end of what it sees; 0 past the block's end."""
    f = row_begin + gl.arange(0, ROWS, layout=ROW)
    hi = gl.where(
        causal != 0, gl.load(positions + f // group, mask=f < row_end, other=-1) + 1, hi_all
    )
    return gl.where(f < row_end, hi, 0)


@gluon.jit
def write_part(
    m, l, o, part_ml, part_acc, first, rows, ROWS: gl.constexpr, D: gl.constexpr, MMA: gl.constexpr
):
    """One split's state into the scratch, rows [first, first + rows)."""
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, MMA))
    at = (first + r).to(gl.int64)
    gl.store(part_ml + 2 * at, m, mask=r < rows)
    gl.store(part_ml + 2 * at + 1, l, mask=r < rows)
    gl.store(
        part_acc + at[:, None] * D + d[None, :], o, mask=(r < rows)[:, None] & (d < D)[None, :]
    )


@gluon.jit
def fold_parts(
    out,
    lse,
    sinks2,
    part_ml,
    part_acc,
    part,
    rows,
    parts,
    row_begin,
    group,
    kv_head,
    heads,
    v_scale,
    D: gl.constexpr,
):
    """The parts of a block, folded in ascending order, four rows at a time; then sink, division,
    one rounding."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    for row in range(0, rows, 4):
        r = row + gl.arange(0, 4, layout=ROW)
        M = gl.full([4], float("-inf"), gl.float32, layout=ROW)
        L = gl.zeros([4], gl.float32, layout=ROW)
        A = gl.zeros([4, D], gl.float32, layout=LAYOUT)
        for nth in range(0, parts, 4):
            for i in gl.static_range(4):
                at = (part + (nth + i) * rows + r).to(gl.int64)
                real = (r < rows) & (nth + i < parts)
                m = gl.load(part_ml + 2 * at, mask=real, other=float("-inf"), cache_modifier=".cg")
                l = gl.load(part_ml + 2 * at + 1, mask=real, other=0.0, cache_modifier=".cg")
                a = gl.load(
                    part_acc + at[:, None] * D + d[None, :],
                    mask=real[:, None] & (d < D)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                M, L, A = fold(M, L, A, m, l, a, 4, D, LAYOUT)
        f = row_begin + r
        head = kv_head * group + f % group
        sink2 = gl.load(sinks2 + head, mask=r < rows, other=float("-inf"))
        top = gl.maximum(M, sink2)
        base = gl.where(top == float("-inf"), 0.0, top)
        x = gl.exp2(M - base)
        total = gl.fma(L, x, gl.exp2(sink2 - base))
        lit = total > 0.0
        divisor = gl.where(lit, total, 1.0)
        y = divide(A * x[:, None], divisor, 4, D, LAYOUT) * v_scale
        y = gl.where(lit[:, None] & (y != 0.0), y, 0.0)
        at = (f // group).to(gl.int64) * heads + head
        gl.store(
            out + at[:, None] * D + d[None, :],
            y.to(out.dtype.element_ty),
            mask=(r < rows)[:, None] & (d < D)[None, :],
        )
        gl.store(
            lse + at, gl.where(lit, (top + gl.log2(divisor)) * LN2, float("-inf")), mask=r < rows
        )


@gluon.jit
def consumer(q, k_ring, v_ring, v_pages, k_full, v_full, k_empty, v_empty, out, lse, sinks2, items, positions, part_ml, part_acc, counters,
             c, v_scale, heads, kv_heads, window, causal, work, q_token8, q_head8, count0, len0, count1, len1, len2,
             ROWS: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Scores, weights and values of every item; its part; and, if it is the last of its block, the
    fold."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    g = 0
    group = heads // kv_heads
    w = piece(0, work)
    item = items + (w // kv_heads) * 12
    next_begin, next_end = gl.load(item + 1), gl.load(item + 2)
    next_q = load_queries(q, next_begin, next_end, group, w % kv_heads, q_token8, q_head8, ROWS, D)
    next_hi = row_ends(positions, next_begin, next_end, group, gl.load(item + 4), causal, ROWS, ROW)
    for n in range(0, share(work)):
        w = piece(n, work)
        item = items + (w // kv_heads) * 12
        kv_head = w % kv_heads
        row_begin, row_end, hi = next_begin, next_end, next_hi
        own_q = gl.convert_layout(next_q, LEFT)
        parts = gl.load(item + 9)
        rows = row_end - row_begin
        w = piece(n + 1, work)
        other = items + (w // kv_heads) * 12
        next_begin, next_end = gl.load(other + 1), gl.load(other + 2)
        next_q = load_queries(
            q, next_begin, next_end, group, w % kv_heads, q_token8, q_head8, ROWS, D
        )
        next_hi = row_ends(
            positions, next_begin, next_end, group, gl.load(other + 4), causal, ROWS, ROW
        )
        begin, end, lo_all, hi_all = tile_range(item, count0, len0, count1, len1, len2, TILE)
        tokens = (row_end - 1) // group - row_begin // group  # rows stand at consecutive positions
        full = (hi_all - tokens * causal) // TILE
        cut = (lo_all > 0) & (lo_all + tokens > begin * TILE)
        m, l, o = attend_split(own_q, k_ring, v_ring, v_pages, k_full, v_full, k_empty, v_empty, c, g, begin, end,
                               gl.maximum(hi - window, 0), hi, cut, full, hi_all, ROWS, D, TILE, STAGES, PAGE, MMA)  # fmt: skip
        g += gl.maximum(end - begin, 0)
        part = gl.load(item + 7) * kv_heads + kv_head * parts * rows
        write_part(m, l, o, part_ml, part_acc, part + gl.load(item + 8) * rows, rows, ROWS, D, MMA)
        gl.thread_barrier()  # every thread's part is written before one of them says so
        counter = counters + gl.load(item + 10) * kv_heads + kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
            gl.store(counter, 0)  # ready for the next launch
            fold_parts(
                out,
                lse,
                sinks2,
                part_ml,
                part_acc,
                part,
                rows,
                parts,
                row_begin,
                group,
                kv_head,
                heads,
                v_scale,
                D,
            )


@gluon.jit(do_not_specialize=RUNTIME)
def decode_kernel(q, k_desc, v_desc, out, lse, sinks2, items, positions, page_ids, part_ml, part_acc, counters, c, v_scale,
                  heads, kv_heads, window, causal, work, q_token8, q_head8, count0, len0, count1, len1, len2, outside,
                  D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Shared memory, barriers, and who does what. Split lengths come in tiles; `outside` is a row
    no tensor has."""
    PANELS: gl.constexpr = D // 64
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    k_pages = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES * PANELS * (TILE // PAGE), PAGE, 64], WIDE
    )
    v_pages = gl.allocate_shared_memory(
        k_desc.dtype, [STAGES * PANELS * (TILE // PAGE), PAGE, 64], WIDE
    )
    k_ring = k_pages._reinterpret(k_desc.dtype, [STAGES, TILE, D], WIDE)
    v_ring = v_pages._reinterpret(k_desc.dtype, [STAGES, TILE, D], WIDE)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (q, k_ring, v_ring, v_pages, k_full, v_full, k_empty, v_empty, out, lse, sinks2, items, positions, part_ml,
                    part_acc, counters, c, v_scale, heads, kv_heads, window, causal, work, q_token8, q_head8,
                    count0, len0, count1, len1, len2, 16, D, TILE, STAGES, PAGE)),
        (producer, (k_desc, k_pages, k_full, k_empty, items, page_ids, kv_heads, work, outside, count0, len0, count1, len1, len2,
                    D, TILE, STAGES, PAGE)),
        (producer, (v_desc, v_pages, v_full, v_empty, items, page_ids, kv_heads, work, outside, count0, len0, count1, len1, len2,
                    D, TILE, STAGES, PAGE)),
    ], [1, 1], [40, 40])  # fmt: skip
