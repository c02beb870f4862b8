"""Register tiles: the inner loops of matrix products, spelled as vector instructions.

A tile is a small block of the result that stays in registers while k runs. LLVM does not find
this by itself from loops over arrays, so the instructions are emitted here, for any vector width.
Every element of the result is one chain of fused multiply-adds over ascending k: tile shapes and
vector width decide which elements share an instruction, never what is computed.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array, populate_array

from .lanes import intrinsic
from .launch import VECTOR_WIDTH

# A tile of 12 x 2 vectors needs 24 + 2 + 1 of the 32 registers of AVX-512; 6 x 2 needs 15 of the
# 16 that narrower machines have.
ROWS, VECTORS = (12, 2) if VECTOR_WIDTH == 16 else (6, 2)

# Whether the target of the compiled code multiplies pairs of bfloat16 in one instruction.
_features = os.environ.get("NUMBA_CPU_FEATURES")
PAIR_PRODUCTS = llvm.llvm_version_info >= (17, 0, 0) and bool(
    "+avx512bf16" in _features if _features else llvm.get_host_cpu_features().get("avx512bf16")
)

# How a tile begins and ends.
FRESH = 0  # chains start at +0, the result is stored
CONTINUED = 1  # chains start at what c holds
ADDED = 2  # chains start at +0, their ends are added to what c holds

_i32, _i64 = ir.IntType(32), ir.IntType(64)


# Results of few columns take vectors half as long, of which AVX-512 machines may run two at once.
NARROW = min(8, VECTOR_WIDTH)


def lanes(itemsize: int, width: int = VECTOR_WIDTH) -> int:
    """How many elements of this size a vector holds that takes `width` float32."""
    return width * 4 // itemsize


@functools.cache
def tile(rows: int, vectors: int, width: int = VECTOR_WIDTH, skips: bool = False) -> Any:
    """A function for bodies that computes one tile of `rows` x `vectors * lanes` of c = a b.

        tile(a, ao, a_row, a_k,  b, bo, b_k,  c, co, c_row,  K, mode)

    for i < rows, j < vectors * lanes:
        c[co + i c_row + j]  =  sum over k < K of  a[ao + i a_row + k a_k] * b[bo + k b_k + j]

    a, b, c are flat arrays of one type, float32 or float64; ao, bo, co offsets into them and the
    other numbers strides, all in elements; `mode` is FRESH, CONTINUED or ADDED. With `skips` an
    element of a whose bits are all ones leaves the sum untouched, whatever b holds.

    If a and b are uint32, each element is a pair of bfloat16 numbers, two k in one (the lower half
    comes first), and c is float32. The processor adds the upper product, then the lower one.
    """

    @intrinsic
    def compute(typingctx, a, ao, a_row, a_k, b, bo, b_k, c, co, c_row, K, mode):
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _emit_tile(context, builder, sig.args, args, rows, vectors, width, skips)
            return context.get_dummy_value()

        ints = types.int64
        return types.void(a, ints, ints, ints, b, ints, ints, c, ints, ints, ints, ints), codegen

    return compute


def _emit_tile(
    context: Any,
    b: Any,
    kinds: Any,
    args: Any,
    rows: int,
    vectors: int,
    length: int,
    skips: bool,
) -> None:
    _, ao, a_row, a_k, _, bo, b_k, _, co, c_row, K, mode = args
    width = lanes(kinds[0].dtype.bitwidth // 8, length)
    vector = ir.VectorType(context.get_data_type(kinds[7].dtype), width)
    operand = ir.VectorType(context.get_data_type(kinds[0].dtype), width)
    fma = multiply_add(b, vector) if operand == vector else _pair_products(b, vector)

    def start(n: int, offset: Any) -> Any:
        return b.gep(make_array(kinds[n])(context, b, args[n]).data, [offset])

    a, bb, c = start(0, ao), start(4, bo), start(7, co)
    places = [
        [b.gep(c, [b.add(b.mul(c_row, _i64(i)), _i64(j * width))]) for j in range(vectors)]
        for i in range(rows)
    ]
    sums = [[cgutils.alloca_once(b, vector) for _ in range(vectors)] for _ in range(rows)]
    each = [(i, j) for i in range(rows) for j in range(vectors)]

    with b.if_else(b.icmp_signed("==", mode, _i64(CONTINUED))) as (continued, fresh):
        with continued:
            for i, j in each:
                b.store(load(b, places[i][j], vector), sums[i][j])
        with fresh:
            for i, j in each:
                b.store(ir.Constant(vector, [0.0] * width), sums[i][j])
    three = b.mul(a_row, _i64(3))
    with cgutils.for_range(b, K) as loop:
        row = b.gep(bb, [b.mul(loop.index, b_k)])
        right = [load(b, b.gep(row, [_i64(j * width)]), operand) for j in range(vectors)]
        column = _opaque(b, b.gep(a, [b.mul(loop.index, a_k)]))
        for i in range(rows):
            if i and not i % 3:
                column = _opaque(b, b.gep(column, [three]))
            left = splat(b, b.load(b.gep(column, [b.mul(a_row, _i64(i % 3))])), operand)
            if skips:
                bits = b.bitcast(left, ir.VectorType(ir.IntType(8 * _align(vector)), width))
                taken = b.icmp_signed("!=", bits, ir.Constant(bits.type, [-1] * width))
            for j in range(vectors):
                before = b.load(sums[i][j])
                after = fma(left, right[j], before)
                b.store(b.select(taken, after, before) if skips else after, sums[i][j])
    with b.if_else(b.icmp_signed("==", mode, _i64(ADDED))) as (added, stored):
        with added:
            for i, j in each:
                before = load(b, places[i][j], vector)
                store(b, b.fadd(before, b.load(sums[i][j])), places[i][j])
        with stored:
            for i, j in each:
                store(b, b.load(sums[i][j]), places[i][j])


def _opaque(b: Any, value: Any) -> Any:
    """The same value, of which the compiler knows nothing.

    It would else keep a pointer to every row of a, more than there are registers, and reach a
    third less speed. As it is, three rows share one: a machine adds 0, 1 or 2 times a stride.
    """
    kind = ir.FunctionType(value.type, [value.type])
    return b.asm(kind, "", "=r,0", [value], False)


def multiply_add(b: Any, vector: Any) -> Any:
    """LLVM's fused multiply-add on vectors, as a function of three values."""
    letter = "f32" if isinstance(vector.element, ir.FloatType) else "f64"
    kind = ir.FunctionType(vector, [vector] * 3)
    fma = cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{vector.count}{letter}")
    return lambda x, y, z: b.call(fma, [x, y, z])


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not spell."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def _pair_products(b: Any, vector: Any) -> Any:
    """z + x y for pairs of bfloat16, as one instruction of AVX512-BF16."""
    pairs = ir.VectorType(_BFloat(), 2 * vector.count)
    kind = ir.FunctionType(vector, [vector, pairs, pairs])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * vector.count}"
    dot = cgutils.get_or_insert_function(b.module, kind, name)
    return lambda x, y, z: b.call(dot, [z, b.bitcast(x, pairs), b.bitcast(y, pairs)])


