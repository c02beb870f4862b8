"""What models are called with, checked before any kernel runs."""

# B batch, T positions, S cached and new positions.

from __future__ import annotations

from typing import Any

import numpy as np


def as_ids(what: str, ids: Any) -> np.ndarray:
    """`ids` as an array; ValueError if its rows are of several lengths."""
    try:
        return np.asarray(ids)
    except ValueError:
        raise ValueError(f"{what}: rows of one length are needed; pad the shorter ones") from None


def check_ids(ids: Any, vocab_size: int) -> np.ndarray:
    """`ids` as an integer array (B, T) of at least one token, all inside the vocabulary."""
    ids = as_ids("ids", ids)
    if ids.size == 0:
        raise ValueError(f"ids: at least one token is needed, given shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"ids: integers are needed, given {ids.dtype}")
    if ids.ndim != 2:
        raise ValueError(f"ids: (B, T) is needed, given shape {ids.shape}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        where = tuple(int(n[0]) for n in np.nonzero((ids < 0) | (ids >= vocab_size)))
        raise ValueError(f"ids: {int(ids[where])} at {where} is not in 0 .. {vocab_size - 1}")
    return ids.astype(np.int64, copy=False)


def check_positions(
    shape: tuple[int, ...], positions: Any, segments: Any, start: int, limit: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Positions (T,) or (B, T), from 0 in every segment if not given, and segments (B, S)."""
    B, T = shape
    S = start + T
    if segments is not None:
        segments = np.asarray(segments)
        if segments.dtype.kind not in "iu" or segments.shape != (B, S):
            raise ValueError(
                f"segments: integers of shape {(B, S)} are needed, "
                f"given {segments.dtype} {segments.shape}"
            )
        segments = np.ascontiguousarray(segments, dtype=np.int64)
    if positions is None:
        positions = np.arange(start, S) if segments is None else _within(segments)[:, start:]
    positions = np.asarray(positions)
    if positions.dtype.kind not in "iu" or positions.shape not in ((T,), (B, T)):
        raise ValueError(
            f"positions: integers of shape {(T,)} or {(B, T)} are needed, "
            f"given {positions.dtype} {positions.shape}"
        )
    if positions.min() < 0 or positions.max() >= limit:
        wrong = int(positions.min() if positions.min() < 0 else positions.max())
        raise ValueError(
            f"positions: {wrong} is not in 0 .. {limit - 1} (max_position_embeddings is {limit})"
        )
    return positions, segments


def _within(segments: np.ndarray) -> np.ndarray:
    """Each position's distance from the start of its segment."""
    at = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    starts = np.ones(segments.shape, bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return at - np.maximum.accumulate(np.where(starts, at, 0), axis=1)
