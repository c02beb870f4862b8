"""Sums, means and maxima over axes."""

from __future__ import annotations

import math

from ..backend import array_module, kernel
from ..tape import op


def _axes(x, axis) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(x.ndim))
    axis = (axis,) if isinstance(axis, int) else tuple(axis)
    for a in axis:
        if not -x.ndim <= a < x.ndim:
            raise ValueError(f"axis {a} does not exist in an array of shape {x.shape}")
    return tuple(sorted(a % x.ndim for a in axis))


def _kept(shape, axes) -> tuple[int, ...]:
    return tuple(1 if n in axes else s for n, s in enumerate(shape))


@op
def sum(x, *, axis=None, keepdims=False):
    """The sum over `axis`.   x (*) -> (*)"""
    axes = _axes(x, axis)
    kept, shape = _kept(x.shape, axes), x.shape
    out = sum_axes(x, axes)
    xp = array_module(x)
    return out.reshape(kept) if keepdims else out, (
        lambda g: xp.broadcast_to(g.reshape(kept), shape),
    )


@op
def mean(x, *, axis=None, keepdims=False):
    """The mean over `axis`; of nothing it is NaN.   x (*) -> (*)"""
    axes = _axes(x, axis)
    kept, shape = _kept(x.shape, axes), x.shape
    n = math.prod(shape[a] for a in axes)
    xp = array_module(x)
    total = sum_axes(x, axes)
    out = total / x.dtype.type(n) if n else xp.full_like(total, float("nan"))
    return out.reshape(kept) if keepdims else out, (
        lambda g: xp.broadcast_to(g.reshape(kept) / g.dtype.type(n), shape),
    )


@op
def max(x, *, axis=None, keepdims=False):
    """The maximum over `axis`; equal maxima share the gradient.   x (*) -> (*)"""
    axes = _axes(x, axis)
    kept = _kept(x.shape, axes)
    if any(x.shape[a] == 0 for a in axes):
        raise ValueError(f"max: an axis of length 0 has no maximum; the array has shape {x.shape}")
    out = x.max(axis=axes)
    xp = array_module(x)

    def vjp(g):
        top = (x == out.reshape(kept)).astype(x.dtype)
        share = top / sum_axes(top, axes).reshape(kept)
        return xp.broadcast_to(g.reshape(kept), x.shape) * share

    return out.reshape(kept) if keepdims else out, (vjp,)


@op
def logsumexp(x, *, axis=-1, keepdims=False):
    """log(sum(exp(x))) over `axis`.   x (*) -> (*)"""
    xp = array_module(x)
    axes = _axes(x, axis)
    kept = _kept(x.shape, axes)
    top = x.max(axis=axes, keepdims=True) if x.size else xp.zeros(kept, x.dtype)
    top = xp.where(xp.isfinite(top), top, x.dtype.type(0))
    out = xp.log(sum_axes(xp.exp(x - top), axes).reshape(kept)) + top

    def vjp(g):
        return g.reshape(kept) * xp.exp(x - out)

    return out if keepdims else out.reshape(tuple(s for n, s in enumerate(x.shape) if n not in axes)), (vjp,)


@kernel
def sum_axes(x, axes):
    """The sum of x over the axes, which are dropped."""
    return x.sum(axis=axes, dtype=x.dtype)


def sum_to(g, shape):
    """Undo broadcasting: the sum of g over the axes along which `shape` was repeated."""
    lead = g.ndim - len(shape)
    axes = tuple(range(lead)) + tuple(
        lead + n for n, s in enumerate(shape) if s == 1 and g.shape[lead + n] != 1
    )
    return sum_axes(g, axes).reshape(shape) if axes else g.reshape(shape)
