"""`TransformerTrainer`: from batches to steps.

A step is a window of `accumulation_steps` micro-batches. Each adds the gradient of the *sum* of
its losses; when the window is whole, one factor turns the sum into the mean over all tokens that
counted, undoes the loss scale and clips, and AdamW applies it while it reads the gradients. So the
gradient is that of one big batch, however it is split, and clipping acts on that mean.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..autograd import GradScaler, Tensor, compute_in
from ..autograd.device import finish, gpu_memory, resolve_device, with_memory
from ..autograd.precision import all_finite
from ..autograd.tape import keep_results
from ..lora import (
    LoRAConfig,
    apply_lora,
    lora_config,
    lora_modules,
    lora_param_groups,
    merge_lora,
    merged_state_dict,
    unmerge_lora,
)
from ..optim import AdamW, grad_norm, param_groups
from ..optim.clip import clip_coefficient
from ..transformer import (
    Decoder,
    DecoderConfig,
    Transformer,
    TransformerConfig,
    lock_init_seed,
)
from ..transformer.dropout import dropout_scope
from .batch import LMBatch
from .config import TransformerTrainConfig
from .losses import CausalLMLoss
from .metrics import MetricsTracker


@dataclass
class StepRecord:
    """What became of one window of micro-batches."""

    step: int  # optimizer steps done
    loss: float  # mean over the tokens that counted
    lr: float  # the learning rate used
    grad_norm: float  # before clipping
    tokens: int
    skipped: str | None = None  # why the gradient was not applied
    gpu_memory: tuple[int, int] | None = None  # bytes in use before the step, and held by the pool


class TransformerTrainer:
    """Trains a new model of `config.model_config`, or with `with_model` one that exists.

    `step` counts optimizer steps, `windows` attempts at one, `batches` the micro-batches taken,
    `epoch_start` those taken before the current epoch.
    A window whose gradient is not finite, or in which no token counts, is dropped as a whole:
    `windows` advances, `step`, the optimizer and the schedule do not.

    `profile` holds the seconds that the parts of the last profiled window took.
    """

    def __init__(self, config: TransformerTrainConfig):
        _check_config(config)
        shape = config.model_config
        with lock_init_seed(config.seed):
            if isinstance(shape, DecoderConfig):
                model = Decoder(shape)
            elif isinstance(shape, TransformerConfig):
                model = Transformer(shape)
            else:
                raise TypeError(
                    "TransformerTrainer: model_config must be a TransformerConfig or a "
                    f"DecoderConfig, given {shape!r}; use with_model for a model that exists"
                )
        self._build(config, model)

    @classmethod
    def with_model(cls, model: Any, config: TransformerTrainConfig) -> TransformerTrainer:
        """A trainer of this model, which may carry adapters already."""
        _check_config(config)
        trainer = cls.__new__(cls)
        trainer._build(config, model)
        return trainer

    def _build(self, config: TransformerTrainConfig, model: Any) -> None:
        self.device = resolve_device(config.device)
        config.apply_deterministic_settings()
        self.config, self._model = config, model
        if config.is_lora:
            apply_lora(model, _lora_config(config), seed=config.seed)
        model.to(self.device)
        layers = model.config.num_hidden_layers
        if config.checkpointing.enabled:
            model.checkpointing = config.checkpointing.starts(layers)
        self.optimizer = AdamW(
            self._groups(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            form=config.adam_form,
        )
        self.scaler = GradScaler.from_config(config.precision)
        self.schedule = config.schedule
        self.metrics = MetricsTracker()
        self.loss_fn = CausalLMLoss(model.config.vocab_size)
        self.step = self.windows = self.batches = 0
        self.begin_epoch()
        self.overflows_in_a_row = 0
        self.callback_states: Callable[[], dict[str, dict[str, Any]]] = dict  # set by `fit`
        self.last: StepRecord | None = None
        self.profile: dict[str, float] = {}
        self._forget_window()

    def _groups(self) -> list[dict[str, Any]]:
        c = self.config
        if not self.is_lora:
            return param_groups(self._model, c.weight_decay, c.decay)
        groups = lora_param_groups(self._model, c.lr, c.weight_decay, c.lora_plus_ratio)
        for group in groups if c.decay == "all" else ():
            group["weight_decay"] = c.weight_decay
        return groups

    def _forget_window(self) -> None:
        self.accumulated_batches = 0
        self._begun: list[LMBatch] = []  # the window's batches, in case memory ends
        self._loss_sum, self._tokens, self._unit = 0.0, 0, 1.0

    # --- questions ---

    @property
    def model(self) -> Any:
        """The model, adapters included."""
        return self._model

    @property
    def is_lora(self) -> bool:
        """Whether the model carries adapters."""
        return bool(lora_modules(self._model))

    @property
    def lora_layers(self) -> list[Any]:
        """The adapted layers, in the model's order."""
        return [layer for _, layer in lora_modules(self._model)]

    @property
    def is_mixed_precision(self) -> bool:
        """Whether matrix products are computed in 16 bits."""
        return self.config.precision.is_mixed

    @property
    def is_checkpointing(self) -> bool:
        """Whether activations are computed twice."""
        return self.config.checkpointing.enabled

    @property
    def current_lr(self) -> float:
        """The learning rate that the next step uses."""
        return self.schedule(self.step)

    @property
    def grad_scaler_stats(self) -> tuple[float, int, int]:
        """(scale, overflows, successful steps)."""
        return self.scaler.stats

    @property
    def reached_max_steps(self) -> bool:
        """Whether `max_steps` steps are done."""
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    @property
    def last_lr(self) -> float:
        """The learning rate that the last window used."""
        return self.last.lr if self.last else 0.0

    @property
    def last_grad_norm(self) -> float:
        """The gradient norm of the last window, before clipping."""
        return self.last.grad_norm if self.last else 0.0

    @property
    def window_start(self) -> int:
        """The number of micro-batches taken before the begun window: where a resumed run starts."""
        return self.batches - self.accumulated_batches

    @property
    def epoch_loss(self) -> float:
        """The mean loss of the tokens that were trained in this epoch; NaN if none was."""
        total, tokens = self._epoch
        return total / tokens if tokens else math.nan

    def trained_parameters(self) -> dict[str, Tensor]:
        """What the optimizer steps, by name and in its order."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        return {names[id(p)]: p for p in self.optimizer.params}

    # --- one batch ---

    def forward_single(self, input: Any, target: Any) -> tuple[float, Tensor, Tensor]:
        """The loss of one sequence as a number, the same to call backward on, and the logits."""
        with self._computing():
            logits = self._model(np.asarray(input))
            loss = self.loss_fn(logits, np.asarray(target))
        return loss.item(), loss, logits

    def train_batch(self, batch: LMBatch) -> float:
        """One micro-batch, and a step when it completes a window.

        Returns the mean loss over its tokens that count; 0 if there are none.
        """
        _check_batch("train_batch", batch)
        if batch.batch_size == 0:
            return 0.0
        loss = self.compute_batch_gradients(batch)
        if self.accumulated_batches >= self.config.accumulation_steps:
            self.clip_and_step()
        return loss

    def compute_batch_gradients(self, batch: LMBatch) -> float:
        """Add the gradient of the summed loss of one micro-batch; returns its mean loss."""
        _check_batch("compute_batch_gradients", batch)
        if batch.seq_len > self.config.max_seq_len:
            raise ValueError(
                f"train_batch: sequences of {batch.seq_len} tokens, max_seq_len is "
                f"{self.config.max_seq_len}"
            )
        _, count = batch.targets_for(self._model)
        if self.accumulated_batches == 0:
            self._model.train()
            self.optimizer.zero_grad()
            if self._profiling:
                self.profile = {}
            # Gradients of sums would overflow float16. A power of two near the size of the window
            # keeps them where those of means are, and changes no bit otherwise.
            size = batch.inputs.size * self.config.accumulation_steps
            self._unit = 2.0 ** -(size - 1).bit_length()
        self._begun.append(batch)
        total = with_memory(
            self._add_gradients,
            f"train_batch: {batch.batch_size} sequences of {batch.seq_len} tokens",
            "make the batch smaller (and accumulate more of them) or the sequences shorter, turn "
            "on checkpointing, or compute in bf16",
            again=self._add_all_gradients,
        )
        self._loss_sum += total
        self._tokens += count
        self.accumulated_batches += 1
        self.batches += 1
        return total / count if count else 0.0

    def _add_gradients(self, micro: int = -1) -> float:
        """Add the gradient of a micro-batch of the window, the last one begun; its summed loss."""
        micro %= len(self._begun)
        batch = self._begun[micro]
        targets, count = batch.targets_for(self._model)
        if not count:
            return 0.0
        with self._timed("forward"), self._computing(micro):
            loss = self._model.loss(
                batch.inputs, targets, batch.positions, batch.segments, reduction="sum"
            )
        with self._timed("backward"):
            loss.backward(np.asarray(self._unit * self.scaler.scale, loss.dtype))
        return loss.item()

    def _add_all_gradients(self) -> float:
        """The window from its beginning: some gradients may hold a part of its last batch."""
        self.optimizer.zero_grad()
        return [self._add_gradients(micro) for micro in range(len(self._begun))][-1]

    @contextlib.contextmanager
    def _computing(self, micro: int | None = None) -> Iterator[None]:
        """The precision and the dropout masks of a micro-batch, of the next one by default."""
        config, micro = self.config, self.accumulated_batches if micro is None else micro
        with (
            compute_in(config.precision.precision),
            dropout_scope(config.seed, self.windows, micro),
            keep_results(*config.checkpointing.kept_kernels),
        ):
            yield

    @property
    def _profiling(self) -> bool:
        interval = self.config.profile_interval
        return interval > 0 and self.windows % interval == 0

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        if self._profiling:
            finish(self.device)
        start = time.perf_counter()
        yield
        if self._profiling:
            finish(self.device)
            self.profile[part] = self.profile.get(part, 0.0) + time.perf_counter() - start

    # --- one step ---

    def clip_and_step(self) -> StepRecord | None:
        """Apply the gradients of the window so far; None if it holds no batch.

        Raises RuntimeError if too many windows in a row had a gradient that is not finite.
        """
        if not self.accumulated_batches:
            return None
        tokens, lr = self._tokens, self.current_lr
        mean = 1 / (tokens * self._unit * self.scaler.scale) if tokens else 0.0
        norm = grad_norm(self.optimizer.params) * mean
        record = StepRecord(self.step, self._loss_sum / max(tokens, 1), lr, norm, tokens)
        record.gpu_memory = gpu_memory() if self.device == "gpu" else None
        if not tokens:
            record.skipped = "no token counts"
            warnings.warn(f"window {self.windows}: no token counts; skipped", RuntimeWarning, 2)
        elif not math.isfinite(norm):
            record.skipped = f"the gradient of {self._first_not_finite()} is not finite"
            self._overflow(record)
        else:
            self._apply(record, mean)
        self.optimizer.zero_grad()
        self.windows += 1
        self._forget_window()
        self.last = record
        if self.overflows_in_a_row >= self.config.max_overflows:
            raise RuntimeError(
                f"training gave up after step {self.step}: {self.overflows_in_a_row} windows in a "
                f"row were dropped; of the last one {record.skipped}, its loss was {record.loss}"
            )
        return record

    def _apply(self, record: StepRecord, mean: float) -> None:
        limit = self.config.max_grad_norm
        clip = 1.0 if limit is None else clip_coefficient(record.grad_norm, limit)
        if self.step == 0:
            self._warn_of_idle()
        self.optimizer.lr = record.lr
        with self._timed("optimizer"):
            with_memory(
                lambda: self.optimizer.step(grad_scale=mean * clip),
                "the optimizer's moments",
                "train fewer parameters (LoRA), or a smaller model",
            )
        self.scaler.update(True)
        self.overflows_in_a_row = 0
        self.step += 1
        record.step = self.step
        total, tokens = self._epoch
        self._epoch = total + record.loss * record.tokens, tokens + record.tokens
        self.metrics.record_step(record.loss, record.lr, record.grad_norm, record.tokens)

    def _overflow(self, record: StepRecord) -> None:
        self.overflows_in_a_row += 1
        if (
            not self.scaler.config.dynamic
        ):  # float16 overflows now and then; the others never should
            warnings.warn(
                f"window {self.windows} (step {self.step + 1}) was dropped: {record.skipped}",
                RuntimeWarning,
                3,
            )
        self.scaler.update(False)

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, p) for n, p in self._model.named_parameters() if p.requires_grad)

    def _first_not_finite(self) -> str:
        wrong = (n for n, p in self._trained() if p.grad is not None and not all_finite(p.grad))
        return next(wrong, "the whole model")

    def _warn_of_idle(self) -> None:
        idle = [name for name, p in self._trained() if p.grad is None]
        if idle:
            warnings.warn(f"these got no gradient: {', '.join(idle[:8])}", RuntimeWarning, 4)

    # --- one epoch ---

    def train_epoch(self, batches: Iterable[LMBatch]) -> float:
        """Train on each batch; a begun window is applied at the end.

        Stops at `max_steps`. Returns the mean loss over all tokens that counted.
        """
        return self.train_epoch_with_callback(batches, lambda index, loss, trainer: None)

    def train_epoch_with_callback(
        self,
        batches: Iterable[LMBatch],
        callback: Callable[[int, float, TransformerTrainer], Any],
    ) -> float:
        """`train_epoch` that calls `callback(index, loss, trainer)` after each batch.

        The epoch ends early if that returns False or an action other than `Action.CONTINUE`.
        """
        from .callbacks import ends_epoch

        total, tokens = 0.0, 0
        for index, batch in enumerate(batches):
            if self.reached_max_steps:
                break
            _, count = batch.targets_for(self._model)
            loss = self.train_batch(batch)
            total, tokens = total + loss * count, tokens + count
            if ends_epoch(callback(index, loss, self)):
                break
        self.clip_and_step()
        self.end_epoch()
        return total / tokens if tokens else 0.0

    def begin_epoch(self) -> None:
        """The next batch is an epoch's first."""
        self.epoch_start = self.batches
        self._epoch = 0.0, 0

    def end_epoch(self) -> None:
        """An epoch is done, and the next batch is an epoch's first."""
        self.metrics.record_epoch()
        self.begin_epoch()

    # --- what was trained ---

    def optimizer_state_sha256(self) -> str:
        """The name of the optimizer's state: `AdamW.state_sha256`."""
        return self.optimizer.state_sha256()

    def save(self, path: str | os.PathLike[str], name: str = "", architecture: str = "") -> None:
        """The trained model, adapters merged into it.

        A path that ends in `.safetensors` is one file, with `name` and `architecture` in its
        metadata; any other path is a folder that `load_pretrained` opens.
        """
        from ..transformer import save_pretrained
        from ..transformer.safetensors_io import write_safetensors

        state = merged_state_dict(self._model) if self.is_lora else self._model.state_dict()
        path = Path(path)
        if path.suffix == ".safetensors":
            path.parent.mkdir(parents=True, exist_ok=True)
            words = {"format": "pt", "name": name, "architecture": architecture}
            write_safetensors(path, state, {k: v for k, v in words.items() if v})
        else:
            with self._merged():
                save_pretrained(self._model, path)

    def save_apr(
        self, path: str | os.PathLike[str], metadata: dict[str, Any] | None = None
    ) -> None:
        """The trained model, adapters merged into it, as one APR file; see `save_apr`."""
        from ..transformer import save_apr

        with self._merged():
            save_apr(self._model, path, metadata=metadata)

    @contextlib.contextmanager
    def _merged(self) -> Iterator[None]:
        """Within this block the adapters are merged; afterwards they are back, bit for bit."""
        if not self.is_lora:
            yield
            return
        merge_lora(self._model)
        try:
            yield
        finally:
            unmerge_lora(self._model)

    def save_lora_adapter(
        self, folder: str | os.PathLike[str], base_model_name: str | None = None
    ) -> None:
        """The adapters, and what else was trained, in PEFT's two files."""
        from ..lora import save_adapter_peft

        if not self.is_lora:
            raise ValueError("Cannot save adapter: LoRA not enabled")
        save_adapter_peft(self._model, folder, base_model_name)

    # --- saved state ---

    def state_dict(self) -> dict[str, Any]:
        """Everything at the start of the begun window that a resumed run needs.

        JSON values, but for arrays among the states of callbacks; weights and moments are not here.
        """
        return {
            "step": self.step,
            "windows": self.windows,
            "batches": self.window_start,
            "epoch_start": self.epoch_start,
            "epoch": list(self._epoch),
            "overflows_in_a_row": self.overflows_in_a_row,
            "scaler": self.scaler.state_dict(),
            "metrics": vars(self.metrics).copy(),
            "lora": lora_config(self._model).to_dict() if self.is_lora else None,
            "callbacks": self.callback_states(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        ours = lora_config(self._model).to_dict() if self.is_lora else None
        if json.loads(json.dumps(ours)) != json.loads(json.dumps(state["lora"])):
            raise ValueError(
                f"the saved state has the adapters {state['lora']}, this trainer has {ours}"
            )
        self.step, self.windows = state["step"], state["windows"]
        self.batches, self.epoch_start = state["batches"], state["epoch_start"]
        self._epoch = tuple(state["epoch"])
        callbacks = state["callbacks"]
        self.callback_states = lambda: callbacks
        self.overflows_in_a_row = state["overflows_in_a_row"]
        self.scaler.load_state_dict(state["scaler"])
        self.metrics = MetricsTracker(**state["metrics"])
        self.optimizer.zero_grad()
        self._forget_window()


def _check_config(config: Any) -> None:
    if not isinstance(config, TransformerTrainConfig):
        kind = type(config).__name__
        raise TypeError(
            f"TransformerTrainer: config is a {kind}; a TransformerTrainConfig is needed"
        )


def _check_batch(what: str, batch: Any) -> None:
    if not isinstance(batch, LMBatch):
        raise TypeError(f"{what}: batch is a {type(batch).__name__}; an LMBatch is needed")


def _lora_config(config: TransformerTrainConfig) -> LoRAConfig:
    rank = config.lora_rank
    assert rank is not None
    quantize = "nf4" if config.quantize_nf4 else None
    if config.double_quantize:
        quantize = "int4-double"
    targets = config.lora_target_modules
    return LoRAConfig(
        r=rank,
        alpha=2 * rank if config.lora_alpha is None else config.lora_alpha,
        targets=("q_proj", "v_proj") if targets is None else targets,
        modules_to_save=("norms",) if config.lora_train_norms else None,
        quantize=quantize,
    )
