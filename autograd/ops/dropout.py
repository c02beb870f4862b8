"""Dropout whose mask is a function of a key, so that a second run draws the same."""

from __future__ import annotations

import math

import numpy as np

from ..backend import kernel
from ..random import raw_words
from ..tape import op


@op
def dropout(x, *, p, key):
    """x / (1 - p) where the mask keeps it, else 0.   x (...) -> (...)"""
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p must be in [0, 1), not {p}")
    return dropout_apply(x, p, key), (lambda g: dropout_apply(g, p, key),)


@kernel
def dropout_apply(x, p, key):
    return x * keep_mask(x.shape, p, key, x.dtype)


def keep_mask(shape, p, key, dtype):
    """1 / (1 - p) or 0 for each element: element i is kept iff the top 32 bits of word i are >= p."""
    words = raw_words(key, math.prod(shape)) >> np.uint64(32)
    keep = words >= np.uint64(round(p * 2**32))
    return (keep / (1 - p)).astype(dtype).reshape(shape)
