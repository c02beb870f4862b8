"""The norm of all gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..autograd import cuda
from ..autograd.backend import array_module
from ..autograd.device import device_of
from ..autograd.ops.reduce import sum_of_squares
from ..autograd.tensor import Tensor
from . import table


def grad_norm(params: Iterable[Tensor]) -> float:
    """sqrt(sum g^2) over all gradients, in float64: one after the other, in the given order."""
    grads = [p.grad for p in params if p.grad is not None]
    total = 0.0
    if grads and all(device_of(g) == "gpu" for g in grads):
        for square in _squares(grads):
            total += square
    else:
        for g in grads:
            total += float(sum_of_squares(g))
    return math.sqrt(total)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most `max_norm`."""
    return max_norm / norm if norm > max_norm else 1.0


def clip_grad_norm(params: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients so that their common norm is at most `max_norm`.

    Returns the norm before clipping. If that is infinite or NaN, gradients are left alone.
    """
    if not max_norm >= 0:
        raise ValueError(f"clip_grad_norm: max_norm must not be negative, given {max_norm}")
    params = list(params)
    norm = grad_norm(params)
    if math.isfinite(norm) and norm > max_norm:
        factor, done = clip_coefficient(norm, max_norm), set()
        for p in params:
            if p.grad is not None and id(p.grad) not in done:
                done.add(id(p.grad))
                p.grad *= p.dtype.type(factor)
    return norm


# --- GPU: `sum_of_squares` of all gradients in two launches, read at once -------------------


def _squares(grads: Sequence[Any]) -> list[float]:
    out = np.empty(len(grads))
    for dtype in (np.float32, np.float64):
        mine = [n for n, g in enumerate(grads) if g.dtype == dtype]
        if mine:
            out[mine] = _squares_of(
                [array_module(grads[n]).ascontiguousarray(grads[n]) for n in mine]
            )
    return out.tolist()


def _squares_of(grads: list[Any]) -> np.ndarray:
    rows, blocks = table.on_gpu([(g,) for g in grads])
    parts, sums = cuda.empty(blocks, np.float64), cuda.empty(len(grads), np.float64)
    _source("squares", cuda.row_blocks(blocks), cuda.THREADS, rows, len(grads), parts, blocks,
            real=grads[0].dtype)  # fmt: skip
    _source("add_parts", cuda.blocks(len(grads)), cuda.THREADS, rows, len(grads), parts, sums)
    return sums.get()


_source = cuda.Source(
    table.LOOKUP
    + r"""
// A half warp takes the 4096 elements of a block.
extern "C" __global__ void squares(const i64 *table, i64 count, double *parts, i64 blocks) {
    const i64 block = this_row() < blocks ? this_row() : 0;
    const i64 *row = row_of(table, count, 3, block);
    const i64 start = (block - row[0]) * 4096, end = start + 4096;
    const i64 stop = end < row[1] ? end : row[1];
    const REAL *g = (const REAL *)row[2];
    double total = 0;
#pragma unroll 8
    for (i64 i = start + this_lane(); i < stop; i += 16) {
        const double wide = g[i];
        total = fma_(wide, wide, total);
    }
    total = tree_sum(total);
    if (this_row() < blocks && this_lane() == 0) parts[block] = total;
}
// A thread adds the blocks of a gradient, ascending.
extern "C" __global__ void add_parts(const i64 *table, i64 count, const double *parts,
                                     double *sums) {
    const i64 n = this_thread();
    if (n >= count) return;
    const i64 first = table[3 * n], blocks = (table[3 * n + 1] + 4095) / 4096;
    double total = 0;
#pragma unroll 16
    for (i64 i = first; i < first + blocks; i++) total = total + parts[i];
    sums[n] = total;
}
"""
)
