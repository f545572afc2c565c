"""Samples tokens and computes log-probabilities on the GPU with the CPU's bits, by the formulas of
`sample/formulas.py`. Scores are compared as integers, weights are integers in units of 2^-FRACTION,
noise and logarithms are single IEEE operations in float64: sums and maxima have no order, so a row
is divided among PARTS programs. Called through the table of operations (`lockstep/ops.py`). A row's
numbers: `floats` are temperature, top-p, ln of min-p; `ints` are top-k, position, index, and two
words of the seed."""

from types import FunctionType

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.triton.gemm import require
from lockstep.sample import formulas as cpu

ID_BITS, ID_MASK, FARTHEST = map(tl.constexpr, (cpu.ID_BITS, cpu.ID_MASK, cpu.FARTHEST))
OK, NAN, INFINITE, EMPTY = map(tl.constexpr, (cpu.OK, cpu.NAN, cpu.INFINITE, cpu.EMPTY))
KEY_INF, KEY_MINUS_INF = tl.constexpr(cpu.KEY_INF), tl.constexpr(cpu.KEY_MINUS_INF)
KEY_NAN = tl.constexpr(0x7FFFFFFF)  # the key of every NaN, above all other keys
DIGIT, BINS = tl.constexpr(11), tl.constexpr(1 << 11)  # bits of a digit of a rank, and its values
SHIFTS = (44, 33, 22, 11, 0)  # of the digits of a rank, which has 33 + ID_BITS bits
PARTS = tl.constexpr(64)  # programs per row
BLOCK = tl.constexpr(1024)  # tokens that a program processes at a time
WIDE_BLOCK = tl.constexpr(4096)  # the same, in a program that processes a whole row
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


# ---- formulas, shared with other devices ----


@triton.jit
def bits_of(x):
    """Returns a float64's bits as int64."""
    return x.to(tl.int64, bitcast=True)


@triton.jit
def float_of(i):
    """Returns the float64 with the bits of an int64."""
    return i.to(tl.float64, bitcast=True)


SCOPE = {k: tl.constexpr(v) for k, v in vars(cpu).items() if isinstance(v, int | float)}
SCOPE |= {"__name__": __name__, "tl": tl, "Any": tl.tensor}  # `Any` is in annotations
SCOPE |= {"bits_of": bits_of, "float_of": float_of}
for fn in (cpu.as_float, cpu.wide_float, cpu.ln, cpu.gumbel, cpu.weight):  # callees first
    SCOPE[fn.__name__] = triton.jit(FunctionType(fn.__code__, SCOPE))
wide_float, ln, gumbel, weight = (SCOPE[name] for name in ("wide_float", "ln", "gumbel", "weight"))


@triton.jit
def rough_gumbel(word):
    """Approximates `gumbel` in float32 to 0.001; near u = 1, -ln u is a series in q = 1 - u."""
    q = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = q * (0.5 + q * (1 / 3 + q * (0.25 + q * (0.2 + q * (1 / 6)))))
    t = tl.where(q < 0.25, q * (1.0 + series), tl.log2(u) * -0.6931471805599453)
    return tl.log2(t) * -0.6931471805599453


@triton.jit
def words_of(group, position, index, low, high):
    """Returns the random words of tokens 4 * group to 4 * group + 3: Philox 4x32-10 on uint32."""
    group = group.to(tl.uint32)
    zero = group * 0
    return tl.philox_impl(group, zero + position, zero + index, zero, low, high)


@triton.jit
def key_of(x):
    """Returns a float32 as an int32 in the same order; -0 and 0 have one key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """Returns the float32 with a given key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_scores(logits, row, token, inside, vocab, temperature):
    """Loads logits / temperature, or plain logits at temperature 0 (greedy); -inf outside."""
    at = logits + row * vocab + token
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return tl.where(temperature == 0.0, x, tl.div_rn(x, divisor + tl.zeros_like(x)) + 0.0)


@triton.jit
def rank_of(top_key, x, token):
    """Returns ranks int64: smaller is better, by score, then by id."""
    return ((top_key.to(tl.int64) - key_of(x).to(tl.int64)) << ID_BITS) | token


# ---- rows ----


@triton.jit
def part_of(vocab):
    """Returns the tokens [begin, end) of this program's part; parts begin at whole blocks."""
    step = tl.cdiv(tl.cdiv(vocab, BLOCK), PARTS) * BLOCK
    begin = tl.program_id(1) * step
    return begin, tl.minimum(begin + step, vocab)


