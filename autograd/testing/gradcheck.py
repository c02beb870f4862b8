"""Gradients held to finite differences, along one random direction per input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..tensor import Tensor

# A fourth-order central difference: its error is about STEP**4 and 2e-16 / STEP, both near 1e-12.
STEP = 1e-3
WEIGHTS = ((-2, 1 / 12), (-1, -8 / 12), (1, 8 / 12), (2, -1 / 12))


def gradcheck(fn: Callable[..., Tensor], *arrays: Any, rtol: float = 1e-6) -> None:
    """Check the gradients of `fn(*arrays)` by every floating-point array.

    `fn` takes Tensors and returns one, smooth within 2e-3 of the arrays. For a random u and, per
    input, a random direction v, the gradient of <u, fn> along v must be its finite difference to
    `rtol` of the size of its terms. Everything is computed in float64.

    Raises AssertionError naming the input, the index and both values where it fails.

    >>> gradcheck(lambda x, y: x * y, np.ones(3), np.arange(3.0))
    """
    arrays = tuple(np.asarray(a) for a in arrays)
    inputs = tuple(a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays)
    rng = np.random.default_rng(0)

    leaves = [Tensor(a, requires_grad=True) if a.dtype.kind == "f" else a for a in inputs]
    out = fn(*leaves)
    u = rng.standard_normal(out.shape)
    out.backward(u)

    def value(n: int, x: np.ndarray) -> float:
        moved = [
            Tensor(x if k == n else a) if a.dtype.kind == "f" else a for k, a in enumerate(inputs)
        ]
        return float((u * fn(*moved).data).sum())

    def difference(n: int, v: np.ndarray) -> float:
        return sum(w * value(n, inputs[n] + k * STEP * v) for k, w in WEIGHTS) / STEP

    for n, (x, leaf) in enumerate(zip(inputs, leaves, strict=True)):
        if not isinstance(leaf, Tensor):
            continue
        grad = np.zeros_like(x) if leaf.grad is None else leaf.grad
        if grad.shape != x.shape:
            raise AssertionError(
                f"input {n}: the gradient has shape {grad.shape}, the input {x.shape}"
            )
        if grad.dtype != x.dtype:
            raise AssertionError(f"input {n}: the gradient is {grad.dtype}, the input {x.dtype}")
        v = rng.standard_normal(x.shape)
        got, expected = float((grad * v).sum()), difference(n, v)
        scale = max(1.0, float(np.abs(grad * v).sum()))
        if not abs(got - expected) <= rtol * scale:
            raise AssertionError(_worst(n, grad, difference, got, expected))


def _worst(n: int, grad: np.ndarray, difference: Callable, got: float, expected: float) -> str:
    worst, message = -1.0, f"input {n}: backward() gives {got} along a direction, not {expected}"
    for index in list(np.ndindex(grad.shape))[:1000]:
        v = np.zeros_like(grad)
        v[index] = 1
        d = difference(n, v)
        error = abs(grad[index] - d)
        if not error <= worst:
            worst = error
            message = (
                f"input {n} at {index}: backward() gives {float(grad[index])!r}, "
                f"finite differences {d!r}"
            )
    return message
