"""`fit`: epochs over batches, with validation and callbacks that act."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .batch import LMBatch
from .callbacks import (
    Action,
    Callback,
    CallbackContext,
    CallbackList,
    Progress,
    SnapshotCallback,
)
from .evaluate import evaluate_batches
from .trainer import TransformerTrainer


@dataclass
class TrainResult:
    """What `fit` did, an epoch that was stopped included."""

    steps: int = 0
    epochs: int = 0
    losses: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    stopped: bool = False

    @property
    def final_loss(self) -> float | None:
        """The mean loss of the last epoch."""
        return self.losses[-1] if self.losses else None


def fit(
    trainer: TransformerTrainer,
    batches: Sequence[LMBatch] | Callable[[int], Iterable[LMBatch]],
    *,
    epochs: int = 1,
    valid: Sequence[LMBatch] | None = None,
    callbacks: Iterable[Callback] = (),
    resume: bool = False,
) -> TrainResult:
    """Train for `epochs`, each over all `batches` (or over `batches(epoch)`).

    With `resume` the epochs that the trainer has done count, the one that it is in continues where
    it is, and callbacks have the state that they had: a trainer loaded from a snapshot stops where
    the straight run does, with its bits.

    A begun window is applied at the end of an epoch. After an epoch the model is validated on
    `valid`. Progress is reported every `log_interval` steps, and with `checkpoint_dir` there are
    snapshots every `save_interval` steps; another trainer that writes there is an error. Stops at
    `max_steps`, or when a callback says so.
    """
    config = trainer.config
    own: list[Callback] = [Progress(config.log_interval)]
    if config.checkpoint_dir is not None:
        own.append(SnapshotCallback(config.checkpoint_dir, config.save_interval))
    hooks = CallbackList([*own, *callbacks])
    context = CallbackContext(trainer, max_epochs=epochs, resumed=resume, global_step=trainer.step)
    if resume:
        context.best_loss = trainer.metrics.best_loss or math.inf
        hooks.load_state(trainer.callback_states())
    trainer.callback_states = hooks.state
    result, first = TrainResult(), trainer.step
    try:
        action = hooks.fire("on_train_begin", context)
        for epoch in range(trainer.metrics.epoch if resume else 0, epochs):
            if action is Action.STOP or trainer.reached_max_steps:
                break
            part = batches(epoch) if callable(batches) else batches
            if resume:
                done = trainer.batches - trainer.epoch_start
            else:
                done = 0
                trainer.begin_epoch()
            action = _epoch(trainer, part, done, epoch, valid, hooks, context, result)
            resume = False
        result.stopped = action is Action.STOP
    finally:
        result.steps = trainer.step - first
        hooks.fire("on_train_end", context)
    return result


def _epoch(
    trainer: TransformerTrainer,
    batches: Iterable[LMBatch],
    done: int,
    epoch: int,
    valid: Sequence[LMBatch] | None,
    hooks: CallbackList,
    context: CallbackContext,
    result: TrainResult,
) -> Action:
    context.epoch, context.step = epoch, 0
    context.val_loss = context.val_accuracy = None
    context.steps_per_epoch = None
    if isinstance(batches, Sequence):
        context.steps_per_epoch = math.ceil(len(batches) / trainer.config.accumulation_steps)
    action = hooks.fire("on_epoch_begin", context)
    for window in _windows(batches, done, trainer.config.accumulation_steps):
        if action is not Action.CONTINUE or trainer.reached_max_steps:
            break
        action = _step(trainer, window, hooks, context)
    context.loss = trainer.epoch_loss
    result.losses.append(context.loss)
    result.epochs += 1
    if action is Action.STOP:  # in mid-epoch, where a resumed run goes on
        return action
    if valid is not None:
        found = evaluate_batches(trainer.model, valid)
        context.val_loss, context.val_accuracy = found["loss"], found["accuracy"]
    return _end_epoch(trainer, hooks, context, result)


def _end_epoch(
    trainer: TransformerTrainer, hooks: CallbackList, context: CallbackContext, result: TrainResult
) -> Action:
    context.ending_epoch = True
    trainer.end_epoch()
    answers = []
    if context.val_loss is not None:
        trainer.metrics.record_val_loss(context.val_loss)
        result.val_losses.append(context.val_loss)
        answers.append(hooks.fire("on_validation", context))
    answers.append(hooks.fire("on_epoch_end", context))
    context.ending_epoch = False
    return Action.STOP if Action.STOP in answers else Action.CONTINUE


def _step(
    trainer: TransformerTrainer,
    window: list[LMBatch],
    hooks: CallbackList,
    context: CallbackContext,
) -> Action:
    """One window, and the hooks around it."""
    context.lr = trainer.current_lr
    action = hooks.fire("on_step_begin", context)
    if action is not Action.CONTINUE:
        return action
    for batch in window:
        trainer.compute_batch_gradients(batch)
    record = trainer.clip_and_step()
    assert record is not None
    context.step += 1
    context.global_step = trainer.step
    context.loss, context.lr, context.grad_norm = record.loss, record.lr, record.grad_norm
    if record.skipped is None:
        context.best_loss = min(context.best_loss, record.loss)
    return hooks.fire("on_step_end", context)


def _windows(batches: Iterable[LMBatch], done: int, size: int) -> Iterator[list[LMBatch]]:
    """Batches that are not empty, after the first `done`, `size` at a time, the last ones fewer."""
    rest = itertools.islice((batch for batch in batches if batch.batch_size), done, None)
    while window := list(itertools.islice(rest, size)):
        yield window
