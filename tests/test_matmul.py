"""Matrix products: exact bits in the promised order, bounds on the error, and what is kept."""

import hashlib
import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from afinar.autograd import Tensor, launch
from afinar.autograd.ops.gemm import KC, gemm, gemm_codes, widen
from afinar.autograd.ops.matmul import linear, linear_codes, matmul
from afinar.autograd.ops.rounding import round_bfloat16, round_float16
from afinar.autograd.precision import compute_in, set_deterministic
from afinar.autograd.tape import _captured

needs_jit = pytest.mark.skipif(not launch.JIT, reason="reference bodies promise no bits")
FORMS = [(False, False), (False, True), (True, False), (True, True)]


def fma32(x, y, z):
    """x y + z rounded once to float32: the exact product, the sum rounded to odd, then down."""
    product, z = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + z
    back = total - product
    lost = (product - (total - back)) + (z - back)
    bits = total.view(np.int64)
    away = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where((lost != 0) & (bits % 2 == 0), bits + away, bits)
    return odd.view(np.float64).astype(np.float32)


def fma64(x, y, z):
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in zip(x, y, z, strict=True)]
    return np.array([float(e) for e in exact])


def in_order(a, b, order=lambda k: k):
    """a b as the contract has it: chains within blocks of KC, blocks ascending."""
    (M, K), N = a.shape, b.shape[1]
    fma, total = (fma32 if a.dtype == np.float32 else fma64), None
    for start in range(0, K, KC):
        chain = np.zeros(M * N, a.dtype)
        for k in order(list(range(start, min(K, start + KC)))):
            chain = fma(np.repeat(a[:, k], N), np.tile(b[k], M), chain)
        total = chain if total is None else total + chain
    return total.reshape(M, N)


def pairs_swapped(ks):
    """Of each two k the odd one first."""
    return [k for i in range(0, len(ks), 2) for k in reversed(ks[i : i + 2])]


def laid_out(x, transposed):
    return np.ascontiguousarray(x.T) if transposed else x


@needs_jit
@pytest.mark.parametrize(("ta", "tb"), FORMS)
@pytest.mark.parametrize(
    "shape",
    # also results of few columns from many rows, and a short k over many rows and columns
    [
        (1, 1, 1),
        (5, 33, 7),
        (13, 70, 515),
        (30, 9, 1030),
        (40, 3, 514),
        (23, 16, 70),
        (800, 420, 5),
    ],
)
def test_float32_products_have_the_promised_order(shape, ta, tb):
    M, N, K = shape
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((M, K), (K, N)))
    assert (gemm(laid_out(a, ta), laid_out(b, tb), ta, tb) == in_order(a, b)).all()


@needs_jit
@pytest.mark.parametrize(("ta", "tb"), FORMS)
def test_float64_products_have_the_promised_order(ta, tb):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, 519)), rng.standard_normal((519, 11))
    assert (gemm(laid_out(a, ta), laid_out(b, tb), ta, tb) == in_order(a, b)).all()


@needs_jit
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("ta", "tb"), FORMS)
@pytest.mark.parametrize("shape", [(5, 33, 7), (14, 40, 516), (3, 9, 1031), (50, 8, 517)])
def test_bfloat16_products_have_the_order_of_the_hardware(shape, ta, tb, portable):
    M, N, K = shape
    rng = np.random.default_rng(0)
    a, b = (round_bfloat16(rng.standard_normal(s, dtype=np.float32)) for s in ((M, K), (K, N)))
    set_deterministic(portable)
    try:
        out = gemm(laid_out(a, ta), laid_out(b, tb), ta, tb)
    finally:
        set_deterministic(False)
    assert out.dtype == np.float32
    assert (out == in_order(widen(a), widen(b), pairs_swapped)).all()


@needs_jit
@pytest.mark.parametrize(("ta", "tb"), FORMS)
def test_one_16_bit_operand_is_widened(ta, tb):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((9, 530), dtype=np.float32)
    b = rng.standard_normal((530, 37), dtype=np.float32)
    for rounded in (round_bfloat16, round_float16):
        for x, y in ((rounded(a), b), (a, rounded(b))):
            out = gemm(laid_out(x, ta), laid_out(y, tb), ta, tb)
            assert (out == in_order(widen(x), widen(y))).all()


