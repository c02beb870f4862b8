"""Ops that act on each element alone.

Where an op has no finite slope (the square root or the logarithm of 0, a division by 0, an
overflown exponential), its gradient is still 0 if the arriving gradient is 0. So what `where` did
not choose brings no NaN: the gradient of where(x > 0, sqrt(x), 0) at 0 is 0. The gradient of a
square root at 0 is 0 by definition, and with it that of a norm.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import buffers, cuda, mathf
from ..backend import FLOATS, array_module, is_array, kernel
from ..launch import body
from ..pointwise import (
    CHUNK,
    choose,
    compute,
    like,
    on_gpu,
    pointwise,
    pointwise_pair,
    scalar,
    two_to_one,
)
from ..tape import op


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    """Both operands as arrays; what is no float takes the other's type."""
    if not is_array(x):
        x = array_module(y).asarray(x, dtype=y.dtype if is_array(y) else np.float32)
    if not is_array(y):
        y = array_module(x).asarray(y, dtype=x.dtype)
    if x.dtype.kind in "bi":
        x = x.astype(y.dtype)
    if y.dtype.kind in "bi":
        y = y.astype(x.dtype)
    if x.dtype not in FLOATS or y.dtype not in FLOATS:
        raise TypeError(f"float32 or float64 needed, given {x.dtype} and {y.dtype}")
    return x, y


@scalar
def _wanted(g, dx):
    """dx, but 0 where the arriving gradient is 0."""
    return choose(g == like(g, 0), g, dx)


# --- arithmetic -------------------------------------------------------------------------------


@op
def add(x, y):
    """x + y.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    return add_arrays(x, y, None), (lambda g: g, lambda g: g)


@op
def sub(x, y):
    """x - y.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    return sub_arrays(x, y), (lambda g: g, neg_array)


@op
def mul(x, y):
    """x * y.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    return mul_arrays(x, y), (lambda g: mul_arrays(g, y), lambda g: mul_arrays(g, x))


@op
def div(x, y):
    """x / y.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    out = div_arrays(x, y)
    return out, (lambda g: div_backward_x(g, y), lambda g: div_backward_y(g, out, y))


@op
def neg(x):
    """-x.   x (...) -> (...)"""
    return neg_array(x), (neg_array,)


@pointwise(ufunc=np.subtract)
def sub_arrays(x, y):
    return x - y


@pointwise(ufunc=np.multiply)
def mul_arrays(x, y):
    return x * y


@pointwise(ufunc=np.divide)
def div_arrays(x, y):
    return x / y


@pointwise
def div_backward_x(g, y):
    return _wanted(g, g / y)


@pointwise
def div_backward_y(g, out, y):
    return _wanted(g, -(g * out) / y)


@pointwise(ufunc=np.negative)
def neg_array(x):
    return -x


@kernel
def add_arrays(x, y, out):
    """x + y, into `out` if given (which may be x or y)."""
    return array_module(x).add(x, y, out=out)


@add_arrays.cpu
def add_arrays_cpu(x, y, out):
    return compute(_add, (x, y), np.add, out)


@scalar
def _sum(x, y):
    return x + y


_add = two_to_one(_sum)
_add_on_gpu = on_gpu(_sum)


@add_arrays.gpu
def add_arrays_gpu(x, y, out):
    return _add_on_gpu(x, y, out=out)


# --- powers and transcendental functions ------------------------------------------------------


@op
def pow(x, *, exponent):
    """x ** exponent, the exponent a number.   x (...) -> (...)

    A whole exponent means repeated multiplication: 0 gives 1 everywhere, and negative x is fine.
    """
    return power(x, exponent), (lambda g: pow_backward(g, x, exponent),)


def power(x, exponent):
    """x to a power: products for a whole exponent, exp(exponent log(x)) for others."""
    if exponent != int(exponent):
        return sqrt_array(x) if exponent == 0.5 else real_power(x, float(exponent))
    result, square, n = None, x, abs(int(exponent))
    while n:
        if n & 1:
            result = square if result is None else mul_arrays(result, square)
        n >>= 1
        square = mul_arrays(square, square) if n else None
    if result is None:
        return array_module(x).ones_like(x)
    return result if exponent > 0 else div_arrays(x.dtype.type(1), result)


def pow_backward(g, x, exponent):
    if exponent == 0:
        return array_module(x).zeros_like(x)
    slope = mul_arrays(power(x, exponent - 1), array_module(x).asarray(exponent, x.dtype))
    return mul_wanted(g, slope)


@kernel
def real_power(x, exponent):
    with np.errstate(all="ignore"):
        return x**exponent


