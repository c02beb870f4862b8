"""Hypothesis strategies for arrays: shapes, broadcast partners, layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st


@st.composite
def shapes(
    draw: Any, min_dims: int = 0, max_dims: int = 3, min_side: int = 0, max_side: int = 5
) -> Any:
    """Shapes, zero sizes and () included."""
    return tuple(
        draw(st.lists(st.integers(min_side, max_side), min_size=min_dims, max_size=max_dims))
    )


@st.composite
def broadcastable(draw: Any, shape: tuple[int, ...]) -> Any:
    """Shapes that broadcast to `shape`: axes dropped on the left or set to 1."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.booleans()) else s for s in kept)


LAYOUTS = ("contiguous", "transposed", "every second", "reversed", "repeated")


@st.composite
def arrays(
    draw: Any, shape: tuple[int, ...], low: float = -2.0, high: float = 2.0, dtype: Any = np.float64
) -> Any:
    """Arrays of numbers in [low, high], in one of five memory layouts.

    Values come from a drawn seed; small cases shrink by shape, not by value.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def fresh(s: tuple[int, ...]) -> np.ndarray:
        return rng.uniform(low, high, s).astype(dtype)

    layout = draw(st.sampled_from(LAYOUTS))
    if not shape or layout == "contiguous":
        return fresh(shape)
    if layout == "transposed":
        return fresh(shape[::-1]).T
    if layout == "every second":
        return fresh((*shape[:-1], 2 * shape[-1]))[..., ::2]
    if layout == "reversed":
        return fresh(shape)[::-1]
    return np.broadcast_to(fresh((1, *shape[1:])), shape)
