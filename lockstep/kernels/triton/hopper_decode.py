"""Attention of few rows per request over paged keys for sm_90, warp-specialised, in Gluon: the parts of `attend.py`, which is its twin.

One CTA per multiprocessor walks (item, kv head): one split of a block of at most 64 rows. The producer warp keeps a ring of tiles full by
TMA, across items, so that bytes are always under way; one warpgroup scores, weighs and adds. The last CTA of a block to arrive folds
its parts in ascending order. Head size 64 or 128, tiles of 128, pages of 16 to 128 keys, window and sinks; no cap, no tree.
Compared with the twin over all rows, bit for bit. Called by `launch.py` only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lockstep.kernels.triton.hopper import LN2, blank_page, divide, fold, split_end, weigh

RUNTIME = ("heads", "kv_heads", "window", "causal", "work", "q_token8", "q_head8", "count0", "len0", "count1", "len1", "len2", "outside")


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
def producer(k_desc, v_desc, k_pages, v_pages, k_full, v_full, empty, items, page_ids, kv_heads, work, outside,
             count0, len0, count1, len1, len2, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """The tiles of every item, as far ahead as the ring has room; a page that no row sees is a box outside the tensor: zeros."""
    COUNT: gl.constexpr = TILE // PAGE
    PANELS: gl.constexpr = D // 64
    g = 0
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        item = items + (w // kv_heads) * 12
        col = (w % kv_heads) * D
        entry = gl.load(item)
        begin, end, lo, hi = tile_range(item, count0, len0, count1, len1, len2, TILE)
        first_page = lo // PAGE
        last_page = (hi + PAGE - 1) // PAGE - 1
        for tile in range(begin, end):
            stage = g % STAGES
            mbarrier.wait(empty.index(stage), ((g // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(stage), TILE * D * 2)
            mbarrier.expect(v_full.index(stage), TILE * D * 2)
            for i in gl.static_range(COUNT):
                nth = tile * COUNT + i
                page = gl.load(page_ids + entry + gl.minimum(gl.maximum(nth, first_page), last_page))
                row = gl.where((nth >= first_page) & (nth <= last_page), page * PAGE, outside)
                for panel in gl.static_range(PANELS):
                    at = (stage * PANELS + panel) * COUNT + i
                    tma.async_copy_global_to_shared(k_desc, [row, col + panel * 64], k_full.index(stage), k_pages.index(at))
                    tma.async_copy_global_to_shared(v_desc, [row, col + panel * 64], v_full.index(stage), v_pages.index(at))
            g += 1


@gluon.jit
def visible(s, tile, lo, hi, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """-inf where a row does not see a key."""
    column = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where((column[None, :] >= lo[:, None]) & (column[None, :] < hi[:, None]), s, float("-inf"))


@gluon.jit
def step(q, k_ring, v_ring, k_full, v_full, empty, o, p, m, l, c, i, tile, lo, hi,
         MASK: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr, P: gl.constexpr):  # fmt: skip
    """Scores of the tile in ring place i and values of the one before, together; then this tile's weights."""
    stage = i % STAGES
    before = (i - 1) % STAGES
    zero = gl.zeros([64, TILE], gl.float32, layout=LAYOUT)
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    s_token = warpgroup_mma(q, k_ring.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    o_token = warpgroup_mma(p, v_ring.index(before), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_token])
    if MASK:
        s = visible(s, tile, lo, hi, TILE, LAYOUT)
    w, alpha, m, l = weigh(s, m, l, c, MASK, TILE, LAYOUT)
    o, p = warpgroup_mma_wait(0, deps=[o_token, p])
    mbarrier.arrive(empty.index(before))
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]
    p = gl.convert_layout(w.to(q.dtype), P)
    return o, p, m, l


