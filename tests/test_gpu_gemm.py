"""Products, losses and rounding on the GPU: bits of the CPU, or what cuBLAS owes."""

import numpy as np
import pytest

from afinar.autograd import Tensor, linear_cross_entropy, matmul
from afinar.autograd.backend import cupy
from afinar.autograd.ops import gemm_gpu
from afinar.autograd.ops.gemm import gemm, gemm_codes, widen
from afinar.autograd.ops.loss import cross_entropy_backward, cross_entropy_forward
from afinar.autograd.ops.rounding import round_bfloat16, round_float16
from afinar.autograd.ops.softmax import softmax_rows
from afinar.autograd.precision import compute_in
from beyond_memory import emulated, endless, last_block, without_pages  # noqa: F401 - fixtures

pytestmark = pytest.mark.gpu
if cupy is None:
    pytest.skip("CuPy is not installed", allow_module_level=True)

FORMS = [(False, False), (False, True), (True, False), (True, True)]
KINDS = {"f": lambda x: x, "H": round_bfloat16, "h": round_float16, "d": np.float64}


def there(*arrays):
    return [None if x is None else cupy.asarray(x) for x in arrays]


def operand(rng, shape, kind, transposed):
    x = KINDS[kind](rng.standard_normal(shape, dtype=np.float32))
    return np.ascontiguousarray(x.swapaxes(-1, -2)) if transposed else x


def same_bits(gpu, cpu):
    return gpu.dtype == cpu.dtype and gpu.get().tobytes() == cpu.tobytes()


# --- the CPU's bits -------------------------------------------------------------------------


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kinds", ["ff", "dd", "HH", "hh", "fH", "hf", "Hd"])
@pytest.mark.parametrize(("ta", "tb"), FORMS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (13, 70, 515), (70, 33, 17), (3, 300, 1031)])
def test_products_have_the_bits_of_the_cpu(shape, ta, tb, kinds):
    M, N, K = shape
    rng = np.random.default_rng(0)
    a, b = operand(rng, (M, K), kinds[0], ta), operand(rng, (K, N), kinds[1], tb)
    dtype = np.float64 if "d" in kinds else np.float32
    bias, old = rng.standard_normal(N).astype(dtype), rng.standard_normal((M, N)).astype(dtype)
    for ends in ((None, None), (bias, None), (bias, old)):
        args = a, b, *ends
        cpu, (x, y, *moved) = gemm(a, b, ta, tb, *ends), there(*args)
        assert same_bits(gemm(x, y, ta, tb, *moved), cpu)


@pytest.fixture(params=gemm_gpu.SHAPES)
def rectangle(request, monkeypatch):
    """Every product is made of rectangles of this kind."""

    def choose(batch, M, N, blocks, real):
        rows, columns = gemm_gpu.SHAPES[request.param][real][:2]
        return request.param, batch * -(-M // rows) * -(-N // columns)

    monkeypatch.setattr(gemm_gpu, "_choose", choose)


@pytest.mark.usefixtures("deterministic", "rectangle")
@pytest.mark.parametrize("processors", [1e-9, 2, 132])  # no block of k has a job of its own, or all
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_way_to_cut_a_product_gives_one_result(processors, dtype, monkeypatch):
    monkeypatch.setattr(gemm_gpu, "PROCESSORS", processors)
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 1, 131, 1100)), rng.standard_normal((1, 3, 1100, 68))
    a, b, old = (x.astype(dtype) for x in (a, b, rng.standard_normal((2, 3, 131, 68))))
    if dtype == np.float64:
        a, b, old = a[..., :60, :], b[..., :9], np.ascontiguousarray(old[..., :60, :9])
    cpu, (x, y, out) = gemm(a, b, False, False, None, old), there(a, b, old)
    assert gemm(x, y, False, False, None, out, out) is out
    assert same_bits(out, cpu)


@pytest.mark.usefixtures("deterministic", "rectangle")
def test_a_long_sum_is_spread_and_added_up_in_turns(monkeypatch):
    rng = np.random.default_rng(10)
    monkeypatch.setattr(gemm_gpu, "PARTS", 5 * 60)  # the sums of 5 of 18 blocks of k
    a, b = rng.standard_normal((3, 9000), np.float32), rng.standard_normal((9000, 5), np.float32)
    bias, old = rng.standard_normal(5, np.float32), rng.standard_normal((3, 5), np.float32)
    cpu, (x, y, *ends) = gemm(a, b, False, False, bias, old), there(a, b, bias, old)
    assert same_bits(gemm(x, y, False, False, *ends), cpu)


