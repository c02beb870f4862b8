"""A run as a function of its settings: what it is built from, its steps, and what it records.

`afinar train` writes down what these steps yield and `afinar verify` compares it, so both run
exactly the same code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..autograd import set_num_threads
from ..autograd.device import resolve_device
from ..lora import load_adapter, load_adapter_peft, lora_modules, merge_lora
from ..lora.native import ADAPTER_FILE, refuse_mlx
from ..optim import weights_sha256
from ..optim.optimizer import little_endian
from ..transformer import Transformer, TransformerConfig, load_pretrained
from ..transformer.files import read_json
from .bits import memory_mb, own_device
from .config import TransformerTrainConfig
from .data import STDLIB, Data, load_data
from .evaluate import evaluate
from .settings import Settings
from .text import Tokenizer, folder_files, load_tokenizer
from .trainer import TransformerTrainer

# What a row of metrics says about the machine rather than about the run.
OF_THE_MACHINE = ("tokens_per_s", "gpu_used_mb", "gpu_held_mb")

# Settings that no result depends on: where to run and to write, and what backward computes twice.
FREE = ("data", "model", "out", "threads", "device", "keep", "prompt", "checkpointing")


@dataclass
class Run:
    """A trainer with its data, about to do `step` + 1."""

    settings: Settings
    tokenizer: Tokenizer
    data: Data
    trainer: TransformerTrainer
    start_sha256: str  # of the weights that training starts from, without adapters
    files: dict[str, str]  # `folder_files` of the folder that they are from
    step: int = 0

    @property
    def model(self) -> Any:
        return self.trainer.model

    @property
    def out_of_patience(self) -> bool:
        """Whether the last `patience` validations were no better than the best one."""
        patience = self.settings.patience
        return patience is not None and self.trainer.metrics.validations_since_best >= patience

    @property
    def complete(self) -> bool:
        """Whether there is no step left to do."""
        return self.step == self.settings.steps or self.out_of_patience

    def identity(self) -> dict[str, Any]:
        """What the run depends on, in hashes: the head of `digests.json`."""
        return {
            "seed": self.settings.seed,
            "settings": settings_sha256(self.settings),
            "data": self.data.sha256,
            "tokenizer": self.tokenizer.sha256,
            "model": self.start_sha256,
            "config": config_sha256(self.model.config),
            "files": self.files,
        }

    def mark(self) -> dict[str, Any]:
        """What each snapshot says of its run."""
        identity = self.identity()
        text = json.dumps(identity, sort_keys=True)
        return {**identity, "run_id": hashlib.sha256(text.encode()).hexdigest()[:16]}


def build(settings: Settings) -> Run:
    """Everything that `settings` (complete ones) name, loaded and checked.

    ValueError or FileNotFoundError says in one sentence what is wrong with them.
    """
    if settings.threads is not None:
        set_num_threads(settings.threads)
    resolve_device(train_config(settings).device)  # refuses before anything is loaded
    tokenizer = load_tokenizer(settings.model)
    data = load_data(
        settings.data or STDLIB,
        tokenizer,
        seq_len=settings.seq_len,
        seed=settings.seed,
        mask_prompt=settings.mask_prompt,
        pack=settings.pack,
    )
    model = start_model(settings, tokenizer)
    limit = model.config.max_position_embeddings
    if settings.seq_len > limit:
        raise ValueError(f"--seq-len is {settings.seq_len}; the model has {limit} positions")
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, "
            f"the model's vocabulary only {model.config.vocab_size}"
        )
    rows, batch = len(data.train), settings.batch
    if rows < batch:
        raise ValueError(
            f"data: {data.source} makes {rows} sequences of {settings.seq_len} tokens, fewer than "
            f"a batch of {batch}; give more data, or a smaller --batch or --seq-len"
        )
    start = weights_sha256(model)
    trainer = TransformerTrainer.with_model(model, train_config(settings, model.config))
    return Run(settings, tokenizer, data, trainer, start, folder_files(settings.model))


def train_config(s: Settings, model_config: Any = None) -> TransformerTrainConfig:
    """The trainer's own settings; it refuses what it cannot do."""
    lora = {}
    if s.lora is not None:
        lora = {
            "lora_rank": s.lora_r,
            "lora_alpha": s.lora_alpha,
            "lora_target_modules": [name.strip() for name in s.lora.split(",")],
        }
    return TransformerTrainConfig(
        model_config=model_config,
        lr=cast(float, s.lr),
        lr_schedule=s.lr_schedule,
        min_lr_ratio=s.min_lr_ratio,
        warmup_steps=cast(int, s.warmup),
        max_steps=s.steps,
        accumulation_steps=s.accumulate,
        max_grad_norm=s.max_grad_norm,
        weight_decay=cast(float, s.weight_decay),
        beta2=s.beta2,
        max_seq_len=s.seq_len,
        seed=s.seed,
        deterministic=s.deterministic,
        device=s.device,
        precision_config=s.precision,
        checkpoint_config=s.checkpointing,
        **lora,
    )


def start_model(settings: Settings, tokenizer: Tokenizer) -> Any:
    """The model at step 0, before adapters are put on it."""
    if settings.model is not None:
        model = open_model(settings.model, dtype=settings.storage)
        _merge(model)  # a LoRA run goes on as the model that it made
        return model
    if settings.preset is None:
        config = default_model(tokenizer.vocab_size, settings.seq_len)
    else:
        presets = [
            name
            for name, made in vars(TransformerConfig).items()
            if isinstance(made, classmethod) and not name.startswith(("_", "from_"))
        ]
        if settings.preset not in presets:
            raise ValueError(
                f"--preset is {settings.preset!r}; known presets are {', '.join(presets)}"
            )
        config = getattr(TransformerConfig, settings.preset)()
    return Transformer(config, seed=settings.seed)


