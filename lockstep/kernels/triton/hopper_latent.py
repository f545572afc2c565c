"""Attention over a latent cache (MLA, rows of 576 whose first 512 columns are the values too) for
sm_90, warp-specialised, in the order of its twin `attend.py`. One CTA per multiprocessor walks
items; two warpgroups share a block, each half of a tile's keys and half of the value columns. Tiles
of 64, pages of 16 to 64 keys; no cap, no tree."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as nv

from lockstep.kernels.triton import hopper
from lockstep.kernels.triton.parts import INTEGERS, Output, Splits, seen_by, split_begin
from lockstep.kernels.triton.softmax import add_up, beside, fold, log2_units, weigh

ROWS, TILE, D, REST = gl.constexpr(64), gl.constexpr(64), gl.constexpr(512), gl.constexpr(64)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
# the consumer's shared memory: queries, weights, and the ring; the other 64 columns beside each
Room = namedtuple("Room", "q q_rest w ring rest")


@gluon.jit
def producer(desc, ring, rest_pages, splits, items, page_ids, work, outside):
    """Every tile of every item: 512 columns, and the other 64."""
    g = 0
    for n in range(gl.program_id(0), work, gl.num_programs(0)):
        it = hopper.load_item(items, n, splits, TILE)
        pages = hopper.pages_of(it, page_ids, outside, ring.pages.shape[1])
        for tile in range(it.begin, it.end):
            full = hopper.claim(ring, g, TILE * (D + REST) * 2)
            stage = g % 2
            hopper.copy_pages(desc, ring.pages, full, stage, pages, tile, 0, D, TILE)
            hopper.copy_pages(desc, rest_pages, full, stage, pages, tile, D, REST, TILE)
            g += 1


@gluon.jit
def attend_split(room, c, g, begin, end, seen, hi_all):
    """Tiles [begin, end), the first in ring place g. Returns maximum in log2 units, sum and
    values."""
    ring = room.ring
    m = gl.full_like(seen.lo, float("-inf"), dtype=gl.float32)
    l = gl.zeros_like(m)
    o = gl.zeros([ROWS, D], gl.float32, layout=VALUES)
    for tile in range(begin, end):
        i = g + tile - begin
        zero = gl.zeros([ROWS, TILE], gl.float32, layout=SCORES)
        hopper.wait(ring, i)
        k = hopper.tile_at(ring, i).permute([1, 0])
        s = nv.warpgroup_mma(room.q, k, zero, use_acc=False, is_async=True)
        k = room.rest.index(i % 2).permute([1, 0])
        s = nv.warpgroup_mma_wait(0, deps=[nv.warpgroup_mma(room.q_rest, k, s, is_async=True)])
        w, alpha, m = weigh(hopper.visible(s, tile, seen), m, c, True)
        room.w.store(w.to(room.w.dtype))
        nv.fence_async_shared()
        o = o * beside(alpha, o)[:, None]
        if (tile * TILE + TILE > hi_all) & (hi_all % ring.pages.shape[1] != 0):
            hopper.blank_page(ring, i, hi_all - tile * TILE)
        o = nv.warpgroup_mma(room.w, hopper.tile_at(ring, i), o, is_async=True)
        l = add_up(l, alpha, w)
        o = nv.warpgroup_mma_wait(0, deps=[o])
        hopper.release(ring, i)
    return log2_units(m, c), l, o


@gluon.jit
def packed(o):
    """A thread's values in runs of four, and those of a warp side by side: how its state lies in
    memory."""
    x = gl.reshape(o, [4, 2, 8, 2, 32, 4, 2])
    return gl.reshape(gl.permute(x, (4, 3, 0, 2, 5, 1, 6)), [ROWS * D // 4, 4])


@gluon.jit
def unpacked(x):
    """The values that were `packed`."""
    x = gl.permute(gl.reshape(x, [32, 2, 4, 8, 4, 2, 2]), (2, 5, 3, 1, 0, 4, 6))
    return gl.convert_layout(gl.reshape(x, [ROWS, D]), VALUES)


@gluon.jit
def attend_item(room, state, splits, it, c, g, seen):
    """The item's splits, folded as they go; between splits the values lie in `state`, where every
    thread reads what it wrote itself."""
    M = gl.full_like(seen.lo, float("-inf"), dtype=gl.float32)
    L = gl.zeros_like(M)
    o = gl.zeros([ROWS, D], gl.float32, layout=VALUES)
    PACKED: gl.constexpr = packed(o).type.layout
    run = gl.arange(0, ROWS * D // 4, layout=gl.SliceLayout(1, PACKED))
    own = state + 4 * run[:, None] + gl.arange(0, 4, layout=gl.SliceLayout(0, PACKED))[None, :]
    begin = it.begin
    split = it.split
    while begin < it.end:
        end = gl.minimum(split_begin(split + 1, splits), it.end)
        m, l, o = attend_split(room, c, g + begin - it.begin, begin, end, seen, it.hi)
        if begin > it.begin:
            M, L, o = fold(M, L, unpacked(gl.load(own)), m, l, o)
        else:
            M = m
            L = l
        if end < it.end:
            gl.store(own, packed(o), eviction_policy="evict_last")
        begin = end
        split += 1
    return M, L, o


@gluon.jit
def consumer(
    q, room, splits, to, items, positions, c, window, causal, work, state_row, q_token8, q_head8
):
    """Scores, weights and values of every item."""
    g = 0
    state = to.part_acc + (state_row + gl.program_id(0) * ROWS).to(gl.int64) * D
    for n in range(gl.program_id(0), work, gl.num_programs(0)):
        it = hopper.load_item(items, n, splits, TILE)
        hopper.store_queries(room.q, q, it, to.heads, 0, q_token8, q_head8, 0)
        hopper.store_queries(room.q_rest, q, it, to.heads, 0, q_token8, q_head8, D)
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        seen = seen_by(positions, it, to.heads, window, causal, r)
        M, L, A = attend_item(room, state, splits, it, c, g, seen)
        g += gl.maximum(it.end - it.begin, 0)
        hopper.deliver(to, it, M, L, A, r, 4)


@gluon.jit(do_not_specialize=INTEGERS)
def latent_kernel(
    q, k_desc, out, lse, sinks2, items, positions, page_ids, part_ml, part_acc, counters,
    c, v_scale, heads, kv_heads, window, causal, work, state_row, q_token8, q_head8,
    count0, len0, count1, len1, len2, outside, PAGE: gl.constexpr,
):  # fmt: skip
    """Shared memory, barriers, and who does what. Split lengths come in tiles; `outside` is a row
    no tensor has; rows of the scratch from `state_row` on are the programs' own, 64 each."""
    dtype: gl.constexpr = k_desc.dtype
    q_room = gl.allocate_shared_memory(dtype, [ROWS, D], hopper.WIDE)
    rest_room = gl.allocate_shared_memory(dtype, [ROWS, REST], hopper.WIDE)
    w_room = gl.allocate_shared_memory(dtype, [ROWS, TILE], hopper.WIDE)
    ring = hopper.make_ring(dtype, D, TILE, 2, PAGE, 1)
    rest_pages = gl.allocate_shared_memory(dtype, [2 * (TILE // PAGE), PAGE, REST], hopper.WIDE)
    rest = rest_pages._reinterpret(dtype, [2, TILE, REST], hopper.WIDE)
    nv.fence_async_shared()
    room = Room(q_room, rest_room, w_room, ring, rest)
    splits = Splits(count0, len0, count1, len1, len2)
    to = Output(out, lse, sinks2, part_ml, part_acc, counters, v_scale, heads, kv_heads)
    gl.warp_specialize([
        (consumer, (q, room, splits, to, items, positions, c, window, causal, work, state_row,
                    q_token8, q_head8)),
        (producer, (k_desc, ring, rest_pages, splits, items, page_ids, work, outside)),
    ], [1], [40])  # fmt: skip
