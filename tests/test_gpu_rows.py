"""Reductions, norms, rows, dropout and indexing on the GPU: the CPU's bits at sizes that matter."""

import itertools

import numpy as np
import pytest

from afinar.autograd import Tensor, embedding, random
from afinar.autograd.backend import cupy
from afinar.autograd.ops.dropout import drop_threshold, dropout_apply
from afinar.autograd.ops.embedding import embedding_backward, embedding_rows
from afinar.autograd.ops.norm import (
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from afinar.autograd.ops.reduce import (
    logsumexp_rows,
    max_axes,
    sum_axes,
    sum_chains_gpu,
    sum_in_blocks,
    sum_middle,
    sum_of_squares,
)
from afinar.autograd.ops.rope import rope_rotate
from afinar.autograd.precision import all_finite
from beyond_memory import emulated, endless, last_block, without_pages  # noqa: F401 - fixtures

pytestmark = pytest.mark.gpu
if cupy is None:
    pytest.skip("CuPy is not installed", allow_module_level=True)

KEY = random.make_key("rows", 3)
rng = np.random.default_rng(0)


def draw(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def assert_same(kernel, *args):
    """The kernel's results on both devices, as bytes."""
    there = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    cpu, gpu = kernel(*args), kernel(*there)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (cpu, gpu)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            b = b.get()
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (70, 33), (3, 200, 40), (2, 3, 4, 5)])
def test_every_set_of_axes(shape, dtype):
    x = draw(*shape, dtype=dtype)
    for n in range(len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), n):
            assert_same(sum_axes, x, axes)
            if all(shape[a] for a in axes):
                assert_same(max_axes, x, axes)


@pytest.mark.parametrize("n", [0, 1, 15, 4096, 4097, 30_000])
def test_sums_in_float64(n):
    assert_same(sum_of_squares, draw(n))
    assert_same(sum_of_squares, draw(n, dtype=np.float64))
    assert_same(sum_in_blocks, draw(n, dtype=np.float64))


def test_zeros_and_infinities():
    special = np.float32([0, -0.0, np.inf, -np.inf, 1, -1, 1e-42])
    x = special[rng.integers(0, 7, (50, 20))]
    for axes in ((0,), (1,), (0, 1)):
        assert_same(max_axes, x, axes)
        assert_same(sum_axes, np.where(x == -np.inf, np.inf, x), axes)
    x[3] = -np.inf
    assert_same(logsumexp_rows, np.where(x == np.inf, -np.inf, x))
    assert not all_finite(cupy.asarray(x))
    assert all_finite(cupy.asarray(draw(100_000)))
    assert all_finite(cupy.asarray(draw(0)))
    for bad in (np.nan, np.inf):
        y = draw(70_000)
        y[69_999] = bad
        assert not all_finite(cupy.asarray(y))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("N", "C"), [(0, 5), (1, 1), (65, 17), (200, 100)])
def test_norms(N, C, dtype):
    x, g, (weight, bias) = draw(N, C, dtype=dtype), draw(N, C, dtype=dtype), draw(2, C, dtype=dtype)
    assert_same(rms_norm_forward, x, weight, 1e-5)
    _, r = rms_norm_forward(x, weight, 1e-5)
    for needs_weight in (True, False):
        assert_same(rms_norm_backward, g, x, weight, r, needs_weight)
    for b in (bias, None):
        assert_same(layer_norm_forward, x, weight, b, 1e-5)
    _, mean, r = layer_norm_forward(x, weight, bias, 1e-5)
    assert_same(layer_norm_backward, g, x, weight, mean, r)


def test_rotations_read_x_where_it_lies():
    x, (cos, sin) = draw(2, 9, 8, 36), draw(2, 2, 9, 16)
    there = cupy.asarray(x)
    for c, s in ((cos, sin), (cos[:1], sin[:1])):
        cpu = rope_rotate(x[:, ::2, 3:6, 2:34], c[:, ::2], s[:, ::2])
        gpu = rope_rotate(there[:, ::2, 3:6, 2:34], *(cupy.asarray(t)[:, ::2] for t in (c, s)))
        assert gpu.get().tobytes() == cpu.tobytes()


@pytest.mark.parametrize("n", [0, 1, 5, 4099, 10_007])
def test_random_numbers(n):
    for fill, dtype, rest in (
        (random.fill_words, np.uint64, ()),
        (random.fill_uniform, np.float32, (-0.3, 0.7)),
        (random.fill_normal, np.float32, (0.02,)),
    ):
        cpu, gpu = (fill(xp.empty(n, dtype), KEY, *rest) for xp in (np, cupy))
        assert gpu.get().tobytes() == cpu.tobytes()
    for p in (0.1, 0.7, 1 - 1e-11):
        assert_same(dropout_apply, draw(n), p, KEY)


# --- rows of a table -------------------------------------------------------------------------


@pytest.mark.parametrize(("V", "C", "N"), [(1, 1, 0), (7, 5, 40), (200, 30, 1000), (5, 0, 3)])
def test_rows_are_looked_up_and_their_gradients_added_in_order(V, C, N):
    ids = rng.integers(0, V, N)
    for dtype in (np.float32, np.float64):
        assert_same(embedding_rows, draw(V, C, dtype=dtype), ids)
        assert_same(embedding_backward, draw(N, C, dtype=dtype), ids, V)
    assert_same(embedding_rows, rng.integers(0, 2**16, (V, C)).astype(np.uint16), ids)


