"""Softmax and its logarithm against NumPy in float64, at the extremes, and in their bits."""

import numpy as np
import pytest

from afinar.autograd import Tensor, exp, launch, log_softmax, softmax
from afinar.autograd.ops.softmax import (
    log_softmax_backward,
    log_softmax_rows,
    softmax_backward,
    softmax_rows,
)
from afinar.autograd.testing import gradcheck, tolerance

rng = np.random.default_rng(0)
INF = np.inf


def exact(x):
    x = x.astype(np.float64)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "shape", [(1,), (5, 16), (2, 3, 33), (300, 100), (2, 40_000), (0, 4)], ids=str
)
def test_against_numpy(shape, dtype):
    x = (rng.standard_normal(shape) * 5).astype(dtype)
    g = rng.standard_normal(shape).astype(dtype)
    p, size = exact(x), np.abs(g).sum(axis=-1, keepdims=True).max(initial=1)
    t = Tensor(x, requires_grad=True)
    y = softmax(t)
    assert y.dtype == dtype
    np.testing.assert_allclose(y.data, p, rtol=tolerance(dtype), atol=tolerance(dtype))
    y.backward(g)
    dx = p * (g - (g.astype(np.float64) * p).sum(axis=-1, keepdims=True))
    assert np.abs(t.grad - dx).max(initial=0) <= tolerance(dtype)

    t = Tensor(x, requires_grad=True)
    y = log_softmax(t)
    np.testing.assert_allclose(y.data, np.log(p), rtol=tolerance(dtype), atol=tolerance(dtype))
    y.backward(g)
    dx = g - p * g.astype(np.float64).sum(axis=-1, keepdims=True)
    assert np.abs(t.grad - dx).max(initial=0) <= tolerance(dtype) * size


def test_gradients_by_finite_differences():
    x = rng.standard_normal((3, 37))
    gradcheck(softmax, x)
    gradcheck(log_softmax, x)


@pytest.mark.parametrize("fn", [softmax, log_softmax])
def test_p9_a_logit_of_minus_infinity(fn):
    x = rng.standard_normal((3, 40)).astype(np.float32)
    hidden = rng.random((3, 40)) < 0.4
    t = Tensor(np.where(hidden, -INF, x).astype(np.float32), requires_grad=True)
    y = fn(t)
    assert (y.data[hidden] == (0 if fn is softmax else -INF)).all()
    y.backward(rng.standard_normal((3, 40)))
    assert (t.grad[hidden] == 0).all()
    assert np.isfinite(t.grad).all()


@pytest.mark.parametrize("fn", [softmax, log_softmax])
def test_p9_a_row_of_minus_infinities(fn):
    t = Tensor(np.full((2, 20), -INF), requires_grad=True)
    y = fn(t)
    assert (y.data == (0 if fn is softmax else -INF)).all()
    y.backward(np.ones((2, 20)))
    assert (t.grad == 0).all()


def test_p9_what_arrives_at_a_probability_of_0_goes_nowhere():
    """The entropy of a distribution with a hidden class: log(0) sends back inf and NaN."""
    t = Tensor(np.array([[0.0, 1.0, -INF]]), requires_grad=True)
    softmax(t).backward(np.array([[1.0, 2.0, INF]]))
    assert np.isfinite(t.grad).all()
    assert t.grad[0, 2] == 0


def test_extremes():
    for dtype in (np.float32, np.float64):
        y = softmax(Tensor(np.array([[1e4, 0.0], [-1e30, 1e30], [1e30, 1e30]], dtype))).data
        assert y.tolist() == [[1, 0], [0, 1], [0.5, 0.5]]
        y = log_softmax(Tensor(np.array([[1e4, 0.0]], dtype))).data
        assert y.tolist() == [[0, -1e4]]
        x = np.zeros((3, 20), dtype)
        x[0, 3], x[1, 4] = np.nan, INF
        for fn in (softmax, log_softmax):
            bad = np.isnan(fn(Tensor(x)).data).any(axis=1)
            assert bad.tolist() == [True, True, False]


def test_logits_are_needed():
    for shape in ((), (3, 0)):
        for fn in (softmax, log_softmax):
            with pytest.raises(ValueError, match="a last axis with logits needed"):
                fn(Tensor(np.zeros(shape)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fast_bodies_follow_their_references(dtype):
    x = rng.standard_normal((30, 70)).astype(dtype)
    x[rng.random(x.shape) < 0.1] = -INF
    x[3] = -INF
    g = rng.standard_normal(x.shape).astype(dtype)
    for forward, backward in (
        (softmax_rows, softmax_backward),
        (log_softmax_rows, log_softmax_backward),
    ):
        y, wide = forward(x), forward.reference(x.astype(np.float64))
        np.testing.assert_allclose(y, wide, rtol=tolerance(dtype), atol=tolerance(dtype))
        dx, wide = backward(g, y), backward.reference(g.astype(np.float64), y.astype(np.float64))
        assert np.abs(dx - wide).max() <= tolerance(dtype) * np.abs(g).sum(axis=1).max()


@pytest.mark.skipif(not launch.JIT, reason="orders are promised for compiled bodies")
def test_a_rows_bits_are_exp_summed_in_16_lanes():
    x = rng.standard_normal((4, 1003)).astype(np.float32)
    e = exp(Tensor(x - x.max(axis=1, keepdims=True))).data
    for row, y in zip(e, softmax(Tensor(x)).data, strict=True):
        lanes = np.zeros(16, np.float32)
        for i, value in enumerate(row):
            lanes[i % 16] += value
        for step in (8, 4, 2, 1):
            lanes[:step] += lanes[step : 2 * step]
        assert (row / lanes[0]).tobytes() == y.tobytes()


def test_a_row_has_the_same_bits_alone():
    x = rng.standard_normal((50, 333)).astype(np.float32)
    for fn in (softmax, log_softmax):
        together = fn(Tensor(x)).data
        for n in (0, 7, 49):
            assert fn(Tensor(x[n])).data.tobytes() == together[n].tobytes()
