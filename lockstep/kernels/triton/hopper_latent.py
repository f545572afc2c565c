"""Attention over a latent cache (MLA, rows of 576 whose first 512 columns are the values too) for
sm_90, warp-specialised, in the order of its twin `attend.py`. One CTA per multiprocessor walks
items; two warpgroups share a block, each half of a tile's keys and half of the value columns. Tiles
of 64, pages of 16 to 64 keys; no cap, no tree."""

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
    fetch_pages,
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
    "heads", "kv_heads", "window", "causal", "work", "state_row", "q_token8", "q_head8",
    "count0", "len0", "count1", "len1", "len2", "outside",
)  # fmt: skip
ROWS, TILE, D, REST = gl.constexpr(64), gl.constexpr(64), gl.constexpr(512), gl.constexpr(64)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))


@gluon.jit
def producer(desc, ring, rest_pages, splits, items, page_ids, work, outside, PAGE: gl.constexpr):
    """Every tile of every item: 512 columns, and the other 64."""
    g = 0
    for n in range(gl.program_id(0), work, gl.num_programs(0)):
        it = load_item(items, n, splits, TILE)
        first = it.lo // PAGE
        last = (it.hi + PAGE - 1) // PAGE - 1
        for tile in range(it.begin, it.end):
            full = ring.claim(g, TILE * (D + REST) * 2)
            stage = g % ring.stages
            fetch_pages(
                desc, ring.pages, full, stage, page_ids, it.entry, tile, first, last, 0, outside,
                D, TILE, PAGE,
            )  # fmt: skip
            fetch_pages(
                desc, rest_pages, full, stage, page_ids, it.entry, tile, first, last, D, outside,
                REST, TILE, PAGE,
            )  # fmt: skip
            g += 1


@gluon.jit
def attend_split(
    q, q_rest, w_room, ring, rest, c, g, begin, end, seen, lo, hi, hi_all, PAGE: gl.constexpr
):
    """Tiles [begin, end), the first in ring place g. Returns maximum in log2 units, sum and
    values."""
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    l = gl.zeros_like(m)
    o = gl.zeros([ROWS, D], gl.float32, layout=VALUES)
    for tile in range(begin, end):
        i = g + tile - begin
        zero = gl.zeros([ROWS, TILE], gl.float32, layout=SCORES)
        ring.wait(i)
        s = warpgroup_mma(q, ring.tile(i).permute([1, 0]), zero, use_acc=False, is_async=True)
        k = rest.index(i % ring.stages).permute([1, 0])
        s = warpgroup_mma_wait(0, deps=[warpgroup_mma(q_rest, k, s, is_async=True)])
        w, alpha, m = weights(visible(s, tile, seen, lo, hi, TILE), m, c, True)
        w_room.store(w.to(w_room.dtype))
        fence_async_shared()
        o = o * gl.convert_layout(alpha, gl.SliceLayout(1, VALUES))[:, None]
        if (tile * TILE + TILE > hi_all) & (hi_all % PAGE != 0):
            blank_page(ring, i, hi_all - tile * TILE, TILE, D, PAGE, 8)
        o = warpgroup_mma(w_room, ring.tile(i), o, is_async=True)
        l = sum_on(l, alpha, w)
        o = warpgroup_mma_wait(0, deps=[o])
        ring.release(i)
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
def attend_item(
    q, q_rest, w_room, ring, rest, state, splits, it, c, g, seen, lo, hi, PAGE: gl.constexpr
):
    """The item's splits, folded as they go; between splits the values lie in `state`, where every
    thread reads what it wrote itself."""
    M = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    L = gl.zeros_like(M)
    o = gl.zeros([ROWS, D], gl.float32, layout=VALUES)
    PACKED: gl.constexpr = packed(o).type.layout
    run = gl.arange(0, ROWS * D // 4, layout=gl.SliceLayout(1, PACKED))
    own = state + 4 * run[:, None] + gl.arange(0, 4, layout=gl.SliceLayout(0, PACKED))[None, :]
    begin = it.begin
    split = it.split
    while begin < it.end:
        end = gl.minimum(splits.end(split), it.end)
        m, l, o = attend_split(
            q, q_rest, w_room, ring, rest, c, g + begin - it.begin, begin, end, seen, lo, hi, it.hi,
            PAGE,
        )  # fmt: skip
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
    q, q_room, rest_room, w_room, ring, rest, splits, to, items, positions, c, window, causal, work,
    state_row, q_token8, q_head8, PAGE: gl.constexpr,
):  # fmt: skip
    """Scores, weights and values of every item."""
    g = 0
    state = to.part_acc + (state_row + gl.program_id(0) * ROWS).to(gl.int64) * D
    for n in range(gl.program_id(0), work, gl.num_programs(0)):
        it = load_item(items, n, splits, TILE)
        store_queries(q_room, q, it, to.heads, 0, q_token8, q_head8, 0, ROWS, D, 8)
        store_queries(rest_room, q, it, to.heads, 0, q_token8, q_head8, D, ROWS, REST, 8)
        hi = row_ends(positions, it, to.heads, causal, ROWS, gl.SliceLayout(1, SCORES))
        seen = all_seen(positions, it, to.heads, window, causal)
        lo = gl.maximum(hi - window, 0)
        M, L, A = attend_item(
            q_room, rest_room, w_room, ring, rest, state, splits, it, c, g, seen, lo, hi, PAGE
        )
        g += gl.maximum(it.end - it.begin, 0)
        deliver(to, it, M, L, A, ROWS, D, 8, 4)


@gluon.jit(do_not_specialize=RUNTIME)
def latent_kernel(
    q, k_desc, out, lse, sinks2, items, positions, page_ids, part_ml, part_acc, counters,
    c, v_scale, heads, kv_heads, window, causal, work, state_row, q_token8, q_head8,
    count0, len0, count1, len1, len2, outside, PAGE: gl.constexpr,
):  # fmt: skip
    """Shared memory, barriers, and who does what. Split lengths come in tiles; `outside` is a row
    no tensor has; rows of the scratch from `state_row` on are the programs' own, 64 each."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = k_desc.dtype
    q_room = gl.allocate_shared_memory(dtype, [ROWS, D], WIDE)
    rest_room = gl.allocate_shared_memory(dtype, [ROWS, REST], WIDE)
    w_room = gl.allocate_shared_memory(dtype, [ROWS, TILE], WIDE)
    ring = make_ring(dtype, D, TILE, 2, PAGE, 1)
    rest_pages = gl.allocate_shared_memory(dtype, [2 * (TILE // PAGE), PAGE, REST], WIDE)
    rest = rest_pages._reinterpret(dtype, [2, TILE, REST], WIDE)
    fence_async_shared()
    splits = Splits(count0, len0, count1, len1, len2)
    to = Output(out, lse, sinks2, part_ml, part_acc, counters, v_scale, heads, kv_heads)
    gl.warp_specialize([
        (consumer, (q, q_room, rest_room, w_room, ring, rest, splits, to, items, positions, c,
                    window, causal, work, state_row, q_token8, q_head8, PAGE)),
        (producer, (k_desc, ring, rest_pages, splits, items, page_ids, work, outside, PAGE)),
    ], [1], [40])  # fmt: skip
