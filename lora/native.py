"""Adapters in files of our own: one safetensors file, its config beside it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ..autograd import Tensor
from ..autograd.backend import array_module
from ..autograd.device import beside
from ..transformer.files import atomic_file, json_object, make_folder
from ..transformer.hf import check_finite, check_writable
from ..transformer.model import LanguageModel
from ..transformer.module import check_model, check_names, check_shapes
from ..transformer.safetensors_io import TensorFile, write_safetensors
from ..transformer.values import is_number
from .apply import apply_lora, check_plain, lora_config, lora_modules, saved_modules
from .config import LoRAConfig
from .linear import Base, LoRALinear, base_shape
from .targets import linear_at, resolve_saved, resolve_targets

ADAPTER_FILE = "adapter.safetensors"
ADAPTER_CONFIG = "adapter_config.json"


def save_adapter(
    model: LanguageModel, path: str | os.PathLike[str], config: LoRAConfig | None = None
) -> Path:
    """Write the adapter to the file `path`, and its config to adapter_config.json beside it.

    Keys are `{module}.lora_A.{slice}`, `{module}.lora_B.{slice}`, for DoRA also
    `{module}.lora_magnitude_vector.{slice}`, with the module's path in the base model, and the
    paths of what modules_to_save trains. The file holds the config too, so that a config of
    another adapter in the same folder is noticed. ValueError, and nothing is written, if
    `config` is not the one that was applied, or if a value is not finite.
    """
    check_model("save_adapter", model)
    if not isinstance(config, LoRAConfig | None):
        raise TypeError(f"save_adapter: a LoRAConfig is needed, given a {type(config).__name__}")
    tensors = {name: p.data for name, p in _adapter_tensors(model)}
    if not tensors:
        raise ValueError("model has no LoRA adapters to save")
    if config is not None and config != lora_config(model):
        raise ValueError(
            f"save_adapter: given {config}, but the adapters were made by {lora_config(model)}"
        )
    check_writable("save_adapter", tensors)
    path = Path(path)
    make_folder("save_adapter", path.parent)
    text = config_text(lora_config(model))
    write_safetensors(path, tensors, {"format": "afinar-lora", "config": text})
    write_text(path.with_name(ADAPTER_CONFIG), text)
    return path


def load_adapter(model: LanguageModel, path: str | os.PathLike[str]) -> LoRAConfig:
    """Put the adapter of the file `path` (or of the folder) onto a plain model; returns its config.

    Names and shapes must be exactly those that the config means on this model: else a ValueError
    names what is missing, unexpected, of another shape or not finite, and the model stays as it is.
    """
    check_plain("load_adapter", model)
    path = Path(path)
    if path.is_dir():
        if not (path / ADAPTER_FILE).exists() and (path / "adapter_model.safetensors").exists():
            raise ValueError(f"{path} is a PEFT adapter; load it with load_adapter_peft")
        path = path / ADAPTER_FILE
    file = TensorFile(path)
    config_path = path.with_name(ADAPTER_CONFIG)
    if not config_path.is_file():
        raise FileNotFoundError(f"load_adapter: {path} needs {ADAPTER_CONFIG} beside it")
    text = config_path.read_bytes()
    config = _config_from(config_path, text)
    if file.metadata.get("config", text.decode()) != text.decode():
        raise ValueError(f"{config_path} is not the config that {path.name} was saved with")
    try:
        wanted = _wanted_shapes(model, config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{config_path}: {error}") from None
    check_names(f"load_adapter {path}", wanted, file.entries)
    check_shapes(f"load_adapter {path}", wanted, {n: e.shape for n, e in file.entries.items()})
    arrays = {name: file.read(name, "F32") for name in wanted}
    for name, a in arrays.items():
        check_finite(name, a)
    apply_lora(model, config)
    fill_adapter(model, arrays)
    return config


def fill_adapter(model: LanguageModel, arrays: Mapping[str, Any]) -> None:
    """Put arrays, by their native keys, into the trained tensors."""
    for name, p in _adapter_tensors(model):
        p.data = array_module(p.data).asarray(arrays[name], p.dtype)


def _adapter_tensors(model: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    for name, module in lora_modules(model):
        for key, factors in (
            ("lora_A", module.a),
            ("lora_B", module.b),
            ("lora_magnitude_vector", module.m),
        ):
            yield from ((f"{name}.{key}.{n}", p) for n, p in enumerate(factors))
    for name, module in saved_modules(model):
        yield from ((f"{name}.{key}", p) for key, p in module.named_parameters())


def _wanted_shapes(model: LanguageModel, config: LoRAConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapter that `config` makes on a plain model."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name, slices in resolve_targets(model, config).items():
        inputs = base_shape(linear_at(model, name))[1]
        for n, s in enumerate(slices):
            wanted[f"{name}.lora_A.{n}"] = (s.r, inputs)
            wanted[f"{name}.lora_B.{n}"] = (s.stop - s.start, s.r)
            if config.use_dora:
                wanted[f"{name}.lora_magnitude_vector.{n}"] = (s.stop - s.start,)
    for name in resolve_saved(model, config):
        for key, p in model.get_module(name).named_parameters():
            wanted[f"{name}.{key}"] = p.shape
    return wanted


def config_text(config: LoRAConfig) -> str:
    """The config as the text of its file."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def _config_from(path: Path, text: bytes) -> LoRAConfig:
    values = json_object(path, text)
    refuse_mlx(path, values)
    if "peft_type" in values:
        raise ValueError(f"{path} is a PEFT adapter; load it with load_adapter_peft")
    known = [f.name for f in fields(LoRAConfig)]
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"{path}: unknown fields {unknown}; known: {known}")
    try:
        return LoRAConfig(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def refuse_mlx(path: Path, values: Mapping[str, Any]) -> None:
    """Raise a ValueError if a config is that of an mlx-lm adapter."""
    if "lora_parameters" in values or "fine_tune_type" in values:
        raise ValueError(
            f"{path} is an mlx-lm adapter: its factors are transposed and its scale is not "
            "alpha / r, so that it would be misread; convert it to PEFT's format first"
        )


def write_text(path: Path, text: str) -> None:
    """Write a text file that appears under its name when it is whole."""
    with atomic_file(path) as f:
        f.write(text.encode())


# --- one layer as JSON ---------------------------------------------------------------------


def layer_to_json(layer: LoRALinear) -> str:
    """One adapted matrix as JSON: version, rank, alpha, d_out, d_in, scale, lora_a, lora_b.

    The factors are flat lists, row by row. A layer of several slices, or with DoRA, has no such
    form: ValueError.
    """
    if not isinstance(layer, LoRALinear):
        raise TypeError(f"layer_to_json: a LoRALinear is needed, given a {type(layer).__name__}")
    if len(layer.slices) != 1 or layer.m:
        raise ValueError("layer_to_json: one plain pair of factors needed")
    a, b = layer.a[0].data, layer.b[0].data
    values = {
        "version": "1.0",
        "rank": layer.r,
        "alpha": layer.alphas[0],
        "d_out": len(b),
        "d_in": a.shape[1],
        "scale": layer.scale,
        "lora_a": a.reshape(-1).tolist(),
        "lora_b": b.reshape(-1).tolist(),
    }
    return json.dumps(values) + "\n"


def layer_from_json(text: str, base: Base) -> LoRALinear:
    """The adapted layer that `layer_to_json` wrote, on the layer `base`, its scale as saved.

    ValueError for another version, for values of the wrong type, and for sizes that do not fit
    each other or the base.
    """
    try:
        v = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"layer_from_json: not JSON ({error})") from None
    if not isinstance(v, dict):
        raise ValueError(f"layer_from_json: an object is needed, given a {type(v).__name__}")
    if v.get("version") != "1.0":
        raise ValueError(f"Unsupported adapter version: {v.get('version')}")
    names = ("rank", "alpha", "d_out", "d_in", "scale", "lora_a", "lora_b")
    if missing := [name for name in names if name not in v]:
        raise ValueError(f"layer_from_json: missing {missing}")
    for name in names[:5]:
        if not (is_number(v[name]) and v[name] > 0):
            raise ValueError(f"layer_from_json: {name} is {v[name]!r}; needed: a number above 0")
    for name in names[5:]:
        if not isinstance(v[name], list) or not all(map(is_number, v[name])):
            raise ValueError(f"layer_from_json: {name} must be a list of finite numbers")
    R, O, I = v["rank"], v["d_out"], v["d_in"]  # noqa: E741
    if base_shape(base) != (O, I):
        raise ValueError(f"layer_from_json: the base is {base_shape(base)}, the adapter {(O, I)}")
    if len(v["lora_a"]) != R * I or len(v["lora_b"]) != O * R:
        raise ValueError(
            f"layer_from_json: rank {R} on {(O, I)} needs {R * I} and {O * R} values, "
            f"given {len(v['lora_a'])} and {len(v['lora_b'])}"
        )
    rank_stabilised = not math.isclose(v["scale"], v["alpha"] / R, rel_tol=1e-6)
    if rank_stabilised and not math.isclose(v["scale"], v["alpha"] / math.sqrt(R), rel_tol=1e-6):
        raise ValueError(
            f"layer_from_json: the scale {v['scale']} is neither alpha / r nor alpha / sqrt(r)"
        )
    layer = LoRALinear(base, R, v["alpha"], use_rslora=rank_stabilised)
    for p, values, shape in ((layer.a[0], v["lora_a"], (R, I)), (layer.b[0], v["lora_b"], (O, R))):
        p.data = beside(np.array(values, p.dtype).reshape(shape), p.data)
    return layer
