"""Matrix products."""

# M rows, N columns, K summed; I inputs and O outputs of a linear layer.

from __future__ import annotations

from ..backend import kernel
from ..tape import op


@op
def matmul(a, b):
    """a @ b.   a (..., M, K), b (..., K, N) -> (..., M, N)"""
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matmul: inner sizes differ: a {a.shape} @ b {b.shape}")
    return gemm(a, b, False, False), (
        lambda g: gemm(g, b, False, True),
        lambda g: gemm(a, g, True, False),
    )


@op
def linear(x, weight, bias=None):
    """x weight^T + bias, the weight stored as in Hugging Face files.

    x (..., I), weight (O, I), bias (O) -> (..., O)
    """
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: x {x.shape} needs a weight (O, {x.shape[-1:]}), given {weight.shape}")
    rows = x.reshape(-1, x.shape[-1])
    out = gemm(rows, weight, False, True)
    if bias is not None:
        out = out + bias
    out_shape, x_shape = x.shape[:-1] + (weight.shape[0],), x.shape
    return out.reshape(out_shape), (
        lambda g: gemm(g.reshape(-1, out_shape[-1]), weight, False, False).reshape(x_shape),
        lambda g: gemm(g.reshape(-1, out_shape[-1]), rows, True, False),
        lambda g: g.reshape(-1, out_shape[-1]),
    )


@kernel
def gemm(a, b, transpose_a, transpose_b):
    """op(a) @ op(b) over the last two axes."""
    a = a.swapaxes(-1, -2) if transpose_a else a
    b = b.swapaxes(-1, -2) if transpose_b else b
    return a @ b
