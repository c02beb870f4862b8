"""Bits of attention: the stated order of sums, and that company never changes a sequence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import Tensor, attention, get_num_threads, launch, set_num_threads
from afinar.autograd.launch import body
from afinar.autograd.mathf import exp_flushed, log
from afinar.autograd.ops import attention_plan

pytestmark = pytest.mark.skipif(not launch.JIT, reason="reference bodies promise no bits")


def run(q, k, v, g, **options):
    leaves = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    out = attention(*leaves, **options)
    out.backward(g)
    return out.data, *(x.grad for x in leaves)


def draw_arrays(seed, B, T, S, H=4, G=2, D=32, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, D), (B, T, H, D)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert np.array_equal(a, b)


# --- the order that ops/attention.py states, followed in NumPy -------------------------------


@body
def _exp(i, x, out):
    out[i] = exp_flushed(x[i])


@body
def _log(i, x, out):
    out[i] = log(x[i])


def elementary(function, x):
    x = np.atleast_1d(np.ascontiguousarray(x))
    out = np.empty_like(x)
    function(x.size, x.reshape(-1), out.reshape(-1))
    return out


def fma(x, y, z):
    # The product of two float32 is exact in float64; that the sum is rounded twice matters
    # about once in 2**29.
    return (x.astype(np.float64) * y + z).astype(np.float32)


def chain(x, y):
    """fma over the last axis of x and y, ascending from 0."""
    start = np.float32(0)
    for n in range(x.shape[-1]):
        start = fma(x[..., n], y[..., n], start)
    return start


def lane_sum(x, y=None):
    """16 lanes, then +8, +4, +2, +1; with y a sum of products by fma."""
    lanes = np.zeros(16, np.float32)
    for n in range(0, len(x), 16):
        part = x[n : n + 16]
        lanes[: len(part)] = (
            lanes[: len(part)] + part if y is None else fma(part, y[n : n + 16], lanes[: len(part)])
        )
    for step in (8, 4, 2, 1):
        lanes[:step] = lanes[:step] + lanes[step : 2 * step]
    return lanes[0]


def stated(q, k, v, g, scale, window):
    """One head, one segment: out, dq, dk, dv in the order of the contract."""
    (T, D), S = q.shape, len(k)
    qs = q * scale
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for t in range(T):
        p = t + S - T
        low, high = max(0, p - window + 1), p + 1
        s = chain(qs[t], k[low:high])
        m, total, o = np.float32(-np.inf), np.float32(0), np.zeros(D, np.float32)
        for first in range(low // 64 * 64, high, 64):
            a, b = max(first, low), min(first + 64, high)
            top = max(m, s[a - low : b - low].max())
            shrink = elementary(_exp, m - top)[0]
            e = np.zeros(64, np.float32)
            e[a - first : b - first] = elementary(_exp, s[a - low : b - low] - top)
            total, m = fma(total, shrink, lane_sum(e)), top
            o = o * shrink
            for j in range(a, b):
                o = fma(e[j - first], v[j], o)
        out[t] = o * (np.float32(1) / total)
        e = elementary(_exp, s - (m + elementary(_log, total)[0]))
        ds = e * (chain(g[t], v[low:high]) - lane_sum(g[t], out[t]))
        for j in range(low, high):
            dq[t] = fma(ds[j - low], k[j], dq[t])
            dk[j] = fma(ds[j - low], qs[t], dk[j])
            dv[j] = fma(e[j - low], g[t], dv[j])
    return out, dq * scale, dk, dv


@pytest.mark.parametrize(("T", "S", "window"), [(150, 150, 999), (90, 150, 999), (130, 200, 70)])
def test_the_stated_order_is_the_one_that_is_followed(T, S, window):
    H, G, D = 2, 1, 20
    q, k, v, g = draw_arrays(0, 1, T, S, H, G, D)
    scale = np.float32(D**-0.5)
    out, dq, dk, dv = run(q, k, v, g, window=window)
    heads = [stated(q[0, :, h], k[0, :, 0], v[0, :, 0], g[0, :, h], scale, window) for h in (0, 1)]
    for h, (o, x, _, _) in enumerate(heads):
        assert np.array_equal(out[0, :, h], o)
        assert np.array_equal(dq[0, :, h], x)
    assert np.array_equal(dk[0, :, 0], heads[0][2] + heads[1][2])
    assert np.array_equal(dv[0, :, 0], heads[0][3] + heads[1][3])


# --- company -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("T", [1, 64, 150, 700])
def test_a_sequence_alone_is_as_in_a_batch(T, window, dtype):
    arrays = draw_arrays(1, 3, T, T, dtype=dtype)
    whole = run(*arrays, window=window)
    for b in range(3):
        alone = run(*(x[b : b + 1] for x in arrays), window=window)
        assert_same(alone, (x[b : b + 1] for x in whole))


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    pad=st.integers(0, 70),
    window=st.none() | st.integers(1, 150),
)
def test_a_packed_or_padded_sequence_is_as_alone(lengths, pad, window):
    S = pad + sum(lengths) + pad // 2
    arrays = draw_arrays(sum(lengths), 1, S, S)
    segments = np.full((1, S), -1)
    places, start = [], pad
    for n, length in enumerate(lengths):
        places.append(slice(start, start + length))
        segments[0, places[-1]] = 7 * n
        start += length
    packed = run(*arrays, segments=segments, window=window)
    for place in places:
        alone = run(*(x[:, place] for x in arrays), window=window)
        assert_same(alone, (x[:, place] for x in packed))


@given(
    S=st.integers(1, 260),
    cuts=st.sets(st.integers(1, 259), max_size=4),
    window=st.none() | st.integers(1, 100),
    causal=st.booleans(),
)
def test_with_a_cache_in_pieces_or_at_once(S, cuts, window, causal):
    q, k, v, _ = draw_arrays(S, 2, S, S)
    at_once = attention(q, k, v, window=window).numpy()
    ends = [*sorted(c for c in cuts if c < S), S]
    for start, end in zip([0, *ends], ends, strict=False):
        piece = attention(q[:, start:end], k[:, :end], v[:, :end], window=window).numpy()
        assert np.array_equal(piece, at_once[:, start:end])
    if not causal and window is None:  # every query sees everything, whoever else asks
        at_once = attention(q, k, v, causal=False).numpy()
        assert np.array_equal(attention(q[:, -1:], k, v, causal=False).numpy(), at_once[:, -1:])


def test_one_token_at_a_time():
    S = 140
    q, k, v, _ = draw_arrays(2, 1, S, S)
    at_once = attention(q, k, v).numpy()
    segments = np.where(np.arange(S) < 9, -1, 0)[None]
    padded = attention(q, k, v, segments=segments).numpy()
    for t in range(S):
        one = [q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1]]
        assert np.array_equal(attention(*one).numpy(), at_once[:, t : t + 1])
        one = attention(*one, segments=segments[:, : t + 1]).numpy()
        assert np.array_equal(one, padded[:, t : t + 1])


@pytest.mark.skipif(get_num_threads() < 2, reason="one thread only")
@pytest.mark.parametrize(
    ("B", "T", "H", "G"), [(1, 700, 4, 2), (2, 64, 6, 2), (4, 130, 8, 4)]
)  # fmt: skip
def test_threads_and_how_the_work_is_cut_change_nothing(B, T, H, G):
    # Heads are summed at the end or one after the other, as the threads need.
    arrays = draw_arrays(3, B, T, T, H, G)
    before = get_num_threads()
    try:
        set_num_threads(1)
        one = run(*arrays)
        set_num_threads(2)
        two = run(*arrays)
    finally:
        set_num_threads(before)
    assert_same(one, two)


@pytest.mark.parametrize("window", [None, 100])
def test_small_chunks_in_many_waves_change_nothing(monkeypatch, window):
    arrays = draw_arrays(5, 2, 300, 300)
    segments = np.sort(np.random.default_rng(5).integers(-1, 2, (2, 300)), axis=1)
    whole = run(*arrays, window=window, segments=segments)
    monkeypatch.setattr(attention_plan, "ROWS", 64)
    assert_same(run(*arrays, window=window, segments=segments), whole)


def test_dropout_is_drawn_again_the_same():
    arrays = draw_arrays(4, 2, 100, 100)
    options = {"dropout": 0.3, "key": b"sixteen bytes!!!"}
    assert_same(run(*arrays, **options), run(*arrays, **options))
