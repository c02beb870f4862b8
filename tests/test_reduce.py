"""Reductions against NumPy in float64, and against the written order of their sums."""

import itertools

import numpy as np
import pytest

from afinar.autograd import Tensor, launch, logsumexp
from afinar.autograd.ops.reduce import max_axes, sum_axes, sum_in_blocks, sum_of_squares, sum_to
from afinar.autograd.testing import gradcheck, tolerance

rng = np.random.default_rng(0)
SHAPES = [
    (),
    (0,),
    (5,),
    (3, 0),
    (0, 3),
    (70, 33),
    (200, 17),
    (3, 130, 40),
    (2, 3, 4, 5),
    (1, 65, 1),
]
needs_jit = pytest.mark.skipif(not launch.JIT, reason="orders are promised for compiled bodies")


def subsets(ndim):
    return [a for k in range(ndim + 1) for a in itertools.combinations(range(ndim), k)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_set_of_axes(shape, dtype):
    x = rng.standard_normal(shape).astype(dtype)
    for axes in subsets(len(shape)):
        exact, size = x.astype(np.float64).sum(axis=axes), np.abs(x).sum(axis=axes).max(initial=1)
        out = sum_axes(x, axes)
        assert (out.shape, out.dtype) == (exact.shape, dtype)
        assert np.abs(out - exact).max(initial=0) <= tolerance(dtype) * size
        if all(shape[a] for a in axes):
            assert (max_axes(x, axes) == x.max(axis=axes)).all()


@needs_jit
def test_strides_do_not_matter():
    x = rng.standard_normal((40, 30, 20)).astype(np.float32)
    for axes in subsets(3):
        fresh = sum_axes(np.ascontiguousarray(x.transpose(2, 0, 1)), axes)
        assert sum_axes(x.transpose(2, 0, 1), axes).tobytes() == fresh.tobytes()


# --- the orders of the contract, written out ----------------------------------------------


def lane_sum(row):
    """16 lanes, element i in lane i mod 16, then +8, +4, +2, +1."""
    lanes = np.zeros(16, row.dtype)
    for i, value in enumerate(row):
        lanes[i % 16] += value
    for step in (8, 4, 2, 1):
        lanes[:step] += lanes[step : 2 * step]
    return lanes[0]


def column_sum(x):
    """Chains of 64 rows, the chains ascending."""
    total = None
    for start in range(0, len(x), 64):
        chain = np.zeros(x.shape[1:], x.dtype)
        for row in x[start : start + 64]:
            chain += row
        total = chain if total is None else total + chain
    return total


@needs_jit
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 1000])
def test_a_row_is_summed_in_16_lanes(n, dtype):
    x = rng.standard_normal((3, n)).astype(dtype)
    assert [lane_sum(row) for row in x] == sum_axes(x, (1,)).tolist()


@needs_jit
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 2), (63, 3), (64, 3), (65, 3), (500, 1300)])
def test_rows_are_summed_in_chains_of_64(shape, dtype):
    x = rng.standard_normal(shape).astype(dtype)
    assert column_sum(x).tobytes() == sum_axes(x, (0,)).tobytes()


@needs_jit
def test_axes_apart_are_summed_last_group_first():
    x = rng.standard_normal((70, 5, 33)).astype(np.float32)
    inner = np.array([[lane_sum(row) for row in part] for part in x])
    assert column_sum(inner).tobytes() == sum_axes(x, (0, 2)).tobytes()


@needs_jit
@pytest.mark.parametrize("n", [1, 100, 4096, 4097, 20_000])
def test_norms_are_summed_in_float64_blocks_of_4096(n):
    x = rng.standard_normal(n).astype(np.float32)
    squares = x.astype(np.float64) ** 2  # exact, so that fma or not is the same
    total = 0.0
    for start in range(0, n, 4096):
        total += lane_sum(squares[start : start + 4096])
    assert sum_of_squares(x) == total
    assert sum_in_blocks(squares) == total
    assert sum_of_squares(x.reshape(1, n, 1)) == total


def test_sums_for_norms_and_losses_are_float64():
    for x in (np.zeros(0, np.float32), np.zeros((2, 0)), np.array(3.0), np.full((3, 2), 1e30)):
        out = sum_of_squares(x)
        assert isinstance(out, np.float64)
        assert np.isclose(out, (x.astype(np.float64) ** 2).sum(), rtol=1e-15)
    assert np.isinf(sum_of_squares(np.array([np.inf], np.float32)))
    assert np.isnan(sum_of_squares(np.array([np.nan], np.float32)))
    big = np.full(1000, 1e30, np.float32)  # squares beyond float32
    assert np.isclose(sum_of_squares(big), 1000 * float(big[0]) ** 2, rtol=1e-12)