def test_every_float16_is_widened_exactly():
    h = np.arange(65536, dtype=np.uint16).view(np.int16).reshape(256, 256)
    h = np.where(np.isfinite(h.view(np.float16)), h, 0).astype(np.int16)
    eye = np.eye(256, dtype=np.float32)
    for out in (gemm(h, eye, False, False), gemm(eye, h, False, False)):
        assert (out == h.view(np.float16).astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(100, 130, 700), (257, 64, 33), (8, 300, 2000), (300, 8, 576)])
def test_the_error_stays_within_the_bound_for_sums(shape, dtype):
    # Higham, Accuracy and Stability, (3.13): |error| <= K u / (1 - K u) |a| |b|.
    M, N, K = shape
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((M, K)).astype(dtype), rng.standard_normal((K, N)).astype(dtype)
    exact = a.astype(np.longdouble) @ b.astype(np.longdouble)
    u = np.finfo(dtype).eps / 2
    bound = K * u / (1 - K * u) * (np.abs(a).astype(np.longdouble) @ np.abs(b))
    for ta, tb in FORMS:
        error = np.abs(gemm(laid_out(a, ta), laid_out(b, tb), ta, tb) - exact)
        assert (error <= bound).all()


@needs_jit
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_row_never_depends_on_its_neighbours(kind):
    rng = np.random.default_rng(2)
    a = rng.standard_normal((61, 600), dtype=np.float32)
    b = rng.standard_normal((600, 100), dtype=np.float32)
    if kind == "bfloat16":
        a, b = round_bfloat16(a), round_bfloat16(b)
    whole = gemm(a, b, False, False)
    for rows in (1, 2, 3, 8, 13, 26):
        for start in (0, 7, 61 - rows):
            some = a[start : start + rows]
            for ta, tb in FORMS:
                part = gemm(laid_out(some, ta), laid_out(b, tb), ta, tb)
                assert (part == whole[start : start + rows]).all()
    for columns in (1, 5, 16, 33):
        part = gemm(a, np.ascontiguousarray(b[:, :columns]), False, False)
        assert (part == whole[:, :columns]).all()


@needs_jit
def test_fused_bias_and_residual_have_the_bits_of_the_unfused_ops():
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((2, 31, 600), np.float32), rng.standard_normal((70, 600), np.float32)
    bias, old = rng.standard_normal(70, np.float32), rng.standard_normal((2, 31, 70), np.float32)
    product = linear(x, w).data
    assert (linear(x, w, bias).data == product + bias).all()
    assert (linear(x, w, None, old).data == old + product).all()
    assert (linear(x, w, bias, old).data == old + (product + bias)).all()
    rows, total = x.reshape(62, 600), old.reshape(62, 70).copy()
    gemm(rows, w, False, True, None, total, total)
    assert (total == (old + product).reshape(62, 70)).all()


def test_batches_broadcast_and_transposes_travel_without_copies():
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((2, 1, 5, 7)), rng.standard_normal((3, 4, 7))
    x, y = Tensor(a, requires_grad=True), Tensor(b, requires_grad=True)
    out = x @ y.T
    np.testing.assert_allclose(out.data, a @ b.swapaxes(-1, -2), rtol=1e-13, atol=1e-13)
    out.sum().backward()
    np.testing.assert_allclose(x.grad, np.broadcast_to(b.sum((0, 1)), a.shape), atol=1e-13)
    np.testing.assert_allclose(y.grad, np.broadcast_to(a.sum((0, 1, 2)), b.shape), atol=1e-13)


def test_reversed_and_repeated_operands():
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((6, 5))[::-1], np.broadcast_to(rng.standard_normal(4), (5, 4))
    np.testing.assert_allclose(gemm(a, b, False, False), a @ b, atol=1e-14)
    np.testing.assert_allclose(gemm(b, b, True, False), b.T @ b, atol=1e-14)


def test_sizes_of_zero():
    zeros = gemm(np.ones((3, 0), np.float32), np.ones((0, 4), np.float32), False, False)
    assert zeros.shape == (3, 4)
    assert not zeros.any()
    bias = np.arange(4, dtype=np.float32)
    nothing = np.ones((3, 0), np.float32), np.ones((4, 0), np.float32)
    assert (linear(*nothing, bias).data == bias).all()
    assert gemm(np.ones((0, 3)), np.ones((3, 4)), False, False).shape == (0, 4)
    assert matmul(np.ones((2, 0, 3)), np.ones((3, 4))).shape == (2, 0, 4)


