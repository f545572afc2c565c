"""Causal prefill and extend over paged keys for sm_90, warp-specialised, in Gluon: the same order
as `attend.py`, which is its twin.

One CTA per multiprocessor walks items (128 query tokens of one head, longest first). One producer
warp fetches Q and the pages by TMA; two consumer warpgroups take 64 rows each: the scores of a tile
and the values of the tile before are issued together, the state of the fold lies in shared memory,
and the first scores of the next split run under the fold. Head size 64 or 128, tiles of 128, pages
of 16 to 128 keys, no window, cap or tree: everything else is the twin's. Every variant is compared
with the twin over all rows, bit for bit. Called by `launch.py` only.
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

LN2 = gl.constexpr(0.6931471805599453)
RUNTIME = ("heads", "group", "work", "count0", "len0", "count1", "len1", "len2", "outside")


@gluon.jit
def split_end(s, count0, len0, count1, len1, len2):
    """End of split s, in tiles: count0 splits of len0, count1 of len1, then len2 each."""
    n = s + 1
    a = gl.minimum(n, count0)
    b = gl.minimum(gl.maximum(n - count0, 0), count1)
    return a * len0 + b * len1 + gl.maximum(n - count0 - count1, 0) * len2


@gluon.jit
def share(work):
    """How many of `work` pieces this program does."""
    programs = gl.num_programs(0)
    rounds = work // programs
    place = gl.where(rounds % 2 == 1, programs - 1 - gl.program_id(0), gl.program_id(0))
    return rounds + gl.where(place < work % programs, 1, 0)


@gluon.jit
def piece(nth, work):
    """The nth piece of this program: forwards and backwards in turn, so that pieces sorted by
    length are dealt evenly."""
    programs = gl.num_programs(0)
    place = gl.where(nth % 2 == 1, programs - 1 - gl.program_id(0), gl.program_id(0))
    return gl.minimum(nth * programs + place, work - 1)


@gluon.jit
def fetch_pages(desc, pages, full, stage, page_ids, entry, tile, end_page, col, outside, TILE: gl.constexpr, PAGE: gl.constexpr,
                PANELS: gl.constexpr):  # fmt: skip
    """Starts the copies of one tile: a box per page and 64 columns; a page past the end is a box
    outside the tensor, which is zeros."""
    COUNT: gl.constexpr = TILE // PAGE
    for i in gl.static_range(COUNT):
        nth = tile * COUNT + i
        page = gl.load(page_ids + entry + gl.minimum(nth, end_page - 1))
        row = gl.where(nth < end_page, page * PAGE, outside)
        for panel in gl.static_range(PANELS):
            at = pages.index((stage * PANELS + panel) * COUNT + i)
            tma.async_copy_global_to_shared(desc, [row, col + panel * 64], full, at)


@gluon.jit
def producer(q_desc, k_desc, v_desc, q_ring, k_pages, v_pages, q_full, q_empty, k_full, k_empty, v_full, v_empty, items, page_ids,
             heads, group, work, outside, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """The copies of every item, as far ahead as there is room."""
    g = 0
    for nth in range(0, share(work)):
        w = piece(nth, work)
        item = items + (w // heads) * 12
        head = w % heads
        entry = gl.load(item)
        row_begin = gl.load(item + 1)
        hi = gl.load(item + 4)
        tiles = (hi + TILE - 1) // TILE
        end_page = (hi + PAGE - 1) // PAGE
        col = (head // group) * D
        mbarrier.wait(q_empty, (nth & 1) ^ 1)
        mbarrier.expect(q_full, 128 * D * 2)
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(
                q_desc, [row_begin + i * 64, head * D], q_full, q_ring.index(i)
            )
        for tile in range(0, tiles):
            stage = g % STAGES
            phase = ((g // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), TILE * D * 2)
            fetch_pages(
                k_desc,
                k_pages,
                k_full.index(stage),
                stage,
                page_ids,
                entry,
                tile,
                end_page,
                col,
                outside,
                TILE,
                PAGE,
                D // 64,
            )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), TILE * D * 2)
            fetch_pages(
                v_desc,
                v_pages,
                v_full.index(stage),
                stage,
                page_ids,
                entry,
                tile,
                end_page,
                col,
                outside,
                TILE,
                PAGE,
                D // 64,
            )
            g += 1


@gluon.jit
def row_sum(p, ROWS: gl.constexpr, TILE: gl.constexpr, ROW: gl.constexpr):
    """Sum over a tile, two by two. Column 8k + 2t + b: first the pairs b, then k, neighbours first,
    then t."""
    x = gl.sum(gl.reshape(p, [ROWS, TILE // 8, 4, 2]), 3)
    x = gl.sum(gl.reshape(x, [ROWS, 8, 2, 4]), 2)
    x = gl.sum(gl.reshape(x, [ROWS, 4, 2, 4]), 2)
    x = gl.sum(gl.reshape(x, [ROWS, 2, 2, 4]), 2)
    x = gl.sum(gl.reshape(x, [ROWS, 2, 4]), 1)
    x = gl.sum(gl.reshape(x, [ROWS, 2, 2]), 2)
    return gl.convert_layout(gl.sum(x, 1), ROW)


@gluon.jit
def causal(s, tile, pos, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """-inf where a key lies behind the row."""
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(column[None, :] <= (pos - tile * TILE)[:, None], s, float("-inf"))


@gluon.jit
def weigh(
    s, m, l, c, DEAD: gl.constexpr, ROWS: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Scores to weights, as `softmax.weigh`. DEAD: a row may have seen nothing yet."""
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    m_new = gl.maximum(m, gl.max(s, 1))
    base = m_new
    if DEAD:
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    shift = gl.fma(
        base,
        gl.full([ROWS], 1.0, gl.float32, layout=ROW) * c,
        gl.zeros([ROWS], gl.float32, layout=ROW),
    )
    scale = gl.full([ROWS, TILE], 1.0, gl.float32, layout=LAYOUT) * c
    p = gl.exp2(
        gl.fma(s, scale, (-shift)[:, None] + gl.zeros([ROWS, TILE], gl.float32, layout=LAYOUT))
    )
    alpha = gl.exp2((m - base) * c)
    return p, alpha, m_new, gl.fma(l, alpha, row_sum(p, ROWS, TILE, ROW))


