"""The settings of a run: one dataclass makes the flags, the keys of a TOML file and its checks.

A key of the file is a flag with underscores: `seq_len = 256` is `--seq-len 256`. Flags win.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _flag(default: Any, help: str, metavar: str | None = None, choices: Any = None) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar, "choices": choices})


@dataclass(kw_only=True)
class Settings:
    """What `afinar train` was asked to do. None means: chosen by the command, see `complete`."""

    data: str | None = _flag(
        None,
        "text file, folder, or JSON lines (default: the Python standard library)",
        "FILE_OR_FOLDER",
    )
    model: str | None = _flag(None, "start from the weights of this run or folder", "RUN_OR_FOLDER")
    preset: str | None = _flag(None, "a named model size, trained from scratch", "NAME")
    steps: int | None = _flag(None, "optimizer steps (default: 1200; 100 with --model)", "N")
    batch: int = _flag(4, "sequences per micro-batch", "N")
    seq_len: int = _flag(256, "tokens per sequence", "N")
    accumulate: int = _flag(1, "micro-batches per optimizer step", "N")
    lr: float | None = _flag(
        None, "peak learning rate (default: 4e-3; 2e-5 with --model, 5e-4 with --lora)", "X"
    )
    lr_schedule: str = _flag("cosine", "what follows the warmup", choices=("cosine", "constant"))
    min_lr_ratio: float = _flag(0.1, "where the cosine ends, as a part of --lr", "X")
    warmup: int | None = _flag(None, "steps of linear warmup (default: a twentieth)", "N")
    weight_decay: float | None = _flag(
        None, "decoupled weight decay of matrices (default: 0.1; 0.01 with --model)", "X"
    )
    beta2: float = _flag(0.95, "decay rate of AdamW's second moments", "X")
    max_grad_norm: float = _flag(1.0, "gradients are clipped to this norm", "X")
    seed: int = _flag(42, "initial weights, order of the data, dropout", "N")
    precision: str = _flag("fp32", "precision of matmul operands", choices=("fp32", "bf16", "fp16"))
    checkpointing: str = _flag(
        "none", "what backward recomputes: none, blocks, segments, matmuls or every:K", "POLICY"
    )
    deterministic: bool = _flag(False, "the same bits on every kind of machine in 16-bit precision")
    lora: str | None = _flag(None, "train LoRA adapters on these projections only", "NAMES")
    lora_r: int = _flag(8, "rank of the adapters", "N")
    lora_alpha: float = _flag(16.0, "their scale is alpha / r", "X")
    storage: str = _flag(
        "float32", "how the weights under adapters are held", choices=("float32", "bfloat16")
    )
    mask_prompt: bool = _flag(True, "train on completions and replies only")
    pack: bool = _flag(True, "put several documents into one sequence, apart from each other")
    eval_every: int | None = _flag(None, "steps between validations (default: a tenth)", "N")
    eval_rows: int | None = _flag(
        None, "sequences per validation (default: 64; 16 with --model)", "N"
    )
    patience: int | None = _flag(
        None, "stop when so many validations in a row were no better than the best", "N"
    )
    digest_every: int | None = _flag(None, "steps between digests (default: a tenth)", "N")
    snapshot_every: int | None = _flag(None, "steps between snapshots (default: a fifth)", "N")
    keep: int = _flag(2, "snapshots to keep, beside the best and the last", "K")
    prompt: str | None = _flag(None, "what the sample at the end continues", "TEXT")
    device: str = _flag("auto", "where to run", choices=("auto", "cpu", "gpu"))
    threads: int | None = _flag(None, "threads to use (default: all cores)", "N")
    out: str | None = _flag(None, "the run's folder (default: a new runs/NNN)", "RUN")

    def complete(self) -> Settings:
        """The same with every default that depends on others filled in; checks every value."""
        s = dataclasses.replace(self)
        tuned = s.model is not None

        def fill(name: str, value: Any) -> None:
            if getattr(s, name) is None:
                setattr(s, name, value)

        fill("steps", 100 if tuned else 1200)
        fill("lr", 5e-4 if s.lora else 2e-5 if tuned else 4e-3)
        fill("weight_decay", 0.01 if tuned else 0.1)
        fill("eval_rows", 16 if tuned else 64)
        for name in ("steps", "batch", "seq_len", "accumulate", "lora_r", "eval_rows", "keep"):
            s._need(name, getattr(s, name) >= 1, "at least 1")
        steps = typing.cast(int, s.steps)
        fill("warmup", steps // 20)
        fill("eval_every", max(1, steps // 10))
        fill("digest_every", max(1, steps // 10))
        fill("snapshot_every", max(1, steps // 5))
        for name in ("eval_every", "digest_every", "snapshot_every"):
            s._need(name, getattr(s, name) >= 1, "at least 1")
        s._need("patience", s.patience is None or s.patience >= 1, "at least 1")
        for name in ("lr", "max_grad_norm", "lora_alpha"):
            s._need(name, 0 < getattr(s, name) < math.inf, "above 0")
        for name in ("warmup", "weight_decay", "seed"):
            s._need(name, 0 <= getattr(s, name) < math.inf, "0 or more")
        s._need("min_lr_ratio", 0 <= s.min_lr_ratio <= 1, "between 0 and 1")
        s._need("beta2", 0 <= s.beta2 < 1, "at least 0 and below 1")
        if s.model is not None and s.preset is not None:
            raise ValueError("--model starts from a model and --preset makes a new one: pick one")
        if s.lora is not None and s.model is None:
            raise ValueError("--lora adapts a trained model: name it with --model RUN_OR_FOLDER")
        if s.storage != "float32" and s.lora is None:
            raise ValueError("--storage bfloat16 is for weights that are not trained: use --lora")
        return s

    def _need(self, name: str, good: bool, need: str) -> None:
        if not good:
            raise ValueError(f"{flag(name)} is {getattr(self, name)}; it must be {need}")

    def toml(self) -> str:
        """The settings as the TOML file that `--config` reads; None is left out."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return "".join(f"{name} = {_toml(v)}\n" for name, v in values if v is not None)


