"""Rotary positions: values, layouts, tables and their scaling."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import Tensor, rope, rope_table
from afinar.autograd.ops.rope import rope_frequencies
from afinar.autograd.testing import gradcheck

F32, F64 = np.float32, np.float64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def turned(x, positions, theta=10000.0):
    """Pairs as complex numbers, times e**(i angle)."""
    half = x.shape[-1] // 2
    angle = positions[..., None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[..., None, :]
    return np.concatenate([z.real, z.imag], axis=-1)


sides = st.integers(0, 5)


@given(sides, sides, sides, st.integers(1, 40), st.booleans(), st.sampled_from([F32, F64]))
def test_pairs_turn_by_their_angle(B, T, H, half, per_sequence, dtype):
    x = draw(B, T, H, 2 * half).astype(dtype)
    shape = (B, T) if per_sequence else (T,)
    positions = np.random.default_rng(0).integers(0, 4000, shape)
    out = rope(x, *rope_table(positions, 2 * half))
    assert out.dtype == dtype
    np.testing.assert_allclose(out.data, turned(x.astype(F64), positions), atol=2e-6)


def test_gradients():
    angle = draw(2, 3, 5)
    gradcheck(rope, draw(2, 3, 4, 10), np.cos(angle), np.sin(angle))
    gradcheck(rope, draw(2, 3, 4, 10), np.cos(angle[0]), np.sin(angle[0]))


def test_any_strides_with_a_contiguous_last_axis():
    """As the projections leave them: heads of one matrix, sliced or transposed."""
    cos, sin = rope_table(np.arange(7), 34)
    fused = draw(2, 7, 5 * 34).astype(F32)
    for x in (
        fused[..., 34 : 4 * 34].reshape(2, 7, 3, 34),
        draw(2, 3, 7, 34).astype(F32).swapaxes(1, 2),
        draw(2, 7, 3, 68).astype(F32)[..., ::2],
        draw(4, 14, 3, 40).astype(F32)[::-2, ::2, :, 3:37],
    ):
        assert rope(x, cos, sin).data.tobytes() == rope(x.copy(), cos, sin).data.tobytes()


def test_the_dot_product_depends_on_the_distance_alone():
    q, k = draw(1, 1, 1, 16), draw(1, 1, 1, 16) + 1
    q, k = np.repeat(q, 9, axis=1), np.repeat(k, 9, axis=1)
    cos, sin = (a.astype(F64) for a in rope_table(np.arange(9), 16))
    dots = np.einsum(
        "btd,bsd->bts", rope(q, cos, sin).data[:, :, 0], rope(k, cos, sin).data[:, :, 0]
    )
    for distance in range(8):
        np.testing.assert_allclose(np.diagonal(dots[0], distance), dots[0, 0, distance], rtol=1e-6)


def test_the_layout_is_the_half_split_one():
    """Meta's interleaved layout gives the same scores after the usual permutation of weights."""
    D = 8
    q, k = draw(1, 5, 2, D), draw(1, 5, 2, D) + 1
    halves = np.concatenate([np.arange(0, D, 2), np.arange(1, D, 2)])

    def interleaved(x):
        angle = np.arange(5)[:, None] * 10000.0 ** (-np.arange(0, D, 2) / D)
        z = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, None]
        return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    table = rope_table(np.arange(5), D)
    ours = [rope(x[..., halves], *table).data for x in (q, k)]
    theirs = [interleaved(x) for x in (q, k)]
    scores = [np.einsum("bthd,bshd->bhts", a, b) for a, b in (ours, theirs)]
    np.testing.assert_allclose(*scores, atol=1e-6)


def test_wrong_shapes():
    cos, sin = rope_table(np.arange(4), 6)
    for x in (draw(2, 4, 3, 8), draw(2, 5, 3, 6), draw(2, 4, 3, 5), draw(4, 3, 6)):
        with pytest.raises(ValueError, match="rope: x"):
            rope(x, cos, sin)
    with pytest.raises(ValueError, match="rope: x"):
        rope(draw(2, 4, 3, 6), cos, sin[:2])


