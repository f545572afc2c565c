"""What the warp-specialised kernels for sm_90 share, in Gluon: rings of tiles filled by TMA, a
block's queries in shared memory, masks. Items, the order of a row's softmax and where rows go are
the texts of their plain twin (`softmax.py`)."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from lockstep.kernels.triton.softmax import arrive, rows_of, write_rows

WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
OUTSIDE = gl.constexpr(1 << 30)  # a row that no tensor has: TMA fills zeros
# where an item's pages [first, last] are: entries of `ids`
Pages = namedtuple("Pages", "ids entry first last")
# places for tiles [STAGES, TILE, D], seen as pages of 64 columns too, and their barriers
Ring = namedtuple("Ring", "pages tiles full empty")


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """STAGES barriers that COUNT arrivals complete."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def make_ring(dtype, D, TILE, STAGES, PAGE, READERS):
    """An empty ring that READERS read."""
    shape: gl.constexpr = [STAGES * (D // 64) * (TILE // PAGE), PAGE, 64]
    pages = gl.allocate_shared_memory(dtype, shape, WIDE)
    tiles = pages._reinterpret(dtype, [STAGES, TILE, D], WIDE)
    return Ring(pages, tiles, barriers(STAGES, 1), barriers(STAGES, READERS))


@gluon.jit
def claim(ring, i, BYTES: gl.constexpr):
    """Waits for room for the i-th tile of all; the barrier that its BYTES complete."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    stage = i % STAGES
    mbarrier.wait(ring.empty.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), BYTES)
    return ring.full.index(stage)


@gluon.jit
def arrived(ring, i):
    """The i-th tile of all, once it is there."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.full.index(i % STAGES), (i // STAGES) & 1)
    return ring.tiles.index(i % STAGES)


@gluon.jit
def release(ring, i):
    """The i-th tile has been read."""
    mbarrier.arrive(ring.empty.index(i % ring.tiles.shape[0]))


@gluon.jit
def pages_of(call, it, PAGE: gl.constexpr):
    """The pages that an item sees."""
    return Pages(call.page_ids, it.entry, it.lo // PAGE, (it.hi + PAGE - 1) // PAGE - 1)


@gluon.jit
def copy_pages(desc, room, full, stage, pages, tile, col, D: gl.constexpr, TILE: gl.constexpr):
    """Starts the copies of D columns of a tile: a box per page and 64 columns. A page outside
    [first, last], which no row sees, is a box outside the tensor, which is zeros."""
    PAGE: gl.constexpr = room.shape[1]
    COUNT: gl.constexpr = TILE // PAGE
    for n in gl.static_range(COUNT):
        nth = tile * COUNT + n
        at = gl.minimum(gl.maximum(nth, pages.first), pages.last)
        page = gl.load(pages.ids + pages.entry + at)
        seen = (nth >= pages.first) & (nth <= pages.last)
        row = gl.where(seen, page * PAGE, OUTSIDE)
        for panel in gl.static_range(D // 64):
            to = room.index((stage * (D // 64) + panel) * COUNT + n)
            tma.async_copy_global_to_shared(desc, [row, col + panel * 64], full, to)


@gluon.jit
def fetch(desc, ring, i, pages, tile, col):
    """Starts the copies of a tile, the i-th of all, when there is room."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    TILE: gl.constexpr = ring.tiles.shape[1]
    D: gl.constexpr = ring.tiles.shape[2]
    full = claim(ring, i, TILE * D * 2)
    copy_pages(desc, ring.pages, full, i % STAGES, pages, tile, col, D, TILE)


@gluon.jit
def blank_page(ring, i, limit):
    """Of the i-th tile's values, those from key `limit` to the end of its page become zeros: 0 *
    NaN is NaN, and nobody wrote them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    PAGE: gl.constexpr = ring.pages.shape[1]
    COUNT: gl.constexpr = ring.tiles.shape[1] // PAGE
    PANELS: gl.constexpr = ring.tiles.shape[2] // 64
    key = gl.arange(0, PAGE, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    keep = (key < limit % PAGE)[:, None] & (column < 64)[None, :]
    for panel in gl.static_range(PANELS):
        at = ((i % ring.tiles.shape[0]) * PANELS + panel) * COUNT + limit // PAGE
        page = ring.pages.index(at)
        x = page.load(LAYOUT)
        page.store(gl.where(keep, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def store_queries(room, call, it, first):
    """Columns of a block's rows from `first` on into shared memory, zeros past its end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, room.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, room.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    token, head, real = rows_of(call, it, r)
    at = token * (call.q_row8 * 8) + head * (call.q_head8 * 8)
    mask = real[:, None] & (d < room.shape[1])[None, :]
    room.store(gl.load(call.q + at[:, None] + (first + d)[None, :], mask=mask, other=0.0))
    fence_async_shared()


@gluon.jit
def visible(s, tile, seen):
    """-inf where a row does not see a key; nothing to do where all see all."""
    TILE: gl.constexpr = s.shape[1]
    if (tile * TILE < seen.all_lo) | (tile * TILE + TILE > seen.all_hi):
        column = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, s.type.layout))
        mask = (column[None, :] >= seen.lo[:, None]) & (column[None, :] < seen.hi[:, None])
        s = gl.where(mask, s, float("-inf"))
    return s


@gluon.jit
def deliver(call, it, M, L, A, r, DEPTH: gl.constexpr):
    """Rows r to the output, or, as a part, to the scratch, of which DEPTH are fetched at a time."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    D: gl.constexpr = A.shape[1]
    parts = gl.load(it.row + 9)
    if parts == 1:
        write_rows(call, it, M, L, A, r, D)
    else:
        m = gl.full([WARPS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LAYOUT))
        fresh = (m, gl.zeros_like(m), gl.zeros([WARPS, D], gl.float32, layout=LAYOUT))
        arrive(call, it, M, L, A, r, parts, fresh, D, DEPTH)
