"""Choosing a token on the CPU, and the formulas behind it: counter noise, exponentials as integers,
the natural logarithm.

The formulas use nothing but single IEEE operations and integer arithmetic, so that one text serves
numpy arrays, torch tensors of any device and the compiled scalars of this kernel, with the same
bits. Sums of exponentials are sums of integers: they have no order, and a row cannot depend on how
it was cut. The other texts handle one row each; threads take whole rows. Knows nothing of requests
or parameters. Called by lockstep/sample, which also has the same choice written with tensors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lockstep.order import LN2, LOG2E

MAX_VOCAB = 2**20  # weights of at most 2^FRACTION each: their sum stays below 2^63
FRACTION = 42
LOW = -64.0  # nats below the best: the weight is 0 from about -30 on
OK, NAN, INFINITE, EMPTY = 0, 1, 2, 3  # what became of a row
NO_TOKEN = -1

WORD = 0xFFFFFFFF
M0, M1, W0, W1, ROUNDS = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 10  # Philox 4x32-10
NOISE_MAX = np.float32(22.9)  # above the largest noise there is, 22.87 at u = 1 - 2^-33

ROUND = 1.5 * 2.0**52  # adding it to |x| < 2^51 leaves the nearest integer in the low bits
ROUND_BITS = int(np.float64(ROUND).view(np.int64))
SQRT_HALF = int(np.float64(0.5**0.5).view(np.int64))
# 2^f on [-0.5, 0.5], constant term exactly 1; minimax in relative error, 2e-9
E1, E2, E3 = 0.6931472028556734, 0.24022647913555967, 0.0555033246993315
E4, E5, E6 = 0.009618437361988022, 0.0013398874862412507, 0.00015353361740831734

ID_BITS, ID_MASK = 20, MAX_VOCAB - 1
BUCKETS, PER_NAT = (
    2048,
    np.float32(64),
)  # of the score's distance to the best; the last one holds all from 32 nats on
GROUPS = 64  # of four tokens: noise is made for 256 tokens at a time
FARTHEST = 2**63 - 1
KEY_INF, KEY_MINUS_INF = 0x7F800000, -0x7F800001
ZERO = np.float32(0)
MINUS_INF = np.float32(-np.inf)


# ---- formulas: for numpy arrays and scalars, torch tensors and, linked to COMPILED, compiled
# scalars ----


def bits_of(x: Any) -> Any:
    """A float64's bits as int64."""
    if isinstance(x, np.ndarray | np.generic):
        return x.view(np.int64)
    from torch import int64

    return x.view(int64)