def test_ids_may_be_on_the_host():
    weight = Tensor(cupy.asarray(draw(9, 4)), requires_grad=True)
    ids = np.array([[3, 3], [8, 0]])
    out = embedding(weight, ids)
    assert (out.data.get() == weight.data.get()[ids]).all()
    out.backward(out.data)
    assert (weight.grad.get()[3] == 2 * weight.data.get()[3]).all()
    with pytest.raises(ValueError, match="id 9 at index"):
        embedding(weight, np.array([9]))


def test_elements_taken_by_arrays():
    x = draw(6, 5, 4)
    mask = x > 0
    rows, columns = np.array([[0, 5], [-6, 0]]), np.array([4, -1])
    for index in (
        [1, 1, 0, 1],
        [],
        rows,
        (rows, columns),
        (slice(1, 5, 2), rows % 2, 3),
        (..., np.array([3, 3, 1])),
        (np.array([1, 1]), ..., np.array([0, 0])),
        (None, columns),
        mask,
        mask[:, 0, 0],
        (slice(None), mask[0, :, 0], 1),
        (2, slice(None, None, -1)),
    ):
        leaves = Tensor(x, requires_grad=True), Tensor(cupy.asarray(x), requires_grad=True)
        parts = index if isinstance(index, tuple) else (index,)
        moved = [cupy.asarray(i) if isinstance(i, np.ndarray) else i for i in parts]
        for there in (index, tuple(moved) if isinstance(index, tuple) else moved[0]):
            cpu, gpu = leaves[0][index], leaves[1][there]
            assert gpu.data.get().tobytes() == cpu.data.tobytes()
            g = draw(*cpu.shape)
            for leaf, out, arriving in zip(leaves, (cpu, gpu), (g, cupy.asarray(g)), strict=True):
                leaf.grad = None
                out.backward(arriving)
            assert leaves[1].grad.get().tobytes() == leaves[0].grad.tobytes()


def test_integers_out_of_range_are_refused():
    t = Tensor(cupy.zeros((4, 5), np.float32))
    for index, message in (
        ([4], "index 4 is out of bounds for axis 0 with size 4"),
        ((slice(None), np.array([1, -6])), "index -6 is out of bounds for axis 1 with size 5"),
        ((..., cupy.asarray(np.array([5]))), "index 5 is out of bounds for axis 1 with size 5"),
    ):
        with pytest.raises(IndexError, match=message):
            t[index]
    with pytest.raises(IndexError, match="float"):
        t[1.5]


# --- beyond 2**31 ----------------------------------------------------------------------------


def with_last(shape, last):
    """An array of that shape that ends with `last`; all before is 0."""
    x = endless(shape, last.dtype)
    x._host[-len(last) :] = last
    return x


@emulated
@pytest.mark.usefixtures("last_block", "without_pages")
def test_rows_of_more_elements_than_31_bits_count():
    N, C = (1 << 19) + 1, 1 << 12
    last, g, weight = draw(1, C), draw(1, C), draw(C)
    x, w = with_last((N, C), last), cupy.asarray(weight)
    cpu, gpu = rms_norm_forward(last, weight, 1e-5), rms_norm_forward(x, w, 1e-5)
    for a, b in zip(cpu, gpu, strict=True):
        assert (b._host[-1:] == a).all()
    dx, _ = rms_norm_backward(with_last((N, C), g), x, w, gpu[1], False)
    assert (dx._host[-1:] == rms_norm_backward(g, last, weight, cpu[1], False)[0]).all()
    assert sum_axes(x, (1,)).get()[-1] == sum_axes(last, (1,))[0]
    parts = sum_chains_gpu(x.reshape(1, N, C)).get()
    assert (parts[0, -1, -256:] == sum_middle(last.reshape(1, 1, C))[0, -256:]).all()


@emulated
@pytest.mark.usefixtures("last_block", "without_pages")
def test_rotations_and_tables_of_more_elements_than_31_bits_count():
    T, H, D = (1 << 20) + 1, 16, 128
    last, cos, sin = draw(1, H, D), draw(1, D // 2), draw(1, D // 2)
    tables = (with_last((T, D // 2), t)[None] for t in (cos, sin))
    out = rope_rotate(with_last((T, H, D), last)[None], *tables)
    cpu = rope_rotate(last[None], cos[None], sin[None])
    assert (out._host[0, -1, -4:] == cpu[0, 0, -4:]).all()

    N, C = (1 << 19) + 1, 1 << 12
    table, ids = draw(3, C), with_last(N, np.array([2]))
    out = embedding_rows(cupy.asarray(table), ids)
    assert (out._host[-1, -256:] == table[2, -256:]).all()
    g, ids = draw(5, C), np.full(5, N - 1)
    out = embedding_backward(cupy.asarray(g), cupy.asarray(ids), N)
    expected = embedding_backward(g, ids - ids, 1)
    assert (out._host[-1, -256:] == expected[0, -256:]).all()


@emulated
@pytest.mark.usefixtures("last_block", "without_pages")
def test_streams_of_more_elements_than_31_bits_count():
    block = (1 << 31) // 4 + 5
    words = np.random.Philox(key=int.from_bytes(KEY, "little"), counter=block).random_raw(4)
    out = random.fill_words(endless(4 * block + 3, np.uint64), KEY)
    assert (out._host[-3:] == words[:3]).all()
    halves, last, p = words.view(np.uint32), draw(8), 0.4
    out = dropout_apply(with_last(8 * block + 8, last), p, KEY)
    expected = np.where(halves >= drop_threshold(p), last * np.float32(1 / 0.6), 0)
    assert (out._host[-8:] == expected).all()
