"""What the forward and the backward of attention share: packing, masks and products of tiles."""

# The keys of a tile are numbered from 0; a row sees those in [low, high) that are live.

from __future__ import annotations

import functools

import numpy as np

from .. import tile as tiles
from ..lanes import keep_first, less, load, select, splat
from ..launch import VECTOR_WIDTH, device
from .attention_plan import TILE
from .dropout import keep_64

STRIP = 8 if VECTOR_WIDTH == 16 else 4  # rows of a register tile; TILE rows are whole strips
PAD = 32  # head sizes are filled up with zeros to whole register tiles of any machine
_whole = tiles.tile(STRIP, 2)
_partial = tiles.tile(STRIP, 2, skips=True)


@functools.cache
def blank(dtype: np.dtype) -> np.ndarray:
    """What stands where a row does not see a key: all bits set, which the products skip."""
    return np.full(16 * dtype.itemsize, 255, np.uint8).view(dtype)


@device
def span(first, last, nk, k0, reach, window):
    """For queries first .. last: the keys that one of them sees, and those that all see."""
    low = max(0, first - window + 1 - k0)
    high = min(nk, last + 1 + reach - k0)
    all_low = max(low, last - window + 1 - k0)
    all_high = min(high, first + 1 + reach - k0)
    if all_high < all_low:
        all_low = all_high = high
    return low, all_low, all_high, high


@device
def masked(x, c, low, high, other):
    """Lanes x of keys c .. c + 15, and `other` where the key is not in [low, high)."""
    return keep_first(high - c, keep_first(low - c, other, x), other)


@device
def alive(x, c, live, other):
    """Lanes x of keys c .. c + 15, and `other` where the key is of another segment."""
    return select(less(splat(live.dtype.type(0)), load(live, c)), x, other)


@device(forceinline=False)
def find_live(segments, b, own, k0, nk, live):
    """live[j] is 1 if key k0 + j is of the segment of key `own`, else 0."""
    for j in range(TILE):
        live[j] = 1 if j < nk and segments[b, k0 + j] == segments[b, own] else 0


@device
def row_stride(x):
    return x.strides[1] // x.itemsize


@device
def offset(x, b, s, h):
    """Where x[b, s, h, 0] is, in elements."""
    return (b * x.strides[0] + s * x.strides[1] + h * x.strides[2]) // x.itemsize


@device(forceinline=False)
def pack(x, b, k0, h, nk, out):
    """out (D, TILE) = x[b, k0 : k0 + nk, h] transposed, filled up with 0."""
    D = x.shape[3]
    if nk == TILE:
        L = VECTOR_WIDTH * 4 // out.itemsize
        for j in range(0, TILE, L):
            for d in range(0, D, L):
                at = offset(x, b, k0 + j, h) + d
                tiles.transpose(x, at, row_stride(x), out, d * TILE + j, TILE)
    else:
        for d in range(D):
            for j in range(TILE):
                out[d * TILE + j] = x[b, k0 + j, h, d] if j < nk else 0


@device(forceinline=False)
def scores(x, rows, xt, D, low, high, out):
    """out (rows, TILE) = x (rows, D) xt (D, TILE): chains over d; of the columns low .. high."""
    W = 2 * VECTOR_WIDTH * 4 // out.itemsize
    for j in range(low // W * W, high, W):
        for i in range(0, rows, STRIP):
            _whole(x, i * D, D, 1, xt, j, TILE, out, i * TILE + j, TILE, D, tiles.FRESH)


@device(forceinline=False)
def product(a, ao, a_row, a_k, b, bo, b_k, c, co, D, low, all_low, all_high, high):
    """c (STRIP, D) += a b: chains over k in [low, high), none blank in [all_low, all_high)."""
    W = 2 * VECTOR_WIDTH * 4 // c.itemsize
    for d in range(0, D, W):
        for k, stop in ((low, all_low), (all_high, high)):
            if k == all_high and all_high > all_low:
                _whole(
                    a, ao + all_low * a_k, a_row, a_k,
                    b, bo + all_low * b_k + d, b_k,
                    c, co + d, D, all_high - all_low, tiles.CONTINUED,
                )  # fmt: skip
            if stop > k:
                _partial(
                    a, ao + k * a_k, a_row, a_k,
                    b, bo + k * b_k + d, b_k,
                    c, co + d, D, stop - k, tiles.CONTINUED,
                )  # fmt: skip


@device(forceinline=False)
def draw(key0, key1, threshold, boost, first, factor, o):
    """factor[o + j] = boost if dropout keeps element first + j, else 0."""
    kept = keep_64(key0, key1, first, threshold)
    for j in range(TILE):
        factor[o + j] = boost if (kept >> np.uint64(j)) & np.uint64(1) else factor.dtype.type(0)
