"""The engine's elementary functions, against mpmath, at their extremes, and as bits."""

import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import launch, mathf
from afinar.autograd.lanes import fma, load, row_dot, row_max, row_sum, store

if not launch.JIT:
    pytest.skip("mathf runs inside compiled bodies", allow_module_level=True)

F32, F64 = np.float32, np.float64
NAN, INF = math.nan, math.inf


def one_by_one(function):
    @launch.body
    def run(i, x, out):
        for n in range(x.size):
            out[n] = function(x[n])

    return run


def in_lanes(function):
    @launch.body
    def run(i, x, out):
        for n in range(0, x.size, 16):
            store(out, n, function(load(x, n)))

    return run


NAMES = ("exp", "exp_flushed", "log", "tanh", "sigmoid", "erf", "sqrt", "sin", "cos")
ONE_BY_ONE = {name: one_by_one(getattr(mathf, name)) for name in NAMES}
IN_LANES = {name: in_lanes(getattr(mathf, name)) for name in NAMES if name not in ("sin", "cos")}


def apply(name, x, bodies=ONE_BY_ONE):
    x = np.ascontiguousarray(x)
    out = np.empty_like(x)
    bodies[name](1, x, out)
    return out


def grid(name, dtype):
    """Points all over the domain, denser where the function bends."""
    rng = np.random.default_rng(0)
    near, wide = rng.standard_normal(1000), rng.uniform(-30, 30, 500)
    tiny = np.exp(rng.uniform(-30, 0, 500)) * rng.choice([-1, 1], 500)
    if name == "log":
        far = np.exp(rng.uniform(*((-80, 80) if dtype == F32 else (-700, 700)), 1000))
        return np.concatenate([np.exp(near / 3), far]).astype(dtype)
    if name == "exp":
        wide = rng.uniform(*((-86, 88) if dtype == F32 else (-700, 709)), 1000)
    if name in ("sin", "cos"):
        wide = rng.uniform(-2e5, 2e5, 1000)
    return np.concatenate([near, wide, tiny]).astype(dtype)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    ("name", "in_f32", "in_f64"),
    [
        ("exp", 1.1, 1.1),
        ("log", 0.9, 0.9),
        ("tanh", 2.5, 2.5),
        ("sigmoid", 2.6, 2.6),
        ("erf", 1.1, 1.1),
        ("sin", 0.51, 1.6),
        ("cos", 0.51, 1.6),
    ],
)
def test_the_error_is_what_the_docstring_says(name, in_f32, in_f64, dtype):
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.prec = 120
    exact = {"sigmoid": lambda x: 1 / (1 + mpmath.exp(-x))}.get(name, getattr(mpmath, name, None))
    x = grid(name, dtype)
    for a, got in zip(x, apply(name, x), strict=True):
        true = exact(mpmath.mpf(float(a)))
        ulp = mpmath.mpf(float(np.spacing(np.abs(dtype(float(true))))))
        error = abs(mpmath.mpf(float(got)) - true) / ulp
        assert error <= (in_f32 if dtype == F32 else in_f64), f"{name}({a!r}) is off by {error} ulp"


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("exp", (0.0, -0.0, INF, -INF, NAN, 1e6, -1e6), (1.0, 1.0, INF, 0.0, NAN, INF, 0.0)),
        ("log", (1.0, 0.0, -0.0, INF, -INF, NAN, -1.0), (0.0, -INF, -INF, INF, NAN, NAN, NAN)),
        ("tanh", (0.0, -0.0, INF, -INF, NAN, 1e6), (0.0, -0.0, 1.0, -1.0, NAN, 1.0)),
        ("sigmoid", (0.0, INF, -INF, NAN, 1e6, -1e6), (0.5, 1.0, 0.0, NAN, 1.0, 0.0)),
        ("erf", (0.0, -0.0, INF, -INF, NAN, 1e6), (0.0, -0.0, 1.0, -1.0, NAN, 1.0)),
        ("sqrt", (0.0, -0.0, INF, NAN, -1.0, 4.0), (0.0, -0.0, INF, NAN, NAN, 2.0)),
        ("sin", (0.0, INF, -INF, NAN, 2.0**31), (0.0, NAN, NAN, NAN, NAN)),
        ("cos", (0.0, INF, -INF, NAN, 2.0**31), (1.0, NAN, NAN, NAN, NAN)),
    ],
)
def test_extremes(name, x, y, dtype):
    got, y = apply(name, np.array(x, dtype)), np.array(y, dtype)
    np.testing.assert_array_equal(got, y)
    ok = ~np.isnan(y)
    np.testing.assert_array_equal(np.signbit(got[ok]), np.signbit(y[ok]))


