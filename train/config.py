"""How a model is trained."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..autograd import PrecisionConfig, set_deterministic
from ..optim.schedules import LinearWarmup, WarmupCosineDecay
from ..transformer.values import are_strings
from .checkpointing import CheckpointConfig
from .checks import Checked


@dataclass(frozen=True, kw_only=True)
class TransformerTrainConfig(Checked):
    """What a `TransformerTrainer` needs to know; only `model_config` has no default.

    Step n (from 0) uses the learning rate `schedule(n)`: linear from 0 over `warmup_steps`, then
    constant, or with `lr_schedule="cosine"` falling to `lr * min_lr_ratio` at `max_steps`.
    `decay` says what `weight_decay` applies to: "matrices" (two or more axes) or "all".
    `adam_form` is AdamW's `form`. A gradient of a norm above `max_grad_norm` is scaled down to it;
    None never clips. `accumulation_steps` micro-batches make a step.

    `lora_rank` turns LoRA on: adapters on `lora_target_modules` (default q_proj, v_proj), scaled
    by `lora_alpha` (default 2 rank) / rank; their B matrices learn `lora_plus_ratio` times as
    fast; `lora_train_norms` trains the norms too. `quantize_nf4` holds the frozen matrices in NF4,
    `double_quantize` in linear 4-bit codes whose scales are in 8 bits: one of them at most.

    Training gives up after `max_overflows` windows in a row whose gradient was not finite.
    `save_interval`, `checkpoint_dir` and `log_interval` set up the snapshot and progress callbacks
    of `fit`.
    """

    model_config: Any
    max_seq_len: int = 512
    accumulation_steps: int = 1
    lr: float = 1e-3
    warmup_steps: int = 0
    max_steps: int | None = None
    lr_schedule: str = "constant"
    min_lr_ratio: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    decay: str = "matrices"
    adam_form: str = "torch"
    max_grad_norm: float | None = 1.0
    seed: int = 42
    deterministic: bool = False
    precision_config: PrecisionConfig | str = "fp32"
    checkpoint_config: CheckpointConfig | str = "none"
    max_overflows: int = 25
    log_interval: int = 10
    save_interval: int | None = None
    checkpoint_dir: str | os.PathLike[str] | None = None
    profile_interval: int = 0
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_target_modules: Sequence[str] | None = None
    lora_plus_ratio: float = 1.0
    lora_train_norms: bool = False
    double_quantize: bool = False
    quantize_nf4: bool = False
    distributed: None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if isinstance(self.precision_config, str):
            object.__setattr__(self, "precision_config", PrecisionConfig(self.precision_config))
        if isinstance(self.checkpoint_config, str):
            object.__setattr__(self, "checkpoint_config", CheckpointConfig(self.checkpoint_config))
        precise = isinstance(self.precision_config, PrecisionConfig)
        self._check("precision_config", precise, "a PrecisionConfig or its name")
        checkpointing = isinstance(self.checkpoint_config, CheckpointConfig)
        self._check("checkpoint_config", checkpointing, "a CheckpointConfig or its policy")
        self._whole(1, "max_seq_len", "accumulation_steps", "max_overflows", "log_interval")
        self._whole(0, "warmup_steps", "seed", "profile_interval")
        for name in ("max_steps", "save_interval", "lora_rank"):
            if getattr(self, name) is not None:
                self._whole(1, name)
        self._number("above 0", lambda x: 0 < x < math.inf, "lr", "lora_plus_ratio")
        self._number("in [0, 1)", lambda x: 0 <= x < 1, "beta1", "beta2")
        self._number("of at least 0", lambda x: 0 <= x < math.inf, "weight_decay")
        self._number("between 0 and 1", lambda x: 0 <= x <= 1, "min_lr_ratio")
        if self.max_grad_norm is not None:
            self._number("above 0 (or None)", lambda x: x > 0, "max_grad_norm")
        if self.lora_alpha is not None:
            self._number("above 0", lambda x: 0 < x < math.inf, "lora_alpha")
        self._flag("deterministic", "lora_train_norms", "double_quantize", "quantize_nf4")
        path = self.checkpoint_dir
        good = path is None or isinstance(path, str | os.PathLike)
        self._check("checkpoint_dir", good, "a path or None")
        self._one_of("decay", "matrices", "all")
        self._one_of("adam_form", "torch", "epsilon_hat")
        self._one_of("lr_schedule", "constant", "cosine")
        self._one_of("device", "cpu", "gpu", "auto")
        if self.lr_schedule == "cosine":
            self._check("lr_schedule", self.max_steps is not None, "constant without max_steps")
        if self.lora_rank is None:
            for name in ("lora_alpha", "lora_target_modules"):
                self._check(name, getattr(self, name) is None, "None without lora_rank")
            for name in ("lora_train_norms", "quantize_nf4", "double_quantize"):
                self._check(name, not getattr(self, name), "False without lora_rank")
            self._check("lora_plus_ratio", self.lora_plus_ratio == 1, "1 without lora_rank")
        elif self.lora_target_modules is not None:
            self._check_targets(self.lora_target_modules)
        both = self.double_quantize and self.quantize_nf4
        self._check("double_quantize", not both, "False with quantize_nf4: it is for linear codes")
        self._check("distributed", self.distributed is None, "None: there is one process")

    def _check_targets(self, targets: Any) -> None:
        names = isinstance(targets, str) or are_strings(targets)
        need = "a string or a list of strings, at least one (or None, for the default)"
        self._check("lora_target_modules", names and len(targets) > 0, need)

    # --- questions ---

    @property
    def precision(self) -> PrecisionConfig:
        """In what precision matrix products are computed, and how the loss is scaled."""
        return cast(PrecisionConfig, self.precision_config)

    @property
    def checkpointing(self) -> CheckpointConfig:
        """Which activations are kept."""
        return cast(CheckpointConfig, self.checkpoint_config)

    @property
    def schedule(self) -> LinearWarmup | WarmupCosineDecay:
        """Learning rate by step."""
        if self.lr_schedule == "cosine" and self.max_steps is not None:
            floor = self.lr * self.min_lr_ratio
            return WarmupCosineDecay(self.lr, self.warmup_steps, self.max_steps, floor)
        return LinearWarmup(self.lr, self.warmup_steps)

    @property
    def is_lora(self) -> bool:
        """Whether adapters are trained in place of the weights."""
        return self.lora_rank is not None

    @property
    def is_nf4(self) -> bool:
        """Whether the frozen weights under the adapters are held in 4 bits."""
        return self.quantize_nf4 and self.is_lora

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train together; they do not."""
        return False

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1

    @property
    def rank(self) -> int:
        """The number of this process."""
        return 0

    def apply_deterministic_settings(self) -> None:
        """With `deterministic`, ask for the same bits on every kind of machine."""
        if self.deterministic:
            set_deterministic(True)
            os.environ |= {
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "CUDNN_DETERMINISTIC": "1",
                "CUDNN_BENCHMARK": "0",
                "PYTHONHASHSEED": str(self.seed),
            }

    # --- the same config with one thing changed ---

    def replace(self, **changes: Any) -> TransformerTrainConfig:
        """The same config with these fields changed."""
        return dataclasses.replace(self, **changes)

    def with_checkpointing(self, segments: int) -> TransformerTrainConfig:
        """Recompute the activations of so many segments."""
        return self.replace(checkpoint_config=CheckpointConfig("segments", segments))

    def with_bf16(self) -> TransformerTrainConfig:
        """Matrix products in bfloat16."""
        return self.replace(precision_config=PrecisionConfig("bf16"))

    def with_fp16(self) -> TransformerTrainConfig:
        """Matrix products in float16, the loss scaled."""
        return self.replace(precision_config=PrecisionConfig("fp16"))

    def with_max_seq_len(self, n: int) -> TransformerTrainConfig:
        """Sequences of up to n tokens."""
        return self.replace(max_seq_len=n)

    def with_accumulation_steps(self, n: int) -> TransformerTrainConfig:
        """n micro-batches a step; 0 means 1."""
        return self.replace(accumulation_steps=max(1, n))

    def with_warmup_steps(self, n: int) -> TransformerTrainConfig:
        """Linear warmup over n steps."""
        return self.replace(warmup_steps=n)

    def with_lr(self, lr: float) -> TransformerTrainConfig:
        """Another peak learning rate."""
        return self.replace(lr=lr)

    def with_grad_clip(self, norm: float | None) -> TransformerTrainConfig:
        """Clip gradients to this norm; None never clips."""
        return self.replace(max_grad_norm=norm)

    def with_max_steps(self, n: int | None) -> TransformerTrainConfig:
        """Stop after n steps."""
        return self.replace(max_steps=n)

    def with_device(self, device: str) -> TransformerTrainConfig:
        """Where to run: "cpu", "gpu" or "auto"."""
        return self.replace(device=device)

    def with_beta2(self, beta2: float) -> TransformerTrainConfig:
        """Another decay rate of the second moments."""
        return self.replace(beta2=beta2)

    def with_weight_decay(self, decay: float) -> TransformerTrainConfig:
        """Another weight decay."""
        return self.replace(weight_decay=decay)

    def with_deterministic(self, flag: bool) -> TransformerTrainConfig:
        """The same bits on every kind of machine, or not."""
        return self.replace(deterministic=flag)

    def with_seed(self, seed: int) -> TransformerTrainConfig:
        """Another seed."""
        return self.replace(seed=seed)

    def with_profile_interval(self, n: int) -> TransformerTrainConfig:
        """Time the parts of every n-th step; 0 for none."""
        return self.replace(profile_interval=n)

    def with_lora(
        self, rank: int, alpha: float | None = None, targets: Sequence[str] | None = None
    ) -> TransformerTrainConfig:
        """Train LoRA adapters of this rank."""
        return self.replace(lora_rank=rank, lora_alpha=alpha, lora_target_modules=targets)

    def with_distributed(self, distributed: None) -> TransformerTrainConfig:
        """Several processes: anything but None is refused, for there is one."""
        return self.replace(distributed=distributed)

    def with_lora_plus_ratio(self, ratio: float) -> TransformerTrainConfig:
        """B matrices learn `ratio` times as fast as A matrices."""
        return self.replace(lora_plus_ratio=ratio)

    def with_double_quantize(self, flag: bool) -> TransformerTrainConfig:
        """Hold frozen weights in linear 4-bit codes, and the scales of these in 8 bits."""
        return self.replace(double_quantize=flag)

    def with_quantize_nf4(self, flag: bool) -> TransformerTrainConfig:
        """Hold frozen weights in the codes of NF4."""
        return self.replace(quantize_nf4=flag)
