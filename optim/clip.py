"""The norm of all gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ..autograd.backend import array_module, kernel
from ..autograd.buffers import empty
from ..autograd.launch import body
from ..autograd.tensor import Tensor

BLOCK = 4096
LANES = 8


def grad_norm(params: Iterable[Tensor]) -> float:
    """sqrt(sum g^2) over all gradients: float64, in one fixed order."""
    return math.sqrt(sum((sum_of_squares(p.grad) for p in params if p.grad is not None), 0.0))


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


@kernel
def sum_of_squares(x):
    """The sum of x^2 as float64: blocks of 4096 elements, added in ascending order."""
    return float(array_module(x).square(x, dtype=np.float64).sum())


@sum_of_squares.cpu
def _sum_of_squares_cpu(x):
    x = x.reshape(-1)
    partial = empty(-(-x.size // BLOCK), np.float64)
    _sum_block(len(partial), x, partial)
    total = 0.0
    for part in partial.tolist():
        total += part
    return total


@body
def _sum_block(i, x, out):
    """One block: element j goes to lane j mod 8, lanes are added as a tree."""
    lanes = np.zeros(LANES)
    start, stop = i * BLOCK, min((i + 1) * BLOCK, x.size)
    whole = start + (stop - start) // LANES * LANES
    for j in range(start, whole, LANES):
        for k in range(LANES):
            lanes[k] += np.float64(x[j + k]) * np.float64(x[j + k])
    for j in range(whole, stop):
        lanes[j - whole] += np.float64(x[j]) * np.float64(x[j])
    for k in range(4):
        lanes[k] += lanes[k + 4]
    out[i] = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