@pytest.mark.parametrize("dtype", [F32, F64])
def test_subnormal_numbers(dtype):
    info = np.finfo(dtype)
    x = info.smallest_subnormal * np.array([1, 2, 3, 1000, 12345], dtype)
    np.testing.assert_allclose(apply("log", x), np.log(x.astype(np.longdouble)).astype(dtype))
    low = np.log(x[3:].astype(np.longdouble)).astype(dtype)
    np.testing.assert_allclose(apply("exp", low), x[3:], rtol=2e-3)  # exp may end there too
    np.testing.assert_array_equal(apply("tanh", x), x)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_the_flushed_exponential(dtype):
    low = -87 if dtype == F32 else -708
    x = np.concatenate([np.linspace(low, 80, 5000), -np.logspace(-9, 0, 50)]).astype(dtype)
    assert apply("exp_flushed", x).tobytes() == apply("exp", x).tobytes()
    x = np.array([0.0, -0.0, low - 1, -1e30, -INF, NAN], dtype)
    np.testing.assert_array_equal(apply("exp_flushed", x), np.array([1, 1, 0, 0, 0, NAN], dtype))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", IN_LANES)
def test_lanes_have_the_bits_of_numbers(name, dtype):
    x = grid(name, dtype)
    x = np.concatenate([x, [0, -0.0, INF, 1e-310, 1e-40, 3e38]]).astype(dtype)
    x = x[: x.size // 16 * 16]
    assert apply(name, x).tobytes() == apply(name, x, IN_LANES).tobytes()


@launch.body
def _rows(i, x, y, out):
    out[0], out[1], out[2] = row_sum(x), row_dot(x, y), row_max(x)


@launch.body
def _fma(i, x, y, z, out):
    out[i] = fma(x[i], y[i], z[i])


def tree(lanes):
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return lanes[0]


def lanes_of(x):
    """Element i is added to lane i mod 16."""
    lanes = np.zeros(16, x.dtype)
    for i, v in enumerate(x):
        lanes[i % 16] += v
    return lanes


@given(st.integers(0, 70), st.sampled_from([F32, F64]), st.integers(0, 99))
def test_rows_are_summed_in_16_lanes_then_by_a_tree(n, dtype, seed):
    x, y = np.random.default_rng(seed).standard_normal((2, n)).astype(dtype)
    out = np.empty(3, dtype)
    _rows(1, x, y, out)
    assert out[0] == tree(lanes_of(x))
    lanes = np.zeros(16, dtype)
    for i in range(n):
        step = np.empty(1, dtype)
        _fma(1, x[i : i + 1], y[i : i + 1], lanes[i % 16 : i % 16 + 1], step)
        lanes[i % 16] = step[0]
    assert out[1] == tree(lanes)
    assert out[2] == x.max(initial=-np.inf)


def test_a_row_with_a_nan_has_no_maximum():
    for n in (1, 16, 20):
        for at in range(n):
            x = np.ones(n, F32)
            x[at] = NAN
            out = np.empty(3, F32)
            _rows(1, x, x, out)
            assert np.isnan(out).all()


def test_fma_rounds_once():
    x = F32(1 + 2.0**-12)
    out = np.empty(1, F32)
    _fma(1, np.array([x]), np.array([x]), np.array([F32(-1)]), out)
    assert out[0] == F32(2.0**-11 + 2.0**-24)  # the square alone would lose its last term


def test_functions_on_the_host():
    x = np.linspace(-3, 3, 5001)
    for name in ("exp", "sin", "cos"):
        host = getattr(mathf, f"host_{name}")
        np.testing.assert_allclose(host(x), getattr(np, name)(x), rtol=1e-15, atol=1e-15)
        assert isinstance(host(0.5), float)
        assert host(np.zeros((2, 0, 3))).shape == (2, 0, 3)
    np.testing.assert_allclose(mathf.host_log(x[x > 0]), np.log(x[x > 0]), rtol=1e-15)
    np.testing.assert_allclose(mathf.host_pow(1e4, -x), 1e4**-x, rtol=1e-14)
    assert mathf.host_exp(0.0) == 1.0
    assert mathf.host_cos(0.0) == 1.0


def test_loops_over_these_functions_use_vectors():
    """A loop that LLVM does not vectorise would be many times slower, and nobody would notice."""
    for name in ("exp", "log", "tanh", "sigmoid", "erf"):
        apply(name, np.ones(1, F32))
        asm = next(
            a for s, a in ONE_BY_ONE[name].dispatcher.inspect_asm().items() if "float32" in str(s)
        )
        packed = sum("vfmadd" in line and "ps\t" in line for line in asm.splitlines())
        assert packed > 3 or platform.machine() != "x86_64", f"{name}: {packed} packed fma"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 features")
@pytest.mark.parametrize(
    "features",
    ["+sse4.2,+avx,+avx2,+fma", "+sse4.2"],  # without +fma libm's own fma rounds once, too
)
def test_bits_do_not_depend_on_the_instructions(features):
    program = Path(__file__).parent / "bits" / "functions.py"

    def digests(**env):
        command = [sys.executable, program]
        done = subprocess.run(command, env=os.environ | env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    plain = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}
    assert digests(NUMBA_NUM_THREADS="1", **plain) == digests()