@gluon.jit
def attend_split(q, k_ring, v_ring, v_pages, k_full, v_full, empty, c, g, begin, end, lo, hi, cut, full, hi_all,
                 D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
                 LAYOUT: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """Tiles [begin, end), of which those below `full` are seen whole by every row unless `cut`. Returns maximum, sum and values."""
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    mbarrier.wait(k_full.index(g % STAGES), (g // STAGES) & 1)
    zero = gl.zeros([64, TILE], gl.float32, layout=LAYOUT)
    s = warpgroup_mma(q, k_ring.index(g % STAGES).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = visible(warpgroup_mma_wait(0, deps=[s]), begin, lo, hi, TILE, LAYOUT)
    fresh = gl.full([64], float("-inf"), gl.float32, layout=ROW)
    w, _, m, l = weigh(s, fresh, gl.zeros([64], gl.float32, layout=ROW), c, True, TILE, LAYOUT)
    p = gl.convert_layout(w.to(q.dtype), P)
    o = gl.zeros([64, D], gl.float32, layout=OUT)
    plain = gl.minimum(end, gl.where(cut, begin + 1, gl.maximum(full, begin + 1)))
    for tile in range(begin + 1, plain):
        o, p, m, l = step(q, k_ring, v_ring, k_full, v_full, empty, o, p, m, l, c, g + tile - begin, tile, lo, hi,
                          False, TILE, STAGES, LAYOUT, P)  # fmt: skip
    for tile in range(plain, end):
        o, p, m, l = step(q, k_ring, v_ring, k_full, v_full, empty, o, p, m, l, c, g + tile - begin, tile, lo, hi,
                          True, TILE, STAGES, LAYOUT, P)  # fmt: skip
    i = g + end - begin - 1
    stage = i % STAGES
    mbarrier.wait(v_full.index(stage), (i // STAGES) & 1)
    if (end * TILE > hi_all) & (hi_all % PAGE != 0):
        blank_page(v_pages, stage, hi_all - (end - 1) * TILE, TILE, D, PAGE)
    o = warpgroup_mma(p, v_ring.index(stage), o, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    mbarrier.arrive(empty.index(stage))
    m = gl.fma(m, gl.full([64], 1.0, gl.float32, layout=ROW) * c, gl.zeros([64], gl.float32, layout=ROW))
    return m, l, o


@gluon.jit
def load_queries(q, room, row_begin, row_end, group, kv_head, q_token8, q_head8, D: gl.constexpr):
    """The block's rows into shared memory, zeros past its end."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    f = row_begin + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    at = (f // group).to(gl.int64) * (q_token8 * 8) + (kv_head * group + f % group) * (q_head8 * 8)
    x = gl.load(q + at[:, None] + d[None, :], mask=(f < row_end)[:, None] & (d < D)[None, :], other=0.0)
    room.store(x)
    fence_async_shared()


@gluon.jit
def write_part(m, l, o, part_ml, part_acc, first, rows, D: gl.constexpr, ROW: gl.constexpr, OUT: gl.constexpr):
    """One split's state into the scratch, rows [first, first + rows)."""
    r = gl.arange(0, 64, layout=ROW)
    at = (first + r).to(gl.int64)
    gl.store(part_ml + 2 * at, m, mask=r < rows)
    gl.store(part_ml + 2 * at + 1, l, mask=r < rows)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
    at = (first + r).to(gl.int64) * D
    gl.store(part_acc + at[:, None] + d[None, :], o, mask=(r < rows)[:, None] & (d < D)[None, :])


@gluon.jit
def fold_parts(out, lse, sinks2, part_ml, part_acc, part, rows, parts, row_begin, group, kv_head, heads, v_scale, D: gl.constexpr):
    """The parts of a block, folded in ascending order, four rows at a time; then sink, division, one rounding."""
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
                a = gl.load(part_acc + at[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg")
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
        gl.store(out + at[:, None] * D + d[None, :], y.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (d < D)[None, :])
        gl.store(lse + at, gl.where(lit, (top + gl.log2(divisor)) * LN2, float("-inf")), mask=r < rows)


@gluon.jit
def consumer(q, room, k_ring, v_ring, v_pages, k_full, v_full, empty, out, lse, sinks2, items, positions, part_ml, part_acc, counters,
             c, v_scale, heads, kv_heads, window, causal, work, q_token8, q_head8, count0, len0, count1, len1, len2,
             D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Scores, weights and values of every item; its part; and, if it is the last of its block, the fold."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    g = 0
    group = heads // kv_heads
    for w in range(gl.program_id(0), work, gl.num_programs(0)):
        item = items + (w // kv_heads) * 12
        kv_head = w % kv_heads
        row_begin = gl.load(item + 1)
        row_end = gl.load(item + 2)
        parts = gl.load(item + 9)
        rows = row_end - row_begin
        load_queries(q, room, row_begin, row_end, group, kv_head, q_token8, q_head8, D)
        begin, end, lo_all, hi_all = tile_range(item, count0, len0, count1, len1, len2, TILE)
        f = row_begin + gl.arange(0, 64, layout=ROW)
        real = f < row_end
        hi = gl.where(causal != 0, gl.load(positions + f // group, mask=real, other=-1) + 1, hi_all)
        hi = gl.where(real, hi, 0)
        lo = gl.maximum(hi - window, 0)
        tokens = (row_end - 1) // group - row_begin // group  # rows stand at consecutive positions
        full = (hi_all - tokens * causal) // TILE
        cut = (lo_all > 0) & (lo_all + tokens > begin * TILE)
        m = gl.full([64], float("-inf"), gl.float32, layout=ROW)
        l = gl.zeros([64], gl.float32, layout=ROW)
        o = gl.zeros([64, D], gl.float32, layout=OUT)
        if begin < end:
            m, l, o = attend_split(room, k_ring, v_ring, v_pages, k_full, v_full, empty, c, g, begin, end, lo, hi, cut, full, hi_all,
                                   D, TILE, STAGES, PAGE, LAYOUT, OUT)  # fmt: skip
            g += end - begin
        part = gl.load(item + 7) * kv_heads + kv_head * parts * rows
        write_part(m, l, o, part_ml, part_acc, part + gl.load(item + 8) * rows, rows, D, ROW, OUT)
        gl.thread_barrier()  # every thread's part is written before one of them says so
        counter = counters + gl.load(item + 10) * kv_heads + kv_head
        if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
            gl.store(counter, 0)  # ready for the next launch
            fold_parts(out, lse, sinks2, part_ml, part_acc, part, rows, parts, row_begin, group, kv_head, heads, v_scale, D)


@gluon.jit(do_not_specialize=RUNTIME)
def decode_kernel(q, k_desc, v_desc, out, lse, sinks2, items, positions, page_ids, part_ml, part_acc, counters, c, v_scale,
                  heads, kv_heads, window, causal, work, q_token8, q_head8, count0, len0, count1, len1, len2, outside,
                  D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Shared memory, barriers, and who does what. Split lengths come in tiles; `outside` is a row no tensor has."""
    PANELS: gl.constexpr = D // 64
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    room = gl.allocate_shared_memory(k_desc.dtype, [64, D], WIDE)
    k_pages = gl.allocate_shared_memory(k_desc.dtype, [STAGES * PANELS * (TILE // PAGE), PAGE, 64], WIDE)
    v_pages = gl.allocate_shared_memory(k_desc.dtype, [STAGES * PANELS * (TILE // PAGE), PAGE, 64], WIDE)
    k_ring = k_pages._reinterpret(k_desc.dtype, [STAGES, TILE, D], WIDE)
    v_ring = v_pages._reinterpret(k_desc.dtype, [STAGES, TILE, D], WIDE)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (q, room, k_ring, v_ring, v_pages, k_full, v_full, empty, out, lse, sinks2, items, positions, part_ml, part_acc,
                    counters, c, v_scale, heads, kv_heads, window, causal, work, q_token8, q_head8, count0, len0, count1, len1, len2,
                    D, TILE, STAGES, PAGE)),
        (producer, (k_desc, v_desc, k_pages, v_pages, k_full, v_full, empty, items, page_ids, kv_heads, work, outside,
                    count0, len0, count1, len1, len2, D, TILE, STAGES, PAGE)),
    ], [1], [40])  # fmt: skip
