"""Reading adapter folders as the `peft` library writes them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..autograd import Tensor
from ..autograd.backend import array_module
from ..autograd.ops.gemm import widen
from ..transformer.files import read_json
from ..transformer.hf import check_finite
from ..transformer.layers import Linear
from ..transformer.model import LanguageModel
from ..transformer.module import Module, check_names, check_shapes
from ..transformer.safetensors_io import TensorFile
from ..transformer.values import Rule, are_strings, check_fields, is_flag, is_number, is_whole
from .apply import apply_lora, check_plain, lora_modules, saved_modules, untie_head
from .config import LoRAConfig
from .linear import base_shape
from .native import ADAPTER_FILE, refuse_mlx
from .peft import CONFIG, PREFIX, WEIGHTS, flipped, listed, peft_name
from .targets import linear_at, resolve_targets

# Fields that change the maths and must have one of these values, or none.
_ONLY: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "layer_replication": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
    "velora_config": (),
    "megatron_config": (),
    "target_parameters": (),
    "trainable_token_indices": (),
}
_READ = {
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "use_rslora",
    "use_dora",
    "ensure_weight_tying",
}
# Where it came from and how it was begun: no part of what the adapter computes.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}


# What the fields that are read must hold.
_RULES: tuple[Rule, ...] = (
    (("r",), lambda value: is_whole(value) and value > 0, "a whole number above 0"),
    (("lora_alpha",), lambda value: is_number(value) and value > 0, "a number above 0"),
    (("lora_dropout",), is_number, "a number"),
    (("use_rslora", "use_dora", "ensure_weight_tying"), is_flag, "true or false"),
    (("modules_to_save",), are_strings, "a list of strings"),
    (
        ("target_modules", "exclude_modules", "layers_pattern"),
        lambda value: isinstance(value, str) or are_strings(value),
        "a string or a list of strings",
    ),
    (
        ("layers_to_transform",),
        lambda value: is_whole(value) or (isinstance(value, list) and all(map(is_whole, value))),
        "a number of a layer or a list of them",
    ),
    (("rank_pattern", "alpha_pattern"), lambda value: isinstance(value, dict), "an object"),
)


def load_adapter_peft(model: LanguageModel, folder: str | os.PathLike[str]) -> LoRAConfig:
    """Put the PEFT adapter in `folder` onto a plain model, trainable; returns its config.

    Names and shapes must be exactly those that its config means on this model. ValueError names
    what is missing, unexpected or of another shape, or the field that asks for what is not
    supported; the model then stays as it is. An adapter that trained a tied head or embedding
    whole unties them.
    """
    check_plain("load_adapter_peft", model)
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"load_adapter_peft: {folder} is not a folder")
    _refuse_other_formats(folder)
    values = read_json(folder / CONFIG)
    refuse_mlx(folder / CONFIG, values)
    check_fields(folder / CONFIG, values, _RULES)
    _refuse_unsupported(folder / CONFIG, values)
    arrays = _read_arrays(folder / WEIGHTS)
    _drop_copies(model, folder / WEIGHTS, values, arrays)
    try:
        config = _config_in(model, folder / CONFIG, values, arrays)
    except re.error as error:
        raise ValueError(f"{folder / CONFIG}: {error.pattern!r} is no pattern ({error})") from None
    try:
        wanted = _wanted_shapes(model, config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG}: target_modules: {error}") from None
    check_names(f"load_adapter_peft {folder}", wanted, arrays)
    check_shapes(f"load_adapter_peft {folder}", wanted, {k: a.shape for k, a in arrays.items()})

    if {"lm_head", "tokens", "model.embed_tokens"} & set(config.modules_to_save or ()):
        untie_head(model)
    apply_lora(model, config)
    for path, m in lora_modules(model):
        factors = {"lora_A": m.a[0], "lora_B": m.b[0]}
        if m.m:
            factors["lora_magnitude_vector"] = m.m[0]
        _fill(factors, arrays, f"{peft_name(model, path)}.")
    for path, module in saved_modules(model):
        name = peft_name(model, path)
        _fill(
            dict(module.named_parameters()),
            {k: flipped(model, path, a) for k, a in arrays.items() if k.startswith(f"{name}.")},
            f"{name}.",
        )
    return config


def _fill(tensors: Mapping[str, Tensor], arrays: Mapping[str, Any], prefix: str) -> None:
    for key, p in tensors.items():
        p.data = array_module(p.data).asarray(arrays[prefix + key], p.dtype, order="C")


def _refuse_other_formats(folder: Path) -> None:
    if (folder / "adapters.safetensors").exists():
        refuse_mlx(folder, {"fine_tune_type": None})
    if not (folder / WEIGHTS).exists() and (folder / ADAPTER_FILE).exists():
        raise ValueError(f"{folder} is a native adapter; load it with load_adapter")
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise ValueError(
            f"{folder / 'adapter_model.bin'} is a pickle, which can run code when it is read; "
            f"save the adapter as {WEIGHTS}"
        )


def _refuse_unsupported(path: Path, values: Mapping[str, Any]) -> None:
    if values.get("peft_type") != "LORA":
        raise ValueError(
            f"{path}: peft_type is {values.get('peft_type')!r}; only LORA is supported"
        )
    for name, allowed in _ONLY.items():
        value = values.get(name)
        if value not in (None, [], {}) and value not in allowed:
            raise ValueError(f"{path}: {name} = {value!r} changes the maths and is not supported")
    unknown = [
        name
        for name, value in values.items()
        if name not in _READ | _HARMLESS | _ONLY.keys() and value not in (None, False, [], {})
    ]
    if unknown:
        warnings.warn(f"{path}: unknown fields {unknown} are ignored", stacklevel=3)


def _read_arrays(path: Path) -> dict[str, Any]:
    """The tensors by module and kind, PEFT's prefix and the adapter's name stripped."""
    file = TensorFile(path)
    arrays: dict[str, Any] = {}
    for key in file.entries:
        if ".original_module." in key:
            continue  # a copy of the base's own module
        if "lora_embedding_" in key:
            raise ValueError(f"{path}: {key} adapts an embedding, which is not supported")
        name = key.removeprefix(PREFIX) if key.startswith(PREFIX) else key
        name = re.sub(r"\.modules_to_save\.[^.]+(?=\.[^.]+$)", "", name)
        name = re.sub(r"\.(lora_[AB])(\.[^.]+)?\.weight$", r".\1", name)
        name = re.sub(r"\.(lora_magnitude_vector)(\.[^.]+)?(\.weight)?$", r".\1", name)
        if name in arrays:
            raise ValueError(f"{path} holds several adapters: {key} is there under two names")
        array = file.read(key, "F32")
        check_finite(key, array)
        arrays[name] = array.reshape(-1) if name.endswith("lora_magnitude_vector") else array
        if not key.startswith(PREFIX):
            raise ValueError(f"{path}: the key {key} does not begin with {PREFIX}")
    return arrays


def _drop_copies(
    model: LanguageModel, path: Path, values: Mapping[str, Any], arrays: dict[str, Any]
) -> None:
    """Take out the copies of base weights that PEFT saves beside adapters of a head or embedding.

    ValueError if one is not what the model has: the adapter was then made for another base.
    """
    saved = values.get("modules_to_save") or []
    for own, p in model._walk():
        module, _, leaf = own.rpartition(".")
        name = peft_name(model, module)
        plain = not any(name.endswith(ending) for ending in saved)
        for key in (f"{name}.base_layer.{leaf}", *([f"{name}.{leaf}"] if plain else ())):
            if key in arrays:
                base = flipped(model, module, Tensor(widen(p.data)).numpy())
                if not np.array_equal(arrays.pop(key), base):
                    raise ValueError(f"{path}: {key} is another base's: this model's differs")


_FACTOR = re.compile(r"(.*)\.(lora_A|lora_B|lora_magnitude_vector)$")


def _config_in(
    model: LanguageModel, path: Path, values: Mapping[str, Any], arrays: Mapping[str, Any]
) -> LoRAConfig:
    """Our config of a PEFT adapter: the same targets if we read them so, else full paths."""
    own = {peft_name(model, m): m for m, _ in model.named_modules() if m}
    saved = {name.rpartition(".")[0] for name in arrays if not _FACTOR.match(name)}
    named = values.get("modules_to_save") or []
    saved = {n for n in saved if n in own and any(n.endswith(e) for e in named)}
    for ending in named:
        if not any(n.endswith(ending) for n in saved):
            raise ValueError(f"{path}: modules_to_save {ending!r} is missing from {WEIGHTS}")
    if values.get("ensure_weight_tying") and saved:
        raise ValueError(f"{path}: ensure_weight_tying changes the maths and is not supported")
    adapted = [n for n in own if _peft_adapts(values, n, model.get_module(own[n]))]
    if not adapted:
        raise ValueError(
            f"{path}: target_modules is {values.get('target_modules')!r}, which means no module "
            f"of this {type(model).__name__}"
        )
    rank, alpha = (
        {k: v for k, v in (values.get(f"{kind}_pattern") or {}).items() if _used(k, adapted)}
        for kind in ("rank", "alpha")
    )
    try:
        full = LoRAConfig(
            r=values.get("r", 8),
            alpha=values.get("lora_alpha", 8),
            dropout=values.get("lora_dropout", 0.0),
            targets=[own[n] for n in adapted],
            use_rslora=bool(values.get("use_rslora")),
            use_dora=bool(values.get("use_dora")),
            rank_pattern=rank,
            alpha_pattern=alpha,
            modules_to_save=[m for n, m in own.items() if n in saved] or None,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    layers = values.get("layers_to_transform")
    short = replace(
        full,
        targets=values.get("target_modules") or (),
        layers=[layers] if isinstance(layers, int) else layers or None,
    )
    try:
        return short if resolve_targets(model, short) == resolve_targets(model, full) else full
    except (ValueError, TypeError):
        return full


def _used(pattern: str, names: list[str]) -> bool:
    return any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)


def _peft_adapts(values: Mapping[str, Any], name: str, module: Module) -> bool:
    """Whether PEFT adapts the module called `name`, by its rules."""
    excluded = values.get("exclude_modules") or []
    if re.fullmatch(excluded, name) if isinstance(excluded, str) else listed(name, excluded):
        return False
    if any(re.match(rf"(^|.*\.){m}($|\..*)", name) for m in values.get("modules_to_save") or []):
        return False
    targets = values.get("target_modules") or []
    if targets == "all-linear":
        return type(module) is Linear and name != "lm_head"
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    if not listed(name, targets):
        return False
    layers = values.get("layers_to_transform")
    if layers in (None, []) or name in targets:
        return True
    patterns = values.get("layers_pattern") or r"[^.]*"
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name):
            return int(found[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def _wanted_shapes(model: LanguageModel, config: LoRAConfig) -> dict[str, tuple[int, ...]]:
    wanted: dict[str, tuple[int, ...]] = {}
    for path, (whole,) in resolve_targets(model, config).items():
        O, I = base_shape(linear_at(model, path))  # noqa: E741
        name = peft_name(model, path)
        wanted[f"{name}.lora_A"], wanted[f"{name}.lora_B"] = (whole.r, I), (O, whole.r)
        if config.use_dora:
            wanted[f"{name}.lora_magnitude_vector"] = (O,)
    for path in config.modules_to_save or ():
        for key, p in model.get_module(path).named_parameters():
            wanted[f"{peft_name(model, path)}.{key}"] = flipped(model, path, p.data).shape
    return wanted
