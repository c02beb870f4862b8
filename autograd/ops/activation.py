"""The nonlinearities of transformers."""

from __future__ import annotations

import math

from ..mathf import erf, exp, sigmoid, tanh
from ..pointwise import like, pointwise, pointwise_pair, scalar
from ..tape import op


@op
def silu(x):
    """x * sigmoid(x).   x (...) -> (...)      Elfwing et al. 2017, arXiv:1702.03118"""
    return silu_forward(x), (lambda g: silu_backward(g, x),)


@pointwise
def silu_forward(x):
    return x * sigmoid(x)


@pointwise
def silu_backward(g, x):
    return g * _silu_slope(x, sigmoid(x))


@scalar
def _silu_slope(x, s):
    # d(x s)/dx = s + x s (1 - s), with s = sigmoid(x)
    one = like(x, 1)
    return s * (one + x * (one - s))


@op
def swiglu(gate, up):
    """silu(gate) * up, the gate of a SwiGLU block.   Shazeer 2020, arXiv:2002.05202

    gate (...), up (...) -> (...)
    """
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate {gate.shape} and up {up.shape} must have one shape")
    return swiglu_forward(gate, up), lambda g: swiglu_backward(g, gate, up)


@pointwise
def swiglu_forward(gate, up):
    return gate * sigmoid(gate) * up


@pointwise_pair
def swiglu_backward(g, gate, up):
    s = sigmoid(gate)
    return g * up * _silu_slope(gate, s), g * (gate * s)


@op
def gelu(x, *, approximate="none"):
    """x * P(X <= x) for a standard normal X; "tanh" uses the usual approximation.

    x (...) -> (...)      Hendrycks & Gimpel 2016, arXiv:1606.08415
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f'gelu: approximate is "none" or "tanh", not {approximate!r}')
    if approximate == "tanh":
        return gelu_tanh_forward(x), (lambda g: gelu_tanh_backward(g, x),)
    return gelu_forward(x), (lambda g: gelu_backward(g, x),)


@pointwise
def gelu_forward(x):
    return x * _normal_below(x)


@pointwise
def gelu_backward(g, x):
    density = exp(like(x, -0.5) * x * x) * like(x, 1 / math.sqrt(2 * math.pi))
    return g * (_normal_below(x) + x * density)


@scalar
def _normal_below(x):
    # P(X <= x) for a standard normal X
    return like(x, 0.5) * (like(x, 1) + erf(x * like(x, math.sqrt(0.5))))


@pointwise
def gelu_tanh_forward(x):
    return like(x, 0.5) * x * (like(x, 1) + tanh(_inner(x)))


@pointwise
def gelu_tanh_backward(g, x):
    half, one = like(x, 0.5), like(x, 1)
    t = tanh(_inner(x))
    slope = like(x, _K) * (one + like(x, 3 * 0.044715) * x * x)
    return g * (half * (one + t) + half * x * (one - t * t) * slope)


@scalar
def _inner(x):
    return like(x, _K) * (x + like(x, 0.044715) * x * x * x)


_K = math.sqrt(2 / math.pi)
