"""exp2, tanh and log2, written out: the same bits on every machine, with or without a vector math library.

exp2 and tanh are for float32 scalars and for FLOATS alike (see lanes.py); log2 is for a float64 scalar. Plain texts, compiled by
attend.py's `build`. exp2 is within 1 ulp, exactly 1 at 0 and exactly 0 below -126; tanh is within 2 ulp; NaN stays NaN in all three.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.kernels.cpu.lanes import add, copysign, div, fma, less, like, mul, pow2_from, select, sub
from lockstep.order import LN2, LOG2E

ROUND = 1.5 * 2.0**23 + 127  # adding it rounds to an integer n and leaves n + 127 in the low bits
TWO_LOG2E = 2 * LOG2E
# 2^f on [-0.5, 0.5], constant term exactly 1; minimax in relative error, 2e-9
E1, E2, E3 = 0.6931472028556734, 0.24022647913555967, 0.0555033246993315
E4, E5, E6 = 0.009618437361988022, 0.0013398874862412507, 0.00015353361740831734
SQRT_HALF = int(np.float64(0.5**0.5).view(np.int64))
# tanh(y) = y + y^3 * P(y^2) for |y| < 0.625
T0, T1, T2, T3, T4 = -3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3


def exp2(x: Any) -> Any:
    """2^x for x <= 127, flushed to 0 below the normal numbers."""
    t = add(x, like(x, ROUND))
    f = sub(x, sub(t, like(x, ROUND)))
    y = fma(like(x, E6), f, like(x, E5))
    y = fma(y, f, like(x, E4))
    y = fma(y, f, like(x, E3))
    y = fma(y, f, like(x, E2))
    y = fma(y, f, like(x, E1))
    y = fma(y, f, like(x, 1.0))
    return select(less(x, like(x, -126.0)), like(x, 0.0), mul(y, pow2_from(t)))


def tanh(x: Any) -> Any:
    """A polynomial near 0, 1 - 2/(e^2x + 1) elsewhere; exactly +-1 from 10 on."""
    y = copysign(x, like(x, 1.0))
    z = mul(y, y)
    near = fma(fma(fma(fma(like(x, T4), z, like(x, T3)), z, like(x, T2)), z, like(x, T1)), z, like(x, T0))
    near = fma(mul(near, z), y, y)
    power = exp2(mul(select(less(like(x, 10.0), y), like(x, 10.0), y), like(x, TWO_LOG2E)))
    far = sub(like(x, 1.0), div(like(x, 2.0), add(power, like(x, 1.0))))
    return copysign(select(less(y, like(x, 0.625)), near, far), x)


def log2(x: Any) -> Any:
    """log2 of a positive normal float64, to 1e-12: exponent plus an atanh series in s = (m - 1) / (m + 1), m in [0.71, 1.42)."""
    bits = np.float64(x).view(np.int64)
    exponent = (bits - SQRT_HALF) >> 52  # of x / sqrt(1/2): m = x / 2^exponent is not below sqrt(1/2)
    m = np.int64(bits - (exponent << 52)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15)))))))
    return exponent + 2.0 * s * series / LN2 if x == x else x
