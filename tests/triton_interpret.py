"""Triton's interpreter, made good enough to prove bits with: a `dot` that walks K in ascending
order and widens bfloat16.

The interpreter's own dot is numpy's matmul: wrong in bfloat16, and its rows depend on the shape of
the block. Its float32 → bfloat16 cast truncates, where the GPU rounds to nearest, ties to even.
`install` replaces both, in a process where TRITON_INTERPRET=1 was set before Triton was imported.
It also patches the language once instead of at every call of a device function. Such a process
interprets and does nothing else. Called by `triton_cells.py` and `triton_gemm_cells.py`.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.types import RuleError


class PermanentPatch:
    """A patch that is never removed."""

    def restore(self) -> None:
        """Does nothing: this process interprets until it ends."""


def widen(tensor: Any, bfloat16: Any) -> Any:
    """Returns an operand of a dot as float32."""
    if tensor.dtype.scalar == bfloat16:
        return (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return tensor.data.astype(np.float32)


def bfloat16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Returns the nearest bfloat16 of every element as bits, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(x), quiet, rounded).reshape(np.shape(x))


def install() -> None:
    """Replaces the interpreter's dot and its cast to bfloat16 in this process."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        rule = "kernels are interpreted when TRITON_INTERPRET=1 is set before Triton is imported"
        raise RuleError(rule, "it is not", "Set it")
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    patched: set[tuple[str, ...]] = set()
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(bfloat16_bits(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *ignored: Any) -> Any:
        left, right, total = widen(a, tl.bfloat16), widen(b, tl.bfloat16), d.data.astype(np.float32)
        for i in range(left.shape[1]):
            total += left[:, i : i + 1] * right[i : i + 1, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    def patch_scalars(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(
            tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0])
        )  # numpy 2.4 needs a scalar

    def patch_once(function: Any) -> PermanentPatch:
        names = tuple(
            sorted(
                n for n, value in function.__globals__.items() if value is tl or value is tl.core
            )
        )
        if names not in patched:
            patched.add(names)
            patch_lang(function)
        return PermanentPatch()

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.cast_impl = cast_impl
    interpreter._patch_lang_tensor = patch_scalars
    interpreter._patch_lang = patch_once