def test_nan_and_infinity_spread_along_their_row_only():
    a, b = np.ones((30, 40), np.float32), np.ones((40, 50), np.float32)
    a[3, 5], a[17, 0] = np.nan, np.inf
    out = gemm(a, b, False, False)
    assert np.isnan(out[3]).all()
    assert (out[17] == np.inf).all()
    assert np.isfinite(np.delete(out, [3, 17], axis=0)).all()


def kept(tensor):
    """The arrays that the node of `tensor` keeps for its backward pass."""
    return list(_captured(tensor.node.vjp))


def test_frozen_weights_cost_no_activation():
    x = Tensor(np.ones((4, 6), np.float32), requires_grad=True)
    weight = Tensor(np.ones((5, 6), np.float32))
    assert [id(k) for k in kept(linear(x, weight))] == [id(weight.data)]


def test_16_bit_modes_keep_16_bits_of_an_activation():
    x = Tensor(np.ones((4, 6), np.float32))
    weight = Tensor(np.ones((5, 6), np.float32), requires_grad=True)
    for mode, dtype in (("bf16", np.uint16), ("fp16", np.int16)):
        with compute_in(mode):
            assert [k.dtype for k in kept(linear(x, weight))] == [dtype]
            assert {k.dtype for k in kept(matmul(x, weight.T))} == {np.dtype(dtype)}


@needs_jit
@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_16_bit_modes_round_operands_and_arriving_gradients(mode):
    rounded = {"bf16": round_bfloat16, "fp16": round_float16}[mode]
    rng = np.random.default_rng(6)
    x, w, g = (rng.standard_normal(s, np.float32) for s in ((9, 20), (7, 20), (9, 7)))
    xt, wt = Tensor(x, requires_grad=True), Tensor(w, requires_grad=True)
    with compute_in(mode):
        out = linear(xt, wt)
    out.backward(g)  # the mode of the forward pass holds
    x, w, g = rounded(x), rounded(w), rounded(g)
    assert (out.data == gemm(x, w, False, True)).all()
    assert (xt.grad == gemm(g, w, False, False)).all()
    assert (wt.grad == gemm(g, x, True, False)).all()
    assert xt.grad.dtype == wt.grad.dtype == np.float32


@needs_jit
def test_bfloat16_weights_are_used_as_they_are():
    rng = np.random.default_rng(7)
    x, bits = rng.standard_normal((9, 20), np.float32), round_bfloat16(np.ones((7, 20), np.float32))
    xt, wide = Tensor(x, requires_grad=True), Tensor(x, requires_grad=True)
    out, same = linear(xt, bits), linear(wide, widen(bits))
    out.sum().backward()
    same.sum().backward()
    assert (out.data == same.data).all()
    assert (xt.grad == wide.grad).all()


