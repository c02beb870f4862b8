"""Elementary functions with the same bits on every machine, for use inside bodies.

Everything here is made of IEEE operations, `llvm.fma` and integer operations on the bits, so
that neither a libm nor the width of a vector decides a result. Each function takes a float32, a
float64 or (but for sin and cos) `Lanes` of them, and has no branches: LLVM can vectorise a loop
that calls it. The largest errors found, in units in the last place (ulp) of the result:

    function     float32   float64
    exp          1.1       1.1
    log          0.9       0.9
    tanh         2.5       2.5
    sigmoid      2.6       2.6
    erf          1.1       1.1
    sin, cos     0.51      1.6      |x| <= 2**30, NaN beyond

Coefficients are Chebyshev interpolations of the function named beside them, rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from .backend import array_module
from .lanes import (
    INLINE,
    absolute,
    attach,
    bits,
    copysign,
    element,
    fma,
    from_bits,
    horner,
    iadd,
    iand,
    int_to_float,
    is_zero,
    ishl,
    ishr,
    isub,
    less,
    maximum,
    select,
    square_root,
)
from .launch import JIT, body, device

# --- the functions, written once for both types -----------------------------------------------


class _Format:
    """The numbers of a float type, and of the functions in it."""

    def __init__(self, T: Any, bits: int, mantissa: int, **constants: Any):
        self.T, self.I = T, np.dtype(f"i{bits // 8}").type
        self.mantissa = self.I(mantissa)
        # t = x + round is x rounded to an integer, which then stands in the low bits of t.
        self.round = T(1.5 * 2.0**mantissa)
        self.round_bits = self.round.view(self.I)
        self.least = T(np.finfo(T).tiny)
        for name, value in constants.items():
            value = tuple(map(T, value)) if isinstance(value, tuple) else T(value)
            setattr(self, name, value)


# log(2) = ln2 + ln2_low; n * ln2 leaves x without rounding, by fma
_F32 = _Format(
    np.float32,
    32,
    23,
    log2e=1.4426950408889634,
    ln2=0.6931471824645996,
    ln2_low=-1.904654299957768e-09,
    ln2_short=0.693145751953125,  # 15 bits: times an exponent it is exact
    ln2_rest=1.4286068203094172e-06,
    exp_normal=-87.0,  # above: not subnormal
    exp_low=-104.0,  # below: 0
    exp_high=89.0,  # above: inf
    sigmoid_low=-80.0,  # below: exp(x) + 1 is 1
    tanh_high=20.0,  # tanh(10) rounds to 1
    # (exp(r) - 1 - r) / r**2, |r| <= log(2) / 2
    exp_poly=(
        0.0013926250394433737,
        0.00836323294788599,
        0.04166655242443085,
        0.16666576266288757,
        0.5,
    ),
    # (2 atanh(s) - 2 s) / s**3 in s**2, |s| <= 0.172
    log_poly=(0.23330697417259216, 0.2855081260204315, 0.4000012278556824, 0.6666666865348816),
    # erf(x) / x - 1 in x**2, |x| <= 1
    erf_poly=(
        7.875874871388078e-05,
        -0.000801686430349946,
        0.005189087241888046,
        -0.02685421146452427,
        0.11283594369888306,
        -0.3761262595653534,
        0.12837916612625122,
    ),
    # -log(erfc(x)) / x, 1 <= x <= erf_high
    erfc_poly=(
        1.1044674863569526e-07,
        -2.7282571863906924e-06,
        2.805901567626279e-05,
        -0.000141280863317661,
        0.0001608650927664712,
        0.00270908884704113,
        -0.022664111107587814,
        0.10548193007707596,
        0.6354214549064636,
        1.1286121606826782,
    ),
    erf_high=4.1,
)
_F64 = _Format(
    np.float64,
    64,
    52,
    log2e=1.4426950408889634,
    ln2=0.6931471805599453,
    ln2_low=2.3190468138462996e-17,
    ln2_short=0.6931471803691238,  # 33 bits
    ln2_rest=1.9082149292705877e-10,
    exp_normal=-708.0,
    exp_low=-746.0,
    exp_high=710.0,
    sigmoid_low=-700.0,
    tanh_high=40.0,
    exp_poly=(
        2.09147553258932e-09,
        2.5105312729622103e-08,
        2.755727347871858e-07,
        2.755725517000089e-06,
        2.480158732567746e-05,
        0.0001984126987500228,
        0.0013888888888883711,
        0.008333333333326084,
        0.04166666666666667,
        0.1666666666666667,
        0.5,
    ),
    log_poly=(
        0.13086907887965027,
        0.13268746195596595,
        0.15386240708969665,
        0.18181795621632782,
        0.22222222391887064,
        0.2857142857080285,
        0.4000000000000088,
        0.6666666666666666,
    ),
    erf_poly=(
        5.957176147748911e-11,
        -1.1372848856791674e-09,
        1.4659775274047436e-08,
        -1.6350312701054695e-07,
        1.6461000484121368e-06,
        -1.4925595266831182e-05,
        0.0001205533111164271,
        -0.000854832698083379,
        0.0052239776248180145,
        -0.026866170645076792,
        0.11283791670954879,
        -0.3761263890318375,
        0.1283791670955126,
    ),
    erfc_poly=(
        -2.3603113649308445e-19,
        2.4864790556239308e-17,
        -1.2264431706110906e-15,
        3.783782028988254e-14,
        -8.21940862688044e-13,
        1.3405209146083343e-11,
        -1.7078934581348735e-10,
        1.7450303032145661e-09,
        -1.4555628642486362e-08,
        1.0028708776988045e-07,
        -5.745643366549364e-07,
        2.741140160889743e-06,
        -1.0830428274949433e-05,
        3.4834195471869464e-05,
        -8.733612403239998e-05,
        0.00015030319441874517,
        -7.83470632174243e-05,
        -0.0004875053018133096,
        0.0016154527493487654,
        -0.00015959725121175006,
        -0.019151344920501193,
        0.10278007135875265,
        0.636618239900429,
        1.1283793157297342,
    ),
    erf_high=6.0,
)


# The types of float in C, and the functions made by `_generic`: what a GPU's are written from.
FORMATS = {"float": _F32, "double": _F64}
FUNCTIONS: list[Any] = []


def _generic(reference: Any) -> Any:
    """Make `write(format) -> function` one function of both float types, plain or in lanes.

    Outside of bodies it is `reference`, on arrays.
    """

    def make(write: Any) -> Any:
        functions = {t: write(f) for t, f in ((types.float32, _F32), (types.float64, _F64))}
        reference.__name__ = reference.__qualname__ = write.__name__
        reference.__doc__ = write.__doc__
        reference.write = write
        FUNCTIONS.append(reference)

        @overload(reference, jit_options=INLINE)
        def implement(x):
            return functions.get(element(x))

        return reference

    return make


def _reduced(f: Any) -> Any:
    log2e, ln2, ln2_low, round_, poly = f.log2e, f.ln2, f.ln2_low, f.round, f.exp_poly

    @device
    def reduced(x):
        # x = n log(2) + r with |r| <= log(2) / 2; n in the low bits of t, and exp(r) - 1
        t = fma(x, log2e, round_)
        n = t - round_
        r = fma(n, -ln2_low, fma(n, -ln2, x))
        return t, fma(r * r, horner(r, poly), r)

    return reduced


def _power_of_two(f: Any, shift: int = 0) -> Any:
    mantissa, one = f.mantissa, f.T(2.0**shift).view(f.I)

    @device
    def power_of_two(t):
        # 2**(n + shift), for an integer n or for n in the low bits of a float
        return from_bits(iadd(ishl(t, mantissa), one))

    return power_of_two


@_generic(lambda x: array_module(x).exp(x))
def exp(f: Any) -> Any:
    """e to the power x; exactly 1 at 0."""
    reduced, power_of_two = _reduced(f), _power_of_two(f)
    low, high, one, unit, round_bits = f.exp_low, f.exp_high, f.T(1), f.I(1), f.round_bits

    def function(x):
        x = select(less(x, low), low, select(less(high, x), high, x))
        t, p = reduced(x)
        n = isub(bits(t), round_bits)
        half = ishr(n, unit)  # two steps, so that the result may be subnormal or infinite
        return (p + one) * power_of_two(half) * power_of_two(isub(n, half))

    return function


@_generic(lambda x: array_module(x).exp(x))
def exp_flushed(f: Any) -> Any:
    """exp of x < 88, but 0 where x < -87 (float32) or -708 (float64): a third cheaper."""
    reduced, power_of_two = _reduced(f), _power_of_two(f)
    normal, one, zero = f.exp_normal, f.T(1), f.T(0)

    def function(x):
        t, p = reduced(x)
        return select(less(x, normal), zero, (p + one) * power_of_two(bits(t)))

    return function


@_generic(lambda x: array_module(x).log(x))
def log(f: Any) -> Any:
    """The natural logarithm: -inf at 0, NaN below."""
    least, mantissa, poly = f.least, f.mantissa, f.log_poly
    zero, one, two, half, inf, nan = (f.T(v) for v in (0, 1, 2, 0.5, np.inf, np.nan))
    short, rest, lift, lifted = f.ln2_short, f.ln2_rest, f.T(2.0**f.mantissa), mantissa
    root = f.T(np.sqrt(0.5)).view(f.I)

    def function(x):
        subnormal = less(x, least)
        b = bits(select(subnormal, x * lift, x))
        n = ishr(isub(b, root), mantissa)  # x = 2**n m with sqrt(1/2) <= m < sqrt(2)
        m = from_bits(isub(b, ishl(n, mantissa)))
        e = int_to_float(select(subnormal, isub(n, lifted), n))
        # log(1 + d) = d - d**2 / 2 + s (d**2 / 2 + s**2 poly(s**2)) with s = d / (2 + d)
        d = m - one
        s = d / (two + d)
        z = s * s
        h = half * d * d
        y = e * short - ((h - fma(s, fma(z, horner(z, poly), h), e * rest)) - d)
        y = select(less(x, inf), y, x)
        return select(less(zero, x), y, select(less(x, zero), nan, x - inf))

    return function


@_generic(lambda x: array_module(x).tanh(x))
def tanh(f: Any) -> Any:
    """The hyperbolic tangent; exactly 0, 1 and -1 at 0, inf and -inf."""
    reduced, power_of_two = _reduced(f), _power_of_two(f)
    high, one, two = f.tanh_high, f.T(1), f.T(2)

    def function(x):
        # tanh(x) = e / (e + 2) with e = exp(2 x) - 1
        y = two * absolute(x)
        t, p = reduced(select(less(high, y), high, y))
        scale = power_of_two(bits(t))
        e = fma(scale, p, scale - one)
        return copysign(e / (e + two), x)

    return function


def _sigmoid_of_array(x):
    xp = array_module(x)
    e = xp.exp(-abs(x))
    return xp.where(x < 0, e, x.dtype.type(1)) / (1 + e)


@_generic(_sigmoid_of_array)
def sigmoid(f: Any) -> Any:
    """1 / (1 + exp(-x)); 0 where that is below the normal numbers and x < -exp_high."""
    reduced, half_power = _reduced(f), _power_of_two(f, -1)
    low, high, one, two = f.sigmoid_low, f.exp_high, f.T(1), f.T(2)

    def function(x):
        y = -x
        t, p = reduced(select(less(y, low), low, select(less(high, y), high, y)))
        return one / fma((p + one) * half_power(bits(t)), two, one)

    return function


def _erf_of_array(x):
    return np.vectorize(math.erf, otypes=[x.dtype])(x) if x.size else x.copy()


@_generic(_erf_of_array)
def erf(f: Any) -> Any:
    """The error function, 2 / sqrt(pi) times the integral of exp(-t**2) from 0 to x."""
    one, high, near, far = f.T(1), f.erf_high, f.erf_poly, f.erfc_poly

    def function(x):
        z = absolute(x)
        z = select(less(high, z), high, z)
        small = fma(x, horner(x * x, near), x)
        large = copysign(one - exp(-z * horner(z, far)), x)
        return select(less(z, one), small, large)

    return function


@device
def _turn(x, quarter):
    # x = n pi/2 + r with |r| <= pi/4; sin(x + quarter pi/2) by the lowest bits of n + quarter
    t = fma(x, _TWO_OVER_PI, _F64_ROUND)
    n = t - _F64_ROUND
    r = fma(n, -_HALF_PI[2], fma(n, -_HALF_PI[1], fma(n, -_HALF_PI[0], x)))
    turn = iadd(isub(bits(t), _F64_ROUND_BITS), quarter)
    z = r * r
    sine = fma(r * z, horner(z, _SIN), r)
    cosine = fma(z * z, horner(z, _COS), fma(z, -_HALF, _ONE))
    y = select(is_zero(iand(turn, _I1)), sine, cosine)
    y = select(is_zero(iand(turn, _I2)), y, -y)
    return select(less(_TURN_HIGH, absolute(x)), x * np.float64(np.nan), y)


_F64_ROUND, _F64_ROUND_BITS = _F64.round, _F64.round_bits
_ONE, _HALF = np.float64(1), np.float64(0.5)
_I0, _I1, _I2 = (np.int64(n) for n in range(3))
_TURN_HIGH = np.float64(2.0**30)
_TWO_OVER_PI = np.float64(0.6366197723675814)
_HALF_PI = tuple(  # pi / 2 in three parts
    map(np.float64, (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33))
)
# (sin(r) - r) / r**3 and (cos(r) - 1 + r**2 / 2) / r**4 in r**2, |r| <= pi / 4
_SIN = (
    -7.586636882825159e-13,
    1.6058530596645953e-10,
    -2.50521062259944e-08,
    2.755731921932058e-06,
    -0.0001984126984126504,
    0.008333333333333331,
    -0.16666666666666666,
)
_COS = (
    4.745838412531023e-14,
    -1.1470460319209511e-11,
    2.0876755787492604e-09,
    -2.755731922139249e-07,
    2.4801587301584632e-05,
    -0.0013888888888888887,
    0.041666666666666664,
)


def sin(x):
    """The sine, computed in float64; NaN where |x| > 2**30."""
    return array_module(x).sin(x)


def cos(x):
    """The cosine, computed in float64; NaN where |x| > 2**30."""
    return array_module(x).cos(x)


@overload(sin, jit_options=INLINE)
def _sin(x):
    if x == types.float32:
        return lambda x: np.float32(_turn(np.float64(x), _I0))
    return (lambda x: _turn(x, _I0)) if x == types.float64 else None


@overload(cos, jit_options=INLINE)
def _cos(x):
    if x == types.float32:
        return lambda x: np.float32(_turn(np.float64(x), _I1))
    return (lambda x: _turn(x, _I1)) if x == types.float64 else None


def sqrt(x):
    """The square root, rounded once."""
    return array_module(x).sqrt(x)


attach(sqrt, 1, square_root.typed, types.VarArg(types.Any))


def larger(x, y):
    """The larger of two; NaN if one is NaN."""
    return array_module(x).maximum(x, y)


attach(larger, 2, maximum.typed, types.VarArg(types.Any))


# --- on the host: tables and schedules, float64 -----------------------------------------------

_CHUNK = 4096


def _on_host(function: Any, numpy_function: Any) -> Any:
    @body
    def each(i, x, out):
        for n in range(i * _CHUNK, min(x.size, (i + 1) * _CHUNK)):
            out[n] = function(x[n])

    def host(x: Any) -> Any:
        x = np.array(x, dtype=np.float64, order="C")
        if not JIT:
            out = numpy_function(x)
        else:
            out = np.empty_like(x)
            each(-(-x.size // _CHUNK), x.reshape(-1), out.reshape(-1))
        return out if x.ndim else float(out)

    host.__name__ = host.__qualname__ = f"host_{function.__name__}"
    host.__doc__ = f"{function.__name__} of a number or an array in float64, the same everywhere."
    return host


host_exp = _on_host(exp, np.exp)
host_log = _on_host(log, np.log)
host_sin = _on_host(sin, np.sin)
host_cos = _on_host(cos, np.cos)


def host_pow(x: Any, y: Any) -> Any:
    """x to the power y for x > 0, as exp(y log(x)) in float64: the same everywhere."""
    return host_exp(np.asarray(y, np.float64) * host_log(x))
