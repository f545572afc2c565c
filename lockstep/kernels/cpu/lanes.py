"""A vector type of 16 float32 lanes for Numba code, and the operations of kernels on it.

Every operation is one explicit IEEE rounding, so a sum has the order in which it is written; on
machines without AVX-512 LLVM splits the 16 lanes into 2 x 8, with the same bits. Arithmetic takes
float32 scalars too: with a vector operand a scalar is broadcast, and a float64, as constants are,
is rounded first. Addresses are int64 byte addresses.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numba.core.types
from llvmlite import ir
from numba.core import datamodel
from numba.extending import intrinsic, register_model

from lockstep.order import LANES

types: Any = numba.core.types
models: Any = datamodel.models
F32, I1, I8, I16, I32, I64 = ir.FloatType(), *map(ir.IntType, (1, 8, 16, 32, 64))
PTR = ir.PointerType()
VECTOR = ir.VectorType(F32, LANES)


class Lanes(types.Type):  # type: ignore[misc]
    """The Numba type of 16 lanes of an LLVM type: float32, or the bits of a mask."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"lanes_{element}")


@register_model(Lanes)
def _model(manager: Any, lanes: Lanes) -> Any:
    """Represents a Lanes value in LLVM as a vector."""
    return models.PrimitiveModel(manager, lanes, ir.VectorType(lanes.element, LANES))


FLOATS, MASK = Lanes(F32), Lanes(I1)


# ---- building blocks in LLVM IR, shared with loops.py, gemm.py and threads.py ----


def ir_function(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turns `code(builder, *values)`, which emits LLVM IR, into a function for Numba code; one that
    returns None is void. `signature`: Numba's, or a function of argument types returning it."""

    def decorated(code: Callable[..., Any]) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = code(builder, *args)
            return context.get_dummy_value() if value is None else value

        @functools.wraps(code)
        def typed(typingctx: Any, *given: Any) -> Any:
            return (signature(*given) if inspect.isfunction(signature) else signature), emit

        return intrinsic(typed)

    return decorated


def integers(count: int) -> Any:
    """Returns the Numba signature of a void function of `count` int64."""
    return types.void(*[types.int64] * count)


def at(builder: Any, address: Any, byte: int = 0) -> Any:
    """Emits a pointer from an int64 address plus a constant."""
    return builder.inttoptr(builder.add(address, I64(byte)) if byte else address, PTR)


def load_ir(builder: Any, address: Any, byte: int = 0, of: Any = VECTOR, align: int = 4) -> Any:
    """Emits a load of LLVM type `of` from an address that is a multiple of `align`."""
    return builder.load(at(builder, address, byte), typ=of, align=align)


def store_ir(builder: Any, address: Any, value: Any, byte: int = 0) -> None:
    """Emits a store of `value` to an address that is a multiple of 4."""
    builder.store(value, at(builder, address, byte), align=4)


def constant(kind: Any, value: float) -> Any:
    """Returns `value` as an LLVM constant, in every lane if `kind` is a vector."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def splat_ir(builder: Any, scalar: Any) -> Any:
    """Emits a vector with `scalar` in every lane."""
    nothing = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    one = builder.insert_element(nothing, scalar, I32(0))
    return shuffle_ir(builder, one, one, [0] * LANES)


def shuffle_ir(builder: Any, a: Any, b: Any, index: Sequence[int]) -> Any:
    """Emits a vector of the lanes `index` of a and b concatenated."""
    lanes = ir.Constant(ir.VectorType(I32, len(index)), [I32(i) for i in index])
    return builder.shuffle_vector(a, b, lanes)


def call_ir(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Emits a call of the LLVM intrinsic `name`, given in full with its type suffix."""
    kind = ir.FunctionType(result, [a.type for a in args])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, args)


def math_ir(builder: Any, name: str, *args: Any) -> Any:
    """Emits a call of LLVM's `name` for a float or 16 lanes of them."""
    kind = args[0].type
    return call_ir(builder, f"llvm.{name}.{'f32' if kind == F32 else 'v16f32'}", kind, [*args])


def maximum_ir(builder: Any, a: Any, b: Any) -> Any:
    """Emits the larger of a and b, NaN if either is NaN, which a comparison alone would drop."""
    larger = builder.select(builder.fcmp_ordered(">", a, b), a, b)
    return builder.select(builder.fcmp_unordered("uno", a, a), a, larger)


