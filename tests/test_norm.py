"""RMSNorm and LayerNorm: values, gradients, orders of sums, frozen weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import Tensor, launch, layer_norm, rms_norm, set_num_threads
from afinar.autograd.lanes import fma
from afinar.autograd.launch import body
from afinar.autograd.ops import norm
from afinar.autograd.testing import gradcheck, tolerance

F32, F64 = np.float32, np.float64
SIZES = [(1, 1), (3, 15), (8, 16), (65, 37), (200, 576), (0, 5)]


def draw(*shape, dtype=F64):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def exact(x, weight, bias=None, eps=0.0, centred=False):
    x = x.astype(np.longdouble)
    if centred:
        x = x - x.mean(axis=-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("size", SIZES)
def test_values(size, dtype):
    x, w, b = draw(*size, dtype=dtype), draw(size[1], dtype=dtype), draw(size[1] + 0, dtype=dtype)
    for got, expected in (
        (rms_norm(x, w, eps=1e-3), exact(x, w, eps=1e-3)),
        (layer_norm(x, w, b, eps=1e-3), exact(x, w, b, 1e-3, centred=True)),
        (layer_norm(x, w, eps=1e-3), exact(x, w, None, 1e-3, centred=True)),
    ):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.data, expected, atol=10 * tolerance(dtype))


@pytest.mark.parametrize("size", SIZES)
def test_gradients(size):
    x, w, b = draw(*size), draw(size[1]), draw(1 + size[1])[1:]
    gradcheck(lambda x, w: rms_norm(x, w, eps=1e-2), x, w)
    gradcheck(lambda x, w, b: layer_norm(x, w, b, eps=1e-2), x, w, b)
    gradcheck(lambda x, w: layer_norm(x, w, eps=1e-2), x, w)


def test_more_axes_and_strides():
    x, w = draw(4, 6, 10)[:, ::2, ::-1], draw(10)
    np.testing.assert_allclose(rms_norm(x, w).data, exact(x, w, eps=1e-6), rtol=1e-13)
    gradcheck(rms_norm, x, w)
    assert rms_norm(draw(10), w).shape == (10,)


def test_large_and_tiny_rows():
    w = np.ones(64, F32)
    for scale in (1e-15, 1e15):
        x = draw(2, 64, dtype=F32) * F32(scale)
        got = rms_norm(x, w, eps=0.0).data
        np.testing.assert_allclose(got, exact(x, w), rtol=1e-5)
    zeros = Tensor(np.zeros((2, 64), F32), requires_grad=True)
    y = rms_norm(zeros, w)
    y.sum().backward()
    assert (y.data == 0).all()
    assert np.isfinite(zeros.grad).all()
    x = draw(2, 64, dtype=F32)
    x[1, 60] = np.nan
    y = rms_norm(x, w).data
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()


def test_a_frozen_weight_may_be_bfloat16_bits():
    w = draw(40, dtype=F32)
    bits = (w.view(np.uint32) >> 16).astype(np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(F32)
    x = draw(7, 40, dtype=F32)
    for op in (rms_norm, layer_norm):
        a, b = Tensor(x, requires_grad=True), Tensor(x, requires_grad=True)
        ya, yb = op(a, Tensor(bits)), op(b, wide)
        ya.sum().backward()
        yb.sum().backward()
        assert ya.data.tobytes() == yb.data.tobytes()
        assert a.grad.tobytes() == b.grad.tobytes()


def test_a_frozen_weight_changes_no_other_gradient():
    x, w = draw(130, 33, dtype=F32), draw(33, dtype=F32)
    frozen, trained = Tensor(x, requires_grad=True), Tensor(x, requires_grad=True)
    rms_norm(frozen, w).sum().backward()
    rms_norm(trained, Tensor(w, requires_grad=True)).sum().backward()
    assert frozen.grad.tobytes() == trained.grad.tobytes()


@pytest.mark.parametrize("op", [rms_norm, layer_norm])
def test_wrong_shapes(op):
    with pytest.raises(ValueError, match=r"needs a weight \(5,\), given \(4,\)"):
        op(draw(3, 5), draw(4))
    with pytest.raises(ValueError, match="at least one element"):
        op(draw(3, 0), draw(0))
    with pytest.raises(ValueError, match="at least one element"):
        op(np.array(1.0), draw(1))


# --- bits ---------------------------------------------------------------------------------------

jit = pytest.mark.skipif(not launch.JIT, reason="bits are promised for the compiled bodies")


@body
def _fma(i, x, y, z, out):
    out[i] = fma(x[i], y[i], z[i])


@jit
@given(st.integers(1, 300), st.sampled_from([F32, F64]))
def test_weight_gradients_are_chains_of_64_rows_added_ascending(N, dtype):
    C = 19
    g, x, w = draw(N, C, dtype=dtype), draw(N, C, dtype=dtype) + dtype(1), draw(C, dtype=dtype)
    _, r = norm.rms_norm_forward(x, w, 1e-6)
    _, dweight = norm.rms_norm_backward(g, x, w, r, True)
    total = None
    for start in range(0, N, 64):
        chain = np.zeros(C, dtype)
        for n in range(start, min(start + 64, N)):
            _fma(C, g[n], x[n] * r[n], chain.copy(), chain)
        total = chain if total is None else total + chain
    assert dweight.tobytes() == total.tobytes()


@jit
def test_a_row_has_the_same_bits_alone():
    x, w, g = (draw(*s, dtype=F32) for s in ((150, 77), (77,), (151, 77)))
    y, r = norm.rms_norm_forward(x, w, 1e-6)
    dx, _ = norm.rms_norm_backward(g[:150], x, w, r, True)
    for n in (0, 7, 8, 149):
        one, r1 = norm.rms_norm_forward(x[n : n + 1], w, 1e-6)
        dx1, _ = norm.rms_norm_backward(g[n : n + 1], x[n : n + 1], w, r1, True)
        assert one.tobytes() == y[n].tobytes()
        assert dx1.tobytes() == dx[n].tobytes()


@jit
@pytest.mark.skipif(launch.get_num_threads() < 2, reason="one thread")
def test_threads_change_no_bits():
    x, w, g = draw(300, 77, dtype=F32), draw(77, dtype=F32), draw(301, 77, dtype=F32)[:300]
    try:
        found = []
        for threads in (1, 2):
            set_num_threads(threads)
            y, mean, r = norm.layer_norm_forward(x, w, w, 1e-5)
            grads = norm.layer_norm_backward(g, x, w, mean, r)
            found.append([a.tobytes() for a in (y, mean, r, *grads)])
    finally:
        set_num_threads(launch.numba.config.NUMBA_NUM_THREADS)
    assert found[0] == found[1]


@pytest.mark.parity
def test_norms_are_pytorchs():
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    x, w, b, g = draw(9, 40), draw(40), draw(41)[1:], draw(10, 40)[1:]
    for ours, theirs, arrays in (
        (rms_norm, lambda x, w: F.rms_norm(x, (40,), w, 1e-6), (x, w)),
        (layer_norm, lambda x, w, b: F.layer_norm(x, (40,), w, b), (x, w, b)),
    ):
        leaves = [Tensor(a, requires_grad=True) for a in arrays]
        tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
        y, u = ours(*leaves), theirs(*tensors)
        y.backward(g)
        u.backward(torch.tensor(g))
        np.testing.assert_allclose(y.data, u.detach().numpy(), rtol=1e-12, atol=1e-14)
        for a, t in zip(leaves, tensors, strict=True):
            np.testing.assert_allclose(a.grad, t.grad.numpy(), rtol=1e-11, atol=1e-13)
