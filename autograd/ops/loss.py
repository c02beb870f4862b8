"""The loss of a classifier over V classes, alone and together with the layer before it."""

# N rows (tokens) of C channels, V classes.

from __future__ import annotations

import numpy as np

from .. import backend, cuda
from ..backend import FLOATS, array_module, is_array, keeping, kernel
from ..buffers import empty, zeros
from ..device import beside, to_host
from ..launch import body
from ..mathf import exp, log
from ..precision import compute_dtype
from ..tape import op
from .elementwise import add_arrays
from .embedding import as_ids
from .gemm import gemm
from .reduce import (
    add_chains,
    add_chains_gpu,
    sum_axes,
    sum_chains,
    sum_chains_gpu,
    sum_in_blocks,
)
from .rounding import in_precision
from .softmax import QUIET, row_exp, row_exp_sum, row_shift, rows_per_index

TOKENS = 256  # per block of linear_cross_entropy; part of the contract
SLICE = 2048  # classes whose gradients are added at once: a few MB, still in the cache when read


@op
def cross_entropy(logits, targets, *, ignore_index=-100, reduction="mean"):
    """-log softmax(logits)[target], the sum or mean over the targets that count; 0 if none does.

    logits (..., V), targets (...) -> ()

    A target equal to ignore_index does not count: its row has a gradient of 0. So has a logit of
    -inf. Nothing is shifted: targets are the classes of the rows they stand beside.
    """
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"cross_entropy: logits (..., V) needed, given shape {logits.shape}")
    V = logits.shape[-1]
    labels, count = _labels("cross_entropy", logits, targets, V, ignore_index, reduction)
    labels, rows, shape = beside(labels, logits), logits.reshape(-1, V), logits.shape
    total, stats = cross_entropy_forward(rows, labels, ignore_index)

    def dlogits(g):
        d = cross_entropy_backward(g / count, rows, labels, stats, ignore_index)
        return d.reshape(shape)

    return _loss(logits, total, count), (dlogits, None)


@op(needs=True)
def linear_cross_entropy(
    x, weight, targets, bias=None, *, ignore_index=-100, reduction="mean", needs
):
    """cross_entropy(linear(x, weight, bias), targets) without holding all the logits.

    x (..., C), weight (V, C), targets (...), bias (V) -> ()

    Goes through the tokens in blocks of exactly 256. Logits live for one block only, so the
    gradients are made here too, in their place. The weight may be bits of bfloat16. In a 16-bit
    mode the operands of the products are rounded; logits and sums are float32.
    """
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy: x (..., C) and weight (V, C) needed, "
            f"given shapes {x.shape} and {weight.shape}"
        )
    V, C = weight.shape
    if bias is not None and bias.shape != (V,):
        raise ValueError(f"linear_cross_entropy: a bias ({V},) needed, given shape {bias.shape}")
    labels, count = _labels("linear_cross_entropy", x, targets, V, ignore_index, reduction)
    mode, shape = compute_dtype(), x.shape
    # float16 has no room for gradients divided by the count: they are when they leave
    now, later = (1, count) if mode == "fp16" else (count, 1)
    rows = x.reshape(len(labels), C)
    blocks = _blocks(labels, ignore_index)
    with keeping(None):  # logits are written over: nobody may keep them
        total, *grads = linear_cross_entropy_rows(
            rows, weight, beside(labels, x), blocks, bias, now, mode, needs
        )
    kept = [grads]  # in a list: what a vjp captures is read-only, and these will be handed on

    def vjp(g):
        dx, dweight, dbias = (None if d is None else scaled(d, g / later) for d in kept.pop())
        return None if dx is None else dx.reshape(shape), dweight, None, dbias

    return _loss(x, total, count), vjp


