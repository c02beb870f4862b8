"""Sums, means and maxima over axes.

Orders of the sums, which the bits depend on: along the last axis a row is summed in 16 lanes; over
other axes elements are summed in chains of 64, and the chains ascending. Axes that are not side by
side are summed one group after another, the last group first.
"""

# A outer, R reduced, C inner: any group of neighbouring axes of an array is the R of (A, R, C).

from __future__ import annotations

import math
import operator

import numpy as np

from .. import cuda, lanes, mathf
from ..backend import array_module, kernel
from ..buffers import empty
from ..launch import body, device
from ..tape import op
from .softmax import QUIET, row_exp_sum, row_shift, rows_per_index


def _axes(op_name, x, axis) -> tuple[int, ...]:
    """The axes as ascending numbers from 0."""
    if axis is None:
        return tuple(range(x.ndim))
    try:
        axes = tuple(map(operator.index, axis if isinstance(axis, tuple | list) else (axis,)))
    except TypeError:
        raise TypeError(f"{op_name}: axis is an integer or several, given {axis!r}") from None
    for a in axes:
        if not -x.ndim <= a < x.ndim:
            raise ValueError(f"{op_name}: axis {a} does not exist in an array of shape {x.shape}")
    axes = tuple(sorted(a % x.ndim for a in axes))
    if len(set(axes)) < len(axes):
        raise ValueError(f"{op_name}: axis {axis} names one axis twice")
    return axes


def _without(shape, axes, keepdims=False) -> tuple[int, ...]:
    """The shape of a reduction over the axes."""
    if keepdims:
        return tuple(1 if n in axes else s for n, s in enumerate(shape))
    return tuple(s for n, s in enumerate(shape) if n not in axes)


@op
def sum(x, *, axis=None, keepdims=False):
    """The sum over `axis`; of nothing it is 0.   x (*) -> (*)"""
    axes, shape = _axes("sum", x, axis), x.shape
    kept = _without(shape, axes, keepdims=True)
    out = sum_axes(x, axes).reshape(_without(shape, axes, keepdims))
    return out, (lambda g: array_module(g).broadcast_to(g.reshape(kept), shape),)


@op
def mean(x, *, axis=None, keepdims=False):
    """The mean over `axis`; of nothing it is NaN.   x (*) -> (*)"""
    axes, shape = _axes("mean", x, axis), x.shape
    kept = _without(shape, axes, keepdims=True)
    count = math.prod(shape[a] for a in axes)
    n = x.dtype.type(count or 1)
    total = sum_axes(x, axes).reshape(_without(shape, axes, keepdims))
    out = total / n if count else array_module(x).full_like(total, np.nan)
    return out, (lambda g: array_module(g).broadcast_to(g.reshape(kept) / n, shape),)


@op
def max(x, *, axis=None, keepdims=False):
    """The maximum over `axis`; equal maxima share the gradient.   x (*) -> (*)"""
    axes, shape = _axes("max", x, axis), x.shape
    if math.prod(shape[a] for a in axes) == 0:
        raise ValueError(f"max: nothing has no maximum; axis {axis} of an array of shape {shape}")
    kept = _without(shape, axes, keepdims=True)
    out = max_axes(x, axes)

    def vjp(g):
        top = (x == out.reshape(kept)).astype(x.dtype)
        share = g / sum_axes(top, axes).reshape(g.shape)
        return array_module(x).asarray(top * share.reshape(kept))

    return out.reshape(_without(shape, axes, keepdims)), (vjp,)


@op
def logsumexp(x, *, axis=-1, keepdims=False):
    """log(sum(exp(x))) over `axis`; -inf where every x is, with a gradient of 0.   x (*) -> (*)"""
    axes, shape = _axes("logsumexp", x, axis), x.shape
    back = [n for n in range(x.ndim) if n not in axes] + list(axes)
    moved = x.transpose(back)
    R = math.prod(shape[a] for a in axes)
    rows = moved.reshape(math.prod(_without(shape, axes)), R)  # (N, R)
    out = logsumexp_rows(rows)

    def vjp(g):
        dx = logsumexp_backward(g.reshape(-1), rows, out).reshape(moved.shape)
        return dx.transpose(tuple(np.argsort(back).tolist()))

    return out.reshape(_without(shape, axes, keepdims)), (vjp,)


