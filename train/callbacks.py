"""What may act between steps: progress, early stopping, snapshots, schedules, monitoring."""

from __future__ import annotations

import enum
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger("afinar.train")


class Action(enum.Enum):
    """What training does after a callback."""

    CONTINUE = "continue"
    STOP = "stop"
    SKIP_EPOCH = "skip_epoch"


def ends_epoch(answer: Any) -> bool:
    """Whether what a callback returned ends the epoch: False, or an action that is not CONTINUE."""
    return answer is False or (isinstance(answer, Action) and answer is not Action.CONTINUE)


@dataclass
class CallbackContext:
    """Where training is. `step` counts within the epoch, `global_step` from the start."""

    trainer: Any
    max_epochs: int
    epoch: int = 0
    step: int = 0
    steps_per_epoch: int | None = None
    global_step: int = 0
    loss: float = math.nan
    lr: float = 0.0
    grad_norm: float = math.nan
    best_loss: float = math.inf
    val_loss: float | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed_secs(self) -> float:
        """Seconds since training began."""
        return time.monotonic() - self.started


class Callback:
    """Hooks that do nothing; a subclass overrides what it needs and may return an `Action`."""

    def on_train_begin(self, context: CallbackContext) -> Action | None:
        """Before the first step."""

    def on_train_end(self, context: CallbackContext) -> Action | None:
        """After the last step, also when training was stopped."""

    def on_epoch_begin(self, context: CallbackContext) -> Action | None:
        """Before an epoch."""

    def on_epoch_end(self, context: CallbackContext) -> Action | None:
        """After an epoch and its validation; `loss` is the epoch's mean."""

    def on_step_begin(self, context: CallbackContext) -> Action | None:
        """Before an optimizer step; `lr` is the one it is going to use."""

    def on_step_end(self, context: CallbackContext) -> Action | None:
        """After an optimizer step."""

    def on_validation(self, context: CallbackContext) -> Action | None:
        """After a validation; `val_loss` is its loss."""


class CallbackList:
    """Several callbacks as one. All of them are called; the strongest answer counts."""

    def __init__(self, callbacks: Iterable[Callback]):
        self.callbacks = list(callbacks)

    def fire(self, hook: str, context: CallbackContext) -> Action:
        """Call one hook of each."""
        answers = {getattr(callback, hook)(context) for callback in self.callbacks}
        return next((a for a in (Action.STOP, Action.SKIP_EPOCH) if a in answers), Action.CONTINUE)


class Progress(Callback):
    """A line every `every` steps, through `write` (by default the logger "afinar.train")."""

    def __init__(self, every: int = 10, write: Callable[[str], Any] = log.info):
        self.every, self.write = every, write

    def on_step_end(self, context: CallbackContext) -> None:
        c = context
        if c.global_step % self.every == 0:
            self.write(
                f"epoch {c.epoch + 1}/{c.max_epochs} step {c.global_step} loss {c.loss:.4f} "
                f"lr {c.lr:.2e} norm {c.grad_norm:.3f} {c.elapsed_secs:.1f} s"
            )

    def on_validation(self, context: CallbackContext) -> None:
        self.write(f"step {context.global_step} validation loss {context.val_loss:.4f}")


class EarlyStopping(Callback):
    """Stop when the loss of `patience` epochs in a row was not below the best by `min_delta`.

    With `monitor_validation` the validation loss counts, where there is one. With `restore_best`
    the weights of the best epoch are put back at the end.
    """

    def __init__(
        self,
        patience: int = 5,
        min_delta: float = 0.0,
        monitor_validation: bool = True,
        restore_best: bool = False,
    ):
        if patience < 1 or not min_delta >= 0:
            raise ValueError(
                f"EarlyStopping: patience of at least 1 and min_delta of at least 0 needed, "
                f"given {patience} and {min_delta}"
            )
        self.patience, self.min_delta = patience, min_delta
        self.monitor_validation, self.restore_best = monitor_validation, restore_best
        self.best, self.counter = math.inf, 0
        self._weights: dict[str, Any] | None = None

    def on_epoch_end(self, context: CallbackContext) -> Action:
        loss = context.loss
        if self.monitor_validation and context.val_loss is not None:
            loss = context.val_loss
        if loss < self.best - self.min_delta:
            self.best, self.counter = loss, 0
            if self.restore_best:
                state = context.trainer.model.state_dict()
                self._weights = {name: a.copy() for name, a in state.items()}
        else:
            self.counter += 1
        return Action.STOP if self.counter >= self.patience else Action.CONTINUE

    def on_train_end(self, context: CallbackContext) -> None:
        if self._weights is not None:
            context.trainer.model.load_state_dict(self._weights)


class SnapshotCallback(Callback):
    """Save a snapshot every `every` steps, at every best validation, and at the end."""

    def __init__(self, folder: str | os.PathLike[str], every: int | None = None, keep: int = 3):
        self.folder, self.every, self.keep = Path(folder), every, keep

    def on_step_end(self, context: CallbackContext) -> None:
        if self.every and context.global_step % self.every == 0:
            self._save(context, best=False)

    def on_validation(self, context: CallbackContext) -> None:
        if context.val_loss == context.trainer.metrics.best_val_loss:
            self._save(context, best=True)

    def on_train_end(self, context: CallbackContext) -> None:
        self._save(context, best=False)

    def _save(self, context: CallbackContext, best: bool) -> None:
        from .snapshot import save_snapshot

        save_snapshot(self.folder, context.trainer, keep=self.keep, best=best)


class LRSchedule(Callback):
    """Use `schedule(step)` in place of the trainer's own schedule."""

    def __init__(self, schedule: Callable[[int], float]):
        self.schedule = schedule

    def on_train_begin(self, context: CallbackContext) -> None:
        context.trainer.schedule = self.schedule


class Monitor(Callback):
    """Stop when the loss or the gradient norm is not finite, or the loss is above `max_loss`."""

    def __init__(self, max_loss: float = math.inf):
        self.max_loss = max_loss
        self.reason: str | None = None

    def on_step_end(self, context: CallbackContext) -> Action:
        for name, value in (("loss", context.loss), ("gradient norm", context.grad_norm)):
            if not math.isfinite(value):
                self.reason = f"step {context.global_step}: the {name} is {value}"
        if context.loss > self.max_loss:
            self.reason = f"step {context.global_step}: the loss {context.loss} is too high"
        return Action.STOP if self.reason else Action.CONTINUE
