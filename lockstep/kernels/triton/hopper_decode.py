"""Attention of few rows per request over paged keys for sm_90, warp-specialised, in the order of
its twin `attend.py`. A CTA computes one item of one kv head: a producer warp fills a ring with
alternating keys and values by TMA; one warpgroup computes transposed, 64 keys by 16 queries per
MMA. Head size 64 or 128, tiles of 128, pages of 16 to 128; window and sinks, no cap, no tree."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as nv

from lockstep.kernels.triton import hopper, softmax

ROWS = gl.constexpr(16)
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))


@gluon.jit
def producer(call, k_desc, v_desc, ring):
    """Fetches every tile of the item: keys as even entries of the ring, values as odd ones."""
    it = softmax.load_item(call, gl.program_id(0) // call.kv_heads, ring.tiles.shape[1])
    col = (gl.program_id(0) % call.kv_heads) * ring.tiles.shape[2]
    pages = hopper.pages_of(call, it, ring.pages.shape[1])
    for t in range(0, it.end - it.begin):
        tile = it.begin + t
        hopper.fetch(k_desc, ring, 2 * t, pages, tile, col)
        hopper.fetch(v_desc, ring, 2 * t + 1, pages, tile, col)


@gluon.jit
def attend_split(call, it, seen, q, w_room, ring, g, begin, end):
    """Computes tiles [begin, end) of a split; the first one's keys are the ring's g-th entry.
    Returns maximum in log2 units, sum and weighted values."""
    TILE: gl.constexpr = ring.tiles.shape[1]
    D: gl.constexpr = ring.tiles.shape[2]
    m = gl.full_like(seen.lo, float("-inf"), dtype=gl.float32)
    l = gl.zeros_like(m)
    o = gl.zeros([D, ROWS], gl.float32, layout=MMA)
    for tile in range(begin, end):
        i = g + 2 * (tile - begin)
        zero = gl.zeros([TILE, ROWS], gl.float32, layout=MMA)
        k = hopper.arrived(ring, i)
        s = nv.warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = nv.warpgroup_mma_wait(0, deps=[s])
        hopper.release(ring, i)
        s = hopper.visible(gl.permute(s, (1, 0)), tile, seen)
        w, alpha, m = softmax.weigh(s, m, call.c, True)
        w_room.store(w.to(w_room.dtype))
        nv.fence_async_shared()
        o = o * gl.convert_layout(alpha, gl.SliceLayout(0, MMA))[None, :]
        v = hopper.arrived(ring, i + 1).permute([1, 0])
        if (tile * TILE + TILE > it.hi) & (it.hi % ring.pages.shape[1] != 0):
            hopper.blank_page(ring, i + 1, it.hi - tile * TILE)
        o = nv.warpgroup_mma(v, w_room.permute([1, 0]), o, is_async=True)
        l = softmax.add_up(l, alpha, w)
        o = nv.warpgroup_mma_wait(0, deps=[o])
        hopper.release(ring, i + 1)
    return softmax.log2_units(m, call.c), l, gl.permute(o, (1, 0))


@gluon.jit
def consumer(call, q, w_room, ring):
    """Computes the item's splits, folds them in order and writes the result."""
    TILE: gl.constexpr = ring.tiles.shape[1]
    D: gl.constexpr = ring.tiles.shape[2]
    it = softmax.load_item(call, gl.program_id(0) // call.kv_heads, TILE)
    hopper.store_queries(q, call, it, 0)
    scores = gl.permute(gl.zeros([TILE, ROWS], gl.float32, layout=MMA), (1, 0))
    r = softmax.index(scores, 0)
    seen = softmax.seen_by(call, it, r)
    M = gl.full_like(seen.lo, float("-inf"), dtype=gl.float32)
    L = gl.zeros_like(M)
    A = gl.permute(gl.zeros([D, ROWS], gl.float32, layout=MMA), (1, 0))
    begin = it.begin
    split = it.split
    while begin < it.end:
        end = gl.minimum(softmax.split_begin(split + 1, call) // TILE, it.end)
        g = 2 * (begin - it.begin)
        m, l, a = attend_split(call, it, seen, q, w_room, ring, g, begin, end)
        M, L, A = softmax.fold(M, L, A, m, l, a)
        begin = end
        split += 1
    hopper.deliver(call, it, M, L, A, r, 8)


@gluon.jit(do_not_specialize=softmax.NUMBERS)
def decode_kernel(
    q, k_desc, v_desc, out, lse, sinks2, items, positions, page_ids, part_ml, part_acc, counters,
    c, v_scale, heads, kv_heads, window, causal, q_row8, q_head8, count0, len0, len1,
    D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Allocates shared memory and barriers; starts the consumer warpgroup and the producer warp."""
    q_room = gl.allocate_shared_memory(k_desc.dtype, [ROWS, D], hopper.WIDE)
    w_room = gl.allocate_shared_memory(k_desc.dtype, [ROWS, TILE], hopper.WIDE)
    ring = hopper.make_ring(k_desc.dtype, D, TILE, STAGES, PAGE, 1)
    nv.fence_async_shared()
    call = softmax.Call(
        q, q_row8, q_head8, items, positions, page_ids, heads, kv_heads, window, causal, c, v_scale,
        sinks2, count0, len0, len1, out, lse, part_ml, part_acc, counters,
    )  # fmt: skip
    gl.warp_specialize([
        (consumer, (call, q_room, w_room, ring)),
        (producer, (call, k_desc, v_desc, ring)),
    ], [1], [40])  # fmt: skip
