"""Shared by the warp-specialised kernels for sm_90, in Gluon: rings of tiles filled by TMA and a
block's queries in shared memory; masks. Items, a row's softmax and output are the functions that
their plain twin uses too (`softmax.py`)."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from lockstep.kernels.triton.softmax import arrive, rows_of, write_rows

WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
OUTSIDE = gl.constexpr(1 << 30)  # a row outside of every tensor: TMA fills in zeros
# an item's pages [first, last], stored at ids[entry + page]
Pages = namedtuple("Pages", "ids entry first last")
# tiles [STAGES, TILE, D], also viewed as `pages` [n, PAGE, 64]; per stage a full, an empty barrier
Ring = namedtuple("Ring", "pages tiles full empty")


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """Allocates STAGES barriers [STAGES, 1], each completed by COUNT arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def make_ring(dtype, D, TILE, STAGES, PAGE, READERS):
    """Allocates an empty ring; READERS arrivals empty a stage."""
    shape: gl.constexpr = [STAGES * (D // 64) * (TILE // PAGE), PAGE, 64]
    pages = gl.allocate_shared_memory(dtype, shape, WIDE)
    tiles = pages._reinterpret(dtype, [STAGES, TILE, D], WIDE)
    return Ring(pages, tiles, barriers(STAGES, 1), barriers(STAGES, READERS))


@gluon.jit
def claim(ring, i, BYTES: gl.constexpr):
    """Waits until the i-th tile's stage is empty; returns its full barrier, which awaits BYTES."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    stage = i % STAGES
    mbarrier.wait(ring.empty.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(ring.full.index(stage), BYTES)
    return ring.full.index(stage)


@gluon.jit
def arrived(ring, i):
    """Waits until the i-th tile of this program is full and returns it [TILE, D]."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.full.index(i % STAGES), (i // STAGES) & 1)
    return ring.tiles.index(i % STAGES)


@gluon.jit
def release(ring, i):
    """Arrives at the empty barrier of the i-th tile: this reader is done with it."""
    mbarrier.arrive(ring.empty.index(i % ring.tiles.shape[0]))


@gluon.jit
def pages_of(call, it, PAGE: gl.constexpr):
    """Returns the pages that an item sees."""
    return Pages(call.page_ids, it.entry, it.lo // PAGE, (it.hi + PAGE - 1) // PAGE - 1)


@gluon.jit
def copy_pages(desc, room, full, stage, pages, tile, col, D: gl.constexpr, TILE: gl.constexpr):
    """Starts TMA copies of D columns of a tile into `room`, one box per page and 64 columns. For a
    page outside [first, last], which no row sees, the box is outside of the tensor: zeros."""
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
    """Waits for an empty stage and starts the copies of a tile, the program's i-th."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    TILE: gl.constexpr = ring.tiles.shape[1]
    D: gl.constexpr = ring.tiles.shape[2]
    full = claim(ring, i, TILE * D * 2)
    copy_pages(desc, ring.pages, full, i % STAGES, pages, tile, col, D, TILE)


@gluon.jit
def blank_page(ring, i, limit):
    """Zeroes the i-th tile's values from key `limit` to the end of its page: those slots may be
    unwritten, and 0 * NaN is NaN."""
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
    """Copies columns from `first` on of a block's queries to shared memory; zeros past its end."""
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
    """Sets scores of keys that a row does not see to -inf; no-op if all rows see the tile."""
    TILE: gl.constexpr = s.shape[1]
    if (tile * TILE < seen.all_lo) | (tile * TILE + TILE > seen.all_hi):
        column = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, s.type.layout))
        mask = (column[None, :] >= seen.lo[:, None]) & (column[None, :] < seen.hi[:, None])
        s = gl.where(mask, s, float("-inf"))
    return s


@gluon.jit
def deliver(call, it, M, L, A, r, DEPTH: gl.constexpr):
    """Writes rows r to the output or, for a part, to scratch (`arrive`; DEPTH parts per fetch)."""
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
