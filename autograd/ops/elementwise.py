"""Ops that act on each element alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import array_module, is_array, kernel
from ..tape import op


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    """Both operands as arrays; a plain number takes the other's type."""
    if not is_array(x):
        x = array_module(y).asarray(x, dtype=y.dtype if is_array(y) else np.float32)
    if not is_array(y):
        y = array_module(x).asarray(y, dtype=x.dtype)
    return x, y


@op
def add(x, y):
    """x + y.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    return add_arrays(x, y, None), (lambda g: g, lambda g: g)


@op
def sub(x, y):
    """x - y.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    return x - y, (lambda g: g, lambda g: -g)


@op
def mul(x, y):
    """x * y.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    return x * y, (lambda g: g * y, lambda g: g * x)


@op
def div(x, y):
    """x / y.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    out = x / y
    return out, (lambda g: g / y, lambda g: -g * out / y)


@op
def neg(x):
    """-x.   x (...) -> (...)"""
    return -x, (lambda g: -g,)


@op
def pow(x, *, exponent):
    """x ** exponent, the exponent a number.   x (...) -> (...)"""
    return x**exponent, (lambda g: g * exponent * x ** (exponent - 1),)


@op
def exp(x):
    """e ** x.   x (...) -> (...)"""
    out = array_module(x).exp(x)
    return out, (lambda g: g * out,)


@op
def log(x):
    """The natural logarithm.   x (...) -> (...)"""
    return array_module(x).log(x), (lambda g: g / x,)


@op
def sqrt(x):
    """The square root.   x (...) -> (...)"""
    out = array_module(x).sqrt(x)
    return out, (lambda g: g / (2 * out),)


@op
def tanh(x):
    """The hyperbolic tangent.   x (...) -> (...)"""
    out = array_module(x).tanh(x)
    return out, (lambda g: g * (1 - out * out),)


@op
def sigmoid(x):
    """1 / (1 + exp(-x)).   x (...) -> (...)"""
    out = 1 / (1 + array_module(x).exp(-x))
    return out, (lambda g: g * out * (1 - out),)


@op
def relu(x):
    """max(x, 0); the gradient at 0 is 0.   x (...) -> (...)"""
    keep = x > 0
    return array_module(x).where(keep, x, x.dtype.type(0)), (lambda g: g * keep,)


@op
def silu(x):
    """x * sigmoid(x).   x (...) -> (...)"""
    s = 1 / (1 + array_module(x).exp(-x))
    return x * s, (lambda g: g * s * (1 + x * (1 - s)),)


@op
def swiglu(gate, up):
    """silu(gate) * up, the gate of a SwiGLU block.   gate (...), up (...) -> (...)"""
    s = 1 / (1 + array_module(gate).exp(-gate))
    a = gate * s
    return a * up, (lambda g: g * up * s * (1 + gate * (1 - s)), lambda g: g * a)


@op
def gelu(x, *, approximate="none"):
    """x * P(X <= x) for a standard normal X; "tanh" uses the usual approximation.

    x (...) -> (...)      Hendrycks & Gimpel 2016, arXiv:1606.08415
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: approximate is "none" or "tanh", not {approximate!r}')
    return gelu_forward(x, approximate), (lambda g: gelu_backward(g, x, approximate),)


@kernel
def gelu_forward(x, approximate):
    xp = array_module(x)
    if approximate == "tanh":
        return x * (1 + xp.tanh(_K * (x + 0.044715 * x * x * x))) / 2
    return x * (1 + _erf(x / np.sqrt(2).astype(x.dtype))) / 2


@kernel
def gelu_backward(g, x, approximate):
    xp = array_module(x)
    if approximate == "tanh":
        t = xp.tanh(_K * (x + 0.044715 * x * x * x))
        return g * ((1 + t) / 2 + x * (1 - t * t) / 2 * _K * (1 + 3 * 0.044715 * x * x))
    density = xp.exp(-x * x / 2) / _ROOT_TAU
    return g * ((1 + _erf(x / np.sqrt(2).astype(x.dtype))) / 2 + x * density)


_K = float(np.sqrt(2 / np.pi))
_ROOT_TAU = float(np.sqrt(2 * np.pi))


def _erf(x):
    import math

    return np.vectorize(math.erf, otypes=[x.dtype])(x) if x.size else x.copy()


@op
def where(condition, x, y):
    """x where the condition holds, else y; the other side gets a gradient of exactly 0.

    condition (...), x (...), y (...) -> (...)
    """
    x, y = _pair(x, y)
    xp = array_module(x)
    zero = x.dtype.type(0)
    return xp.where(condition, x, y), (
        None,
        lambda g: xp.where(condition, g, zero),
        lambda g: xp.where(condition, zero, g),
    )


@op
def maximum(x, y):
    """The larger of x and y; where equal, both get half the gradient.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    xp = array_module(x)
    to_x = (x > y) + (x == y) / 2
    return xp.maximum(x, y), (
        lambda g: g * to_x.astype(g.dtype),
        lambda g: g * (1 - to_x).astype(g.dtype),
    )


@op
def cast(x, *, dtype):
    """x in float32 or float64.   x (...) -> (...)"""
    return x.astype(dtype), (lambda g: g.astype(x.dtype),)


@kernel
def add_arrays(x, y, out):
    """x + y, into `out` if given (which may be x or y)."""
    return array_module(x).add(x, y, out=out)
