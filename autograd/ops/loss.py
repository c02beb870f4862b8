"""The loss of a classifier over V classes, alone and together with the layer before it."""

# N rows (tokens) of C channels, V classes.

from __future__ import annotations

import numpy as np

from ..backend import FLOATS, array_module, keeping, kernel
from ..buffers import empty, zeros
from ..device import beside
from ..launch import body
from ..mathf import exp, log
from ..precision import compute_dtype
from ..tape import op
from .elementwise import add_arrays
from .embedding import as_ids
from .gemm import gemm
from .reduce import add_chains, sum_axes, sum_chains, sum_in_blocks
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
    rows, shape = logits.reshape(-1, V), logits.shape
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
    with keeping(None):  # logits are written over: nobody may keep them
        total, *grads = linear_cross_entropy_rows(
            x.reshape(len(labels), C), weight, labels, bias, ignore_index, now, mode, needs
        )
    kept = [grads]  # in a list: what a vjp captures is read-only, and these will be handed on

    def vjp(g):
        dx, dweight, dbias = (None if d is None else scaled(d, g / later) for d in kept.pop())
        return None if dx is None else dx.reshape(shape), dweight, None, dbias

    return _loss(x, total, count), vjp


def _labels(op_name, x, targets, V, ignore_index, reduction):
    """The targets as a row of int64, and what the sum of losses is divided by."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{op_name}: an input of float32 or float64 needed, given {x.dtype}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'{op_name}: reduction is "mean" or "sum", given {reduction!r}')
    labels = as_ids(op_name, "target", targets, V, ignored=ignore_index)
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{op_name}: targets {x.shape[:-1]} needed for an input {x.shape}, given {labels.shape}"
        )
    count = int((labels != ignore_index).sum()) if reduction == "mean" else 1
    return beside(labels.reshape(-1), x), max(count, 1)


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
def linear_cross_entropy_rows(x, weight, labels, bias, ignore_index, count, mode, needs):
    """The summed loss (float64), and dx, dweight, dbias of loss / count where needed."""
    xp, scale = array_module(x), x.dtype.type(1) / x.dtype.type(count)
    dx = xp.zeros_like(x) if needs[0] else None
    dweight = xp.zeros_like(weight) if needs[1] else None
    dbias = xp.zeros_like(bias) if bias is not None and needs[3] else None
    x, weight, total = in_precision(x, mode), in_precision(weight, mode), 0.0
    for start in range(0, len(x), TOKENS):
        part = slice(start, start + TOKENS)
        logits = gemm(x[part], weight, False, True)
        logits = logits if bias is None else logits + bias
        loss, stats = cross_entropy_forward(logits, labels[part], ignore_index)
        total += loss
        d = cross_entropy_backward(scale, logits, labels[part], stats, ignore_index)
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
def linear_cross_entropy_rows_cpu(x, weight, labels, bias, ignore_index, count, mode, needs):
    N, V = len(x), len(weight)
    scale = x.dtype.type(1) / x.dtype.type(count) if any(needs) else None
    want_weight, want_bias = needs[1], bias is not None and needs[3]
    dx = zeros(x.shape, x.dtype) if needs[0] else None
    dweight = dbias = None
    losses = np.zeros(N)
    table = in_precision(weight, mode)
    for start in range(0, N, TOKENS):
        # Rows that do not count would add exactly 0 to every sum: they are left out
        rows = np.flatnonzero(labels[start : start + TOKENS] != ignore_index) + start
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