@pytest.mark.usefixtures("deterministic")
def test_operands_are_read_by_their_strides():
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 9, 3, 20), dtype=np.float32)  # (B, T, H, D)
    k = rng.standard_normal((2, 11, 3, 20), dtype=np.float32)
    (x, y) = there(q, k)
    form = (0, 2, 1, 3)
    cpu = gemm(q.transpose(form), k.transpose(form), False, True)
    assert same_bits(gemm(x.transpose(form), y.transpose(form), False, True), cpu)
    rows = np.broadcast_to(q[0, 0, 0], (7, 20))
    cpu = gemm(rows, rows[:, ::-1].copy(), False, True)
    repeated = cupy.broadcast_to(x[0, 0, 0], (7, 20))
    assert same_bits(gemm(repeated, repeated[:, ::-1], False, True), cpu)
    lead = rng.standard_normal((2, 1, 3, 1, 2, 5, 6), dtype=np.float32)
    many, one = lead, rng.standard_normal((1, 4, 1, 3, 2, 6, 7), dtype=np.float32)
    cpu, (x, y) = gemm(many, one, False, False), there(many, one)
    assert same_bits(gemm(x, y, False, False), cpu)


@pytest.mark.usefixtures("deterministic")
def test_subnormal_halves_and_zeros_are_those_of_the_cpu():
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    eye = np.eye(256, dtype=np.float32)
    for kind in (np.uint16, np.int16):
        numbers = bits.view(kind)
        numbers = np.where(np.isfinite(widen(numbers)), numbers, 0).astype(kind)
        for other in (eye, round_bfloat16(eye) if kind == np.uint16 else round_float16(eye)):
            cpu, (x, y) = gemm(numbers, other, False, False), there(numbers, other)
            assert same_bits(gemm(x, y, False, False), cpu)
    tiny = np.float32(1e-30) * np.array([[-1, 1, -1], [1, 1, 1]], np.float32)
    cpu, (x,) = gemm(tiny, tiny, False, True), there(tiny)  # sums of -0 and +0
    assert same_bits(gemm(x, x, False, True), cpu)


