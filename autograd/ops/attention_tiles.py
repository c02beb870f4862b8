"""What the forward and the backward of attention share: packing, masks and products of tiles.

A thread works in one flat array `w`; names such as `qs` or `kt` are places in it. The keys of a
tile are numbered from 0; a row sees those in [low, high) that are alive.
"""

# B batch, S keys or queries, H heads, D head size, filled up to a multiple of PAD.

from __future__ import annotations

import functools

import numpy as np

from .. import tile as tiles
from ..lanes import LANES, keep_first, less, load, load_float, select, store
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


# --- which keys a row sees -------------------------------------------------------------------


@device(forceinline=False)
def span(first, last, nk, reach, window):
    """For queries first .. last: the keys that one of them sees, and those that all see."""
    low, high = max(0, first - window + 1), min(nk, last + 1 + reach)
    all_low, all_high = max(low, last - window + 1), min(high, first + 1 + reach)
    if all_high < all_low:
        all_low = all_high = high
    return low, all_low, all_high, high


@device(forceinline=False)
def cover(w, row, low, high, holes, live, other):
    """Put `other` (lanes) where the row does not see the key."""
    for c in range(0, TILE, LANES):
        x = keep_first(high - c, keep_first(low - c, other, load(w, row + c)), other)
        if holes:
            x = select(less(w.dtype.type(0), load(w, live + c)), x, other)
        store(w, row + c, x)


@device(forceinline=False)
def find_live(segments, b, own, k0, nk, w, live):
    """w[live + j] is 1 if key k0 + j is of the segment of key `own`, else 0."""
    for j in range(TILE):
        w[live + j] = 1 if j < nk and segments[b, k0 + j] == segments[b, own] else 0


@device(forceinline=False)
def draw(key0, key1, threshold, boost, first, w, factor):
    """w[factor + j] = boost if dropout keeps element first + j, else 0."""
    kept = keep_64(key0, key1, first, threshold)
    for j in range(TILE):
        w[factor + j] = boost if (kept >> np.uint64(j)) & np.uint64(1) else w.dtype.type(0)


# --- rows in and out of the workspace ----------------------------------------------------------


@device
def _place(x, b, s, h):
    return (b * x.strides[0] + s * x.strides[1] + h * x.strides[2]) // x.itemsize


@device(forceinline=False)
def fetch(x, b, s, h, n, factor, w, rows):
    """w[rows] (n, D) = x[b, s : s + n, h] * factor, x of any float type, 16 bits too"""
    D = x.shape[3]
    for r in range(n):
        at, to = _place(x, b, s + r, h), rows + r * D
        for d in range(0, D, LANES):
            store(w, to + d, load_float(x, at + d) * factor)


@device(forceinline=False)
def put(w, rows, n, factor, x, b, s, h):
    """x[b, s : s + n, h] = w[rows] (n, D) * factor"""
    D = x.shape[3]
    for r in range(n):
        at, to = rows + r * D, _place(x, b, s + r, h)
        for d in range(0, D, LANES):
            store(x, to + d, load(w, at + d) * factor)


@device(forceinline=False)
def add(x, b, s, h, n, w, rows):
    """w[rows] (n, D) = x[b, s : s + n, h] + w[rows]"""
    D = x.shape[3]
    for r in range(n):
        at, to = _place(x, b, s + r, h), rows + r * D
        for d in range(0, D, LANES):
            store(w, to + d, load(x, at + d) + load(w, to + d))


@device(forceinline=False)
def clear(w, start, n):
    for d in range(start, start + n):
        w[d] = 0


@device(forceinline=False)
def pack(w, x, xt, n, D):
    """w[xt] (D, TILE) = w[x] (TILE, D) transposed; rows from n on become 0"""
    clear(w, x + n * D, (TILE - n) * D)
    L = VECTOR_WIDTH * 4 // w.itemsize
    for j in range(0, TILE, L):
        for d in range(0, D, L):
            tiles.transpose(w, x + j * D + d, D, w, xt + d * TILE + j, TILE)


# --- products ----------------------------------------------------------------------------------


@device(forceinline=False)
def scores(w, x, xt, D, low, high, s):
    """w[s] (STRIP, TILE) = w[x] (STRIP, D) w[xt] (D, TILE): chains over d; columns low .. high"""
    W = 2 * VECTOR_WIDTH * 4 // w.itemsize
    for j in range(low // W * W, high, W):
        _whole(w, x, D, 1, w, xt + j, TILE, w, s + j, TILE, D, tiles.FRESH)


@device(forceinline=False)
def product(w, a, a_row, a_k, b, c, D, low, all_low, all_high, high):
    """w[c] (STRIP, D) += a b: chains over k in [low, high), none blank in [all_low, all_high)

    a has the two strides given; w[b] is (TILE, D).
    """
    W = 2 * VECTOR_WIDTH * 4 // w.itemsize
    for d in range(0, D, W):
        start, stop = low, all_low
        for _ in range(2):  # the blanks before and after
            if stop > start:
                _partial(
                    w, a + start * a_k, a_row, a_k, w, b + start * D + d, D,
                    w, c + d, D, stop - start, tiles.CONTINUED,
                )  # fmt: skip
            if stop == all_low and all_high > all_low:
                _whole(
                    w, a + all_low * a_k, a_row, a_k, w, b + all_low * D + d, D,
                    w, c + d, D, all_high - all_low, tiles.CONTINUED,
                )  # fmt: skip
            start, stop = all_high, high
