"""Causal prefill and extend over paged keys for sm_90, warp-specialised, in the order of its twin
`attend.py`. One CTA per multiprocessor walks items (128 query tokens of one head, longest first);
two consumer warpgroups take 64 rows each, and the scores of a tile are issued with the values of
the tile before. Head size 64 or 128, tiles of 128, pages of 16 to 128 keys, no window, cap or tree.
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

from lockstep.kernels.triton.hopper import (
    Ring,
    Splits,
    aggregate,
    barriers,
    blank_page,
    fetch_tile,
    finish,
    fold,
    log2_units,
    make_ring,
    sum_on,
    weights,
)

RUNTIME = ("heads", "group", "work", "count0", "len0", "count1", "len1", "len2", "outside")


@aggregate
class Room:
    """A consumer's shared memory: its queries, the rings, whose turn it is, and the state of its
    fold, where its output is staged too."""

    q: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    keys: Ring
    values: Ring
    mine: gl.shared_memory_descriptor
    other: gl.shared_memory_descriptor
    blanked: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor
    staged: gl.shared_memory_descriptor


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
def producer(
    q_desc, k_desc, v_desc, q, q_full, q_empty, keys, values, items, page_ids, heads, group, work,
    outside, D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """The copies of every item, as far ahead as there is room. An item's first keys do not wait for
    the queries of the one before to be done with."""
    g = 0
    for nth in range(0, share(work)):
        w = piece(nth, work)
        item = items + (w // heads) * 12
        head = w % heads
        entry = gl.load(item)
        row_begin = gl.load(item + 1)
        hi = gl.load(item + 4)
        last = (hi + PAGE - 1) // PAGE - 1
        col = (head // group) * D
        for tile in range(0, (hi + TILE - 1) // TILE):
            fetch_tile(k_desc, keys, g, page_ids, entry, tile, 0, last, col, outside, D, TILE, PAGE)
            if tile == 0:
                mbarrier.wait(q_empty, (nth & 1) ^ 1)
                mbarrier.expect(q_full, 128 * D * 2)
                for i in gl.static_range(2):
                    at = [row_begin + i * 64, head * D]
                    tma.async_copy_global_to_shared(q_desc, at, q_full, q.index(i))
            fetch_tile(
                v_desc, values, g, page_ids, entry, tile, 0, last, col, outside, D, TILE, PAGE
            )
            g += 1


@gluon.jit
def causal(s, tile, pos, TILE: gl.constexpr):
    """-inf where a key lies behind the row."""
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, s.type.layout))
    return gl.where(column[None, :] <= (pos - tile * TILE)[:, None], s, float("-inf"))


@gluon.jit
def begin_scores(room, i, WG: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Issues the scores of the i-th tile of all, in this warpgroup's turn."""
    zero = gl.zeros([64, TILE], gl.float32, layout=LAYOUT)
    room.keys.wait(i)
    mbarrier.wait(room.mine, (i & 1) ^ (1 - WG))
    return warpgroup_mma(
        room.q, room.keys.tile(i).permute([1, 0]), zero, use_acc=False, is_async=True
    )


@gluon.jit
def step(
    room, o, p, m, l, c, i, tile, pos,
    FRESH: gl.constexpr, MASK: gl.constexpr, WG: gl.constexpr, TILE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of this tile, the i-th of all, and values of the one before, together; then this
    tile's weights. FRESH: it begins a split, so that the values stay as they are."""
    s_token = begin_scores(room, i, WG, TILE, LAYOUT)
    room.values.wait(i - 1)
    o_token = warpgroup_mma(p, room.values.tile(i - 1), o, is_async=True)
    mbarrier.arrive(room.other)
    s = warpgroup_mma_wait(1, deps=[s_token])
    room.keys.release(i)
    if MASK:
        s = causal(s, tile, pos, TILE)
    if FRESH:
        m = gl.full_like(m, float("-inf"))
        l = gl.zeros_like(l)
    w, alpha, m = weights(s, m, c, MASK)
    l = sum_on(l, alpha, w)
    o, p = warpgroup_mma_wait(0, deps=[o_token, p])
    room.values.release(i - 1)
    if not FRESH:
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]
    return o, gl.convert_layout(w.to(p.dtype), p.type.layout), m, l