@pytest.mark.parametrize(("shape", "tb"), [((37, 530), True), ((37, 530), False), ((5, 7), True)])
def test_codes_are_unpacked_as_they_are_read(shape, tb):
    rng = np.random.default_rng(3)
    size, (N, K) = shape[0] * shape[1], shape if tb else shape[::-1]
    codes = rng.integers(0, 256, -(-size // 2), np.uint8)
    scales, table = rng.random(-(-size // 64), np.float32), rng.standard_normal(16, np.float32)
    for M in (1, 9, 70):
        a, bias = rng.standard_normal((M, K), np.float32), rng.standard_normal(N, np.float32)
        cpu = gemm_codes(a, codes, scales, table, shape, tb, bias)
        x, *held, moved = there(a, codes, scales, table, bias)
        assert same_bits(gemm_codes(x, *held, shape, tb, moved), cpu)


def test_rounding_has_the_bits_of_the_cpu():
    rng = np.random.default_rng(4)
    upper = np.repeat(np.arange(1 << 16, dtype=np.uint32) << 16, 4)
    lower = np.tile(np.array([0, 1, 0x7FFF, 0x8000], np.uint32), 1 << 16)
    x = np.concatenate([upper | lower, rng.integers(0, 1 << 32, 1 << 16, np.uint32)])
    x = x.view(np.float32)
    for rounded in (round_bfloat16, round_float16):
        cpu, (moved,) = rounded(x), there(x)
        assert same_bits(rounded(moved), cpu)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_the_head_and_its_loss_have_the_bits_of_the_cpu(mode):
    rng = np.random.default_rng(5)
    N, C, V = 520, 24, 2100  # three blocks of tokens, the rows in two stages
    x, w = rng.standard_normal((N, C)), 0.1 * rng.standard_normal((V, C))
    targets = rng.integers(0, V, N)
    targets[rng.random(N) < 0.2] = -100
    targets[256:512] = np.where(np.arange(256) < 100, targets[256:512], -100)
    arrays = [a.astype(np.float32) for a in (x, w, rng.standard_normal(V))]
    found = []
    for move in (np.asarray, cupy.asarray):
        leaves = [Tensor(move(a), requires_grad=True) for a in arrays]
        with compute_in(mode):
            out = linear_cross_entropy(leaves[0], leaves[1], targets, leaves[2])
            (out * 3.0).backward()
        found.append([out.data, *(t.grad for t in leaves)])
    for cpu, gpu in zip(*found, strict=True):
        assert gpu.get().tobytes() == cpu.tobytes()


# --- cuBLAS ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["ff", "dd", "HH", "hh", "fH", "Hh", "hd"])
@pytest.mark.parametrize(("ta", "tb"), FORMS)
def test_fast_products_stay_within_the_bound_for_sums(kinds, ta, tb):
    # Higham, Accuracy and Stability, (3.13): |error| <= K u / (1 - K u) |a| |b|, two sums more.
    rng = np.random.default_rng(6)
    for lead, (M, N, K) in (((), (1, 9, 5)), ((), (40, 1, 700)), ((2, 3), (7, 8, 30))):
        a = operand(rng, (*lead, M, K), kinds[0], ta)
        b = operand(rng, (*lead[1:], K, N), kinds[1], tb)
        dtype = np.float64 if "d" in kinds else np.float32
        bias = rng.standard_normal(N).astype(dtype)
        old = rng.standard_normal((*lead, M, N)).astype(dtype)
        p, q = (
            (x.swapaxes(-1, -2) if t else x).astype(np.longdouble)
            for x, t in ((widen(a), ta), (widen(b), tb))
        )
        exact, size = old + (p @ q + bias), np.abs(old) + (np.abs(p) @ np.abs(q) + np.abs(bias))
        u = np.finfo(dtype).eps / 2
        bound = (K + 2) * u / (1 - (K + 2) * u) * size
        x, y, ends, out = there(a, b, bias, old)
        found = gemm(x, y, ta, tb, ends, out)
        assert (np.abs(found.get() - exact) <= bound).all()
        assert gemm(x, y, ta, tb, ends, out, out) is out
        assert (np.abs(out.get() - exact) <= bound).all()
        (out,) = there(old)
        gemm(x, y, ta, tb, None, out, out)
        assert (np.abs(out.get() - (old + p @ q)) <= bound).all()


def test_fast_products_of_nothing_and_of_odd_strides():
    ones = cupy.asarray(np.ones((3, 4), np.float32))
    zeros = gemm(ones[:, :0], ones[:0], False, False)
    assert zeros.shape == (3, 4)
    assert not zeros.get().any()
    assert gemm(ones[:0], ones, False, True).shape == (0, 3)
    rng = np.random.default_rng(7)
    a = rng.standard_normal((6, 5), dtype=np.float32)
    (x,) = there(a)
    row = cupy.broadcast_to(x[0], (4, 5))
    for y, b in ((x[::-1], a[::-1]), (row, np.broadcast_to(a[0], (4, 5))), (x[::2], a[::2])):
        np.testing.assert_allclose(gemm(x, y, False, True).get(), a @ b.T, rtol=1e-5, atol=1e-5)
    one = matmul(Tensor(x[:, 1:2]), Tensor(x[1:2]))
    np.testing.assert_allclose(one.data.get(), a[:, 1:2] @ a[1:2], rtol=1e-5, atol=1e-5)


# --- beyond 2**31 ---------------------------------------------------------------------------


@emulated
@pytest.mark.usefixtures("deterministic", "last_block", "without_pages")
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("N", [8, 1 << 12])
def test_products_of_more_elements_than_32_bits_count(ta, N):
    rng = np.random.default_rng(8)
    M, K, rest = (1 << 32) // N + 1, 40, (1 << 33) // ((1 << 32) // N + 1) + 1
    a = endless((K, M) if ta else (M, rest), np.float32)  # rows with more beside them than is read
    b, last, old = (rng.standard_normal(s, np.float32) for s in ((N, K), (1, K), (1, N)))
    residual = endless((M, N), np.float32)
    residual._host[-1] = old
    if ta:
        a._host[:, -1] = last
    else:
        a = a[:, :K] if rest > K else endless((M, K), np.float32)
        a._host[-1] = last
    out = gemm(a, cupy.asarray(b), ta, True, None, residual)
    assert out.size > 1 << 32
    cpu = gemm(last, b, False, True, None, old)
    assert (out._host[-1, -8:] == cpu[0, -8:]).all()


@emulated
@pytest.mark.usefixtures("deterministic", "last_block", "without_pages")
def test_a_batch_of_more_elements_than_32_bits_count():
    rng = np.random.default_rng(11)
    a = endless(((1 << 24) + 1, 16, 16), np.float32)
    last, b = (rng.standard_normal((16, 16), np.float32) for _ in range(2))
    a._host[-1] = last
    out = gemm(a, cupy.asarray(b), True, False)
    assert out.size > 1 << 32
    assert (out._host[-1] == gemm(last, b, True, False)).all()


@emulated
@pytest.mark.usefixtures("last_block", "without_pages")
def test_rows_and_roundings_of_more_elements_than_31_bits_count():
    rng = np.random.default_rng(9)
    x = endless((1 << 31) + 77, np.float32)
    x._host[-77:] = rng.standard_normal(77, np.float32)
    assert (round_bfloat16(x)._host[-77:] == round_bfloat16(x._host[-77:].copy())).all()
    N, V, g = (1 << 19) + 1, 1 << 12, np.float32(0.5)
    rows, labels, stats = (
        endless(s, t) for s, t in (((N, V), np.float32), (N, np.int64), ((N, 2), np.float32))
    )
    last = rng.standard_normal((1, V), np.float32), np.full(1, 77)
    _, cpu = cross_entropy_forward(*last, -100)
    rows._host[-1:], labels._host[-1:], stats._host[-1:] = *last, cpu
    _, found = cross_entropy_forward(rows, labels, -100)
    assert (found._host[-1] == cpu).all()
    d = cross_entropy_backward(cupy.asarray(g), rows, labels, stats, -100)
    assert (d._host[-1:] == cross_entropy_backward(g, *last, cpu, -100)).all()
    y = softmax_rows(rows)
    assert (y._host[-1:] == softmax_rows(last[0])).all()
