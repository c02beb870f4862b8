"""Learning rates as functions of the step: the first update uses step 0.

Under a warmup that is 0, as in Hugging Face's schedules. All are computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..autograd.mathf import host_cos


def _warmup(lr: float, step: int, warmup_steps: int) -> float:
    return lr * step / warmup_steps


def _cosine(lr: float, min_lr: float, step: int, total: int) -> float:
    if step >= total:
        return min_lr
    return min_lr + 0.5 * (lr - min_lr) * (1 + float(host_cos(math.pi * step / total)))


def _check(step: int) -> None:
    if step < 0:
        raise ValueError(f"schedule: steps are not negative, given {step}")


@dataclass(frozen=True)
class LinearWarmup:
    """lr step / warmup_steps, then lr. Without warmup lr throughout."""

    lr: float
    warmup_steps: int

    def __call__(self, step: int) -> float:
        _check(step)
        return _warmup(self.lr, step, self.warmup_steps) if step < self.warmup_steps else self.lr


@dataclass(frozen=True)
class CosineAnnealing:
    """Half a cosine from lr at step 0 to min_lr at total_steps, and min_lr from there on."""

    lr: float
    total_steps: int
    min_lr: float = 0.0

    def __call__(self, step: int) -> float:
        _check(step)
        return _cosine(self.lr, self.min_lr, step, self.total_steps)


@dataclass(frozen=True)
class WarmupCosineDecay:
    """Linear to lr at warmup_steps, then half a cosine to min_lr at total_steps."""

    lr: float
    warmup_steps: int
    total_steps: int
    min_lr: float = 0.0

    def __call__(self, step: int) -> float:
        _check(step)
        if step < self.warmup_steps:
            return _warmup(self.lr, step, self.warmup_steps)
        rest = self.total_steps - self.warmup_steps
        return _cosine(self.lr, self.min_lr, step - self.warmup_steps, rest)


@dataclass(frozen=True)
class WarmupLinearDecay:
    """Linear to lr at warmup_steps, then linear to min_lr at total_steps."""

    lr: float
    warmup_steps: int
    total_steps: int
    min_lr: float = 0.0

    def __call__(self, step: int) -> float:
        _check(step)
        if step < self.warmup_steps:
            return _warmup(self.lr, step, self.warmup_steps)
        if step >= self.total_steps:
            return self.min_lr
        left = self.total_steps - step
        return self.min_lr + (self.lr - self.min_lr) * left / (self.total_steps - self.warmup_steps)


@dataclass(frozen=True)
class StepDecay:
    """lr times gamma for every step_size steps. With step_size 0 lr throughout."""

    lr: float
    step_size: int
    gamma: float = 0.1

    def __call__(self, step: int) -> float:
        _check(step)
        lr = self.lr
        for _ in range(step // self.step_size if self.step_size else 0):
            lr *= self.gamma
        return lr
