"""What a trainer remembers about its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class MetricsTracker:
    """Losses and learning rates, one of each per optimizer step, and validation losses.

    `tokens` counts those that were trained.
    """

    losses: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    steps: int = 0
    epoch: int = 0
    tokens: int = 0

    def record_step(self, loss: float, lr: float, grad_norm: float, tokens: int = 0) -> None:
        """One optimizer step: its loss, the learning rate it used, the norm before clipping."""
        self.losses.append(loss)
        self.learning_rates.append(lr)
        self.grad_norms.append(grad_norm)
        self.tokens += tokens
        self.increment_step()

    def record_epoch(self, loss: float | None = None, lr: float | None = None) -> None:
        """One epoch; with its loss and learning rate where steps are not recorded."""
        if loss is not None:
            self.losses.append(loss)
        if lr is not None:
            self.learning_rates.append(lr)
        self.epoch += 1

    def record_val_loss(self, loss: float) -> None:
        """One validation."""
        self.val_losses.append(loss)

    def increment_step(self) -> None:
        """Count a step."""
        self.steps += 1

    def avg_loss(self, n: int) -> float:
        """The mean of the last n losses; 0 if there is none."""
        last = self.losses[-n:] if n > 0 else []
        return math.fsum(last) / len(last) if last else 0.0

    @property
    def best_loss(self) -> float | None:
        """The least loss so far."""
        return _least(self.losses)

    @property
    def best_val_loss(self) -> float | None:
        """The least validation loss so far."""
        return _least(self.val_losses)

    @property
    def validations_since_best(self) -> int:
        """How many validations there were since the best one, 0 if that was the last.

        Of equal ones the first is best; one that is not a number is none.
        """
        best = self.best_val_loss
        if best is None:
            return len(self.val_losses)
        return len(self.val_losses) - 1 - self.val_losses.index(best)

    def is_improving(self, patience: int) -> bool:
        """Whether one of the last `patience` losses is the best, its first not counted.

        True as long as there are fewer.
        """
        if len(self.losses) < patience or patience < 2:
            return True
        earlier = len(self.losses) - patience + 1
        before, recent = _least(self.losses[:earlier]), _least(self.losses[earlier:])
        return before is None or (recent is not None and recent < before)


def _least(values: list[float]) -> float | None:
    return min((v for v in values if not math.isnan(v)), default=None)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is too large for a float."""
    return math.exp(loss) if loss < 709 else math.inf


def tokens_per_second(tokens: int, seconds: float) -> float:
    """tokens / seconds; infinite for no time at all."""
    return tokens / seconds if seconds > 0 else math.inf
