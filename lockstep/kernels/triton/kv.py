"""The cache's two writers on a GPU: this step's K or V rows of a layer, and relocations in all
layers at once.

`write_kernel` divides by the scale, clamps and rounds once, in float32; `move_kernel` gathers every
row of a column of bytes before it scatters one, so that a row may be both source and target. Called
by `write` and `move` below, which the pool on a GPU will use.
"""

import triton
import triton.language as tl

WRITE_RUNTIME = ("x_token", "x_head")


@triton.jit
def encode(x, scale, LARGEST: tl.constexpr):
    """Values as they are stored: divided by the scale, clamped to the format's range; NaN stays
    NaN. An infinite value would be one for rows that do not see it: 0 times infinity is NaN."""
    y = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
    y = tl.maximum(y, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(y, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=WRITE_RUNTIME)
def write_kernel(
    x, cache, slots, scale, x_token, x_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token per program: its rows of all kv heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < KV_HEADS * D
    value = tl.load(x + token * x_token + (i // D) * x_head + i % D, mask=inside, other=0.0)
    stored = encode(value, scale, LARGEST).to(cache.dtype.element_ty)
    tl.store(cache + slot * (KV_HEADS * D) + i, stored, mask=inside)


@triton.jit(do_not_specialize=("count",))
def move_kernel(bases, row_words, moves, count, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """`count` rows of one storage and one run of WORDS 4-byte words per program: all are read
    before one is written."""
    storage = tl.program_id(0)
    words = tl.load(row_words + storage)
    base = tl.load(bases + storage).to(tl.pointer_type(tl.int32))
    column = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    row = tl.arange(0, ROWS)
    real = (row < count)[:, None] & (column < words)[None, :]
    source = tl.load(moves + 2 * row, mask=row < count, other=0).to(tl.int64)
    target = tl.load(moves + 2 * row + 1, mask=row < count, other=0).to(tl.int64)
    held = tl.load(base + source[:, None] * words + column[None, :], mask=real, other=0)
    tl.debug_barrier()  # gather all, then scatter all
    tl.store(base + target[:, None] * words + column[None, :], held, mask=real)
