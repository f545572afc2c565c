"""Causal prefill and extend over paged keys for sm_90, warp-specialised, in the order of its twin
`attend.py`. One CTA per multiprocessor loops over items (128 query tokens of one head, longest
first). Each of two consumer warpgroups takes 64 rows and issues Q·Kᵀ of a tile together with P·V of
the one before. Head size 64 or 128, tiles of 128, pages of 16 to 128; no window, cap or tree."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as nv

from lockstep.kernels.triton import hopper, softmax

# shared memory: queries and numerators (`state`) [2, 64, D], rings; `staged` outputs alias `state`.
# Barriers (who arrives -> who waits): q_full TMA -> consumers, q_empty consumers -> producer,
# turns[WG] other consumer -> consumer WG, blanked consumer 0 -> consumer 1
Room = namedtuple("Room", "q q_full q_empty k_ring v_ring turns blanked state staged")
# arguments as in `softmax.Call`; `group`: query heads per kv head
Call = namedtuple("Call", "items page_ids heads group c v_scale sinks2 count0 len0 len1 out lse")


@gluon.jit
def piece(nth):
    """Returns this program's nth piece; the direction alternates, to deal sorted pieces evenly."""
    programs = gl.num_programs(0)
    place = gl.where(nth % 2 == 1, programs - 1 - gl.program_id(0), gl.program_id(0))
    return nth * programs + place


