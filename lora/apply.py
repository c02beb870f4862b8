"""Adapters go onto a model, into its weights, and out of them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..autograd import Tensor
from ..autograd.backend import FLOATS
from ..autograd.ops.gemm import widen
from ..transformer.init import chosen_seed
from ..transformer.layers import Linear
from ..transformer.model import LanguageModel
from ..transformer.module import Module, check_model
from ..transformer.values import is_number
from .config import LoRAConfig
from .linear import LoRALinear, adapt, plain_linear
from .quantized import QuantizedLinear
from .targets import block_of, inside, linear_at, resolve_saved, resolve_targets


@dataclass
class _Applied:
    """What a model remembers about its adapters."""

    config: LoRAConfig
    trainable: set[str]  # parameters that were trainable before
    saved: list[str]  # modules trained whole
    merged: Mapping[str, Module] = field(default_factory=dict)  # kept aside while merged
    model_config: Any = None  # before merging untied the head


def _applied(model: LanguageModel) -> _Applied | None:
    check_model("LoRA", model)
    return vars(model).get("_lora")


def check_plain(what: str, model: LanguageModel) -> None:
    """Raise TypeError if `model` is no model, ValueError if it has adapters already."""
    check_model(what, model)
    if (applied := _applied(model)) is not None:
        have = "merged adapters, kept aside" if applied.merged else "adapters"
        raise ValueError(f"{what}: this model has {have}; merge them with keep=False first")


def apply_lora(model: LanguageModel, config: LoRAConfig, seed: int | None = None) -> int:
    """Freeze the model and put trainable adapters on it; returns how many values are trained.

    `seed` (if None, the `lock_init_seed` in force) and a module's path fix its A. Wrong targets,
    and a model that has adapters, raise before anything is changed.
    """
    if not isinstance(config, LoRAConfig):
        raise TypeError(f"apply_lora: a LoRAConfig is needed, given a {type(config).__name__}")
    check_plain("apply_lora", model)
    seed = chosen_seed("apply_lora", seed)
    targets = resolve_targets(model, config)
    saved = resolve_saved(model, config)
    _check_saved(model, saved)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    vars(model)["_lora"] = _Applied(config, trainable, saved)
    for p in model.parameters():
        p.requires_grad = False
    for name, slices in targets.items():
        adapter = adapt(linear_at(model, name), slices, config, seed, name)
        adapter.training = model.training
        model.set_module(name, adapter)
    if config.quantize is not None:
        _quantize_others(model, config.quantize, saved)
    _thaw(model)
    return sum(p.size for p in adapter_params(model))


def _quantize_others(model: LanguageModel, kind: str, saved: list[str]) -> None:
    """Hold the linear layers of the blocks that carry no adapter in 4 bits too."""
    for name, layer in list(model.named_modules()):
        if type(layer) is Linear and block_of(name) is not None and not inside(name, saved):
            model.set_module(name, QuantizedLinear(widen(layer.weight.data), layer.bias, kind))


def _check_saved(model: LanguageModel, saved: list[str]) -> None:
    owners: dict[int, list[str]] = {}
    for name, p in model._walk():
        owners.setdefault(id(p), []).append(name)
    for name in saved:
        for p in model.get_module(name).parameters():
            if len(owners[id(p)]) > 1:
                raise ValueError(
                    f"LoRA: modules_to_save names {name}, but {' and '.join(owners[id(p)])} are "
                    "one tensor; an adapter cannot train one of them alone"
                )


def _thaw(model: LanguageModel) -> None:
    for p in adapter_params(model):
        if p.dtype not in FLOATS:
            p.data = widen(p.data)  # what is trained is float32, whatever it was stored in
        p.requires_grad = True


def lora_config(model: LanguageModel) -> LoRAConfig:
    """The config that was applied to the model; ValueError if none was."""
    if (applied := _applied(model)) is None:
        raise ValueError("model has no LoRA adapters")
    return applied.config


def lora_modules(model: LanguageModel) -> list[tuple[str, LoRALinear]]:
    """(path in the base model, adapted layer), in the model's order."""
    check_model("LoRA", model)
    return [(n, m) for n, m in model.named_modules() if isinstance(m, LoRALinear)]


def saved_modules(model: LanguageModel) -> list[tuple[str, Module]]:
    """(path, module) of those that are trained whole and saved with the adapter."""
    applied = _applied(model)
    return [] if applied is None else [(name, model.get_module(name)) for name in applied.saved]


def adapter_params(model: LanguageModel) -> list[Tensor]:
    """Every trained tensor, in the model's order: factors, magnitudes, modules_to_save."""
    modules = lora_modules(model)
    if not modules:
        return []
    trained = {id(p) for _, m in modules for p in m.factors}
    trained |= {id(p) for _, m in saved_modules(model) for p in m.parameters()}
    return [p for p in model.parameters() if id(p) in trained]


