"""One formula for numbers, made a kernel on arrays.

    @pointwise
    def silu_backward(g, x):
        s = sigmoid(x)
        return g * s * (like(x, 1) + x * (like(x, 1) - s))

As it stands the function is array code, the reference. Compiled for 16 numbers at a time it is
the inner loop of the CPU's body: one pass over memory, however long the formula. Written in CUDA
it is the GPU's. It may call the functions of `mathf`, `choose`, `like`, and whatever else `@scalar`
marks; a parameter named `condition` is an array of bool.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from . import buffers, cuda
from .backend import FLOATS, Kernel, array_module, kernel
from .cuda_formula import TWINS, twin, write_loop
from .lanes import INLINE, attach, element, load, load_part, store, store_part, typed_select
from .launch import body

CHUNK = 1 << 13  # elements per index: microseconds of work, whole pages of memory
SMALL = 1 << 12  # elements that NumPy handles before a body has started
_BOOL = np.dtype(bool)


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


attach(choose, 3, typed_select, types.VarArg(types.Any))
TWINS[choose] = twin("{} ? {} : {}")


def like(x, value):
    """The number `value` in the type of x: a plain 1.0 would make float32 formulas float64."""
    return x.dtype.type(value)


def _typed_like(x: Any, value: Any) -> tuple:
    out = element(x)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return context.cast(b, args[1], sig.args[1], out)

    return out(x, value), codegen


attach(like, 2, _typed_like, types.VarArg(types.Any))
TWINS[like] = lambda x, value: x.trace.dtype.type(value)


def pointwise(fn: Callable | None = None, *, ufunc: Any = None) -> Any:
    """Make a kernel of a formula for one result; its arrays are broadcast to one shape.

    `ufunc` is the formula's name in NumPy if it is a single IEEE operation, whose bits are the
    same everywhere. It serves small arrays, where starting a body would cost more than the work,
    and operands that must be broadcast.
    """
    if fn is None:
        return functools.partial(pointwise, ufunc=ufunc)
    run = _loops[len(inspect.signature(fn).parameters)](scalar(fn))
    made = kernel(_on_arrays(fn))
    made.cpu(lambda *arrays: compute(run, arrays, ufunc))
    made.gpu(on_gpu(fn))
    return made


def pointwise_pair(fn: Callable) -> Kernel:
    """Make a kernel of a formula for two results, of three arrays of one shape."""
    run = _three_to_two(scalar(fn))
    made = kernel(_on_arrays(fn))

    def fast(*arrays: Any) -> Any:
        shape, dtype, arrays = _alike(arrays)
        out, out2 = buffers.empty(shape, dtype), buffers.empty(shape, dtype)
        run(-(-out.size // CHUNK), *arrays, out.reshape(-1), out2.reshape(-1))
        return out, out2

    made.cpu(fast)
    made.gpu(on_gpu(fn, results=2))
    return made


def on_gpu(fn: Callable, results: int = 1) -> Callable:
    """The GPU's body of a formula; the result goes into `out` if given."""
    source = cuda.Source(functools.partial(write_loop, fn))

    def fast(*arrays: Any, out: Any = None) -> Any:
        # A NumPy number may stand among the arrays.
        shape, dtype, arrays = _alike(tuple(map(cuda.asarray, arrays)))
        made = [cuda.empty(shape, dtype) if out is None else out for _ in range(results)]
        n = made[0].size
        source("run", cuda.blocks(n), cuda.THREADS, *arrays, *made, n, real=dtype)
        return made[0] if results == 1 else tuple(made)

    return fast


def _on_arrays(fn: Callable) -> Callable:
    """The formula as array code: like the fast body, it takes floats only and warns of nothing."""

    @functools.wraps(fn)
    def reference(*arrays: Any) -> Any:
        _dtype(arrays)
        with np.errstate(all="ignore"):
            return fn(*arrays)

    return reference