@real_power.cpu
def real_power_cpu(x, exponent):
    out = buffers.empty(x.shape, x.dtype)
    _real_power(-(-x.size // CHUNK), x.reshape(-1), exponent, out.reshape(-1))
    return out


@body
def _real_power(i, x, exponent, out):
    # In float64: a float32 logarithm times the exponent would lose digits.
    for n in range(i * CHUNK, min((i + 1) * CHUNK, out.size)):
        out[n] = mathf.exp(exponent * mathf.log(np.float64(x[n])))


_real_power_on_gpu = cuda.Source(r"""
extern "C" __global__ void real_power(const REAL *x, double exponent, REAL *out, i64 n) {
    const i64 i = this_thread();
    if (i < n) out[i] = (REAL)exp_(exponent * log_((double)x[i]));
}
""")


@real_power.gpu
def real_power_gpu(x, exponent):
    out, n = cuda.empty(x.shape, x.dtype), x.size
    args = x, np.float64(exponent), out, n
    _real_power_on_gpu("real_power", cuda.blocks(n), cuda.THREADS, *args, real=x.dtype)
    return out


@op
def exp(x):
    """e ** x.   x (...) -> (...)"""
    out = exp_array(x)
    return out, (lambda g: mul_wanted(g, out),)


@op
def log(x):
    """The natural logarithm.   x (...) -> (...)"""
    return log_array(x), (lambda g: div_backward_x(g, x),)


@op
def sqrt(x):
    """The square root; its gradient at 0 is 0.   x (...) -> (...)"""
    out = sqrt_array(x)
    return out, (lambda g: sqrt_backward(g, out),)


@op
def tanh(x):
    """The hyperbolic tangent.   x (...) -> (...)"""
    out = tanh_array(x)
    return out, (lambda g: tanh_backward(g, out),)


@op
def sigmoid(x):
    """1 / (1 + exp(-x)).   x (...) -> (...)"""
    out = sigmoid_array(x)
    return out, (lambda g: sigmoid_backward(g, out),)


@pointwise
def mul_wanted(g, slope):
    return _wanted(g, g * slope)


@pointwise
def exp_array(x):
    return mathf.exp(x)


@pointwise
def log_array(x):
    return mathf.log(x)


@pointwise(ufunc=np.sqrt)
def sqrt_array(x):
    return mathf.sqrt(x)


@pointwise
def sqrt_backward(g, out):
    # d sqrt(x) = 1 / (2 sqrt(x)), and 0 at 0
    g = choose(out == like(out, 0), out, g)
    return _wanted(g, g / (out + out))


@pointwise
def tanh_array(x):
    return mathf.tanh(x)


@pointwise
def tanh_backward(g, out):
    return g * (like(out, 1) - out * out)


@pointwise
def sigmoid_array(x):
    return mathf.sigmoid(x)


@pointwise
def sigmoid_backward(g, out):
    return g * out * (like(out, 1) - out)


# --- choices ----------------------------------------------------------------------------------


@op
def relu(x):
    """max(x, 0); the gradient at 0 is 0.   x (...) -> (...)"""
    return relu_forward(x), (lambda g: relu_backward(g, x),)


@pointwise
def relu_forward(x):
    return choose(x < like(x, 0), like(x, 0), x)  # NaN stays


@pointwise
def relu_backward(g, x):
    return choose(x > like(x, 0), g, like(x, 0))


@op
def where(condition, x, y):
    """x where the condition holds, else y; the other side gets a gradient of exactly 0.

    condition (...), x (...), y (...) -> (...)
    """
    x, y = _pair(x, y)
    condition = array_module(x).asarray(condition, dtype=bool)
    return where_arrays(condition, x, y), (
        None,
        lambda g: where_backward(condition, g),
        lambda g: where_backward(~condition, g),
    )


@pointwise
def where_arrays(condition, x, y):
    return choose(condition, x, y)


@pointwise
def where_backward(condition, g):
    return choose(condition, g, like(g, 0))


@op
def maximum(x, y):
    """The larger of x and y; equal ones get half the gradient each.   x (...), y (...) -> (...)"""
    x, y = _pair(x, y)
    return maximum_arrays(x, y), lambda g: maximum_backward(g, x, y)


@pointwise
def maximum_arrays(x, y):
    return mathf.larger(x, y)


@pointwise_pair
def maximum_backward(g, x, y):
    zero, half = like(g, 0), like(g, 0.5) * g
    dx = choose(x > y, g, choose(x == y, half, zero))
    dy = choose(x > y, zero, choose(x == y, half, g))
    return dx, dy


@op
def cast(x, *, dtype):
    """x in float32 or float64.   x (...) -> (...)"""
    if np.dtype(dtype) not in FLOATS:
        raise TypeError(f"cast: float32 or float64 needed, not {np.dtype(dtype)}")
    return x.astype(dtype), (lambda g: g.astype(x.dtype),)
