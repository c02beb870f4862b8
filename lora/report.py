"""What an adapter is, in a line of text or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ..transformer.model import LanguageModel
from .apply import adapter_params, lora_config
from .config import LoRAConfig
from .quantized import QuantizedLinear


def adapter_size(model: LanguageModel) -> tuple[int, int]:
    """(values in the adapter, values in the base); a tied head counts once."""
    adapter = sum(p.size for p in adapter_params(model))
    packed = sum(
        math.prod(m.shape) for _, m in model.named_modules() if isinstance(m, QuantizedLinear)
    )
    return adapter, model.num_parameters + packed - adapter


def describe(model: LanguageModel, config: LoRAConfig | None = None) -> str:
    """One line for a log: rank, targets, and how little of the model is trained.

    For example `LoRA r=8 alpha=16 on [q, v]: 393,216 trainable of 115,513,344 (0.34 %)`.
    """
    config = config or lora_config(model)
    adapter, base = adapter_size(model)
    targets = config.targets if isinstance(config.targets, str) else ", ".join(config.targets)
    alpha = int(config.alpha) if float(config.alpha).is_integer() else config.alpha
    return (
        f"LoRA r={config.r} alpha={alpha} on [{targets}]: "
        f"{adapter:,} trainable of {adapter + base:,} ({100 * adapter / (adapter + base):.2f} %)"
    )


def trainable_line(model: LanguageModel) -> str:
    """The line that PEFT prints: `trainable params: N || all params: N || trainable%: X`."""
    adapter, base = adapter_size(model)
    total = adapter + base
    return (
        f"trainable params: {adapter:,d} || all params: {total:,d} || "
        f"trainable%: {100 * adapter / total:.4f}"
    )


def adapter_json(
    config: LoRAConfig, base_model: str, extra: Mapping[str, Any] | None = None
) -> str:
    """The JSON that travels with a published adapter: what it is and what it goes onto."""
    if not isinstance(config, LoRAConfig):
        raise TypeError(f"adapter_json: a LoRAConfig is needed, given a {type(config).__name__}")
    payload = {"lora": config.to_dict(), "base_model": base_model, **(extra or {})}
    return json.dumps(payload, indent=2) + "\n"
