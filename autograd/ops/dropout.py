"""Dropout whose mask is a function of a key, so that a second run draws the same.

Srivastava et al. 2014. Element i of the flattened array has 32 bits of its own in the key's
stream: the low half of word i // 2 if i is even, the high half if it is odd. It is kept iff they
are at least p 2**32, as a number.
"""

from __future__ import annotations

import math

import numpy as np

from .. import cuda
from ..backend import array_module, kernel
from ..buffers import empty
from ..launch import body, device
from ..random import PHILOX, key_words, philox, raw_words
from ..tape import op

BLOCK = 8192  # elements per index of the body


@op
def dropout(x, *, p, key):
    """x / (1 - p) where the key's mask keeps it, else 0, whatever x is there.   x (...) -> (...)"""
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p must be in [0, 1), not {p}")
    if p == 0:
        return x, (lambda g: g,)
    key_words(key)  # the right kind, or an error here
    return dropout_apply(x, p, key), (lambda g: dropout_apply(g, p, key),)


@kernel
def dropout_apply(x, p, key):
    xp = array_module(x)
    keep = xp.asarray(keep_mask(x.shape, p, key, x.dtype))
    return xp.where(keep, x * keep, x.dtype.type(0))


def keep_mask(shape, p, key, dtype):
    """1 / (1 - p) for each element of such an array that is kept, 0 for the others."""
    n = math.prod(shape)
    halves = raw_words(key, (n + 1) // 2).astype("<u8").view("<u4")[:n]
    return (
        np.where(halves >= drop_threshold(p), keep_scale(p, dtype), 0).astype(dtype).reshape(shape)
    )


def keep_scale(p, dtype):
    """What kept elements are multiplied by."""
    return np.dtype(dtype).type(1 / (1 - p))


def drop_threshold(p: float) -> int:
    """p as a 32-bit number: what the bits of a kept element reach."""
    return round(p * 2**32)


def drop_rule(p, key, dtype):
    """What bodies draw by: two words of the key, the threshold (0 is no dropout), the scale."""
    if not p:
        return 0, 0, 0, dtype.type(1)
    return *key_words(key), drop_threshold(p), keep_scale(p, dtype)


# --- CPU -----------------------------------------------------------------------------------


@device
def keep_8(key0, key1, block, threshold):
    """Bit j of the result: is element 8 block + j kept?"""
    low, limit, kept = np.uint64(0xFFFFFFFF), np.uint64(threshold), np.uint64(0)
    place = np.uint64(1)
    for word in philox(key0, key1, block):
        for half in (word & low, word >> np.uint64(32)):
            if half >= limit:
                kept |= place
            place <<= np.uint64(1)
    return kept


@device
def keep_64(key0, key1, start, threshold):
    """Bit j of the result: is element start + j kept?   A row of a tile of attention scores."""
    first, shift = start >> 3, np.uint64(start & 7)
    kept = keep_8(key0, key1, first, threshold) >> shift
    for n in range(1, 8):
        kept |= keep_8(key0, key1, first + n, threshold) << (np.uint64(8 * n) - shift)
    if shift:
        kept |= keep_8(key0, key1, first + 8, threshold) << (np.uint64(64) - shift)
    return kept


@body
def dropout_cpu(i, x, key0, key1, threshold, scale, out):  # owns out[BLOCK i : BLOCK (i + 1)]
    stop = min(BLOCK * (i + 1), x.size)
    for start in range(BLOCK * i, stop, 8):
        kept = keep_8(key0, key1, start >> 3, threshold)
        for j in range(min(8, stop - start)):
            keep = (kept >> np.uint64(j)) & np.uint64(1)
            out[start + j] = x[start + j] * scale if keep else x.dtype.type(0)


@dropout_apply.cpu
def dropout_apply_cpu(x, p, key):
    out = empty(x.shape, x.dtype)
    rule = drop_rule(p, key, x.dtype)
    dropout_cpu(-(-x.size // BLOCK), x.reshape(-1), *rule, out.reshape(-1))
    return out


# --- GPU -----------------------------------------------------------------------------------

KEEP_8 = (
    PHILOX
    + r"""
// Bit j of the result: is element 8 block + j kept?
__device__ inline int keep_8(u64 k0, u64 k1, i64 block, i64 threshold) {
    const Four four = philox(k0, k1, block);
    int kept = 0;
    for (int i = 0; i < 4; i++) {
        kept |= ((i64)(u32)four.word[i] >= threshold) << (2 * i);
        kept |= ((i64)(four.word[i] >> 32) >= threshold) << (2 * i + 1);
    }
    return kept;
}
"""
)

# A warp draws for 256 elements, 8 a thread, and exchanges what it drew: it reads x in order.
_source = cuda.Source(
    KEEP_8
    + r"""
extern "C" __global__ void drop(const REAL *x, i64 k0, i64 k1, i64 threshold, REAL scale,
                                REAL *out, i64 n) {
    const i64 block = this_thread();
    const int lane = threadIdx.x % 32;
    const int drawn = keep_8(k0, k1, block, threshold);
    for (int part = 0; part < 8; part++) {
        const int kept = __shfl_sync(0xffffffffu, drawn, 4 * part + lane / 8);
        const i64 i = 8 * (block - lane) + 32 * part + lane;
        if (i < n) out[i] = kept >> lane % 8 & 1 ? x[i] * scale : (REAL)0;
    }
}
"""
)


@dropout_apply.gpu
def dropout_apply_gpu(x, p, key):
    out = cuda.empty(x.shape, x.dtype)
    rule = drop_rule(p, key, x.dtype)
    n = cuda.blocks(cuda.blocks(x.size, 8))
    _source("drop", n, cuda.THREADS, x, *rule, out, x.size, real=x.dtype)
    return out