@gluon.jit
def fold(M, L, A, m, l, a, ROWS: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr):
    """Adds a split (m, l, a) to the total (M, L, A), as `softmax.fold`."""
    top = gl.maximum(M, m)
    base = gl.where(top == float("-inf"), 0.0, top)
    x = gl.exp2(M - base)
    y = gl.exp2(m - base)
    x_out = gl.convert_layout(x, gl.SliceLayout(1, OUT))[:, None] + gl.zeros(
        [ROWS, D], gl.float32, layout=OUT
    )
    y_out = gl.convert_layout(y, gl.SliceLayout(1, OUT))[:, None]
    return top, gl.fma(L, x, l * y), gl.fma(A, x_out, a * y_out)


@gluon.jit
def step(q, k_ring, v_ring, k_full, k_empty, v_full, v_empty, mine, other, o, p, m, l, c, g, tile, pos, turn,
         MASK: gl.constexpr, WG: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
         LAYOUT: gl.constexpr, P: gl.constexpr):  # fmt: skip
    """Scores of this tile and values of the one before, together; then this tile's weights."""
    i = g + tile
    stage = i % STAGES
    before = (i - 1) % STAGES
    zero = gl.zeros([64, TILE], gl.float32, layout=LAYOUT)
    mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
    mbarrier.wait(mine, (turn & 1) ^ (1 - WG))
    s_token = warpgroup_mma(
        q, k_ring.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
    o_token = warpgroup_mma(p, v_ring.index(before), o, is_async=True)
    mbarrier.arrive(other)
    s = warpgroup_mma_wait(1, deps=[s_token])
    mbarrier.arrive(k_empty.index(stage))
    if MASK:
        s = causal(s, tile, pos, TILE, LAYOUT)
    w, alpha, m, l = weigh(s, m, l, c, MASK, 64, TILE, LAYOUT)
    o, p = warpgroup_mma_wait(0, deps=[o_token, p])
    mbarrier.arrive(v_empty.index(before))
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]
    p = gl.convert_layout(w.to(q.dtype), P)
    return o, p, m, l


