"""Attention over paged keys for any number of rows and every feature, in plain Triton: what CI
interprets, the twin of the warp-specialised kernels. A program does one item of a block; the last
of a block's parts to arrive folds them in ascending order. Called by `launch.py`."""

from collections import namedtuple

import triton
import triton.language as tl

from lockstep.kernels.triton import parts
from lockstep.kernels.triton.softmax import add_up, fold, log2_units, tanh, weigh

# what a kernel is compiled for: head sizes, the pieces they are walked in, features, launch shape
Shape = namedtuple("Shape", "D_QK DA DB D_V DV LATENT CAP TREE ROWS TILE")
# its place in the table, rows [row_begin, row_end), positions [lo, hi) that they see, the first of
# its splits, where listed positions begin
Item = namedtuple("Item", "row row_begin row_end lo hi split tail")
# an item, what its rows see, query heads of a kv head, and the rows' queries in two pieces
Block = namedtuple("Block", "it seen group q q2")
# keys and values, with their strides, and how they score
Cache = namedtuple("Cache", "k k_slot k_head v v_slot v_head pages tree c pre")
Pages = namedtuple("Pages", "ids entry size mul shift")
Tree = namedtuple("Tree", "positions start tail_indptr tail_slots")


@triton.jit
def nothing(ROWS: tl.constexpr, DV: tl.constexpr):
    """The state of rows that have seen no key: maximum, sum and values."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    return m, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DV], tl.float32)


@triton.jit
def paged(pages, p, mask):
    """Slots of positions p. `mul`, `shift`: the division by the page size, as a product that is
    exact below 2**31."""
    twice = (p * 2).to(tl.uint32, bitcast=True)
    nth = (tl.umulhi(twice, pages.mul.to(tl.uint32)) >> pages.shift).to(tl.int32, bitcast=True)
    page = tl.load(pages.ids + (pages.entry + nth), mask=mask, other=0)
    return page * pages.size + (p - nth * pages.size)


@triton.jit
def rows_at(base, at, first, mask, width, COLUMNS: tl.constexpr):
    """Columns [first, first + COLUMNS) of rows that begin at offsets `at`; zeros where masked and
    from column `width` on."""
    d = first + tl.arange(0, COLUMNS)
    return tl.load(
        base + at[:, None] + d[None, :], mask=mask[:, None] & (d < width)[None, :], other=0.0
    )


@triton.jit
def scores(b, cache, slot, mask, S):
    """Dot products with the keys in these slots; also their first DA columns, which are a latent
    row's values."""
    at = slot * cache.k_slot + cache.k_head
    ka = rows_at(cache.k, at, 0, mask, S.D_QK, S.DA).to(b.q.dtype)
    x = tl.dot(b.q, tl.trans(ka))
    if S.DB > 0:
        kb = rows_at(cache.k, at, S.DA, mask, S.D_QK, S.DB).to(b.q.dtype)
        x = tl.dot(b.q2, tl.trans(kb), x)
    return x, ka


@triton.jit
def values(b, cache, slot, mask, S):
    """The values in these slots."""
    at = slot * cache.v_slot + cache.v_head
    return rows_at(cache.v, at, 0, mask, S.D_V, S.DV).to(b.q.dtype)


@triton.jit
def tile_weights(b, cache, x, kp, m, l, S):
    """Scores x of positions kp to weights. Returns them, the rescale of what was before, the new
    maximum and the new sum."""
    seen = (kp[None, :] >= b.seen.lo[:, None]) & (kp[None, :] < b.seen.hi[:, None])
    if S.CAP:
        x = tanh(x * cache.pre)
    w, alpha, m = weigh(tl.where(seen, x, float("-inf")), m, cache.c, True)
    return w, alpha, m, add_up(l, alpha, w)


@triton.jit
def listed_slots(b, cache, token, kp):
    """Slots of positions kp for one token of a tree, and which of them it sees."""
    tree = cache.tree
    first = tl.load(tree.start + token)
    mask = (kp >= b.it.lo) & (kp <= tl.load(tree.positions + token))
    slot = paged(cache.pages, kp, mask & (kp < first))
    tail = tree.tail_slots + tl.load(tree.tail_indptr + token) + kp - first
    listed = tl.load(tail, mask=mask & (kp >= first), other=0)
    return tl.where(kp < first, slot, listed).to(tl.int64), mask


@triton.jit
def tree_tile(b, cache, p, m, l, a, S):
    """A tile that holds listed positions: token by token, each with its own keys, into the same
    tile as the committed ones."""
    own = (b.it.row_begin + tl.arange(0, S.ROWS)) // b.group
    first, end = b.it.row_begin // b.group, (b.it.row_end - 1) // b.group + 1
    kp = p + tl.arange(0, S.TILE)
    x = tl.zeros([S.ROWS, S.TILE], tl.float32)
    for token in tl.range(first, end, num_stages=1):
        slot, mask = listed_slots(b, cache, token, kp)
        y, _ = scores(b, cache, slot, mask, S)
        x = tl.where((own == token)[:, None], y, x)
    w, alpha, m, l = tile_weights(b, cache, x, kp, m, l, S)
    a = a * alpha[:, None]
    before = a
    for token in tl.range(first, end, num_stages=1):
        slot, mask = listed_slots(b, cache, token, kp)
        vt = values(b, cache, slot, mask, S)
        a = tl.where((own == token)[:, None], tl.dot(w.to(b.q.dtype), vt, before), a)
    return m, l, a