def below_ir(builder: Any, bound: Any) -> Any:
    """Emits a mask of the lanes j < bound, an int64."""
    index = ir.Constant(ir.VectorType(I32, LANES), [I32(j) for j in range(LANES)])
    return builder.icmp_signed("<", index, splat_ir(builder, builder.trunc(bound, I32)))


# ---- operations of Numba code ----


def unify(builder: Any, values: Sequence[Any]) -> list[Any]:
    """Converts operands to one kind: rounds float64 to float32, broadcasts if one is a vector."""
    double, wide = ir.DoubleType(), any(value.type == VECTOR for value in values)
    rounded = [builder.fptrunc(v, F32) if v.type == double else v for v in values]
    return [splat_ir(builder, v) if wide and v.type == F32 else v for v in rounded]


def kind_of(*given: Any) -> Any:
    """Returns FLOATS if one of the types is, else float32."""
    return FLOATS if FLOATS in given else types.float32


def arithmetic(code: Callable[..., Any], compares: bool = False) -> Any:
    """Makes an operation on mixed operands from `code`, which emits it for operands of one kind."""

    def signature(*given: Any) -> Any:
        kind = kind_of(*given)
        if compares:
            kind = MASK if kind == FLOATS else types.boolean
        return kind(*given)

    @functools.wraps(code)
    def same(builder: Any, *values: Any) -> Any:
        return code(builder, *unify(builder, values))

    return ir_function(signature)(same)


add = arithmetic(lambda builder, a, b: builder.fadd(a, b))
sub = arithmetic(lambda builder, a, b: builder.fsub(a, b))
mul = arithmetic(lambda builder, a, b: builder.fmul(a, b))
div = arithmetic(lambda builder, a, b: builder.fdiv(a, b))
less = arithmetic(lambda builder, a, b: builder.fcmp_ordered("<", a, b), compares=True)
fma = arithmetic(lambda builder, a, b, c: math_ir(builder, "fma", a, b, c))  # one rounding
copysign = arithmetic(lambda builder, size, sign: math_ir(builder, "copysign", size, sign))
maximum = arithmetic(maximum_ir)


@arithmetic
def canonical(builder: Any, x: Any) -> Any:
    """Returns x with one bit pattern for NaN: which payload survives depends on the processor."""
    nan = constant(x.type, float("nan"))
    return builder.select(builder.fcmp_unordered("uno", x, x), nan, x)


@arithmetic
def pow2_from(builder: Any, x: Any) -> Any:
    """Returns 2^n for x = 1.5*2^23 + 127 + n: moves the low bits of x into the exponent field."""
    bits = I32 if x.type == F32 else ir.VectorType(I32, LANES)
    return builder.bitcast(builder.shl(builder.bitcast(x, bits), constant(bits, 23)), x.type)


@ir_function(lambda mask, yes, no: kind_of(yes, no)(mask, yes, no))
def select(builder: Any, mask: Any, yes: Any, no: Any) -> Any:
    """Returns `yes` where the mask is set, else `no`."""
    return builder.select(mask, *unify(builder, (yes, no)))


@ir_function(MASK(types.int64, types.int64, types.int64))
def between(builder: Any, first: Any, lo: Any, hi: Any) -> Any:
    """Returns a mask of the lanes j with lo <= first + j < hi."""
    below, inside = (below_ir(builder, builder.sub(bound, first)) for bound in (lo, hi))
    return builder.and_(builder.not_(below), inside)


def folded(step: Callable[[Any, Any, Any], Any]) -> Any:
    """Builds a function that folds lanes (j, j+8), (j, j+4), (j, j+2), (j, j+1) with `step`."""

    @ir_function(types.float32(FLOATS))
    def fold(builder: Any, x: Any) -> Any:
        half = LANES // 2
        while half:
            halves = (range(half), range(half, 2 * half))
            low, high = (shuffle_ir(builder, x, x, lanes) for lanes in halves)
            x, half = step(builder, low, high), half // 2
        return builder.extract_element(x, I32(0))

    return fold


fold_sum = folded(lambda builder, a, b: builder.fadd(a, b))
fold_max = folded(maximum_ir)
splat = ir_function(FLOATS(types.float32))(splat_ir)
load = ir_function(FLOATS(types.int64))(lambda builder, address: load_ir(builder, address))
STORES = types.void(types.int64, FLOATS)
store = ir_function(STORES)(lambda builder, address, x: store_ir(builder, address, x))


@ir_function(STORES)
def store_half(builder: Any, address: Any, value: Any) -> None:
    """Stores lanes 0..7 at an address."""
    store_ir(builder, address, shuffle_ir(builder, value, value, range(LANES // 2)))
