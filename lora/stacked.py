"""A whole adapter as two tensors, for a graph that takes one input per factor."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..transformer.files import atomic_file, make_folder
from ..transformer.model import LanguageModel
from .apply import lora_modules
from .linear import base_shape
from .native import write_text


@dataclass(frozen=True)
class AdapterLayout:
    """How the factors of all layers lie in A (L, S, r, in) and B (L, S, width, r).

    L layers with one adapted matrix each, `module` within its block; S slices of one width.
    """

    module: str
    layers: int
    slices: tuple[tuple[int, int], ...]
    r: int
    scale: float
    in_features: int

    @property
    def width(self) -> int:
        """Rows of a slice."""
        return self.slices[0][1] - self.slices[0][0]

    @property
    def shape_a(self) -> tuple[int, int, int, int]:
        """(L, S, r, in)"""
        return self.layers, len(self.slices), self.r, self.in_features

    @property
    def shape_b(self) -> tuple[int, int, int, int]:
        """(L, S, width, r)"""
        return self.layers, len(self.slices), self.width, self.r

    @property
    def numel(self) -> int:
        """Values in both tensors."""
        return math.prod(self.shape_a) + math.prod(self.shape_b)


def adapter_layout(model: LanguageModel) -> AdapterLayout:
    """The layout of the adapters on a model.

    ValueError if there are none, or if they differ: more than one matrix per block, other slices,
    ranks or scales, slices of different widths, DoRA.
    """
    found = lora_modules(model)
    if not found:
        raise ValueError("model has no LoRA adapters")
    inside = {name: _within_block(name) for name, _ in found}
    if len(set(inside.values())) > 1:
        raise ValueError(
            f"adapters on more than one matrix per block ({sorted(set(inside.values()))}) cannot "
            "be stacked into one tensor; merge them instead"
        )
    first_name, first = found[0]
    shape = (first.slices, set(first.ranks), set(first.scales), base_shape(first.base)[1])
    for name, m in found:
        if m.m:
            raise ValueError(f"{name} has DoRA magnitudes, which cannot be stacked; merge instead")
        if (m.slices, set(m.ranks), set(m.scales), base_shape(m.base)[1]) != shape:
            raise ValueError(f"{name} does not have the same shape as {first_name}")
    widths = {stop - start for start, stop in first.slices}
    if len(widths) > 1:
        raise ValueError(f"slices of different widths ({sorted(widths)}) cannot be stacked")
    return AdapterLayout(
        module=inside[first_name],
        layers=len(found),
        slices=first.slices,
        r=first.r,
        scale=first.scale,
        in_features=base_shape(first.base)[1],
    )


def _within_block(path: str) -> str:
    """What follows the block's number."""
    steps = path.split(".")
    number = next((n for n, step in enumerate(steps) if step.isdigit()), -1)
    return ".".join(steps[number + 1 :])


def stack_adapter(model: LanguageModel) -> tuple[Any, Any]:
    """All factors in the blocks' order: float32 arrays A (L, S, r, in) and B (L, S, width, r)."""
    adapter_layout(model)
    modules = [m for _, m in lora_modules(model)]
    a = np.stack([[p.numpy() for p in m.a] for m in modules])
    b = np.stack([[p.numpy() for p in m.b] for m in modules])
    return a.astype(np.float32), b.astype(np.float32)


def write_stacked(
    model: LanguageModel, path: str | os.PathLike[str], base_model: str | None = None
) -> Path:
    """Write A, then scale B, as little-endian float32, and a JSON of the shapes beside it."""
    layout, (a, b) = adapter_layout(model), stack_adapter(model)
    path = Path(path)
    make_folder("write_stacked", path.parent)
    with atomic_file(path) as f:
        f.write(a.astype("<f4").tobytes())
        f.write((b * np.float32(layout.scale)).astype("<f4").tobytes())
    about = {
        "format": "rukh-lora-web-1",
        "dtype": "float32",
        "order": ["lora_a", "lora_b"],
        "shape_a": layout.shape_a,
        "shape_b": layout.shape_b,
        "module": layout.module,
        "r": layout.r,
        "scale_applied": layout.scale,
        "base_model": base_model,
        "bytes": 4 * layout.numel,
    }
    write_text(path.with_suffix(".json"), json.dumps(about, indent=2) + "\n")
    return path
