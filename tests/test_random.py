"""Random numbers: the stream is NumPy's, the distributions are what they say, keys name them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from afinar.autograd import Tensor, dropout, launch, random, set_num_threads
from afinar.autograd.launch import body, get_num_threads
from afinar.autograd.ops.dropout import drop_threshold, keep_64, keep_mask

KEY = random.make_key("test", 42, "layers.0.weight")
needs_jit = pytest.mark.skipif(not launch.JIT, reason="bodies run compiled")


def numpy_stream(key, n):
    return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(n)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 4095, 4096, 4097, 30_001])
def test_the_stream_is_numpys(n):
    for key in (KEY, bytes(16), b"\xff" * 16):
        assert (random.raw_words(key, n) == numpy_stream(key, n)).all()


@needs_jit
def test_any_word_and_any_four_words_from_inside_a_body():
    @body
    def draw(i, key0, key1, one, four):
        one[i] = random.philox_word(key0, key1, i)
        four[i, 0], four[i, 1], four[i, 2], four[i, 3] = random.philox(key0, key1, i)

    one, four = np.empty(40, np.uint64), np.empty((40, 4), np.uint64)
    draw(40, *random.key_words(KEY), one, four)
    assert (one == numpy_stream(KEY, 40)).all()
    assert (four == numpy_stream(KEY, 160).reshape(40, 4)).all()


def test_uniform_is_the_top_24_bits_of_each_word():
    u = (numpy_stream(KEY, 5000) >> np.uint64(40)) / 2.0**24
    assert (random.uniform(KEY, (5000,)) == u.astype(np.float32)).all()
    x = random.uniform(KEY, (50, 100), -2.0, 6.0)
    assert x.shape == (50, 100)
    assert (x.reshape(-1) == (-2 + 8 * u).astype(np.float32)).all()


def test_normal_is_box_and_muller():
    """Rounded once from float64: beside libm's functions a rare last bit may differ."""
    u = ((numpy_stream(KEY, 10_000) >> np.uint64(11)).astype(np.float64) / 2.0**53).reshape(-1, 2)
    r, angle = np.sqrt(-2 * np.log(u[:, 0] + 2.0**-53)), 2 * np.pi * u[:, 1]
    z = np.stack([r * np.cos(angle), r * np.sin(angle)], axis=1).reshape(-1) * 0.02
    x = random.normal(KEY, (10_000,), 0.02)
    np.testing.assert_array_max_ulp(x, z.astype(np.float32), maxulp=1)
    assert (x == z.astype(np.float32)).mean() > 0.999
    assert (random.normal(KEY, (9_999,), 0.02) == x[:-1]).all()


def test_initial_weights_look_as_they_should():
    for name in ("w_q", "w_k", "embed_tokens"):
        x = random.normal(random.make_key("init", 42, name), (100, 100), 0.02).reshape(-1)
        assert abs(x.mean()) < 0.005
        assert abs(x.std() - 0.02) < 0.005
        centred = x - x.mean()
        assert abs((centred[1:] * centred[:-1]).mean() / x.var()) < 0.1
        assert abs((centred**3).mean() / x.std() ** 3) < 0.1  # as many left as right
        assert abs((centred**4).mean() / x.var() ** 2 - 3) < 0.2
        assert 0.67 < (abs(x) < 0.02).mean() < 0.70  # within one standard deviation: 0.6827


