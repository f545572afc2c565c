"""exp2, tanh, erf, log2, cos and sin in explicit operations: the same bits on every machine.

exp2 (1 ulp, exactly 1 at 0, and 0 below -126), tanh and erf (2 ulp) take float32 scalars or
FLOATS; log2 (1e-12) and cos_sin (1e-15) a float64. NaN stays NaN. Used by attend.py and rows.py.
"""

from typing import Any

import numpy as np

from lockstep.kernels.cpu.lanes import add, copysign, div, fma, less, mul, pow2_from, select, sub
from lockstep.order import LN2, LOG2E
from lockstep.sample.formulas import E1, E2, E3, E4, E5, E6, SQRT_HALF

ROUND = 1.5 * 2.0**23 + 127  # adding it rounds to an integer n and leaves n + 127 in the low bits
TWO_LOG2E = 2 * LOG2E
# tanh(y) = y + y^3 * P(y^2) for |y| < 0.625
T0, T1, T2 = -3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2
T3, T4 = 2.06390887954e-2, -5.70498872745e-3
# erf(y) = y + y * P(y^2) for y < 0.875, 1 - 2^(-y * Q(y)) up to 4, and 1 from there; to 3e-10
ERF_FAR = 4.0
P0, P1, P2 = 0.12837916676436556, -0.3761263497986084, 0.11283715032995573
P3, P4 = -0.026860508470523695, 0.0052038591766637625
P5, P6 = -0.0008175639469522938, 8.513104775694636e-05
Q0, Q1, Q2, Q3 = 1.6281115457023834, 0.9172219574076288, 0.15145233442047787, -0.03227521877529269
Q4, Q5 = 0.003954715449407761, 2.810481863154913e-05
Q6, Q7 = -8.54983993709039e-05, 8.75881927330167e-06
# pi/2 = H1 + H2 + H3 + H4: three of at most 24 bits, whose products with n < 2^29 are exact, + rest
H1, H2 = float.fromhex("0x1.921fb4p0"), float.fromhex("0x1.4442d0p-24")
H3, H4 = float.fromhex("0x1.846988p-48"), float.fromhex("0x1.8cc51701b839ap-72")
TURNS = 0.6366197723675814  # 2 / pi
ROUND64 = 1.5 * 2.0**52  # adding it rounds to an integer n and leaves n in the low bits


def exp2(x: Any) -> Any:
    """Returns 2^x for x <= 127, flushed to 0 below the normal numbers."""
    t = add(x, ROUND)
    f = sub(x, sub(t, ROUND))
    y = fma(fma(fma(E6, f, E5), f, E4), f, E3)
    y = fma(fma(fma(y, f, E2), f, E1), f, 1.0)
    return select(less(x, -126.0), 0.0, mul(y, pow2_from(t)))


def tanh(x: Any) -> Any:
    """Returns tanh x: a polynomial near 0, else 1 - 2/(e^2x + 1); exactly +-1 from 10 on."""
    y = copysign(x, 1.0)
    z = mul(y, y)
    near = fma(fma(fma(fma(T4, z, T3), z, T2), z, T1), z, T0)
    near = fma(mul(near, z), y, y)
    power = exp2(mul(select(less(10.0, y), 10.0, y), TWO_LOG2E))
    far = sub(1.0, div(2.0, add(power, 1.0)))
    return copysign(select(less(y, 0.625), near, far), x)


def erf(x: Any) -> Any:
    """Returns erf x: a polynomial near 0, else 1 minus a power of two; exactly +-1 from 4 on."""
    y = copysign(x, 1.0)
    z = mul(y, y)
    near = fma(fma(fma(P6, z, P5), z, P4), z, P3)
    near = fma(fma(fma(near, z, P2), z, P1), z, P0)
    near = fma(near, y, y)
    w = select(less(ERF_FAR, y), ERF_FAR, y)
    q = fma(fma(fma(Q7, w, Q6), w, Q5), w, Q4)
    q = fma(fma(fma(fma(q, w, Q3), w, Q2), w, Q1), w, Q0)
    far = sub(1.0, exp2(sub(0.0, mul(q, w))))
    return copysign(select(less(y, 0.875), near, far), x)


def cos_sin(x: Any) -> Any:
    """Returns (cos x, sin x) of a float64 that is a float32 number, |x| up to
    `order.LARGEST_ANGLE`. None of these is closer to a multiple of pi/2 than 1e-10, so x - n pi/2
    loses nothing to cancellation. Then Taylor series on [-pi/4, pi/4], up to r^17 and r^16."""
    t = x * TURNS + ROUND64
    n = t - ROUND64
    quadrant = np.float64(t).view(np.int64)
    r = x - n * H1 - n * H2 - n * H3 - n * H4
    z = r * r
    s = 1 / 6227020800 - z * (1 / 1307674368000 - z * (1 / 355687428096000))
    s = 1 / 362880 - z * (1 / 39916800 - z * s)
    s = r - r * (z * (1 / 6 - z * (1 / 120 - z * (1 / 5040 - z * s))))
    c = 1 / 479001600 - z * (1 / 87178291200 - z * (1 / 20922789888000))
    c = 1 / 40320 - z * (1 / 3628800 - z * c)
    c = 1 - z * (1 / 2 - z * (1 / 24 - z * (1 / 720 - z * c)))
    cos, sin = (s, c) if quadrant & 1 else (c, s)
    return -cos if (quadrant + 1) & 2 else cos, -sin if quadrant & 2 else sin


def log2(x: Any) -> Any:
    """Returns log2 of a positive normal float64, to 1e-12: the exponent plus an atanh series."""
    bits = np.float64(x).view(np.int64)
    exponent = (bits - SQRT_HALF) >> 52
    m = np.int64(bits - (exponent << 52)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)  # m in [0.71, 1.42)
    z = s * s
    series = 1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15))))
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * series))
    return exponent + 2.0 * s * series / LN2 if x == x else x
