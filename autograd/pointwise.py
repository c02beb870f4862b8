"""One formula for numbers, made a kernel on arrays.

    @pointwise
    def silu_backward(g, x):
        s = sigmoid(x)
        return g * s * (like(x, 1) + x * (like(x, 1) - s))

As it stands the function is array code, the reference. Compiled for 16 numbers at a time it is
the inner loop of the fast body: one pass over memory, however long the formula. It may call the
functions of `mathf`, `choose`, `like`, and whatever else `@scalar` marks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from . import buffers
from .backend import FLOATS, Kernel, array_module, kernel
from .lanes import INLINE, element, load, select, store
from .launch import body

CHUNK = 1 << 13  # elements per index: microseconds of work, whole pages of memory


def scalar(fn: Callable) -> Callable:
    """Let bodies call the plain function `fn`, which still runs on arrays outside them.

    A plain function has a name that Numba's disk cache knows again, which a compiled one has not.
    """

    def implement(*args):
        return fn

    implement.__signature__ = inspect.signature(fn)  # pyright: ignore[reportFunctionMemberAccess]
    overload(fn, jit_options=INLINE)(implement)
    return fn


def choose(condition, x, y):
    """x where the condition holds, else y."""
    return array_module(condition).where(condition, x, y)


@overload(choose, jit_options=INLINE)
def _choose(condition, x, y):
    return lambda condition, x, y: select(condition, x, y)


def like(x, value):
    """The number `value` in the type of x: a plain 1.0 would make float32 formulas float64."""
    return x.dtype.type(value)


@overload(like, jit_options=INLINE)
def _like(x, value):
    if element(x) == types.float32:
        return lambda x, value: np.float32(value)
    return lambda x, value: np.float64(value)


def pointwise(fn: Callable) -> Kernel:
    """Make a kernel of a formula for one result; its arrays are broadcast to one shape."""
    return _kernel(scalar(fn), _loops[len(inspect.signature(fn).parameters)], 1)


def pointwise_pair(fn: Callable) -> Kernel:
    """Make a kernel of a formula for two results, of three arrays."""
    return _kernel(scalar(fn), three_to_two, 2)


def _kernel(fn: Callable, loop: Callable, outs: int) -> Kernel:
    made, run = kernel(fn), loop(fn)

    def fast(*arrays: Any) -> Any:
        results = compute(run, arrays, (None,) * outs)
        return results if outs > 1 else results[0]

    made.cpu(fast)
    return made


def compute(run: Any, arrays: tuple, results: tuple) -> tuple:
    """Run the body of a formula; results that are None are made here."""
    floats = [a.dtype for a in arrays if a.dtype != np.bool_]
    dtype = floats[0] if all(d == floats[0] for d in floats) else np.result_type(*floats)
    if dtype not in FLOATS:
        raise TypeError(f"float32 or float64 needed, given {[str(a.dtype) for a in arrays]}")
    shape = arrays[0].shape
    if any(a.shape != shape for a in arrays):
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
        arrays = tuple(np.broadcast_to(a, shape) for a in arrays)
    flat = [
        np.ascontiguousarray(a, a.dtype if a.dtype == np.bool_ else dtype).reshape(-1)
        for a in arrays
    ]
    results = tuple(buffers.empty(shape, dtype) if r is None else r for r in results)
    size = results[0].size
    run(-(-size // CHUNK), *flat, *(r.reshape(-1) for r in results))
    return results


# --- loops over one chunk, 16 elements at a time, one by one at the very end --------------------


def one_to_one(fn: Callable) -> Any:
    @body
    def run(i, x, out):
        start, end = i * CHUNK, min((i + 1) * CHUNK, out.size)
        for n in range(start, end - 15, 16):
            store(out, n, fn(load(x, n)))
        for n in range(end - end % 16, end):
            out[n] = fn(x[n])

    return run


def two_to_one(fn: Callable) -> Any:
    @body
    def run(i, x, y, out):
        start, end = i * CHUNK, min((i + 1) * CHUNK, out.size)
        for n in range(start, end - 15, 16):
            store(out, n, fn(load(x, n), load(y, n)))
        for n in range(end - end % 16, end):
            out[n] = fn(x[n], y[n])

    return run


def three_to_one(fn: Callable) -> Any:
    @body
    def run(i, x, y, z, out):
        start, end = i * CHUNK, min((i + 1) * CHUNK, out.size)
        for n in range(start, end - 15, 16):
            store(out, n, fn(load(x, n), load(y, n), load(z, n)))
        for n in range(end - end % 16, end):
            out[n] = fn(x[n], y[n], z[n])

    return run


def three_to_two(fn: Callable) -> Any:
    @body
    def run(i, x, y, z, out, out2):
        start, end = i * CHUNK, min((i + 1) * CHUNK, out.size)
        for n in range(start, end - 15, 16):
            a, b = fn(load(x, n), load(y, n), load(z, n))
            store(out, n, a)
            store(out2, n, b)
        for n in range(end - end % 16, end):
            out[n], out2[n] = fn(x[n], y[n], z[n])

    return run


_loops = {1: one_to_one, 2: two_to_one, 3: three_to_one}