def _labels(op_name, x, targets, V, ignore_index, reduction):
    """The targets as a row of int64 on the CPU, and what the sum of losses is divided by."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{op_name}: an input of float32 or float64 needed, given {x.dtype}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'{op_name}: reduction is "mean" or "sum", given {reduction!r}')
    targets = to_host(targets) if is_array(targets) else targets
    labels = as_ids(op_name, "target", targets, V, ignored=ignore_index)
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{op_name}: targets {x.shape[:-1]} needed for an input {x.shape}, given {labels.shape}"
        )
    count = int((labels != ignore_index).sum()) if reduction == "mean" else 1
    return labels.reshape(-1), max(count, 1)


def _blocks(labels, ignore_index):
    """Which rows count: a list of their numbers for each block of TOKENS.

    The others would add exactly 0 to every sum: they are left out.
    """
    starts = range(0, len(labels), TOKENS)
    return [np.flatnonzero(labels[n : n + TOKENS] != ignore_index) + n for n in starts]


def _loss(x, total, count):
    return array_module(x).asarray(total / count, dtype=x.dtype)


@kernel
@QUIET
def cross_entropy_forward(rows, labels, ignore_index):
    """The summed loss (float64), and of each row the largest logit and 1 / sum(exp): (N, 2)."""
    xp = array_module(rows)
    counts = labels != ignore_index
    top = rows.max(axis=1)
    shift = xp.where(top == -np.inf, rows.dtype.type(0), top)
    total = xp.exp(rows - shift[:, None]).sum(axis=1)
    picked = rows[xp.arange(len(rows)), xp.where(counts, labels, 0)]
    losses = xp.log(total.astype(np.float64)) + (shift.astype(np.float64) - picked)
    factor = xp.where(total == 0, total, 1 / total)
    losses = xp.where(picked == -np.inf, np.inf, losses)
    return sum_in_blocks(xp.where(counts, losses, 0)), xp.stack([shift, factor], axis=1)


@kernel
@QUIET
def cross_entropy_backward(g, rows, labels, stats, ignore_index):
    """g (softmax - onehot) in the rows that count, 0 in the others."""
    xp = array_module(rows)
    counts = labels != ignore_index
    d = xp.exp(rows - stats[:, :1]) * (stats[:, 1:] * g)
    d[xp.arange(len(rows)), xp.where(counts, labels, 0)] -= g
    return xp.where(counts[:, None] & (rows != -np.inf), d, rows.dtype.type(0))


@kernel
@QUIET
def linear_cross_entropy_rows(x, weight, labels, blocks, bias, count, mode, needs):
    """The summed loss (float64), and dx, dweight, dbias of loss / count where needed.

    `blocks` lists, for each block of tokens, the rows that count.
    """
    xp, scale = array_module(x), x.dtype.type(1) / x.dtype.type(count)
    dx = xp.zeros_like(x) if needs[0] else None
    dweight = xp.zeros_like(weight) if needs[1] else None
    dbias = xp.zeros_like(bias) if bias is not None and needs[3] else None
    x, weight, total = in_precision(x, mode), in_precision(weight, mode), 0.0
    for part in blocks:
        logits = gemm(x[part], weight, False, True)
        logits = logits if bias is None else logits + bias
        loss, stats = cross_entropy_forward(logits, labels[part], -1)  # every target counts
        total += loss
        d = cross_entropy_backward(scale, logits, labels[part], stats, -1)
        if dbias is not None:
            dbias += sum_axes(d, (0,))
        d = in_precision(d, mode)
        if dx is not None:
            dx[part] = gemm(d, weight, False, False)
        if dweight is not None:
            dweight += gemm(d, x[part], True, False)
    return total, dx, dweight, dbias


@kernel
def scaled(out, g):
    """g out, in its place."""
    out *= g
    return out


# --- CPU -----------------------------------------------------------------------------------


@body
def forward_cpu(i, rows, x, labels, ignore_index, losses, stats):
    one, low = x.dtype.type(1), -np.inf
    for n in range(rows * i, min(rows * (i + 1), x.shape[0])):
        losses[n] = 0.0
        if labels[n] != ignore_index:
            shift = row_shift(x[n])
            total = row_exp_sum(x[n], shift)
            picked = x[n, labels[n]]
            stats[n, 0], stats[n, 1] = shift, (one / total if total != 0 else total)
            loss = log(np.float64(total)) + (np.float64(shift) - np.float64(picked))
            losses[n] = np.inf if picked == low else loss


@cross_entropy_forward.cpu
def cross_entropy_forward_cpu(x, labels, ignore_index):
    N, V = x.shape
    losses, stats, rows = np.empty(N), empty((N, 2), x.dtype), rows_per_index(V)
    forward_cpu(-(-N // rows), rows, x, labels, ignore_index, losses, stats)
    return sum_in_blocks(losses), stats


@body
def backward_cpu(i, rows, g, x, labels, stats, ignore_index, dx):
    zero = x.dtype.type(0)
    for n in range(rows * i, min(rows * (i + 1), x.shape[0])):
        row, to, label = x[n], dx[n], labels[n]
        if label == ignore_index:
            for c in range(row.size):
                to[c] = zero
        else:
            shift, factor = stats[n, 0], stats[n, 1] * g
            for c in range(row.size):
                to[c] = exp(row[c] - shift) * factor
            to[label] = zero if row[label] == -np.inf else to[label] - g


@cross_entropy_backward.cpu
def cross_entropy_backward_cpu(g, x, labels, stats, ignore_index):
    out, rows = empty(x.shape, x.dtype), rows_per_index(x.shape[1])
    g = x.dtype.type(g)
    backward_cpu(-(-len(x) // rows), rows, g, x, labels, stats, ignore_index, out)
    return out


@body
def both_cpu(i, rows, scale, out, labels, losses):
    """Logits become their gradients; one exp each, the bits of the two bodies above."""
    zero, one = out.dtype.type(0), out.dtype.type(1)
    for n in range(rows * i, min(rows * (i + 1), out.shape[0])):
        row = out[n]
        picked, shift = row[labels[n]], row_shift(row)
        total = row_exp(row, shift, row)
        factor = (one / total if total != 0 else total) * scale
        for c in range(row.size):
            row[c] *= factor
        loss = log(np.float64(total)) + (np.float64(shift) - np.float64(picked))
        losses[n] = np.inf if picked == -np.inf else loss
        row[labels[n]] = zero if picked == -np.inf else row[labels[n]] - scale


@linear_cross_entropy_rows.cpu
def linear_cross_entropy_rows_cpu(x, weight, labels, blocks, bias, count, mode, needs):
    N, V = len(x), len(weight)
    scale = x.dtype.type(1) / x.dtype.type(count) if any(needs) else None
    want_weight, want_bias = needs[1], bias is not None and needs[3]
    dx = zeros(x.shape, x.dtype) if needs[0] else None
    dweight = dbias = None
    losses = np.zeros(N)
    table = in_precision(weight, mode)
    for rows in blocks:
        if not len(rows):
            continue
        xs = in_precision(x[rows], mode)
        d = gemm(xs, table, False, True, bias)  # (rows, V): logits, soon their gradients
        losses[rows] = _block_losses(d, labels[rows], scale)
        if want_bias:
            dbias = add_chains(sum_chains(d[None]), dbias)  # (1, V)
        if dx is not None or want_weight:
            d = in_precision(d, mode)
        if dx is not None:
            dx[rows] = gemm(d, table, False, False)
        if want_weight:
            dweight = _add_product(dweight, d, xs)
        del d  # its memory serves the next block
    if want_weight and dweight is None:
        dweight = zeros(weight.shape, weight.dtype)
    if want_bias:
        dbias = zeros((V,), x.dtype) if dbias is None else dbias.reshape(V)
    return sum_in_blocks(losses), dx, dweight, dbias


def _add_product(dweight, d, x):
    """dweight + d^T x in its place; the product, as large as dweight, comes in slices."""
    if dweight is None:
        return gemm(d, x, True, False)
    for v in range(0, len(dweight), SLICE):
        part = dweight[v : v + SLICE]
        add_arrays(part, gemm(d[:, v : v + SLICE], x, True, False), part)
    return dweight


def _block_losses(logits, targets, scale):
    """The loss of each row; with a scale the logits become their gradients times it."""
    losses, group = np.empty(len(logits)), rows_per_index(logits.shape[1])
    jobs = -(-len(logits) // group)
    if scale is None:
        stats = empty((len(logits), 2), logits.dtype)
        forward_cpu(jobs, group, logits, targets, -1, losses, stats)  # every target counts
    else:
        both_cpu(jobs, group, scale, logits, targets, losses)
    return losses


@body
def scale_cpu(i, grain, g, out):  # owns `grain` elements of out
    for n in range(grain * i, min(grain * (i + 1), out.size)):
        out[n] *= g


@scaled.cpu
def scaled_cpu(out, g):
    if g != 1:
        grain = 1 << 16
        scale_cpu(-(-out.size // grain), grain, out.dtype.type(g), out.reshape(-1))
    return out


# --- GPU -----------------------------------------------------------------------------------

# A block of threads has a row. All its threads make exponentials, a stage of them at a time; the
# first 16 add up the one before, each its lane, for that order is the row's.
_GPU = cuda.Source(r"""
enum { STAGE = 2048 };

