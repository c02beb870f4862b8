"""Softmax, and the loss of a classifier over V classes."""

from __future__ import annotations

import numpy as np

from ..backend import array_module, kernel
from ..tape import op
from .matmul import gemm


@op
def softmax(x):
    """exp(x) / sum(exp(x)) over the last axis.   x (..., V) -> (..., V)"""
    y = softmax_rows(x)
    return y, (lambda g: y * (g - (g * y).sum(axis=-1, keepdims=True)),)


@op
def log_softmax(x):
    """log(softmax(x)) over the last axis.   x (..., V) -> (..., V)"""
    xp = array_module(x)
    y = x - _lse(x)
    return y, (lambda g: g - xp.exp(y) * g.sum(axis=-1, keepdims=True),)


@kernel
def softmax_rows(x):
    e = array_module(x).exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _lse(x):
    xp = array_module(x)
    top = x.max(axis=-1, keepdims=True)
    return xp.log(xp.exp(x - top).sum(axis=-1, keepdims=True)) + top


def check_targets(name, targets, V, ignore_index):
    """Raise if a target is not a class and not `ignore_index`."""
    if targets.dtype.kind not in "iu":
        raise TypeError(f"{name}: targets are integers, given {targets.dtype}")
    wrong = ((targets < 0) | (targets >= V)) & (targets != ignore_index)
    if wrong.any():
        where = tuple(int(n[0]) for n in wrong.nonzero())
        raise ValueError(
            f"{name}: target {int(targets[where])} at {where} is not in 0 .. {V - 1} "
            f"(ignore_index is {ignore_index})"
        )


@op
def cross_entropy(logits, targets, *, ignore_index=-100, reduction="mean"):
    """-log softmax(logits)[target], over the targets that count; 0 if none does.

    logits (..., V), targets (...) -> ()
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"cross_entropy: logits {logits.shape} need targets {logits.shape[:-1]}, given {targets.shape}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'cross_entropy: reduction is "mean" or "sum", not {reduction!r}')
    V = logits.shape[-1]
    check_targets("cross_entropy", targets, V, ignore_index)
    rows, labels = logits.reshape(-1, V), targets.reshape(-1)
    count = (labels != ignore_index).sum() if reduction == "mean" else 1
    scale = logits.dtype.type(1 / max(int(count), 1))
    loss, lse = cross_entropy_forward(rows, labels, ignore_index)
    return (loss * scale).astype(logits.dtype), (
        lambda g: cross_entropy_backward(rows, labels, lse, g * scale, ignore_index).reshape(logits.shape),
        None,
    )


@kernel
def cross_entropy_forward(rows, labels, ignore_index):
    """The summed loss (float64), and the log-sum-exp of each row."""
    xp = array_module(rows)
    lse = _lse(rows)[:, 0]
    counts = labels != ignore_index
    picked = rows[xp.arange(len(rows)), xp.where(counts, labels, 0)]
    return xp.where(counts, lse - picked, 0).sum(dtype=np.float64), lse


@kernel
def cross_entropy_backward(rows, labels, lse, scale, ignore_index):
    """scale (softmax - onehot) in the rows that count, 0 in the others."""
    xp = array_module(rows)
    counts = labels != ignore_index
    d = xp.exp(rows - lse[:, None])
    d[xp.arange(len(rows)), xp.where(counts, labels, 0)] -= 1
    return xp.where(counts[:, None], d * scale, rows.dtype.type(0))


@op(needs=True)
def linear_cross_entropy(x, weight, targets, bias=None, *, ignore_index=-100, reduction="mean", needs):
    """cross_entropy(linear(x, weight, bias), targets) without holding all the logits.

    x (..., C), weight (V, C), targets (...), bias (V) -> ()
    """
    V, C = weight.shape
    check_targets("linear_cross_entropy", targets, V, ignore_index)
    rows, labels = x.reshape(-1, C), targets.reshape(-1)
    count = (labels != ignore_index).sum() if reduction == "mean" else 1
    scale = x.dtype.type(1 / max(int(count), 1))
    loss, dx, dweight, dbias = linear_cross_entropy_rows(rows, weight, labels, bias, ignore_index, scale, needs)
    return (loss * scale).astype(x.dtype), lambda g: (
        None if dx is None else (dx * g).reshape(x.shape),
        None if dweight is None else dweight * g,
        None,
        None if dbias is None else dbias * g,
    )


@kernel
def linear_cross_entropy_rows(rows, weight, labels, bias, ignore_index, scale, needs):
    xp = array_module(rows)
    dx = xp.empty_like(rows) if needs[0] else None
    dweight = xp.zeros_like(weight) if needs[1] else None
    dbias = xp.zeros_like(bias) if bias is not None and needs[3] else None
    total = 0.0
    for n in range(0, len(rows), 256):
        part = slice(n, n + 256)
        logits = gemm(rows[part], weight, False, True)
        if bias is not None:
            logits = logits + bias
        loss, lse = cross_entropy_forward(logits, labels[part], ignore_index)
        total += loss
        d = cross_entropy_backward(logits, labels[part], lse, scale, ignore_index)
        if dx is not None:
            dx[part] = gemm(d, weight, False, False)
        if dweight is not None:
            dweight += gemm(d, rows[part], True, False)
        if dbias is not None:
            dbias += d.sum(axis=0)
    return np.float64(total), dx, dweight, dbias
