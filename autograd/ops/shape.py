"""Ops that move elements and compute nothing; where NumPy gives a view, so do they."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from ..backend import array_module, is_array
from ..tape import op
from ..tensor import Tensor
from .embedding import embedding_backward


@op
def reshape(x, *, shape):
    """The same elements in another shape; one side may be -1.   x (*) -> (*)"""
    shape = _integers("reshape", "shape", shape)
    given = x.shape
    try:
        out = x.reshape(shape)
    except ValueError:
        raise ValueError(
            f"reshape: the {x.size} elements of shape {given} do not fill shape {shape}"
        ) from None
    return out, (lambda g: g.reshape(given),)


@op
def swapaxes(x, *, axis1, axis2):
    """Two axes exchanged.   x (*) -> (*)"""
    axis1, axis2 = (_axis("swapaxes", a, x.ndim, x.shape) for a in (axis1, axis2))
    return x.swapaxes(axis1, axis2), (lambda g: g.swapaxes(axis1, axis2),)


@op
def permute(x, *, axes):
    """The axes in another order.   x (*) -> (*)"""
    if len(axes) == 1 and not isinstance(axes[0], int | np.integer):
        axes = axes[0]
    axes = _integers("permute", "axes", axes)
    order = tuple(_axis("permute", a, x.ndim, x.shape) for a in axes)
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(f"permute: each axis of shape {x.shape} needed once, given {axes}")
    back = tuple(order.index(n) for n in range(x.ndim))
    return x.transpose(order), (lambda g: g.transpose(back),)


@op
def broadcast_to(x, *, shape):
    """x repeated to `shape` by NumPy's rules.   x (*) -> (*)"""
    shape = _integers("broadcast_to", "shape", shape)
    try:
        out = array_module(x).broadcast_to(x, shape)
    except ValueError:
        raise ValueError(
            f"broadcast_to: shape {x.shape} cannot be repeated to {shape}; sides must be equal or 1"
        ) from None
    return out, (lambda g: g,)  # the engine sums it back


@op
def getitem(x, *, index):
    """x[index], by slices, integers, integer arrays and masks.   x (*) -> (*)

    The gradients of an element that was taken more than once add up, in the order of taking.
    """
    shape, dtype = x.shape, x.dtype
    index = _array_index(x, index)
    try:
        _check_range(x, index)
        out = array_module(x).asarray(x[index])
    except (IndexError, TypeError) as error:
        raise IndexError(f"getitem: {_lower(str(error))}; the shape is {shape}") from None

    def vjp(g):
        if _takes_once(g, index):
            dx = array_module(g).zeros(shape, dtype)
            dx[index] = g
            return dx
        return _scatter(g, index, shape)

    return out, (vjp,)


def _array_index(x, index):
    """The index with lists as arrays: what NumPy would make of it, once instead of twice."""

    def one(i):
        if isinstance(i, Tensor):
            raise TypeError("getitem: an index of integers or booleans needed, given a Tensor")
        return np.asarray(i, None if len(i) else np.int64) if isinstance(i, list) else i

    return tuple(map(one, index)) if isinstance(index, tuple) else one(index)


def _parts(index) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _sides(index, shape) -> list[int]:
    """How many axes each part of the index takes."""
    parts = _parts(index)
    sides = [i.ndim if is_array(i) and i.dtype == bool else 1 for i in parts]
    sides = [0 if i is None or i is Ellipsis else n for i, n in zip(parts, sides, strict=True)]
    rest = len(shape) - sum(sides)
    return [rest if i is Ellipsis else n for i, n in zip(parts, sides, strict=True)]


def _check_range(x, index) -> None:
    """What NumPy refuses and CuPy does not: a float, which it would cut to an integer, and arrays
    of integers out of range, which it would take modulo the size."""
    if isinstance(x, np.ndarray):
        return
    axis = 0
    for i, n in zip(_parts(index), _sides(index, x.shape), strict=True):
        if not is_array(i):
            if not (i is None or i is Ellipsis or isinstance(i, slice)):
                operator.index(i)
        elif i.dtype.kind in "iu" and i.size and axis < x.ndim:
            low, high, size = int(i.min()), int(i.max()), x.shape[axis]
            if low < -size or high >= size:
                wrong = low if low < -size else high
                raise IndexError(f"index {wrong} is out of bounds for axis {axis} with size {size}")
        axis += n


def _takes_once(g, index) -> bool:
    """Whether no element can be taken twice: integer arrays alone can repeat.

    Elements that arrays take from the GPU are always added by the one kernel that has an order.
    """
    on_cpu = isinstance(g, np.ndarray)
    return not any(is_array(i) and not (on_cpu and i.dtype == bool) for i in _parts(index))


def _scatter(g, index, shape):
    """zeros, += g at the index: rows of an embedding's gradient, if axes never touched are its
    channels and the others, flattened, its ids."""
    xp = array_module(g)
    touched = sum(_sides(index, shape))
    lead, rest = shape[:touched], shape[touched:]
    ids = xp.arange(math.prod(lead)).reshape(lead)[index].reshape(-1)
    rows = g.reshape(len(ids), math.prod(rest))
    return embedding_backward(rows, ids, math.prod(lead)).reshape(shape)


@op
def concat(*xs, axis=0):
    """Arrays one after another along `axis`.   *xs (*) -> (*)"""
    first = _first("concat", xs)
    axis = _axis("concat", axis, first.ndim, first.shape)
    for x in xs:
        if x.shape[:axis] + x.shape[axis + 1 :] != first.shape[:axis] + first.shape[axis + 1 :]:
            raise ValueError(
                f"concat: shapes equal but for axis {axis} needed, given {[x.shape for x in xs]}"
            )
    ends = np.cumsum([x.shape[axis] for x in xs]).tolist()

    def part(end, n):
        return lambda g: g[(slice(None),) * axis + (slice(end - n, end),)]

    parts = (part(end, x.shape[axis]) for end, x in zip(ends, xs, strict=True))
    return array_module(first).concatenate(xs, axis=axis), tuple(parts)


@op
def stack(*xs, axis=0):
    """Arrays of one shape side by side along a new `axis`.   *xs (*) -> (*)"""
    first = _first("stack", xs)
    axis = _axis("stack", axis, first.ndim + 1, first.shape)
    if any(x.shape != first.shape for x in xs):
        raise ValueError(f"stack: equal shapes needed, given {[x.shape for x in xs]}")

    def part(n):
        return lambda g: g[(slice(None),) * axis + (n, ...)]

    return array_module(first).stack(xs, axis=axis), tuple(part(n) for n in range(len(xs)))


def _first(op_name, xs):
    if not xs or not all(is_array(x) for x in xs):
        raise TypeError(f"{op_name}: one or more tensors needed, as {op_name}(x, y, ...)")
    return xs[0]


def _integers(op_name, noun, values) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values if isinstance(values, tuple | list) else (values,)))
    except TypeError:
        raise TypeError(f"{op_name}: {noun} of integers needed, given {values!r}") from None


def _axis(op_name, axis, ndim, shape) -> int:
    """The axis as a number from 0."""
    axis = _integers(op_name, "an axis", axis)[0]
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op_name}: axis {axis} does not exist for an array of shape {shape}")
    return axis % ndim


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]
