"""Tokens and log-probabilities on the GPU, with the CPU's bits: the texts of
`kernels/cpu/sample.py` in Triton.

Scores are compared as integers, weights are integers in units of 2^-FRACTION, noise and logarithms
are single IEEE operations in float64 (`enable_fp_fusion=False`): sums and maxima have no order, so
a row is cut into parts as the device likes. What the CPU does in one pass over a row is here:
`peak` (largest score and state), `cut` (the rank of the last token that top-k and top-p keep, found
by halving), `noisy` (the best of a part), `pick`. Knows rows; knows nothing of requests. Called by
lockstep/sample.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.order import LN2 as ORDER_LN2
from lockstep.order import LOG2E as ORDER_LOG2E
from lockstep.sample import formulas as cpu
from lockstep.types import RuleError

FRACTION, ID_BITS, ID_MASK = (
    tl.constexpr(cpu.FRACTION),
    tl.constexpr(cpu.ID_BITS),
    tl.constexpr(cpu.ID_MASK),
)
OK, NAN, INFINITE, EMPTY = (
    tl.constexpr(cpu.OK),
    tl.constexpr(cpu.NAN),
    tl.constexpr(cpu.INFINITE),
    tl.constexpr(cpu.EMPTY),
)
KEY_INF, KEY_MINUS_INF = tl.constexpr(cpu.KEY_INF), tl.constexpr(cpu.KEY_MINUS_INF)
WORD, M0, M1, W0, W1 = (tl.constexpr(value) for value in (cpu.WORD, cpu.M0, cpu.M1, cpu.W0, cpu.W1))
ROUND, ROUND_BITS, SQRT_HALF = (
    tl.constexpr(cpu.ROUND),
    tl.constexpr(cpu.ROUND_BITS),
    tl.constexpr(cpu.SQRT_HALF),
)
E1, E2, E3, E4, E5, E6 = (
    tl.constexpr(value) for value in (cpu.E1, cpu.E2, cpu.E3, cpu.E4, cpu.E5, cpu.E6)
)
LOG2E, LN2, LOW = tl.constexpr(ORDER_LOG2E), tl.constexpr(ORDER_LN2), tl.constexpr(cpu.LOW)
LOWEST_KEY, FARTHEST = tl.constexpr(-0x7FFFFFFF), tl.constexpr(cpu.FARTHEST)
LAST_RANK = tl.constexpr((1 << (33 + cpu.ID_BITS)) - 1)  # no rank is above it
BLOCK = 1024  # tokens that a program looks at together
PARTS = 16  # programs of a row


# ---- formulas: those of the CPU ----


@triton.jit
def as_float(i):
    """An int64 below 2^51 in magnitude, exactly."""
    return (i + ROUND_BITS).to(tl.float64, bitcast=True) - ROUND


@triton.jit
def wide_float(i):
    """An int64 in [0, 2^63), rounded once."""
    return as_float(i >> 31) * 2147483648.0 + as_float(i & 0x7FFFFFFF)


@triton.jit
def ln(x):
    """ln of a positive normal float64."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - SQRT_HALF) >> 52
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * (1 / 15) + 1 / 13
    series = series * z + 1 / 11
    series = series * z + 1 / 9
    series = series * z + 1 / 7
    series = series * z + 1 / 5
    series = series * z + 1 / 3
    series = series * z + 1.0
    return as_float(exponent) * LN2 + s * 2.0 * series


@triton.jit
def gumbel(word):
    """-ln(-ln u), u = (word + 1/2) / 2^32."""
    u = (as_float(word) + 0.5) * 2.3283064365386963e-10
    return -ln(-ln(u))


@triton.jit
def weight(d):
    """exp(d) for d <= 0 in units of 2^-FRACTION, rounded to an integer; 0 below LOW, and for
    -inf."""
    t = d * LOG2E
    r = t + ROUND
    f = t - (r - ROUND)
    y = (((((f * E6 + E5) * f + E4) * f + E3) * f + E2) * f + E1) * f + 1.0
    power = ((r.to(tl.int64, bitcast=True) - ROUND_BITS + (1023 + FRACTION)) << 52).to(
        tl.float64, bitcast=True
    )
    return tl.where(d > LOW, (y * power + ROUND).to(tl.int64, bitcast=True) - ROUND_BITS, 0)


