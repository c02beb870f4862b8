"""Attention on the GPU: the bits of the CPU, whatever is seen, however long, in what storage."""

import numpy as np
import pytest

from afinar.autograd import Tensor, attention, cuda
from afinar.autograd.backend import cupy
from afinar.autograd.ops import attention_gpu
from afinar.autograd.ops.attention import attention_backward, attention_forward
from afinar.autograd.ops.rounding import round_bfloat16, round_float16
from afinar.autograd.precision import compute_in
from afinar.autograd.random import make_key
from beyond_memory import emulated, endless, without_pages  # noqa: F401 - a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
if cupy is None:
    pytest.skip("CuPy is not installed", allow_module_level=True)

KEY = make_key("attention", 5)


def heads(B, T, S, H, G, D, dtype=np.float32, seed=0):
    """q, k, v and the gradient that arrives."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, D), (B, T, H, D)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def found(arrays, move, **options):
    """The output and the three gradients, computed where `move` puts the arrays."""
    *leaves, g = (Tensor(move(x), requires_grad=True) for x in arrays)
    out = attention(*leaves, **options)
    out.backward(g.data)
    results = [out.data, *(x.grad for x in leaves)]
    return [x if isinstance(x, np.ndarray) else x.get() for x in results]


def assert_same(arrays, **options):
    cpu, gpu = found(arrays, lambda x: x, **options), found(arrays, cupy.asarray, **options)
    for name, a, b in zip(("out", "dq", "dk", "dv"), cpu, gpu, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes(), f"{name} differs by {abs(a - b).max()}"


def packed(B, S, *lengths):
    """Segments 0, 1 ... of these lengths, again and again; row b starts b keys later."""
    names = np.concatenate([np.full(n, i) for i, n in enumerate(np.tile(lengths, S))])
    return np.stack([names[b : b + S] for b in range(B)])


def named(options):
    return ",".join(f"{k}={v}" for k, v in options.items() if k != "key") or "plain"


# --- what is seen -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 1},
        {"window": 70},
        {"window": 100, "causal": False},
        {"dropout": 0.3, "key": KEY},
        {"dropout": 1 - 1e-11, "key": KEY},
        {"scale": -0.7},
    ],
    ids=named,
)
def test_several_tiles(options, dtype):
    assert_same(heads(2, 150, 150, 2, 1, 20, dtype), **options)


@pytest.mark.parametrize("more", [{}, {"window": 40}, {"dropout": 0.2, "key": KEY}], ids=named)
def test_segments_padding_and_holes(more):
    B, S = 2, 150
    arrays = heads(B, S, S, 2, 2, 33)
    left = np.where(np.arange(S) >= np.array([[0], [90]]), 0, -1)
    holes = packed(B, S, 37, 5) % 2
    for segments in (
        packed(B, S, 37, 70, 1),
        left,
        left[:, ::-1],
        holes,
        np.where(left, -1, holes),
    ):
        assert_same(arrays, segments=segments, **more)
    assert_same(arrays, segments=np.full((B, S), -1), **more)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 200), (3, 130), (65, 200), (130, 64)])
def test_queries_at_the_end_of_the_keys(T, S):
    arrays = heads(2, T, S, 4, 2, 16)
    for options in ({}, {"causal": False}, {"window": 64}, {"dropout": 0.5, "key": KEY}):
        assert_same(arrays, **options)
    if T <= S:
        assert_same(arrays, segments=packed(2, S, 90, 8))


@pytest.mark.parametrize("D", [1, 31, 40, 64, 65, 100, 128, 192, 256])
def test_heads_of_every_size(D):
    """One of each source, and sizes that are filled up."""
    assert_same(heads(1, 70, 70, 2, 1, D))
    if D > 128:
        assert_same(heads(1, 70, 70, 1, 1, D, np.float64))


def test_heads_that_are_too_large_are_named():
    q, k, v, _ = (cupy.asarray(x) for x in heads(1, 2, 2, 1, 1, 257))
    with pytest.raises(ValueError, match="heads of size 257 given, on a GPU at most 256"):
        attention(Tensor(q), Tensor(k), Tensor(v))


@pytest.mark.parametrize("H", [1, 3, 6])
def test_heads_that_share_keys(H):
    """dK and dV: one chain for each query head, heads ascending."""
    assert_same(heads(2, 80, 80, 2 * H, 2, 8))


def test_scores_whose_exponentials_vanish_or_overflow():
    q, k, v, g = heads(1, 130, 130, 1, 1, 8)
    assert_same([q * 40, k * 40, v, g])
    assert_same([q * 0, k, v, g])


def test_a_row_has_its_bits_alone_in_a_batch_and_with_a_cache():
    q, k, v, _ = (cupy.asarray(x) for x in heads(3, 140, 140, 2, 2, 16))
    rule = np.float32(0.25), True, None, None, 0.0, None
    out, lse = (x.get() for x in attention_forward(q, k, v, *rule))
    for t in (1, 77):
        last = attention_forward(q[:, -t:], k, v, *rule)
        assert last[0].get().tobytes() == out[:, -t:].tobytes()
        alone = attention_forward(q[1:2, -t:], k[1:2], v[1:2], *rule)
        assert alone[0].get().tobytes() == out[1:2, -t:].tobytes()
        assert last[1].get().tobytes() == lse[:, :, -t:].tobytes()


# --- storage ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_16_bit_modes(mode):
    with compute_in(mode):
        assert_same(heads(1, 100, 100, 4, 2, 24))


@pytest.mark.parametrize("narrow", [round_bfloat16, round_float16], ids=["bf16", "fp16"])
def test_16_bit_operands_are_widened_exactly(narrow):
    q, k, v, g = heads(1, 70, 70, 1, 1, 32)
    tiny = np.float32([1e-7, 6e-8, -3e-6, 0, -0.0])  # subnormal in float16
    k[..., :5] = tiny
    q, k, v = (narrow(x) for x in (q, k, v))
    rule = np.float32(0.25), True, None, None, 0.0, None
    cpu = attention_forward(q, k, v, *rule)
    there = [cupy.asarray(x) for x in (g, q, k, v)]
    gpu = attention_forward(*there[1:], *rule)
    assert [x.get().tobytes() for x in gpu] == [x.tobytes() for x in cpu]
    cpu = attention_backward(g, q, k, v, narrow(cpu[0]), cpu[1], *rule)
    gpu = attention_backward(*there, narrow(gpu[0]), gpu[1], *rule)
    assert [x.get().tobytes() for x in gpu] == [x.tobytes() for x in cpu]


def test_views_are_read_where_they_lie():
    rng = np.random.default_rng(1)
    both = rng.standard_normal((2, 70, 6, 20)).astype(np.float32)
    there = cupy.asarray(both)
    parts = slice(0, 4), slice(4, 5), slice(5, 6)
    rule = np.float32(0.25), True, None, None, 0.0, None
    cpu = attention_forward(*(both[:, :, p, 2:18] for p in parts), *rule)
    gpu = attention_forward(*(there[:, :, p, 2:18] for p in parts), *rule)
    assert [x.get().tobytes() for x in gpu] == [x.tobytes() for x in cpu]
    backwards = attention_forward(*(there[:, ::-1, p] for p in parts), *rule)
    cpu = attention_forward(*(both[:, ::-1, p] for p in parts), *rule)
    assert [x.get().tobytes() for x in backwards] == [x.tobytes() for x in cpu]


def test_segments_may_be_on_either_device():
    q, k, v, _ = (cupy.asarray(x) for x in heads(2, 20, 20, 1, 1, 8))
    segments = packed(2, 20, 7, 6)
    there, here = (
        attention(Tensor(q), Tensor(k), Tensor(v), segments=s).data.get()
        for s in (cupy.asarray(segments), segments)
    )
    assert there.tobytes() == here.tobytes()


@emulated
@pytest.mark.usefixtures("without_pages")
def test_heads_of_more_elements_than_31_bits_count(monkeypatch):
    """The last 64 queries and keys of the last row of a batch, as if they were all."""
    B, T, H, D = 33, 1 << 17, 2, 256
    q, k, v, g = (endless((B, T, n, D), np.float32) for n in (H, 1, 1, H))
    small = heads(1, 64, 128, H, 1, D)
    for large, last in zip((q, k, v, g), small, strict=True):
        large._host[-1, -last.shape[1] :] = last[0]
    only = cupy.asarray(np.array([[B - 1, T - 64, 64, 0, T]])), False, True
    for name in ("_queries", "_keys"):
        monkeypatch.setattr(attention_gpu, name, lambda *args: only)
    found = cuda._function

    def function(source, name, real):
        run = found(source, name, real)
        if name != "find_delta":
            return run
        rest = 64 * H * 16 // cuda.THREADS  # blocks
        return lambda grid, *args: run(grid, *args, first=grid[0] - rest, blocks=rest)

    monkeypatch.setattr(cuda, "_function", function)
    rule = np.float32(0.1), True, None, 64, 0.0, None
    gpu = attention_forward(q, k, v, *rule)
    assert gpu[0].size > 1 << 31
    cpu = attention_forward(*small[:3], *rule)
    assert (gpu[0]._host[-1:, -64:] == cpu[0]).all()
    assert (gpu[1]._host[-1:, :, -64:] == cpu[1]).all()
    gpu = attention_backward(g, q, k, v, *gpu, *rule)
    cpu = attention_backward(small[3], *small[:3], *cpu, *rule)
    for a, b in zip(gpu, cpu, strict=True):
        assert (a._host[-1:, -64:] == b[:, -64:]).all()
