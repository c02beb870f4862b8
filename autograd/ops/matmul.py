"""Matrix products."""

# M rows, N columns, K summed; I inputs and O outputs of a linear layer.

from __future__ import annotations

import math

import numpy as np

from ..backend import FLOATS
from ..tape import op
from .gemm import gemm
from .reduce import sum_axes


@op
def matmul(a, b):
    """a @ b, leading axes broadcast.   a (..., M, K), b (..., K, N) -> (..., M, N)"""
    _check_numbers("matmul", a=a, b=b)
    if a.ndim < 2 or b.ndim < 2:
        raise ValueError(f"matmul: two axes or more needed, given a {a.shape} @ b {b.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul: inner sizes differ: a {a.shape} @ b {b.shape}")
    try:
        np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"matmul: leading axes do not fit: a {a.shape} @ b {b.shape}") from None
    shared = b.ndim == 2  # one b for all: the leading axes of a are just more rows
    a, ta = _base(a)
    b, tb = _base(b)

    def db(g):
        if shared and not ta:
            rows = math.prod(a.shape[:-1])
            flat_a, flat_g = a.reshape(rows, a.shape[-1]), g.reshape(rows, g.shape[-1])
            return gemm(flat_a, flat_g, True, False)
        return gemm(a, g, not ta, False)

    return gemm(a, b, ta, tb), (lambda g: gemm(g, b, False, not tb), db)


def _base(x):
    """`x`, or the array that it is the transpose of, and which of the two."""
    last, row = x.strides[-1], x.strides[-2]
    if row == x.itemsize and last != x.itemsize and x.shape[-1] > 1:
        return x.swapaxes(-1, -2), True
    return x, False


@op
def linear(x, weight, bias=None, residual=None):
    """x weight^T + bias + residual, the weight stored as in Hugging Face files.

    x (..., I), weight (O, I), bias (O), residual (..., O) -> (..., O)

    A frozen weight may be bfloat16 bits (uint16). Gradients save x only if the weight wants one.
    """
    _check_numbers("linear", x=x, weight=weight, bias=bias, residual=residual)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        needed = f"(O, {x.shape[-1]})" if x.ndim else "(O, I) and an x (..., I)"
        raise ValueError(f"linear: x {x.shape} needs a weight {needed}, given {weight.shape}")
    out_shape, x_shape = (*x.shape[:-1], weight.shape[0]), x.shape
    flat = math.prod(x.shape[:-1]), weight.shape[0]
    if bias is not None and bias.shape != out_shape[-1:]:
        raise ValueError(f"linear: a bias {out_shape[-1:]} is needed, given {bias.shape}")
    if residual is not None and residual.shape != out_shape:
        raise ValueError(f"linear: a residual {out_shape} is needed, given {residual.shape}")
    rows = x.reshape(flat[0], weight.shape[1])
    old = None if residual is None else residual.reshape(flat)
    return gemm(rows, weight, False, True, bias, old).reshape(out_shape), (
        lambda g: gemm(g.reshape(flat), weight, False, False).reshape(x_shape),
        lambda g: gemm(g.reshape(flat), rows, True, False),
        lambda g: sum_axes(g.reshape(flat), (0,)),
        lambda g: g,
    )


def _check_numbers(name, **arrays):
    for which, x in arrays.items():
        if x is not None and x.dtype not in FLOATS and x.dtype != np.uint16:
            raise TypeError(f"{name}: {which} must hold float32 or float64, given {x.dtype}")
