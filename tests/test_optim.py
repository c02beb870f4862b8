"""Optimizers against their equations, their published byte stream and, where installed, torch."""

import hashlib
import itertools
import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import Tensor, get_num_threads, set_num_threads
from afinar.optim import (
    SGD,
    Adam,
    AdamW,
    CosineAnnealing,
    LinearWarmup,
    StepDecay,
    WarmupCosineDecay,
    WarmupLinearDecay,
    clip_grad_norm,
    param_groups,
    weights_sha256,
)
from afinar.optim.adamw import CHUNK, adamw_update
from afinar.optim.sgd import sgd_update

EMPTY = "9c5df34732e0b50df787f677f20fa1bed2f08e638022508db7589f38e62aa020"


def parameters(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [Tensor(rng.standard_normal(s).astype(dtype), requires_grad=True) for s in shapes]


def set_grads(params, seed):
    rng = np.random.default_rng(seed)
    for p in params:
        p.grad = rng.standard_normal(p.shape).astype(p.dtype)


def run(params, optimizer, steps=5):
    for step in range(steps):
        set_grads(params, 100 + step)
        optimizer.step()
    return [p.data for p in params]


class Bag:
    """The least that can be called a model."""

    def __init__(self, **params):
        self.params = params

    def named_parameters(self):
        return list(self.params.items())


# --- AdamW ---


@pytest.mark.parametrize("form", ["torch", "epsilon_hat"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adamw_follows_its_equations(form, dtype):
    lr, b1, b2, eps, decay = 0.03, 0.8, 0.95, 1e-3, 0.2
    params = parameters((5, 3), (CHUNK + 1,), (), dtype=dtype)
    expected = [p.data.astype(np.float64) for p in params]
    m, v = [0.0 * p for p in expected], [0.0 * p for p in expected]
    optimizer = AdamW(params, lr, (b1, b2), eps, decay, form)
    for t in range(1, 8):
        set_grads(params, t)
        for n, p in enumerate(params):
            g = p.grad.astype(np.float64)
            m[n] = b1 * m[n] + (1 - b1) * g
            v[n] = b2 * v[n] + (1 - b2) * g * g
            c1, c2 = 1 - b1**t, 1 - b2**t
            if form == "torch":
                change = lr * (m[n] / c1) / (np.sqrt(v[n] / c2) + eps)
            else:
                change = lr * math.sqrt(c2) / c1 * m[n] / (np.sqrt(v[n]) + eps)
            expected[n] = (1 - lr * decay) * expected[n] - change
        optimizer.step()
    assert optimizer.step_count == 7
    tolerance = 2e-6 if dtype == np.float32 else 1e-13
    for n, p in enumerate(params):
        np.testing.assert_allclose(p.data, expected[n], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(optimizer.second_moments[n], v[n], rtol=tolerance)


def test_the_forms_differ_by_their_epsilon():
    # At t = 1 epsilon-hat's effective eps is 1 / sqrt(1 - b2) = 31.62 times the torch form's.
    one = Tensor(np.zeros(1), requires_grad=True)
    two = Tensor(np.zeros(1), requires_grad=True)
    one.grad = two.grad = np.array([1e-3])
    AdamW([one], lr=1.0, eps=1e-5, form="epsilon_hat").step()
    AdamW([two], lr=1.0, eps=1e-5 / math.sqrt(1 - 0.999), form="torch").step()
    np.testing.assert_allclose(one.data, two.data, rtol=1e-12)


@pytest.mark.parity
def test_adamw_as_torch():
    torch = pytest.importorskip("torch")
    params = parameters((40, 30), (7,), (1000, 33))
    theirs = [torch.nn.Parameter(torch.tensor(p.data.copy())) for p in params]
    ours = AdamW(params, lr=1e-2, weight_decay=0.1)
    other = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    for step in range(20):
        set_grads(params, step)
        for p, q in zip(params, theirs, strict=True):
            q.grad = torch.tensor(p.grad)
        ours.step()
        other.step()
    for p, q in zip(params, theirs, strict=True):
        np.testing.assert_allclose(p.data, q.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_one_launch_gives_the_bits_of_one_parameter_at_a_time():
    shapes = [(CHUNK,), (3, 5), (2 * CHUNK + 7,), (0, 4), (1,)]
    together, alone = parameters(*shapes), parameters(*shapes)
    run(together, AdamW(together))
    for n, p in enumerate(alone):
        optimizer = AdamW([p])
        for step in range(5):
            set_grads(scratch := parameters(*shapes), 100 + step)
            p.grad = scratch[n].grad
            optimizer.step()
        assert p.data.tobytes() == together[n].data.tobytes()


def test_fast_body_and_reference_agree():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        p, g, m = rng.standard_normal((3, 1000)).astype(dtype)
        v = (m * m).copy()
        constants = np.array([0.5, 0.9, 0.1, 0.99, 0.01, 0.999, 0.1, 1.5, 1e-8])
        results = []
        for kernel in (adamw_update, adamw_update.reference):
            out = np.empty_like(p), np.empty_like(m), np.empty_like(v)
            kernel(p, g, m, v, constants, out)
            results.append(b"".join(a.tobytes() for a in out))
        assert results[0] == results[1]
        results = []
        for kernel in (sgd_update, sgd_update.reference):
            out = np.empty_like(p), np.empty_like(m)
            kernel(p, g, m, np.array([0.5, 0.1, 0.9]), out)
            results.append(b"".join(a.tobytes() for a in out))
        assert results[0] == results[1]


def test_threads_do_not_change_bits():
    before = get_num_threads()
    digests = set()
    for threads in {1, before}:
        set_num_threads(threads)
        params = parameters((3 * CHUNK + 5,), (64, 65))
        optimizer = AdamW(params)
        run(params, optimizer)
        set_grads(params, 0)
        digests.add(
            (optimizer.state_sha256(), clip_grad_norm(params, 1.0), params[0].grad.tobytes())
        )
    set_num_threads(before)
    assert len(digests) == 1


def test_scaling_in_the_step_gives_the_bits_of_scaling_before():
    for make in (AdamW, SGD):
        one, two = parameters((100,)), parameters((100,))
        a, b = make(one, lr=0.1), make(two, lr=0.1)
        set_grads(one, 1)
        two[0].grad = one[0].grad * np.float32(0.37)
        a.step(grad_scale=0.37)
        b.step()
        assert one[0].data.tobytes() == two[0].data.tobytes()


def test_a_parameter_without_gradient_is_left_alone():
    params = parameters((3,), (4,))
    before = params[1].data.copy()
    optimizer = AdamW(params, weight_decay=0.5)
    params[0].grad = np.ones(3, np.float32)
    optimizer.step()
    assert (params[1].data == before).all()
    assert optimizer.first_moments[1] is None
    assert optimizer.first_moments[0] is not None


def test_decay_alone():
    matrix, norm = parameters((2, 3), (3,))
    before = matrix.data.copy(), norm.data.copy()
    optimizer = AdamW(param_groups(Bag(m=matrix, n=norm), 0.1), lr=1.0)
    matrix.grad, norm.grad = np.zeros((2, 3), np.float32), np.zeros(3, np.float32)
    optimizer.step()
    np.testing.assert_allclose(matrix.data, 0.9 * before[0], rtol=1e-6)
    assert (norm.data == before[1]).all()


def test_adam_is_adamw_without_decay():
    one, two = parameters((9,)), parameters((9,))
    run(one, Adam(one))
    run(two, AdamW(two, weight_decay=0.0))
    assert one[0].data.tobytes() == two[0].data.tobytes()


def test_sgd_with_momentum():
    (p,) = parameters((4,), dtype=np.float64)
    expected, velocity = p.data.copy(), 0.0
    optimizer = SGD([p], lr=0.1, momentum=0.9)
    for step in range(6):
        set_grads([p], step)
        velocity = 0.9 * velocity - 0.1 * p.grad
        expected = expected + velocity
        optimizer.step()
    np.testing.assert_allclose(p.data, expected, rtol=1e-14)


@pytest.mark.parametrize("make", [AdamW, Adam, SGD])
def test_it_finds_the_minimum(make):
    x = Tensor([3.0, -2.0], requires_grad=True)
    optimizer = make([x], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        ((x - 1.0) * (x - 1.0)).sum().backward()
        optimizer.step()
    np.testing.assert_allclose(x.data, [1, 1], atol=0.02)


# --- who owns the arrays ---


def test_the_array_given_by_the_user_is_not_written_to():
    mine = np.ones(3, np.float32)
    p = Tensor(mine, requires_grad=True)
    run([p], AdamW([p]))
    assert (mine == 1).all()


def test_a_graph_keeps_the_old_weights():
    x = Tensor([2.0], requires_grad=True)
    optimizer = SGD([x], lr=0.5)
    for _ in range(3):
        old = x.data.copy()
        y = (x * x).sum()
        x.grad = np.ones(1, np.float32)
        optimizer.step()
        optimizer.zero_grad()
        y.backward()
        assert x.grad == 2 * old
        optimizer.zero_grad()


def test_later_steps_write_in_place():
    (p,) = parameters((8,))
    optimizer = AdamW([p])
    run([p], optimizer, 1)
    array = p.data
    run([p], optimizer, 1)
    assert p.data is array


# --- state ---


def test_the_digest_of_a_fresh_optimizer():
    assert AdamW(parameters((3,))).state_sha256() == EMPTY


def test_the_digest_is_the_published_byte_stream():
    params = parameters((2, 3), (4,), (1,))
    optimizer = AdamW(params)
    set_grads(params[:2], 5)
    optimizer.step()
    stream = b"aprender-train:adamw:optstate:v1" + struct.pack("<Q", 1)
    for tag, slots in ((b"m", optimizer.first_moments), (b"v", optimizer.second_moments)):
        stream += tag + struct.pack("<Q", 3)
        for a in slots[:2]:
            stream += (
                b"some" + struct.pack("<Q", a.size) + struct.pack(f"<{a.size}f", *a.reshape(-1))
            )
        stream += b"none"
    assert optimizer.state_sha256() == hashlib.sha256(stream).hexdigest()


def test_no_gradient_is_not_a_zero_gradient():
    one, two = parameters((3,)), parameters((3,))
    a, b = AdamW(one), AdamW(two)
    two[0].grad = np.zeros(3, np.float32)
    a.step()
    b.step()
    assert a.state_sha256() != b.state_sha256()


@given(st.integers(0, 6), st.sampled_from([AdamW, Adam, SGD]))
def test_stop_and_resume(stop, make):
    straight, stopped = parameters((7,), (2, 2)), parameters((7,), (2, 2))
    run(straight, make(straight, lr=0.1), 6)
    first = make(stopped, lr=0.1)
    run(stopped, first, stop)
    second = make(stopped)
    second.load_state_dict(first.state_dict())
    for step in range(stop, 6):
        set_grads(stopped, 100 + step)
        second.step()
    assert [p.data.tobytes() for p in stopped] == [p.data.tobytes() for p in straight]


def test_a_state_of_other_parameters_is_refused():
    params = parameters((3,), (4,))
    optimizer = AdamW(params)
    run(params, optimizer, 1)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"number 0 is \(3,\), here \(4,\)"):
        AdamW(parameters((4,), (3,))).load_state_dict(state)
    with pytest.raises(ValueError, match="2 of them, 1 are here"):
        AdamW(parameters((3,))).load_state_dict(state)
    with pytest.raises(ValueError, match="not a state of SGD"):
        SGD(params).load_state_dict(state)


def test_bias_corrections_survive_a_set_step_count():
    params = parameters((3,))
    a, b = AdamW(params), AdamW(params)
    for _ in range(100):
        a.step()
    b.step_count = 100
    assert a._power(0.999) == b._power(0.999)


def test_weights_sha256_is_the_stated_stream():
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    stream = b"afinar:weights:v1" + struct.pack("<Q", 1) + struct.pack("<Q", 3) + b"w.x"
    stream += struct.pack("<Q", 7) + b"float32" + struct.pack("<QQQ", 2, 2, 3) + w.tobytes()
    model = Bag(**{"w.x": Tensor(w)})
    assert weights_sha256(model) == hashlib.sha256(stream).hexdigest()


# --- groups ---


def test_param_groups_keep_the_models_order():
    a, b, c, d = parameters((2, 2), (2,), (3,), (2, 5))
    frozen = Tensor(np.ones((2, 2)))
    model = Bag(a=a, f=frozen, b=b, c=c, d=d)
    groups = param_groups(model, 0.1)
    assert [g["names"] for g in groups] == [["a"], ["b", "c"], ["d"]]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0, 0.1]
    assert AdamW(groups).params == [a, b, c, d]
    assert [g["names"] for g in param_groups(model, 0.1, decay="all")] == [["a", "b", "c", "d"]]


def test_lr_keeps_the_ratio_between_groups():
    a, b = parameters((2,), (2,))
    a.data, b.data = a.data * 0, b.data * 0
    optimizer = SGD([{"params": [a]}, {"params": [b], "lr": 1.6}], lr=0.1)
    optimizer.lr = 0.01
    set_grads([a], 1)
    b.grad = a.grad
    optimizer.step()
    np.testing.assert_allclose(b.data, 16 * a.data, rtol=1e-6)


def test_bad_options_are_refused():
    params = parameters((2,))
    with pytest.raises(ValueError, match="no parameters"):
        AdamW([])
    with pytest.raises(ValueError, match="twice"):
        AdamW([*params, *params])
    with pytest.raises(ValueError, match="unknown options"):
        AdamW([{"params": params, "weight_deacy": 0.1}])
    with pytest.raises(ValueError, match="betas"):
        AdamW(params, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="lr"):
        AdamW(params, lr=-1.0)
    with pytest.raises(ValueError, match="eps"):
        AdamW(params, eps=0.0)
    with pytest.raises(ValueError, match="form"):
        AdamW(params, form="tensorflow")
    with pytest.raises(TypeError, match="Tensors needed"):
        AdamW([np.ones(3)])
    params[0].grad = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="its gradient"):
        AdamW(params).step()


# --- clipping ---


@given(st.lists(st.sampled_from([0, 1, 5, 4095, 4096, 4097, 9000]), max_size=4), st.integers(0, 9))
def test_norm_and_scale(sizes, seed):
    params = [*parameters(*[(n,) for n in sizes]), Tensor([1.0], requires_grad=True)]
    set_grads(params[:-1], seed)
    grads = [p.grad.astype(np.float64) for p in params[:-1]]
    exact = math.sqrt(math.fsum(x * x for g in grads for x in g.tolist()))
    norm = clip_grad_norm(params, 1.0)
    assert norm == pytest.approx(exact, rel=1e-12)
    for p, g in zip(params[:-1], grads, strict=True):
        np.testing.assert_allclose(p.grad, g * min(1, 1 / exact) if exact else g, rtol=1e-6)
    assert params[-1].grad is None


def test_a_norm_that_is_not_finite_leaves_gradients_alone():
    params = parameters((3,))
    params[0].grad = np.array([1, np.inf, 2], np.float32)
    assert clip_grad_norm(params, 1.0) == math.inf
    assert params[0].grad[2] == 2


def test_clip_to_nothing():
    params = parameters((3,))
    set_grads(params, 0)
    clip_grad_norm(params, 0.0)
    assert (params[0].grad == 0).all()


# --- schedules ---


def test_schedules_at_their_corners():
    warm = LinearWarmup(0.1, 4)
    assert [warm(n) for n in (0, 2, 4, 9)] == [0.0, 0.05, 0.1, 0.1]
    assert LinearWarmup(0.1, 0)(0) == 0.1
    cosine = CosineAnnealing(1.0, 10, 0.2)
    assert cosine(0) == 1.0
    assert cosine(5) == pytest.approx(0.6, abs=1e-15)
    assert cosine(10) == cosine(99) == 0.2
    assert CosineAnnealing(1.0, 0, 0.2)(0) == 0.2
    both = WarmupCosineDecay(1.0, 10, 30, 0.1)
    assert both(0) == 0
    assert both(10) == 1
    assert both(30) == 0.1
    assert WarmupCosineDecay(1.0, 0, 30)(0) == 1
    linear = WarmupLinearDecay(1e-5, 0, 10)
    np.testing.assert_allclose(
        [linear(n) for n in range(10)], np.arange(10, 0, -1) * 1e-6, rtol=1e-14
    )
    assert WarmupLinearDecay(1.0, 2, 10)(0) == 0
    decay = StepDecay(1.0, 3, 0.5)
    assert [decay(n) for n in (0, 2, 3, 8, 9)] == [1, 1, 0.5, 0.25, 0.125]
    assert StepDecay(1.0, 0, 0.5)(100) == 1
    with pytest.raises(ValueError, match="not negative"):
        warm(-1)


@given(st.integers(0, 40), st.integers(0, 100), st.floats(0, 1))
def test_cosine_is_the_formula_and_falls(warmup, span, floor):
    schedule = WarmupCosineDecay(1.0, warmup, warmup + span, floor)
    values = [schedule(n) for n in range(warmup, warmup + span + 2)]
    assert all(type(x) is float for x in values)
    assert all(a >= b for a, b in itertools.pairwise(values))
    for n, x in enumerate(values[:span]):
        formula = floor + 0.5 * (1 - floor) * (1 + math.cos(math.pi * n / span))
        assert x == pytest.approx(formula, abs=1e-14)