def float_of(i: Any) -> Any:
    """The float64 with the bits of an int64."""
    if isinstance(i, np.ndarray | np.generic):
        return i.view(np.float64)
    from torch import float64

    return i.view(float64)


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Philox 4x32-10 (Salmon et al., 2011) of the counter (c0, c1, c2, c3) under the key (k0, k1):
    four words below 2^32, as int64.

    All are int64 in [0, 2^32), at least c0 and c2 arrays. A product wraps; its two halves are right
    all the same.
    """
    for _ in range(ROUNDS):
        p0, p1 = c0 * M0, c2 * M1
        c0, c1, c2, c3 = (
            (p1 >> 32) & WORD ^ c1 ^ k0,
            p1 & WORD,
            (p0 >> 32) & WORD ^ c3 ^ k1,
            p0 & WORD,
        )
        k0, k1 = (k0 + W0) & WORD, (k1 + W1) & WORD
    return c0, c1, c2, c3


def as_float(i: Any) -> Any:
    """An int64 below 2^51 in magnitude, exactly."""
    return float_of(i + ROUND_BITS) - ROUND


def wide_float(i: Any) -> Any:
    """An int64 in [0, 2^63), rounded once."""
    return as_float(i >> 31) * 2.0**31 + as_float(i & 0x7FFFFFFF)


def ln(x: Any) -> Any:
    """ln of a positive normal float64, to 1e-12: exponent plus an atanh series in s = (m - 1) / (m
    + 1), m in [0.71, 1.42)."""
    bits = bits_of(x)
    exponent = (bits - SQRT_HALF) >> 52
    m = float_of(bits - (exponent << 52))
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = (
        (((((z * (1 / 15) + 1 / 13) * z + 1 / 11) * z + 1 / 9) * z + 1 / 7) * z + 1 / 5) * z + 1 / 3
    ) * z + 1.0
    return as_float(exponent) * LN2 + s * 2.0 * series


def gumbel(word: Any) -> Any:
    """-ln(-ln u), u = (word + 1/2) / 2^32: strictly between 0 and 1, exact in float64, so the noise
    is finite at both ends."""
    return -ln(-ln((as_float(word) + 0.5) * 2.0**-32))


def weight(d: Any) -> Any:
    """exp(d) for d <= 0 in units of 2^-FRACTION, rounded to an integer; 0 below LOW, and for
    -inf."""
    t = d * LOG2E
    r = t + ROUND
    f = t - (r - ROUND)
    y = (((((f * E6 + E5) * f + E4) * f + E3) * f + E2) * f + E1) * f + 1.0
    power = float_of((bits_of(r) - ROUND_BITS + (1023 + FRACTION)) << 52)
    return (bits_of(y * power + ROUND) - ROUND_BITS) * (d > LOW)


# ---- one row, compiled ----


def key_of(x: Any) -> Any:
    """A float32 as an int32 in the same order; -0 and 0 are one."""
    bits = np.float32(x + ZERO).view(np.int32)
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


def rank(x: Any, i: Any, top_key: Any) -> Any:
    """Where token i with score x stands: smaller is better, by score and then by id."""
    return (np.int64(top_key) - np.int64(key_of(x))) << ID_BITS | np.int64(i)


def score_of(key: Any) -> Any:
    """The float32 of a key."""
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


def largest_key(x: Any) -> Any:
    """The key of the largest score."""
    top = np.int32(-0x7FFFFFFF)
    for i in range(len(x)):
        top = max(top, key_of(x[i]))
    return top


def largest_bits(x: Any) -> Any:
    """The largest magnitude, as bits: those of a NaN are above those of inf."""
    largest = np.int32(0)
    for i in range(len(x)):
        largest = max(largest, np.float32(x[i]).view(np.int32) & np.int32(0x7FFFFFFF))
    return largest


def peak(x: Any) -> Any:
    """(largest key, state) of a row of scores."""
    top = largest_key(x)
    if largest_bits(x) > KEY_INF:
        return top, NAN
    if top == KEY_INF:
        return top, INFINITE
    return top, EMPTY if top <= KEY_MINUS_INF else OK


def first_best(x: Any) -> Any:
    """(token, state): the largest score, the lowest id among equals."""
    top, state = peak(x)
    if state != OK:
        return NO_TOKEN, state
    for i in range(len(x)):
        if key_of(x[i]) == top:
            return i, OK
    return NO_TOKEN, EMPTY


def exponential(x: Any, top: Any) -> Any:
    """The integer weight of a score under the best one."""
    return weight(np.float64(x) - np.float64(top))


def denominator(x: Any, top: Any) -> Any:
    """The sum of the row's weights: integers, so there is no order in it."""
    total = np.int64(0)
    for i in range(len(x)):
        total += exponential(x[i], top)
    return total


def bucket(x: Any, top: Any) -> Any:
    """Which bucket a score falls into: one that is further from the best never comes in an earlier
    bucket."""
    d = (top - x) * PER_NAT
    return np.int64(d) if d < BUCKETS - 1 else np.int64(BUCKETS - 1)


def sink(heap: Any, i: Any, n: Any) -> None:
    """Restore the heap order of heap[:n], least first, below entry i."""
    value, child = heap[i], 2 * i + 1
    while child < n:
        if child + 1 < n and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[i] = heap[child]
        i, child = child, 2 * child + 1
    heap[i] = value


def pop(heap: Any, n: Any) -> Any:
    """Take the least of heap[:n]; heap[:n - 1] is left."""
    least, heap[0] = heap[0], heap[n - 1]
    sink(heap, 0, n - 1)
    return least


