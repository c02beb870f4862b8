"""Softmax over the last axis, and its logarithm.

A logit of -inf is a constant: its probability and its gradient are exactly 0. A row of nothing
but -inf has nothing to choose from: probabilities 0, logarithms -inf, gradients 0.
"""

# N rows of V logits.

from __future__ import annotations

import numpy as np

from .. import cuda
from ..backend import array_module, kernel
from ..buffers import empty
from ..lanes import (
    keep_first,
    load,
    load_first,
    row_max,
    row_sum,
    select,
    splat,
    store,
    tree_sum,
)
from ..launch import body, device
from ..mathf import exp, log
from ..tape import op


@op
def softmax(x):
    """exp(x) / sum(exp(x)) over the last axis.   x (..., V) -> (..., V)"""
    y, shape = softmax_rows(_rows("softmax", x)), x.shape

    def vjp(g):
        return softmax_backward(g.reshape(y.shape), y).reshape(shape)

    return y.reshape(shape), (vjp,)


@op
def log_softmax(x):
    """log(softmax(x)) over the last axis.   x (..., V) -> (..., V)"""
    y, shape = log_softmax_rows(_rows("log_softmax", x)), x.shape

    def vjp(g):
        return log_softmax_backward(g.reshape(y.shape), y).reshape(shape)

    return y.reshape(shape), (vjp,)


# Infinities and NaNs go through references as through compiled bodies: without a word.
QUIET = np.errstate(divide="ignore", invalid="ignore")


def _rows(op_name, x):
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op_name}: a last axis with logits needed, given shape {x.shape}")
    return x.reshape(-1, x.shape[-1])


@kernel
@QUIET
def softmax_rows(x):
    xp = array_module(x)
    e = xp.exp(x - _shift(x))
    total = e.sum(axis=1, keepdims=True)
    return e / xp.where(total == 0, x.dtype.type(1), total)


@kernel
@QUIET
def softmax_backward(g, y):
    # dy_i / dx_j = y_i (i == j) - y_i y_j; where y = 0 nothing is moved, whatever g is there
    xp = array_module(y)
    gy = xp.where(y == 0, y, g * y)
    return gy - y * gy.sum(axis=1, keepdims=True)


@kernel
@QUIET
def log_softmax_rows(x):
    xp = array_module(x)
    shift = _shift(x)
    total = xp.log(xp.exp(x - shift).sum(axis=1, keepdims=True))
    return xp.where(x == -np.inf, x, x - shift - total)


@kernel
@QUIET
def log_softmax_backward(g, y):
    # dy_i / dx_j = (i == j) - softmax_j
    xp = array_module(y)
    return xp.where(y == -np.inf, y.dtype.type(0), g - xp.exp(y) * g.sum(axis=1, keepdims=True))


def _shift(x):
    """The largest of each row, as what exponents are relative to; 0 if it is -inf."""
    top = x.max(axis=1, keepdims=True)
    return array_module(x).where(top == -np.inf, x.dtype.type(0), top)


# --- CPU -----------------------------------------------------------------------------------

GRAIN = 16384  # elements per index of a body


def rows_per_index(V):
    """How many rows of V elements a body takes at once."""
    return GRAIN // (V + 1) + 1


@device
def row_shift(x):
    """What the exponents of a row are relative to."""
    top = row_max(x)
    return x.dtype.type(0) if top == -np.inf else top


@device
def row_exp_sum(x, shift):
    """sum(exp(x - shift)) over a contiguous row, in 16 lanes."""
    n, zero = np.int64(x.size), splat(x.dtype.type(0))
    total = zero
    whole = n - n % 16
    for c in range(0, whole, 16):
        total = total + exp(load(x, c) - shift)
    if whole < n:
        last = exp(load_first(x, whole, n - whole, zero) - shift)
        total = keep_first(n - whole, total + last, total)
    return tree_sum(total)


@device
def row_exp(x, shift, out):
    """exp(x - shift) of a contiguous row into `out`, which may be x; returns the sum."""
    n, zero = np.int64(x.size), splat(x.dtype.type(0))
    total = zero
    whole = n - n % 16
    for c in range(0, whole, 16):
        e = exp(load(x, c) - shift)
        store(out, c, e)
        total = total + e
    if whole < n:
        for c in range(whole, n):
            out[c] = exp(x[c] - shift)
        total = keep_first(n - whole, total + load_first(out, whole, n - whole, zero), total)
    return tree_sum(total)


@body
def softmax_rows_cpu(i, rows, x, y):  # owns `rows` rows of y, as those below
    for n in range(rows * i, min(rows * (i + 1), x.shape[0])):
        row, to = x[n], y[n]
        total = row_exp(row, row_shift(row), to)
        total = x.dtype.type(1) if total == 0 else total
        for c in range(row.size):
            to[c] /= total


@body
def softmax_backward_cpu(i, rows, g, y, dx):
    for n in range(rows * i, min(rows * (i + 1), y.shape[0])):
        p, to, row = y[n], dx[n], g[n]
        for c in range(p.size):
            to[c] = select(p[c] == 0, p[c], row[c] * p[c])
        total = row_sum(to)
        for c in range(p.size):
            to[c] -= p[c] * total


