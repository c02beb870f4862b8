"""How a GPU kernel runs: CUDA sources beside the ops, compiled when they are first needed.

    _rows = Source(r'''
    extern "C" __global__ void scale(const REAL *x, REAL factor, REAL *out, i64 n) {
        i64 i = this_thread();
        if (i < n) out[i] = x[i] * factor;
    }''')

    _rows("scale", blocks(x.size), THREADS, x, x.dtype.type(2), out, x.size, real=x.dtype)

REAL is float or double. The order of every sum is that of the CPU's body. The compiler fuses no
multiplication with an addition, flushes no subnormal number, and divides and takes roots as IEEE
demands; `fma` is written where the CPU has one. So float32 results have the CPU's bits. Grids and
blocks have one dimension, indices 64 bits, and no sum is made by atomic additions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import backend
from .cuda_formula import functions

THREADS = 256  # of a block
LANES = 16  # half a warp sums a row, in the lanes of the contract

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
REALS = {"f": "float", "d": "double"}
SOURCES: list[Source] = []


class Source:
    """CUDA functions in one text, which `PRELUDE` and the engine's own exp, log ... precede.

    Where the text is not the same for "float" and "double", it is a function of these words.
    """

    def __init__(self, text: str | Callable[[str], str]):
        self.text = text
        SOURCES.append(self)

    def code(self, real: str) -> str:
        """All that the compiler reads."""
        text = self.text if isinstance(self.text, str) else self.text(real)
        return f"#undef REAL\n#define REAL {real}\n{PRELUDE}{functions()}{text}"

    def __call__(
        self, name: str, blocks: int, threads: int, *args: Any, real: Any = np.float32
    ) -> None:
        """Launch the function `name`; whole numbers are passed as 64 bits."""
        if blocks:
            args = tuple(np.int64(a) if isinstance(a, int) else a for a in args)
            _function(self, name, np.dtype(real).char)((blocks,), (threads,), args)


@functools.cache
def _function(source: Source, name: str, real: str) -> Any:
    return _module(source, real).get_function(name)


@functools.cache
def _module(source: Source, real: str) -> Any:
    return backend.cupy.RawModule(code=source.code(REALS[real]), options=OPTIONS)


def blocks(n: int, threads: int = THREADS) -> int:
    """How many blocks it takes to have a thread for each of n things."""
    return -(-n // threads)


def row_blocks(n: int) -> int:
    """The same for rows, each of which has 16 threads."""
    return -(-n // (THREADS // LANES))


def empty(shape: Any, dtype: Any) -> Any:
    """An uninitialised array on the GPU."""
    return backend.cupy.empty(shape, dtype)


def asarray(x: Any) -> Any:
    """x as an array on the GPU."""
    return backend.cupy.asarray(x)


# Sums along a row: element i in lane i mod 16, then +8, +4, +2, +1. All 16 threads get the result.
# `this_row` is less than the number of rows for all threads of a half warp, or for none; a warp
# whose rows have ended goes on with row 0, for a shuffle needs all its threads.
PRELUDE = r"""
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned int u32;

__device__ inline i64 this_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline i64 this_row() { return this_thread() / 16; }
__device__ inline int this_lane() { return threadIdx.x % 16; }

__device__ inline float fma_(float x, float y, float z) { return fmaf(x, y, z); }
__device__ inline double fma_(double x, double y, double z) { return fma(x, y, z); }
__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }
__device__ inline float absolute(float x) { return fabsf(x); }
__device__ inline double absolute(double x) { return fabs(x); }
__device__ inline float with_sign(float x, float y) { return copysignf(x, y); }
__device__ inline double with_sign(double x, double y) { return copysign(x, y); }
__device__ inline int bits_of(float x) { return __float_as_int(x); }
__device__ inline i64 bits_of(double x) { return __double_as_longlong(x); }
__device__ inline float from_bits(int x) { return __int_as_float(x); }
__device__ inline double from_bits(i64 x) { return __longlong_as_double(x); }
__device__ inline float to_real(int x) { return (float)x; }
__device__ inline double to_real(i64 x) { return (double)x; }
__device__ inline int shifted(int x, int n) { return (int)((u32)x << n); }
__device__ inline i64 shifted(i64 x, i64 n) { return (i64)((u64)x << n); }
__device__ inline int added(int x, int y) { return (int)((u32)x + (u32)y); }
__device__ inline i64 added(i64 x, i64 y) { return (i64)((u64)x + (u64)y); }
__device__ inline int taken(int x, int y) { return (int)((u32)x - (u32)y); }
__device__ inline i64 taken(i64 x, i64 y) { return (i64)((u64)x - (u64)y); }

// What 16 bits stand for: those of a bfloat16 (u16), and of a float16 (short). Others stay.
__device__ inline float widened(u16 x) { return from_bits((int)((u32)x << 16)); }
__device__ inline float widened(short x) {
    const u32 sign = ((u32)x & 0x8000) << 16, size = ((u32)x & 0x7fff) << 13;
    const u32 scaled = bits_of(from_bits((int)size) * 0x1p112f);  // exact; subnormals too
    return from_bits((int)(sign | (size >= 0x7c00u << 13 ? size | 0x7f800000 : scaled)));
}
__device__ inline float widened(float x) { return x; }
__device__ inline double widened(double x) { return x; }

// The larger; NaN if one is NaN, and of two zeros the positive one.
template <class T> __device__ inline T larger(T x, T y) {
    return x != x ? x : y != y ? y : x > y ? x : y > x ? y : bits_of(x) < 0 ? y : x;
}
template <class T> __device__ inline T infinity();
template <> __device__ inline float infinity<float>() { return __int_as_float(0x7f800000); }
template <> __device__ inline double infinity<double>() {
    return __longlong_as_double(0x7ff0000000000000ll);
}

template <class T> __device__ inline T tree_sum(T x) {
    for (int step = 8; step; step /= 2) x = x + __shfl_down_sync(0xffffffffu, x, step, 16);
    return __shfl_sync(0xffffffffu, x, 0, 16);
}
template <class T> __device__ inline T tree_max(T x) {
    for (int step = 8; step; step /= 2) x = larger(x, __shfl_down_sync(0xffffffffu, x, step, 16));
    return __shfl_sync(0xffffffffu, x, 0, 16);
}
template <class T> __device__ inline T row_sum(const T *x, i64 n) {
    T total = 0;
    for (i64 i = this_lane(); i < n; i += 16) total = total + x[i];
    return tree_sum(total);
}
template <class T> __device__ inline T row_dot(const T *x, const T *y, i64 n) {
    T total = 0;
    for (i64 i = this_lane(); i < n; i += 16) total = fma_(x[i], y[i], total);
    return tree_sum(total);
}
template <class T> __device__ inline T row_max(const T *x, i64 n) {
    T top = -infinity<T>();
    for (i64 i = this_lane(); i < n; i += 16) top = larger(top, x[i]);
    return tree_max(top);
}
"""
