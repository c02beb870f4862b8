"""Normalisation of rows."""

# N rows of C channels; r is 1 / rms or 1 / std, one per row; h are the normalised rows.

from __future__ import annotations

import math

import numpy as np

from .. import mathf
from ..backend import array_module, kernel
from ..buffers import empty
from ..lanes import fma, keep_first, load, load_part, row_dot, row_sum, splat, store, tree_sum
from ..launch import body, device
from ..tape import op
from .gemm import widen
from .reduce import CHAIN, add_chains


@op(needs=True)
def rms_norm(x, weight, *, eps=1e-6, needs):
    """x r weight, with r = 1 / sqrt(mean(x**2) + eps).   Zhang & Sennrich 2019, arXiv:1910.07467

    x (..., C), weight (C) -> (..., C)

    A frozen weight may be bfloat16 bits. Saved for backward: x and one number per row.
    """
    rows, (weight,) = _rows("rms_norm", x, weight)  # (N, C)
    y, r = rms_norm_forward(rows, weight, eps)  # (N, C), (N,)

    def vjp(g):
        dx, dweight = rms_norm_backward(g.reshape(rows.shape), rows, weight, r, needs[1])
        return dx.reshape(x.shape), dweight  # (..., C), (C,)

    return y.reshape(x.shape), vjp


@kernel
def rms_norm_forward(x, weight, eps):
    r = 1 / array_module(x).sqrt((x * x).mean(axis=1) + x.dtype.type(eps))
    return x * r[:, None] * weight, r


@kernel
def rms_norm_backward(g, x, weight, r, needs_weight):
    # y = x r w and dr/dx = -r**3 x / C; with h = x r: dx = r (g w - h mean(g w h))
    h, gw = x * r[:, None], g * weight
    dx = r[:, None] * (gw - h * (gw * h).mean(axis=1, keepdims=True))
    return dx, (g * h).sum(axis=0) if needs_weight else None


@op
def layer_norm(x, weight, bias=None, *, eps=1e-5):
    """(x - mean) r weight + bias, with r = 1 / sqrt(var + eps).   Ba et al. 2016, arXiv:1607.06450

    x (..., C), weight (C), bias (C) -> (..., C)
    """
    rows, (weight, bias) = _rows("layer_norm", x, weight, bias)
    y, mean, r = layer_norm_forward(rows, weight, bias, eps)

    def vjp(g):
        dx, dweight, dbias = layer_norm_backward(g.reshape(rows.shape), rows, weight, mean, r)
        return dx.reshape(x.shape), dweight, dbias

    return y.reshape(x.shape), vjp


@kernel
def layer_norm_forward(x, weight, bias, eps):
    mean = x.mean(axis=1)
    d = x - mean[:, None]
    r = 1 / array_module(x).sqrt((d * d).mean(axis=1) + x.dtype.type(eps))
    y = d * r[:, None] * weight
    return y if bias is None else y + bias, mean, r


@kernel
def layer_norm_backward(g, x, weight, mean, r):
    # with h = (x - mean) r: dx = r (g w - mean(g w) - h mean(g w h))
    h, gw = (x - mean[:, None]) * r[:, None], g * weight
    dx = r[:, None] * (
        gw - gw.mean(axis=1, keepdims=True) - h * (gw * h).mean(axis=1, keepdims=True)
    )
    return dx, (g * h).sum(axis=0), g.sum(axis=0)


def _rows(name, x, *weights):
    """x as rows, and the weights in its type."""
    C = x.shape[-1] if x.ndim else 0
    if not C:
        raise ValueError(f"{name}: rows of at least one element needed, given an x of {x.shape}")
    for w in weights:
        if w is not None and w.shape != (C,):
            raise ValueError(f"{name}: x {x.shape} needs a weight {(C,)}, given {w.shape}")
    widened = [w if w is None else widen(w) for w in weights]
    return x.reshape(math.prod(x.shape[:-1]), C), [
        w if w is None else w.astype(x.dtype, copy=False) for w in widened
    ]


# --- CPU -----------------------------------------------------------------------------------

# Sums along a row in 16 lanes, products by fma. Weight gradients: chains of 64 rows from +0,
# then the chains ascending; an index owns the rows of one chain.

BLOCK = 16  # rows per index of a forward pass


