"""Looking rows up, and adding their gradients in one order."""

import numpy as np
import pytest

from afinar.autograd import Tensor, embedding
from afinar.autograd.ops.embedding import embedding_backward, embedding_rows

rng = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint64])
def test_ids_of_any_integer_type(dtype):
    weight = rng.standard_normal((100, 7)).astype(np.float32)
    ids = rng.integers(0, 100, (3, 5))
    assert (embedding(Tensor(weight), ids.astype(dtype)).data == weight[ids]).all()
    columns = np.asfortranarray(ids.astype(dtype))
    assert (embedding(Tensor(weight), columns).data == weight[ids]).all()


def test_bfloat16_bits_are_read_as_float32():
    bits = rng.integers(0, 2**16, (9, 33)).astype(np.uint16)
    ids = rng.integers(0, 9, 200)
    expected = (bits[ids].astype(np.uint32) << 16).view(np.float32)
    out = embedding(Tensor(bits), ids).data
    assert out.dtype == np.float32
    assert (out.view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("V", "C", "N"),
    [(1, 1, 0), (7, 5, 40), (200, 300, 1000), (130, 1, 500), (5, 0, 3), (3, 600, 90)],
)
def test_gradients_are_summed_from_zero_by_ascending_position(dtype, V, C, N):
    """As np.add.at does, one addition after another: the same bits."""
    ids, g = rng.integers(0, V, N), rng.standard_normal((N, C)).astype(dtype)
    expected = np.zeros((V, C), dtype)
    for n in range(N):
        expected[ids[n]] += g[n]
    assert embedding_backward(g, ids, V).tobytes() == expected.tobytes()


def test_p4_repeated_ids_add_up():
    weight = Tensor(np.zeros((9, 2), np.float32), requires_grad=True)
    embedding(weight, np.array([5, 5, 5])).backward(np.array([[1, 10], [2, 20], [4, 40]]))
    expected = np.zeros((9, 2))
    expected[5] = 7, 70
    assert (weight.grad == expected).all()


def test_an_id_that_every_position_shares():
    g = np.ones((50_000, 3), np.float32)
    out = embedding_backward(g, np.full(50_000, 2), 4)
    assert (out == np.array([0, 0, 50_000, 0])[:, None]).all()


def test_a_finished_gradient_is_added_to_what_is_there():
    weight = Tensor(np.zeros((3, 1), np.float32), requires_grad=True)
    big = np.float32(2**24)
    embedding(weight, np.array([1])).backward([[big]])
    embedding(weight, np.array([1, 1])).backward([[1.0], [1.0]])
    assert weight.grad[1, 0] == big + 2  # (big + 1) + 1 would be big


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (np.array([[0, 1], [9, 2]]), ValueError, r"id 9 at index \(1, 0\) is not in 0 .. 8"),
        (np.array([0, -1]), ValueError, r"id -1 at index \(1,\) is not in 0 .. 8"),
        (np.array([2**63 + 5], np.uint64), ValueError, "id 9223372036854775813 at"),
        (np.array([0.0]), TypeError, "ids are integers in an array, given float64"),
        (np.array([True]), TypeError, "ids are integers in an array, given bool"),
        ([0, 1], TypeError, "ids are integers in an array, given list"),
    ],
)
def test_p13_a_bad_id_is_named(ids, error, message):
    with pytest.raises(error, match=message):
        embedding(Tensor(np.zeros((9, 2))), ids)


def test_no_rows_and_no_positions():
    weight = Tensor(np.zeros((4, 3)), requires_grad=True)
    out = embedding(weight, np.zeros((2, 0), np.int64))
    assert out.shape == (2, 0, 3)
    out.backward(np.zeros((2, 0, 3)))
    assert (weight.grad == np.zeros((4, 3))).all()
    with pytest.raises(ValueError, match="a weight \\(V, C\\) needed"):
        embedding(Tensor(np.zeros(4)), np.array([0]))


def test_the_reference_says_the_same():
    weight = rng.standard_normal((50, 20)).astype(np.float32)
    ids = rng.integers(0, 50, 300)
    g = rng.standard_normal((300, 20)).astype(np.float32)
    assert (embedding_rows(weight, ids) == embedding_rows.reference(weight, ids)).all()
    fast, slow = embedding_backward(g, ids, 50), embedding_backward.reference(g, ids, 50)
    assert fast.tobytes() == slow.tobytes()
