"""Elementwise ops and activations: values, choices at the edges, layouts, in-place sums."""

import math

import numpy as np
import pytest

from afinar.autograd import OPS, Tensor, launch, set_num_threads
from afinar.autograd.ops import activation, elementwise
from afinar.autograd.pointwise import CHUNK
from afinar.autograd.testing import gradcheck, tolerance

F32, F64 = np.float32, np.float64
NAN, INF = math.nan, math.inf
RNG = np.random.default_rng(0)
X, Y, G = RNG.standard_normal((3, 7, 45)) * 2


def leaf(x, dtype=F64):
    return Tensor(np.array(x, dtype), requires_grad=True)


def gradient(fn, x):
    x = leaf(x)
    fn(x).sum().backward()
    return x.grad


def normal_below(x):
    return np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x.flat]).reshape(x.shape)


VALUES = {
    "add": (lambda x, y: x + y, 2),
    "sub": (lambda x, y: x - y, 2),
    "mul": (lambda x, y: x * y, 2),
    "div": (lambda x, y: x / y, 2),
    "maximum": (np.maximum, 2),
    "neg": (lambda x: -x, 1),
    "exp": (np.exp, 1),
    "tanh": (np.tanh, 1),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 1),
    "relu": (lambda x: np.maximum(x, 0), 1),
    "silu": (lambda x: x / (1 + np.exp(-x)), 1),
    "swiglu": (lambda x, y: x / (1 + np.exp(-x)) * y, 2),
    "gelu": (lambda x: x * normal_below(x), 1),
}


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", VALUES)
def test_values(name, dtype):
    exact, n = VALUES[name]
    for size in (X.size, 1, 0, CHUNK + 21):
        arrays = [np.resize(a, size).astype(dtype) for a in (X, Y)[:n]]
        got = OPS[name](*arrays)
        assert got.dtype == dtype
        expected = exact(*(a.astype(F64) for a in arrays))
        np.testing.assert_allclose(got.data, expected, rtol=tolerance(dtype), atol=tolerance(dtype))


def test_log_sqrt_and_powers():
    x = np.abs(X) + 0.01
    np.testing.assert_allclose(OPS["log"](x).data, np.log(x), rtol=1e-14, atol=1e-15)
    np.testing.assert_array_equal(OPS["sqrt"](x).data, np.sqrt(x))
    for exponent in (0, 1, 2, 3, 7, -1, -2, 0.5, -0.5, 1.5, 2.25, -3.7, 33):
        np.testing.assert_allclose(OPS["pow"](x, exponent=exponent).data, x**exponent, rtol=1e-13)
        single = OPS["pow"](x.astype(F32), exponent=exponent)
        assert single.dtype == F32
        np.testing.assert_allclose(
            single.data, x.astype(F32).astype(F64) ** exponent, rtol=4e-6, atol=1e-36
        )
    np.testing.assert_array_equal(OPS["pow"](X, exponent=2).data, X * X)
    np.testing.assert_array_equal(OPS["pow"](X, exponent=3).data, X * (X * X))


def test_powers_at_the_edges_are_numpys():
    x = np.array([0.0, 1.0, INF, -1.0, -2.0])
    with np.errstate(all="ignore"):
        for exponent in (0, 1, 2, 3, -1, -2, 0.5, 1.5, -1.5):
            np.testing.assert_allclose(OPS["pow"](x, exponent=exponent).data, x**exponent)


def test_gelu_by_tanh():
    exact = X * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
    np.testing.assert_allclose(
        OPS["gelu"](X, approximate="tanh").data, exact, rtol=1e-12, atol=1e-15
    )
    with pytest.raises(ValueError, match="sigmoid"):
        OPS["gelu"](X, approximate="sigmoid")


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sigmoid", "relu", "silu", "gelu", "sqrt"])
def test_nan_comes_through(name):
    x = leaf([NAN, 1.0])
    out = OPS[name](x)
    assert np.isnan(out.data[0])
    assert not np.isnan(out.data[1])


def test_what_where_did_not_choose_brings_no_nan():
    """The gradient of where(x > 0, f(x), 0) is 0 at x <= 0, whatever the slope of f there."""
    at = [0.0, -1.0, 4.0]
    for fn in (Tensor.sqrt, Tensor.log, lambda x: 1 / x, lambda x: x**-0.5, lambda x: x**0.5):
        grad = gradient(lambda x, fn=fn: OPS["where"](x.data > 0, fn(x), 0.0), at)
        np.testing.assert_array_equal(grad[:2], [0.0, 0.0])
        assert grad[2] != 0
    grad = gradient(lambda x: OPS["where"](x.data < 1000, x.exp(), 0.0), [1e4, 0.0])
    np.testing.assert_array_equal(grad, [0.0, 1.0])


def test_the_gradient_of_a_norm_at_0_is_0():
    def norm(x):
        return (x * x).sum().sqrt()

    np.testing.assert_array_equal(gradient(norm, np.zeros(3)), np.zeros(3))
    np.testing.assert_array_equal(gradient(lambda x: norm(x) ** 2, np.zeros(3)), np.zeros(3))
    np.testing.assert_allclose(gradient(norm, [3.0, 4.0]), [0.6, 0.8], rtol=1e-15)


def test_the_gradient_of_a_power_at_0():
    np.testing.assert_array_equal(gradient(lambda x: x**2, [0.0, 2.0]), [0.0, 4.0])
    np.testing.assert_array_equal(gradient(lambda x: x**1, [0.0, 2.0]), [1.0, 1.0])
    np.testing.assert_array_equal(gradient(lambda x: x**0, [0.0, 2.0]), [0.0, 0.0])


