"""float32 rounded to 16 bits, to the nearest, ties to even.

bfloat16 is the upper half of a float32: uint16 holds its bits. IEEE float16 is held as int16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import cuda
from ..backend import array_module, kernel
from ..buffers import empty
from ..lanes import LANES, bits, iadd, iand, ior, ishr, load, low_halves, select, store
from ..launch import body, device

BLOCK = 1 << 16


def in_precision(x, name):
    """float32 `x` in the 16 bits of "bf16" or "fp16"; in "fp32" it stays, as other arrays do."""
    if name == "fp32" or x.dtype != np.float32:
        return x
    return round_bfloat16(x) if name == "bf16" else round_float16(x)


def once(fn):
    """`fn` of an array; asked for the same array again, it does not compute anew.

    Both gradients of a product want the arriving one rounded, one right after the other.
    """
    asked: Any = None
    answer: Any = None

    def remembered(x):
        nonlocal asked, answer
        if asked is not x:
            asked, answer = x, fn(x)
        return answer

    return remembered


@kernel
def round_bfloat16(x):
    """The bits of the bfloat16 numbers nearest to x."""
    b = x.view(np.uint32)
    # Half of the last place that stays, less one bit if that place is even: a tie rounds to even.
    rounded = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    is_nan = (b & 0x7FFFFFFF) > 0x7F800000  # rounding could carry a NaN into infinity
    return array_module(x).where(is_nan, (b >> 16) | 0x40, rounded).astype(np.uint16)


@kernel
def round_float16(x):
    """The bits of the float16 numbers nearest to x: beyond 65520 infinity, subnormals kept."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.int16)


# --- CPU -----------------------------------------------------------------------------------


@round_bfloat16.cpu
def round_bfloat16_cpu(x):
    out = empty(x.shape, np.uint16)
    _bfloat16(-(-x.size // BLOCK), x.reshape(-1), out.reshape(-1))
    return out


@round_float16.cpu
def round_float16_cpu(x):
    out = empty(x.shape, np.int16)
    _float16(-(-x.size // BLOCK), x.reshape(-1), out.reshape(-1).view(np.uint16))
    return out


@body
def _bfloat16(i, x, out):
    start, stop = i * BLOCK, min((i + 1) * BLOCK, len(x))
    whole = start + (stop - start) // LANES * LANES
    for j in range(start, whole, LANES):
        store(out, j, low_halves(_upper_half(load(x, j))))
    for j in range(whole, stop):
        out[j] = np.uint16(_upper_half(x[j]))


@device
def _upper_half(x):
    """A number rounded to bfloat16, in the lower 16 bits of an int32. Numba's own operators
    would make an int64 of it, half as fast.
    """
    b = bits(x)
    last = ishr(b, _16)
    rounded = ishr(iadd(iadd(b, _ALMOST_HALF), iand(last, _1)), _16)
    return select(x == x, rounded, ior(last, _QUIET))


_1, _16, _ALMOST_HALF, _QUIET = (np.int32(n) for n in (1, 16, 0x7FFF, 0x40))


@body
def _float16(i, x, out):
    x, out = x[i * BLOCK : (i + 1) * BLOCK], out[i * BLOCK : (i + 1) * BLOCK]
    words = x.view(np.uint32)
    for j in range(len(x)):
        sign, b = words[j] >> np.uint32(16) & np.uint32(0x8000), words[j] & np.uint32(0x7FFFFFFF)
        # Normal: the exponent moves by 112, 13 bits of the fraction are rounded off.
        rest = b - np.uint32(112 << 23)
        normal = (rest + np.uint32(0xFFF) + (rest >> np.uint32(13) & np.uint32(1))) >> np.uint32(13)
        # Subnormal: a last place of 2**-24 is what 1/2 has, so adding 1/2 rounds it off.
        tiny = np.uint32(bits(np.float32(abs(x[j]) + np.float32(0.5)))) - np.uint32(0x3F000000)
        h = tiny if b < np.uint32(113 << 23) else normal
        if b >= np.uint32(0x47800000):  # 65536 and more; numbers from 65520 on got here by rounding
            h = np.uint32(0x7C00)
        if b > np.uint32(0x7F800000):
            h = np.uint32(0x7E00)
        out[j] = np.uint16(sign | h)


# --- GPU -----------------------------------------------------------------------------------

_GPU = cuda.Source(r"""
extern "C" __global__ void to_bfloat16(const u32 *x, u16 *out, i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const u32 b = x[i], last = b >> 16;
    out[i] = (b & 0x7fffffff) > 0x7f800000 ? last | 0x40 : (b + 0x7fff + (last & 1)) >> 16;
}
extern "C" __global__ void to_float16(const u32 *x, u16 *out, i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const u32 sign = x[i] >> 16 & 0x8000, b = x[i] & 0x7fffffff, rest = b - (112u << 23);
    u32 h = (rest + 0xfff + (rest >> 13 & 1)) >> 13;
    if (b < 113u << 23) h = (u32)bits_of(from_bits((int)b) + 0.5f) - 0x3f000000;
    if (b >= 0x47800000) h = 0x7c00;
    if (b > 0x7f800000) h = 0x7e00;
    out[i] = sign | h;
}""")


def _on_gpu(name, dtype):
    def fast(x):
        out = cuda.empty(x.shape, dtype)
        _GPU(name, cuda.blocks(x.size), cuda.THREADS, x, out, x.size)
        return out

    return fast


round_bfloat16.gpu(_on_gpu("to_bfloat16", np.uint16))
round_float16.gpu(_on_gpu("to_float16", np.int16))
