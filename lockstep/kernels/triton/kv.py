"""The cache's two writers on a GPU: this step's K and V rows of a layer, and relocations in all
layers at once.

`write_kernel` divides by the scale, clamps and rounds once, in float32; `move_kernel` gathers every
row of a column of bytes before it scatters one, so that a row may be both source and target. Called
by `write` and `move` below, which the pool on a GPU will use.
"""

import triton
import triton.language as tl

WRITE_RUNTIME = ("k_token", "k_head", "v_token", "v_head")
FP8_MAX = tl.constexpr(448.0)


@triton.jit
def encode(x, scale, FP8: tl.constexpr):
    """Values as they are stored: divided by the scale, clamped to the format's range; NaN stays
    NaN."""
    y = tl.div_rn(x.to(tl.float32), tl.zeros_like(x).to(tl.float32) + scale)
    if FP8:
        y = tl.minimum(
            tl.maximum(y, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL),
            FP8_MAX,
            propagate_nan=tl.PropagateNan.ALL,
        )
    return y


@triton.jit(do_not_specialize=WRITE_RUNTIME)
def write_kernel(
    k, v, k_cache, v_cache, slots, k_scale, v_scale, k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, D_QK: tl.constexpr, D_V: tl.constexpr, HAS_V: tl.constexpr,
    FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token per program: its rows of all kv heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(
        k + token * k_token + (i // D_QK) * k_head + i % D_QK, mask=i < KV_HEADS * D_QK, other=0.0
    )
    stored = encode(x, k_scale, FP8).to(k_cache.dtype.element_ty)
    tl.store(k_cache + slot * (KV_HEADS * D_QK) + i, stored, mask=i < KV_HEADS * D_QK)
    if HAS_V:
        x = tl.load(
            v + token * v_token + (i // D_V) * v_head + i % D_V, mask=i < KV_HEADS * D_V, other=0.0
        )
        stored = encode(x, v_scale, FP8).to(v_cache.dtype.element_ty)
        tl.store(v_cache + slot * (KV_HEADS * D_V) + i, stored, mask=i < KV_HEADS * D_V)


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