def default_model(vocab_size: int, seq_len: int) -> TransformerConfig:
    """What a bare `afinar train` trains: small enough for minutes on two cores."""
    return TransformerConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=max(seq_len, 1024),
        tie_word_embeddings=True,
    )


def open_model(
    folder: str | Path, adapter: str | Path | None = None, dtype: str = "float32"
) -> Any:
    """The model of a run or a checkpoint folder, under an adapter if one is named.

    `dtype` is how `load_pretrained` holds the weights. A LoRA run holds an adapter only: its base
    is found where the run found it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"model: {folder} is not a folder")
    base, own = adapter_run(folder)
    model = load_pretrained(folder, dtype) if own is None else open_model(base, own, dtype)
    if adapter is not None:
        if own is not None and Path(adapter).resolve() == own.resolve():
            raise ValueError(
                f"adapter: {adapter} is what --model {folder} carries already; name its base there"
            )
        native = (Path(adapter) / ADAPTER_FILE).is_file() or Path(adapter).is_file()
        if not native and not (Path(adapter) / "adapter_config.json").is_file():
            raise ValueError(
                f"adapter: {adapter} holds no adapter_config.json and no {ADAPTER_FILE}"
            )
        _merge(model)
        (load_adapter if native else load_adapter_peft)(model, adapter)
    return model


def _merge(model: Any) -> None:
    if lora_modules(model):
        merge_lora(model, keep=False)


def adapter_run(folder: Path) -> tuple[Path, Path | None]:
    """The folder of a run's weights, and of its adapter if it is a LoRA run."""
    if (folder / "model.safetensors").is_file() or not (folder / "adapter_config.json").is_file():
        return folder, None
    path = folder / "adapter_config.json"
    values = read_json(path)
    refuse_mlx(path, values)
    base = values.get("base_model_name_or_path")
    if not base or not Path(base).is_dir() or Path(base).resolve() == folder.resolve():
        raise ValueError(f"model: {folder} adapts {base}, which is no folder with its weights here")
    return Path(base), folder


# --- steps ---------------------------------------------------------------------------------


def steps(run: Run, stop: int) -> Iterator[dict[str, Any]]:
    """Do steps up to `stop`, or until patience ends, and yield a row about each.

    Rows are equal anywhere but for `OF_THE_MACHINE`.

    A step is one window of `accumulate` micro-batches, whether its gradients were applied or
    dropped (float16 may overflow): step n always has the same data.
    """
    s, trainer = run.settings, run.trainer
    while run.step < stop and not run.out_of_patience:
        seen, start = 0, time.perf_counter()
        for k in range(s.accumulate):
            batch = run.data.train.batch(run.step * s.accumulate + k, s.batch)
            seen += batch.inputs.size
            trainer.train_batch(batch)
        window = trainer.last
        assert window is not None
        run.step += 1
        row = {
            "step": run.step,
            "loss": _number(window.loss),
            "lr": window.lr,
            "grad_norm": _number(window.grad_norm),
            "tokens": seen,
            "tokens_per_s": round(seen / (time.perf_counter() - start), 1),
            **memory_mb(window),
        }
        if window.skipped:
            row["skipped"] = window.skipped
        if at(run.step, s.eval_every, s.steps):
            row |= validate(run)
        yield row


def _number(x: float) -> float | None:
    """A number that JSON has."""
    return x if math.isfinite(x) else None


def at(step: int, every: int | None, last: int | None) -> bool:
    """Whether something that is done every so many steps, and at the end, is done at `step`."""
    return step % cast(int, every) == 0 or step == last


def due(step: int, s: Settings) -> bool:
    """Whether the digests of `step` belong into the record: those of each snapshot do."""
    every = (s.digest_every, s.snapshot_every, s.eval_every)
    return step == 0 or any(at(step, n, s.steps) for n in every)


def validate(run: Run) -> dict[str, float | None]:
    """Loss and accuracy on the validation rows; nothing if there are none."""
    s, rows = run.settings, run.data.valid
    if rows is None:
        return {}
    result = evaluate(run.model, rows, s.batch, s.eval_rows)
    run.trainer.metrics.record_val_loss(result["loss"])
    return {f"val_{name}": _number(result[name]) for name in ("loss", "accuracy")}


# --- digests -------------------------------------------------------------------------------


def settings_sha256(settings: Settings) -> str:
    """SHA-256 of the settings that decide the result, as sorted JSON."""
    values = {k: v for k, v in dataclasses.asdict(settings).items() if k not in FREE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def config_sha256(config: Any) -> str:
    """SHA-256 of a model's config, as sorted JSON."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def record(run: Run) -> dict[str, Any]:
    """The digests of weights and optimizer now, and the first 16 digits of each tensor's.

    The whole digests prove; those of the tensors (weights, first and second moments) say where
    a replay departs. If they hold on one device only, it is named.
    """
    optimizer = run.trainer.optimizer
    slots = {id(p): n for n, p in enumerate(optimizer.params)}
    tensors = {}
    for name, tensor in run.model.named_parameters():
        arrays = [tensor.data]
        n = slots.get(id(tensor))
        if n is not None and n < len(optimizer.first_moments):
            arrays += [optimizer.first_moments[n], optimizer.second_moments[n]]
        tensors[name] = " ".join(
            "none" if a is None else hashlib.sha256(little_endian(a)).hexdigest()[:16]
            for a in arrays
        )
    own = own_device(run.trainer)
    return {
        "step": run.step,
        "weights": weights_sha256(run.model),
        "optimizer": run.trainer.optimizer_state_sha256(),
        "tensors": tensors,
        **({} if own is None else {"device": own}),
    }