@gluon.jit
def blank_page(v_pages, stage, limit, TILE: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr):
    """Of a tile's values, those from key `limit` to the end of its page become zeros: 0 * NaN is
    NaN, and nobody wrote them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    COUNT: gl.constexpr = TILE // PAGE
    key = gl.arange(0, PAGE, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    keep = (key < limit % PAGE)[:, None] & (column < 64)[None, :]
    for panel in gl.static_range(D // 64):
        page = v_pages.index((stage * (D // 64) + panel) * COUNT + limit // PAGE)
        x = page.load(LAYOUT)
        page.store(gl.where(keep, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def divide(a, b, ROWS: gl.constexpr, D: gl.constexpr, OUT: gl.constexpr):
    """a / b, [ROWS, D] by [ROWS], as `softmax.divide`."""
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    zero = gl.zeros([ROWS, D], gl.float32, layout=OUT)
    r = gl.div_rn(gl.full([ROWS], 1.0, gl.float32, layout=ROW), b)[:, None] + zero
    q = a * r
    return gl.fma(gl.fma(-q, b[:, None] + zero, a), r, q)


@gluon.jit
def write_rows(
    M,
    L,
    o,
    sink2,
    v_scale,
    room,
    out,
    lse,
    row,
    end,
    head,
    heads,
    D: gl.constexpr,
    ROW: gl.constexpr,
    OUT: gl.constexpr,
):
    """Sink, division, scale, one rounding, store, as `softmax.finish`."""
    top = gl.maximum(M, sink2)
    base = gl.where(top == float("-inf"), 0.0, top)
    x = gl.exp2(M - base)
    total = gl.fma(L, x, gl.exp2(sink2 - base))
    lit = total > 0.0
    divisor = gl.where(lit, total, 1.0)
    o = o * gl.convert_layout(x, gl.SliceLayout(1, OUT))[:, None]
    o = divide(o, gl.convert_layout(divisor, gl.SliceLayout(1, OUT)), 64, D, OUT) * v_scale
    o = gl.where(gl.convert_layout(lit, gl.SliceLayout(1, OUT))[:, None] & (o != 0.0), o, 0.0)
    room.store(o.to(room.dtype))
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    y = room.load(WIDE)
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    at = (r.to(gl.int64) * heads + head) * D
    gl.store(out + at[:, None] + d[None, :], y, mask=(r < end)[:, None] & (d < D)[None, :])
    r = row + gl.arange(0, 64, layout=ROW)
    gl.store(
        lse + r.to(gl.int64) * heads + head,
        gl.where(lit, (top + gl.log2(divisor)) * LN2, float("-inf")),
        mask=r < end,
    )


@gluon.jit
def begin_scores(
    q,
    k_ring,
    k_full,
    mine,
    other,
    i,
    turn,
    WG: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Issues the scores of the tile that lies in ring place i, in this warpgroup's turn."""
    mbarrier.wait(k_full.index(i % STAGES), (i // STAGES) & 1)
    mbarrier.wait(mine, (turn & 1) ^ (1 - WG))
    zero = gl.zeros([64, TILE], gl.float32, layout=LAYOUT)
    s = warpgroup_mma(
        q, k_ring.index(i % STAGES).permute([1, 0]), zero, use_acc=False, is_async=True
    )
    mbarrier.arrive(other)
    return s


@gluon.jit
def attend_split(q, k_ring, v_ring, v_pages, k_full, k_empty, v_full, v_empty, q_empty, mine, other, s, c, g, begin, end, tiles, full,
                 hi_all, pos, turn, WG: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
                 LAYOUT: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """Tiles [begin, end) of one split; the scores s of the first are there. Returns its maximum in
    log2 units, sum and values."""
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if begin >= full:
        s = causal(s, begin, pos, TILE, LAYOUT)
    fresh = gl.full([64], float("-inf"), gl.float32, layout=ROW)
    w, _, m, l = weigh(s, fresh, gl.zeros([64], gl.float32, layout=ROW), c, True, 64, TILE, LAYOUT)
    p = gl.convert_layout(w.to(q.dtype), P)
    o = gl.zeros([64, D], gl.float32, layout=OUT)
    plain = gl.minimum(end, full)
    for tile in range(begin + 1, plain):
        o, p, m, l = step(q, k_ring, v_ring, k_full, k_empty, v_full, v_empty, mine, other, o, p, m, l, c, g, tile, pos,
                          turn + tile - begin - 1, False, WG, TILE, STAGES, LAYOUT, P)  # fmt: skip
    for tile in range(gl.maximum(begin + 1, plain), end):
        o, p, m, l = step(q, k_ring, v_ring, k_full, k_empty, v_full, v_empty, mine, other, o, p, m, l, c, g, tile, pos,
                          turn + tile - begin - 1, True, WG, TILE, STAGES, LAYOUT, P)  # fmt: skip
    i = g + end - 1
    mbarrier.arrive(q_empty, pred=end >= tiles)  # the last scores of this item are done
    mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
    if (end >= tiles) & (hi_all % PAGE != 0):
        blank_page(v_pages, i % STAGES, hi_all - (tiles - 1) * TILE, TILE, D, PAGE)
    o = warpgroup_mma(p, v_ring.index(i % STAGES), o, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    mbarrier.arrive(v_empty.index(i % STAGES))
    m = gl.fma(
        m, gl.full([64], 1.0, gl.float32, layout=ROW) * c, gl.zeros([64], gl.float32, layout=ROW)
    )
    return m, l, o


@gluon.jit
def consumer(q_ring, k_ring, v_ring, v_pages, state, room, q_full, q_empty, k_full, k_empty, v_full, v_empty, mine, other, out, lse, sinks2,
             items, c, v_scale, heads, work, count0, len0, count1, len1, len2,
             WG: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Rows [64 * WG, 64 * WG + 64) of every item."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    g = 0
    turn = 0
    q = q_ring.index(WG)
    for nth in range(0, share(work)):
        w = piece(nth, work)
        item = items + (w // heads) * 12
        head = w % heads
        row_begin = gl.load(item + 1)
        row_end = gl.load(item + 2)
        hi_all = gl.load(item + 4)
        sink2 = gl.load(sinks2 + head)
        pos0 = (
            hi_all - (row_end - row_begin) + WG * 64
        )  # a block's rows are consecutive and the last one sees all its keys
        tiles = (hi_all + TILE - 1) // TILE
        full = gl.minimum((pos0 + 1) // TILE, tiles)
        pos = pos0 + gl.arange(0, 64, layout=ROW)
        M = gl.full([64], float("-inf"), gl.float32, layout=ROW)
        L = gl.zeros([64], gl.float32, layout=ROW)
        o = gl.zeros([64, D], gl.float32, layout=OUT)
        mbarrier.wait(q_full, nth & 1)
        s = begin_scores(q, k_ring, k_full, mine, other, g, turn, WG, TILE, STAGES, LAYOUT)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(g % STAGES))
        turn += 1
        begin = 0
        split = 0
        while begin < tiles:
            end = gl.minimum(split_end(split, count0, len0, count1, len1, len2), tiles)
            m, l, o = attend_split(q, k_ring, v_ring, v_pages, k_full, k_empty, v_full, v_empty, q_empty, mine, other, s, c, g, begin, end,
                                   tiles, full, hi_all, pos, turn, WG, D, TILE, STAGES, PAGE, LAYOUT, OUT)  # fmt: skip
            turn += end - begin - 1
            if end < tiles:  # the first scores of the next split run under the fold
                s2 = begin_scores(
                    q, k_ring, k_full, mine, other, g + end, turn, WG, TILE, STAGES, LAYOUT
                )
                turn += 1
                if begin > 0:
                    M, L, o = fold(M, L, state.load(OUT), m, l, o, 64, D, OUT)
                else:
                    M = m
                    L = l
                state.store(o)
                s = warpgroup_mma_wait(0, deps=[s2])
                mbarrier.arrive(k_empty.index((g + end) % STAGES))
            else:
                if begin > 0:
                    M, L, o = fold(M, L, state.load(OUT), m, l, o, 64, D, OUT)
                else:
                    M = m
                    L = l
            begin = end
            split += 1
        g += tiles
        write_rows(
            M,
            L,
            o,
            sink2,
            v_scale,
            room,
            out,
            lse,
            row_begin + WG * 64,
            row_end,
            head,
            heads,
            D,
            ROW,
            OUT,
        )


@gluon.jit(do_not_specialize=RUNTIME)
def prefill_kernel(q_desc, k_desc, v_desc, out, lse, sinks2, items, page_ids, c, v_scale, heads, group, work,
                   count0, len0, count1, len1, len2, outside,
                   D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Shared memory, barriers, and who does what. Split lengths come in tiles; `outside` is a row
    no tensor has."""
    PANELS: gl.constexpr = D // 64
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [2, 64, D], WIDE)
    k_pages = gl.allocate_shared_memory(
        q_desc.dtype, [STAGES * PANELS * (TILE // PAGE), PAGE, 64], WIDE
    )
    v_pages = gl.allocate_shared_memory(
        q_desc.dtype, [STAGES * PANELS * (TILE // PAGE), PAGE, 64], WIDE
    )
    k_ring = k_pages._reinterpret(q_desc.dtype, [STAGES, TILE, D], WIDE)
    v_ring = v_pages._reinterpret(q_desc.dtype, [STAGES, TILE, D], WIDE)
    room = gl.allocate_shared_memory(q_desc.dtype, [4, 64, D], WIDE)
    state = room._reinterpret(
        gl.float32,
        [2, 64, D],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2),
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    turn0 = gl.allocate_shared_memory(gl.int64, [1], BAR)
    turn1 = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    mbarrier.init(turn0, count=1)
    mbarrier.init(turn1, count=1)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (q_ring, k_ring, v_ring, v_pages, state.index(0), room.index(0), q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    turn0, turn1, out, lse, sinks2, items, c, v_scale, heads, work, count0, len0, count1, len1, len2,
                    0, D, TILE, STAGES, PAGE)),
        (consumer, (q_ring, k_ring, v_ring, v_pages, state.index(1), room.index(2), q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    turn1, turn0, out, lse, sinks2, items, c, v_scale, heads, work, count0, len0, count1, len1, len2,
                    1, D, TILE, STAGES, PAGE)),
        (producer, (q_desc, k_desc, v_desc, q_ring, k_pages, v_pages, q_full, q_empty, k_full, k_empty, v_full, v_empty, items, page_ids,
                    heads, group, work, outside, D, TILE, STAGES, PAGE)),
    ], [4, 1], [240, 24])  # fmt: skip