# --- tables -------------------------------------------------------------------------------------


def test_tables_are_rounded_once():
    mpmath = pytest.importorskip("mpmath")
    positions = np.array([[0, 1, 77], [511, 8191, 131071]])
    cos, sin = rope_table(positions, 6, 500000.0)
    assert cos.shape == sin.shape == (2, 3, 3)
    assert cos.dtype == sin.dtype == F32
    for at in np.ndindex(cos.shape):
        exponent = mpmath.mpf(-2 * at[2]) / 6
        angle = int(positions[at[:2]]) * mpmath.mpf(500000) ** exponent
        # 1e-10: the rounding of the angle itself in float64, at position 131071
        assert abs(float(cos[at]) - mpmath.cos(angle)) <= 2.0**-25 + 1e-10
        assert abs(float(sin[at]) - mpmath.sin(angle)) <= 2.0**-25 + 1e-10
    assert (cos[0, 0] == 1).all()
    assert (sin[0, 0] == 0).all()


def test_linear_scaling_divides_positions():
    plain, scaled = (
        rope_frequencies(8),
        rope_frequencies(8, scaling={"type": "linear", "factor": 4}),
    )
    np.testing.assert_array_equal(scaled, plain / 4)
    np.testing.assert_array_equal(rope_frequencies(8, scaling={"rope_type": "default"}), plain)


def test_llama_3_scaling():
    """Published values for theta 500000, head size 64, factor 32 over 8192 positions."""
    plain, scaled = rope_frequencies(64, 500000.0), rope_frequencies(64, 500000.0, LLAMA3)
    expected = {14: 3.2114460e-3, 15: 1.2905479e-3, 16: 4.2955680e-4}
    expected |= {17: 9.7082878e-5, 18: 1.9461638e-5, 31: 9.4183067e-8}
    for i, value in expected.items():
        assert abs(scaled[i] / value - 1) < 5e-8, i
    np.testing.assert_array_equal(scaled[:15], plain[:15])
    np.testing.assert_array_equal(scaled[18:], plain[18:] / 32)
    assert plain[15] == pytest.approx(2.1311195e-3, rel=5e-8)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn'"),
        ({"type": "dynamic"}, "'dynamic'"),
        ({"rope_type": "linear"}, "positive factor, given None"),
        ({"rope_type": "linear", "factor": 0}, "positive factor, given 0"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor above low_freq_factor"),
    ],
)
def test_unknown_scaling_is_an_error(scaling, message):
    with pytest.raises(ValueError, match=message):
        rope_table(np.arange(3), 8, scaling=scaling)


def test_frequencies_without_scaling():
    for D, theta in ((2, 10000.0), (64, 10000.0), (128, 1e6)):
        i = np.arange(D // 2)
        np.testing.assert_allclose(rope_frequencies(D, theta), theta ** (-2 * i / D), rtol=1e-14)
        assert rope_frequencies(D, theta)[0] == 1
    assert math.isclose(rope_frequencies(4, 100.0)[1], 0.1, rel_tol=1e-15)


@pytest.mark.parity
def test_tables_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch = pytest.importorskip("torch")
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0},
        max_position_embeddings=131072,
    )
    embedding = llama.LlamaRotaryEmbedding(config)
    np.testing.assert_allclose(
        embedding.inv_freq.numpy(), rope_frequencies(64, 500000.0, LLAMA3), rtol=1e-6
    )
    q = torch.tensor(draw(1, 2, 6, 64))
    cos, sin = embedding(q, torch.arange(6)[None])
    theirs, _ = llama.apply_rotary_pos_emb(q, q, cos, sin)
    x = Tensor(q.numpy().swapaxes(1, 2))
    ours = rope(x, *rope_table(np.arange(6), 64, 500000.0, LLAMA3))
    np.testing.assert_allclose(ours.data.swapaxes(1, 2), theirs.numpy(), atol=1e-5)
