"""`PretrainLoop`: epochs of a fixed number of steps, with gates that stop a run gone wrong."""

from __future__ import annotations

import enum
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..optim import WarmupCosineDecay
from .batch import LMBatch
from .checks import Checked
from .evaluate import evaluate_batches
from .lock import Lock
from .metrics import perplexity, tokens_per_second
from .trainer import TransformerTrainer

# What a PretrainConfig says of the trainer, and the name of that in the trainer's own config.
OF_THE_TRAINER = {"seed": "seed", "grad_clip": "max_grad_norm", "weight_decay": "weight_decay"}


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Checked):
    """How long, how fast, and when to stop.

    A run stops early when the validation loss did not improve for more than `patience` epochs,
    from epoch `min_epochs` on. It aborts on a step that is not finite, on a first validation loss
    above `max_first_loss`, and on one above `divergence` times the one before. Each batch has
    `batch_size` sequences of at most `seq_length` tokens. The result says whether a validation loss
    was at `target_val_loss` or below.
    """

    lr_max: float = 5e-5
    lr_min: float = 1e-6
    warmup_steps: int = 100
    total_steps: int = 1000
    steps_per_epoch: int = 100
    batch_size: int = 16
    seq_length: int = 1024
    seed: int = 42
    grad_clip: float | None = 1.0
    weight_decay: float = 0.01
    target_val_loss: float = 2.2
    patience: int = 2
    min_epochs: int = 3
    max_first_loss: float = 10.0
    divergence: float = 2.0

    def __post_init__(self) -> None:
        self._whole(1, "total_steps", "steps_per_epoch", "batch_size", "seq_length", "min_epochs")
        self._whole(0, "warmup_steps", "seed", "patience")
        self._number("above 0", lambda x: 0 < x < math.inf, "lr_max")
        self._number("between 0 and lr_max", lambda x: 0 <= x <= self.lr_max, "lr_min")
        self._number("of at least 0", lambda x: 0 <= x < math.inf, "weight_decay")
        self._number("above 0", lambda x: x > 0, "target_val_loss", "max_first_loss", "divergence")
        if self.grad_clip is not None:
            self._number("above 0 (or None)", lambda x: x > 0, "grad_clip")

    @property
    def num_epochs(self) -> int:
        """ceil(total_steps / steps_per_epoch); each epoch has its full length."""
        return math.ceil(self.total_steps / self.steps_per_epoch)

    @property
    def schedule(self) -> WarmupCosineDecay:
        """Linear warmup to lr_max, then a cosine to lr_min."""
        return WarmupCosineDecay(self.lr_max, self.warmup_steps, self.total_steps, self.lr_min)


@dataclass
class StepMetrics:
    """One step; ValueError says which figure cannot be."""

    step: int
    train_loss: float
    grad_norm: float  # before clipping
    lr: float
    tokens_per_sec: float

    def validate(self) -> None:
        """Raise ValueError for a figure that is negative or not finite."""
        for name in ("train_loss", "grad_norm", "lr", "tokens_per_sec"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"step {self.step}: {name} is {value}")


@dataclass
class EpochMetadata:
    """One epoch; written beside its weights."""

    epoch: int
    train_loss: float
    val_loss: float
    train_ppl: float
    val_ppl: float
    optimizer_state_sha: str
    wall_seconds: float
    tokens_seen: int
    grad_norm_max: float


class RunStatus(enum.Enum):
    """How a run ended."""

    OK = "ok"
    EARLY_STOP = "early_stop"
    ABORTED = "aborted"


@dataclass
class PretrainResult:
    """How a run ended, why, its epochs, and whether a validation loss was at the target."""

    status: RunStatus
    message: str = ""
    reached_target: bool = False
    epochs: list[EpochMetadata] = field(default_factory=list)
    steps: list[StepMetrics] = field(default_factory=list)


