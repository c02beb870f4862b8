"""What may act between steps: progress, early stopping, snapshots, schedules, monitoring."""

from __future__ import annotations

import enum
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..autograd.device import beside, to_host
from .checks import number, whole
from .lock import Lock

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
    """Where training is. `step` counts within the epoch, `global_step` from the start.

    `resumed` says that training goes on where a trainer, or its snapshot, was; `ending_epoch` that
    some callbacks may have acted on the end of the epoch and others not yet.
    """

    trainer: Any
    max_epochs: int
    resumed: bool = False
    ending_epoch: bool = False
    epoch: int = 0
    step: int = 0
    steps_per_epoch: int | None = None
    global_step: int = 0
    loss: float = math.nan
    lr: float = 0.0
    grad_norm: float = math.nan
    best_loss: float = math.inf
    val_loss: float | None = None
    val_accuracy: float | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed_secs(self) -> float:
        """Seconds since training began."""
        return time.monotonic() - self.started


class Callback:
    """Hooks that do nothing; a subclass overrides what it needs and may return an `Action`.

    What a resumed run needs of it goes through `state` and `load_state`.
    """

    def state(self) -> dict[str, Any]:
        """What a snapshot keeps of this callback: JSON values, and arrays of floats."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`; called before `on_train_begin`."""

    def on_train_begin(self, context: CallbackContext) -> Action | None:
        """Before the first step."""

    def on_train_end(self, context: CallbackContext) -> Action | None:
        """After the last step, also when training was stopped; the last to begin ends first."""

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
    """Several callbacks as one. All of them are called; the strongest answer counts.

    Snapshots are taken last, when the others have acted on what happened, and at the end of
    training first, before one of them puts other weights in.
    """

    def __init__(self, callbacks: Iterable[Callback]):
        self.callbacks = sorted(callbacks, key=lambda c: isinstance(c, SnapshotCallback))

    def fire(self, hook: str, context: CallbackContext) -> Action:
        """Call one hook of each."""
        step = -1 if hook == "on_train_end" else 1
        answers = {getattr(callback, hook)(context) for callback in self.callbacks[::step]}
        return next((a for a in (Action.STOP, Action.SKIP_EPOCH) if a in answers), Action.CONTINUE)

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Each under its class's name; a second one of a class is NAME-2."""
        seen: dict[str, int] = {}
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] = seen.get(name, 0) + 1
            yield name if seen[name] == 1 else f"{name}-{seen[name]}", callback

    def state(self) -> dict[str, dict[str, Any]]:
        """The state of each callback that has one."""
        states = {name: callback.state() for name, callback in self._named()}
        return {name: state for name, state in states.items() if state}

    def load_state(self, states: dict[str, dict[str, Any]]) -> None:
        """Give each callback its state; a warning names those that nobody takes."""
        left = dict(states)
        for name, callback in self._named():
            if name in left:
                callback.load_state(left.pop(name))
        if left:
            warnings.warn(
                f"the run had callbacks that it goes on without: {', '.join(left)}",
                RuntimeWarning,
                3,
            )