@gluon.jit
def last_values(
    room, o, p, i, nth, tiles, hi_all,
    WG: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Values of the last tile, the i-th of all, of this program's nth item. The first warpgroup
    blanks for both. Nobody is an item ahead: queries are the next one's when both are here."""
    if hi_all % PAGE != 0:
        room.values.wait(i)
        if WG == 0:
            blank_page(room.values, i, hi_all - (tiles - 1) * TILE, TILE, D, PAGE)
        else:
            mbarrier.wait(room.blanked, nth & 1)
    if WG == 0:
        mbarrier.arrive(room.blanked)
    mbarrier.arrive(room.q_empty)  # the last scores of this item are done
    room.values.wait(i)
    o = warpgroup_mma(p, room.values.tile(i), o, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    room.values.release(i)
    return o


@gluon.jit
def attend_item(
    room, splits, c, g, nth, tiles, full, hi_all, pos,
    WG: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """All splits of an item, folded as they go; a split's first scores are under way with the
    values of the last tile of the one before. Returns maximum, sum and values."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    M = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    L = gl.zeros_like(M)
    s = begin_scores(room, g, WG, TILE, LAYOUT)
    mbarrier.arrive(room.other)
    s = warpgroup_mma_wait(0, deps=[s])
    room.keys.release(g)
    w, alpha, m = weights(causal(s, 0, pos, TILE), M, c, True)
    l = sum_on(L, alpha, w)
    p = gl.convert_layout(w.to(room.q.dtype), P)
    o = gl.zeros([64, D], gl.float32, layout=OUT)
    begin = 0
    split = 0
    while begin < tiles:
        end = gl.minimum(splits.end(split), tiles)
        plain = gl.minimum(end, full)
        for tile in range(begin + 1, plain):
            o, p, m, l = step(
                room, o, p, m, l, c, g + tile, tile, pos, False, False, WG, TILE, LAYOUT
            )
        for tile in range(gl.maximum(begin + 1, plain), end):
            o, p, m, l = step(
                room, o, p, m, l, c, g + tile, tile, pos, False, True, WG, TILE, LAYOUT
            )
        before_m = log2_units(m, c)
        before_l = l
        if end < tiles:
            o, p, m, l = step(room, o, p, m, l, c, g + end, end, pos, True, True, WG, TILE, LAYOUT)
        else:
            o = last_values(room, o, p, g + end - 1, nth, tiles, hi_all, WG, TILE, D, PAGE)
        if begin > 0:
            M, L, o = fold(M, L, room.state.load(OUT), before_m, before_l, o)
        else:
            M = before_m
            L = before_l
        if end < tiles:
            room.state.store(o)
            o = gl.zeros([64, D], gl.float32, layout=OUT)
        begin = end
        split += 1
    return M, L, o


@gluon.jit
def write_rows(M, L, o, sink2, v_scale, room, out, lse, row, end, head, heads, D: gl.constexpr):
    """Sink, division, scale, one rounding, store."""
    y, ln = finish(M, L, o, sink2, v_scale)
    room.staged.store(y.to(room.staged.dtype))
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    at = (r.to(gl.int64) * heads + head) * D
    mask = (r < end)[:, None] & (d < D)[None, :]
    gl.store(out + at[:, None] + d[None, :], room.staged.load(WIDE), mask=mask)
    r = row + gl.arange(0, 64, layout=ln.type.layout)
    gl.store(lse + r.to(gl.int64) * heads + head, ln, mask=r < end)


@gluon.jit
def consumer(
    room, splits, out, lse, sinks2, items, c, v_scale, heads, work,
    WG: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Rows [64 * WG, 64 * WG + 64) of every item. A block's rows are consecutive, and the last one
    sees all its keys."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    ))  # fmt: skip
    g = 0
    for nth in range(0, share(work)):
        w = piece(nth, work)
        item = items + (w // heads) * 12
        head = w % heads
        row_begin = gl.load(item + 1)
        row_end = gl.load(item + 2)
        hi_all = gl.load(item + 4)
        sink2 = gl.load(sinks2 + head)
        pos0 = hi_all - (row_end - row_begin) + WG * 64
        tiles = (hi_all + TILE - 1) // TILE
        full = gl.minimum((pos0 + 1) // TILE, tiles)
        pos = pos0 + gl.arange(0, 64, layout=ROW)
        mbarrier.wait(room.q_full, nth & 1)
        M, L, o = attend_item(room, splits, c, g, nth, tiles, full, hi_all, pos, WG, D, TILE, PAGE)
        g += tiles
        row = row_begin + WG * 64
        write_rows(M, L, o, sink2, v_scale, room, out, lse, row, row_end, head, heads, D)


@gluon.jit(do_not_specialize=RUNTIME)
def prefill_kernel(
    q_desc, k_desc, v_desc, out, lse, sinks2, items, page_ids, c, v_scale, heads, group, work,
    count0, len0, count1, len1, len2, outside,
    D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Shared memory, barriers, and who does what. Split lengths come in tiles; `outside` is a row
    no tensor has."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FOLD: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    q = gl.allocate_shared_memory(q_desc.dtype, [2, 64, D], WIDE)
    keys = make_ring(q_desc.dtype, D, TILE, STAGES, PAGE, 2)
    values = make_ring(q_desc.dtype, D, TILE, STAGES, PAGE, 2)
    staged = gl.allocate_shared_memory(q_desc.dtype, [4, 64, D], WIDE)
    state = staged._reinterpret(gl.float32, [2, 64, D], FOLD)
    q_full, q_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    turn0, turn1 = barriers(1, 1).index(0), barriers(1, 1).index(0)
    blanked = barriers(1, 1).index(0)
    fence_async_shared()
    room0 = Room(q.index(0), q_full, q_empty, keys, values, turn0, turn1, blanked,
                 state.index(0), staged.index(0))  # fmt: skip
    room1 = Room(q.index(1), q_full, q_empty, keys, values, turn1, turn0, blanked,
                 state.index(1), staged.index(2))  # fmt: skip
    splits = Splits(count0, len0, count1, len1, len2)
    gl.warp_specialize([
        (consumer, (room0, splits, out, lse, sinks2, items, c, v_scale, heads, work,
                    0, D, TILE, PAGE)),
        (consumer, (room1, splits, out, lse, sinks2, items, c, v_scale, heads, work,
                    1, D, TILE, PAGE)),
        (producer, (q_desc, k_desc, v_desc, q, q_full, q_empty, keys, values, items, page_ids,
                    heads, group, work, outside, D, TILE, PAGE)),
    ], [4, 1], [240, 24])  # fmt: skip