def test_4_bit_weights_are_unpacked_while_they_are_read():
    rng = np.random.default_rng(8)
    O, I = 37, 50  # noqa: E741 - outputs and inputs
    codes = rng.integers(0, 256, O * I // 2, np.uint8)
    scales = rng.random(-(-O * I // 64), np.float32)
    table = np.array([*range(8), *range(-8, 0)], np.float32)  # two's complement
    pairs = np.stack([table[codes >> 4], table[codes & 15]], axis=1).reshape(-1)
    weight = (pairs * np.repeat(scales, 64)[: O * I]).reshape(O, I)
    bias = rng.standard_normal(O, np.float32)
    x = rng.standard_normal((2, 5, I), np.float32)
    one, two = Tensor(x, requires_grad=True), Tensor(x, requires_grad=True)
    out = linear_codes(one, codes, scales, bias, out_features=O, table=table)
    same = linear(two, weight, bias)
    assert (out.data == same.data).all()
    out.sum().backward()
    same.sum().backward()
    assert (one.grad == two.grad).all()
    reference = gemm_codes.reference(x[0], codes, scales, table, (O, I), True, bias)
    np.testing.assert_allclose(out.data[0], reference, rtol=1e-4, atol=1e-4)


def some_floats():
    rng = np.random.default_rng(9)
    anything = rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    near = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (np.arange(0, 2**32, 0x8000, np.uint32) & 0xFFFFFFFF).view(np.float32)
    edges = np.float32([65504, 65519.99, 65520, 65536, 2**-24, 2**-25, 1.001 * 2**-25, 3 * 2**-25])
    x = np.concatenate([anything, near, near * np.float32(1.0002), ties, edges])
    return x[~np.isnan(x)]


@np.errstate(over="ignore", invalid="ignore")
def test_rounding_to_16_bits_is_to_the_nearest_even():
    x = some_floats()
    assert (round_float16(x) == x.astype(np.float16).view(np.int16)).all()
    # The two bfloat16 numbers around x, and which is nearer: exact in float64.
    down = x.view(np.uint32) >> 16
    low, high = ((b << 16).view(np.float32).astype(np.float64) for b in (down, down + 1))
    high = np.where(np.isinf(high), np.copysign(2.0**128, high), high)
    to_low, to_high = np.abs(x - low), np.abs(high - x)
    up = (to_high < to_low) | ((to_high == to_low) & (down % 2 == 1))
    finite = np.isfinite(x)
    assert (round_bfloat16(x) == down + up)[finite].all()
    assert (widen(round_bfloat16(x[~finite])) == x[~finite]).all()
    nan = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    assert np.isnan(widen(round_bfloat16(nan))).all()
    assert np.isnan(widen(round_float16(nan))).all()


def test_bad_operands_are_refused_in_one_sentence():
    ones = np.ones
    for call, error, words in [
        (lambda: matmul(ones((2, 3)), ones((4, 5))), ValueError, r"inner sizes differ: a \(2, 3\)"),
        (lambda: matmul(ones(3), ones((3, 2))), ValueError, "two axes or more needed"),
        (lambda: matmul(ones((2, 1, 1)), ones((3, 1, 1))), ValueError, "leading axes do not fit"),
        (lambda: matmul(ones((2, 2)), ones((2, 2), int)), TypeError, "b must hold float32"),
        (lambda: linear(ones((2, 3)), ones((4, 5))), ValueError, r"needs a weight \(O, 3\)"),
        (lambda: linear(ones((2, 3)), ones((4, 3)), ones(3)), ValueError, r"a bias \(4,\) is"),
        (
            lambda: linear(ones((2, 3)), ones((4, 3)), None, ones((4, 2))),
            ValueError,
            r"a residual \(2, 4\) is needed",
        ),
        (
            lambda: linear_codes(
                ones((2, 8)), ones(4, np.uint8), ones(1), out_features=8, table=ones(16)
            ),
            ValueError,
            "needs 32 bytes of codes and 1 scales",
        ),
    ]:
        with pytest.raises(error, match=words):
            call()


def digest_of_products():
    """One value for many products: shapes that take every path, all forms and kinds."""
    rng, sha = np.random.default_rng(10), hashlib.sha256()
    shapes = (1, 70, 40), (3, 5, 600), (31, 33, 9), (130, 8, 70), (8, 200, 530), (200, 400, 1024)
    for M, N, K in shapes:
        a, b = (rng.standard_normal(s, np.float32) for s in ((M, K), (K, N)))
        for ta, tb in FORMS:
            x, y = laid_out(a, ta), laid_out(b, tb)
            small, short = round_bfloat16(x), round_bfloat16(y)
            for pair in (x, y), (x, short), (small, short), (round_float16(x), round_float16(y)):
                sha.update(gemm(*pair, ta, tb))
            if M < 100:
                sha.update(gemm(x.astype(np.float64), y.astype(np.float64), ta, tb))
    return sha.hexdigest()


@needs_jit
def test_threads_and_vector_width_change_no_bit():
    def run(threads, width):
        environment = {
            **os.environ,
            "NUMBA_NUM_THREADS": str(threads),
            "AFINAR_VECTOR_WIDTH": str(width),
        }
        done = subprocess.run(
            [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    results = {cell: run(*cell) for cell in [(1, 16), (2, 16), (2, 8), (2, 4)]}
    assert len(set(results.values())) == 1, results


if __name__ == "__main__":
    print(digest_of_products())