__device__ inline REAL block_shift(const REAL *x, i64 V) {
    __shared__ REAL tops[32];
    REAL top = -infinity<REAL>();
    for (i64 c = threadIdx.x; c < V; c += blockDim.x) top = larger(top, x[c]);
    for (int step = 16; step; step /= 2)
        top = larger(top, __shfl_xor_sync(0xffffffffu, top, step));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; warp++) top = larger(top, tops[warp]);
    return top == -infinity<REAL>() ? 0 : top;
}
__device__ inline REAL block_exp_sum(const REAL *x, REAL shift, i64 V) {
    __shared__ REAL stages[2][STAGE], sum;
    REAL total = 0;
    int now = 0;
    for (i64 start = 0; start < V; start += STAGE, now ^= 1) {
        const int n = (int)min(V - start, (i64)STAGE);
        for (int i = threadIdx.x; i < n; i += blockDim.x)
            stages[now][i] = exp_(x[start + i] - shift);
        __syncthreads();
        if (threadIdx.x < 16) {
#pragma unroll 8
            for (int i = threadIdx.x; i < n; i += 16) total = total + stages[now][i];
        }
    }
    if (threadIdx.x < 32) {
        total = tree_sum(total);
        if (threadIdx.x == 0) sum = total;
    }
    __syncthreads();
    return sum;
}
__device__ inline double loss(REAL total, REAL shift, REAL picked) {
    if (picked == -infinity<REAL>()) return infinity<double>();
    return log_((double)total) + ((double)shift - (double)picked);
}
extern "C" __global__ void forward(
    const REAL *x, const i64 *labels, i64 ignored, double *losses, REAL *stats, i64 V
) {
    const i64 n = blockIdx.x;
    const REAL *row = x + n * V;
    if (labels[n] == ignored) {
        if (threadIdx.x == 0) losses[n] = 0;
        return;
    }
    const REAL shift = block_shift(row, V), total = block_exp_sum(row, shift, V);
    if (threadIdx.x == 0) {
        stats[2 * n] = shift;
        stats[2 * n + 1] = total != 0 ? 1 / total : total;
        losses[n] = loss(total, shift, row[labels[n]]);
    }
}
extern "C" __global__ void backward(
    const REAL *g, const REAL *x, const i64 *labels, const REAL *stats, i64 ignored, REAL *dx, i64 V
) {
    const i64 n = blockIdx.x, label = labels[n];
    const REAL *row = x + n * V, shift = stats[2 * n], factor = stats[2 * n + 1] * *g;
    for (i64 c = threadIdx.x; c < V; c += blockDim.x) {
        REAL d = 0;
        if (label != ignored) {
            d = exp_(row[c] - shift) * factor;
            if (c == label) d = row[c] == -infinity<REAL>() ? 0 : d - *g;
        }
        dx[n * V + c] = d;
    }
}
// Logits become their gradients, if asked for; row n is row places[n] of all.
extern "C" __global__ void both(
    REAL *out, const i64 *labels, const i64 *places, double *losses, i64 backward, REAL scale, i64 V
) {
    const i64 n = blockIdx.x, label = labels[n];
    REAL *row = out + n * V, picked = row[label];
    const REAL shift = block_shift(row, V), total = block_exp_sum(row, shift, V);
    if (threadIdx.x == 0) losses[places[n]] = loss(total, shift, picked);
    if (!backward) return;
    const REAL factor = (total != 0 ? 1 / total : total) * scale;
    for (i64 c = threadIdx.x; c < V; c += blockDim.x) {
        const REAL d = exp_(row[c] - shift) * factor;
        row[c] = c != label ? d : picked == -infinity<REAL>() ? 0 : d - scale;
    }
}
extern "C" __global__ void scale(const REAL *g, REAL *out, i64 n) {
    const i64 i = this_thread();
    if (i < n && *g != 1) out[i] = out[i] * *g;
}
""")


def _row_threads(V):
    """Threads for a row: a warp for 256 elements."""
    return 32 * min(max(V // 256, 1), 8)


@cross_entropy_forward.gpu
def cross_entropy_forward_gpu(x, labels, ignore_index):
    N, V = x.shape
    losses, stats = cuda.empty(N, np.float64), cuda.empty((N, 2), x.dtype)
    args = labels, ignore_index, losses, stats, V
    _GPU("forward", N, _row_threads(V), x, *args, real=x.dtype)
    return sum_in_blocks(losses), stats


@cross_entropy_backward.gpu
def cross_entropy_backward_gpu(g, x, labels, stats, ignore_index):
    (N, V), out = x.shape, cuda.empty(x.shape, x.dtype)
    g = backend.cupy.asarray(g, x.dtype)
    args = labels, stats, ignore_index, out, V
    _GPU("backward", N, _row_threads(V), g, x, *args, real=x.dtype)
    return out


@linear_cross_entropy_rows.gpu
def linear_cross_entropy_rows_gpu(x, weight, labels, blocks, bias, count, mode, needs):
    N, V, zeros = len(x), len(weight), backend.cupy.zeros
    scale = x.dtype.type(1) / x.dtype.type(count)
    want_weight, want_bias = needs[1], bias is not None and needs[3]
    dx = zeros(x.shape, x.dtype) if needs[0] else None
    dweight = dbias = None
    losses = zeros(N, np.float64)
    table = in_precision(weight, mode)
    places = cuda.asarray(np.concatenate([*blocks, np.empty(0, np.int64)]))
    targets, done = labels[places], 0
    for rows in blocks:
        n = len(rows)
        if not n:
            continue
        here, done = slice(done, done + n), done + n
        # What lies together need not be gathered.
        together = rows[-1] - rows[0] == n - 1
        rows = slice(int(rows[0]), int(rows[-1]) + 1) if together else places[here]
        xs = in_precision(x[rows], mode)
        d = gemm(xs, table, False, True, bias)  # (n, V): logits, soon their gradients
        args = targets[here], places[here], losses, int(any(needs)), scale, V
        _GPU("both", n, _row_threads(V), d, *args, real=x.dtype)
        if want_bias:
            dbias = add_chains_gpu(sum_chains_gpu(d[None]), dbias)  # (1, V)
        if dx is not None or want_weight:
            d = in_precision(d, mode)
        if dx is not None:
            if together:
                gemm(d, table, False, False, None, None, dx[rows])
            else:
                dx[rows] = gemm(d, table, False, False)
        if want_weight:
            dweight = gemm(d, xs, True, False, None, dweight, dweight)
        del d  # its memory serves the next block
    if want_weight and dweight is None:
        dweight = zeros(weight.shape, weight.dtype)
    if want_bias:
        dbias = zeros((V,), x.dtype) if dbias is None else dbias.reshape(V)
    return sum_in_blocks(losses), dx, dweight, dbias


@scaled.gpu
def scaled_gpu(out, g):
    g = backend.cupy.asarray(g, out.dtype)
    _GPU("scale", cuda.blocks(out.size), cuda.THREADS, g, out, out.size, real=out.dtype)
    return out