@triton.jit(do_not_specialize=["vocab"])
def peak_kernel(logits, floats, peaks, vocab):
    """Writes a part's largest key, of scores / temperature if `floats` is given, to `peaks`."""
    row = tl.program_id(0).to(tl.int64)
    temperature = 0.0
    if floats is not None:
        temperature = tl.load(floats + row * 3).to(tl.float32)
    begin, end = part_of(vocab)
    top = tl.full([BLOCK], KEY_MINUS_INF, tl.int32)
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = load_scores(logits, row, token, token < end, vocab, temperature)
        top = tl.maximum(top, tl.where(x == x, key_of(x), KEY_NAN))
    tl.store(peaks + row * PARTS + tl.program_id(1), tl.max(top, 0))


@triton.jit
def peak_of(peaks, row):
    """Returns (largest key, state) of a row."""
    top = tl.max(tl.load(peaks + row * PARTS + tl.arange(0, PARTS)), 0)
    state = tl.where(top == KEY_INF, INFINITE, tl.where(top == KEY_MINUS_INF, EMPTY, OK))
    return top, tl.where(top == KEY_NAN, NAN, state)


@triton.jit(do_not_specialize=["vocab", "shift"])
def bin_kernel(logits, floats, ints, peaks, search, last, bins, vocab, shift,
               WEIGH: tl.constexpr):  # fmt: skip
    """Adds up in bins int64 [rows, BINS], by the rank's next digit, the tokens (rows with a top-k)
    or weights (top-p) whose higher digits are those found; integers, so atomics need no order."""
    row = tl.program_id(0).to(tl.int64)
    prefix, farthest = tl.load(search + row * 2), tl.load(last + row)
    temperature = tl.load(floats + row * 3).to(tl.float32)
    top_key, state = peak_of(peaks, row)
    if WEIGH:
        has_cut = tl.load(floats + row * 3 + 1) < 1.0
    else:
        has_cut = tl.load(ints + row * 5) < vocab
    if has_cut & (prefix >= 0) & (state == OK) & (temperature != 0.0):
        top = score_of(top_key).to(tl.float64)
        begin, end = part_of(vocab)
        for first in range(begin, end, BLOCK):
            token = first + tl.arange(0, BLOCK)
            x = load_scores(logits, row, token, token < end, vocab, temperature)
            rank = rank_of(top_key, x, token)
            near = (x > float("-inf")) & (rank <= farthest) & ((rank >> shift >> DIGIT) == prefix)
            at = bins + row * BINS + ((rank >> shift) & (BINS - 1))
            if WEIGH:
                amount = weight(x.to(tl.float64) - top)
            else:
                amount = near.to(tl.int64)
            tl.atomic_add(at, amount, mask=near, sem="relaxed")


@triton.jit(do_not_specialize=["shift"])
def digit_kernel(floats, ints, search, last, bins, shift, FIRST: tl.constexpr, WEIGH: tl.constexpr):
    """Finds the digit at which the bins' running sum reaches what is wanted; after the last digit
    writes the rank of the last token kept to `last`. search int64 [rows, 2]: digits found so far,
    or -1 if all tokens are kept; count or weight still wanted under them. Clears the bins."""
    row = tl.program_id(0).to(tl.int64)
    prefix = tl.load(search + row * 2)
    if prefix >= 0:
        bin = tl.arange(0, BINS)
        amount = tl.load(bins + row * BINS + bin)
        tl.store(bins + row * BINS + bin, tl.zeros_like(amount))
        if FIRST and WEIGH:
            total = tl.sum(amount, 0)
            wanted = tl.ceil(wide_float(total) * tl.load(floats + row * 3 + 1)).to(tl.int64)
            wanted = tl.maximum(tl.minimum(wanted, total), 1)
        elif FIRST:
            wanted = tl.load(ints + row * 5)
        else:
            wanted = tl.load(search + row * 2 + 1)
        digit = tl.sum((tl.cumsum(amount, 0) < wanted).to(tl.int64), 0)
        is_short = digit == BINS  # no cut, or fewer tokens than top-k: all tokens are kept
        prefix = tl.where(is_short, -1, (prefix << DIGIT) | digit)
        tl.store(search + row * 2, prefix)
        tl.store(search + row * 2 + 1, wanted - tl.sum(tl.where(bin < digit, amount, 0), 0))
        if (shift == 0) & (prefix >= 0):
            tl.store(last + row, prefix)


@triton.jit
def kept(x, token, top_key, min_log, farthest):
    """Returns scores, -inf where min-p or the cuts remove a token."""
    near = x.to(tl.float64) - score_of(top_key).to(tl.float64) >= min_log
    return tl.where(near & (rank_of(top_key, x, token) <= farthest), x, float("-inf"))


@triton.jit
def noisy_key(x, word, token, temperature):
    """Returns score plus noise, then lower ids first, as one integer to maximise."""
    noise = gumbel(word.to(tl.int64)).to(tl.float32)
    y = tl.where(temperature == 0.0, x, x + noise)
    return (key_of(y).to(tl.int64) << ID_BITS) + (ID_MASK - token)


