"""Attention of few rows per request over paged keys for sm_90, warp-specialised, in the order of
its twin `attend.py`. A CTA does an item of one kv head: one producer warp keeps a ring of keys and
values full by TMA, one warpgroup computes transposed, 64 keys by 16 queries an instruction. Head
size 64 or 128, tiles of 128, pages of 16 to 128 keys, window and sinks; no cap, no tree."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lockstep.kernels.triton.hopper import (
    Splits,
    blank_page,
    fetch_tile,
    fold,
    log2_units,
    make_ring,
    sum_on,
    weights,
)
from lockstep.kernels.triton.hopper_items import (
    Output,
    all_seen,
    deliver,
    load_item,
    row_ends,
    store_queries,
    visible,
)

RUNTIME = (
    "heads", "kv_heads", "window", "causal", "q_token8", "q_head8",
    "count0", "len0", "count1", "len1", "len2", "outside",
)  # fmt: skip
ROWS = gl.constexpr(16)


@gluon.jit
def producer(
    k_desc, v_desc, ring, splits, items, page_ids, kv_heads, outside,
    D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Keys and values of every tile of the item, in turn."""
    it = load_item(items, gl.program_id(0) // kv_heads, splits, TILE)
    col = (gl.program_id(0) % kv_heads) * D
    first = it.lo // PAGE
    last = (it.hi + PAGE - 1) // PAGE - 1
    for t in range(0, it.end - it.begin):
        tile = it.begin + t
        fetch_tile(
            k_desc, ring, 2 * t, page_ids, it.entry, tile, first, last, col, outside,
            D, TILE, PAGE,
        )  # fmt: skip
        fetch_tile(
            v_desc, ring, 2 * t + 1, page_ids, it.entry, tile, first, last, col, outside,
            D, TILE, PAGE,
        )  # fmt: skip


@gluon.jit
def attend_split(
    q, w_room, ring, c, g, begin, end, seen, lo, hi, hi_all,
    D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Tiles [begin, end), the first in ring place g. Returns maximum in log2 units, sum and
    values."""
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=lo.type.layout)
    l = gl.zeros_like(m)
    o = gl.zeros([D, ROWS], gl.float32, layout=MMA)
    for tile in range(begin, end):
        i = g + 2 * (tile - begin)
        zero = gl.zeros([TILE, ROWS], gl.float32, layout=MMA)
        ring.wait(i)
        s = warpgroup_mma(ring.tile(i), q.permute([1, 0]), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        ring.release(i)
        s = visible(gl.permute(s, (1, 0)), tile, seen, lo, hi, TILE)
        w, alpha, m = weights(s, m, c, True)
        w_room.store(w.to(w_room.dtype))
        fence_async_shared()
        o = o * gl.convert_layout(alpha, gl.SliceLayout(0, MMA))[None, :]
        ring.wait(i + 1)
        if (tile * TILE + TILE > hi_all) & (hi_all % PAGE != 0):
            blank_page(ring, i + 1, hi_all - tile * TILE, TILE, D, PAGE)
        v = ring.tile(i + 1).permute([1, 0])
        o = warpgroup_mma(v, w_room.permute([1, 0]), o, is_async=True)
        l = sum_on(l, alpha, w)
        o = warpgroup_mma_wait(0, deps=[o])
        ring.release(i + 1)
    return log2_units(m, c), l, gl.permute(o, (1, 0))


@gluon.jit
def consumer(
    q, q_room, w_room, ring, splits, to, items, positions, c, window, causal, q_token8, q_head8,
    D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Scores, weights and values of the item's splits, folded."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    flipped = gl.permute(gl.zeros([TILE, ROWS], gl.float32, layout=MMA), (1, 0))
    ROW: gl.constexpr = gl.SliceLayout(1, flipped.type.layout)
    group = to.heads // to.kv_heads
    it = load_item(items, gl.program_id(0) // to.kv_heads, splits, TILE)
    kv_head = gl.program_id(0) % to.kv_heads
    store_queries(q_room, q, it, group, kv_head, q_token8, q_head8, 0, ROWS, D, 4)
    hi = row_ends(positions, it, group, causal, ROWS, ROW)
    seen = all_seen(positions, it, group, window, causal)
    lo = gl.maximum(hi - window, 0)
    M = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    L = gl.zeros_like(M)
    A = gl.permute(gl.zeros([D, ROWS], gl.float32, layout=MMA), (1, 0))
    begin = it.begin
    split = it.split
    while begin < it.end:
        end = gl.minimum(splits.end(split), it.end)
        g = 2 * (begin - it.begin)
        m, l, a = attend_split(
            q_room, w_room, ring, c, g, begin, end, seen, lo, hi, it.hi, D, TILE, PAGE, MMA
        )
        M, L, A = fold(M, L, A, m, l, a)
        begin = end
        split += 1
    deliver(to, it, M, L, A, ROWS, D, 4, 8)


@gluon.jit(do_not_specialize=RUNTIME)
def decode_kernel(
    q, k_desc, v_desc, out, lse, sinks2, items, positions, page_ids, part_ml, part_acc, counters,
    c, v_scale, heads, kv_heads, window, causal, q_token8, q_head8,
    count0, len0, count1, len1, len2, outside,
    D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Shared memory, barriers, and who does what. Split lengths come in tiles; `outside` is a row
    no tensor has."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_room = gl.allocate_shared_memory(k_desc.dtype, [ROWS, D], WIDE)
    w_room = gl.allocate_shared_memory(k_desc.dtype, [ROWS, TILE], WIDE)
    ring = make_ring(k_desc.dtype, D, TILE, STAGES, PAGE, 1)
    fence_async_shared()
    splits = Splits(count0, len0, count1, len1, len2)
    to = Output(out, lse, sinks2, part_ml, part_acc, counters, v_scale, heads, kv_heads)
    gl.warp_specialize([
        (consumer, (q, q_room, w_room, ring, splits, to, items, positions, c, window, causal,
                    q_token8, q_head8, D, TILE, PAGE)),
        (producer, (k_desc, v_desc, ring, splits, items, page_ids, kv_heads, outside,
                    D, TILE, PAGE)),
    ], [1], [40])  # fmt: skip