@kernel
def sum_axes(x, axes):
    """The sum of x over the axes, which are dropped."""
    return array_module(x).asarray(x.sum(axis=axes, dtype=x.dtype))


def sum_to(g, shape):
    """Undo broadcasting: the sum of g over the axes along which `shape` was repeated."""
    lead = g.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(
        lead + n for n, s in enumerate(shape) if s == 1 and g.shape[lead + n] != 1
    )
    return sum_axes(g, axes).reshape(shape) if axes else g.reshape(shape)


@kernel
def max_axes(x, axes):
    """The largest element over the axes, which are dropped; NaN if one is NaN."""
    return array_module(x).asarray(x.max(axis=axes)) if axes else x


@kernel
@QUIET
def logsumexp_rows(x):
    """x (N, R) -> (N)"""
    xp = array_module(x)
    top = x.max(axis=1, initial=-np.inf)
    shift = xp.where(top == -np.inf, x.dtype.type(0), top)[:, None]
    return xp.log(xp.exp(x - shift).sum(axis=1)) + shift[:, 0]


@kernel
@QUIET
def logsumexp_backward(g, x, out):
    xp = array_module(x)
    # d lse / dx = exp(x - lse); a -inf counts as a constant, also where lse is -inf
    shift = xp.where(out == -np.inf, x.dtype.type(0), out)[:, None]
    return xp.where(x == -np.inf, x.dtype.type(0), xp.exp(x - shift) * g[:, None])


@kernel
def sum_of_squares(x):
    """The sum of x**2 over all elements, for the norms of gradients: a float64.

    In float64: blocks of 4096, each in 16 lanes by fma, then the blocks ascending.
    """
    flat = x.reshape(-1).astype(np.float64)
    return np.float64((flat * flat).sum())


@kernel
def sum_in_blocks(x):
    """The sum of a float64 x over all elements, for losses, in the order of `sum_of_squares`."""
    return np.float64(x.sum())


# --- CPU -----------------------------------------------------------------------------------

CHAIN = 64  # rows per partial sum over rows; part of the contract
SPAN = 4096  # elements per float64 partial sum; part of the contract
COLUMNS = 1024  # per index of a body: a partial sum stays in the first-level cache


@body
def sum_rows_cpu(i, rows, x, out):  # owns `rows` elements of out, as the other row bodies do
    for n in range(rows * i, min(rows * (i + 1), x.shape[0])):
        out[n] = lanes.row_sum(x[n])


@body
def sum_chains_cpu(i, x, out):
    """x (A, R, C) -> out (A, chains, C): owns COLUMNS columns of one chain."""
    R, C = x.shape[1:]
    chains, stripes = out.shape[1], (C + COLUMNS - 1) // COLUMNS
    low = i % stripes * COLUMNS
    high = min(low + COLUMNS, C)
    chain, o = i // stripes % chains, i // stripes // chains
    to = out[o, chain, low:high]
    for c in range(high - low):
        to[c] = 0
    r, stop = chain * CHAIN, min((chain + 1) * CHAIN, R)
    while r + 4 <= stop:  # four at a time, so that `to` is read and written less often
        a, b = x[o, r, low:high], x[o, r + 1, low:high]
        c, d = x[o, r + 2, low:high], x[o, r + 3, low:high]
        for k in range(high - low):
            to[k] = (((to[k] + a[k]) + b[k]) + c[k]) + d[k]
        r += 4
    while r < stop:
        a = x[o, r, low:high]
        for k in range(high - low):
            to[k] += a[k]
        r += 1


@body
def add_chains_cpu(i, x, fresh, out):
    """x (A, chains, C) into out (A, C), the chains ascending: owns COLUMNS columns."""
    C = x.shape[2]
    stripes = (C + COLUMNS - 1) // COLUMNS
    low = i % stripes * COLUMNS
    high = min(low + COLUMNS, C)
    o = i // stripes
    to = out[o, low:high]
    if fresh:
        to[:] = x[o, 0, low:high]
    for chain in range(fresh, x.shape[1]):
        a = x[o, chain, low:high]
        for k in range(high - low):
            to[k] += a[k]


@sum_axes.cpu
def sum_axes_cpu(x, axes):
    return _by_groups(x, axes, sum_middle)