@triton.jit(do_not_specialize=["vocab"])
def noisy_kernel(logits, floats, ints, peaks, last, best, vocab):
    """Writes the best token of a part by score plus noise, lowest id among equals, to best int64
    [rows, PARTS], as (key << ID_BITS) + ID_MASK - id. Noise is approximated first: if one token
    leads by more than the error only its noise is computed exactly, otherwise that of all."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(floats + row * 3).to(tl.float32)
    min_log = tl.where(temperature == 0.0, float("-inf"), tl.load(floats + row * 3 + 2))
    position = tl.load(ints + row * 5 + 1).to(tl.uint32)
    index = tl.load(ints + row * 5 + 2).to(tl.uint32)
    low = tl.load(ints + row * 5 + 3).to(tl.uint32)
    high = tl.load(ints + row * 5 + 4).to(tl.uint32)
    top_key, state = peak_of(peaks, row)
    # a greedy row is not cut, whatever its top-k: that of a padding row is 0
    farthest = tl.where(temperature == 0.0, FARTHEST, tl.load(last + row))
    found = tl.full([], -FARTHEST, tl.int64)
    begin, end = part_of(vocab)
    if state == OK:
        first_y = tl.full([BLOCK // 4], float("-inf"), tl.float32)
        first_token = tl.zeros([BLOCK // 4], tl.int64)
        second_y = first_y
        factor = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)  # approximate, too
        has_cuts = (farthest < FARTHEST) | (min_log > float("-inf")) | (factor > 1e30)
        for first in range(begin, end, BLOCK):
            group = first // 4 + tl.arange(0, BLOCK // 4)
            words = words_of(group, position, index, low, high)
            for nth in tl.static_range(4):
                token = group.to(tl.int64) * 4 + nth
                if has_cuts:
                    x = load_scores(logits, row, token, token < end, vocab, temperature)
                    x = kept(x, token, top_key, min_log, farthest)
                else:
                    at = logits + row * vocab + token
                    x = tl.load(at, mask=token < end, other=float("-inf")).to(tl.float32) * factor
                y = tl.where(temperature == 0.0, x, x + rough_gumbel(words[nth]))
                better = y > first_y
                second_y = tl.maximum(second_y, tl.where(better, first_y, y))
                first_token = tl.where(better, token, first_token)
                first_y = tl.where(better, y, first_y)
        top_y = tl.max(first_y, 0)
        least = top_y - (0.01 + tl.abs(top_y) * 4e-6)
        rivals = (first_y >= least).to(tl.int32) + (second_y >= least).to(tl.int32)
        if tl.sum(rivals, 0) == 1:
            token = tl.max(tl.where(first_y == top_y, first_token, 0), 0)
            a, b, c, d = words_of(token // 4, position, index, low, high)
            nth = token % 4
            word = tl.where(nth == 0, a, tl.where(nth == 1, b, tl.where(nth == 2, c, d)))
            x = load_scores(logits, row, token, token < end, vocab, temperature)
            found = noisy_key(x, word, token, temperature)
        else:
            for first in range(begin, end, BLOCK):
                group = first // 4 + tl.arange(0, BLOCK // 4)
                words = words_of(group, position, index, low, high)
                for nth in tl.static_range(4):
                    token = group.to(tl.int64) * 4 + nth
                    x = load_scores(logits, row, token, token < end, vocab, temperature)
                    x = kept(x, token, top_key, min_log, farthest)
                    key = noisy_key(x, words[nth], token, temperature)
                    key = tl.where(x > float("-inf"), key, -FARTHEST)
                    found = tl.maximum(found, tl.max(key, 0))
    tl.store(best + row * PARTS + tl.program_id(1), found)


@triton.jit
def pick_kernel(peaks, best, tokens, states):
    """Writes tokens and states, int64 [rows], from the best of all parts."""
    row = tl.program_id(0).to(tl.int64)
    _, state = peak_of(peaks, row)
    found = tl.max(tl.load(best + row * PARTS + tl.arange(0, PARTS)), 0)
    tl.store(tokens + row, tl.where(state == OK, ID_MASK - (found & ID_MASK), -1))
    tl.store(states + row, state.to(tl.int64))


@triton.jit(do_not_specialize=["vocab"])
def weigh_kernel(logits, peaks, sums, vocab):
    """Writes the sum of a part's weights to sums int64 [rows, PARTS]."""
    row = tl.program_id(0).to(tl.int64)
    top_key, _ = peak_of(peaks, row)
    top = score_of(top_key).to(tl.float64)
    total = tl.zeros([BLOCK], tl.int64)
    begin, end = part_of(vocab)
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + token, mask=token < end, other=float("-inf"))
        total += weight(x.to(tl.float64) - top)
    tl.store(sums + row * PARTS + tl.program_id(1), tl.sum(total, 0))


