"""Attention over paged keys for any number of rows and every feature, in plain Triton: what CI
interprets, the twin of the warp-specialised kernels. A program does one item of a block; the last
of a block's parts to arrive folds them in ascending order. Called by `launch.py`."""

import triton
import triton.language as tl

from lockstep.kernels.triton.softmax import finish, fold, weigh

ITEM = 12  # int32 per item
PAGE_ENTRY, ROW_BEGIN, ROW_END, LO, HI, SPLIT, SPLIT_END, PART_ROW, NTH, PARTS, COUNTER, TAIL = (
    range(ITEM)
)
RUNTIME = (
    "heads", "kv_heads", "window", "causal", "page_size", "page_mul", "page_shift",
    "count0", "len0", "count1", "len1", "len2",
    "q_token8", "q_head8", "k_slot8", "k_head8", "v_slot8", "v_head8",
)  # fmt: skip


@triton.jit
def split_begin(s, splits):
    """First position of split s: count0 splits of len0, count1 of len1, then len2 each."""
    count0, len0, count1, len1, len2 = splits
    a = tl.minimum(s, count0)
    b = tl.minimum(tl.maximum(s - count0, 0), count1)
    return a * len0 + b * len1 + tl.maximum(s - count0 - count1, 0) * len2


@triton.jit
def paged(pages, p, mask):
    """Slots of positions p. `mul`, `shift`: the division by the page size, as a product that is
    exact below 2**31."""
    page_ids, entry, page_size, page_mul, page_shift = pages
    twice = (p * 2).to(tl.uint32, bitcast=True)
    nth = (tl.umulhi(twice, page_mul.to(tl.uint32)) >> page_shift).to(tl.int32, bitcast=True)
    page = tl.load(page_ids + (entry + nth), mask=mask, other=0)
    return page * page_size + (p - nth * page_size)


@triton.jit
def rows_at(base, at, first, mask, width, COLUMNS: tl.constexpr):
    """Columns [first, first + COLUMNS) of rows that begin at offsets `at`; zeros where masked and
    from column `width` on."""
    d = first + tl.arange(0, COLUMNS)
    return tl.load(
        base + at[:, None] + d[None, :], mask=mask[:, None] & (d < width)[None, :], other=0.0
    )


@triton.jit
def scores(q, q2, k, at, mask, D_QK: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr):
    """Dot products with the keys at offsets `at`; also their first DA columns, which are a latent
    row's values."""
    ka = rows_at(k, at, 0, mask, D_QK, DA).to(q.dtype)
    x = tl.dot(q, tl.trans(ka))
    if DB > 0:
        x = tl.dot(q2, tl.trans(rows_at(k, at, DA, mask, D_QK, DB).to(q.dtype)), x)
    return x, ka


@triton.jit
def listed_slots(token, kp, lo_all, pages, tree):
    """Slots of positions kp for one token of a tree, and which of them it sees."""
    positions, start, tail_indptr, tail_slots = tree
    first = tl.load(start + token)
    mask = (kp >= lo_all) & (kp <= tl.load(positions + token))
    slot = paged(pages, kp, mask & (kp < first))
    tail = tail_slots + tl.load(tail_indptr + token) + kp - first
    listed = tl.load(tail, mask=mask & (kp >= first), other=0)
    return tl.where(kp < first, slot, listed).to(tl.int64), mask


