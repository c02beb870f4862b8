"""The checks themselves are checked: wrong gradients, kernels and orders are caught."""

import numpy as np
import pytest

import shape_line
from afinar.autograd import launch
from afinar.autograd.launch import body, set_num_threads
from afinar.autograd.tape import op
from afinar.autograd.testing import gradcheck


def test_a_gradient_wrong_by_a_thousandth_is_caught():
    wrong = op(lambda x: (2.0 * x, (lambda g: 2.002 * g,)), register=False)
    with pytest.raises(
        AssertionError, match=r"input 0 at \(\d,\): backward\(\) gives .*, finite differences "
    ):
        gradcheck(wrong, np.ones(3))


def test_a_gradient_wrong_in_one_element_of_the_second_input_is_caught():
    def multiply(x, y):
        def dy(g):
            d = g * x
            d[1] *= 1.01
            return d

        return x * y, (lambda g: g * y, dy)

    wrong = op(multiply, register=False)
    with pytest.raises(AssertionError, match=r"input 1 at \(1,\)"):
        gradcheck(wrong, np.arange(1.0, 4.0), np.arange(2.0, 5.0))


def test_a_missing_gradient_is_caught():
    wrong = op(lambda x: (x * 3, (lambda g: None,)), register=False)
    with pytest.raises(AssertionError, match="input 0"):
        gradcheck(wrong, np.ones(2))


def test_a_correct_gradient_passes():
    gradcheck(op(lambda x: (x * x * x, (lambda g: 3 * x * x * g,)), register=False), np.arange(4.0))


@body
def split_sum(i, x, parts, out):  # partial sums as many as `parts`
    n = x.size // parts
    s = np.float32(0)
    for k in range(n):
        s += x[i * n + k]
    out[i] = s


@pytest.mark.skipif(not launch.JIT, reason="without the JIT bodies do not run")
def test_a_thread_dependent_order_changes_bits():
    """The bit tests can fail: a sum that is split by the number of threads gives other bits."""
    x = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    results = set()
    for threads in (1, 2):
        out = np.zeros(threads, np.float32)
        split_sum(threads, x, threads, out)
        total = np.float32(0)
        for part in out:
            total += part
        results.add(total.tobytes())
    assert len(results) == 2


def test_a_false_shape_line_is_caught():
    with pytest.raises(AssertionError):
        shape_line.check("x (N, C) -> (C, N)", [(2, 3)], (2, 3))
    with pytest.raises(AssertionError):
        shape_line.check("x (..., C), w (C) -> (..., C)", [(2, 3), (4,)], (2, 3))
    shape_line.check("x (..., C), w (C) -> (..., C)", [(2, 3), (3,)], (2, 3))


def test_threads_out_of_range_are_refused():
    for n in (0, -1, 10**6, 1.5):
        with pytest.raises(ValueError, match="set_num_threads"):
            set_num_threads(n)
