"""Ops that move elements and compute nothing."""

from __future__ import annotations

import numpy as np

from ..backend import array_module, kernel
from ..tape import op


@op
def reshape(x, *, shape):
    """The same elements in another shape.   x (*) -> (*)"""
    return x.reshape(shape), (lambda g: g.reshape(x.shape),)


@op
def swapaxes(x, *, axis1, axis2):
    """Two axes exchanged.   x (*) -> (*)"""
    return x.swapaxes(axis1, axis2), (lambda g: g.swapaxes(axis1, axis2),)


@op
def permute(x, *, axes):
    """The axes in another order.   x (*) -> (*)"""
    back = tuple(int(n) for n in np.argsort([a % x.ndim for a in axes]))
    return x.transpose(axes), (lambda g: g.transpose(back),)


@op
def broadcast_to(x, *, shape):
    """x repeated to `shape` by NumPy's rules.   x (*) -> (*)"""
    return array_module(x).broadcast_to(x, shape), (lambda g: g,)  # the engine sums it back


@op
def getitem(x, *, index):
    """x[index]: slices, integers, integer arrays or masks; repeated elements add up.   x (*) -> (*)"""
    shape, dtype = x.shape, x.dtype

    def vjp(g):
        dx = array_module(g).zeros(shape, dtype)
        add_at(dx, index, g)
        return dx

    return x[index], (vjp,)


@kernel
def add_at(out, index, g):
    """out[index] += g, positions ascending."""
    array_module(out).add.at(out, index, g)


@op
def concat(*xs, axis=0):
    """Arrays one after another along `axis`.   *xs (*) -> (*)"""
    edges = np.cumsum([0] + [x.shape[axis] for x in xs])

    def part(n):
        return lambda g: g[(slice(None),) * (axis % g.ndim) + (slice(edges[n], edges[n + 1]),)]

    return array_module(xs[0]).concatenate(xs, axis=axis), tuple(part(n) for n in range(len(xs)))


@op
def stack(*xs, axis=0):
    """Arrays side by side along a new `axis`.   *xs (*) -> (*)"""

    def part(n):
        return lambda g: g[(slice(None),) * (axis % g.ndim) + (n,)]

    return array_module(xs[0]).stack(xs, axis=axis), tuple(part(n) for n in range(len(xs)))
