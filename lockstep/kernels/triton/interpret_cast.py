"""The interpreter's float32 → bfloat16 truncates; the GPU rounds to nearest, ties to even. `install` makes the interpreter round.

Beside `interpret.install`, in the same processes; called by the tests only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def bfloat16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16 of every element, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(x), quiet, rounded).reshape(np.shape(x))


def install() -> None:
    """Replaces the interpreter's cast in this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(bfloat16_bits(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    interpreter.InterpreterBuilder.cast_impl = cast_impl
