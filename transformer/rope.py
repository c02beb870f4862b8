"""The table of rotary angles of a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class RopeTable:
    """cos and sin of position * frequency, made on demand for as many positions as were met."""

    def __init__(self, D: int, theta: float, scaling: dict[str, Any] | None = None):
        self.args = D, theta, scaling
        self.cos = self.sin = np.empty((0, D // 2), np.float32)

    def at(self, positions: np.ndarray) -> tuple[Any, Any]:
        """(cos, sin) at `positions` (...): two float32 arrays (..., D / 2)."""
        need = int(positions.max()) + 1
        if need > len(self.cos):
            self.cos, self.sin = rope_table(max(need, 2 * len(self.cos), 256), *self.args)
        return self.cos[positions], self.sin[positions]


def rope_table(
    n: int, D: int, theta: float, scaling: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """cos and sin (n, D / 2) of position * theta**(-2 i / D), scaled as Hugging Face does."""
    freq = theta ** (-np.arange(0, D, 2) / D)
    kind = scaling["rope_type"] if scaling else "default"
    if scaling and kind == "linear":
        freq = freq / scaling["factor"]
    elif scaling and kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        freq = (1 - smooth) * freq / scaling["factor"] + smooth * freq
    angle = np.arange(n)[:, None] * freq
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
