"""The norm of all gradients, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..autograd.ops.reduce import sum_of_squares
from ..autograd.tensor import Tensor


def grad_norm(params: Iterable[Tensor]) -> float:
    """sqrt(sum g^2) over all gradients, in float64: one after the other, in the given order."""
    total = 0.0
    for p in params:
        if p.grad is not None:
            total += float(sum_of_squares(p.grad))
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
