"""Randomness as a function of a name: Philox 4x64-10 (Salmon et al. 2011) from a hashed key.

There is no generator with a state. A key says what the numbers are for; word i of a key is
always the same, whoever draws it and in whatever order, so threads share the work freely.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import cuda, mathf
from .backend import array_module, kernel
from .buffers import empty
from .cuda_formula import write
from .launch import body, device, get_num_threads

BLOCK = 1024  # Philox counters per index of a body: long against a launch, short against a thread


def make_key(purpose: str, seed: int, *more: Any) -> bytes:
    """The key of (purpose, seed, name or step, micro-batch, site, sample): 16 bytes.

    The first half of SHA-256 over the JSON list of the arguments.
    """
    return hashlib.sha256(json.dumps([purpose, seed, *more]).encode()).digest()[:16]


def key_words(key: bytes) -> tuple[int, int]:
    """The two 64-bit halves of a key, low one first, as the signed integers that bodies take."""
    if not isinstance(key, bytes) or len(key) != 16:
        raise TypeError(f"key: 16 bytes of make_key needed, given {key!r}")
    return struct.unpack("<qq", key)


def raw_words(key: bytes, n: int) -> np.ndarray:
    """The first `n` 64-bit words of the key's stream: word i is number i % 4 of counter 1 + i // 4.

    That is `np.random.Philox(key=...).random_raw(n)`, which NumPy keeps stable.
    """
    return fill_words(_blank(key, (n,), np.uint64), key)


def uniform(key: bytes, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """float32 numbers low + (high - low) u, with u in [0, 1) the top 24 bits of a word each."""
    if not low <= high:
        raise ValueError(f"uniform: low <= high needed, given {low} and {high}")
    return fill_uniform(_blank(key, shape, np.float32), key, low, high).reshape(shape)


def normal(key: bytes, shape: tuple[int, ...], std: float = 1.0) -> np.ndarray:
    """float32 numbers from a normal distribution (Box & Muller 1958, both branches).

    Computed in float64 by the engine's own log, cos and sin, and rounded once.
    """
    if not std >= 0:
        raise ValueError(f"normal: std must not be negative, given {std}")
    return fill_normal(_blank(key, shape, np.float32), key, std).reshape(shape)


def permutation(key: bytes, n: int) -> np.ndarray:
    """0 .. n - 1 in an order drawn from the key: sorted by word, equal words by number."""
    return np.argsort(raw_words(key, n), kind="stable")


def _blank(key, shape, dtype):
    key_words(key)  # of the right kind, or an error here
    if any(s < 0 for s in shape):
        raise ValueError(f"random numbers of shape {shape} asked for: no side may be negative")
    return empty(math.prod(shape), dtype)


@kernel
def fill_words(out, key):
    n = out.size
    out[...] = array_module(out).asarray(
        np.random.Philox(key=int.from_bytes(key, "little")).random_raw(n)
    )
    return out


@kernel
def fill_uniform(out, key, low, high):
    u = (fill_words.reference(np.empty(out.size, np.uint64), key) >> np.uint64(40)) * 2.0**-24
    out[...] = array_module(out).asarray(low + (high - low) * u)
    return out


@kernel
def fill_normal(out, key, std):
    n = out.size
    words = fill_words.reference(np.empty(n + n % 2, np.uint64), key) >> np.uint64(11)
    u1, u2 = (words[0::2] + np.uint64(1)) * 2.0**-53, words[1::2] * 2.0**-53
    r, angle = np.sqrt(-2 * np.log(u1)), 2 * np.pi * u2
    z = np.stack([r * np.cos(angle), r * np.sin(angle)], axis=1).reshape(-1)[:n]
    out[...] = array_module(out).asarray(z * std)
    return out


# --- CPU -----------------------------------------------------------------------------------

_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)  # multipliers
_W0, _W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)  # added to the key


def _high_words(typingctx: Any, a: Any, b: Any) -> Any:
    """The upper 64 bits of the 128-bit product."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(x, wide) for x in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), codegen


_high_product: Any = intrinsic(_high_words)


@device
def philox(key0, key1, block):
    """Words 4 block .. 4 block + 3 of the key's stream."""
    k0, k1 = np.uint64(key0), np.uint64(key1)
    c0, c1, c2, c3 = np.uint64(block) + np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(10):
        high0, low0 = _high_product(_M0, c0), _M0 * c0
        high1, low1 = _high_product(_M1, c2), _M1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@device
def philox_word(key0, key1, i):
    """Word i of the key's stream."""
    c0, c1, c2, c3 = philox(key0, key1, i >> 2)
    lane = i & 3
    return (c0 if lane == 0 else c1) if lane < 2 else (c2 if lane == 2 else c3)