@body
def log_softmax_rows_cpu(i, rows, x, y):
    low = x.dtype.type(-np.inf)
    for n in range(rows * i, min(rows * (i + 1), x.shape[0])):
        row, to = x[n], y[n]
        shift = row_shift(row)
        total = log(row_exp_sum(row, shift))
        for c in range(row.size):
            to[c] = select(row[c] == low, low, row[c] - shift - total)


@body
def log_softmax_backward_cpu(i, rows, g, y, dx):
    zero, low = y.dtype.type(0), y.dtype.type(-np.inf)
    for n in range(rows * i, min(rows * (i + 1), y.shape[0])):
        logp, to, row = y[n], dx[n], g[n]
        total = row_sum(row)
        for c in range(logp.size):
            to[c] = select(logp[c] == low, zero, row[c] - exp(logp[c]) * total)


def _by_rows(fill):
    def fast(*arrays):
        x = arrays[0]
        out, rows = empty(x.shape, x.dtype), rows_per_index(x.shape[1])
        fill(-(-len(x) // rows), rows, *arrays, out)
        return out

    return fast


softmax_rows.cpu(_by_rows(softmax_rows_cpu))
softmax_backward.cpu(_by_rows(softmax_backward_cpu))
log_softmax_rows.cpu(_by_rows(log_softmax_rows_cpu))
log_softmax_backward.cpu(_by_rows(log_softmax_backward_cpu))


# --- GPU -----------------------------------------------------------------------------------

# Half a warp has a row. What is left of a warp goes along with row 0 and writes nothing.
_GPU = cuda.Source(r"""
__device__ inline REAL row_shift(const REAL *x, i64 V) {
    const REAL top = row_max(x, V);
    return top == -infinity<REAL>() ? 0 : top;
}
extern "C" __global__ void softmax(const REAL *x, REAL *out, i64 N, i64 V) {
    const bool mine = this_row() < N;
    const REAL *row = x + (mine ? this_row() : 0) * V;
    REAL *to = out + this_row() * V, total = 0;
    const REAL shift = row_shift(row, V);
    for (i64 c = this_lane(); c < V; c += 16) {
        const REAL e = exp_(row[c] - shift);
        if (mine) to[c] = e;
        total = total + e;
    }
    total = tree_sum(total);
    total = total == 0 ? 1 : total;
    if (mine)
        for (i64 c = this_lane(); c < V; c += 16) to[c] = to[c] / total;
}
extern "C" __global__ void softmax_backward(
    const REAL *g, const REAL *y, REAL *out, i64 N, i64 V
) {
    const bool mine = this_row() < N;
    const i64 at = (mine ? this_row() : 0) * V;
    REAL total = 0;
    for (i64 c = this_lane(); c < V; c += 16) {
        const REAL p = y[at + c];
        total = total + (p == 0 ? p : g[at + c] * p);
    }
    total = tree_sum(total);
    if (mine)
        for (i64 c = this_lane(); c < V; c += 16) {
            const REAL p = y[at + c];
            out[at + c] = (p == 0 ? p : g[at + c] * p) - p * total;
        }
}
extern "C" __global__ void log_softmax(const REAL *x, REAL *out, i64 N, i64 V) {
    const bool mine = this_row() < N;
    const i64 at = (mine ? this_row() : 0) * V;
    const REAL *row = x + at, low = -infinity<REAL>();
    const REAL shift = row_shift(row, V);
    REAL total = 0;
    for (i64 c = this_lane(); c < V; c += 16) total = total + exp_(row[c] - shift);
    total = log_(tree_sum(total));
    if (mine)
        for (i64 c = this_lane(); c < V; c += 16)
            out[at + c] = row[c] == low ? low : row[c] - shift - total;
}
extern "C" __global__ void log_softmax_backward(
    const REAL *g, const REAL *y, REAL *out, i64 N, i64 V
) {
    const bool mine = this_row() < N;
    const i64 at = (mine ? this_row() : 0) * V;
    const REAL total = row_sum(g + at, V);
    if (mine)
        for (i64 c = this_lane(); c < V; c += 16) {
            const REAL p = y[at + c];
            out[at + c] = p == -infinity<REAL>() ? 0 : g[at + c] - exp_(p) * total;
        }
}""")


def _on_gpu(name):
    def fast(*arrays):
        x = arrays[0]
        out = cuda.empty(x.shape, x.dtype)
        _GPU(name, cuda.row_blocks(len(x)), cuda.THREADS, *arrays, out, *x.shape, real=x.dtype)
        return out

    return fast


softmax_rows.gpu(_on_gpu("softmax"))
softmax_backward.gpu(_on_gpu("softmax_backward"))
log_softmax_rows.gpu(_on_gpu("log_softmax"))
log_softmax_backward.gpu(_on_gpu("log_softmax_backward"))