@triton.jit
def philox(c0, c1, c2, k0, k1):
    """Philox 4x32-10 of the counter (c0, c1, c2, 0) under the key (k0, k1): four words, as
    int64."""
    c3 = c0 * 0
    for _ in tl.static_range(10):
        p0 = c0 * M0
        p1 = c2 * M1
        c0 = ((p1 >> 32) & WORD) ^ c1 ^ k0
        c2 = ((p0 >> 32) & WORD) ^ c3 ^ k1
        c1 = p1 & WORD
        c3 = p0 & WORD
        k0 = (k0 + W0) & WORD
        k1 = (k1 + W1) & WORD
    return c0, c1, c2, c3


@triton.jit
def key_of(x):
    """A float32 as an int32 in the same order; -0 and 0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def score(x, temperature):
    """A logit under the temperature; 0 is greedy and leaves it."""
    return tl.where(
        temperature == 0.0,
        x,
        tl.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature) + tl.zeros_like(x)) + 0.0,
    )


# ---- rows ----


@triton.jit
def part_of(vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens [begin, end) of this program's part: whole blocks."""
    step = tl.cdiv(tl.cdiv(vocab, BLOCK), PARTS) * BLOCK
    begin = tl.program_id(1) * step
    return begin, tl.minimum(begin + step, vocab)