# --- what users report ---------------------------------------------------------------------


def test_p7_broadcast_gradients_have_their_operands_shapes():
    for shapes in [((3, 1), (1, 4), ()), ((2, 3, 5), (5,), (3, 1)), ((2,), (1,), (1, 1))]:
        leaves = [Tensor(rng.standard_normal(s), requires_grad=True) for s in shapes]
        (leaves[0] * leaves[1] + leaves[2]).sum().backward()
        gradcheck(lambda a, b, c: a * b + c, *(x.data for x in leaves))
        for x, shape in zip(leaves, shapes, strict=True):
            assert x.grad.shape == shape
            assert x.grad.dtype == x.dtype


def test_p7_broadcast_to_has_a_gradient():
    x = Tensor(np.array([[1.0], [2.0]]), requires_grad=True)
    x.broadcast_to((3, 2, 4)).sum().backward()
    assert (x.grad == 12).all()
    assert sum_to(np.ones((3, 2, 4)), (2, 1)).shape == (2, 1)


def test_p8_zero_size_and_0d():
    a = Tensor(np.zeros((4, 0)), requires_grad=True)
    b = Tensor(np.ones((4, 1)), requires_grad=True)
    total = (a + b).sum()
    assert total.shape == ()
    assert total.item() == 0
    total.backward()
    assert a.grad.shape == (4, 0)
    assert b.grad.shape == (4, 1)
    assert (b.grad == 0).all()

    x = Tensor(np.float64(3.0), requires_grad=True)
    (x.sum() * x.mean() * x.max()).backward()
    assert x.grad == 27


def test_p8_of_nothing_a_sum_is_0_a_mean_nan_and_a_maximum_an_error():
    x = Tensor(np.zeros((0, 3)), requires_grad=True)
    assert (x.sum(axis=0).data == 0).all()
    mean = x.mean(axis=0)
    assert np.isnan(mean.data).all()
    mean.backward(np.ones(3))
    assert x.grad.shape == (0, 3)
    assert x.max(axis=1).shape == (0,)
    with pytest.raises(ValueError, match="nothing has no maximum"):
        x.max(axis=0)
    assert (logsumexp(x, axis=0).data == -np.inf).all()


def test_equal_maxima_share_the_gradient():
    x = Tensor(np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), requires_grad=True)
    x.max(axis=1).backward([6.0, 6.0])
    assert (x.grad == [[0, 3, 3], [2, 2, 2]]).all()


def test_a_nan_is_the_maximum():
    for n in (3, 40):
        x = np.zeros((2, n), np.float32)
        x[1, 1] = np.nan
        assert np.isnan(max_axes(x, (1,))).tolist() == [False, True]
        assert np.isnan(max_axes(x, (0,))).sum() == 1


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (-1, 0)])
def test_logsumexp_of_any_axes(axis):
    x = rng.standard_normal((3, 70, 5))
    expected = np.log(np.exp(x).sum(axis=axis))
    np.testing.assert_allclose(logsumexp(x, axis=axis).data, expected, rtol=1e-14)
    kept = logsumexp(x + 1000, axis=axis, keepdims=True).data  # exp alone would overflow
    np.testing.assert_allclose(kept.reshape(expected.shape), expected + 1000, rtol=1e-14)
    gradcheck(lambda t: logsumexp(t, axis=axis), x)


def test_p9_minus_infinity_gets_a_gradient_of_exactly_0():
    x = np.array([[-np.inf, 0.0, 1.0], [-np.inf, -np.inf, -np.inf]])
    t = Tensor(x, requires_grad=True)
    out = logsumexp(t)
    assert out.data[1] == -np.inf
    out.backward(np.ones(2))
    assert (t.grad[x == -np.inf] == 0).all()
    np.testing.assert_allclose(t.grad[0, 1:], np.exp(x[0, 1:]) / np.exp(x[0, 1:]).sum())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.sum(axis=2), r"sum: axis 2 does not exist in an array of shape \(2, 3\)"),
        (lambda x: x.mean(axis=(0, -3)), "mean: axis -3 does not exist"),
        (lambda x: x.max(axis=(0, -2)), r"max: axis \(0, -2\) names one axis twice"),
        (lambda x: x.sum(axis=1.0), "sum: axis is an integer or several, given 1.0"),
    ],
)
def test_bad_axes_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(Tensor(np.zeros((2, 3))))
