"""Which matrices a list of targets means, decided before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..transformer.decoder import Decoder
from ..transformer.layers import LayerNorm, Linear, RMSNorm
from ..transformer.llama import Transformer
from ..transformer.model import LanguageModel
from ..transformer.module import check_model
from .config import LoRAConfig

# What each short name means: in a Decoder a slice (first and last + 1, in units of d_model or of
# the hidden width) of a fused matrix, in a Transformer whole matrices.
_DECODER = {
    "q": ("attn.qkv", 0, 1),
    "k": ("attn.qkv", 1, 2),
    "v": ("attn.qkv", 2, 3),
    "attn_out": ("attn.proj", 0, 1),
    "mlp_in": ("mlp.fc", 0, 1),
    "mlp_out": ("mlp.proj", 0, 1),
}
_TRANSFORMER = {
    "q": ("self_attn.q_proj",),
    "k": ("self_attn.k_proj",),
    "v": ("self_attn.v_proj",),
    "attn_out": ("self_attn.o_proj",),
    "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp_out": ("mlp.down_proj",),
}
_PROJECTIONS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "attn_out",
    "up_proj": "mlp_in",
    "down_proj": "mlp_out",
}
SHORTHANDS = {
    "all_linear": ("q", "k", "v", "attn_out", "mlp_in", "mlp_out"),
    "attention": ("q", "k", "v", "attn_out"),
    "qv": ("q", "v"),
    "mlp": ("mlp_in", "mlp_out"),
}


@dataclass(frozen=True)
class Slice:
    """Rows [start, stop) of a matrix, with the rank and alpha of their adapter."""

    start: int
    stop: int
    r: int
    alpha: float


@dataclass(frozen=True)
class _Match:
    """Rows [start, stop) of a module that a target names, and the names that patterns may use."""

    module: str
    start: int
    stop: int
    names: tuple[str, ...]


def resolve_targets(model: LanguageModel, config: LoRAConfig) -> dict[str, tuple[Slice, ...]]:
    """The slices to adapt of each module, by the module's path, in the model's order.

    Raises a ValueError for a name that is unknown or twice there, a layer that does not exist,
    a pattern that matches nothing, and if nothing is left to adapt; a TypeError for a target that
    is not a Linear.
    """
    check_model("LoRA", model)
    names = _names(model)
    found = _in_layers(list(_matches(model, config, names)), names, config)
    _check_disjoint(found, config)
    saved = resolve_saved(model, config)
    found = [m for m in found if not inside(m.module, saved)]
    if not found:
        raise ValueError(
            f"LoRA targets {config.targets!r} match no linear layer of this {type(model).__name__}"
        )
    used: set[str] = set()
    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank, alpha = _pattern(ranks, config.r, used), _pattern(alphas, config.alpha, used)
    result: dict[str, tuple[Slice, ...]] = {}
    for module in names:
        rows = sorted((m for m in found if m.module == module), key=lambda m: m.start)
        if rows:
            result[module] = tuple(
                Slice(m.start, m.stop, rank(m.names), alpha(m.names)) for m in rows
            )
    if config.init == "pissa":
        for module, slices in result.items():
            for s in slices:
                most = min(s.stop - s.start, linear_at(model, module).weight.shape[1])
                if s.r > most:
                    raise ValueError(
                        f"LoRA: pissa on {module} takes a rank of at most {most}, not {s.r}"
                    )
    for pattern in (*ranks, *alphas):
        if pattern not in used:
            raise ValueError(f"LoRA: the pattern {pattern!r} matches none of the adapted modules")
    return result


def inside(module: str, saved: Collection[str]) -> bool:
    """Whether a module is one of `saved`, or below one."""
    return any(module == s or module.startswith(f"{s}.") for s in saved)


def resolve_saved(model: LanguageModel, config: LoRAConfig) -> list[str]:
    """The paths of the modules that `config.modules_to_save` names, in the model's order."""
    if not config.modules_to_save:
        return []
    names, result = _names(model), set()
    for wanted in config.modules_to_save:
        if wanted == "norms":
            kinds = (LayerNorm, RMSNorm)
            found = [n for n in names if isinstance(model.get_module(n), kinds)]
        else:
            found = [n for n, known in names.items() if any(_ends(k, wanted) for k in known)]
        if not found:
            raise ValueError(
                f"LoRA: modules_to_save {wanted!r} names no module of this {type(model).__name__}"
            )
        result.update(found)
    return [name for name in names if name in result]


def hf_name(model: LanguageModel, path: str) -> str:
    """What the checkpoint of a model calls the module at `path`."""
    return model.hf_name(path) if isinstance(model, Decoder) else path


def _names(model: LanguageModel) -> dict[str, tuple[str, ...]]:
    """Each module's path -> the names it goes by: its path, and what its checkpoint calls it."""
    paths = (path for path, _ in model.named_modules() if path)
    return {path: tuple({path: 0, hf_name(model, path): 0}) for path in paths}