@triton.jit
def log_prob(x, top, log_sum):
    """Returns ln of a token's probability, rounded once to float32."""
    return ((x.to(tl.float64) - top) - log_sum + 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["vocab", "few"])
def describe_kernel(logits, tokens, peaks, sums, chosen, top_ids, top_logs, vocab, few):
    """Writes a row's log-probabilities: of its token and of the `few` best, found one by one as the
    next larger rank. NaN and NO_TOKEN for a row without a valid maximum."""
    row = tl.program_id(0).to(tl.int64)
    top_key, state = peak_of(peaks, row)
    token = tl.load(tokens + row)
    top = tl.where(state == OK, score_of(top_key), float("nan")).to(tl.float64)  # and so all logs
    total = tl.sum(tl.load(sums + row * PARTS + tl.arange(0, PARTS)), 0)
    log_sum = ln(wide_float(total) * 2.2737367544323206e-13)
    asked = tl.load(logits + row * vocab + tl.maximum(token, 0))
    tl.store(chosen + row, tl.where(token >= 0, log_prob(asked, top, log_sum), float("nan")))
    before = tl.full([], -1, tl.int64)
    for nth in range(0, few):
        least = tl.full([WIDE_BLOCK], FARTHEST, tl.int64)
        for first in range(0, vocab, WIDE_BLOCK):
            at = first + tl.arange(0, WIDE_BLOCK)
            x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf"))
            rank = rank_of(top_key, x, at)
            least = tl.minimum(least, tl.where((at < vocab) & (rank > before), rank, FARTHEST))
        before = tl.min(least, 0)
        found = before & ID_MASK
        tl.store(top_ids + row * few + nth, tl.where(state == OK, found, -1))
        value = log_prob(tl.load(logits + row * vocab + found), top, log_sum)
        tl.store(top_logs + row * few + nth, value)


# ---- calls ----


def sample_tokens(
    logits: Tensor, floats: Tensor, ints: Tensor, cuts: bool
) -> tuple[Tensor, Tensor]:
    """Returns tokens and states. `cuts`: some row has a top-k or top-p; else no search is run."""
    rows, vocab = logits.shape
    rule = f"logits are contiguous floats [rows, V], V from 1 to {cpu.MAX_VOCAB}"
    require(logits.is_contiguous() and 1 <= vocab <= cpu.MAX_VOCAB, rule, logits)
    peaks = ints.new_empty(rows, PARTS.value, dtype=torch.int32)
    last, best = ints.new_full((rows,), cpu.FARTHEST), ints.new_empty(rows, PARTS.value)
    tokens, states = ints.new_empty(rows), ints.new_empty(rows)
    grid = (rows, PARTS.value)
    peak_kernel[grid](logits, floats, peaks, vocab, **OPTIONS)
    if cuts:
        cut(logits, floats, ints, peaks, last)
    noisy_kernel[grid](logits, floats, ints, peaks, last, best, vocab=vocab, **OPTIONS)
    pick_kernel[(rows,)](peaks, best, tokens, states, num_warps=1)
    return tokens, states


def cut(logits: Tensor, floats: Tensor, ints: Tensor, peaks: Tensor, last: Tensor) -> None:
    """Writes to last int64 [rows] the rank of the last token that top-k, then top-p keep."""
    rows, vocab = logits.shape
    bins = ints.new_zeros(rows, BINS.value)
    for weigh in (False, True):
        search = ints.new_zeros(rows, 2)
        for shift in SHIFTS:
            operands = (logits, floats, ints, peaks, search, last, bins, vocab, shift)
            bin_kernel[(rows, PARTS.value)](*operands, WEIGH=weigh, **OPTIONS)
            launch = {"FIRST": shift == SHIFTS[0], "WEIGH": weigh} | OPTIONS
            digit_kernel[(rows,)](floats, ints, search, last, bins, shift, **launch)


def compute_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logs of token_ids, then ids and logs of the k best. The logits are contiguous."""
    rows, vocab = logits.shape
    peaks = token_ids.new_empty(rows, PARTS.value, dtype=torch.int32)
    sums, top_ids = token_ids.new_empty(rows, PARTS.value), token_ids.new_empty(rows, k)
    chosen, top_logs = logits.new_empty(rows), logits.new_empty(rows, k)
    grid = (rows, PARTS.value)
    peak_kernel[grid](logits, None, peaks, vocab, **OPTIONS)
    weigh_kernel[grid](logits, peaks, sums, vocab, **OPTIONS)
    operands = (logits, token_ids, peaks, sums, chosen, top_ids, top_logs, vocab, k)
    describe_kernel[(rows,)](*operands, num_warps=16, enable_fp_fusion=False)
    return chosen, top_ids, top_logs