def test_relu_and_maximum_where_they_bend():
    np.testing.assert_array_equal(gradient(Tensor.relu, [-1.0, 0.0, 1.0]), [0.0, 0.0, 1.0])
    x, y = leaf([1.0, 2.0, 3.0]), leaf([2.0, 2.0, 2.0])
    OPS["maximum"](x, y).sum().backward()
    np.testing.assert_array_equal(x.grad, [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(y.grad, [1.0, 0.5, 0.0])
    assert np.isnan(OPS["maximum"](np.array([NAN, 1.0]), np.array([1.0, NAN])).data).all()


def test_infinities_come_out_as_in_ieee_arithmetic():
    x = np.array([INF, -INF, 1.0, 0.0])
    np.testing.assert_array_equal(OPS["div"](x, np.zeros(4)).data, [INF, -INF, INF, NAN])
    np.testing.assert_array_equal(OPS["silu"](x).data, [INF, NAN, 1 / (1 + math.exp(-1)), 0.0])


@pytest.mark.parametrize("name", ["add", "mul", "div", "maximum", "where"])
def test_operands_of_other_shapes_and_strides(name):
    x = np.asfortranarray(X)[::2, ::-3]
    for y in (Y[::2, ::-3], Y[0, ::-3], np.array(1.5), Y[::2, :1], Y[:0, :1].sum()):
        y = np.abs(y) + 0.5
        arrays = (x > 0, x, y) if name == "where" else (x, y)
        got = OPS[name](*arrays).data
        fn = np.where if name == "where" else VALUES[name][0]
        np.testing.assert_array_equal(got, fn(*arrays))
        condition = x > 0
        gradcheck(
            (lambda a, b, c=condition: OPS["where"](c, a, b)) if name == "where" else OPS[name],
            x if name != "maximum" else x + 0.1 * np.sign(x - y),
            y,
        )


def test_numbers_and_integers_take_the_type_of_the_tensor():
    x = leaf(X, F32)
    for out in (x + 1, 2 * x, x / 3.0, 1 - x, x + np.arange(45), x * np.array(True)):
        assert out.dtype == F32
    np.testing.assert_array_equal(
        (x + np.arange(45)).data, X.astype(F32) + np.arange(45, dtype=F32)
    )
    assert (x + leaf(X)).dtype == F64


def test_bfloat16_bits_are_not_numbers():
    with pytest.raises(TypeError, match="uint16"):
        OPS["add"](np.zeros(3, np.uint16), np.zeros(3, np.uint16))
    with pytest.raises(TypeError, match="float16"):
        OPS["cast"](X, dtype=np.float16)
    with pytest.raises(ValueError, match="one shape"):
        OPS["swiglu"](X, X[0])


@pytest.mark.parametrize("size", [5, 5000, 3 * CHUNK + 5])
def test_sums_may_go_into_an_operand(size):
    for dtype in (F32, F64):
        x, y = RNG.standard_normal((2, size)).astype(dtype)
        expected = x + y
        assert elementwise.add_arrays(x, y, None).tobytes() == expected.tobytes()
        assert elementwise.add_arrays(x, y, x) is x
        assert x.tobytes() == expected.tobytes()


@pytest.mark.skipif(not launch.JIT, reason="compares compiled bodies")
def test_small_and_large_arrays_have_the_same_bits():
    """Below some size NumPy does the arithmetic; cutting an array must not change its bits."""
    x, y = RNG.standard_normal((2, 2 * CHUNK + 7)).astype(F32)
    for kernel in (elementwise.mul_arrays, elementwise.div_arrays, elementwise.sub_arrays):
        whole = kernel(x, y)
        parts = [kernel(x[n : n + 99], y[n : n + 99]) for n in range(0, x.size, 99)]
        assert whole.tobytes() == np.concatenate(parts).tobytes()
    parts = [activation.silu_forward(x[n : n + 99]) for n in range(0, x.size, 99)]
    assert activation.silu_forward(x).tobytes() == np.concatenate(parts).tobytes()


@pytest.mark.skipif(launch.get_num_threads() < 2, reason="one thread")
def test_threads_change_no_bits():
    x, y, g = RNG.standard_normal((3, 5 * CHUNK + 7)).astype(F32)
    try:
        found = []
        for threads in (1, 2):
            set_num_threads(threads)
            pair = activation.swiglu_backward(g, x, y)
            gelu = activation.gelu_backward(g, x)
            found.append((pair[0].tobytes(), pair[1].tobytes(), gelu.tobytes()))
    finally:
        set_num_threads(launch.numba.config.NUMBA_NUM_THREADS)
    assert found[0] == found[1]


@pytest.mark.parity
def test_activations_are_pytorchs():
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    for name, theirs, options in (
        ("silu", F.silu, {}),
        ("gelu", F.gelu, {"approximate": "none"}),
        ("gelu", F.gelu, {"approximate": "tanh"}),
        ("sigmoid", torch.sigmoid, {}),
    ):
        x, t = leaf(X), torch.tensor(X, requires_grad=True)
        y, u = OPS[name](x, **options), theirs(t, **options)
        y.backward(G)
        u.backward(torch.tensor(G))
        np.testing.assert_allclose(y.data, u.detach().numpy(), rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(x.grad, t.grad.numpy(), rtol=1e-11, atol=1e-13)