def _matches(
    model: LanguageModel, config: LoRAConfig, names: Mapping[str, tuple[str, ...]]
) -> Iterator[_Match]:
    targets = config.targets
    if targets in ("all-linear", ("all-linear",)):
        # As in PEFT: everything that is exactly a linear layer, the output head excepted.
        wanted = {n: 0 for n in names if n != "lm_head" and type(model.get_module(n)) is Linear}
        yield from (_whole(model, n, names) for n in wanted)
    elif isinstance(targets, str):
        if targets in SHORTHANDS:
            yield from _short(model, SHORTHANDS[targets], names)
            return
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ValueError(
                f"LoRA targets: {targets!r} is no regular expression: {error}"
            ) from None
        for module, known in names.items():
            if any(pattern.fullmatch(name) for name in known):
                yield _whole(model, module, names)
    else:
        yield from _listed(model, targets, names)


def _listed(
    model: LanguageModel, targets: Sequence[str], names: Mapping[str, tuple[str, ...]]
) -> Iterator[_Match]:
    if not targets:
        raise ValueError("LoRA: targets must name at least one matrix")
    short = _short_names(model)
    unknown = []
    for target in targets:
        if target in SHORTHANDS:
            yield from _short(model, SHORTHANDS[target], names)
        elif target in short or (_PROJECTIONS.get(target) in short and _fused(model)):
            yield from _short(model, (target,), names)
        else:
            modules = [n for n, known in names.items() if any(_ends(k, target) for k in known)]
            yield from (_whole(model, n, names) for n in modules)
            if not modules:
                unknown.append(target)
    if unknown:
        known = [*short, *(_PROJECTIONS if _fused(model) else ()), *SHORTHANDS]
        raise ValueError(f"unknown LoRA targets {unknown}; known: {known} and names of modules")


def _fused(model: LanguageModel) -> bool:
    return isinstance(model, Decoder)


def _short_names(model: LanguageModel) -> Mapping[str, Any]:
    return _DECODER if _fused(model) else _TRANSFORMER if isinstance(model, Transformer) else {}


def _short(
    model: LanguageModel, targets: tuple[str, ...], names: Mapping[str, tuple[str, ...]]
) -> Iterator[_Match]:
    """The matrices, or the slices of fused ones, that seed names and projections mean."""
    for target in targets:
        if not _fused(model):
            for part in _TRANSFORMER[target]:
                for module in names:
                    if _ends(module, part):
                        yield _whole(model, module, names)
            continue
        name = _PROJECTIONS.get(target, target)
        part, first, last = _DECODER[name]
        for module, known in names.items():
            if _ends(module, part):
                size = linear_at(model, module).weight.shape[0]
                unit = size // 3 if part == "attn.qkv" else size
                also = [n for n, seed in _PROJECTIONS.items() if seed == name]
                above = module.rpartition(".")[0]
                extra = tuple(f"{above}.{n}" for n in (name, *also))
                whole = known if unit == size else ()
                yield _Match(module, first * unit, last * unit, (*whole, *extra))


def _whole(model: LanguageModel, module: str, names: Mapping[str, tuple[str, ...]]) -> _Match:
    return _Match(module, 0, linear_at(model, module).weight.shape[0], names[module])


def linear_at(model: LanguageModel, module: str) -> Linear:
    """The plain linear layer at a path; TypeError if something else is there."""
    found = model.get_module(module)
    if type(found) is not Linear:
        raise TypeError(f"LoRA: {module} is a {type(found).__name__}, not a Linear")
    return found


def _ends(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _in_layers(
    found: list[_Match], names: Mapping[str, tuple[str, ...]], config: LoRAConfig
) -> list[_Match]:
    if config.layers is None:
        return found
    there = {layer for name in names if (layer := block_of(name)) is not None}
    for layer in config.layers:
        if layer not in there:
            raise ValueError(f"LoRA: layer {layer!r} is not one of the model's 0 .. {max(there)}")
    if len(set(config.layers)) < len(config.layers):
        raise ValueError(f"LoRA: layers {list(config.layers)} name a layer twice")
    return [m for m in found if block_of(m.module) in config.layers]


def block_of(path: str) -> int | None:
    """The number of the block that a module is in.

    >>> block_of("model.layers.11.mlp.up_proj")
    11
    """
    number = re.search(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?:\.|$)", path)
    return int(number[1]) if number else None


def _check_disjoint(found: list[_Match], config: LoRAConfig) -> None:
    last: dict[str, list[_Match]] = {}
    for m in found:
        for other in last.setdefault(m.module, []):
            if m.start < other.stop and other.start < m.stop:
                raise ValueError(
                    f"LoRA targets {list(config.targets)} name rows {m.start} .. {m.stop - 1} of "
                    f"{m.module} twice"
                )
        last[m.module].append(m)


def _pattern(
    patterns: Mapping[str, Any], default: Any, used: set[str]
) -> Callable[[tuple[str, ...]], Any]:
    """The value of the first pattern that matches one of a module's names from a dot on."""

    def value(names: tuple[str, ...]) -> Any:
        for pattern, value in patterns.items():
            if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
                used.add(pattern)
                return value
        return default

    return value
