"""Attention over paged keys for any number of rows and every feature, in plain Triton. CI runs it
interpreted; the warp-specialised kernels are its twins. A program computes one item for one kv
head; the last part of a block to arrive folds all, in ascending order. Called by `launch.py`."""

from collections import namedtuple

import triton
import triton.language as tl

from lockstep.kernels.triton import softmax

# compile-time constants: head sizes, the pieces (DA, DB) of D_QK, features, launch shape
Shape = namedtuple("Shape", "D_QK DA DB D_V DV LATENT CAP TREE ROWS TILE")
# an item, what its rows see, their queries in two pieces [ROWS, DA] and [ROWS, DB], its addresses
Block = namedtuple("Block", "call it seen q q2 pre cache pages tree")
Cache = namedtuple("Cache", "k k_slot k_head v v_slot v_head")
Pages = namedtuple("Pages", "size mul shift")
Tree = namedtuple("Tree", "start tail_indptr tail_slots")


@triton.jit
def empty_state(ROWS: tl.constexpr, DV: tl.constexpr):
    """Returns the state of rows that have seen no key: maximum, sum and weighted values."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    return m, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DV], tl.float32)


@triton.jit
def paged(b, p, mask):
    """Returns the slots of positions p < 2**31; `mul` and `shift` divide by the page size."""
    pages = b.pages
    twice = (p * 2).to(tl.uint32, bitcast=True)
    nth = (tl.umulhi(twice, pages.mul.to(tl.uint32)) >> pages.shift).to(tl.int32, bitcast=True)
    page = tl.load(b.call.page_ids + (b.it.entry + nth), mask=mask, other=0)
    return page * pages.size + (p - nth * pages.size)


@triton.jit
def rows_at(base, at, first, mask, width, COLUMNS: tl.constexpr):
    """Loads columns [first, first + COLUMNS) of rows that begin at offsets `at`; zeros where masked
    and from column `width` on."""
    d = first + tl.arange(0, COLUMNS)
    inside = mask[:, None] & (d < width)[None, :]
    return tl.load(base + at[:, None] + d[None, :], mask=inside, other=0.0)


@triton.jit
def scores(b, slot, mask, S):
    """Returns dot products with the keys in these slots [ROWS, TILE], and the keys' first columns
    [TILE, DA], which are the values of a latent cache."""
    cache = b.cache
    at = slot * cache.k_slot + cache.k_head
    ka = rows_at(cache.k, at, 0, mask, S.D_QK, S.DA).to(b.q.dtype)
    x = tl.dot(b.q, tl.trans(ka))
    if S.DB > 0:
        kb = rows_at(cache.k, at, S.DA, mask, S.D_QK, S.DB).to(b.q.dtype)
        x = tl.dot(b.q2, tl.trans(kb), x)
    return x, ka


@triton.jit
def values(b, slot, mask, S):
    """Loads the values in these slots."""
    at = slot * b.cache.v_slot + b.cache.v_head
    return rows_at(b.cache.v, at, 0, mask, S.D_V, S.DV).to(b.q.dtype)


@triton.jit
def tile_weights(b, x, kp, m, l, S):
    """Turns scores x of positions kp into weights. Returns them, the factor of the earlier state,
    the new maximum and the new sum."""
    seen = (kp[None, :] >= b.seen.lo[:, None]) & (kp[None, :] < b.seen.hi[:, None])
    if S.CAP:
        x = softmax.tanh(x * b.pre)
    w, alpha, m = softmax.weigh(tl.where(seen, x, float("-inf")), m, b.call.c, True)
    return w, alpha, m, softmax.add_up(l, alpha, w)


@triton.jit
def listed_slots(b, token, kp):
    """Returns the slots of positions kp for one token of a tree, and a mask of those it sees."""
    tree = b.tree
    first = tl.load(tree.start + token)
    mask = (kp >= b.it.lo) & (kp <= tl.load(b.call.positions + token))
    slot = paged(b, kp, mask & (kp < first))
    tail = tree.tail_slots + tl.load(tree.tail_indptr + token) + kp - first
    listed = tl.load(tail, mask=mask & (kp >= first), other=0)
    return tl.where(kp < first, slot, listed).to(tl.int64), mask


@triton.jit
def tree_tile(b, p, m, l, a, S):
    """Adds a tile with listed positions: computes token by token, each with its own keys, which
    share the tile with the committed ones."""
    group = b.call.heads // b.call.kv_heads
    own = (b.it.row_begin + tl.arange(0, S.ROWS)) // group
    first, end = b.it.row_begin // group, (b.it.row_end - 1) // group + 1
    kp = p + tl.arange(0, S.TILE)
    x = tl.zeros([S.ROWS, S.TILE], tl.float32)
    for token in tl.range(first, end, num_stages=1):
        slot, mask = listed_slots(b, token, kp)
        y, _ = scores(b, slot, mask, S)
        x = tl.where((own == token)[:, None], y, x)
    w, alpha, m, l = tile_weights(b, x, kp, m, l, S)
    a = a * alpha[:, None]
    before = a
    for token in tl.range(first, end, num_stages=1):
        slot, mask = listed_slots(b, token, kp)
        vt = values(b, slot, mask, S)
        a = tl.where((own == token)[:, None], tl.dot(w.to(b.q.dtype), vt, before), a)
    return m, l, a


@triton.jit
def attend_split(b, split, S):
    """Runs online softmax over the tiles of one split, ascending, from an empty state. Returns
    maximum in log2 units, sum and weighted values."""
    TILE: tl.constexpr = S.TILE
    m, l, a = empty_state(S.ROWS, S.DV)
    begin = tl.maximum(softmax.split_begin(split, b.call), b.it.lo // TILE * TILE)
    end = tl.minimum(softmax.split_begin(split + 1, b.call), b.it.hi)
    plain_end = end
    if S.TREE:
        plain_end = tl.maximum(begin, tl.minimum(end, tl.load(b.it.row + 11) // TILE * TILE))
    for p in range(begin, plain_end, TILE):
        kp = p + tl.arange(0, TILE)
        mask = (kp >= b.it.lo) & (kp < b.it.hi)
        slot = paged(b, kp, mask).to(tl.int64)
        x, vt = scores(b, slot, mask, S)
        w, alpha, m, l = tile_weights(b, x, kp, m, l, S)
        if not S.LATENT:
            vt = values(b, slot, mask, S)
        a = tl.dot(w.to(b.q.dtype), vt, a * alpha[:, None])
    if S.TREE:
        for p in tl.range(plain_end, end, TILE, num_stages=1):
            m, l, a = tree_tile(b, p, m, l, a, S)
    return softmax.log2_units(m, b.call.c), l, a


@triton.jit(do_not_specialize=softmax.NUMBERS)
def attend_kernel(
    q, k, v, out, lse, sinks2, items, positions, start, tail_indptr, tail_slots, page_ids,
    part_ml, part_acc, counters, c, pre, v_scale,
    heads, kv_heads, window, causal, page_size, page_mul, page_shift,
    count0, len0, len1, q_row8, q_head8, k_row8, k_head8, v_row8, v_head8,
    D_QK: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, D_V: tl.constexpr, DV: tl.constexpr,
    LATENT: tl.constexpr, CAP: tl.constexpr, TREE: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, FOLD_ROWS: tl.constexpr,
):  # fmt: skip
    """Computes one item and kv head per program. Strides `*8` are in units of 8 elements."""
    call = softmax.Call(
        q, q_row8, q_head8, items, positions, page_ids, heads, kv_heads, window, causal, c, v_scale,
        sinks2, count0, len0, len1, out, lse, part_ml, part_acc, counters,
    )  # fmt: skip
    it = softmax.load_item(call, tl.program_id(0) // kv_heads, TILE)
    if it.row_begin >= it.row_end:  # padding of the item list
        return
    r = tl.arange(0, ROWS)
    token, head, real = softmax.rows_of(call, it, r)
    at = token * (q_row8 * 8) + head * (q_head8 * 8)
    qa = rows_at(q, at, 0, real, D_QK, DA)
    qb = qa
    if DB > 0:
        qb = rows_at(q, at, DA, real, D_QK, DB)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    k_head, v_head = kv_head * (k_head8 * 8), kv_head * (v_head8 * 8)
    cache = Cache(k, k_row8.to(tl.int64) * 8, k_head, v, v_row8.to(tl.int64) * 8, v_head)
    pages, tree = Pages(page_size, page_mul, page_shift), Tree(start, tail_indptr, tail_slots)
    b = Block(call, it, softmax.seen_by(call, it, r), qa, qb, pre, cache, pages, tree)
    S: tl.constexpr = Shape(D_QK, DA, DB, D_V, DV, LATENT, CAP, TREE, ROWS, TILE)
    if PART:
        m, l, a = attend_split(b, it.split, S)
        fresh = empty_state(FOLD_ROWS, DV)
        softmax.arrive(call, it, m, l, a, r, tl.load(it.row + 9), fresh, D_V, 4)
    else:
        M, L, A = empty_state(ROWS, DV)
        for s in range(it.split, it.split_end):
            m, l, a = attend_split(b, s, S)
            M, L, A = softmax.fold(M, L, A, m, l, a)
        softmax.write_rows(call, it, M, L, A, r, D_V)
