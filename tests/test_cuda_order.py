"""The order of sums of the CUDA sources, held to the CPU's bodies without a GPU or a compiler.

The loops of a source stand here as plain Python: blocks, threads, stages in shared memory. A fused
multiply-add is made of exact fractions, so nothing here has an order of its own.
"""

from fractions import Fraction

import numpy as np
import pytest

from afinar.autograd import Tensor, launch
from afinar.autograd.ops.gemm import KC, gemm
from afinar.autograd.ops.gemm_gpu import SHAPES
from afinar.autograd.ops.loss import cross_entropy_forward

pytestmark = pytest.mark.skipif(not launch.JIT, reason="reference bodies promise no bits")


def nearest(x):
    """The float32 nearest to a fraction, of two the even one."""
    if x == 0:
        return np.float32(0)
    size, sign = abs(x), 1 if x > 0 else -1
    # The place of the last of 24 bits: 2**last <= size / 2**23 < 2**(last + 1).
    last = size.numerator.bit_length() - size.denominator.bit_length() - 24
    while size / Fraction(2) ** last >= 2**24:
        last += 1
    unit = Fraction(2) ** max(last, -149)
    return np.float32(sign * float(round(size / unit) * unit))


def fma(x, y, z):
    """x y + z, rounded once."""
    return nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))


def test_fractions_are_rounded_as_float32_is():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(200).astype(np.float32) for _ in range(2))
    x[:50] *= np.float32(1e-42)
    for a, b in zip(x, y, strict=True):
        assert fma(a, np.float32(1), b) == a + b
        assert fma(a, b, np.float32(0)) == a * b


def multiply(a, b, shape, first, number):
    """What `multiply` of gemm_gpu stores: blocks first ... first + number - 1 of k."""
    (M, K), N = a.shape, b.shape[1]
    rows, columns, depth, tm, tn = SHAPES[shape]["float"]
    out = np.full((M, N), np.nan, np.float32)
    start, stop = first * KC, min(K, (first + number) * KC)
    for m0 in range(0, M, rows):
        for n0 in range(0, N, columns):
            chain = np.zeros((rows, columns), np.float32)  # of all threads, tm x tn each
            assert rows // tm * (columns // tn) == 256
            fresh = True
            for k0 in range(start, stop, depth):
                for k in range(min(depth, stop - k0)):
                    for i in range(min(rows, M - m0)):
                        for j in range(min(columns, N - n0)):
                            x, y = a[m0 + i, k0 + k], b[k0 + k, n0 + j]
                            chain[i, j] = fma(x, y, chain[i, j])
                if k0 + depth >= stop or (k0 + depth) % KC == 0:
                    to = out[m0 : m0 + rows, n0 : n0 + columns]
                    sums = chain[: len(to), : to.shape[1]]
                    to[...] = sums if fresh else to + sums
                    chain[...], fresh = 0, False
    return out


def add_up(parts):
    """What `add_up` of gemm_gpu makes of the sums of the blocks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_has_the_order_of_the_cpu(shape):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((3, 1100), (1100, 2)))
    ours = gemm(a, b, False, False)
    assert (multiply(a, b, shape, 0, 3) == ours).all()
    spread = add_up([multiply(a, b, shape, part, 1) for part in range(3)])
    assert (spread == ours).all()


def test_a_sum_of_exponentials_has_the_order_of_the_cpu():
    """`block_exp_sum` of the losses: stages of 2048, 16 lanes that go on, then the tree."""
    rng = np.random.default_rng(1)
    for V in (1, 15, 17, 2048, 5003):
        x = rng.standard_normal((1, V), dtype=np.float32)
        e = Tensor(x - x.max()).exp().data[0]
        lanes = np.zeros(16, np.float32)
        for start in range(0, V, 2048):
            stage = e[start : start + 2048]
            for t in range(16):
                for i in range(t, len(stage), 16):
                    lanes[t] = lanes[t] + stage[i]
        for step in (8, 4, 2, 1):  # __shfl_down_sync: lane t takes in lane t + step
            lanes = lanes + np.concatenate([lanes[step:], lanes[-step:]])
        _, stats = cross_entropy_forward(x, np.zeros(1, np.int64), -100)
        assert stats[0, 1] == np.float32(1) / lanes[0]
