"""Frozen matrices in 4 bits (QLoRA: Dettmers et al. 2023, arXiv:2305.14314).

A matrix is read row by row in blocks of 64 numbers that share a scale. Two codes make a byte, the
first in its upper half. Three kinds:

    int4         q = round(x / s) in -7 .. 7, two's complement; s = max |x| / 7
    int4-double  the same, the scales themselves in 8 bits: round(255 s / max s) of 256 at a time
    nf4          the nearest of 16 quantiles of a normal distribution times s; s = max |x|
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..autograd import Tensor
from ..autograd.backend import array_module
from ..autograd.device import device_of, to_host
from ..autograd.ops.gemm import widen
from ..autograd.ops.matmul import linear_codes
from ..transformer.module import Module

BLOCK, SUPER = 64, 256

# Table of the paper's appendix E, for codes 0 .. 15.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
INT4 = np.array([*range(8), *range(-8, 0)], np.float32)


class QuantizedLinear(Module):
    """x W^T + bias with W (O, I) in 4 bits, which is never unpacked as a whole to be multiplied."""

    def __init__(self, weight: Any, bias: Tensor | None, kind: str):
        self.shape, self.kind = weight.shape, kind
        self.table = NF4 if kind == "nf4" else INT4
        self.held = ("codes", "scales", "table", *(("tops",) if kind == "int4-double" else ()))
        device, weight = device_of(weight), to_host(weight)
        self.bias = None if bias is None else Tensor(widen(bias.data))
        x = np.zeros(-(-weight.size // BLOCK) * BLOCK, np.float32)
        x[: weight.size] = weight.reshape(-1)
        blocks = x.reshape(-1, BLOCK)
        largest = np.abs(blocks).max(axis=1)
        if kind == "nf4":
            self.scales = largest
            codes = np.searchsorted((NF4[1:] + NF4[:-1]) / 2, _over(blocks, largest))
        else:
            self.scales = scales = largest / np.float32(7)
            if kind == "int4-double":
                self.scales, self.tops = _eighths(scales)
                scales = self._scales()
            codes = _rounded(np.clip(_over(blocks, scales), -7, 7)) & 15
        codes = codes.reshape(-1).astype(np.uint8)
        self.codes = codes[0::2] << 4 | codes[1::2]
        self.to(device)

    @property
    def nbytes(self) -> int:
        """Bytes that the matrix takes."""
        tops = self.tops.nbytes if self.kind == "int4-double" else 0
        return self.codes.nbytes + self.scales.nbytes + tops

    def _scales(self) -> Any:
        if self.kind != "int4-double":
            return self.scales
        tops = self.tops.repeat(SUPER)[: len(self.scales)]
        return self.scales.astype(np.float32) / np.float32(255) * tops

    def dequantized(self) -> Any:
        """W as a float32 array."""
        halves = [self.table[self.codes >> 4], self.table[self.codes & 15]]
        pairs = array_module(self.codes).stack(halves, axis=1)
        values = pairs.reshape(-1, BLOCK) * self._scales()[:, None]
        size = self.shape[0] * self.shape[1]
        return values.reshape(-1)[:size].reshape(self.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)"""
        return linear_codes(
            x,
            self.codes,
            self._scales(),
            self.bias,
            out_features=self.shape[0],
            table=self.table,
        )


def _over(blocks: Any, scales: Any) -> Any:
    """Each block divided by its scale; a block of zeros stays one."""
    return blocks / np.where(scales > 0, scales, np.float32(1))[:, None]


def _rounded(x: Any) -> Any:
    """To the nearest whole number, halves away from zero."""
    x = x.astype(np.float64)
    return (np.sign(x) * np.floor(np.abs(x) + 0.5)).astype(np.int64)


def _eighths(scales: Any) -> tuple[Any, Any]:
    """Scales in 8 bits, and the largest of each 256."""
    padded = np.zeros(-(-len(scales) // SUPER) * SUPER, np.float32)
    padded[: len(scales)] = scales
    tops = np.maximum(padded.reshape(-1, SUPER).max(axis=1), np.float32(1e-8))
    parts = padded.reshape(-1, SUPER) / tops[:, None] * np.float32(255)
    return _rounded(parts).reshape(-1)[: len(scales)].astype(np.uint8), tops
