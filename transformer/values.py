"""What a value from a file, or an option, must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeGuard

import numpy as np

# Names of fields, what their values must fulfil, and that in words.
Rule = tuple[Iterable[str], Callable[[Any], bool], str]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    if isinstance(value, int):
        return not isinstance(value, bool) and value.bit_length() < 1024
    return isinstance(value, Real) and math.isfinite(value)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """A number of NumPy as one of Python, which JSON can hold; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def is_flag(value: Any) -> bool:
    """Whether a value is true or false."""
    return isinstance(value, bool)


def are_strings(value: Any) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)


def check_fields(where: Any, values: Mapping[str, Any], rules: Iterable[Rule]) -> None:
    """Raise ValueError at the first field that is there, is not null, and breaks its rule."""
    for names, good, need in rules:
        for name in names:
            value = values.get(name)
            if value is not None and not good(value):
                raise ValueError(f"{where}: {name} is {value!r}; needed: {need}")
