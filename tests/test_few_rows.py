"""Products of few rows, and programs of bodies: the bits of what they stand for."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import get_num_threads, set_num_threads
from afinar.autograd.launch import JIT, body
from afinar.autograd.ops import few_rows
from afinar.autograd.ops.gemm import KC, gemm
from afinar.transformer import Transformer, TransformerConfig
from afinar.transformer.decode import DecodeStep, can_decode
from afinar.transformer.generate import KVCache

pytestmark = pytest.mark.skipif(not JIT, reason="these paths exist compiled only")


def by_the_contract(x, w, bias, residual):
    """Each sum a chain of correctly rounded fused multiply-adds, in blocks of KC.

    A product of two float32 numbers is exact in float64; so is adding a third in float80, but for
    sums so uneven that rounding twice cannot matter here: the inputs have 8 bits each.
    """
    out = np.empty((len(x), len(w)), np.float32)
    for m in range(len(x)):
        total = None
        for k0 in range(0, x.shape[1], KC):
            s = np.zeros(len(w), np.float32)
            for k in range(k0, min(x.shape[1], k0 + KC)):
                s = (x[m, k].astype(np.longdouble) * w[:, k] + s).astype(np.float32)
            total = s if total is None else total + s
        out[m] = total if bias is None else residual[m] + (total + bias)
    return out


def short(rng, *shape):
    """Random numbers that bfloat16 holds."""
    x = rng.normal(size=shape).astype(np.float32)
    return ((x.view(np.uint32) >> 16) << 16).view(np.float32)


def bits(x):
    return (x.view(np.uint32) >> 16).astype(np.uint16)


@given(
    st.integers(1, few_rows.FEW),
    st.integers(1, 130),
    st.sampled_from([1, 15, 16, 31, 33, 64, 511, 512, 513, 1100]),
    st.booleans(),
    st.integers(0, 99),
)
def test_few_rows_are_summed_by_the_contract(M, N, K, added, seed):
    rng = np.random.default_rng(seed)
    x, w = short(rng, M, K), short(rng, N, K)
    bias, residual = (short(rng, N), short(rng, M, N)) if added else (None, None)
    want = by_the_contract(x, w, bias, residual)
    for weight in (w, bits(w)):
        out = np.empty((M, N), np.float32)
        few_rows.few_rows(x, weight, bias, residual, out, KC)
        np.testing.assert_array_equal(out, want)


def test_a_row_has_the_bits_that_it_has_among_many():
    rng = np.random.default_rng(0)
    x, w = short(rng, 40, 600), short(rng, 200, 600)
    for weight in (w, bits(w)):
        many = gemm(x, weight, False, True)
        for M in (1, few_rows.FEW, few_rows.FEW + 1):
            np.testing.assert_array_equal(gemm(x[:M].copy(), weight, False, True), many[:M])


# --- programs ------------------------------------------------------------------------------


@body
def _next(i, x, out):
    out[i] = x[i] * 3 + x[(i + 1) % x.size]


def test_a_program_does_what_its_calls_do_one_by_one():
    from afinar.autograd.program import Program

    xs = [np.arange(50, dtype=np.int64), *(np.zeros(50, np.int64) for _ in range(60))]
    program = Program()
    for a, b in itertools.pairwise(xs):
        program.add(_next, 50, a, b)
    program.finish()
    want = xs[0]
    for _ in range(60):
        want = want * 3 + np.roll(want, -1)
    threads = get_num_threads()
    try:
        for n in range(1, threads + 1):
            set_num_threads(n)
            for _ in range(20):
                xs[-1][:] = 0
                program.run()
                np.testing.assert_array_equal(xs[-1], want)
    finally:
        set_num_threads(threads)


CONFIG = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "vocab_size": 90,
    "max_position_embeddings": 200,
}


@pytest.mark.parametrize(
    ("more", "stored"),
    [
        ({}, "float32"),
        ({"qk_norm": True, "sliding_window": 30}, "float32"),
        ({"attention_bias": True, "o_bias": True, "mlp_bias": True}, "bfloat16"),
    ],
    ids=["plain", "qk-norm", "biases"],
)
@pytest.mark.parametrize("B", [1, 3])
def test_a_step_of_decoding_has_the_bits_of_the_full_pass(more, stored, B):
    from afinar.autograd import no_grad

    model = Transformer(TransformerConfig(**CONFIG, **more), seed=1)
    rng = np.random.default_rng(0)
    for p in model.parameters():
        p.data = p.data + rng.normal(0, 0.2, p.shape).astype(np.float32)
        if stored == "bfloat16" and p.ndim > 1:
            p.requires_grad = False
            p.data = bits(p.data)
    starts = np.arange(B) * 5
    ids = rng.integers(0, 90, (B, 80))
    segments = np.where(np.arange(80) >= starts[:, None], 0, -1)
    with no_grad():
        full = model(ids, segments=segments).numpy()
        cache = KVCache(model, B, 80)
        model(ids[:, :12], segments=segments[:, :12], cache=cache)
        assert can_decode(model, B)
        step = DecodeStep(model, cache, starts)
        for t in range(12, 80):
            np.testing.assert_array_equal(step(ids[:, t]), full[:, t])


def test_what_is_not_plain_is_left_to_the_model():
    model = Transformer(TransformerConfig(**CONFIG))
    assert can_decode(model, 1)
    assert not can_decode(model, few_rows.FEW + 1)
    assert not can_decode(Transformer(TransformerConfig(**(CONFIG | {"head_dim": 20}))), 1)

    class Wrapped(type(model.lm_head)):
        pass

    model.set_module("lm_head", Wrapped(48, 90, bias=False))
    assert not can_decode(model, 1)