def splat(b: Any, scalar: Any, vector: Any) -> Any:
    """A vector that holds `scalar` in every lane."""
    blank = ir.Constant(vector, ir.Undefined)
    lanes_of_it = ir.Constant(ir.VectorType(_i32, vector.count), [0] * vector.count)
    return b.shuffle_vector(b.insert_element(blank, scalar, _i32(0)), blank, lanes_of_it)


def load(b: Any, pointer: Any, vector: Any) -> Any:
    """The vector at `pointer`, which need only be aligned as its elements are."""
    value = b.load(b.bitcast(pointer, vector.as_pointer()))
    value.align = _align(vector)
    return value


def store(b: Any, value: Any, pointer: Any) -> None:
    """Write the vector to `pointer`."""
    b.store(value, b.bitcast(pointer, value.type.as_pointer())).align = _align(value.type)


def _align(vector: Any) -> int:
    return 8 if isinstance(vector.element, ir.DoubleType) else 4


@intrinsic
def transpose(typingctx, x, xo, x_row, out, o, o_row):
    """out[o + j o_row + i] = x[xo + i x_row + j] for i, j < lanes, in registers."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, xo, x_row, _, o, o_row = args
        width = lanes(sig.args[0].dtype.bitwidth // 8)
        vector = ir.VectorType(context.get_data_type(sig.args[0].dtype), width)
        x, out = (make_array(sig.args[n])(context, b, args[n]).data for n in (0, 3))
        rows = [load(b, b.gep(x, [b.add(xo, b.mul(x_row, _i64(i)))]), vector) for i in range(width)]
        size = 1
        while size < width:  # exchange the off-diagonal blocks of this size
            low = [n if not n & size else width + n - size for n in range(width)]
            high = [n + size if not n & size else width + n for n in range(width)]
            for i in range(width):
                if not i & size:
                    pair = rows[i], rows[i + size]
                    rows[i], rows[i + size] = (
                        _shuffle(b, *pair, low),
                        _shuffle(b, *pair, high),
                    )
            size *= 2
        for j, row in enumerate(rows):
            store(b, row, b.gep(out, [b.add(o, b.mul(o_row, _i64(j)))]))
        return context.get_dummy_value()

    ints = types.int64
    return types.void(x, ints, ints, out, ints, ints), codegen


@intrinsic
def move_panel(typingctx, x, xo, out, o):
    """Copy VECTORS vectors from x[xo:] to out[o:]."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        _, xo, _, o = args
        width = lanes(sig.args[0].dtype.bitwidth // 8)
        vector = ir.VectorType(context.get_data_type(sig.args[0].dtype), width)
        x, out = (make_array(sig.args[n])(context, b, args[n]).data for n in (0, 2))
        for j in range(VECTORS):
            value = load(b, b.gep(x, [b.add(xo, _i64(j * width))]), vector)
            store(b, value, b.gep(out, [b.add(o, _i64(j * width))]))
        return context.get_dummy_value()

    return types.void(x, types.int64, out, types.int64), codegen


def _shuffle(b: Any, x: Any, y: Any, places: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_i32, len(places)), places))


