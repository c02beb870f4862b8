"""The engine cases that users of such engines report, each by name."""

import gc
import inspect
import subprocess
import sys

import numpy as np
import pytest

from afinar.autograd import OPS, Tensor, checkpoint, gelu, launch, no_grad, stack, where
from afinar.autograd.tape import op


def leaf(*values, dtype=np.float64):
    return Tensor(np.array(values, dtype), requires_grad=True)


def test_a_reused_intermediate_counts_every_use_once():
    a = leaf(1.0)
    b = a + a
    c = b + b
    c.backward()
    assert a.grad == 4
    x = leaf(3.0)
    (x * x).backward()
    assert x.grad == 6
    x, b = leaf(2.0), leaf(5.0)
    y = x + b
    (y * x).backward()
    assert x.grad == 2 * 2 + 5
    assert b.grad == 2


def test_x_times_its_own_transpose():
    x = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    g = np.array([[1.0, 2.0], [3.0, 4.0]])
    (x @ x.T).backward(g)
    assert np.array_equal(x.grad, (g + g.T) @ np.arange(6.0).reshape(2, 3))


def test_a_residual_and_three_consumers():
    """y = x + f(x) and q, k, v from one x: each op runs once, after all its users."""
    runs = []

    def traced(x, *, name):
        return x * 2, (lambda g: (runs.append(name), g * 2)[1],)

    double = op(traced, register=False)
    x = leaf(1.0, 2.0)
    h = double(x, name="h")
    y = h + double(h, name="f")
    out = double(y, name="q") + double(y, name="k") + double(y, name="v")
    out.backward()
    assert sorted(runs) == ["f", "h", "k", "q", "v"]
    assert np.array_equal(x.grad, [2 * 3 * 6] * 2)


def test_a_second_backward_says_that_the_graph_is_gone():
    a, b = leaf(3.0), leaf(2.0)
    c = a + b
    e = c * 1
    e.backward()
    with pytest.raises(RuntimeError, match="used and freed; compute the result anew"):
        e.backward()
    assert a.grad == 1


def test_gradients_of_two_graphs_add_up_on_leaves_only():
    a = leaf(3.0)
    for _ in range(2):
        (a * 2).backward()
    assert a.grad == 4
    a.zero_grad()
    assert a.grad is None


def test_a_chain_of_5000_and_a_dropped_graph_of_100000():
    x = leaf(1.0)
    y = x
    for _ in range(5000):
        y = y + 1
    y.backward()
    assert x.grad == 1
    for _ in range(100_000):
        y = y + x
    del y


def test_repeated_indices_add_up():
    x = leaf(1.0)
    x[np.array([0, 0])].sum().backward()
    assert x.grad == 2