def test_uniform_fills_its_range_evenly():
    counts = np.histogram(random.uniform(KEY, (100_000,)), bins=20, range=(0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # chi squared, 19 degrees, p = 0.001


def test_a_permutation_is_one():
    for n in (0, 1, 2, 1000):
        assert (np.sort(random.permutation(KEY, n)) == np.arange(n)).all()
    orders = {tuple(random.permutation(random.make_key("p", s), 3)) for s in range(100)}
    assert len(orders) == 6
    assert (random.permutation(KEY, 1000) != np.arange(1000)).mean() > 0.98


def test_keys_differ_in_every_part():
    parts = ("init", 42, "name", 0, 1, 2)
    keys = {random.make_key(*parts)}
    keys |= {random.make_key(*parts[:n], 9, *parts[n + 1 :]) for n in range(1, 6)}
    keys |= {random.make_key("other", *parts[1:]), random.make_key(*parts[:5])}
    assert len(keys) == 8
    assert all(len(k) == 16 for k in keys)
    assert random.make_key(*parts) == random.make_key(*parts)


def test_the_key_of_the_contract():
    """SHA-256 over the JSON list, computed beside us: it must never change."""
    import hashlib

    text = b'["init", 42, "layers.0.weight"]'
    assert random.make_key("init", 42, "layers.0.weight") == hashlib.sha256(text).digest()[:16]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: random.uniform(b"short", (3,)), "16 bytes of make_key"),
        (lambda: random.normal(KEY, (3, -1)), "no side may be negative"),
        (lambda: random.normal(KEY, (3,), -1.0), "std must not be negative"),
        (lambda: random.uniform(KEY, (3,), 2.0, 1.0), "low <= high"),
        (lambda: dropout(Tensor([1.0]), p=1.0, key=KEY), r"p must be in \[0, 1\), not 1"),
        (lambda: dropout(Tensor([1.0]), p=0.5, key=None), "16 bytes of make_key"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


# --- dropout -------------------------------------------------------------------------------


def test_an_element_is_kept_by_its_own_32_bits():
    words = numpy_stream(KEY, 501)
    halves = [int(w) >> shift & 0xFFFFFFFF for w in words for shift in (0, 32)][:1001]
    kept = keep_mask((7, 143), 0.3, KEY, np.float32).reshape(-1)
    for half, scale in zip(halves, kept, strict=True):
        assert scale == (np.float32(1 / 0.7) if half >= round(0.3 * 2**32) else 0)


def test_dropout_keeps_what_it_should_and_scales_it():
    x = Tensor(np.full((300, 333), 2.0, np.float32), requires_grad=True)
    y = dropout(x, p=0.25, key=KEY)
    dropped = y.data == 0
    assert abs(dropped.mean() - 0.25) < 0.01
    assert (y.data[~dropped] == np.float32(2) * np.float32(1 / 0.75)).all()
    y.backward(np.ones(x.shape))
    assert ((x.grad == 0) == dropped).all()
    assert (x.grad[~dropped] == np.float32(1 / 0.75)).all()


def test_dropout_is_a_function_of_its_key():
    x = Tensor(np.ones(1000))
    first = dropout(x, p=0.5, key=KEY).data
    assert (dropout(x, p=0.5, key=KEY).data == first).all()
    other = dropout(x, p=0.5, key=random.make_key("other", 1)).data
    assert 0.4 < (other != first).mean() < 0.6
    assert dropout(x, p=0.0, key=KEY).data is x.data


def test_a_dropped_element_is_zero_whatever_it_was():
    x = np.full(64, np.nan, np.float32)
    y = dropout(Tensor(x), p=0.5, key=KEY).data
    assert (np.isnan(y) == (keep_mask((64,), 0.5, KEY, np.float32) != 0)).all()
    assert (y[~np.isnan(y)] == 0).all()


@needs_jit
def test_a_tile_row_of_attention_draws_the_same_mask():
    @body
    def draw(i, key0, key1, threshold, out):
        out[i] = keep_64(key0, key1, 3 + i, threshold)

    bits = np.empty(100, np.uint64)
    draw(100, *random.key_words(KEY), drop_threshold(0.3), bits)
    kept = keep_mask((200,), 0.3, KEY, np.float32) != 0
    for i in range(100):
        assert [int(bits[i]) >> j & 1 for j in range(64)] == kept[3 + i : 67 + i].tolist()


# --- bits ----------------------------------------------------------------------------------


@needs_jit
def test_threads_do_not_matter():
    def everything():
        return b"".join(
            a.tobytes()
            for a in (
                random.raw_words(KEY, 20_001),
                random.uniform(KEY, (20_001,), -1, 1),
                random.normal(KEY, (20_001,)),
                dropout(Tensor(np.arange(50_001.0)), p=0.1, key=KEY).data,
            )
        )

    before = get_num_threads()
    try:
        results = []
        for n in range(1, before + 1):
            set_num_threads(n)
            results.append(everything())
    finally:
        set_num_threads(before)
    assert len(set(results)) == 1


@needs_jit
def test_vector_width_and_threads_do_not_matter():
    program = Path(__file__).parent / "bits" / "draws.py"
    outputs = set()
    for env in (
        {"AFINAR_VECTOR_WIDTH": "4", "NUMBA_NUM_THREADS": "1"},
        {"AFINAR_VECTOR_WIDTH": "8", "NUMBA_NUM_THREADS": "2"},
        {"AFINAR_VECTOR_WIDTH": "16", "NUMBA_NUM_THREADS": "2"},
    ):
        done = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, env=os.environ | env
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1
