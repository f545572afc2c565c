"""Sixteen floats as one value: a vector type for Numba code and the few operations the kernel needs
on it.

Every operation is one IEEE rounding, spelled out: nothing here is contracted, reassociated or taken
from a library, so a sum has the order in which it is written. LLVM cuts the 16 lanes into 2 x 8 on
machines without AVX-512 and the bits stay. The arithmetic also takes plain float32 scalars: a
function written with it serves a scalar and a vector with the same bits. Beside a vector a scalar
stands for 16 of it, and a float64, as constants are, is rounded to float32 first.

Knows nothing of attention. Addresses are int64 byte addresses; their validity is the caller's
business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba.core.types
from llvmlite import ir
from numba.core import datamodel
from numba.extending import intrinsic, register_model

from lockstep.order import LANES

types: Any = numba.core.types
models: Any = datamodel.models
F32, I1, I8, I32, I64 = ir.FloatType(), ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
PTR = ir.PointerType()


class Lanes(types.Type):  # type: ignore[misc]
    """The Numba type of 16 lanes of one element: "f32", or "i1" for a mask."""

    def __init__(self, element: str) -> None:
        self.element = element
        super().__init__(name=f"lanes_{element}")


class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    """How a Lanes value lies in LLVM: as a vector."""

    def __init__(self, dmm: Any, fe_type: Lanes) -> None:
        super().__init__(
            dmm, fe_type, ir.VectorType(F32 if fe_type.element == "f32" else I1, LANES)
        )


register_model(Lanes)(_LanesModel)
FLOATS = Lanes("f32")
MASK = Lanes("i1")


# ---- building blocks in LLVM IR, shared with the loops of loops.py and stage.py ----


def at(builder: Any, address: Any, byte: int = 0) -> Any:
    """A pointer from an int64 address plus a constant."""
    return builder.inttoptr(builder.add(address, I64(byte)) if byte else address, PTR)


def load_ir(builder: Any, address: Any, byte: int = 0, of: Any = None, align: int = 4) -> Any:
    """Load a value of LLVM type `of` (16 floats unless told); unaligned addresses are fine."""
    return builder.load(
        at(builder, address, byte), typ=of or ir.VectorType(F32, LANES), align=align
    )


def store_ir(builder: Any, value: Any, address: Any, byte: int = 0) -> None:
    """Store `value`; unaligned addresses are fine."""
    builder.store(value, at(builder, address, byte), align=4)


def constant(kind: Any, value: float) -> Any:
    """`value` as an LLVM constant, in every lane if `kind` is a vector."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def splat_ir(builder: Any, scalar: Any, count: int = LANES) -> Any:
    """`scalar` in every lane."""
    one = builder.insert_element(
        ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined), scalar, I32(0)
    )
    return shuffle_ir(builder, one, one, [0] * count)


def shuffle_ir(builder: Any, a: Any, b: Any, index: list[int]) -> Any:
    """Lanes `index` of a and b laid end to end."""
    return builder.shuffle_vector(
        a, b, ir.Constant(ir.VectorType(I32, len(index)), [I32(i) for i in index])
    )