@rms_norm_forward.cpu
def rms_norm_forward_cpu(x, weight, eps):
    y, r = empty(x.shape, x.dtype), empty(len(x), x.dtype)
    rms_forward(-(-len(x) // BLOCK), x, weight, x.dtype.type(eps), y, r)
    return y, r


@body
def rms_forward(i, x, weight, eps, y, r):
    N, C = x.shape
    for n in range(i * BLOCK, min((i + 1) * BLOCK, N)):
        row, to = x[n], y[n]
        scale = x.dtype.type(1) / mathf.sqrt(row_dot(row, row) / x.dtype.type(C) + eps)
        r[n] = scale
        for c in range(0, C - 15, 16):
            store(to, c, load(row, c) * scale * load(weight, c))
        for c in range(C - C % 16, C):
            to[c] = row[c] * scale * weight[c]


@rms_norm_backward.cpu
def rms_norm_backward_cpu(g, x, weight, r, needs_weight):
    dx, parts = empty(x.shape, x.dtype), _parts(x)
    _rms_backward(-(-len(x) // CHAIN), g, x, weight, r, dx, parts[0])
    return dx, add_chains(parts, None)[0] if needs_weight else None


def _parts(x):
    """Room for one sum over each chain of rows; of no rows it is 0."""
    N, C = x.shape
    parts = empty((1, max(-(-N // CHAIN), 1), C), x.dtype)
    if not N:
        parts.fill(0)
    return parts


@body
def _rms_backward(i, g, x, weight, r, dx, parts):
    (N, C), zero = x.shape, x.dtype.type(0)
    dw = parts[i]
    dw[:] = 0
    for n in range(i * CHAIN, min((i + 1) * CHAIN, N)):
        g_row, row, to, scale = g[n], x[n], dx[n], r[n]
        _, mean_gwh = _means(g_row, weight, row, zero, scale)
        for c in range(0, C - 15, 16):
            gc, h = load(g_row, c), load(row, c) * scale
            store(to, c, scale * fma(h, -mean_gwh, gc * load(weight, c)))
            store(dw, c, fma(gc, h, load(dw, c)))
        for c in range(C - C % 16, C):
            h = row[c] * scale
            to[c] = scale * fma(h, -mean_gwh, g_row[c] * weight[c])
            dw[c] = fma(g_row[c], h, dw[c])


@layer_norm_forward.cpu
def layer_norm_forward_cpu(x, weight, bias, eps):
    y, mean, r = (empty(s, x.dtype) for s in (x.shape, len(x), len(x)))
    if bias is None:
        bias = np.full(x.shape[1], -0.0, x.dtype)  # y + -0 is y, also for 0
    _layer_forward(-(-len(x) // BLOCK), x, weight, bias, x.dtype.type(eps), y, mean, r)
    return y, mean, r


@body
def _layer_forward(i, x, weight, bias, eps, y, mean, r):
    N, C = x.shape
    for n in range(i * BLOCK, min((i + 1) * BLOCK, N)):
        row, to = x[n], y[n]
        m = row_sum(row) / x.dtype.type(C)
        scale = x.dtype.type(1) / mathf.sqrt(_sum_of_squares(row, m) / x.dtype.type(C) + eps)
        mean[n], r[n] = m, scale
        for c in range(0, C - 15, 16):
            store(to, c, (load(row, c) - m) * scale * load(weight, c) + load(bias, c))
        for c in range(C - C % 16, C):
            to[c] = (row[c] - m) * scale * weight[c] + bias[c]


@layer_norm_backward.cpu
def layer_norm_backward_cpu(g, x, weight, mean, r):
    dx, dweight, dbias = empty(x.shape, x.dtype), _parts(x), _parts(x)
    _layer_backward(-(-len(x) // CHAIN), g, x, weight, mean, r, dx, dweight[0], dbias[0])
    return dx, add_chains(dweight, None)[0], add_chains(dbias, None)[0]


@body
def _layer_backward(i, g, x, weight, mean, r, dx, dweight, dbias):
    N, C = x.shape
    dw, db = dweight[i], dbias[i]
    dw[:] = 0
    db[:] = 0
    for n in range(i * CHAIN, min((i + 1) * CHAIN, N)):
        g_row, row, to, m, scale = g[n], x[n], dx[n], mean[n], r[n]
        mean_gw, mean_gwh = _means(g_row, weight, row, m, scale)
        for c in range(0, C - 15, 16):
            gc, h = load(g_row, c), (load(row, c) - m) * scale
            store(to, c, scale * fma(h, -mean_gwh, gc * load(weight, c) - mean_gw))
            store(dw, c, fma(gc, h, load(dw, c)))
            store(db, c, load(db, c) + gc)
        for c in range(C - C % 16, C):
            h = (row[c] - m) * scale
            to[c] = scale * fma(h, -mean_gwh, g_row[c] * weight[c] - mean_gw)
            dw[c] = fma(g_row[c], h, dw[c])
            db[c] += g_row[c]


@device
def _means(g, weight, x, mean, scale):
    """The means of g weight and of g weight h along a row, with h = (x - mean) scale."""
    C, zero = np.int64(x.size), splat(x.dtype.type(0))
    gw, gwh = zero, zero
    whole = C - C % 16
    for c in range(0, whole, 16):
        gc, w, h = load(g, c), load(weight, c), (load(x, c) - mean) * scale
        gw, gwh = fma(gc, w, gw), fma(gc * w, h, gwh)
    if whole < C:
        n = C - whole
        gc, w = load_part(g, whole, n), load_part(weight, whole, n)
        h = (load_part(x, whole, n) - mean) * scale
        gw, gwh = fma(gc, w, gw), keep_first(n, fma(gc * w, h, gwh), gwh)
    return tree_sum(gw) / x.dtype.type(C), tree_sum(gwh) / x.dtype.type(C)


@device
def _sum_of_squares(x, mean):
    """The sum of (x - mean)**2 along a row."""
    C, zero = np.int64(x.size), splat(x.dtype.type(0))
    total = zero
    whole = C - C % 16
    for c in range(0, whole, 16):
        d = load(x, c) - mean
        total = fma(d, d, total)
    if whole < C:
        d = load_part(x, whole, C - whole) - mean
        total = keep_first(C - whole, fma(d, d, total), total)
    return tree_sum(total)
