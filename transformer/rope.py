"""The table of rotary angles of a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..autograd import rope_table


class RopeTable:
    """cos and sin of position * frequency, made on demand for as many positions as were met."""

    def __init__(self, D: int, theta: float, scaling: dict[str, Any] | None = None):
        self.args = D, theta, scaling
        self.cos = self.sin = np.empty((0, D // 2), np.float32)

    def at(self, positions: np.ndarray) -> tuple[Any, Any]:
        """(cos, sin) at `positions` (...): two float32 arrays (..., D / 2)."""
        need = int(positions.max()) + 1
        if need > len(self.cos):
            known = np.arange(max(need, 2 * len(self.cos), 256))
            self.cos, self.sin = rope_table(known, *self.args)
        return self.cos[positions], self.sin[positions]