def call_ir(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call the LLVM intrinsic `name` (written in full, type suffix included)."""
    kind = ir.FunctionType(result, [a.type for a in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, args)


def fma_ir(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a*b + c with one rounding, for floats or 16 lanes."""
    return call_ir(
        builder, "llvm.fma.f32" if a.type == F32 else "llvm.fma.v16f32", a.type, [a, b, c]
    )


# ---- operations of Numba code ----


def _arithmetic(given: tuple[Any, ...], operate: Callable[..., Any], result: Any = None) -> Any:
    """Signature and code of an operation on floats: FLOATS if one of them is, else float32;
    `result` is the vector result type if another."""
    wide = FLOATS in given
    kind = FLOATS if wide else types.float32
    if result is not None:
        kind = result if wide else types.boolean

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        same = []
        for given_type, value in zip(given, args, strict=True):
            if given_type == types.float64:
                value = builder.fptrunc(value, F32)
            same.append(splat_ir(builder, value) if wide and given_type != FLOATS else value)
        return operate(builder, *same)

    return kind(*given), emit


def _binary(operate: Callable[[Any, Any, Any], Any], result: Any = None) -> Any:
    """An operation on two floats."""

    def typed(typingctx: Any, a: Any, b: Any) -> Any:
        return _arithmetic((a, b), operate, result)

    return intrinsic(typed)


def _maximum_ir(builder: Any, a: Any, b: Any) -> Any:
    """The larger one, NaN if either is: a NaN must reach the output, not be dropped by a
    comparison."""
    larger = builder.select(builder.fcmp_ordered(">", a, b), a, b)
    return builder.select(builder.fcmp_unordered("uno", a, a), a, larger)


add = _binary(lambda builder, a, b: builder.fadd(a, b))
sub = _binary(lambda builder, a, b: builder.fsub(a, b))
mul = _binary(lambda builder, a, b: builder.fmul(a, b))
div = _binary(lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary(_maximum_ir)
less = _binary(lambda builder, a, b: builder.fcmp_ordered("<", a, b), MASK)


def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a*b + c with one rounding."""
    return _arithmetic((a, b, c), fma_ir)


def _select(typingctx: Any, mask: Any, yes: Any, no: Any) -> Any:
    """`yes` where the mask is set."""
    both, emit = _arithmetic((yes, no), lambda builder, *pair: pair)

    def chosen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(args[0], *emit(context, builder, sig, args[1:]))

    return both.return_type(mask, yes, no), chosen


def _canonical(typingctx: Any, x: Any) -> Any:
    """x, with every NaN the same NaN: which operand's payload survives is the processor's
    choice."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(
            builder.fcmp_unordered("uno", args[0], args[0]),
            constant(args[0].type, float("nan")),
            args[0],
        )

    return x(x), emit


def _pow2_from(typingctx: Any, x: Any) -> Any:
    """2^n for x = 1.5*2^23 + 127 + n: the low bits of x, moved into the exponent field."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = ir.VectorType(I32, LANES) if x == FLOATS else I32
        return builder.bitcast(
            builder.shl(builder.bitcast(args[0], bits), constant(bits, 23)), args[0].type
        )

    return x(x), emit


def _copysign_ir(builder: Any, size: Any, sign: Any) -> Any:
    name = "llvm.copysign.f32" if size.type == F32 else "llvm.copysign.v16f32"
    return call_ir(builder, name, size.type, [size, sign])


def _splat(typingctx: Any, x: Any) -> Any:
    return FLOATS(types.float32), lambda context, builder, sig, args: splat_ir(builder, args[0])


def _between(typingctx: Any, first: Any, lo: Any, hi: Any) -> Any:
    """Mask of the lanes j with lo <= first + j < hi (int64 each)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(I32, LANES)
        index = ir.Constant(kind, [I32(j) for j in range(LANES)])
        bound = [splat_ir(builder, builder.trunc(builder.sub(x, args[0]), I32)) for x in args[1:]]
        above, below = (
            builder.icmp_signed(">=", index, bound[0]),
            builder.icmp_signed("<", index, bound[1]),
        )
        return builder.and_(above, below)

    return MASK(types.int64, types.int64, types.int64), emit


def _reduce(step: Callable[[Any, Any, Any], Any]) -> Any:
    """Fold lanes (j, j+8), (j, j+4), (j, j+2), (j, j+1) with `step`."""

    def typed(typingctx: Any, x: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value, half = args[0], LANES // 2
            while half:
                low, high = (
                    shuffle_ir(builder, value, value, list(range(i, i + half))) for i in (0, half)
                )
                value, half = step(builder, low, high), half // 2
            return builder.extract_element(value, I32(0))

        return types.float32(FLOATS), emit

    return intrinsic(typed)


def _load(typingctx: Any, address: Any) -> Any:
    return FLOATS(types.int64), lambda context, builder, sig, args: load_ir(builder, args[0])


def _store(typingctx: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        store_ir(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.int64, value), emit


def _store_half(typingctx: Any, address: Any, value: Any) -> Any:
    """Store lanes 0..7."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        store_ir(builder, shuffle_ir(builder, args[1], args[1], list(range(LANES // 2))), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, FLOATS), emit


def _address(typingctx: Any, array: Any) -> Any:
    """The int64 byte address of the first element of an array, or of a pointer. An array must
    outlive the use of its address."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = (
            args[0]
            if isinstance(array, types.CPointer)
            else context.make_array(array)(context, builder, args[0]).data
        )
        return builder.ptrtoint(data, I64)

    return types.int64(array), emit


def _pointer(kind: Any) -> Any:
    """Build `f(address)`: elements of `kind` from that address on, to be indexed like an array,
    without bounds or owner."""

    def typed(typingctx: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

        return types.CPointer(kind)(types.int64), emit

    return intrinsic(typed)


fma: Any = intrinsic(_fma)
int32_at: Any = _pointer(types.int32)
int64_at: Any = _pointer(types.int64)
float32_at: Any = _pointer(types.float32)
float64_at: Any = _pointer(types.float64)
select: Any = intrinsic(_select)
canonical: Any = intrinsic(_canonical)
pow2_from: Any = intrinsic(_pow2_from)
copysign = _binary(_copysign_ir)
splat: Any = intrinsic(_splat)
between: Any = intrinsic(_between)
lanes_sum: Any = _reduce(lambda builder, a, b: builder.fadd(a, b))
lanes_max: Any = _reduce(_maximum_ir)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
store_half: Any = intrinsic(_store_half)
address: Any = intrinsic(_address)