@intrinsic
def pointer(typingctx, address):
    """An address as a pointer, for numba.carray."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(sig.return_type))

    return types.voidptr(types.int64), codegen


@functools.cache
def ask_for(lines: int) -> Any:
    """A function of an address that asks for so many lines of memory, into the second-level cache.

    For what the hardware does not foresee: rows of a table, rows of a matrix a few pages apart.
    """

    @intrinsic
    def ask(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            byte = ir.IntType(8).as_pointer()
            kind = ir.FunctionType(ir.VoidType(), [byte, _i32, _i32, _i32])
            fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
            for line in range(lines):
                at = b.inttoptr(b.add(args[0], _i64(line * LINE)), byte)
                b.call(fetch, [at, _i32(0), _i32(2), _i32(1)])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return ask


LINE = 64  # bytes


@intrinsic
def array_at(typingctx, address, kind):
    """The memory from `address` on as a flat array of what `kind` is, or is an array or type of."""
    dtype: Any = kind.dtype if isinstance(kind, types.Array) else kind
    if isinstance(kind, types.NumberClass):
        dtype = kind.instance_type
    array_type = types.Array(dtype, 1, "C")

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        array = make_array(array_type)(context, b)
        size = context.get_constant(types.intp, dtype.bitwidth // 8)
        data = b.inttoptr(args[0], array.data.type)
        endless = context.get_constant(types.intp, 1 << 48)
        populate_array(array, data, [endless], [size], size, meminfo=None)
        return array._getvalue()

    return array_type(types.int64, kind), codegen