KINDS = typing.get_type_hints(Settings)


def flag(name: str) -> str:
    """`--seq-len` for `seq_len`."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting; one that is not given leaves no trace in the result."""
    for f in dataclasses.fields(Settings):
        kind, more = _kind(f.name), dict(f.metadata)
        if kind is bool:
            del more["metavar"], more["choices"]
            more["action"] = argparse.BooleanOptionalAction
        else:
            more["type"] = kind
        if f.default is not None and kind is not bool:
            more["help"] += f" (default: {f.default})"
        parser.add_argument(flag(f.name), dest=f.name, default=argparse.SUPPRESS, **more)


def read_settings(path: str | Path | None, flags: dict[str, Any]) -> Settings:
    """Settings of a TOML file (or of none), overridden by `flags`."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"config: {path} cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ValueError(f"config: {path} is not TOML: {error}") from None
    unknown = [key for key in values if key not in KINDS]
    if unknown:
        raise ValueError(
            f"config: {path} has unknown keys {', '.join(unknown)}; known are {', '.join(KINDS)}"
        )
    for name, value in values.items():
        values[name] = _checked(name, value, path)
    return Settings(**values | flags)


def _kind(name: str) -> type:
    hint = KINDS[name]
    if isinstance(hint, types.UnionType):
        return next(t for t in typing.get_args(hint) if t is not type(None))
    return hint


def _checked(name: str, value: Any, path: Any) -> Any:
    kind = _kind(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is float and isinstance(value, str):  # 1e-5 in quotes
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is not kind:
        raise ValueError(f"config: {path}: {name} must be {kind.__name__}, not {value!r}")
    choices = Settings.__dataclass_fields__[name].metadata["choices"]
    if choices and value not in choices:
        raise ValueError(
            f"config: {path}: {name} must be one of {', '.join(choices)}, not {value!r}"
        )
    return value


def _toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's, but for the control character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
