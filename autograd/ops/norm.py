"""Normalisation of rows."""

# N rows of C channels; r is 1 / rms or 1 / std, one per row; h are the normalised rows.

from __future__ import annotations

import math

import numpy as np

from .. import cuda, mathf
from ..backend import array_module, kernel
from ..buffers import empty
from ..lanes import fma, keep_first, load, load_part, row_dot, row_sum, splat, store, tree_sum
from ..launch import body, device
from ..tape import op
from .gemm import widen
from .reduce import CHAIN, add_chains, add_chains_gpu


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


# --- GPU -----------------------------------------------------------------------------------

# 16 threads a row; for the gradients of weights one a column of each chain.

_source = cuda.Source(r"""
extern "C" __global__ void rms_forward(const REAL *x, const REAL *weight, REAL eps, REAL *y,
                                       REAL *r, i64 N, i64 C) {
    const i64 n = this_row(), at = (n < N ? n : 0) * C;
    const REAL scale = 1 / root(row_dot(x + at, x + at, C) / (REAL)C + eps);
    if (n >= N) return;
    if (this_lane() == 0) r[n] = scale;
    for (i64 c = this_lane(); c < C; c += 16) y[at + c] = x[at + c] * scale * weight[c];
}
extern "C" __global__ void layer_forward(const REAL *x, const REAL *weight, const REAL *bias,
                                         i64 biased, REAL eps, REAL *y, REAL *mean, REAL *r,
                                         i64 N, i64 C) {
    const i64 n = this_row(), at = (n < N ? n : 0) * C;
    const REAL m = row_sum(x + at, C) / (REAL)C;
    REAL total = 0;
    for (i64 c = this_lane(); c < C; c += 16) {
        const REAL d = x[at + c] - m;
        total = fma_(d, d, total);
    }
    const REAL scale = 1 / root(tree_sum(total) / (REAL)C + eps);
    if (n >= N) return;
    if (this_lane() == 0) {
        mean[n] = m;
        r[n] = scale;
    }
    for (i64 c = this_lane(); c < C; c += 16) {
        const REAL h = (x[at + c] - m) * scale * weight[c];
        y[at + c] = biased ? h + bias[c] : h;
    }
}

extern "C" __global__ void rms_backward(const REAL *g, const REAL *x, const REAL *weight,
                                        const REAL *r, REAL *dx, i64 N, i64 C) {
    const i64 n = this_row(), row = n < N ? n : 0, at = row * C;
    const REAL scale = r[row];
    REAL gwh = 0;
    for (i64 c = this_lane(); c < C; c += 16)
        gwh = fma_(g[at + c] * weight[c], x[at + c] * scale, gwh);
    const REAL mean_gwh = tree_sum(gwh) / (REAL)C;
    if (n >= N) return;
    for (i64 c = this_lane(); c < C; c += 16)
        dx[at + c] = scale * fma_(x[at + c] * scale, -mean_gwh, g[at + c] * weight[c]);
}
extern "C" __global__ void layer_backward(const REAL *g, const REAL *x, const REAL *weight,
                                          const REAL *mean, const REAL *r, REAL *dx, i64 N, i64 C) {
    const i64 n = this_row(), row = n < N ? n : 0, at = row * C;
    const REAL m = mean[row], scale = r[row];
    REAL gw = 0, gwh = 0;
    for (i64 c = this_lane(); c < C; c += 16) {
        gw = fma_(g[at + c], weight[c], gw);
        gwh = fma_(g[at + c] * weight[c], (x[at + c] - m) * scale, gwh);
    }
    const REAL mean_gw = tree_sum(gw) / (REAL)C, mean_gwh = tree_sum(gwh) / (REAL)C;
    if (n >= N) return;
    for (i64 c = this_lane(); c < C; c += 16) {
        const REAL h = (x[at + c] - m) * scale;
        dx[at + c] = scale * fma_(h, -mean_gwh, g[at + c] * weight[c] - mean_gw);
    }
}

extern "C" __global__ void rms_weight(const REAL *g, const REAL *x, const REAL *r, REAL *dweight,
                                      i64 N, i64 C, i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const i64 c = i % C, start = i / C * 64, stop = start + 64 < N ? start + 64 : N;
    REAL dw = 0;
    for (i64 row = start; row < stop; row++)
        dw = fma_(g[row * C + c], x[row * C + c] * r[row], dw);
    dweight[i] = dw;
}
extern "C" __global__ void layer_weight(const REAL *g, const REAL *x, const REAL *mean,
                                        const REAL *r, REAL *dweight, REAL *dbias, i64 N, i64 C,
                                        i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const i64 c = i % C, start = i / C * 64, stop = start + 64 < N ? start + 64 : N;
    REAL dw = 0, db = 0;
    for (i64 row = start; row < stop; row++) {
        const REAL gc = g[row * C + c];
        dw = fma_(gc, (x[row * C + c] - mean[row]) * r[row], dw);
        db = db + gc;
    }
    dweight[i] = dw;
    dbias[i] = db;
}
""")


def _by_row(name, x, *args):
    """Launch a function with 16 threads for each row of x (N, C)."""
    _source(name, cuda.row_blocks(len(x)), cuda.THREADS, *args, *x.shape, real=x.dtype)


def _weight_gradients(name, count, *args):
    """Sums over the chains of rows, one thread a column, then over the chains: `count` of (C)."""
    N, C = args[0].shape
    dtype, shape = args[0].dtype, (1, max(-(-N // CHAIN), 1), C)
    parts = [cuda.empty(shape, dtype) for _ in range(count)]
    n = parts[0].size
    _source(name, cuda.blocks(n), cuda.THREADS, *args, *parts, N, C, n, real=dtype)
    return [add_chains_gpu(p, None)[0] for p in parts]


@rms_norm_forward.gpu
def rms_norm_forward_gpu(x, weight, eps):
    y, r = cuda.empty(x.shape, x.dtype), cuda.empty(len(x), x.dtype)
    _by_row("rms_forward", x, x, weight, x.dtype.type(eps), y, r)
    return y, r


@rms_norm_backward.gpu
def rms_norm_backward_gpu(g, x, weight, r, needs_weight):
    dx = cuda.empty(x.shape, x.dtype)
    _by_row("rms_backward", x, g, x, weight, r, dx)
    return dx, _weight_gradients("rms_weight", 1, g, x, r)[0] if needs_weight else None


@layer_norm_forward.gpu
def layer_norm_forward_gpu(x, weight, bias, eps):
    y, mean, r = (cuda.empty(s, x.dtype) for s in (x.shape, len(x), len(x)))
    biased = bias is not None
    rest = bias if biased else weight, int(biased), x.dtype.type(eps), y, mean, r
    _by_row("layer_forward", x, x, weight, *rest)
    return y, mean, r


@layer_norm_backward.gpu
def layer_norm_backward_gpu(g, x, weight, mean, r):
    dx = cuda.empty(x.shape, x.dtype)
    _by_row("layer_backward", x, g, x, weight, mean, r, dx)
    return dx, *_weight_gradients("layer_weight", 2, g, x, mean, r)
