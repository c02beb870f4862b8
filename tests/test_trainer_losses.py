"""Losses against their formulas and, by finite differences, their gradients."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import Tensor
from afinar.train import (
    BCEWithLogitsLoss,
    CausalLMLoss,
    CrossEntropyLoss,
    HuberLoss,
    L1Loss,
    MSELoss,
    SampleWeightedLoss,
    WeightedLoss,
    perplexity,
    tokens_per_second,
)
from afinar.train.losses import LOSSES

rng = np.random.default_rng(0)
X, Y = rng.standard_normal((2, 3, 5))
P = rng.uniform(0, 1, (3, 5))
ONE_HOT = np.eye(5)[[0, 3, 3]]


def numbers(loss):
    """The value and gradient of a loss of X."""
    x = Tensor(X.copy(), requires_grad=True)
    value = loss(x)
    value.backward()
    return value.item(), x.grad


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


CASES = {
    "MSE": (MSELoss(), Y, ((X - Y) ** 2).mean(), 2 * (X - Y) / X.size),
    "L1": (L1Loss(), Y, np.abs(X - Y).mean(), np.sign(X - Y) / X.size),
    "Huber": (
        HuberLoss(0.7),
        Y,
        np.where(np.abs(X - Y) <= 0.7, (X - Y) ** 2 / 2, 0.7 * (np.abs(X - Y) - 0.35)).mean(),
        np.clip(X - Y, -0.7, 0.7) / X.size,
    ),
    "BCEWithLogits": (
        BCEWithLogitsLoss(),
        P,
        (np.log1p(np.exp(X)) - X * P).mean(),
        (1 / (1 + np.exp(-X)) - P) / X.size,
    ),
    "CrossEntropy": (
        CrossEntropyLoss(),
        ONE_HOT,
        -(ONE_HOT * np.log(softmax(X))).sum(),
        softmax(X) - ONE_HOT,
    ),
    "CausalLM": (
        CausalLMLoss(5),
        np.array([0, 3, -100]),
        -np.log(softmax(X)[[0, 1], [0, 3]]).mean(),
        (softmax(X) - ONE_HOT) / 2 * [[1], [1], [0]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name):
    loss, targets, value, gradient = CASES[name]
    assert loss.name == name
    assert LOSSES[name] is type(loss)
    found, grad = numbers(lambda x: loss(x, targets))
    assert found == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_weighted_loss_weights_value_and_gradient(name):
    loss, targets, value, gradient = CASES[name]
    found, grad = numbers(lambda x: WeightedLoss(loss, 2.5)(x, targets))
    assert found == pytest.approx(2.5 * value, rel=1e-12)
    np.testing.assert_allclose(grad, 2.5 * gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_per_sample_losses_and_their_weights(name):
    loss, targets, _, _ = CASES[name]
    if name == "CausalLM":
        X3, targets = X[None].repeat(3, 0), np.array([[0, 1, 2], [-100, 1, 2], [4, 4, -100]])
    else:
        X3 = X
    one = [loss(Tensor(X3[n : n + 1]), targets[n : n + 1]).item() for n in range(3)]
    np.testing.assert_allclose(loss.per_sample(Tensor(X3), targets).data, one, rtol=1e-12)
    weights = np.array([1.0, 0.0, 3.0])
    x = Tensor(X3.copy(), requires_grad=True)
    weighted = SampleWeightedLoss(loss, weights)(x, targets)
    assert weighted.item() == pytest.approx((one[0] + 3 * one[2]) / 4, rel=1e-12)
    weighted.backward()
    assert (x.grad[1] == 0).all()
    assert (x.grad[2] != 0).any()


@given(st.floats(-1e4, 1e4), st.floats(0, 1))
def test_bce_is_safe_for_any_logit(x, y):
    p = Tensor(np.array([x]), requires_grad=True)
    loss = BCEWithLogitsLoss()(p, np.array([y]))
    loss.backward()
    exact = max(x, 0) - x * y + math.log1p(math.exp(-abs(x)))
    assert loss.item() == pytest.approx(exact, rel=1e-9, abs=1e-9)
    sigmoid = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    assert p.grad[0] == pytest.approx(sigmoid - y, abs=1e-12)


def test_slopes_at_the_corners():
    x = Tensor(np.zeros(2), requires_grad=True)
    L1Loss()(x, np.zeros(2)).backward()
    assert (x.grad == 0).all()
    x.zero_grad()
    BCEWithLogitsLoss()(x, np.array([0.0, 1.0])).backward()
    np.testing.assert_allclose(x.grad, [0.25, -0.25])


def test_next_token_oracles():
    uniform = CausalLMLoss(1000)(Tensor(np.zeros((4, 1000))), np.arange(4))
    assert uniform.item() == pytest.approx(6.907755278982137)
    sure = Tensor(np.eye(7) * 100.0)
    assert CausalLMLoss(7)(sure, np.arange(7)).item() == pytest.approx(0, abs=1e-12)
    nothing = Tensor(np.ones((2, 7)), requires_grad=True)
    loss = CausalLMLoss(7)(nothing, np.array([-100, -100]))
    loss.backward()
    assert loss.item() == 0
    assert (nothing.grad == 0).all()
    flat = CausalLMLoss(5)(Tensor(X.reshape(-1)), np.array([0, 3, -100])).item()
    assert flat == pytest.approx(CASES["CausalLM"][2])
    # users.md P21: one token of loss 4 and three of loss 1 make 7/4.
    losses = np.array([4.0, 1.0, 1.0, 1.0])
    logits = np.stack([np.log(1 / np.expm1(losses)), np.zeros(4)], axis=1)
    assert CausalLMLoss(2)(Tensor(logits), np.zeros(4, int)).item() == pytest.approx(1.75)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"seq_len \* vocab_size"):
        CausalLMLoss(5)(Tensor(X), np.array([0, 1]))
    with pytest.raises(ValueError, match="5"):
        CausalLMLoss(5)(Tensor(X), np.array([0, 1, 5]))
    with pytest.raises(ValueError, match="MSE: predictions"):
        MSELoss()(Tensor(X), Y[:2])
    with pytest.raises(ValueError, match="delta"):
        HuberLoss(0.0)
    with pytest.raises(ValueError, match="one weight a sample"):
        SampleWeightedLoss(MSELoss(), [0.0, 0.0])
    with pytest.raises(ValueError, match="2 weights for 3 samples"):
        SampleWeightedLoss(MSELoss(), [1.0, 2.0])(Tensor(X), Y)


def test_perplexity_and_speed():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e6) == math.inf
    assert tokens_per_second(100, 2.0) == 50
    assert tokens_per_second(100, 0.0) == math.inf