def lora_param_groups(
    model: LanguageModel, lr: float, weight_decay: float = 0.0, lora_plus_ratio: float = 1.0
) -> list[dict[str, Any]]:
    """Optimizer groups of the trained tensors; the B's learn `lora_plus_ratio` times faster.

    LoRA+ (Hayou et al. 2024, arXiv:2402.12354). Matrices decay, vectors do not. Each run of equal
    settings is a group, so that the groups, one after the other, keep the model's order.
    """
    check_model("lora_param_groups", model)
    if not (is_number(lr) and is_number(weight_decay)):
        raise ValueError(
            "lora_param_groups: lr and weight_decay must be numbers, given "
            f"{lr!r} and {weight_decay!r}"
        )
    if not (is_number(lora_plus_ratio) and lora_plus_ratio > 0):
        raise ValueError(f"lora_param_groups: the ratio must be positive, not {lora_plus_ratio!r}")
    faster = {id(b) for _, m in lora_modules(model) for b in m.b}
    groups: list[dict[str, Any]] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        options = {
            "lr": lr * lora_plus_ratio if id(p) in faster else lr,
            "weight_decay": weight_decay if p.ndim >= 2 else 0.0,
        }
        if not groups or any(groups[-1][k] != v for k, v in options.items()):
            groups.append({"params": [], "names": [], **options})
        groups[-1]["params"].append(p)
        groups[-1]["names"].append(name)
    return groups


# --- merging -------------------------------------------------------------------------------


def merge_lora(model: LanguageModel, keep: bool = True) -> int:
    """Fold the adapters into plain layers; returns how many modules were merged.

    Sums are taken in float32 whatever the base is stored in. A merged head that was tied gets a
    matrix of its own. What was trainable before `apply_lora` is trainable again. With `keep` the
    adapted layers, whose weights are untouched, wait for `unmerge_lora`.
    """
    check_model("merge_lora", model)
    modules, applied = lora_modules(model), _applied(model)
    if not modules or applied is None:
        raise ValueError("merge_lora: model has no LoRA adapters")
    applied.model_config = model.config
    kept = _folded(model)
    for name, layer in kept.items():
        plain = _plain(layer)
        plain.training = model.training
        model.set_module(name, plain)
        if name == "lm_head":
            _untie_config(model)
    for name, p in model.named_parameters():
        p.requires_grad = name in applied.trainable or name.rpartition(".")[0] in kept
    if keep:
        applied.merged = kept
    else:
        del vars(model)["_lora"]
    return len(modules)


def _folded(model: LanguageModel) -> dict[str, LoRALinear | QuantizedLinear]:
    """The layers that a merged model has in plain form: adapted ones, and those in 4 bits."""
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, LoRALinear)
        or (isinstance(m, QuantizedLinear) and not name.endswith(".base"))
    }


def _plain(layer: LoRALinear | QuantizedLinear) -> Linear:
    if isinstance(layer, QuantizedLinear):
        return plain_linear(layer.dequantized(), layer.bias)
    return layer.merged()


def unmerge_lora(model: LanguageModel) -> int:
    """Put back the adapted layers that `merge_lora` kept, bit for bit; returns how many.

    The adapters are trainable, and the base is frozen.
    """
    check_model("unmerge_lora", model)
    applied = _applied(model)
    if applied is None or not applied.merged:
        raise ValueError("unmerge_lora: no merged adapters are kept")
    device = model.device
    for name, adapter in applied.merged.items():
        adapter.train(model.training)
        model.set_module(name, adapter)
    for p in model.parameters():
        p.requires_grad = False
    model.config = applied.model_config
    model.to(device)  # it may have moved while the adapters were kept aside
    applied.merged = {}
    _thaw(model)
    return len(lora_modules(model))


def untie_head(model: LanguageModel) -> None:
    """Give a tied head a matrix of its own, with the same values; a head of its own keeps it."""
    flag = "tie" if hasattr(model.config, "tie") else "tie_word_embeddings"
    if getattr(model.config, flag):
        (weight,) = model.lm_head.parameters()
        head = plain_linear(weight.data.copy(), None)
        head.weight.requires_grad = weight.requires_grad
        model.lm_head = head
        _untie_config(model)


def _untie_config(model: LanguageModel) -> None:
    flag = "tie" if hasattr(model.config, "tie") else "tie_word_embeddings"
    if getattr(model.config, flag):
        model.config = replace(model.config, **{flag: False})


def merged_state_dict(model: LanguageModel) -> dict[str, Any]:
    """The state dict that the merged model would have; the model itself stays as it is."""
    check_model("merged_state_dict", model)
    if not lora_modules(model):
        raise ValueError("merged_state_dict: model has no LoRA adapters")
    folded = {name: _plain(layer) for name, layer in _folded(model).items()}
    state: dict[str, Any] = {}
    for path, p in model.named_parameters():
        if not any(path.startswith(f"{name}.") for name in folded):
            state[path] = p.data
    for name, layer in folded.items():
        state.update((f"{name}.{key}", p.data) for key, p in layer.named_parameters())
    return state
