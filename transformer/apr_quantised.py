"""The two quantised types of APR files, to bytes and back.

    AprQ8   a float32 scale s = max |x| / 127, then q = round(x / s) as int8
    AprQ4   blocks of 32, the last filled up: a float16 scale s = max |x| / 7, then 16 bytes with
            two codes q + 8 each, q = round(x / s), the even index in the lower half

Halves round away from zero; s is 1 where all x are 0. AprQ4 divides by s before it is rounded to
float16, as the original does; where s is subnormal, q is cut to -127 .. 127 or -8 .. 7.
"""

from __future__ import annotations

import numpy as np

Q4, Q8 = 128, 129
BLOCK = 32
_ENOUGH_Q4 = np.float32(7 * 65504)  # beyond it the scale is no float16


def quantised(name: str, x: np.ndarray, code: int) -> bytes:
    """The bytes of a float32 array of any shape; ValueError for what the type cannot hold."""
    x = np.ascontiguousarray(x, np.float32).reshape(-1)
    if not np.isfinite(x).all() or (code == Q4 and np.abs(x).max(initial=0) >= _ENOUGH_Q4):
        most = f" below {_ENOUGH_Q4:g}" if code == Q4 else ""
        raise ValueError(f"{name}: finite values{most} are needed to be quantised")
    if not len(x):
        return b""
    if code == Q8:
        scale, q = _codes(x[None], 127, -127)
        return scale.astype("<f4").tobytes() + q.astype(np.int8).tobytes()
    blocks = np.zeros((-(-len(x) // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: len(x)] = x
    scales, q = _codes(blocks, 7, -8)
    codes = (q + 8).astype(np.uint8).reshape(-1)
    codes[len(x) :] = 0
    raw = np.empty((len(blocks), 18), np.uint8)
    raw[:, :2] = scales.astype("<f2").view(np.uint8)
    raw[:, 2:] = (codes[0::2] | codes[1::2] << 4).reshape(len(blocks), 16)
    return raw.tobytes()


def _codes(x: np.ndarray, most: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """The scale of each row, as a column, and the rounded quotients.   (N, K) -> (N, 1), (N, K)"""
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(most)
    scale[scale == 0] = 1
    ratio = x / scale
    # floor(|t| + 1/2) in float64, where the sum is exact.
    q = np.copysign(np.floor(np.abs(ratio).astype(np.float64) + 0.5), ratio)
    return scale, np.clip(q, least, most)


def dequantised(name: str, raw: np.ndarray, n: int, code: int) -> np.ndarray:
    """The `n` float32 values in bytes of the type `code`; ValueError if that is not their number.

    raw (bytes) uint8 -> (n)
    """
    if code in (Q4, Q8) and not n and not len(raw):
        return np.empty(0, np.float32)
    if code == Q8 and len(raw) == 4 + n:
        return raw[4:].view(np.int8).astype(np.float32) * raw[:4].view("<f4")[0]
    if code == Q4 and len(raw) == 18 * -(-n // BLOCK):
        blocks = raw.reshape(-1, 18)
        scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        low, high = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
        q = np.stack([low, high], axis=2).reshape(-1, BLOCK).astype(np.float32) - 8
        return (q * scales).reshape(-1)[:n]
    raise ValueError(
        f"{name}: type {code} in {len(raw)} bytes for {n} values cannot be read; "
        "F32, F16, BF16, AprQ4 or AprQ8 is needed"
    )