@gluon.jit
def producer(call, work, room, q_desc, k_desc, v_desc):
    """Starts the copies of all items, as far ahead as the rings allow. An item's first keys are
    fetched before its queries, which wait until the previous item's have been read."""
    TILE: gl.constexpr = room.k_ring.tiles.shape[1]
    D: gl.constexpr = room.k_ring.tiles.shape[2]
    PAGE: gl.constexpr = room.k_ring.pages.shape[1]
    g = 0
    nth = 0
    while piece(nth) < work:
        w = piece(nth)
        it = softmax.load_item(call, w // call.heads, TILE)
        head = w % call.heads
        pages = hopper.Pages(call.page_ids, it.entry, 0, (it.hi + PAGE - 1) // PAGE - 1)
        col = (head // call.group) * D
        for tile in range(0, (it.hi + TILE - 1) // TILE):
            hopper.fetch(k_desc, room.k_ring, g, pages, tile, col)
            if tile == 0:
                nv.mbarrier.wait(room.q_empty, (nth & 1) ^ 1)
                nv.mbarrier.expect(room.q_full, 128 * D * 2)
                for i in gl.static_range(2):
                    at = [it.row_begin + i * 64, head * D]
                    nv.tma.async_copy_global_to_shared(q_desc, at, room.q_full, room.q.index(i))
            hopper.fetch(v_desc, room.v_ring, g, pages, tile, col)
            g += 1
        nth += 1


@gluon.jit
def causal(s, tile, pos):
    """Sets the scores of keys after the row's own position to -inf."""
    TILE: gl.constexpr = s.shape[1]
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, s.type.layout))
    return gl.where(column[None, :] <= (pos - tile * TILE)[:, None], s, float("-inf"))


@gluon.jit
def begin_scores(room, i, pos, WG: gl.constexpr):
    """Waits for the i-th tile's keys and this warpgroup's turn, and issues Q·Kᵀ."""
    TILE: gl.constexpr = room.k_ring.tiles.shape[1]
    SCORES: gl.constexpr = pos.type.layout.parent
    zero = gl.zeros([64, TILE], gl.float32, layout=SCORES)
    k = hopper.arrived(room.k_ring, i).permute([1, 0])
    nv.mbarrier.wait(room.turns.index(WG), (i & 1) ^ (1 - WG))
    return nv.warpgroup_mma(room.q.index(WG), k, zero, use_acc=False, is_async=True)


@gluon.jit
def step(room, o, p, m, l, c, i, tile, pos, FRESH, MASK, WG):
    """Issues Q·Kᵀ of this tile, the program's i-th, with P·V of the one before; then computes this
    tile's weights. FRESH: the tile begins a split, so m and l restart and o is not rescaled."""
    s_token = begin_scores(room, i, pos, WG)
    o_token = nv.warpgroup_mma(p, hopper.arrived(room.v_ring, i - 1), o, is_async=True)
    nv.mbarrier.arrive(room.turns.index(1 - WG))
    s = nv.warpgroup_mma_wait(1, deps=[s_token])
    hopper.release(room.k_ring, i)
    if MASK:
        s = causal(s, tile, pos)
    if FRESH:
        m = gl.full_like(m, float("-inf"))
        l = gl.zeros_like(l)
    w, alpha, m = softmax.weigh(s, m, c, MASK)
    l = softmax.add_up(l, alpha, w)
    o, p = nv.warpgroup_mma_wait(0, deps=[o_token, p])
    hopper.release(room.v_ring, i - 1)
    if not FRESH:
        o = o * softmax.beside(alpha, o)[:, None]
    return o, gl.convert_layout(w.to(p.dtype), p.type.layout), m, l


@gluon.jit
def last_values(room, o, p, i, nth, tiles, hi_all, WG: gl.constexpr):
    """Adds P·V of the nth item's last tile, the i-th of all. Warpgroup 0 zeroes unseen values for
    both. Neither is an item ahead: the next queries load when both have arrived at q_empty."""
    if hi_all % room.v_ring.pages.shape[1] != 0:
        hopper.arrived(room.v_ring, i)
        if WG == 0:
            hopper.blank_page(room.v_ring, i, hi_all - (tiles - 1) * room.v_ring.tiles.shape[1])
        else:
            nv.mbarrier.wait(room.blanked, nth & 1)
    if WG == 0:
        nv.mbarrier.arrive(room.blanked)
    nv.mbarrier.arrive(room.q_empty)  # the last scores of this item are done
    o = nv.warpgroup_mma(p, hopper.arrived(room.v_ring, i), o, is_async=True)
    o, p = nv.warpgroup_mma_wait(0, deps=[o, p])
    hopper.release(room.v_ring, i)
    return o


@gluon.jit
def attend_item(call, it, room, g, nth, tiles, full, pos, WG: gl.constexpr):
    """Computes an item, folding its splits in order; a split's first Q·Kᵀ is issued with the last
    P·V of the split before. Returns the folded maximum, sum and weighted values."""
    TILE: gl.constexpr = room.k_ring.tiles.shape[1]
    D: gl.constexpr = room.k_ring.tiles.shape[2]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    M = gl.full_like(pos, float("-inf"), dtype=gl.float32)
    L = gl.zeros_like(M)
    s = begin_scores(room, g, pos, WG)
    nv.mbarrier.arrive(room.turns.index(1 - WG))
    s = nv.warpgroup_mma_wait(0, deps=[s])
    hopper.release(room.k_ring, g)
    w, alpha, m = softmax.weigh(causal(s, 0, pos), M, call.c, True)
    l = softmax.add_up(L, alpha, w)
    p = gl.convert_layout(w.to(room.q.dtype), P)
    o = gl.zeros([64, D], gl.float32, layout=OUT)
    begin = 0
    split = 0
    while begin < tiles:
        end = gl.minimum(softmax.split_begin(split + 1, call) // TILE, tiles)
        plain = gl.minimum(end, full)
        for tile in range(begin + 1, plain):
            o, p, m, l = step(room, o, p, m, l, call.c, g + tile, tile, pos, False, False, WG)
        for tile in range(gl.maximum(begin + 1, plain), end):
            o, p, m, l = step(room, o, p, m, l, call.c, g + tile, tile, pos, False, True, WG)
        before_m = softmax.log2_units(m, call.c)
        before_l = l
        if end < tiles:
            o, p, m, l = step(room, o, p, m, l, call.c, g + end, end, pos, True, True, WG)
        else:
            o = last_values(room, o, p, g + end - 1, nth, tiles, it.hi, WG)
        if begin > 0:
            M, L, o = softmax.fold(M, L, room.state.index(WG).load(OUT), before_m, before_l, o)
        else:
            M = before_m
            L = before_l
        if end < tiles:
            room.state.index(WG).store(o)
            o = gl.zeros([64, D], gl.float32, layout=OUT)
        begin = end
        split += 1
    return M, L, o


@gluon.jit
def consumer(call, work, room, WG: gl.constexpr):
    """Computes rows [64 * WG, 64 * WG + 64) of every item, and finishes and stores them. Rows of a
    block are consecutive tokens, so the last one's position is it.hi - 1."""
    TILE: gl.constexpr = room.k_ring.tiles.shape[1]
    D: gl.constexpr = room.k_ring.tiles.shape[2]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    g = 0
    nth = 0
    while piece(nth) < work:
        w = piece(nth)
        it = softmax.load_item(call, w // call.heads, TILE)
        head = w % call.heads
        sink2 = gl.load(call.sinks2 + head)
        pos0 = it.hi - (it.row_end - it.row_begin) + WG * 64
        tiles = (it.hi + TILE - 1) // TILE
        full = gl.minimum((pos0 + 1) // TILE, tiles)
        pos = pos0 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        nv.mbarrier.wait(room.q_full, nth & 1)
        M, L, o = attend_item(call, it, room, g, nth, tiles, full, pos, WG)
        g += tiles
        nth += 1
        row, staged = it.row_begin + WG * 64, room.staged.index(2 * WG)
        y, ln = softmax.finish(M, L, o, sink2, call.v_scale)
        staged.store(y.to(staged.dtype))
        r = row + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
        at = (r.to(gl.int64) * call.heads + head) * D
        mask = (r < it.row_end)[:, None] & (d < D)[None, :]
        gl.store(call.out + at[:, None] + d[None, :], staged.load(WIDE), mask=mask)
        r = row + gl.arange(0, 64, layout=ln.type.layout)
        gl.store(call.lse + r.to(gl.int64) * call.heads + head, ln, mask=r < it.row_end)


@gluon.jit(do_not_specialize=softmax.NUMBERS)
def prefill_kernel(
    q_desc, k_desc, v_desc, out, lse, sinks2, items, page_ids, c, v_scale, heads, group, work,
    count0, len0, len1,
    D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Allocates shared memory and barriers; starts two consumer warpgroups and a producer warp."""
    FOLD: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    q = gl.allocate_shared_memory(q_desc.dtype, [2, 64, D], hopper.WIDE)
    keys = hopper.make_ring(q_desc.dtype, D, TILE, STAGES, PAGE, 2)
    values = hopper.make_ring(q_desc.dtype, D, TILE, STAGES, PAGE, 2)
    staged = gl.allocate_shared_memory(q_desc.dtype, [4, 64, D], hopper.WIDE)
    state = staged._reinterpret(gl.float32, [2, 64, D], FOLD)
    q_full, q_empty = hopper.barriers(1, 1).index(0), hopper.barriers(1, 2).index(0)
    turns, blanked = hopper.barriers(2, 1), hopper.barriers(1, 1).index(0)
    nv.fence_async_shared()
    room = Room(q, q_full, q_empty, keys, values, turns, blanked, state, staged)
    call = Call(items, page_ids, heads, group, c, v_scale, sinks2, count0, len0, len1, out, lse)
    gl.warp_specialize([
        (consumer, (call, work, room, 0)),
        (consumer, (call, work, room, 1)),
        (producer, (call, work, room, q_desc, k_desc, v_desc)),
    ], [4, 1], [240, 24])  # fmt: skip
