"""What to train on as training goes on: tiers of data, from easy to hard.

    curriculum = TieredCurriculum()      # curriculum.tier 0 is the easiest
    fit(trainer, lambda epoch: tiers[curriculum.tier], valid=valid, callbacks=[curriculum])

As a callback it takes note of every epoch and goes into snapshots; `update` does it by hand.
Bengio et al. 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .callbacks import Callback, CallbackContext
from .checks import number, whole


class Curriculum(Callback):
    """Says which tier of data comes next; a subclass decides when it rises.

    `remembered` names what a resumed training needs of it.
    """

    remembered: tuple[str, ...] = ("tier",)

    def __init__(self, tiers: int):
        self.tiers, self.tier = tiers, 0

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.remembered}

    def load_state(self, state: dict[str, Any]) -> None:
        for name in self.remembered:
            setattr(self, name, state[name])

    def on_epoch_end(self, context: CallbackContext) -> None:
        """Accuracy is that of the validation, 0 without one."""
        self.update((context.epoch + 1) / context.max_epochs, context.val_accuracy or 0.0)

    def update(self, progress: float, accuracy: float) -> int:
        """Take note of how far training is (0 to 1) and how accurate the model; the tier."""
        raise NotImplementedError


class LinearCurriculum(Curriculum):
    """A tier higher at each of `bounds`, parts of the whole training.

    >>> c = LinearCurriculum()
    >>> [c.update(p, 0.0) for p in (0.0, 0.25, 0.6, 1.0)]
    [0, 1, 2, 3]
    """

    def __init__(self, bounds: Sequence[float] = (0.25, 0.5, 0.75)):
        super().__init__(len(bounds) + 1)
        self.bounds = _rising("bounds", bounds)

    def update(self, progress: float, accuracy: float) -> int:
        self.tier = sum(progress >= bound for bound in self.bounds)
        return self.tier


class TieredCurriculum(Curriculum):
    """A tier higher when accuracy was at the tier's threshold `patience` times in a row."""

    remembered = ("tier", "streak")

    def __init__(self, thresholds: Sequence[float] = (0.6, 0.7, 0.8), patience: int = 3):
        super().__init__(len(thresholds) + 1)
        self.thresholds, self.streak = _rising("thresholds", thresholds), 0
        self.patience = whole("TieredCurriculum: patience", patience, 1)

    def update(self, progress: float, accuracy: float) -> int:
        if self.tier < len(self.thresholds):
            self.streak = self.streak + 1 if accuracy >= self.thresholds[self.tier] else 0
            if self.streak >= self.patience:
                self.tier, self.streak = self.tier + 1, 0
        return self.tier


class AdaptiveCurriculum(Curriculum):
    """The tier that a running mean of the accuracy has earned: down again too."""

    remembered = ("tier", "mean")

    def __init__(self, thresholds: Sequence[float] = (0.6, 0.7, 0.8), smoothing: float = 0.1):
        super().__init__(len(thresholds) + 1)
        self.thresholds, self.mean = _rising("thresholds", thresholds), 0.0
        self.smoothing = number(
            "AdaptiveCurriculum: smoothing", smoothing, "in (0, 1]", lambda x: 0 < x <= 1
        )

    def update(self, progress: float, accuracy: float) -> int:
        self.mean += self.smoothing * (accuracy - self.mean)
        self.tier = sum(self.mean >= threshold for threshold in self.thresholds)
        return self.tier


def _rising(name: str, values: Sequence[float]) -> tuple[float, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError(f"curriculum: {name} must rise, given {list(values)}")
    return tuple(values)


def efficiency(accuracy: float, size_bytes: int) -> float:
    """Accuracy for what the model weighs: accuracy / ln(bytes)."""
    if size_bytes < 2:
        raise ValueError(f"efficiency: a size of at least 2 bytes needed, given {size_bytes}")
    return accuracy / math.log(size_bytes)
