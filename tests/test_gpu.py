"""The GPU's bodies give the bits of the CPU's.

On a machine with a GPU: `python -m pytest -m gpu tests`. Without one, test_cuda.py runs this file
on a stand-in that compiles the same CUDA sources for the CPU.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import OPS, Tensor
from afinar.autograd.backend import KERNELS, cupy
from afinar.autograd.device import why_no_gpu
from afinar.autograd.testing import SAMPLES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
if (why := why_no_gpu()) is not None:
    pytest.skip(why, allow_module_level=True)


def on(move, arrays, options, name, dtype):
    """An op's result and gradients, computed where `move` puts its arrays."""
    leaves = [
        Tensor(move(a.astype(dtype, order="K")), requires_grad=True) if a.dtype.kind == "f"
        else move(a)
        for a in arrays
    ]  # fmt: skip
    options = options | {"dtype": dtype} if "dtype" in options else options
    out = OPS[name](*leaves, **options)
    if out.requires_grad:
        g = np.cos(np.arange(out.size)).reshape(out.shape).astype(out.dtype)
        out.backward(move(g))
    found = [out.data, *(x.grad for x in leaves if isinstance(x, Tensor))]
    return [x if x is None or isinstance(x, np.ndarray) else x.get() for x in found]


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(OPS))
@given(data=st.data())
def test_every_op_gives_the_bits_of_the_cpu(name, dtype, data):
    arrays, options = data.draw(SAMPLES[name])
    cpu = on(lambda a: a, arrays, options, name, dtype)
    gpu = on(cupy.asarray, arrays, options, name, dtype)
    for a, b in zip(cpu, gpu, strict=True):
        assert (a is None) == (b is None)
        assert a is None or same_bits(a, b)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_every_kernel_has_a_body_for_the_gpu(name):
    assert cupy in KERNELS[name].fast
