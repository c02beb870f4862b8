"""When a curriculum moves on."""

import math

import pytest

from afinar.train.curriculum import (
    AdaptiveCurriculum,
    LinearCurriculum,
    TieredCurriculum,
    efficiency,
)


def test_linear_goes_by_progress():
    c = LinearCurriculum()
    assert c.tiers == 4
    progress = (0.0, 0.2499, 0.25, 0.5, 0.75, 1.0)
    assert [c.update(p, 0.0) for p in progress] == [0, 0, 1, 2, 3, 3]


def test_tiered_needs_patience_and_never_falls():
    c = TieredCurriculum()
    accuracy = [0.6, 0.6, 0.5, 0.6, 0.65, 0.7, 0.7, 0.7, 0.7, 0.1, 0.9, 0.9, 0.9, 0.9]
    assert [c.update(0.0, a) for a in accuracy] == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3]


def test_adaptive_follows_a_running_mean():
    c = AdaptiveCurriculum((0.2, 0.5), smoothing=0.5)
    assert [c.update(0.0, a) for a in (0.3, 0.5, 0.8, 0.0, 0.0)] == [0, 1, 2, 1, 0]


def test_efficiency():
    assert efficiency(0.5, 1000) == pytest.approx(0.5 / math.log(1000))
    with pytest.raises(ValueError, match="2 bytes"):
        efficiency(0.5, 1)
    with pytest.raises(ValueError, match="must rise"):
        LinearCurriculum((0.5, 0.5))