@body
def words_cpu(i, key0, key1, out):  # owns out[4 BLOCK i : 4 BLOCK (i + 1)], as those below
    for block in range(BLOCK * i, min(BLOCK * (i + 1), (out.size + 3) // 4)):
        four = philox(key0, key1, block)
        for lane in range(min(4, out.size - 4 * block)):
            out[4 * block + lane] = four[lane]


@body
def uniform_cpu(i, key0, key1, low, high, out):
    for block in range(BLOCK * i, min(BLOCK * (i + 1), (out.size + 3) // 4)):
        four = philox(key0, key1, block)
        for lane in range(min(4, out.size - 4 * block)):
            u = np.float64(four[lane] >> np.uint64(40)) * 2.0**-24
            out[4 * block + lane] = np.float32(low + (high - low) * u)


@body
def normal_cpu(i, thread, key0, key1, std, uniform, out):
    """`uniform` is scratch of a thread: u1 and the angle of each pair, for a loop over vectors."""
    u, angle = uniform[thread, 0], uniform[thread, 1]
    for block in range(BLOCK):
        four = philox(key0, key1, BLOCK * i + block)
        for pair in range(2):
            high, low = four[2 * pair] >> np.uint64(11), four[2 * pair + 1] >> np.uint64(11)
            u[2 * block + pair] = np.float64(high + np.uint64(1)) * 2.0**-53
            angle[2 * block + pair] = (2 * np.pi) * (np.float64(low) * 2.0**-53)
    to = out[4 * BLOCK * i : min(4 * BLOCK * (i + 1), out.size)]
    for n in range(to.size // 2):
        r = np.sqrt(-2.0 * mathf.log(u[n]))
        to[2 * n] = np.float32(r * mathf.cos(angle[n]) * std)
        to[2 * n + 1] = np.float32(r * mathf.sin(angle[n]) * std)
    if to.size % 2:
        n = to.size // 2
        to[2 * n] = np.float32(np.sqrt(-2.0 * mathf.log(u[n])) * mathf.cos(angle[n]) * std)


def _launch(fill, out, key, *more):
    fill(-(-out.size // (4 * BLOCK)), *key_words(key), *more, out)
    return out


@fill_words.cpu
def fill_words_cpu(out, key):
    return _launch(words_cpu, out, key)


@fill_uniform.cpu
def fill_uniform_cpu(out, key, low, high):
    return _launch(uniform_cpu, out, key, np.float64(low), np.float64(high))


@fill_normal.cpu
def fill_normal_cpu(out, key, std):
    uniform = empty((get_num_threads(), 2, 2 * BLOCK), np.float64)
    return _launch(normal_cpu, out, key, np.float64(std), uniform)


# --- GPU -----------------------------------------------------------------------------------

PHILOX = r"""
struct Four { u64 word[4]; };

// Words 4 block .. 4 block + 3 of the key's stream.
__device__ inline Four philox(u64 k0, u64 k1, i64 block) {
    const u64 m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
    u64 c0 = (u64)block + 1, c1 = 0, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        const u64 high0 = __umul64hi(m0, c0), low0 = m0 * c0;
        const u64 high1 = __umul64hi(m1, c2), low1 = m1 * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B97F4A7C15ull, k1 += 0xBB67AE8584CAA73Bull;
    }
    return {{c0, c1, c2, c3}};
}
"""


def _cos(x):
    return mathf._turn(x, mathf._I1)


def _sin(x):
    return mathf._turn(x, mathf._I0)


# A thread a block of the stream.
_source = cuda.Source(
    lambda real: (
        PHILOX
        + write("turned_cos", _cos, "double")
        + write("turned_sin", _sin, "double")
        + r"""
extern "C" __global__ void words(i64 k0, i64 k1, u64 *out, i64 n) {
    const i64 block = this_thread(), start = 4 * block;
    if (start >= n) return;
    const Four four = philox(k0, k1, block);
    for (int i = 0; i < 4 && start + i < n; i++) out[start + i] = four.word[i];
}
extern "C" __global__ void uniform(i64 k0, i64 k1, double low, double high, float *out, i64 n) {
    const i64 block = this_thread(), start = 4 * block;
    if (start >= n) return;
    const Four four = philox(k0, k1, block);
    for (int i = 0; i < 4 && start + i < n; i++) {
        const double u = (double)(four.word[i] >> 40) * 0x1p-24;
        out[start + i] = (float)(low + (high - low) * u);
    }
}
extern "C" __global__ void normal(i64 k0, i64 k1, double std, float *out, i64 n) {
    const i64 block = this_thread(), start = 4 * block;
    if (start >= n) return;
    const Four four = philox(k0, k1, block);
    for (int i = 0; i < 4 && start + i < n; i += 2) {
        const double u = (double)((four.word[i] >> 11) + 1) * 0x1p-53;
        const double angle = 0x1.921fb54442d18p+2 * ((double)(four.word[i + 1] >> 11) * 0x1p-53);
        const double r = root(-2.0 * log_(u));
        out[start + i] = (float)(r * turned_cos(angle) * std);
        if (start + i + 1 < n) out[start + i + 1] = (float)(r * turned_sin(angle) * std);
    }
}
"""
    )
)


def _launch_gpu(name, out, key, *more):
    n = cuda.blocks(cuda.blocks(out.size, 4))
    _source(name, n, cuda.THREADS, *map(np.int64, key_words(key)), *more, out, out.size)
    return out


@fill_words.gpu
def fill_words_gpu(out, key):
    return _launch_gpu("words", out, key)


@fill_uniform.gpu
def fill_uniform_gpu(out, key, low, high):
    return _launch_gpu("uniform", out, key, np.float64(low), np.float64(high))


@fill_normal.gpu
def fill_normal_gpu(out, key, std):
    return _launch_gpu("normal", out, key, np.float64(std))
