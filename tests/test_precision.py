"""Precision settings and the loss scaler (a state machine, checked against a model of it)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import GradScaler, PrecisionConfig, Tensor, compute_in
from afinar.autograd.precision import compute_dtype


def test_defaults():
    assert [PrecisionConfig(p).scale for p in ("fp32", "fp16", "bf16")] == [1, 65536, 1]
    assert [PrecisionConfig(p).dynamic for p in ("fp32", "fp16", "bf16")] == [False, True, False]
    assert [PrecisionConfig(p).precision.size for p in ("fp32", "fp16", "bf16")] == [4, 2, 2]
    assert GradScaler.from_config(PrecisionConfig("fp32")).stats == (1.0, 0, 0)
    assert GradScaler.from_config(PrecisionConfig("fp16")).stats == (65536.0, 0, 0)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="given 'fp8'"):
        PrecisionConfig("fp8")
    with pytest.raises(ValueError, match="initial_scale"):
        PrecisionConfig("fp16", initial_scale=0.5)
    with pytest.raises(ValueError, match="growth_interval"):
        PrecisionConfig("fp16", growth_interval=0)


def test_compute_in_is_undone_by_an_exception():
    with pytest.raises(KeyError), compute_in("fp16"):
        raise KeyError
    assert compute_dtype() == "fp32"


def test_the_seeds_numbers():
    scaler = GradScaler()
    for _ in range(2000):
        scaler.update(True)
    assert scaler.stats == (131072.0, 0, 2000)
    scaler.update(False)
    assert scaler.stats == (65536.0, 1, 2000)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(0, 6))
def test_any_history_follows_the_state_machine(history, interval, top):
    scaler = GradScaler(
        config=PrecisionConfig("fp16", 8.0, growth_interval=interval, max_scale=2.0 ** (3 + top))
    )
    run = exponent = 0
    for valid in history:
        scaler.update(valid)
        run = run + 1 if valid else 0
        if not valid:
            exponent = max(exponent - 1, -3)
        elif run == interval:
            exponent, run = min(exponent + 1, top), 0
        again = GradScaler(config=scaler.config)
        again.load_state_dict(scaler.state_dict())
        assert again.state_dict() == scaler.state_dict()
        assert scaler.stats == (8 * 2.0**exponent, scaler.overflow_count, scaler.successful_steps)
    assert (scaler.successful_steps, scaler.overflow_count) == (
        history.count(True),
        history.count(False),
    )


@given(st.lists(st.booleans(), max_size=20))
def test_a_fixed_scale_counts_nothing(history):
    scaler = GradScaler(config=PrecisionConfig("bf16"))
    for valid in history:
        scaler.update(valid)
    assert scaler.stats == (1.0, 0, 0)


def test_scaling_a_loss_scales_its_gradient_exactly():
    x = np.array([1.7, -0.3], np.float32)
    plain, scaled = Tensor(x, requires_grad=True), Tensor(x, requires_grad=True)
    (plain * plain).sum().backward()
    scaler = GradScaler()
    scaler.scale_loss((scaled * scaled).sum()).backward()
    assert (scaled.grad == plain.grad * 65536).all()
    assert scaler.unscale_and_check(scaled.grad)
    assert (scaled.grad == plain.grad).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 65535, 65536, 99_999])
def test_one_wrong_element_is_found(bad, place):
    grad = np.zeros(100_000, np.float32)
    assert GradScaler().unscale_and_check(grad)
    grad[place] = bad
    assert not GradScaler().unscale_and_check(grad)
