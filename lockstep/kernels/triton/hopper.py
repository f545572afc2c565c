"""What the warp-specialised kernels for sm_90 share, in Gluon: rings of tiles filled by TMA, and
the order of a row's softmax in the words of `softmax.py`, whose bits it has. Rows lie along axis 0;
layouts are taken from the tensors, so that a transposed view computes the other way round."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate

LN2 = gl.constexpr(0.6931471805599453)


def aggregate(cls):
    """A class of values that travel together: made of its fields, in their order."""
    kinds = cls.__annotations__

    @gluon.constexpr_function
    def __init__(self, *values):
        for name, value in zip(kinds, values, strict=True):
            setattr(self, name, gl.constexpr(value) if kinds[name] is gl.constexpr else value)

    cls.__init__ = __init__
    return _aggregate(cls)


@aggregate
class Splits:
    """The split rule of `order.Splits`, lengths in tiles."""

    count0: gl.tensor
    len0: gl.tensor
    count1: gl.tensor
    len1: gl.tensor
    len2: gl.tensor

    @gluon.jit
    def end(self, s):
        """End of split s, in tiles."""
        n = s + 1
        a = gl.minimum(n, self.count0)
        b = gl.minimum(gl.maximum(n - self.count0, 0), self.count1)
        rest = gl.maximum(n - self.count0 - self.count1, 0)
        return a * self.len0 + b * self.len1 + rest * self.len2


@aggregate
class Ring:
    """Places for tiles [STAGES, TILE, D], seen as pages of 64 columns too, and their barriers."""

    pages: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.jit
    def claim(self, i, BYTES: gl.constexpr):
        """Waits for room for the i-th tile of all; the barrier that its BYTES complete."""
        stage = i % self.stages
        mbarrier.wait(self.empty.index(stage), ((i // self.stages) & 1) ^ 1)
        mbarrier.expect(self.full.index(stage), BYTES)
        return self.full.index(stage)

    @gluon.jit
    def wait(self, i):
        """Until the i-th tile of all is there."""
        mbarrier.wait(self.full.index(i % self.stages), (i // self.stages) & 1)

    @gluon.jit
    def tile(self, i):
        """The i-th tile of all."""
        return self.tiles.index(i % self.stages)

    @gluon.jit
    def release(self, i):
        """The i-th tile has been read."""
        mbarrier.arrive(self.empty.index(i % self.stages))


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """STAGES barriers that COUNT arrivals complete."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def make_ring(
    dtype: gl.constexpr, D: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    """An empty ring that READERS read."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape: gl.constexpr = [STAGES * (D // 64) * (TILE // PAGE), PAGE, 64]
    pages = gl.allocate_shared_memory(dtype, shape, WIDE)
    tiles = pages._reinterpret(dtype, [STAGES, TILE, D], WIDE)
    return Ring(pages, tiles, barriers(STAGES, 1), barriers(STAGES, READERS), STAGES)


@gluon.jit
def fetch_pages(
    desc, pages, full, stage, page_ids, entry, tile, first, last, col, outside,
    D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Starts the copies of D columns of a tile: a box per page and 64 columns. A page outside
    [first, last], which no row sees, is a box outside the tensor, which is zeros."""
    COUNT: gl.constexpr = TILE // PAGE
    for n in gl.static_range(COUNT):
        nth = tile * COUNT + n
        page = gl.load(page_ids + entry + gl.minimum(gl.maximum(nth, first), last))
        row = gl.where((nth >= first) & (nth <= last), page * PAGE, outside)
        for panel in gl.static_range(D // 64):
            at = pages.index((stage * (D // 64) + panel) * COUNT + n)
            tma.async_copy_global_to_shared(desc, [row, col + panel * 64], full, at)


@gluon.jit
def fetch_tile(
    desc, ring, i, page_ids, entry, tile, first, last, col, outside,
    D: gl.constexpr, TILE: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the i-th tile of all, when there is room."""
    full = ring.claim(i, TILE * D * 2)
    fetch_pages(
        desc, ring.pages, full, i % ring.stages, page_ids, entry, tile, first, last, col, outside,
        D, TILE, PAGE,
    )  # fmt: skip


@gluon.jit
def blank_page(
    ring, i, limit,
    TILE: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, WARPS: gl.constexpr = 4,
):  # fmt: skip
    """Of the i-th tile's values, those from key `limit` to the end of its page become zeros: 0 *
    NaN is NaN, and nobody wrote them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    COUNT: gl.constexpr = TILE // PAGE
    key = gl.arange(0, PAGE, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    keep = (key < limit % PAGE)[:, None] & (column < 64)[None, :]
    for panel in gl.static_range(D // 64):
        at = ((i % ring.stages) * (D // 64) + panel) * COUNT + limit // PAGE
        page = ring.pages.index(at)
        x = page.load(LAYOUT)
        page.store(gl.where(keep, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def spread(x, like):
    """x [R] over the columns of `like` [R, C]."""
    rows = gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))
    return rows[:, None] + gl.zeros_like(like)


@gluon.jit
def row_sum(p):
    """Sum over a tile, two by two. Column 8k + 2t + b: first the pairs b, then k, neighbours first,
    then t."""
    ROWS: gl.constexpr = p.shape[0]
    TILE: gl.constexpr = p.shape[1]
    x = gl.sum(gl.reshape(p, [ROWS, TILE // 8, 4, 2]), 3)
    if TILE >= 128:
        x = gl.sum(gl.reshape(x, [ROWS, 8, 2, 4]), 2)
    x = gl.sum(gl.reshape(x, [ROWS, 4, 2, 4]), 2)
    x = gl.sum(gl.reshape(x, [ROWS, 2, 2, 4]), 2)
    x = gl.sum(gl.reshape(x, [ROWS, 2, 4]), 1)
    x = gl.sum(gl.reshape(x, [ROWS, 2, 2]), 2)
    return gl.convert_layout(gl.sum(x, 1), gl.SliceLayout(1, p.type.layout))


@gluon.jit
def sum_on(l, alpha, p):
    """The sum so far, rescaled, and a tile's weights."""
    return gl.fma(l, alpha, row_sum(p))


@gluon.jit
def log2_units(m, c):
    """A maximum of raw scores times c: an fma, so that no kernel contracts it with what follows."""
    return gl.fma(m, gl.full_like(m, 1.0) * c, gl.zeros_like(m))


@gluon.jit
def weights(s, m, c, DEAD: gl.constexpr):
    """Scores to weights, the rescale of what was before, and the new maximum: `softmax.weigh` but
    for the sum. DEAD: a row may have seen nothing yet."""
    m_new = gl.maximum(m, gl.max(s, 1))
    base = m_new
    if DEAD:
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(gl.fma(s, gl.full_like(s, 1.0) * c, spread(-log2_units(base, c), s)))
    return p, gl.exp2((m - base) * c), m_new


@gluon.jit
def fold(M, L, A, m, l, a):
    """Adds a split (m, l, a) to the total (M, L, A), as `softmax.fold`."""
    top = gl.maximum(M, m)
    base = gl.where(top == float("-inf"), 0.0, top)
    x = gl.exp2(M - base)
    y = gl.exp2(m - base)
    return top, gl.fma(L, x, l * y), gl.fma(A, spread(x, A), a * spread(y, a))


@gluon.jit
def finish(M, L, A, sink2, v_scale):
    """The sink as one more fold, the division, the scale, as `softmax.finish`. Returns the output
    and the natural log of the denominator."""
    top = gl.maximum(M, sink2)
    base = gl.where(top == float("-inf"), 0.0, top)
    x = gl.exp2(M - base)
    total = gl.fma(L, x, gl.exp2(sink2 - base))
    lit = total > 0.0
    divisor = gl.where(lit, total, 1.0)
    factor = gl.div_rn(x, divisor) * v_scale
    lse = gl.where(lit, (top + gl.log2(divisor)) * LN2, float("-inf"))
    return gl.fma(A, spread(factor, A), gl.zeros_like(A)), lse