def members(x: Any, top: Any, which: Any, count: Any) -> Any:
    """A heap of the ranks of the `count` finite scores of a bucket."""
    heap, top_key, n = np.empty(count, np.int64), key_of(top), 0
    for i in range(len(x)):
        if x[i] > MINUS_INF and bucket(x[i], top) == which:
            heap[n] = rank(x[i], i, top_key)
            n += 1
    for i in range(n // 2 - 1, -1, -1):
        sink(heap, i, n)
    return heap


def histogram(x: Any, top: Any, counts: Any, sums: Any) -> None:
    """Add the number and the weights of the finite scores of every bucket."""
    for i in range(len(x)):
        if x[i] > MINUS_INF:
            b = bucket(x[i], top)
            counts[b] += 1
            sums[b] += exponential(x[i], top)


def last_kept(x: Any, top: Any, top_k: Any, top_p: Any) -> Any:
    """The rank of the last token that top-k and then top-p keep."""
    counts, sums = np.zeros(BUCKETS, np.int64), np.zeros(BUCKETS, np.int64)
    histogram(x, top, counts, sums)
    last, total, left, b = np.int64(FARTHEST), np.int64(0), np.int64(top_k), 0
    while b < BUCKETS and counts[b] < left:
        total += sums[b]
        left -= counts[b]
        b += 1
    if b < BUCKETS:  # the k-th best is the left-th best of bucket b
        heap = members(x, top, b, counts[b])
        for j in range(left):
            last = pop(heap, counts[b] - j)
            total += exponential(x[last & ID_MASK], top)
    if top_p >= 1:
        return last
    need, b = needed(total, top_p), 0
    while sums[b] < need:
        need -= sums[b]
        b += 1
    heap, j = members(x, top, b, counts[b]), 0
    while need > 0:
        last = pop(heap, counts[b] - j)
        need -= exponential(x[last & ID_MASK], top)
        j += 1
    return last


def needed(total: Any, top_p: Any) -> Any:
    """The weight that the kept tokens reach together: at least 1, so that one is kept."""
    return max(np.int64(1), min(total, np.int64(math.ceil(wide_float(total) * top_p))))


def cut(x: Any, top: Any, top_k: Any, top_p: Any, min_log: Any) -> None:
    """Put -inf where top-k, top-p or min-p do not keep a token."""
    if top_k < len(x) or top_p < 1:
        last, top_key = last_kept(x, top, top_k, top_p), key_of(top)
        for i in range(len(x)):
            if rank(x[i], i, top_key) > last:
                x[i] = MINUS_INF
    if min_log > MINUS_INF:
        for i in range(len(x)):
            if np.float64(x[i]) - np.float64(top) < min_log:
                x[i] = MINUS_INF


def block_noise(first: Any, counter: Any, words: Any, noise: Any) -> None:
    """noise[w * GROUPS + g] of token first + 4 g + w. `counter`: position, index, and the two words
    of the seed."""
    position, index, low, high = counter[0], counter[1], counter[2], counter[3]
    for g in range(GROUPS):
        w0, w1, w2, w3 = philox(np.int64(first // 4 + g), position, index, np.int64(0), low, high)
        words[g] = w0
        words[GROUPS + g] = w1
        words[2 * GROUPS + g] = w2
        words[3 * GROUPS + g] = w3
    for i in range(4 * GROUPS):
        noise[i] = gumbel(words[i])


def beaten(bound: Any, best: Any) -> Any:
    """Whether a block whose largest score is `bound` cannot hold a token as good as `best`,
    whatever its noise."""
    return bound == MINUS_INF or bound + NOISE_MAX < best


def noisy_best(x: Any, counter: Any) -> Any:
    """The token with the largest score plus noise, the lowest id among equals. A block that cannot
    win is not looked at."""
    words, noise = np.empty(4 * GROUPS, np.int64), np.empty(4 * GROUPS, np.float32)
    best, token = MINUS_INF, NO_TOKEN
    for first in range(0, len(x), 4 * GROUPS):
        part = x[first : first + 4 * GROUPS]
        bound = score_of(largest_key(part))
        if beaten(bound, best):
            continue
        block_noise(first, counter, words, noise)
        for i in range(len(part)):
            y = np.float32(part[i] + noise[i % 4 * GROUPS + i // 4])
            if y > best:
                best, token = y, first + i
    return token


def choose(x: Any, scratch: Any, floats: Any, ints: Any) -> Any:
    """(token, state) of a row. floats: temperature, top-p, ln of min-p. ints: top-k, then the
    counter."""
    if floats[0] == 0:
        return first_best(x)
    temperature = np.float32(floats[0])
    for i in range(len(x)):
        scratch[i] = np.float32(x[i] / temperature) + ZERO
    top_key, state = peak(scratch)
    if state != OK:
        return NO_TOKEN, state
    cut(scratch, score_of(top_key), ints[0], floats[1], floats[2])
    return noisy_best(scratch, ints[1:]), OK


def log_prob(x: Any, top: Any, log_sum: Any) -> Any:
    """ln of a token's probability, rounded once to float32; of a certain one 0, never -0."""
    return np.float32((np.float64(x) - np.float64(top)) - log_sum + 0.0)


def best_few(x: Any, top_key: Any, ranks: Any) -> None:
    """The len(ranks) smallest ranks of a row, ascending."""
    ranks[:] = FARTHEST
    k = len(ranks)
    for i in range(len(x)):
        mine = rank(x[i], i, top_key)
        if mine < ranks[k - 1]:
            j = k - 1
            while j > 0 and ranks[j - 1] > mine:
                ranks[j] = ranks[j - 1]
                j -= 1
            ranks[j] = mine


def describe(x: Any, token: Any, chosen: Any, top_ids: Any, top_logs: Any) -> None:
    """ln of the probability of `token` into chosen[0], and the best few tokens with theirs. NaN and
    no token for a row without any."""
    chosen[0], top_logs[:], top_ids[:] = np.nan, np.nan, NO_TOKEN
    top_key, state = peak(x)
    if state != OK:
        return
    top = score_of(top_key)
    log_sum = ln(wide_float(denominator(x, top)) * 2.0**-FRACTION)
    if token >= 0:
        chosen[0] = log_prob(x[token], top, log_sum)
    if len(top_ids):
        best_few(x, top_key, top_ids)
        for j in range(len(top_ids)):
            top_ids[j] &= ID_MASK
            top_logs[j] = log_prob(x[top_ids[j]], top, log_sum)
