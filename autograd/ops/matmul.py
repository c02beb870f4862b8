"""Matrix products.

In a 16-bit mode (`precision.compute_in`) float32 operands are rounded, and so are the gradients
that arrive; what is kept of an activation for the backward pass is 16 bits wide. Sums and results
are float32.
"""

# M rows, N columns, K summed; I inputs and O outputs of a linear layer.

from __future__ import annotations

import math

import numpy as np

from ..backend import FLOATS
from ..precision import compute_dtype
from ..tape import op
from .gemm import BLOCK, gemm, gemm_codes
from .reduce import sum_axes
from .rounding import in_precision, once


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
    mode = compute_dtype()
    shared = b.ndim == 2  # one b for all: the leading axes of a are just more rows
    (a, ta), (b, tb) = _base(a), _base(b)
    a, b = in_precision(a, mode), in_precision(b, mode)

    arrived = once(lambda g: in_precision(g, mode))

    def db(g):
        g = arrived(g)
        if shared and not ta:
            rows = math.prod(a.shape[:-1])
            flat_a, flat_g = a.reshape(rows, a.shape[-1]), g.reshape(rows, g.shape[-1])
            return gemm(flat_a, flat_g, True, False)
        return gemm(a, g, not ta, False)

    return gemm(a, b, ta, tb), (lambda g: gemm(arrived(g), b, False, not tb), db)


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
    mode = compute_dtype()
    rows = in_precision(x.reshape(flat[0], weight.shape[1]), mode)
    old = None if residual is None else residual.reshape(flat)
    out = gemm(rows, in_precision(weight, mode), False, True, bias, old)
    arrived = once(lambda g: in_precision(g.reshape(flat), mode))
    return out.reshape(out_shape), (
        # The weight lives anyway: rounding it again costs less than keeping it twice.
        lambda g: gemm(arrived(g), in_precision(weight, mode), False, False).reshape(x_shape),
        lambda g: gemm(arrived(g), rows, True, False),
        lambda g: sum_axes(g.reshape(flat), (0,)),
        lambda g: g,
    )


@op(register=False)
def linear_codes(x, codes, scales, bias=None, *, out_features, table):
    """x W^T + bias for a frozen W in 4-bit codes, which is never unpacked as a whole.

    x (..., I), codes (O I / 2), scales (O I / 64), bias (O) -> (..., O)

    Two codes make a byte, the first in its upper half; read row by row, 64 share a scale:
    W = table[code] * scale. All in float32, in the 16-bit modes too. QLoRA: Dettmers et al. 2023,
    arXiv:2305.14314.
    """
    _check_numbers("linear_codes", x=x, bias=bias)
    shape = out_features, x.shape[-1] if x.ndim else 0
    size = math.prod(shape)
    if codes.dtype != np.uint8 or codes.size < -(-size // 2) or scales.size < -(-size // BLOCK):
        raise ValueError(
            f"linear_codes: a matrix {shape} needs {-(-size // 2)} bytes of codes and "
            f"{-(-size // BLOCK)} scales, given {codes.size} ({codes.dtype}) and {scales.size}"
        )
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"linear_codes: a bias ({out_features},) is needed, given {bias.shape}")
    rows = math.prod(x.shape[:-1])
    held = codes, scales.astype(np.float32, copy=False), table
    x_shape = x.shape
    out = gemm_codes(
        x.reshape(rows, shape[1]).astype(np.float32, copy=False), *held, shape, True, bias
    )
    return out.reshape(*x.shape[:-1], out_features), (
        lambda g: gemm_codes(g.reshape(rows, out_features), *held, shape, False).reshape(x_shape),
        None,
        None,
        lambda g: sum_axes(g.reshape(rows, out_features), (0,)),
    )


def _check_numbers(name, **arrays):
    for which, x in arrays.items():
        bits = x is not None and x.dtype == np.uint16 and which not in ("bias", "residual")
        if x is not None and x.dtype not in FLOATS and not bits:
            raise TypeError(f"{name}: {which} must hold float32 or float64, given {x.dtype}")
