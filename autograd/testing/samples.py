"""One Hypothesis strategy per op: drawn inputs and options on which it is smooth.

    SAMPLES["mul"]  ->  (arrays, options)

The only thing that a new op must add. Integer inputs are part of the arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from ..random import make_key
from .strategies import arrays, broadcastable, shapes

SAMPLES: dict[str, st.SearchStrategy[tuple[tuple[Any, ...], dict[str, Any]]]] = {}


def sample(*names: str) -> Any:
    """Register a composite strategy as the samples of the ops `names`."""

    def register(fn: Any) -> Any:
        for name in names:
            SAMPLES[name] = st.composite(lambda draw, name=name: fn(draw, name))()
        return fn

    return register


def _away_from(x: np.ndarray, kinks: float | np.ndarray, gap: float = 0.05) -> np.ndarray:
    """x, moved where it is closer than `gap` to a kink."""
    return np.where(np.abs(x - kinks) < gap, kinks + 2 * gap, x).astype(x.dtype)


@sample("neg", "exp", "tanh", "sigmoid", "silu", "cast", "relu", "log", "sqrt")
def _unary(draw, name):
    x = draw(arrays(draw(shapes())))
    if name == "relu":
        x = _away_from(x, 0.0)
    if name in ("log", "sqrt"):
        x = np.abs(x) + 0.1
    return (x,), ({"dtype": np.float64} if name == "cast" else {})


@sample("gelu")
def _gelu(draw, name):
    return (draw(arrays(draw(shapes()))),), {"approximate": draw(st.sampled_from(["none", "tanh"]))}


@sample("pow")
def _pow(draw, name):
    exponent = draw(st.sampled_from([0, 1, 2, 3, -1, -2, 0.5, 1.5, -0.5]))
    x = draw(arrays(draw(shapes())))
    if exponent not in (0, 1, 2, 3):
        x = np.abs(x) + 0.2
    return (x,), {"exponent": exponent}


@sample("add", "sub", "mul", "div", "maximum", "swiglu")
def _binary(draw, name):
    shape = draw(shapes())
    x, y = (
        draw(arrays(shape)),
        draw(arrays(shape if name == "swiglu" else draw(broadcastable(shape)))),
    )
    if name == "div":
        y = np.where(y < 0, y - 0.3, y + 0.3)
    if name == "maximum":
        x = _away_from(x, y)
    if name != "swiglu" and draw(st.booleans()):
        x, y = y, x
        if name == "div":
            y = np.where(y < 0, y - 0.3, y + 0.3)
    return (x, y), {}


@sample("where")
def _where(draw, name):
    shape = draw(shapes())
    condition = draw(arrays(shape)) > 0
    return (condition, draw(arrays(shape)), draw(arrays(draw(broadcastable(shape))))), {}


def _drawn_axis(draw, ndim):
    if not ndim or draw(st.booleans()):
        return None
    axes = draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True))
    axes = [a - ndim if draw(st.booleans()) else a for a in axes]
    return axes[0] if len(axes) == 1 else tuple(axes)


@sample("sum", "mean", "max", "logsumexp")
def _reduce(draw, name):
    low = 0 if name == "sum" else 1
    x = draw(arrays(draw(shapes(min_side=low, max_dims=4))))
    if name == "max":  # distinct values, far apart
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        x = rng.permutation(x.size).reshape(x.shape) * 0.1
    return (x,), {"axis": _drawn_axis(draw, x.ndim), "keepdims": draw(st.booleans())}


@sample("softmax", "log_softmax")
def _softmax(draw, name):
    return (draw(arrays(draw(shapes(min_dims=1, min_side=1, max_side=20)))),), {}


@sample("reshape")
def _reshape(draw, name):
    x = draw(arrays(draw(shapes())))
    shape = (
        draw(st.sampled_from([(-1,), x.shape, (1, *x.shape), x.shape[::-1]])) if x.size else x.shape
    )
    return (x,), {"shape": shape}


@sample("swapaxes")
def _swapaxes(draw, name):
    x = draw(arrays(draw(shapes(min_dims=1))))
    axis = st.integers(-x.ndim, x.ndim - 1)
    return (x,), {"axis1": draw(axis), "axis2": draw(axis)}


@sample("permute")
def _permute(draw, name):
    x = draw(arrays(draw(shapes())))
    return (x,), {"axes": tuple(draw(st.permutations(range(x.ndim))))}


@sample("broadcast_to")
def _broadcast_to(draw, name):
    shape = draw(shapes())
    return (draw(arrays(draw(broadcastable(shape)))),), {"shape": shape}


@sample("getitem")
def _getitem(draw, name):
    x = draw(arrays(draw(shapes(min_dims=1, min_side=1))))
    n = x.shape[0]
    index = draw(
        st.one_of(
            st.integers(-n, n - 1),
            st.slices(n),
            st.lists(st.integers(-n, n - 1), max_size=7).map(lambda i: np.array(i, np.int64)),
            st.lists(st.booleans(), min_size=n, max_size=n).map(lambda m: np.array(m, bool)),
            st.just((Ellipsis, slice(None, None, 2))),
            st.just((None, 0)),
        )
    )
    return (x,), {"index": index}


@sample("concat", "stack")
def _concat(draw, name):
    shape = draw(shapes(min_dims=1))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    sides = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    parts = []
    for side in sides:
        part = list(shape)
        if name == "concat":
            part[axis] = side
        parts.append(draw(arrays(tuple(part))))
    return tuple(parts), {"axis": axis}


_SIDE = st.sampled_from([0, 1, 2, 3, 5, 17, 33])


@sample("matmul")
def _matmul(draw, name):
    M, K, N = draw(_SIDE), draw(_SIDE), draw(_SIDE)
    lead = draw(shapes(max_dims=2, max_side=3))
    a = draw(arrays((*lead, M, K)))
    b = draw(arrays((*draw(broadcastable(lead)), K, N)))
    if draw(st.booleans()):
        a = np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2)
    if draw(st.booleans()):
        b = np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2)
    return (a, b), {}


@sample("linear")
def _linear(draw, name):
    I, O = draw(_SIDE), draw(_SIDE)  # noqa: E741 - inputs and outputs
    x = draw(arrays((*draw(shapes(max_dims=2)), I)))
    weight = draw(arrays((O, I)))
    bias, residual = draw(arrays((O,))), draw(arrays((*x.shape[:-1], O)))
    return draw(st.sampled_from([(x, weight), (x, weight, bias), (x, weight, bias, residual)])), {}


@sample("rms_norm")
def _rms_norm(draw, name):
    shape = draw(shapes(min_dims=1, min_side=1, max_side=20))
    return (draw(arrays(shape)), draw(arrays(shape[-1:]))), {
        "eps": draw(st.sampled_from([1e-6, 1e-2]))
    }


@sample("layer_norm")
def _layer_norm(draw, name):
    shape = (*draw(shapes(max_dims=2, min_side=0)), draw(st.integers(2, 20)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.uniform(-1, 1, shape)
    # No row of almost equal numbers: the mean's rounding alone would decide its direction.
    x[..., 0] += 4
    rest = [draw(arrays(shape[-1:])) for _ in range(draw(st.integers(1, 2)))]
    return (x, *rest), {"eps": draw(st.sampled_from([1e-5, 1e-2]))}


@sample("rope")
def _rope(draw, name):
    B, T, H, half = (draw(st.integers(1, 4)) for _ in range(4))
    angle = draw(arrays((B, T, half)))
    return (draw(arrays((B, T, H, 2 * half))), np.cos(angle), np.sin(angle)), {}


@sample("embedding")
def _embedding(draw, name):
    V, C = draw(st.integers(1, 7)), draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return (draw(arrays((V, C))), rng.integers(0, V, draw(shapes()))), {}


@sample("dropout")
def _dropout(draw, name):
    key = make_key("test", draw(st.integers(0, 1000)))
    return (draw(arrays(draw(shapes()))),), {
        "p": draw(st.sampled_from([0.0, 0.1, 0.7])),
        "key": key,
    }


def _targets(draw, shape, V):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    targets = rng.integers(0, V, shape)
    return np.where(rng.random(shape) < 0.3, -100, targets)


@sample("cross_entropy")
def _cross_entropy(draw, name):
    lead, V = draw(shapes(max_dims=2)), draw(st.integers(1, 20))
    x = draw(arrays((*lead, V)))
    return (x, _targets(draw, lead, V)), {"reduction": draw(st.sampled_from(["mean", "sum"]))}


@sample("linear_cross_entropy")
def _linear_cross_entropy(draw, name):
    lead = draw(st.one_of(shapes(max_dims=2), st.just((300,))))  # 300: more than one block of 256
    C, V = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    rest = (draw(arrays((V,))),) if draw(st.booleans()) else ()
    x, weight = draw(arrays((*lead, C))), draw(arrays((V, C)))
    options = {"reduction": draw(st.sampled_from(["mean", "sum"]))}
    return (x, weight, _targets(draw, lead, V), *rest), options


@sample("attention")
def _attention(draw, name):
    B, G, D = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4, 17]))
    H = G * draw(st.integers(1, 3))
    S = draw(st.sampled_from([1, 2, 7, 63, 64, 65, 130]))
    T = S if draw(st.booleans()) else draw(st.integers(1, S))
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        options["segments"] = np.sort(rng.integers(-1, 3, (B, S)), axis=1)
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, S))
    if draw(st.booleans()):
        options["scale"] = 0.3
    if draw(st.booleans()):
        options |= {"dropout": 0.3, "key": make_key("test", draw(st.integers(0, 9)))}
    q = draw(arrays((B, T, H, D)))
    return (q, draw(arrays((B, S, G, D))), draw(arrays((B, S, G, D)))), options
