"""Settings checked one by one: the error names the setting, its value, and what is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..transformer.values import is_whole, plain


def refuse(name: str, value: Any, need: str) -> ValueError:
    """The error to raise."""
    return ValueError(f"{name} must be {need}, given {value!r}")


def whole(name: str, value: Any, least: int) -> int:
    """`value`, a whole number of at least `least`.

    >>> whole("patience", 1.5, 1)
    Traceback (most recent call last):
    ValueError: patience must be a whole number of at least 1, given 1.5
    """
    if not is_whole(value) or value < least:
        raise refuse(name, value, f"a whole number of at least {least}")
    return int(value)


def number(name: str, value: Any, need: str, good: Callable[[float], bool]) -> float:
    """`value`, a number that is `good`; NaN should not be."""
    kinds = int | float | np.integer | np.floating
    if isinstance(value, bool) or not isinstance(value, kinds) or not good(float(value)):
        raise refuse(name, value, f"a number {need}")
    return plain(value)


class Checked:
    """Checks of the fields of a frozen dataclass, which become plain numbers."""

    def _whole(self, least: int, *names: str) -> None:
        for name in names:
            object.__setattr__(self, name, whole(name, getattr(self, name), least))

    def _number(self, need: str, good: Callable[[float], bool], *names: str) -> None:
        for name in names:
            object.__setattr__(self, name, number(name, getattr(self, name), need, good))

    def _check(self, name: str, good: bool, need: str) -> None:
        if not good:
            raise refuse(name, getattr(self, name), need)

    def _flag(self, *names: str) -> None:
        for name in names:
            self._check(name, isinstance(getattr(self, name), bool), "True or False")

    def _one_of(self, name: str, *known: str) -> None:
        # A list or an array is no string: comparing it would raise, or mean something else.
        value = getattr(self, name)
        good = isinstance(value, str) and value in known
        self._check(name, good, " or ".join(map(repr, known)))