def test_item_assignment_names_the_way_out():
    r = Tensor(np.zeros(5))
    with pytest.raises(TypeError, match="stack, concat or where"):
        r[0] = leaf(1.0)
    p = leaf(1.0, 2.0)
    stack(p[0], p[1] * p[0]).sum().backward()
    assert np.array_equal(p.grad, [1 + 2, 1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_broadcast_operands_get_gradients_of_their_own_shape(dtype):
    shapes = [(3, 1), (1, 4), (), (4,), (2, 3, 4)]
    xs = [Tensor(np.ones(s, dtype), requires_grad=True) for s in shapes]
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    total.sum().backward()
    for x, s in zip(xs, shapes, strict=True):
        assert x.grad.shape == s
        assert x.grad.dtype == dtype
        assert np.all(x.grad == 24 / max(1, int(np.prod(s))))


def test_zero_sizes_and_scalars():
    a, b = Tensor(np.ones((4, 0)), requires_grad=True), Tensor(np.ones((4, 1)), requires_grad=True)
    (a + b).sum().backward()
    assert np.array_equal(b.grad, np.zeros((4, 1)))
    assert a.grad.shape == (4, 0)
    s = Tensor(np.float64(3.0), requires_grad=True)
    (s * s).backward()
    assert s.grad.shape == ()
    assert s.grad == 6
    with np.errstate(all="raise"):
        assert np.isnan(Tensor(np.ones((0, 2))).mean().item())


def test_the_branch_not_taken_gives_no_nan():
    x = leaf(0.0, 4.0)
    with np.errstate(all="ignore"):
        where(x.data > 0, x.sqrt(), 0.0).sum().backward()
    assert np.array_equal(x.grad, [0, 0.25])
    z = leaf(0.0, 0.0)
    with np.errstate(all="ignore"):
        ((z * z).sum().sqrt() ** 2).backward()
    assert np.array_equal(z.grad, [0, 0])


def test_a_partial_graph_without_gradients():
    x, c = leaf(2.0), Tensor(np.array([3.0]))
    y = x * c
    y.backward()
    assert c.grad is None
    assert (c * c).backward_op is None
    with no_grad():
        assert not (x * x).requires_grad
    with pytest.raises(RuntimeError, match="nothing that requires a gradient"):
        (c * c).backward()


def test_a_frozen_input_costs_no_saved_array():
    w = Tensor(np.ones((4, 4)))
    x = Tensor(np.ones((4, 4)), requires_grad=True)
    product = w * x
    assert product.backward_op.vjp[0] is None
    assert x.data.flags.writeable  # nobody needs x


def test_writing_into_saved_data_is_refused_until_backward():
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    product = x * y
    with pytest.raises(ValueError, match="read-only"):
        x.data[0] = 5
    product.backward()
    x.data[0] = 5
    base = np.ones(4)
    z = Tensor(base[:2], requires_grad=True)
    kept = z * z
    with pytest.raises(ValueError, match="read-only"):
        base[0] = 2
    del kept
    base[0] = 2


def test_a_wrong_gradient_shape_is_refused():
    x = leaf(1.0, 2.0)
    with pytest.raises(ValueError, match=r"the gradient has shape \(3,\), the tensor \(2,\)"):
        (x * 2).backward(np.ones(3))


def test_an_aliased_gradient_is_not_shared_between_leaves():
    a, b = leaf(1.0), leaf(2.0)
    g = np.ones(1)
    (a + b).backward(g)
    a.grad += 1
    assert b.grad == 1
    assert g == 1


# --- gradient checkpointing ---


def _mlp(x, w):
    return ((x @ w).tanh() @ w).tanh()


@pytest.mark.parametrize("input_needs_gradient", [True, False])
def test_checkpointing_changes_no_bits(input_needs_gradient):
    rng = np.random.default_rng(0)
    data, weight = rng.standard_normal((2, 5, 5)).astype(np.float32)
    found = []
    for run in (
        lambda f, *a: f(*a),
        checkpoint,
        lambda f, *a: checkpoint(lambda *b: checkpoint(f, *b), *a),
    ):
        w = Tensor(weight, requires_grad=True)  # tied: used inside and outside
        x = Tensor(data, requires_grad=input_needs_gradient)
        h = run(lambda x, w=w: _mlp(x, w), x @ w)
        h = run(lambda x, w=w: _mlp(x, w) + x, h)
        (h @ w).sum().backward()
        found.append((w.grad.tobytes(), x.grad.tobytes() if input_needs_gradient else b""))
    assert found[0] == found[1] == found[2]


def test_a_checkpointed_stretch_guards_its_parameters():
    w = leaf(1.0, 2.0)
    y = checkpoint(lambda x: x * w, Tensor(np.ones(2)))
    with pytest.raises(ValueError, match="read-only"):
        w.data[0] = 3
    y.backward()
    assert np.array_equal(w.grad, [1, 1])
    w.data[0] = 3


# --- memory and processes ---


def test_memory_is_flat_over_1000_steps(resident):
    w = Tensor(np.ones((64, 64), np.float32), requires_grad=True)
    total = []

    def steps(n):
        for _ in range(n):
            x = Tensor(np.ones((64, 64), np.float32), requires_grad=True)
            loss = ((x @ w).tanh()).sum()
            loss.backward()
            w.zero_grad()
            total.append(loss.item())

    steps(200)
    before = resident()
    gc.disable()  # a graph is freed by its counts of references
    try:
        steps(1000)
        assert resident() - before < 1e6
    finally:
        gc.enable()


def test_an_exception_in_mid_graph_leaves_nothing_locked():
    x = leaf(1.0, 2.0)

    def failing():
        y = x * x  # noqa: F841
        raise KeyError

    with pytest.raises(KeyError):
        failing()
    gc.collect()
    x.data[0] = 3


def _python(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | env,
        timeout=300,
    )


FORK = """
import os, numpy as np
from afinar.autograd import Tensor
x = Tensor(np.ones((64, 64), np.float32))
first = (x @ x).data
pid = os.fork()
if pid == 0:
    os._exit(int(((x @ x).data == first).all()))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
print("child lived")
"""


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_a_fork_after_a_kernel_leaves_the_child_alive(layer):
    done = _python(FORK, NUMBA_THREADING_LAYER=layer)
    assert "child lived" in done.stdout, done.stderr


THREADS = """
import threading, numpy as np
from afinar.autograd import Tensor
x = Tensor(np.ones((200, 200), np.float32))
first = (x @ x).data
bad = []
def work():
    for _ in range(50):
        if not ((x @ x).data == first).all(): bad.append(1)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not bad
print("done")
"""


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_concurrent_launches_from_python_threads(layer):
    done = _python(THREADS, NUMBA_THREADING_LAYER=layer)
    assert "done" in done.stdout, done.stderr


def test_the_address_of_an_array_is_where_its_data_begins():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (x, x[1:], x[::-1], x.T, x[:, 3], x[:0], np.array(1.0), x.view(np.memmap)):
        assert launch.address(view) == view.ctypes.data
    assert launch.address(None) == 0


def test_an_unwritable_cache_means_uncached_not_an_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    code = """
import numpy as np
from afinar.autograd import Tensor
x = Tensor(np.ones((3, 3)))
print((x @ x).sum().item())
"""
    done = _python(code, NUMBA_CACHE_DIR=str(blocked))
    assert done.stdout.strip() == "27.0", done.stderr


def test_options_may_be_given_by_position():
    x = leaf(1.0, 2.0)
    assert np.array_equal(gelu(x, "tanh").data, gelu(x, approximate="tanh").data)
    with pytest.raises(TypeError, match="1 arguments too many"):
        gelu(x, "tanh", 1)


def test_the_signature_of_an_op_is_what_a_caller_gives():
    for name, made in OPS.items():
        assert "needs" not in inspect.signature(made).parameters, name
    assert list(inspect.signature(OPS["rms_norm"]).parameters) == ["x", "weight", "eps"]
