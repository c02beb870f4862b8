"""What to adapt and how: LoRA (Hu et al. 2021, arXiv:2106.09685) and its variants."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..transformer.values import Rule, are_strings, check_fields, is_flag, is_number, is_whole


def _is_pattern(value: Any) -> bool:
    return isinstance(value, Mapping) and are_strings(list(value))


def _are_layers(value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) and all(map(_is_int, value))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and is_whole(value)  # of Python, which JSON can hold


_RULES: tuple[Rule, ...] = (
    (
        ("targets",),
        lambda value: isinstance(value, str) or are_strings(value),
        "a string or a list of strings",
    ),
    (("modules_to_save",), are_strings, "a list of strings"),
    (("layers",), _are_layers, "a list of whole numbers"),
    (("rank_pattern", "alpha_pattern"), _is_pattern, "a dict whose keys are strings"),
    (("use_rslora", "use_dora"), is_flag, "True or False"),
)


@dataclass(frozen=True)
class LoRAConfig:
    """How a model is adapted; a wrong value raises a ValueError.

    Each adapted matrix W (out, in) gets A (r, in) and B (out, r) and acts as W + scale B A, with
    scale = alpha / r, or alpha / sqrt(r) with `use_rslora` (Kalajdzievski 2023, arXiv:2312.03732).

    `targets` is a list or a string:

    - seed names (q, k, v, attn_out, mlp_in, mlp_out) and projections (q_proj, k_proj, v_proj,
      o_proj, gate_proj, up_proj, down_proj): a pair for each, on a fused matrix one per slice;
    - shorthands (all_linear, attention, qv, mlp), alone or among others;
    - module names as in PEFT, whole or from a dot on (`attn.qkv`, `c_attn`): one pair over the
      whole matrix;
    - the string "all-linear": as in PEFT, every linear layer but the head;
    - any other string: a regular expression that must match the whole module name.

    `layers` restricts to these block numbers. The keys of `rank_pattern` and `alpha_pattern` are
    regular expressions that match a module's name from a dot on; the first that matches gives
    its value. `modules_to_save` names modules that are trained whole and saved with the adapter
    ("norms": every norm). `use_dora` adds a trained magnitude per row (Liu et al. 2024,
    arXiv:2402.09353). `init` is "default" (A uniform in +-1 / sqrt(in), B zero) or "pissa"
    (the largest r singular triples of W move into the factors; Meng et al. 2024, arXiv:2404.02948).
    `quantize` holds the base in 4 bits: "int4", "int4-double" or "nf4" (Dettmers et al. 2023,
    arXiv:2305.14314).
    """

    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    targets: Sequence[str] | str = ("q_proj", "v_proj")
    use_rslora: bool = field(default=False, kw_only=True)
    use_dora: bool = field(default=False, kw_only=True)
    rank_pattern: Mapping[str, int] | None = field(default=None, kw_only=True)
    alpha_pattern: Mapping[str, float] | None = field(default=None, kw_only=True)
    layers: Sequence[int] | None = field(default=None, kw_only=True)
    modules_to_save: Sequence[str] | None = field(default=None, kw_only=True)
    init: str = field(default="default", kw_only=True)
    quantize: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields("LoRAConfig", vars(self), _RULES)
        for name in ("targets", "use_rslora", "use_dora"):
            if getattr(self, name) is None:
                raise ValueError(f"LoRAConfig: {name} is None; it must have a value")
        for name in ("targets", "layers", "modules_to_save"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        for name in ("rank_pattern", "alpha_pattern"):
            object.__setattr__(self, name, dict(getattr(self, name) or {}) or None)
        for name, r in {"r": self.r, **(self.rank_pattern or {})}.items():
            if not (_is_int(r) and r > 0):
                raise ValueError(
                    f"LoRAConfig: the rank {name} must be a whole number > 0, not {r!r}"
                )
        for name, alpha in {"alpha": self.alpha, **(self.alpha_pattern or {})}.items():
            if not (isinstance(alpha, (int, float)) and is_number(alpha) and alpha > 0):
                raise ValueError(f"LoRAConfig: {name} must be a finite number > 0, not {alpha!r}")
        if not (is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ValueError(f"LoRAConfig: dropout must be in [0, 1), not {self.dropout!r}")
        for pattern in (*(self.rank_pattern or ()), *(self.alpha_pattern or ())):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"LoRAConfig: {pattern!r} is no regular expression: {error}"
                ) from None
        if self.init not in ("default", "pissa"):
            raise ValueError(f'LoRAConfig: init is "default" or "pissa", not {self.init!r}')
        if self.quantize not in (None, "int4", "int4-double", "nf4"):
            raise ValueError(
                'LoRAConfig: quantize is None, "int4", "int4-double" or "nf4", '
                f"not {self.quantize!r}"
            )

    def scale(self, r: int, alpha: float) -> float:
        """What B A is multiplied by.

        >>> LoRAConfig(r=4, alpha=8).scale(4, 8)
        2.0
        """
        return float(alpha / math.sqrt(r) if self.use_rslora else alpha / r)

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
