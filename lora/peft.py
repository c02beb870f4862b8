"""Writing adapter folders as the `peft` library reads them.

A PEFT adapter has one pair per matrix. Slices of a fused matrix become one pair: A stacked, B
with a block per slice, and alpha so that the scale stays what it was.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..autograd.device import to_host
from ..transformer.decoder import Decoder
from ..transformer.files import make_folder
from ..transformer.hf import check_writable
from ..transformer.model import LanguageModel
from ..transformer.module import check_model
from ..transformer.safetensors_io import write_safetensors
from .apply import lora_config, lora_modules, saved_modules
from .linear import LoRALinear, base_shape, base_weight, row_norms
from .native import write_text
from .targets import hf_name

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def save_adapter_peft(
    model: LanguageModel, folder: str | os.PathLike[str], base_model_name: str | None = None
) -> Path:
    """Write the adapter as a folder that PEFT loads: its weights and its config.

    ValueError, and nothing is written, if a value is not finite.
    """
    check_model("save_adapter_peft", model)
    if not isinstance(base_model_name, str | None):
        raise TypeError(f"save_adapter_peft: base_model_name is a string, not {base_model_name!r}")
    modules = lora_modules(model)
    if not modules:
        raise ValueError("model has no LoRA adapters to save")
    tensors: dict[str, Any] = {}
    ranks, alphas = {}, {}
    for path, m in modules:
        name = peft_name(model, path)
        pair, ranks[name], alphas[name] = _one_pair(m)
        tensors.update({f"{PREFIX}{name}.{key}": array for key, array in pair.items()})
    for path, module in saved_modules(model):
        for key, p in module.named_parameters():
            tensors[f"{PREFIX}{peft_name(model, path)}.{key}"] = flipped(model, path, p.numpy())
    check_writable("save_adapter_peft", tensors)
    folder = make_folder("save_adapter_peft", folder)
    write_safetensors(folder / WEIGHTS, tensors, {"format": "pt"})
    config = _config_out(model, ranks, alphas, base_model_name)
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    return folder


def _one_pair(m: LoRALinear) -> tuple[dict[str, Any], int, float]:
    """The tensors of an adapted layer as one pair over the whole matrix, its rank, its alpha."""
    O, I = base_shape(m.base)  # noqa: E741
    parts = [
        (A.numpy(), B.numpy(), span, scale)
        for A, B, span, scale in zip(m.a, m.b, m.slices, m.scales, strict=True)
    ]
    if m.moved:  # PiSSA took scale B A of its start from the base; a plain adapter gives it back
        parts += [(A, -B, *part[2:]) for (A, B), part in zip(m.moved, parts, strict=True)]
    R = sum(len(A) for A, *_ in parts)
    a, b = np.zeros((R, I), np.float32), np.zeros((O, R), np.float32)
    at = 0
    for A, B, (start, stop), scale in parts:
        a[at : at + len(A)] = A
        b[start:stop, at : at + len(A)] = B * np.float32(scale / m.scales[0])
        at += len(A)
    tensors = {"lora_A.weight": a, "lora_B.weight": b}
    if m.m:
        magnitude = to_host(row_norms(base_weight(m.base))).astype(np.float32)
        for p, (start, stop) in zip(m.m, m.slices, strict=True):
            magnitude[start:stop] = p.numpy()
        tensors["lora_magnitude_vector"] = magnitude
    if m.use_rslora:
        return tensors, R, m.alphas[0] * math.sqrt(R / m.ranks[0])
    return tensors, R, m.alphas[0] * R / m.ranks[0]


def peft_config(model: LanguageModel, base_model_name: str | None = None) -> dict[str, Any]:
    """The adapter_config.json that `save_adapter_peft` writes."""
    pairs = {peft_name(model, path): _one_pair(m) for path, m in lora_modules(model)}
    ranks = {name: rank for name, (_, rank, _) in pairs.items()}
    alphas = {name: alpha for name, (_, _, alpha) in pairs.items()}
    return _config_out(model, ranks, alphas, base_model_name)


def _config_out(
    model: LanguageModel, ranks: Mapping[str, int], alphas: Mapping[str, float], base: str | None
) -> dict[str, Any]:
    config = lora_config(model)
    r = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    saved = [peft_name(model, path) for path, _ in saved_modules(model)]
    return {
        "peft_type": "LORA",
        "r": r,
        "lora_alpha": _whole_number(alpha),
        "target_modules": _target_names(model, list(ranks)),
        "lora_dropout": config.dropout,
        "bias": "none",
        "base_model_name_or_path": base,
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": is_conv1d(model),
        "inference_mode": True,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "rank_pattern": {name: n for name, n in ranks.items() if n != r},
        "alpha_pattern": {name: _whole_number(n) for name, n in alphas.items() if n != alpha},
        "modules_to_save": saved or None,
    }


def _whole_number(x: float) -> float:
    return int(x) if float(x).is_integer() else x


def _target_names(model: LanguageModel, adapted: list[str]) -> list[str]:
    """The shortest endings of names that mean exactly the adapted modules."""
    everything = [peft_name(model, path) for path, _ in model.named_modules() if path]
    for steps in (1, 2):
        endings = {".".join(name.split(".")[-steps:]) for name in adapted}
        if {n for n in everything if listed(n, endings)} == set(adapted):
            return sorted(endings)
    return sorted(adapted)


def listed(name: str, endings: Any) -> bool:
    """Whether one of `endings` is the name, or what follows one of its dots."""
    return name in endings or any(name.endswith(f".{e}") for e in endings)


def peft_name(model: LanguageModel, path: str) -> str:
    """The name of a module in the checkpoint that the base model comes from."""
    return hf_name(model, path) if is_conv1d(model) else path


def is_conv1d(model: LanguageModel) -> bool:
    """Whether the checkpoint is GPT-2's, whose matrices are stored (in, out)."""
    return isinstance(model, Decoder) and model.config.pos == "learned"


def flipped(model: LanguageModel, path: str, a: Any) -> Any:
    """A parameter of the module at `path` as the checkpoint stores it, or back."""
    inside = is_conv1d(model) and path.startswith("blocks.")
    return a.T if inside and a.ndim == 2 else a