def sum_middle(x):
    """x (A, R, C) -> (A, C)"""
    A, R, C = x.shape
    if C == 1:
        out, rows = empty((A, C), x.dtype), rows_per_index(R)
        sum_rows_cpu(-(-A // rows), rows, x.reshape(A, R), out.reshape(A))
        return out
    return add_chains(sum_chains(x), None)


def sum_chains(x):
    """The chains of 64 along the middle axis: x (A, R, C) -> (A, ceil(R / 64), C)"""
    A, R, C = x.shape
    out = empty((A, -(-R // CHAIN) or 1, C), x.dtype)
    sum_chains_cpu(A * out.shape[1] * -(-C // COLUMNS), x, out)
    return out


def add_chains(parts, out):
    """The parts (A, chains, C) added up ascending, to what is in `out` if given: (A, C)"""
    A, chains, C = parts.shape
    if out is None and chains == 1:
        return parts.reshape(A, C)
    fresh = out is None
    out = empty((A, C), parts.dtype) if fresh else out
    add_chains_cpu(A * -(-C // COLUMNS), parts, fresh, out)
    return out


def _by_groups(x, axes, reduce):
    """Reduce neighbouring axes together, the last group first."""
    shape = _without(x.shape, axes)
    while axes:
        last = first = axes[-1]
        while first - 1 in axes:
            first -= 1
        lead, tail = x.shape[:first], x.shape[last + 1 :]
        middle = (math.prod(lead), math.prod(x.shape[first : last + 1]), math.prod(tail))
        x = reduce(x.reshape(middle)).reshape(lead + tail)
        axes = tuple(a for a in axes if a < first)
    return x.reshape(shape)


@body
def max_rows_cpu(i, rows, x, out):
    for n in range(rows * i, min(rows * (i + 1), x.shape[0])):
        out[n] = lanes.row_max(x[n])


@body
def max_columns_cpu(i, x, out):  # owns COLUMNS columns of one o
    C = x.shape[2]
    stripes = (C + COLUMNS - 1) // COLUMNS
    low = i % stripes * COLUMNS
    high = min(low + COLUMNS, C)
    to = out[i // stripes, low:high]
    to[:] = x[i // stripes, 0, low:high]
    for r in range(1, x.shape[1]):
        a = x[i // stripes, r, low:high]
        for k in range(high - low):
            to[k] = lanes.maximum(to[k], a[k])


@max_axes.cpu
def max_axes_cpu(x, axes):
    return _by_groups(x, axes, _max_middle)


def _max_middle(x):
    A, R, C = x.shape
    out = empty((A, C), x.dtype)
    if C == 1:
        rows = rows_per_index(R)
        max_rows_cpu(-(-A // rows), rows, x.reshape(A, R), out.reshape(A))
    else:
        max_columns_cpu(A * -(-C // COLUMNS), x, out)
    return out


@body
def logsumexp_rows_cpu(i, rows, x, out):
    for n in range(rows * i, min(rows * (i + 1), x.shape[0])):
        shift = row_shift(x[n])
        out[n] = mathf.log(row_exp_sum(x[n], shift)) + shift


@logsumexp_rows.cpu
def logsumexp_rows_fast(x):
    out, rows = empty(len(x), x.dtype), rows_per_index(x.shape[1])
    logsumexp_rows_cpu(-(-len(x) // rows), rows, x, out)
    return out


@body
def logsumexp_backward_cpu(i, rows, g, x, out, dx):
    zero, low = x.dtype.type(0), x.dtype.type(-np.inf)
    for n in range(rows * i, min(rows * (i + 1), x.shape[0])):
        shift = zero if out[n] == low else out[n]
        row, to, gn = x[n], dx[n], g[n]
        for c in range(x.shape[1]):
            to[c] = lanes.select(row[c] == low, zero, mathf.exp(row[c] - shift) * gn)


@logsumexp_backward.cpu
def logsumexp_backward_fast(g, x, out):
    dx, rows = empty(x.shape, x.dtype), rows_per_index(x.shape[1])
    logsumexp_backward_cpu(-(-len(x) // rows), rows, g, x, out, dx)
    return dx


@device
def _square_sum(x):
    n, none = np.int64(x.size), lanes.splat(x.dtype.type(0))
    total = lanes.splat(np.float64(0))
    whole = n - n % 16
    for c in range(0, whole, 16):
        wide = lanes.widen(lanes.load(x, c))
        total = lanes.fma(wide, wide, total)
    if whole < n:
        wide = lanes.widen(lanes.load_first(x, whole, n - whole, none))
        total = lanes.keep_first(n - whole, lanes.fma(wide, wide, total), total)
    return lanes.tree_sum(total)


@body
def squares_cpu(i, x, parts):  # owns parts[i]
    parts[i] = _square_sum(x[SPAN * i : min(SPAN * (i + 1), x.size)])


@body
def blocks_cpu(i, x, parts):  # owns parts[i]
    parts[i] = lanes.row_sum(x[SPAN * i : min(SPAN * (i + 1), x.size)])


@body
def ascending_cpu(i, parts, out):
    total = 0.0
    for n in range(parts.size):
        total += parts[n]
    out[i] = total


def _added_up(parts):
    out = np.empty(1)
    ascending_cpu(1, parts, out)
    return out[0]


@sum_of_squares.cpu
def sum_of_squares_cpu(x):
    parts = np.empty(-(-x.size // SPAN))
    squares_cpu(len(parts), x.reshape(-1), parts)
    return _added_up(parts)


@sum_in_blocks.cpu
def sum_in_blocks_cpu(x):
    parts = np.empty(-(-x.size // SPAN))
    blocks_cpu(len(parts), x.reshape(-1), parts)
    return _added_up(parts)


# --- GPU -----------------------------------------------------------------------------------

_source = cuda.Source(r"""
// x (N, R) -> out (N): 16 threads a row
extern "C" __global__ void sum_rows(const REAL *x, REAL *out, i64 N, i64 R) {
    const i64 n = this_row();
    const REAL total = row_sum(x + (n < N ? n : 0) * R, R);
    if (n < N && this_lane() == 0) out[n] = total;
}
extern "C" __global__ void max_rows(const REAL *x, REAL *out, i64 N, i64 R) {
    const i64 n = this_row();
    const REAL top = row_max(x + (n < N ? n : 0) * R, R);
    if (n < N && this_lane() == 0) out[n] = top;
}

// x (A, R, C) -> out (A, chains, C), a chain of 64 rows each: a thread an element of out
extern "C" __global__ void sum_chains(const REAL *x, REAL *out, i64 R, i64 C, i64 chains, i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const i64 c = i % C, chain = i / C % chains, a = i / C / chains;
    const i64 start = chain * 64, stop = start + 64 < R ? start + 64 : R;
    REAL total = 0;
    for (i64 r = start; r < stop; r++) total = total + x[(a * R + r) * C + c];
    out[i] = total;
}
// x (A, chains, C) into out (A, C), the chains ascending
extern "C" __global__ void add_chains(const REAL *x, REAL *out, i64 fresh, i64 chains, i64 C,
                                      i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const REAL *from = x + i / C * chains * C + i % C;
    REAL total = fresh ? from[0] : out[i];
    for (i64 chain = fresh; chain < chains; chain++) total = total + from[chain * C];
    out[i] = total;
}
extern "C" __global__ void max_columns(const REAL *x, REAL *out, i64 R, i64 C, i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const REAL *from = x + i / C * R * C + i % C;
    REAL top = from[0];
    for (i64 r = 1; r < R; r++) top = larger(top, from[r * C]);
    out[i] = top;
}

extern "C" __global__ void logsumexp_rows(const REAL *x, REAL *out, i64 N, i64 R) {
    const i64 n = this_row();
    const REAL *row = x + (n < N ? n : 0) * R;
    const REAL top = row_max(row, R), shift = top == -infinity<REAL>() ? (REAL)0 : top;
    REAL total = 0;
    for (i64 i = this_lane(); i < R; i += 16) total = total + exp_(row[i] - shift);
    total = tree_sum(total);
    if (n < N && this_lane() == 0) out[n] = log_(total) + shift;
}
extern "C" __global__ void logsumexp_backward(const REAL *g, const REAL *x, const REAL *out,
                                              REAL *dx, i64 R, i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const REAL lse = out[i / R], shift = lse == -infinity<REAL>() ? (REAL)0 : lse;
    dx[i] = x[i] == -infinity<REAL>() ? (REAL)0 : exp_(x[i] - shift) * g[i / R];
}

// Sums over 4096 elements in float64: 16 threads each
extern "C" __global__ void sum_squares(const REAL *x, double *parts, i64 count, i64 n) {
    const i64 part = this_row(), start = (part < count ? part : 0) * 4096;
    const i64 stop = start + 4096 < n ? start + 4096 : n;
    double total = 0;
    for (i64 i = start + this_lane(); i < stop; i += 16) {
        const double wide = x[i];
        total = fma_(wide, wide, total);
    }
    total = tree_sum(total);
    if (part < count && this_lane() == 0) parts[part] = total;
}
extern "C" __global__ void sum_blocks(const double *x, double *parts, i64 count, i64 n) {
    const i64 part = this_row(), start = (part < count ? part : 0) * 4096;
    const double total = row_sum(x + start, start + 4096 < n ? 4096 : n - start);
    if (part < count && this_lane() == 0) parts[part] = total;
}
extern "C" __global__ void add_parts(const double *parts, double *out, i64 count) {
    double total = 0;
#pragma unroll 16
    for (i64 i = 0; i < count; i++) total = total + parts[i];
    out[0] = total;
}
""")


def _by_element(name, out, *args):
    """Launch a function with a thread for each element of `out`."""
    _source(name, cuda.blocks(out.size), cuda.THREADS, *args, out.size, real=out.dtype)


def _by_row(name, x, out):
    """Launch a function with 16 threads for each row of x (N, R)."""
    _source(name, cuda.row_blocks(len(x)), cuda.THREADS, x, out, *x.shape, real=x.dtype)


@sum_axes.gpu
def sum_axes_gpu(x, axes):
    return _by_groups(x, axes, _sum_middle_gpu)


def _sum_middle_gpu(x):
    A, R, C = x.shape
    if C == 1:
        out = cuda.empty((A, C), x.dtype)
        _by_row("sum_rows", x.reshape(A, R), out)
        return out
    return add_chains_gpu(sum_chains_gpu(x), None)


def sum_chains_gpu(x):
    """`sum_chains` on the GPU."""
    A, R, C = x.shape
    chains = -(-R // CHAIN) or 1
    out = cuda.empty((A, chains, C), x.dtype)
    _by_element("sum_chains", out, x, out, R, C, chains)
    return out


def add_chains_gpu(parts, out):
    """`add_chains` on the GPU."""
    A, chains, C = parts.shape
    if out is None and chains == 1:
        return parts.reshape(A, C)
    fresh = out is None
    out = cuda.empty((A, C), parts.dtype) if fresh else out
    _by_element("add_chains", out, parts, out, int(fresh), chains, C)
    return out


@max_axes.gpu
def max_axes_gpu(x, axes):
    return _by_groups(x, axes, _max_middle_gpu)


def _max_middle_gpu(x):
    A, R, C = x.shape
    out = cuda.empty((A, C), x.dtype)
    if C == 1:
        _by_row("max_rows", x.reshape(A, R), out)
    else:
        _by_element("max_columns", out, x, out, R, C)
    return out


@logsumexp_rows.gpu
def logsumexp_rows_gpu(x):
    out = cuda.empty(len(x), x.dtype)
    _by_row("logsumexp_rows", x, out)
    return out


@logsumexp_backward.gpu
def logsumexp_backward_gpu(g, x, out):
    dx = cuda.empty(x.shape, x.dtype)
    _by_element("logsumexp_backward", dx, g, x, out, dx, x.shape[1])
    return dx


def _by_span(name, x):
    """Sums over 4096 elements, and over these: an array of no dimension, not to wait for it."""
    count, out = -(-x.size // SPAN), cuda.empty((), np.float64)
    parts = cuda.empty(count, np.float64)
    args = parts, count, x.size
    _source(name, cuda.row_blocks(count), cuda.THREADS, x, *args, real=x.dtype)
    _source("add_parts", 1, 1, parts, out, count)
    return out


@sum_of_squares.gpu
def sum_of_squares_gpu(x):
    return _by_span("sum_squares", x)


@sum_in_blocks.gpu
def sum_in_blocks_gpu(x):
    return _by_span("sum_blocks", x)
