"""Attention over a latent cache (MLA, rows of 576 whose first 512 columns are the values too) for
sm_90, warp-specialised, in the order of its twin `attend.py`. One CTA per multiprocessor loops over
items. Two warpgroups share a block: each computes half of a tile's keys and half of the value
columns. Tiles of 64, pages of 16 to 64 keys; no cap, no tree."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as nv

from lockstep.kernels.triton import hopper, softmax

ROWS, TILE, D, REST = gl.constexpr(64), gl.constexpr(64), gl.constexpr(512), gl.constexpr(64)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
# consumer's shared memory: queries, weights [64, 64], tiles; `rest`: columns 512 to 575 of each
Room = namedtuple("Room", "q q_rest w ring rest")


@gluon.jit
def producer(call, work, desc, ring, rest_pages):
    """Fetches every tile of every item: 512 and the other 64 columns, under one full barrier."""
    g = 0
    for n in range(gl.program_id(0), work, gl.num_programs(0)):
        it = softmax.load_item(call, n, TILE)
        pages = hopper.pages_of(call, it, ring.pages.shape[1])
        for tile in range(it.begin, it.end):
            full = hopper.claim(ring, g, TILE * (D + REST) * 2)
            stage = g % 2
            hopper.copy_pages(desc, ring.pages, full, stage, pages, tile, 0, D, TILE)
            hopper.copy_pages(desc, rest_pages, full, stage, pages, tile, D, REST, TILE)
            g += 1


@gluon.jit
def attend_split(call, it, seen, room, g, begin, end):
    """Computes tiles [begin, end) of a split; the first is the ring's g-th. Returns maximum in log2
    units, sum and weighted values."""
    ring = room.ring
    m = gl.full_like(seen.lo, float("-inf"), dtype=gl.float32)
    l = gl.zeros_like(m)
    o = gl.zeros([ROWS, D], gl.float32, layout=VALUES)
    for tile in range(begin, end):
        i = g + tile - begin
        zero = gl.zeros([ROWS, TILE], gl.float32, layout=SCORES)
        kv = hopper.arrived(ring, i)
        s = nv.warpgroup_mma(room.q, kv.permute([1, 0]), zero, use_acc=False, is_async=True)
        rest = room.rest.index(i % 2).permute([1, 0])
        s = nv.warpgroup_mma_wait(0, deps=[nv.warpgroup_mma(room.q_rest, rest, s, is_async=True)])
        w, alpha, m = softmax.weigh(hopper.visible(s, tile, seen), m, call.c, True)
        room.w.store(w.to(room.w.dtype))
        nv.fence_async_shared()
        o = o * softmax.beside(alpha, o)[:, None]
        if (tile * TILE + TILE > it.hi) & (it.hi % ring.pages.shape[1] != 0):
            hopper.blank_page(ring, i, it.hi - tile * TILE)
        o = nv.warpgroup_mma(room.w, kv, o, is_async=True)
        l = softmax.add_up(l, alpha, w)
        o = nv.warpgroup_mma_wait(0, deps=[o])
        hopper.release(ring, i)
    return softmax.log2_units(m, call.c), l, o


@gluon.jit
def packed(o):
    """Rearranges o for global memory, [ROWS * D // 4, 4]: a thread's values in runs of four, the
    runs of a warp's threads adjacent."""
    x = gl.reshape(o, [4, 2, 8, 2, 32, 4, 2])
    return gl.reshape(gl.permute(x, (4, 3, 0, 2, 5, 1, 6)), [ROWS * D // 4, 4])


@gluon.jit
def unpacked(x):
    """Undoes `packed`: returns [ROWS, D] in the layout VALUES."""
    x = gl.permute(gl.reshape(x, [32, 2, 4, 8, 4, 2, 2]), (2, 5, 3, 1, 0, 4, 6))
    return gl.convert_layout(gl.reshape(x, [ROWS, D]), VALUES)


@gluon.jit
def attend_item(call, it, seen, room, state, g):
    """Computes an item, folding its splits in order. Between splits the folded values are in global
    memory at `state`; each thread reads only what it wrote, so no barrier is needed."""
    M = gl.full_like(seen.lo, float("-inf"), dtype=gl.float32)
    L = gl.zeros_like(M)
    o = gl.zeros([ROWS, D], gl.float32, layout=VALUES)
    PACKED: gl.constexpr = packed(o).type.layout
    run = gl.arange(0, ROWS * D // 4, layout=gl.SliceLayout(1, PACKED))
    own = state + 4 * run[:, None] + gl.arange(0, 4, layout=gl.SliceLayout(0, PACKED))[None, :]
    begin = it.begin
    split = it.split
    while begin < it.end:
        end = gl.minimum(softmax.split_begin(split + 1, call) // TILE, it.end)
        m, l, o = attend_split(call, it, seen, room, g + begin - it.begin, begin, end)
        if begin > it.begin:
            M, L, o = softmax.fold(M, L, unpacked(gl.load(own)), m, l, o)
        else:
            M = m
            L = l
        if end < it.end:
            gl.store(own, packed(o), eviction_policy="evict_last")
        begin = end
        split += 1
    return M, L, o


@gluon.jit
def consumer(call, work, room, states):
    """Computes every item of this program."""
    g = 0
    state = states + gl.program_id(0).to(gl.int64) * (ROWS * D)
    for n in range(gl.program_id(0), work, gl.num_programs(0)):
        it = softmax.load_item(call, n, TILE)
        hopper.store_queries(room.q, call, it, 0)
        hopper.store_queries(room.q_rest, call, it, D)
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        seen = softmax.seen_by(call, it, r)
        M, L, A = attend_item(call, it, seen, room, state, g)
        g += gl.maximum(it.end - it.begin, 0)
        hopper.deliver(call, it, M, L, A, r, 4)


@gluon.jit(do_not_specialize=softmax.NUMBERS)
def latent_kernel(
    q, k_desc, out, lse, sinks2, items, positions, page_ids, part_ml, part_acc, counters, states,
    c, v_scale, heads, kv_heads, window, causal, work, q_row8, q_head8, count0, len0, len1,
    PAGE: gl.constexpr,
):  # fmt: skip
    """Allocates shared memory and barriers, starts the warps. `states`: [64, D] per program."""
    dtype: gl.constexpr = k_desc.dtype
    q_room = gl.allocate_shared_memory(dtype, [ROWS, D], hopper.WIDE)
    rest_room = gl.allocate_shared_memory(dtype, [ROWS, REST], hopper.WIDE)
    w_room = gl.allocate_shared_memory(dtype, [ROWS, TILE], hopper.WIDE)
    ring = hopper.make_ring(dtype, D, TILE, 2, PAGE, 1)
    rest_pages = gl.allocate_shared_memory(dtype, [2 * (TILE // PAGE), PAGE, REST], hopper.WIDE)
    rest = rest_pages._reinterpret(dtype, [2, TILE, REST], hopper.WIDE)
    nv.fence_async_shared()
    room = Room(q_room, rest_room, w_room, ring, rest)
    call = softmax.Call(
        q, q_row8, q_head8, items, positions, page_ids, heads, kv_heads, window, causal, c, v_scale,
        sinks2, count0, len0, len1, out, lse, part_ml, part_acc, counters,
    )  # fmt: skip
    gl.warp_specialize([
        (consumer, (call, work, room, states)),
        (producer, (call, work, k_desc, ring, rest_pages)),
    ], [1], [24])  # fmt: skip
