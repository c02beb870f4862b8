"""Every op of the registry: gradient, shape line, fast bodies against references."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shape_line
from afinar.autograd import KERNELS, OPS, Tensor, launch
from afinar.autograd.backend import Kernel, reference_bodies
from afinar.autograd.testing import SAMPLES, gradcheck, tolerance


def test_every_op_has_samples():
    assert SAMPLES.keys() == OPS.keys()


@pytest.mark.parametrize("name", sorted(OPS))
@given(data=st.data())
def test_gradient(name, data):
    arrays, options = data.draw(SAMPLES[name])
    gradcheck(lambda *xs: OPS[name](*xs, **options), *arrays)


@pytest.mark.parametrize("name", sorted(OPS))
@given(data=st.data())
def test_the_shape_line_is_true(name, data):
    arrays, options = data.draw(SAMPLES[name])
    out = OPS[name](*arrays, **options)
    shape_line.check(OPS[name].__doc__, [a.shape for a in arrays], out.shape)


def _run(name, arrays, options, dtype):
    leaves = [
        Tensor(a.astype(dtype, order="K"), requires_grad=True) if a.dtype.kind == "f" else a
        for a in arrays
    ]
    options = options | {"dtype": dtype} if "dtype" in options else options
    out = OPS[name](*leaves, **options)
    if out.requires_grad:
        out.backward(np.cos(np.arange(out.size)).reshape(out.shape).astype(out.dtype))
    return [out.data, *(x.grad for x in leaves if isinstance(x, Tensor))]


compared: set[str] = set()


@pytest.mark.skipif(not launch.JIT, reason="without the JIT there are no fast bodies")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(OPS))
@given(data=st.data())
def test_fast_bodies_agree_with_their_references(name, dtype, data):
    arrays, options = data.draw(SAMPLES[name])
    with watched(compared):
        fast = _run(name, arrays, options, dtype)
    with reference_bodies():
        reference = _run(name, arrays, options, np.float64)
    for a, b in zip(fast, reference, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert a.dtype == dtype
            scale = np.abs(b).max(initial=1.0)
            error = np.abs(a - b).max(initial=0.0) / scale
            assert error <= tolerance(dtype), f"off by {error} of the largest element"


class watched:  # noqa: N801
    """Collects the names of the kernels whose fast bodies run."""

    def __init__(self, names):
        self.names, self.call = names, Kernel.__call__

    def __enter__(self):
        def call(kernel, *args):
            self.names.add(id(kernel))
            return self.call(kernel, *args)

        Kernel.__call__ = call

    def __exit__(self, *_):
        Kernel.__call__ = self.call


@pytest.mark.skipif(not launch.JIT, reason="without the JIT there are no fast bodies")
def test_every_fast_body_of_an_op_was_compared():
    """Runs after the comparisons above. Kernels that are no part of an op have tests by name."""
    ops = {n: k for n, k in KERNELS.items() if k.__module__.startswith("afinar.autograd.ops")}
    missing = {n for n, k in ops.items() if k.fast and id(k) not in compared}
    assert missing <= COMPARED_ELSEWHERE, f"no op's samples reach {missing - COMPARED_ELSEWHERE}"


# Kernels that no float op calls, with the test that holds them to their reference.
COMPARED_ELSEWHERE: set[str] = {
    "gemm.gemm_codes",  # test_matmul.test_4_bit_weights_are_unpacked_while_they_are_read
    "rounding.round_bfloat16",  # test_matmul.test_rounding_to_16_bits_is_to_the_nearest_even
    "rounding.round_float16",
    "reduce.sum_of_squares",  # test_reduce, against its order written out
}