@triton.jit(do_not_specialize=["vocab"])
def peak_kernel(
    logits, floats, peaks, vocab, TEMPERED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest key of a part, and its largest magnitude as bits: peaks int32 [rows, PARTS,
    2]."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(floats + row * 3).to(tl.float32) if TEMPERED else 0.0
    begin, end = part_of(vocab, PARTS, BLOCK)
    top = tl.full([BLOCK], LOWEST_KEY, tl.int32)
    largest = tl.zeros([BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < end
        x = score(
            tl.load(logits + row * vocab + token, mask=inside, other=float("-inf")), temperature
        )
        top = tl.maximum(top, tl.where(inside, key_of(x), LOWEST_KEY))
        largest = tl.maximum(
            largest, tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        )
    at = peaks + (row * PARTS + tl.program_id(1)) * 2
    tl.store(at, tl.max(top, 0))
    tl.store(at + 1, tl.max(largest, 0))


@triton.jit
def peak_of(peaks, row, PARTS: tl.constexpr):
    """(largest key, state) of a row."""
    at = peaks + (row * PARTS + tl.arange(0, PARTS)) * 2
    top = tl.max(tl.load(at), 0)
    state = tl.where(top == KEY_INF, INFINITE, tl.where(top <= KEY_MINUS_INF, EMPTY, OK))
    return top, tl.where(tl.max(tl.load(at + 1), 0) > KEY_INF, NAN, state)


@triton.jit
def reach(logits, row, temperature, top_key, limit, vocab, BLOCK: tl.constexpr):
    """How many finite scores have a rank of at most `limit`, and their weights."""
    count = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    top = score_of(top_key).to(tl.float64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = score(
            tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")),
            temperature,
        )
        rank = ((top_key.to(tl.int64) - key_of(x).to(tl.int64)) << ID_BITS) | token
        near = (token < vocab) & (x > float("-inf")) & (rank <= limit)
        count += near.to(tl.int64)
        total += tl.where(near, weight(x.to(tl.float64) - top), 0)
    return tl.sum(count, 0), tl.sum(total, 0)


@triton.jit(do_not_specialize=["vocab"])
def cut_kernel(logits, floats, ints, peaks, last, vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The rank of the last token that top-k and then top-p keep, int64 [rows]: the least rank that
    reaches enough."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(floats + row * 3).to(tl.float32)
    top_p = tl.load(floats + row * 3 + 1)
    top_k = tl.load(ints + row * 5)
    top_key, state = peak_of(peaks, row, PARTS)
    found = tl.full([], FARTHEST, tl.int64)
    if (state == OK) & (temperature != 0.0) & ((top_k < vocab) | (top_p < 1.0)):
        count, total = reach(logits, row, temperature, top_key, FARTHEST, vocab, BLOCK)
        if top_k < count:
            low = tl.zeros([], tl.int64)
            high = low + LAST_RANK
            while low < high:
                middle = (low + high) >> 1
                count, _ = reach(logits, row, temperature, top_key, middle, vocab, BLOCK)
                high = tl.where(count >= top_k, middle, high)
                low = tl.where(count >= top_k, low, middle + 1)
            found = low
            _, total = reach(logits, row, temperature, top_key, found, vocab, BLOCK)
        if top_p < 1.0:
            wanted = tl.ceil(wide_float(total) * top_p).to(tl.int64)
            wanted = tl.maximum(tl.minimum(wanted, total), 1)
            low = tl.zeros([], tl.int64)
            high = low + LAST_RANK
            while low < high:
                middle = (low + high) >> 1
                _, sum_to = reach(logits, row, temperature, top_key, middle, vocab, BLOCK)
                high = tl.where(sum_to >= wanted, middle, high)
                low = tl.where(sum_to >= wanted, low, middle + 1)
            found = low
    tl.store(last + row, found)


@triton.jit(do_not_specialize=["vocab"])
def noisy_kernel(
    logits, floats, ints, peaks, last, best, vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The best of a part, score plus noise, lowest id among equals: best int64 [rows, PARTS], (key
    << ID_BITS) + ID_MASK - id."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(floats + row * 3).to(tl.float32)
    min_log = tl.where(temperature == 0.0, float("-inf"), tl.load(floats + row * 3 + 2))
    position = tl.load(ints + row * 5 + 1)
    index = tl.load(ints + row * 5 + 2)
    low = tl.load(ints + row * 5 + 3)
    high = tl.load(ints + row * 5 + 4)
    top_key, state = peak_of(peaks, row, PARTS)
    farthest = tl.load(last + row)
    top = score_of(top_key).to(tl.float64)
    found = tl.full([BLOCK // 4], -FARTHEST, tl.int64)
    begin, end = part_of(vocab, PARTS, BLOCK)
    if state == OK:
        for first in range(begin, end, BLOCK):
            group = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.int64)
            words = philox(group, group * 0 + position, group * 0 + index, low, high)
            for nth in tl.static_range(4):
                token = group * 4 + nth
                inside = token < end
                x = score(
                    tl.load(logits + row * vocab + token, mask=inside, other=float("-inf")),
                    temperature,
                )
                rank = ((top_key.to(tl.int64) - key_of(x).to(tl.int64)) << ID_BITS) | token
                kept = (
                    (rank <= farthest) & (x.to(tl.float64) - top >= min_log) & (x > float("-inf"))
                )
                noise = gumbel(words[nth]).to(tl.float32)
                y = tl.where(temperature == 0.0, x, x + noise)
                place = (key_of(y).to(tl.int64) << ID_BITS) + (ID_MASK - token)
                found = tl.maximum(found, tl.where(inside & kept, place, -FARTHEST))
    tl.store(best + row * PARTS + tl.program_id(1), tl.max(found, 0))


@triton.jit
def pick_kernel(peaks, best, tokens, states, PARTS: tl.constexpr):
    """tokens and states, int64 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    _, state = peak_of(peaks, row, PARTS)
    found = tl.max(tl.load(best + row * PARTS + tl.arange(0, PARTS)), 0)
    tl.store(tokens + row, tl.where(state == OK, ID_MASK - (found & ID_MASK), -1))
    tl.store(states + row, state.to(tl.int64))


@triton.jit(do_not_specialize=["vocab"])
def weigh_kernel(logits, peaks, sums, vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of a part, added: sums int64 [rows, PARTS]."""
    row = tl.program_id(0).to(tl.int64)
    top_key, state = peak_of(peaks, row, PARTS)
    total = tl.zeros([BLOCK], tl.int64)
    begin, end = part_of(vocab, PARTS, BLOCK)
    if state == OK:
        top = score_of(top_key).to(tl.float64)
        for first in range(begin, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            x = tl.load(logits + row * vocab + token, mask=token < end, other=float("-inf"))
            total += weight(x.to(tl.float64) - top)
    tl.store(sums + row * PARTS + tl.program_id(1), tl.sum(total, 0))


@triton.jit
def log_prob(x, top, log_sum):
    """ln of a token's probability, rounded once to float32."""
    return ((x.to(tl.float64) - top) - log_sum + 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["vocab", "few"])
def describe_kernel(
    logits,
    tokens,
    peaks,
    sums,
    chosen,
    top_ids,
    top_logs,
    vocab,
    few,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row's log-probabilities: of its token, and of the best few, each the least rank behind the
    one before."""
    row = tl.program_id(0).to(tl.int64)
    top_key, state = peak_of(peaks, row, PARTS)
    token = tl.load(tokens + row)
    if state == OK:
        top = score_of(top_key).to(tl.float64)
        total = tl.sum(tl.load(sums + row * PARTS + tl.arange(0, PARTS)), 0)
        log_sum = ln(wide_float(total) * 2.2737367544323206e-13)
        asked = tl.load(logits + row * vocab + tl.maximum(token, 0))
        tl.store(chosen + row, tl.where(token >= 0, log_prob(asked, top, log_sum), float("nan")))
        before = tl.full([], -1, tl.int64)
        for nth in range(0, few):
            least = tl.full([BLOCK], FARTHEST, tl.int64)
            for first in range(0, vocab, BLOCK):
                at = first + tl.arange(0, BLOCK)
                x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
                rank = ((top_key.to(tl.int64) - key_of(x).to(tl.int64)) << ID_BITS) | at
                least = tl.minimum(least, tl.where((at < vocab) & (rank > before), rank, FARTHEST))
            before = tl.min(least, 0)
            found = before & ID_MASK
            tl.store(top_ids + row * few + nth, found)
            tl.store(
                top_logs + row * few + nth,
                log_prob(tl.load(logits + row * vocab + found), top, log_sum),
            )
    else:
        tl.store(chosen + row, float("nan"))
        for nth in range(0, few):
            tl.store(top_ids + row * few + nth, tl.full([], -1, tl.int64))
            tl.store(top_logs + row * few + nth, float("nan"))


# ---- calls ----


def check_logits(logits: Tensor) -> None:
    """Contiguous float32 [rows, vocabulary]."""
    if (
        logits.dtype != torch.float32
        or logits.ndim != 2
        or not logits.is_contiguous()
        or not 1 <= logits.shape[1] <= cpu.MAX_VOCAB
    ):
        got = f"{logits.dtype} {tuple(logits.shape)}, strides {logits.stride()}"
        raise RuleError(
            f"logits are contiguous float32 [rows, V], V from 1 to {cpu.MAX_VOCAB}",
            got,
            "Pass them so",
        )


def choose_rows(logits: Tensor, floats: Tensor, ints: Tensor, cuts: bool) -> tuple[Tensor, Tensor]:
    """(tokens, states) int64 [rows] of logits float32 [rows, V]:
    `kernels.cpu.sample_rows.choose_rows`, bit for bit.

    floats float64 [rows, 3] temperature, top-p, ln of min-p; ints int64 [rows, 5] top-k, position,
    index, the words of the seed. `cuts`: some row has a top-k below V or a top-p below 1; where
    none has, that search is not launched.
    """
    check_logits(logits)
    (rows, vocab), device = logits.shape, logits.device
    peaks = torch.empty(rows, PARTS, 2, dtype=torch.int32, device=device)
    last = torch.full((rows,), cpu.FARTHEST, dtype=torch.int64, device=device)
    best = torch.empty(rows, PARTS, dtype=torch.int64, device=device)
    tokens, states = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    if rows:
        options = {"PARTS": PARTS, "BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": False}
        peak_kernel[(rows, PARTS)](logits, floats, peaks, vocab, TEMPERED=True, **options)
        if cuts:
            cut_kernel[(rows,)](logits, floats, ints, peaks, last, vocab, **options)
        noisy_kernel[(rows, PARTS)](logits, floats, ints, peaks, last, best, vocab, **options)
        pick_kernel[(rows,)](peaks, best, tokens, states, PARTS=PARTS, num_warps=1)
    return tokens, states


def describe_rows(logits: Tensor, token_ids: Tensor, few: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities float32 [rows] of token_ids int64 [rows] (-1: none), and of the best few:
    ids int64, logs float32 [rows, few]."""
    check_logits(logits)
    (rows, vocab), device = logits.shape, logits.device
    peaks = torch.empty(rows, PARTS, 2, dtype=torch.int32, device=device)
    sums = torch.empty(rows, PARTS, dtype=torch.int64, device=device)
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    top_ids = torch.empty(rows, few, dtype=torch.int64, device=device)
    top_logs = torch.empty(rows, few, dtype=torch.float32, device=device)
    if rows:
        options = {"PARTS": PARTS, "BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": False}
        peak_kernel[(rows, PARTS)](logits, chosen, peaks, vocab, TEMPERED=False, **options)
        weigh_kernel[(rows, PARTS)](logits, peaks, sums, vocab, **options)
        describe_kernel[(rows,)](
            logits, token_ids, peaks, sums, chosen, top_ids, top_logs, vocab, few, **options
        )
    return chosen, top_ids, top_logs
