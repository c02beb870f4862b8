"""Ops that move elements: NumPy's results, views where NumPy has views, gradients that add up."""

import numpy as np
import pytest

from afinar.autograd import Tensor, concat, stack

rng = np.random.default_rng(0)
x = rng.standard_normal((4, 5, 6))
I = np.array  # noqa: E741 - an index

INDICES = [
    0, -1, np.int64(2), slice(1, 3), slice(None, None, -2), None, ..., (), (0, 1, 2),
    (slice(None), 2), (..., 1), (None, 0), (1, ..., 2), (0, None, slice(1, 4)),
    [0, 0, 2], [], [True, False, True, False], I(0), I([1, 1, 1]), I([[0, 1], [1, 0]]),
    I([0, 3, 3], np.uint8), I([], np.int32), (I([0, 1, 0]), I([2, 2, 2])),
    (slice(None), I([4, 0, 4])), (..., I([1, 1, 3])), (0, I([2, 2])), (None, I([0, 0]), ..., 0),
    (I([0, 0]), slice(None), I([1, 1])), (I([0, 0]), None, I([1, 1])),
    (I([[0], [1]]), I([0, 1, 1])),
    x > 0, (slice(None), [True] * 5), (I([True, False, True, False]), I([1, 1])),
    (x[..., 0] > 0, I([2])), (slice(1, 3), x[0, :, 0] > 0, I([1])),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=lambda i: repr(i)[:40])
def test_p4_every_kind_of_index(index):
    """Values as NumPy's; gradients as additions one after another: repeated elements add up."""
    given = I([], int) if isinstance(index, list) and not index else index
    t = Tensor(x, requires_grad=True)
    out = t[index]
    assert out.shape == x[given].shape
    assert (out.data == x[given]).all()
    g = rng.standard_normal(out.shape)
    out.backward(g)
    expected = np.zeros_like(x)
    np.add.at(expected, given, g)
    assert t.grad.tobytes() == expected.tobytes()


def test_p4_the_shortest_case():
    t = Tensor([1.0], requires_grad=True)
    t[[0, 0]].sum().backward()
    assert t.grad.tolist() == [2.0]


def test_p4_many_repeated_indices_are_fast_and_exact():
    t = Tensor(np.zeros((1000, 8), np.float32), requires_grad=True)
    index = rng.integers(0, 1000, 200_000)
    t[index].sum().backward()
    assert (t.grad == np.bincount(index, minlength=1000)[:, None]).all()


def test_views_where_numpy_has_views():
    t = Tensor(x)
    for view in (
        t.reshape(20, 6), t.reshape(-1), t.swapaxes(0, 2), t.permute(2, 0, 1), t.T, t[1:3],
        t[..., 0], t[None], t.broadcast_to((2, 4, 5, 6)),
    ):  # fmt: skip
        assert np.shares_memory(view.data, x)
    for copy in (t[[0, 1]], t[x > 0], concat(t, t), t.T.reshape(-1)):
        assert not np.shares_memory(copy.data, x)


def test_a_vector_gives_0d_tensors_and_can_be_looped_over():
    t = Tensor([1.0, 2.0], requires_grad=True)
    parts = list(t)
    assert [p.shape for p in parts] == [(), ()]
    (parts[0] * 3.0 + parts[1] * parts[1]).backward()
    assert t.grad.tolist() == [3.0, 4.0]


def test_p8_a_difference_of_length_one_and_a_batch_of_no_rows():
    t = Tensor(np.ones(1), requires_grad=True)
    d = t[1:] - t[:-1]
    assert d.shape == (0,)
    d.sum().backward()
    assert t.grad.tolist() == [0.0]
    rows = Tensor(np.zeros((0, 3)), requires_grad=True)
    concat(rows, rows.reshape(0, 3)).permute(1, 0).sum().backward()
    assert rows.grad.shape == (0, 3)


@pytest.mark.parametrize("axis", [0, 1, -1, -3])
def test_concat_and_stack(axis):
    parts = [
        Tensor(x[:, :2] if axis in (1, -2) else x, requires_grad=True),
        Tensor(x, requires_grad=True),
    ]
    both = concat(*parts, axis=axis)
    assert (both.data == np.concatenate([p.data for p in parts], axis=axis)).all()
    g = rng.standard_normal(both.shape)
    both.backward(g)
    for part, dx in zip(parts, np.split(g, [parts[0].shape[axis]], axis=axis), strict=True):
        assert (part.grad == dx).all()
    same = [Tensor(x, requires_grad=True) for _ in range(3)]
    piled = stack(*same, axis=axis)
    assert (piled.data == np.stack([x] * 3, axis=axis)).all()
    g = rng.standard_normal(piled.shape)
    piled.backward(g)
    for n, part in enumerate(same):
        assert (part.grad == np.take(g, n, axis=axis)).all()


def test_one_tensor_twice():
    t = Tensor(np.ones(3), requires_grad=True)
    concat(t, t * 2.0, t).sum().backward()
    assert (t.grad == 4).all()


t = Tensor(x)
BAD = [
    (lambda: t[9], IndexError, "getitem: index 9 is out of bounds for axis 0"),
    (lambda: t[I([7])], IndexError, "index 7 is out of bounds"),
    (lambda: t[0, 0, 0, 0], IndexError, "too many indices"),
    (lambda: t[1.5], IndexError, "getitem: only integers, slices"),
    (lambda: t[I([True])], IndexError, "boolean index did not match"),
    (lambda: t[t], TypeError, "an index of integers or booleans needed, given a Tensor"),
    (lambda: t.reshape(7, 2), ValueError, r"the 120 elements of shape \(4, 5, 6\) do not fill"),
    (lambda: t.reshape(-1, -1), ValueError, "do not fill shape"),
    (lambda: t.reshape(1.5), TypeError, "reshape: shape of integers needed, given 1.5"),
    (lambda: t.permute(0, 1), ValueError, "permute: each axis of shape .* needed once"),
    (lambda: t.permute(0, 1, 1), ValueError, "needed once, given"),
    (lambda: t.swapaxes(0, 5), ValueError, "swapaxes: axis 5 does not exist"),
    (lambda: t.broadcast_to((2, 2)), ValueError, r"cannot be repeated to \(2, 2\)"),
    (lambda: concat(), TypeError, "concat: one or more tensors needed"),
    (lambda: concat([t, t]), TypeError, "concat: one or more tensors needed"),
    (lambda: concat(t, t[0]), ValueError, "concat: shapes equal but for axis 0 needed"),
    (lambda: concat(t, t, axis=3), ValueError, "concat: axis 3 does not exist"),
    (lambda: stack(t, t[1:]), ValueError, "stack: equal shapes needed"),
    (lambda: stack(t, t, axis=4), ValueError, "stack: axis 4 does not exist"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_p5_item_assignment_says_what_to_do_instead():
    with pytest.raises(TypeError, match="stack, concat or where"):
        t[0] = 1.0