def compute(run: Any, arrays: tuple, ufunc: Any = None, out: Any = None) -> Any:
    """Run the body of a formula, or its ufunc, into `out` if given."""
    first = arrays[0]
    if ufunc is not None and (first.size < SMALL or any(a.shape != first.shape for a in arrays)):
        if out is None:
            out = buffers.empty(np.broadcast(*arrays).shape, _dtype(arrays))
        with np.errstate(all="ignore"):
            return ufunc(*arrays, out=out)
    shape, dtype, arrays = _alike(arrays)
    if out is None:
        out = buffers.empty(shape, dtype)
    run(-(-out.size // CHUNK), *arrays, out.reshape(-1))
    return out


def _alike(arrays: tuple) -> tuple[tuple[int, ...], Any, Any]:
    """The shape and type of the result, and the arrays flat in that shape and type."""
    dtype = _dtype(arrays)
    shape = arrays[0].shape
    if any(a.shape != shape for a in arrays):
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
    return shape, dtype, [_spread(a, shape, dtype).reshape(-1) for a in arrays]


def _spread(a: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if a.shape == shape and a.dtype in (dtype, _BOOL):
        return a
    empty = buffers.empty if isinstance(a, np.ndarray) else cuda.empty
    out = empty(shape, _BOOL if a.dtype == _BOOL else dtype)
    out[...] = a
    return out


def _dtype(arrays: tuple) -> Any:
    kinds = {a.dtype for a in arrays} - {_BOOL}
    dtype = kinds.pop() if len(kinds) == 1 else np.result_type(*kinds)
    if dtype not in FLOATS:
        raise TypeError(f"float32 or float64 needed, given {[str(a.dtype) for a in arrays]}")
    return dtype


# --- loops over one chunk, 16 elements at a time, the last of the array in part -----------------


def _one_to_one(fn: Callable) -> Any:
    @body
    def run(i, x, out):
        start, end = i * CHUNK, min((i + 1) * CHUNK, out.size)
        for n in range(start, end - 15, 16):
            store(out, n, fn(load(x, n)))
        rest = end % 16
        if rest:
            n = end - rest
            store_part(out, n, rest, fn(load_part(x, n, rest)))

    return run


def two_to_one(fn: Callable) -> Any:
    @body
    def run(i, x, y, out):
        start, end = i * CHUNK, min((i + 1) * CHUNK, out.size)
        for n in range(start, end - 15, 16):
            store(out, n, fn(load(x, n), load(y, n)))
        rest = end % 16
        if rest:
            n = end - rest
            store_part(out, n, rest, fn(load_part(x, n, rest), load_part(y, n, rest)))

    return run


def _three_to_one(fn: Callable) -> Any:
    @body
    def run(i, x, y, z, out):
        start, end = i * CHUNK, min((i + 1) * CHUNK, out.size)
        for n in range(start, end - 15, 16):
            store(out, n, fn(load(x, n), load(y, n), load(z, n)))
        rest = end % 16
        if rest:
            n = end - rest
            a, b, c = load_part(x, n, rest), load_part(y, n, rest), load_part(z, n, rest)
            store_part(out, n, rest, fn(a, b, c))

    return run


def _three_to_two(fn: Callable) -> Any:
    @body
    def run(i, x, y, z, out, out2):
        start, end = i * CHUNK, min((i + 1) * CHUNK, out.size)
        for n in range(start, end - 15, 16):
            p, q = fn(load(x, n), load(y, n), load(z, n))
            store(out, n, p)
            store(out2, n, q)
        rest = end % 16
        if rest:
            n = end - rest
            a, b, c = load_part(x, n, rest), load_part(y, n, rest), load_part(z, n, rest)
            p, q = fn(a, b, c)
            store_part(out, n, rest, p)
            store_part(out2, n, rest, q)

    return run


_loops = {1: _one_to_one, 2: two_to_one, 3: _three_to_one}
