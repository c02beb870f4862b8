"""Attention against a dense computation of its own, against PyTorch, and at its edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import Tensor, attention, launch
from afinar.autograd import buffers as memory
from afinar.autograd.ops.gemm import widen
from afinar.autograd.ops.rounding import in_precision
from afinar.autograd.precision import compute_in
from afinar.autograd.random import make_key
from afinar.autograd.testing import gradcheck, tolerance

KEY = make_key("test", 1)
# The reference stores its scores, and multiplies what is not seen by 0.
fast_body = pytest.mark.skipif(not launch.JIT, reason="the reference body promises less")


def seen(b, t, s, T, S, causal, window, segments):
    p = t + S - T
    return (
        (not causal or s <= p)
        and (window is None or p - s < window)
        and (segments is None or segments[b, s] == segments[b, p] >= 0)
    )


def dense(q, k, v, g, causal=True, window=None, segments=None, scale=None, keep=None):
    """out, dq, dk, dv in float64, one query at a time, from the definition."""
    q, k, v, g = (x.astype(np.float64) for x in (q, k, v, g))
    (B, T, H, D), (S, G) = q.shape, k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, t, h in np.ndindex(B, T, H):
        kv = h // (H // G)
        keys = [s for s in range(S) if seen(b, t, s, T, S, causal, window, segments)]
        if not keys:
            continue
        e = np.exp(scale * (k[b, keys, kv] @ q[b, t, h]))
        p = e / e.sum()
        kept = np.ones(len(keys)) if keep is None else keep[b, h, t, keys]
        out[b, t, h] = (p * kept) @ v[b, keys, kv]
        dp = kept * (v[b, keys, kv] @ g[b, t, h])
        ds = p * (dp - p @ dp) * scale  # the Jacobian of softmax
        dq[b, t, h] = ds @ k[b, keys, kv]
        dk[b, keys, kv] += np.outer(ds, q[b, t, h])
        dv[b, keys, kv] += np.outer(p * kept, g[b, t, h])
    return out, dq, dk, dv


def ours(q, k, v, g, **options):
    leaves = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    out = attention(*leaves, **options)
    out.backward(g)
    return out.data, *(x.grad for x in leaves)


def draw_arrays(seed, B, T, S, H, G, D, dtype):
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, D), (B, S, G, D), (B, S, G, D), (B, T, H, D)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def assert_close(found, expected, dtype):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert a.shape == b.shape
        error = np.abs(a - b).max(initial=0) / np.abs(b).max(initial=1)
        assert error <= tolerance(dtype)


@st.composite
def cases(draw):
    G, R = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    S = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 100, 129]))
    T = draw(st.sampled_from([1, S, draw(st.integers(1, S))]))
    B, D = draw(st.integers(1, 3)), draw(st.sampled_from([1, 4, 16, 33, 64]))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, S + 3)),
        "scale": draw(st.none() | st.just(0.2)),
    }
    seed = draw(st.integers(0, 2**32 - 1))
    if draw(st.booleans()):
        segments = np.random.default_rng(seed).integers(-1, 3, (B, S))
        # Documents one after the other, or names that come again after others.
        options["segments"] = np.sort(segments, axis=1) if draw(st.booleans()) else segments
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return draw_arrays(seed, B, T, S, G * R, G, D, dtype), options, dtype


@given(cases())
def test_out_and_gradients_are_those_of_the_dense_formula(case):
    arrays, options, dtype = case
    assert_close(ours(*arrays, **options), dense(*arrays, **options), dtype)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_that_are_cut_into_chunks(causal, window):
    arrays = draw_arrays(0, 1, 1100, 1200, 2, 1, 8, np.float32)
    options = {"causal": causal, "window": window}
    assert_close(ours(*arrays, **options), dense(*arrays, **options), np.float32)


@pytest.mark.parametrize("options", [{}, {"causal": False, "window": 3}, {"dropout": 0.3}])
def test_gradients_by_finite_differences(options):
    if "dropout" in options:
        options = {**options, "key": KEY}
    q, k, v, _ = draw_arrays(1, 2, 5, 7, 4, 2, 3, np.float64)
    gradcheck(lambda *x: attention(*x, **options), q, k, v)


@pytest.mark.parametrize("T", [1, 70])
def test_dropout_zeroes_some_probabilities_and_scales_the_rest(T):
    B, S, H, G, p = 2, 70, 4, 2, 0.25
    arrays = draw_arrays(2, B, T, S, H, G, 8, np.float64)
    # The mask, seen from outside: v is the identity, so the output is the probabilities.
    q, k = arrays[0], arrays[1]
    eye = np.broadcast_to(np.eye(S)[None, :, None], (B, S, G, S))
    wide = [np.concatenate([x, np.zeros((*x.shape[:3], S - 8))], axis=3) for x in (q, k)]
    plain = attention(*wide, eye, scale=0.3).numpy()
    dropped = attention(*wide, eye, scale=0.3, dropout=p, key=KEY).numpy()
    keep = np.where(dropped != 0, 1 / (1 - p), 0)  # (B, T, H, S)
    np.testing.assert_allclose(dropped, plain * keep, rtol=1e-12)
    counted = np.where(plain != 0)
    assert abs(keep[counted].mean() - 1) < 0.1
    expected = dense(*arrays, scale=0.3, keep=keep.swapaxes(1, 2))
    assert_close(ours(*arrays, scale=0.3, dropout=p, key=KEY), expected, np.float64)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    arrays = draw_arrays(3, 2, 6, 6, 2, 2, 4, np.float32)
    segments = np.array([[-1, -1, 0, 0, 0, 1], [-1] * 6])
    out, dq, dk, dv = ours(*arrays, segments=segments)
    for x in (out, dq, dk, dv):
        assert not x[0, :2].any()
        assert not x[1].any()
    assert out[0, 2:].all()
    for x in ours(*arrays, segments=np.full((2, 6), -3)):
        assert not x.any()
    # More queries than keys: the first ones come before every key.
    out, *_ = ours(*draw_arrays(3, 1, 6, 4, 2, 2, 4, np.float32))
    assert not out[0, :2].any()
    assert out[0, 2:].all()


@fast_body
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_seen_has_no_effect_even_if_it_is_not_a_number(bad):
    B, S = 1, 100
    q, k, v, g = draw_arrays(4, B, S, S, 2, 1, 16, np.float32)
    segments = np.zeros((B, S), np.int64)
    segments[:, :3] = -1
    clean = ours(q, k, v, g, segments=segments)
    k[:, :3], v[:, :3], q[:, :3] = bad, bad, bad
    for a, b in zip(ours(q, k, v, g, segments=segments), clean, strict=True):
        assert np.array_equal(a, b)
    # The future of a query is as invisible.
    k[:, 60:], v[:, 60:] = bad, bad
    out = attention(q, k, v, segments=segments).numpy()
    assert np.array_equal(out[:, :60], clean[0][:, :60])


@fast_body
def test_nan_and_infinity_in_what_is_seen_come_through():
    q, k, v, _ = draw_arrays(5, 1, 70, 70, 1, 1, 8, np.float32)
    v[0, 66, 0, 2] = np.inf
    out = attention(q, k, v).numpy()
    assert np.isfinite(out[0, :66]).all()
    assert np.isposinf(out[0, 66:, 0, 2]).all()
    k[0, 67, 0, 0] = np.nan
    assert np.isnan(attention(q, k, v).numpy()[0, 67:]).all()


def test_scores_far_beyond_the_range_of_exp():
    q, k, v, _ = draw_arrays(6, 1, 65, 65, 1, 1, 4, np.float32)
    out = attention(q * 1e4, k, v, scale=1.0).numpy()
    best = np.where(np.tril(np.ones((65, 65))), q[0, :, 0] @ k[0, :, 0].T, -np.inf).argmax(axis=1)
    np.testing.assert_allclose(out[0, :, 0], v[0, best, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("B", "T", "S"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)]
)  # fmt: skip
def test_empty_axes(B, T, S):
    arrays = draw_arrays(7, B, T, S, 4, 2, 8, np.float32)
    for a, b in zip(ours(*arrays), (arrays[0], *arrays[:3]), strict=True):
        assert a.shape == b.shape
        assert not a.any()


@fast_body
def test_projections_are_read_where_they_lie():
    B, T, H, G, D = 2, 70, 4, 2, 32
    rng = np.random.default_rng(8)
    qkv = rng.standard_normal((B, T, (H + 2 * G) * D), dtype=np.float32)
    q, k, v = np.split(qkv, [H * D, (H + G) * D], axis=2)
    q, k, v = (x.reshape(B, T, -1, D) for x in (q, k, v))
    assert not q.flags.c_contiguous
    g = rng.standard_normal(q.shape, dtype=np.float32)
    expected = ours(*(x.copy() for x in (q, k, v)), g)
    for a, b in zip(ours(q, k, v, g), expected, strict=True):
        assert np.array_equal(a, b)
    across = np.ascontiguousarray(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    for a, b in zip(ours(across, k, v, g), expected, strict=True):
        assert np.array_equal(a, b)


@fast_body
def test_memory_grows_with_the_length_not_with_its_square():
    def peak(T):
        arrays = draw_arrays(9, 1, T, T, 4, 2, 32, np.float32)
        memory.trim()
        memory.reset_peak()
        before = memory.in_use()
        ours(*arrays)
        return memory.peak() - before

    assert peak(4096) < 2.2 * peak(2048)
    assert peak(4096) < 4096 * 4096


def test_errors_say_what_was_given():
    q, k, v, _ = draw_arrays(10, 2, 3, 5, 4, 2, 8, np.float32)
    for arrays, options, error, words in (
        ((q[0], k, v), {}, ValueError, r"q \(B, T, H, D\).*given q \(3, 4, 8\)"),
        ((q, k, v[:, :4]), {}, ValueError, r"v \(2, 4, 2, 8\)"),
        ((q[..., :7], k, v), {}, ValueError, r"q \(2, 3, 4, 7\)"),
        ((q[:, :, :3], k, v), {}, ValueError, "3 query heads must be a multiple of the 2"),
        ((q, k.astype(np.float64), v), {}, TypeError, "float32, float64 and float32"),
        ((q.astype(int), k.astype(int), v.astype(int)), {}, TypeError, "given int64"),
        ((q, k, v), {"segments": np.zeros((2, 3), int)}, ValueError, r"shape \(2, 5\)"),
        ((q, k, v), {"segments": np.zeros((2, 5))}, ValueError, "integers.*float64"),
        ((q, k[:, :2], v[:, :2]), {"segments": np.zeros((2, 2), int)}, ValueError, "3 queries"),
        ((q, k, v), {"window": 0}, ValueError, "window must be a positive integer"),
        ((q, k, v), {"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), given 1.0"),
        ((q, k, v), {"dropout": 0.1}, TypeError, "key"),
    ):
        with pytest.raises(error, match=words):
            attention(*arrays, **options)


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_16_bit_modes_round_what_goes_in_and_keep_it_so(mode):
    q, k, v, g = draw_arrays(12, 2, 70, 70, 4, 2, 32, np.float32)
    q[0, 0, 0, :3] = 1e-6, 3e-8, 0  # subnormal in float16
    rounded = [widen(in_precision(x, mode)) for x in (q, k, v)]
    assert not np.array_equal(rounded[0], q)
    with compute_in(mode):
        leaves = [Tensor(x, requires_grad=True) for x in (q, k, v)]
        out = attention(*leaves)
    cells = [c.cell_contents for c in out.node.vjp.__closure__]
    assert all(a.itemsize == 2 for a in cells if isinstance(a, np.ndarray) and a.ndim == 4)
    out.backward(g)
    found = out.data, *(x.grad for x in leaves)
    expected = ours(*rounded, g)
    if launch.JIT:
        assert np.array_equal(found[0], expected[0])
        assert np.array_equal(found[3], expected[3])  # dv does not read out
    assert_close(found[:1], expected[:1], np.float32)
    for a, b in zip(found[1:], expected[1:], strict=True):  # they read out, which is rounded
        assert np.abs(a - b).max() < 0.01 * np.abs(b).max()


@pytest.mark.parity
@pytest.mark.parametrize(("T", "S"), [(80, 80), (3, 80)])
def test_pytorch_computes_the_same(T, S):
    torch = pytest.importorskip("torch")
    arrays = draw_arrays(11, 2, T, S, 6, 2, 64, np.float32)
    q, k, v, g = (torch.tensor(x).transpose(1, 2) for x in arrays)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    out.backward(g)
    expected = [x.transpose(1, 2).detach().numpy() for x in (out, *(x.grad for x in leaves))]
    assert_close(ours(*arrays), expected, np.float32)