@triton.jit
def tree_tile(
    q, q2, k, v, m, l, a, p, lo, hi, lo_all, block, pages, tree, strides, c, pre,
    D_QK: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, D_V: tl.constexpr, DV: tl.constexpr,
    CAP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile that holds listed positions: token by token, each with its own keys, into the same
    tile as the committed ones."""
    row_begin, row_end, group = block
    k_slot, k_head, v_slot, v_head = strides
    own = (row_begin + tl.arange(0, ROWS)) // group
    kp = p + tl.arange(0, TILE)
    x = tl.zeros([ROWS, TILE], tl.float32)
    for token in tl.range(row_begin // group, (row_end - 1) // group + 1, num_stages=1):
        slot, mask = listed_slots(token, kp, lo_all, pages, tree)
        y, _ = scores(q, q2, k, slot * k_slot + k_head, mask, D_QK, DA, DB)
        x = tl.where((own == token)[:, None], y, x)
    seen = (kp[None, :] >= lo[:, None]) & (kp[None, :] < hi[:, None])
    w, alpha, m, l = weigh(x, seen, m, l, c, pre, CAP, ROWS, TILE)
    a = a * alpha[:, None]
    before = a
    for token in tl.range(row_begin // group, (row_end - 1) // group + 1, num_stages=1):
        slot, mask = listed_slots(token, kp, lo_all, pages, tree)
        vt = rows_at(v, slot * v_slot + v_head, 0, mask, D_V, DV).to(q.dtype)
        a = tl.where((own == token)[:, None], tl.dot(w.to(q.dtype), vt, before), a)
    return m, l, a


@triton.jit
def attend_split(
    q, q2, k, v, lo, hi, lo_all, hi_all, begin, end, tail, block, pages, tree, strides, c, pre,
    D_QK: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, D_V: tl.constexpr, DV: tl.constexpr,
    LATENT: tl.constexpr, CAP: tl.constexpr, TREE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tiles of one split, ascending, from a fresh state. Returns its
    maximum in log2 units, sum and values."""
    k_slot, k_head, v_slot, v_head = strides
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    a = tl.zeros([ROWS, DV], tl.float32)
    begin = tl.maximum(begin, lo_all // TILE * TILE)
    end = tl.minimum(end, hi_all)
    plain_end = end
    if TREE:
        plain_end = tl.maximum(begin, tl.minimum(end, tail // TILE * TILE))
    for p in range(begin, plain_end, TILE):
        kp = p + tl.arange(0, TILE)
        mask = (kp >= lo_all) & (kp < hi_all)
        slot = paged(pages, kp, mask).to(tl.int64)
        x, ka = scores(q, q2, k, slot * k_slot + k_head, mask, D_QK, DA, DB)
        seen = (kp[None, :] >= lo[:, None]) & (kp[None, :] < hi[:, None])
        w, alpha, m, l = weigh(x, seen, m, l, c, pre, CAP, ROWS, TILE)
        vt = ka
        if not LATENT:
            vt = rows_at(v, slot * v_slot + v_head, 0, mask, D_V, DV).to(q.dtype)
        a = tl.dot(w.to(q.dtype), vt, a * alpha[:, None])
    if TREE:
        for p in tl.range(plain_end, end, TILE, num_stages=1):
            m, l, a = tree_tile(
                q, q2, k, v, m, l, a, p, lo, hi, lo_all, block, pages, tree, strides, c, pre,
                D_QK, DA, DB, D_V, DV, CAP, ROWS, TILE,
            )  # fmt: skip
    return tl.fma(m, c, 0.0), l, a


@triton.jit
def write_rows(
    to, M, L, A, row_begin, r, real, group, kv_head, D_V: tl.constexpr, DV: tl.constexpr
):
    """Rows r of a block: sink, division, one rounding, store."""
    out, lse, sinks2, heads, v_scale = to
    f = row_begin + r
    head = kv_head * group + f % group
    sink2 = tl.load(sinks2 + head, mask=real, other=float("-inf"))
    y, ln = finish(M, L, A, sink2, v_scale)
    e = tl.arange(0, DV)
    at = (f // group).to(tl.int64) * heads + head
    mask = real[:, None] & (e < D_V)[None, :]
    tl.store(out + at[:, None] * D_V + e[None, :], y.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + at, ln, mask=real)


@triton.jit
def fold_parts(
    to, part_ml, part_acc, part, rows, parts, row_begin, group, kv_head,
    D_V: tl.constexpr, DV: tl.constexpr, FOLD_ROWS: tl.constexpr, FOLD_DEPTH: tl.constexpr,
):  # fmt: skip
    """The parts of a block, folded in ascending order. FOLD_DEPTH parts are fetched at a time; one
    past the end adds nothing."""
    e = tl.arange(0, DV)
    for row in range(0, rows, FOLD_ROWS):
        r = row + tl.arange(0, FOLD_ROWS)
        real = r < rows
        M = tl.full([FOLD_ROWS], float("-inf"), tl.float32)
        L = tl.zeros([FOLD_ROWS], tl.float32)
        A = tl.zeros([FOLD_ROWS, DV], tl.float32)
        for nth in range(0, parts, FOLD_DEPTH):
            for i in tl.static_range(FOLD_DEPTH):
                at = (part + (nth + i) * rows + r).to(tl.int64)
                mask = real & (nth + i < parts)
                ml = part_ml + 2 * at
                m = tl.load(ml, mask=mask, other=float("-inf"), cache_modifier=".cg")
                l = tl.load(ml + 1, mask=mask, other=0.0, cache_modifier=".cg")
                acc = part_acc + at[:, None] * DV + e[None, :]
                a = tl.load(acc, mask=mask[:, None], other=0.0, cache_modifier=".cg")
                M, L, A = fold(M, L, A, m, l, a)
        write_rows(to, M, L, A, row_begin, r, real, group, kv_head, D_V, DV)


@triton.jit
def arrive(
    to, item, m, l, a, part_ml, part_acc, counters, real, block, kv_head, kv_heads,
    D_V: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    FOLD_ROWS: tl.constexpr, FOLD_DEPTH: tl.constexpr,
):  # fmt: skip
    """One split's state into the scratch; the last of the block to arrive folds all parts."""
    row_begin, row_end, group = block
    rows, parts = row_end - row_begin, tl.load(item + 9)
    part = tl.load(item + 7) * kv_heads + kv_head * parts * rows
    at = (part + tl.load(item + 8) * rows + tl.arange(0, ROWS)).to(tl.int64)
    tl.store(part_ml + 2 * at, m, mask=real)
    tl.store(part_ml + 2 * at + 1, l, mask=real)
    tl.store(part_acc + at[:, None] * DV + tl.arange(0, DV)[None, :], a, mask=real[:, None])
    tl.debug_barrier()  # every thread's part is written before one of them says so
    counter = counters + tl.load(item + 10) * kv_heads + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(counter, 0)  # ready for the next launch
        fold_parts(
            to, part_ml, part_acc, part, rows, parts, row_begin, group, kv_head,
            D_V, DV, FOLD_ROWS, FOLD_DEPTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
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
    item = items + (tl.program_id(0) // kv_heads) * 12
    row_begin, row_end = tl.load(item + 1), tl.load(item + 2)
    if row_begin >= row_end:  # padding of the item list
        return
    lo_all, hi_all, split, tail = (
        tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 11),
    )  # fmt: skip
    group = heads // kv_heads
    r = tl.arange(0, ROWS)
    token = (row_begin + r) // group
    real = row_begin + r < row_end
    hi = tl.where(causal != 0, tl.load(positions + token, mask=real, other=-1) + 1, hi_all)
    hi = tl.where(real, hi, 0)
    lo = tl.maximum(hi - window, 0)
    head = kv_head * group + (row_begin + r) % group
    at = token.to(tl.int64) * (q_token8 * 8) + head * (q_head8 * 8)
    qa = rows_at(q, at, 0, real, D_QK, DA)
    qb = qa
    if DB > 0:
        qb = rows_at(q, at, DA, real, D_QK, DB)
    block = (row_begin, row_end, group)
    splits = (count0, len0, count1, len1, len2)
    pages = (page_ids, tl.load(item), page_size, page_mul, page_shift)
    tree = (positions, start, tail_indptr, tail_slots)
    k_head, v_head = kv_head.to(tl.int64) * (k_head8 * 8), kv_head.to(tl.int64) * (v_head8 * 8)
    strides = (k_slot8.to(tl.int64) * 8, k_head, v_slot8.to(tl.int64) * 8, v_head)
    to = (out, lse, sinks2, heads, v_scale)
    if PART:
        m, l, a = attend_split(
            qa, qb, k, v, lo, hi, lo_all, hi_all, split_begin(split, splits),
            split_begin(split + 1, splits), tail, block, pages, tree, strides, c, pre,
            D_QK, DA, DB, D_V, DV, LATENT, CAP, TREE, ROWS, TILE,
        )  # fmt: skip
        arrive(
            to, item, m, l, a, part_ml, part_acc, counters, real, block, kv_head, kv_heads,
            D_V, DV, ROWS, FOLD_ROWS, FOLD_DEPTH,
        )  # fmt: skip
    else:
        M = tl.full([ROWS], float("-inf"), tl.float32)
        L = tl.zeros([ROWS], tl.float32)
        A = tl.zeros([ROWS, DV], tl.float32)
        for s in range(split, tl.load(item + 6)):
            m, l, a = attend_split(
                qa, qb, k, v, lo, hi, lo_all, hi_all, split_begin(s, splits),
                split_begin(s + 1, splits), tail, block, pages, tree, strides, c, pre,
                D_QK, DA, DB, D_V, DV, LATENT, CAP, TREE, ROWS, TILE,
            )  # fmt: skip
            M, L, A = fold(M, L, A, m, l, a)
        write_rows(to, M, L, A, row_begin, r, real, group, kv_head, D_V, DV)
