"""Randomness as a function of a name: Philox 4x64-10 (Salmon et al. 2011) from a hashed key.

There is no generator with a state. A key says what the numbers are for; word i of a key is
always the same, whoever draws it and in whatever order.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np


def make_key(purpose: str, seed: int, *more: Any) -> bytes:
    """The key of (purpose, seed, name or step, micro-batch, site, sample): 16 bytes.

    The first half of SHA-256 over the JSON list of the arguments.
    """
    return hashlib.sha256(json.dumps([purpose, seed, *more]).encode()).digest()[:16]


def raw_words(key: bytes, n: int) -> np.ndarray:
    """The first `n` 64-bit words of the key's Philox stream."""
    return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(n)


def uniform(key: bytes, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """float32 numbers uniform in [low, high): the top 24 bits of a word each."""
    u = (raw_words(key, math.prod(shape)) >> np.uint64(40)).astype(np.float64) * 2.0**-24
    return (low + (high - low) * u).astype(np.float32).reshape(shape)


def normal(key: bytes, shape: tuple[int, ...], std: float = 1.0) -> np.ndarray:
    """float32 numbers from a normal distribution (Box & Muller 1958, both branches)."""
    n = math.prod(shape)
    words = (raw_words(key, n + n % 2) >> np.uint64(11)).astype(np.float64)
    u1, u2 = (words[0::2] + 1) * 2.0**-53, words[1::2] * 2.0**-53
    r, angle = np.sqrt(-2 * np.log(u1)), 2 * np.pi * u2
    z = np.stack([r * np.cos(angle), r * np.sin(angle)], axis=1).reshape(-1)[:n]
    return (z * std).astype(np.float32).reshape(shape)
