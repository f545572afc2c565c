"""The formulas of sampling, for every device: counter-based noise, exponentials as integers, the
natural logarithm, and the codes of row states and missing tokens.

Single IEEE operations and integers only: the same source serves numpy arrays, torch tensors of any
device and compiled scalars, with the same bits. Noise is a function of (seed, index, position of
the sampled token, token id), and of nothing else; the argmax of score + noise is a sample of
softmax(score):

    words = Philox 4x32-10, counter (token id // 4, position, index, 0), key (seed mod, div 2^32)
    word  = words[token id mod 4]                    32 bits
    u     = (word + 1/2) / 2^32                      in [2^-33, 1 - 2^-33], exact in float64
    noise = float32(-ln(-ln u))                      in [-3.13, 22.88], ln written out in float64"""

from typing import Any

import numpy as np

from lockstep.order import LN2, LOG2E

MAX_VOCAB = 2**20  # weights of at most 2^FRACTION each: their sum stays below 2^63
ID_BITS, ID_MASK = 20, MAX_VOCAB - 1
FRACTION = 42
LOW = -64.0  # nats relative to the best: weights are 0 from about -30 down
OK, NAN, INFINITE, EMPTY = 0, 1, 2, 3  # states of a sampled row
NO_TOKEN = -1
FLOATS, INTS = 3, 5  # numbers that a kernel takes per row (`Ops.sample_tokens`)
FARTHEST = 2**63 - 1  # above every rank
KEY_INF, KEY_MINUS_INF = 0x7F800000, -0x7F800001  # ±inf as integers that sort like the scores

WORD = 0xFFFFFFFF
M0, M1, W0, W1, ROUNDS = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 10  # Philox 4x32-10
NOISE_MAX = np.float32(22.9)  # above the largest noise there is, 22.87 at u = 1 - 2^-33

ROUND = 1.5 * 2.0**52  # adding it to |x| < 2^51 leaves the nearest integer in the low bits
ROUND_BITS = int(np.float64(ROUND).view(np.int64))
SQRT_HALF = int(np.float64(0.5**0.5).view(np.int64))
# 2^f on [-0.5, 0.5], constant term exactly 1; minimax in relative error, 2e-9
E1, E2, E3 = 0.6931472028556734, 0.24022647913555967, 0.0555033246993315
E4, E5, E6 = 0.009618437361988022, 0.0013398874862412507, 0.00015353361740831734


def bits_of(x: Any) -> Any:
    """Returns a float64's bits as int64."""
    return _viewed(x, "int64")


def float_of(i: Any) -> Any:
    """Returns the float64 with the bits of an int64."""
    return _viewed(i, "float64")


def _viewed(x: Any, dtype: str) -> Any:
    if isinstance(x, np.ndarray | np.generic):
        return x.view(dtype)
    import torch

    return x.view(getattr(torch, dtype))


def counter(seed: Any, index: Any, position: Any) -> tuple[Any, Any, Any, Any]:
    """Returns what determines a row's noise, for kernels: position, index, two seed words."""
    return position, index, seed & WORD, (seed >> 32) & WORD


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Returns four words: Philox 4x32-10 (Salmon et al., 2011) of a counter and the key (k0, k1).
    All are int64 in [0, 2^32), at least c0 and c2 arrays. Products wrap; both halves are right."""
    for _ in range(ROUNDS):
        p0, p1 = c0 * M0, c2 * M1
        c0, c2 = (p1 >> 32) & WORD ^ c1 ^ k0, (p0 >> 32) & WORD ^ c3 ^ k1
        c1, c3 = p1 & WORD, p0 & WORD
        k0, k1 = (k0 + W0) & WORD, (k1 + W1) & WORD
    return c0, c1, c2, c3


def as_float(i: Any) -> Any:
    """Converts an int64 below 2^51 in magnitude to float64, exactly."""
    return float_of(i + ROUND_BITS) - ROUND


def wide_float(i: Any) -> Any:
    """Converts an int64 in [0, 2^63) to float64, rounded once."""
    return as_float(i >> 31) * 2.0**31 + as_float(i & 0x7FFFFFFF)


def ln(x: Any) -> Any:
    """Returns ln of a positive normal float64, to 1e-12: the exponent, and an atanh series."""
    bits = bits_of(x)
    exponent = (bits - SQRT_HALF) >> 52
    m = float_of(bits - (exponent << 52))
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = (((z * (1 / 15) + 1 / 13) * z + 1 / 11) * z + 1 / 9) * z + 1 / 7
    series = ((series * z + 1 / 5) * z + 1 / 3) * z + 1.0
    return as_float(exponent) * LN2 + s * 2.0 * series


def gumbel(word: Any) -> Any:
    """Returns -ln(-ln u), u = (word + 1/2) / 2^32 exactly: the noise is finite at both ends."""
    return -ln(-ln((as_float(word) + 0.5) * 2.0**-32))


def weight(d: Any) -> Any:
    """Returns exp(d) for d <= 0 in units of 2^-FRACTION, an integer; 0 below LOW."""
    t = d * LOG2E
    r = t + ROUND
    f = t - (r - ROUND)
    y = (((((f * E6 + E5) * f + E4) * f + E3) * f + E2) * f + E1) * f + 1.0
    power = float_of((bits_of(r) - ROUND_BITS + (1023 + FRACTION)) << 52)
    return (bits_of(y * power + ROUND) - ROUND_BITS) * (d > LOW)