class PretrainLoop:
    """Train `trainer` on `batch_at(i)` for i = 0, 1, ... and validate on `valid` every epoch.

    With a `folder`, each epoch that passes its gates leaves `ckpt/epoch-NNN.apr`,
    `ckpt/epoch-NNN.metadata.json` and a snapshot in `snapshots` there. The learning rate is the
    loop's; what the trainer was built with (seed, clipping, decay) must be what `config` says.
    """

    def __init__(
        self,
        config: PretrainConfig,
        trainer: TransformerTrainer,
        batch_at: Callable[[int], LMBatch],
        valid: list[LMBatch],
        folder: str | os.PathLike[str] | None = None,
    ):
        if not valid:
            raise ValueError("PretrainLoop: at least one validation batch is needed")
        for own, theirs in OF_THE_TRAINER.items():
            a, b = getattr(config, own), getattr(trainer.config, theirs)
            if a != b:
                raise ValueError(
                    f"PretrainLoop: {own} is {a} and the trainer's {theirs} is {b}; "
                    "they must be the same"
                )
        steps = config.num_epochs * config.steps_per_epoch
        most = trainer.config.max_steps
        if most is not None and most < steps:
            raise ValueError(
                f"PretrainLoop: total_steps makes {steps} steps, the trainer's max_steps is {most}"
            )
        self.config, self.trainer = config, trainer
        self.batch_at, self.valid = batch_at, valid
        self.folder = None if folder is None else Path(folder)
        trainer.schedule = config.schedule
        self.patience_count = 0
        self.best_val_loss = math.inf

    def run(self, resume: bool = False) -> PretrainResult:
        """All epochs, or up to the gate that stops.

        With `resume` the epochs that the trainer has done count: one loaded from `snapshots` ends
        with the bits of the straight run. The result is of the epochs that were done here.
        """
        if self.folder is None:
            return self._run(resume)
        with Lock(self.folder / "snapshots"):
            return self._run(resume)

    def _run(self, resume: bool) -> PretrainResult:
        result, before = PretrainResult(RunStatus.OK), None
        done = list(self.trainer.metrics.val_losses) if resume else []
        if not resume:
            self.trainer.begin_epoch()
        for epoch in range(self.config.num_epochs):
            if epoch < len(done):
                before = done[epoch]
            elif problem := self._epoch(epoch, before, result):
                result.status, result.message = RunStatus.ABORTED, problem
                break
            else:
                before = result.epochs[-1].val_loss
            if self.check_convergence(epoch, before):
                result.status = RunStatus.EARLY_STOP
                result.message = (
                    f"epoch {epoch}: no better validation loss than {self.best_val_loss:.4f} "
                    f"for {self.patience_count} epochs"
                )
                break
        result.reached_target = self.best_val_loss <= self.config.target_val_loss
        if result.status is RunStatus.OK and not result.reached_target:
            result.message = (
                f"the best validation loss, {self.best_val_loss:.4f}, is above the target "
                f"{self.config.target_val_loss}"
            )
        return result

    def _epoch(self, epoch: int, before: float | None, result: PretrainResult) -> str | None:
        """The steps left of an epoch, and its validation; what is wrong with it, or None."""
        trainer, begun, largest = self.trainer, time.monotonic(), 0.0
        done = (trainer.batches - trainer.epoch_start) // trainer.config.accumulation_steps
        for _ in range(done, self.config.steps_per_epoch):
            batches = self._window()
            try:
                step = self._step(batches)
                step.validate()
            except (RuntimeError, ValueError) as error:
                return f"DIVERGENCE at epoch {epoch}: {error}"
            result.steps.append(step)
            largest = max(largest, step.grad_norm)
        val_loss = evaluate_batches(trainer.model, self.valid)["loss"]
        if problem := self._divergence(epoch, val_loss, before):
            return problem
        train_loss = trainer.epoch_loss
        trainer.metrics.record_val_loss(val_loss)
        trainer.end_epoch()
        metadata = EpochMetadata(
            epoch,
            train_loss,
            val_loss,
            perplexity(train_loss),
            perplexity(val_loss),
            trainer.optimizer_state_sha256(),
            time.monotonic() - begun,
            trainer.metrics.tokens,
            largest,
        )
        result.epochs.append(metadata)
        self._save(metadata)
        return None

    def _window(self) -> list[LMBatch]:
        """The batches of the next step."""
        c, trainer = self.config, self.trainer
        numbers = range(trainer.batches, trainer.batches + trainer.config.accumulation_steps)
        batches = [self.batch_at(i) for i in numbers]
        for i, batch in zip(numbers, batches, strict=True):
            if batch.batch_size != c.batch_size or batch.seq_len > c.seq_length:
                raise ValueError(
                    f"PretrainLoop: batch {i} has {batch.batch_size} sequences of {batch.seq_len} "
                    f"tokens; batch_size is {c.batch_size}, seq_length {c.seq_length}"
                )
        return batches

    def _step(self, batches: list[LMBatch]) -> StepMetrics:
        trainer, begun = self.trainer, time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the gate says it
            for batch in batches:
                trainer.train_batch(batch)
        record = trainer.last
        assert record is not None
        if record.skipped is not None and not trainer.scaler.config.dynamic:
            raise ValueError(f"step {record.step + 1}: {record.skipped}")
        rate = tokens_per_second(record.tokens, max(time.monotonic() - begun, 1e-9))
        norm = record.grad_norm if record.skipped is None else 0.0
        return StepMetrics(record.step, record.loss, norm, record.lr, rate)

    def _divergence(self, epoch: int, val_loss: float, before: float | None) -> str | None:
        config = self.config
        start = f"DIVERGENCE at epoch {epoch}: validation loss {val_loss}"
        if not math.isfinite(val_loss):
            return f"{start} is not finite"
        if before is None and val_loss > config.max_first_loss:
            return f"{start} is above {config.max_first_loss}"
        if before is not None and val_loss > config.divergence * before:
            return f"{start} is more than {config.divergence} times {before}"
        return None

    def check_convergence(self, epoch: int, val_loss: float) -> bool:
        """Take note of a validation loss; whether it is time to stop."""
        if val_loss < self.best_val_loss:
            self.best_val_loss, self.patience_count = val_loss, 0
        else:
            self.patience_count += 1
        late = epoch + 1 >= self.config.min_epochs
        return late and self.patience_count > self.config.patience

    def _save(self, metadata: EpochMetadata) -> None:
        if self.folder is None:
            return
        from .folder import write_atomic
        from .snapshot import save_snapshot

        path = self.folder / "ckpt" / f"epoch-{metadata.epoch:03}.apr"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.trainer.save_apr(path)
            write_atomic(path.with_suffix(".metadata.json"), _json(asdict(metadata)))
            best = self.trainer.metrics.validations_since_best == 0
            save_snapshot(self.folder / "snapshots", self.trainer, best=best)
        except (OSError, RuntimeError) as error:  # an epoch is worth more than its copy
            warnings.warn(f"{path} was not written: {error}", RuntimeWarning, 2)


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