@triton.jit
def attend_split(b, cache, begin, end, S):
    """Online softmax over the tiles of one split, ascending, from a fresh state. Returns its
    maximum in log2 units, sum and values."""
    TILE: tl.constexpr = S.TILE
    m, l, a = nothing(S.ROWS, S.DV)
    begin = tl.maximum(begin, b.it.lo // TILE * TILE)
    end = tl.minimum(end, b.it.hi)
    plain_end = end
    if S.TREE:
        plain_end = tl.maximum(begin, tl.minimum(end, b.it.tail // TILE * TILE))
    for p in range(begin, plain_end, TILE):
        kp = p + tl.arange(0, TILE)
        mask = (kp >= b.it.lo) & (kp < b.it.hi)
        slot = paged(cache.pages, kp, mask).to(tl.int64)
        x, vt = scores(b, cache, slot, mask, S)
        w, alpha, m, l = tile_weights(b, cache, x, kp, m, l, S)
        if not S.LATENT:
            vt = values(b, cache, slot, mask, S)
        a = tl.dot(w.to(b.q.dtype), vt, a * alpha[:, None])
    if S.TREE:
        for p in tl.range(plain_end, end, TILE, num_stages=1):
            m, l, a = tree_tile(b, cache, p, m, l, a, S)
    return log2_units(m, cache.c), l, a


@triton.jit(do_not_specialize=parts.INTEGERS)
def attend_kernel(
    q, k, v, out, lse, sinks2, items, positions, start, tail_indptr, tail_slots, page_ids,
    part_ml, part_acc, counters, c, pre, v_scale,
    heads, kv_heads, window, causal, page_size, page_mul, page_shift,
    count0, len0, count1, len1, len2, q_token8, q_head8, k_slot8, k_head8, v_slot8, v_head8,
    D_QK: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, D_V: tl.constexpr, DV: tl.constexpr,
    LATENT: tl.constexpr, CAP: tl.constexpr, TREE: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, FOLD_ROWS: tl.constexpr, FOLD_DEPTH: tl.constexpr,
):  # fmt: skip
    """One item and kv head per program; strides come in units of 8 elements."""
    kv_head = tl.program_id(0) % kv_heads
    row = items + (tl.program_id(0) // kv_heads) * 12
    row_begin, row_end = tl.load(row + 1), tl.load(row + 2)
    if row_begin >= row_end:  # padding of the item list
        return
    lo, hi = tl.load(row + 3), tl.load(row + 4)
    it = Item(row, row_begin, row_end, lo, hi, tl.load(row + 5), tl.load(row + 11))
    group = heads // kv_heads
    r = tl.arange(0, ROWS)
    seen = parts.seen_by(positions, it, group, window, causal, r)
    f = row_begin + r
    head = kv_head * group + f % group
    at = (f // group).to(tl.int64) * (q_token8 * 8) + head * (q_head8 * 8)
    qa = rows_at(q, at, 0, f < row_end, D_QK, DA)
    qb = qa
    if DB > 0:
        qb = rows_at(q, at, DA, f < row_end, D_QK, DB)
    b = Block(it, seen, group, qa, qb)
    pages = Pages(page_ids, tl.load(row), page_size, page_mul, page_shift)
    tree = Tree(positions, start, tail_indptr, tail_slots)
    k_head, v_head = kv_head.to(tl.int64) * (k_head8 * 8), kv_head.to(tl.int64) * (v_head8 * 8)
    k_slot, v_slot = k_slot8.to(tl.int64) * 8, v_slot8.to(tl.int64) * 8
    cache = Cache(k, k_slot, k_head, v, v_slot, v_head, pages, tree, c, pre)
    to = parts.Output(out, lse, sinks2, part_ml, part_acc, counters, v_scale, heads, kv_heads)
    splits = parts.Splits(count0, len0, count1, len1, len2)
    S: tl.constexpr = Shape(D_QK, DA, DB, D_V, DV, LATENT, CAP, TREE, ROWS, TILE)
    if PART:
        begin = parts.split_begin(it.split, splits)
        m, l, a = attend_split(b, cache, begin, parts.split_begin(it.split + 1, splits), S)
        fresh = nothing(FOLD_ROWS, DV)
        parts.arrive(to, it, m, l, a, r, tl.load(row + 9), fresh, D_V, FOLD_DEPTH)
    else:
        M, L, A = nothing(ROWS, DV)
        for s in range(it.split, tl.load(row + 6)):
            begin = parts.split_begin(s, splits)
            m, l, a = attend_split(b, cache, begin, parts.split_begin(s + 1, splits), S)
            M, L, A = fold(M, L, A, m, l, a)
        parts.write_rows(to, it, M, L, A, r, D_V)