class Progress(Callback):
    """A line every `every` steps, through `write` (by default the logger "afinar.train")."""

    def __init__(self, every: int = 10, write: Callable[[str], Any] = log.info):
        self.every, self.write = whole("Progress: every", every, 1), write

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
    the trained weights of the best epoch are put back at the end. A resumed run goes on counting,
    and ends at once if it had run out of patience.
    """

    def __init__(
        self,
        patience: int = 5,
        min_delta: float = 0.0,
        monitor_validation: bool = True,
        restore_best: bool = False,
    ):
        self.patience = whole("EarlyStopping: patience", patience, 1)
        self.min_delta = number(
            "EarlyStopping: min_delta", min_delta, "of at least 0", lambda x: 0 <= x < math.inf
        )
        self.monitor_validation, self.restore_best = monitor_validation, restore_best
        self._forget()

    def _forget(self) -> None:
        self.best, self.counter = math.inf, 0
        self._weights: dict[str, Any] = {}  # of the best epoch, by name

    def state(self) -> dict[str, Any]:
        weights = {f"weights.{name}": a for name, a in self._weights.items()}
        return {"best": self.best, "counter": self.counter, **weights}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best, self.counter = state["best"], state["counter"]
        self._weights = {
            name.removeprefix("weights."): a
            for name, a in state.items()
            if name.startswith("weights.")
        }

    def on_train_begin(self, context: CallbackContext) -> Action:
        if not context.resumed:
            self._forget()
        return self._answer()

    def _answer(self) -> Action:
        return Action.STOP if self.counter >= self.patience else Action.CONTINUE

    def on_epoch_end(self, context: CallbackContext) -> Action:
        loss = context.loss
        if self.monitor_validation and context.val_loss is not None:
            loss = context.val_loss
        if loss < self.best - self.min_delta:
            self.best, self.counter = loss, 0
            if self.restore_best:
                trained = context.trainer.trained_parameters()
                self._weights = {name: to_host(p.data).copy() for name, p in trained.items()}
        else:
            self.counter += 1
        return self._answer()

    def on_train_end(self, context: CallbackContext) -> None:
        trained = context.trainer.trained_parameters()
        for name, a in self._weights.items():
            trained[name].data = beside(a.copy(), trained[name].data)


class SnapshotCallback(Callback):
    """Save a snapshot every `every` steps, after each epoch of a best validation, and at the end.

    Another trainer that is writing into `folder` is an error before the first step.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int | None = None, keep: int = 3):
        self.folder, self.keep = Path(folder), whole("SnapshotCallback: keep", keep, 1)
        self.every = None if every is None else whole("SnapshotCallback: every", every, 1)
        self._lock: Lock | None = None

    def on_train_begin(self, context: CallbackContext) -> None:
        self._lock = Lock(self.folder)

    def on_step_end(self, context: CallbackContext) -> None:
        if self.every and context.global_step % self.every == 0:
            self._save(context, best=False)

    def on_epoch_end(self, context: CallbackContext) -> None:
        if context.val_loss is not None and context.trainer.metrics.validations_since_best == 0:
            self._save(context, best=True)

    def on_train_end(self, context: CallbackContext) -> None:
        if self._lock is not None:  # else the folder is another's
            with self._lock:
                if not context.ending_epoch:  # else an exception left no state to go on from
                    self._save(context, best=False)
            self._lock = None

    def _save(self, context: CallbackContext, best: bool) -> None:
        from .snapshot import save_snapshot

        save_snapshot(self.folder, context.trainer, keep=self.keep, best=best)


class LRSchedule(Callback):
    """Use `schedule(step)` in place of the trainer's own schedule.

    A run that goes on with another schedule than it began with is an error.
    """

    PROBED = (0, 1, 2, 5, 10, 100, 1000, 10_000)  # steps at which two schedules are compared

    def __init__(self, schedule: Callable[[int], float]):
        self.schedule = schedule

    def state(self) -> dict[str, Any]:
        return {"rates": [float(self.schedule(step)) for step in self.PROBED]}

    def load_state(self, state: dict[str, Any]) -> None:
        ours = self.state()["rates"]
        for step, theirs, own in zip(self.PROBED, state["rates"], ours, strict=True):
            if theirs != own:
                raise ValueError(
                    f"LRSchedule: the run was trained with another schedule; the rate of step "
                    f"{step} was {theirs}, is {own}"
                )

    def on_train_begin(self, context: CallbackContext) -> None:
        context.trainer.schedule = self.schedule


class Monitor(Callback):
    """Stop when the loss or the gradient norm is not finite, or the loss is above `max_loss`.

    `reason` says why. A resumed run that was stopped stays so.
    """

    def __init__(self, max_loss: float = math.inf):
        self.max_loss = number("Monitor: max_loss", max_loss, "above 0", lambda x: x > 0)
        self.reason: str | None = None

    def state(self) -> dict[str, Any]:
        return {"reason": self.reason}

    def load_state(self, state: dict[str, Any]) -> None:
        self.reason = state["reason"]

    def on_train_begin(self, context: CallbackContext) -> Action:
        if not context.resumed:
            self.reason = None
        return self._answer()

    def _answer(self) -> Action:
        return Action.STOP if self.reason else Action.CONTINUE

    def on_step_end(self, context: CallbackContext) -> Action:
        for name, value in (("loss", context.loss), ("gradient norm", context.grad_norm)):
            if not math.isfinite(value):
                self.reason = f"step {context.global_step}: the {name} is {value}"
        if context.loss > self.max_loss:
            self.reason = f"step {context.global_step}: the loss {context.loss} is too high"
        return self._answer()
