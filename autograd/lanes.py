"""Numbers one at a time or 16 side by side, as LLVM sees them: what sums along a row are made of.

Numba has no vector type, so this file adds one, `Lanes`, and the operations that work on a number
and on lanes alike. A machine with narrower vectors splits 16 lanes into several registers; each
lane keeps its value, so the bits are the same everywhere.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import lower_builtin, models, register_model, type_callable
from numba.np.arrayobj import make_array

from .launch import device

# How helpers are compiled into the bodies that call them.
INLINE: Any = {"forceinline": True, "error_model": "numpy"}

# The first argument of an intrinsic comes from Numba: a type checker must not ask callers for it.
intrinsic: Any = extending.intrinsic

LANES = 16  # part of the contract: element i of a row is summed in lane i mod 16


class Lanes(types.Type):
    """The type of 16 numbers side by side."""

    def __init__(self, dtype: Any):
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any):
        element = manager.lookup(kind.dtype).get_value_type()
        super().__init__(manager, kind, ir.VectorType(element, LANES))


# --- operations on one number or on lanes -----------------------------------------------------


def element(kind: Any) -> Any:
    return kind.dtype if isinstance(kind, Lanes) else kind


def _like(kind: Any, element: Any) -> Any:
    return Lanes(element) if isinstance(kind, Lanes) else element


def _fit(b: Any, value: Any, given: Any, wanted: Any) -> Any:
    """A number among lanes is repeated in all of them."""
    if isinstance(wanted, Lanes) and not isinstance(given, Lanes):
        vector = ir.VectorType(value.type, LANES)
        first = b.insert_element(
            ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
        )
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return b.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)
    return value


def _call(b: Any, name: str, out: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic, its name completed by the type of its result."""
    scalar = out.element if isinstance(out, ir.VectorType) else out
    suffix = f"v{LANES}" if isinstance(out, ir.VectorType) else ""
    suffix += {"float": "f32", "double": "f64"}[str(scalar)]
    kind = ir.FunctionType(out, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.{name}.{suffix}"), args)


def _operation(n: int, emit: Any, result: Any = None) -> Any:
    """An intrinsic of `n` operands of one type; `emit(builder, *values)` writes its code."""

    def typed(*operands: Any) -> tuple:
        lanes = [k for k in operands if isinstance(k, Lanes)]
        kind = lanes[0] if lanes else operands[0]
        out = kind if result is None else _like(kind, result)

        def codegen(context: Any, b: Any, sig: Any, values: Any) -> Any:
            fitted = [_fit(b, v, k, kind) for v, k in zip(values, operands, strict=True)]
            return emit(b, *fitted)

        return out(*operands), codegen

    made = {
        1: lambda typingctx, x: typed(x),
        2: lambda typingctx, x, y: typed(x, y),
        3: lambda typingctx, x, y, z: typed(x, y, z),
    }[n]
    made = intrinsic(made)
    made.typed = typed
    return made


fma = _operation(3, lambda b, x, y, z: _call(b, "fma", x.type, x, y, z))
"""x * y + z, rounded once."""
rint = _operation(1, lambda b, x: _call(b, "rint", x.type, x))
"""The nearest integer, of two the even one."""
absolute = _operation(1, lambda b, x: _call(b, "fabs", x.type, x))
copysign = _operation(2, lambda b, x, y: _call(b, "copysign", x.type, x, y))
maximum = _operation(2, lambda b, x, y: _call(b, "maximum", x.type, x, y))
"""The larger; NaN if one is NaN."""
square_root = _operation(1, lambda b, x: _call(b, "sqrt", x.type, x))

_add = _operation(2, lambda b, x, y: b.fadd(x, y))
_sub = _operation(2, lambda b, x, y: b.fsub(x, y))
_mul = _operation(2, lambda b, x, y: b.fmul(x, y))
_div = _operation(2, lambda b, x, y: b.fdiv(x, y))
_neg = _operation(1, lambda b, x: b.fneg(x))
less = _operation(2, lambda b, x, y: b.fcmp_ordered("<", x, y), types.boolean)
"""x < y; false if one is NaN."""
_greater = _operation(2, lambda b, x, y: b.fcmp_ordered(">", x, y), types.boolean)
_equal = _operation(2, lambda b, x, y: b.fcmp_ordered("==", x, y), types.boolean)
_either = _operation(2, lambda b, x, y: b.or_(x, y), types.boolean)

# Numba would widen the sum of two int32 to int64.
iadd = _operation(2, lambda b, x, y: b.add(x, y))
isub = _operation(2, lambda b, x, y: b.sub(x, y))
ishl = _operation(2, lambda b, x, y: b.shl(x, y))
ishr = _operation(2, lambda b, x, y: b.ashr(x, y))
iand = _operation(2, lambda b, x, y: b.and_(x, y))
ior = _operation(2, lambda b, x, y: b.or_(x, y))
is_zero = _operation(1, lambda b, x: b.icmp_signed("==", x, _zero(x.type)), types.boolean)


def _zero(kind: Any) -> Any:
    return ir.Constant(kind, [0] * LANES if isinstance(kind, ir.VectorType) else 0)


def attach(function: Any, n: int, typed: Any, *kinds: Any) -> None:
    """Let bodies call `function` of n operands: `typed(*types)` is None, or a signature and code.

    Unlike an overload this needs no compilation of its own.
    """

    def signature(*given: Any) -> Any:
        found = typed(*given)
        return found and found[0]

    def typer(context: Any) -> Any:
        return {
            1: lambda x: signature(x),
            2: lambda x, y: signature(x, y),
            3: lambda x, y, z: signature(x, y, z),
        }[n]

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return typed(*sig.args)[1](context, b, sig, args)

    type_callable(function)(typer)
    lower_builtin(function, *kinds)(codegen)


def _on_lanes(operation: Any) -> Any:
    def typed(*operands: Any) -> Any:
        return operation.typed(*operands) if any(isinstance(k, Lanes) for k in operands) else None

    return typed


for _operator, _operation_on_two in (
    (operator.add, _add),
    (operator.sub, _sub),
    (operator.mul, _mul),
    (operator.truediv, _div),
    (operator.lt, less),
    (operator.gt, _greater),
    (operator.eq, _equal),
    (operator.or_, _either),
):
    for _kinds in ((Lanes, Lanes), (Lanes, types.Float), (types.Float, Lanes)):
        attach(_operator, 2, _on_lanes(_operation_on_two), *_kinds)
attach(operator.neg, 1, _on_lanes(_neg), Lanes)


def typed_select(condition: Any, x: Any, y: Any) -> tuple:
    """The type and code of `select`."""
    out = next((k for k in (x, y) if isinstance(k, Lanes)), x)
    if isinstance(condition, Lanes):
        out = Lanes(element(out))

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        c, p, q = args
        return b.select(c, _fit(b, p, x, out), _fit(b, q, y, out))

    return out(condition, x, y), codegen


@intrinsic
def select(typingctx: Any, condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y."""
    return typed_select(condition, x, y)


_BITS = {types.float32: types.int32, types.float64: types.int64}
_FLOAT = {i: f for f, i in _BITS.items()}


def _cast(kinds: dict) -> Any:
    def typed(typingctx: Any, x: Any) -> Any:
        out = _like(x, kinds[element(x)])

        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.bitcast(args[0], context.get_value_type(out))

        return out(x), codegen

    return intrinsic(typed)


bits = _cast(_BITS)
"""The bits of a float, as an integer of its size."""
from_bits = _cast(_FLOAT)
"""The float with these bits."""


@intrinsic
def int_to_float(typingctx: Any, n: Any) -> Any:
    out = _like(n, _FLOAT[element(n)])

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.sitofp(args[0], context.get_value_type(out))

    return out(n), codegen


@intrinsic
def horner(typingctx: Any, x: Any, coefficients: Any) -> Any:
    """((c0 x + c1) x + c2) ..., each step one fma."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        p = None
        for n in range(coefficients.count):
            c = _fit(b, b.extract_value(args[1], n), coefficients.dtype, x)
            p = c if p is None else _call(b, "fma", c.type, p, args[0], c)
        return p

    return x(x, coefficients), codegen


# --- 16 lanes of a row ------------------------------------------------------------------------


def _address(context: Any, b: Any, kind: Any, array: Any, i: Any) -> Any:
    data = make_array(kind)(context, b, array).data
    vector = ir.VectorType(data.type.pointee, LANES)
    return b.bitcast(b.gep(data, [i]), vector.as_pointer())


def _first(b: Any, n: Any) -> Any:
    """A mask of the first n lanes."""
    i64 = ir.IntType(64)
    steps = ir.Constant(ir.VectorType(i64, LANES), list(range(LANES)))
    return b.icmp_signed("<", steps, _fit(b, n, types.int64, Lanes(types.int64)))


@intrinsic
def load(typingctx: Any, x: Any, i: Any) -> Any:
    """Elements i .. i + 15 of the memory of the contiguous array x."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = b.load(_address(context, b, sig.args[0], *args))
        value.align = 1 if x.dtype == types.boolean else x.dtype.bitwidth // 8
        if x.dtype == types.boolean:  # a byte in memory, a bit among lanes
            value = b.icmp_signed("!=", value, _zero(value.type))
        return value

    return Lanes(x.dtype)(x, types.int64), codegen


@intrinsic
def store(typingctx: Any, x: Any, i: Any, value: Any) -> Any:
    """Write lanes to elements i .. i + 15 of the memory of the contiguous array x."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        array, i, lanes = args
        b.store(lanes, _address(context, b, sig.args[0], array, i)).align = x.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(x, types.int64, value), codegen


@intrinsic
def load_float(typingctx: Any, x: Any, i: Any) -> Any:
    """`load`, with the bits of bfloat16 (uint16) and of float16 (int16) widened to float32."""
    dtype = types.float32 if x.dtype in (types.uint16, types.int16) else x.dtype

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = b.load(_address(context, b, sig.args[0], *args))
        value.align = x.dtype.bitwidth // 8
        if x.dtype == dtype:
            return value
        word, number = (ir.VectorType(t, LANES) for t in (ir.IntType(32), ir.FloatType()))

        def every(n: Any, kind: Any = word) -> Any:
            return ir.Constant(kind, [n] * LANES)

        bits = b.zext(value, word)
        if x.dtype == types.uint16:
            return b.bitcast(b.shl(bits, every(16)), number)
        sign = b.shl(b.and_(bits, every(0x8000)), every(16))
        size = b.shl(b.and_(bits, every(0x7FFF)), every(13))
        scaled = b.fmul(b.bitcast(size, number), every(2.0**112, number))  # exact; subnormals too
        endless = b.icmp_unsigned(">=", size, every(0x7C00 << 13))
        size = b.select(endless, b.or_(size, every(0x7F800000)), b.bitcast(scaled, word))
        return b.bitcast(b.or_(size, sign), number)

    return Lanes(dtype)(x, types.int64), codegen


@intrinsic
def load_first(typingctx: Any, x: Any, i: Any, n: Any, other: Any) -> Any:
    """Elements i .. i + n - 1 of x in the first n lanes, `other` (lanes) in the rest."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        array, i, n, other = args
        return _masked(b, "load", other.type, _address(context, b, x, array, i), n, other)

    return Lanes(x.dtype)(x, types.int64, types.int64, Lanes(x.dtype)), codegen


@intrinsic
def load_part(typingctx: Any, x: Any, i: Any, n: Any) -> Any:
    """Elements i .. i + n - 1 of x in the first n lanes, 0 in the rest."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        pointer = _address(context, b, x, args[0], args[1])
        memory = pointer.type.pointee
        value = _masked(b, "load", memory, pointer, args[2], _zero(memory))
        if x.dtype == types.boolean:
            value = b.icmp_signed("!=", value, _zero(memory))
        return value

    return Lanes(x.dtype)(x, types.int64, types.int64), codegen


@intrinsic
def store_part(typingctx: Any, x: Any, i: Any, n: Any, value: Any) -> Any:
    """Write the first n lanes to elements i .. i + n - 1 of x."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        array, i, n, lanes = args
        _masked(b, "store", lanes.type, _address(context, b, x, array, i), n, lanes)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, value), codegen


def _masked(b: Any, what: str, memory: Any, pointer: Any, n: Any, value: Any) -> Any:
    """Load the first n lanes from the pointer, or store them there."""
    name = {"float": "f32", "double": "f64", "i8": "i8"}[str(memory.element)]
    align = ir.Constant(ir.IntType(32), {"f32": 4, "f64": 8, "i8": 1}[name])
    parts = [pointer, align, _first(b, n)]
    parts = [*parts, value] if what == "load" else [value, *parts]
    result = memory if what == "load" else ir.VoidType()
    function = ir.FunctionType(result, [p.type for p in parts])
    name = f"llvm.masked.{what}.v{LANES}{name}.p0"
    return b.call(cgutils.get_or_insert_function(b.module, function, name), parts)


@intrinsic
def keep_first(typingctx: Any, n: Any, x: Any, y: Any) -> Any:
    """x in the first n lanes, y in the rest."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.select(_first(b, args[0]), args[1], args[2])

    return x(types.int64, x, y), codegen


@intrinsic
def splat(typingctx: Any, x: Any) -> Any:
    """x in all lanes."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return _fit(b, args[0], x, sig.return_type)

    return Lanes(x)(x), codegen


@intrinsic
def widen(typingctx: Any, x: Any) -> Any:
    """float32 lanes as float64 lanes."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        out = context.get_value_type(sig.return_type)
        return args[0] if args[0].type == out else b.fpext(args[0], out)

    return Lanes(types.float64)(x), codegen


@intrinsic
def low_halves(typingctx: Any, x: Any) -> Any:
    """The lower 16 bits of int32 lanes."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.trunc(args[0], context.get_value_type(sig.return_type))

    return Lanes(types.uint16)(x), codegen


def _tree(emit: Any) -> Any:
    def typed(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            v, i32 = args[0], ir.IntType(32)
            for step in (8, 4, 2, 1):  # lane i takes in lane i + step
                picks = [i + step for i in range(step)]
                mask = ir.Constant(ir.VectorType(i32, LANES), picks + [0] * (LANES - step))
                v = emit(b, v, b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), mask))
            return b.extract_element(v, ir.Constant(i32, 0))

        return x.dtype(x), codegen

    return intrinsic(typed)


tree_sum = _tree(lambda b, x, y: b.fadd(x, y))
"""The sum of the lanes: +8, +4, +2, +1."""
tree_max = _tree(lambda b, x, y: _call(b, "maximum", x.type, x, y))
"""The largest lane; NaN if one is NaN."""


@device
def row_sum(x):
    """The sum of a contiguous row, in the order of the contract."""
    n, zero = np.int64(x.size), splat(x.dtype.type(0))
    total = zero
    whole = n - n % 16
    for i in range(0, whole, 16):
        total = total + load(x, i)
    if whole < n:
        total = keep_first(n - whole, total + load_first(x, whole, n - whole, zero), total)
    return tree_sum(total)


@device
def row_dot(x, y):
    """The sum of x * y over two contiguous rows, by fma, in the order of the contract."""
    n, zero = np.int64(x.size), splat(x.dtype.type(0))
    total = zero
    whole = n - n % 16
    for i in range(0, whole, 16):
        total = fma(load(x, i), load(y, i), total)
    if whole < n:
        rest = n - whole
        more = fma(load_first(x, whole, rest, zero), load_first(y, whole, rest, zero), total)
        total = keep_first(rest, more, total)
    return tree_sum(total)


@device
def row_max(x):
    """The largest element of a contiguous row; -inf if it is empty, NaN if one is NaN."""
    n, least = np.int64(x.size), splat(x.dtype.type(-np.inf))
    top, second, third, fourth = least, least, least, least
    i = 0
    while i + 64 <= n:  # a maximum has no order, and takes several instructions: four at once
        top, second = maximum(top, load(x, i)), maximum(second, load(x, i + 16))
        third, fourth = maximum(third, load(x, i + 32)), maximum(fourth, load(x, i + 48))
        i += 64
    top = maximum(maximum(top, second), maximum(third, fourth))
    while i + 16 <= n:
        top = maximum(top, load(x, i))
        i += 16
    if i < n:
        top = maximum(top, load_first(x, i, n - i, least))
    return tree_max(top)
