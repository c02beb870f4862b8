"""Which blocks of attention there are to compute: rows of integers that the bodies read."""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

import functools
from typing import Any

import numpy as np

TILE = 64  # keys whose maximum and sum are taken together: part of the contract
FAR = 1 << 40  # further than any key


def sight(causal: bool, window: int | None) -> tuple[int, int]:
    """How many keys a query sees ahead of it, and how many back, its own included."""
    return 0 if causal else FAR, FAR if window is None else int(window)


def segment_names(segments: Any) -> bytes | None:
    """The segments as what a cache of plans can look up."""
    return None if segments is None else segments.tobytes()


ROWS, SIZE = 512, 512 * 64  # a chunk has at most so many rows, and so many elements: half of an L2

RUN = 5  # batch row, first query, queries, first key, end of the keys


def runs(B: int, T: int, S: int, names: bytes | None) -> tuple[np.ndarray, bool]:
    """The stretches of consecutive queries of one segment, (N, RUN), without the padding.

    `names` are the bytes of segments (B, S), of int64: something that a cache can look up. The
    second result says whether a segment has other segments' keys between its own.
    """
    if names is None:
        rows = np.zeros((B, RUN), np.int64)
        rows[:, 0], rows[:, 2], rows[:, 4] = np.arange(B), T, S
        return rows, False
    segments = np.frombuffer(names, np.int64).reshape(B, S)
    new = np.ones((B, S), bool)
    new[:, 1:] = segments[:, 1:] != segments[:, :-1]
    b, s = np.nonzero(new)
    end = np.append(b * S + s, B * S)[1:] - b * S
    real = segments[b, s] >= 0
    b, s, end = b[real], s[real], end[real]
    kinds = np.stack([b, segments[b, s]], axis=1)
    kinds, which = np.unique(kinds, axis=0, return_inverse=True)
    which, first, last = which.reshape(-1), np.full(len(kinds), S), np.zeros(len(kinds), np.int64)
    np.minimum.at(first, which, s)
    np.maximum.at(last, which, end)
    t = np.maximum(s - (S - T), 0)
    rows = np.stack([b, t, end - (S - T) - t, first[which], last[which]], axis=1)
    return rows[rows[:, 2] > 0], len(kinds) < len(which)


def chunk_rows(D: int) -> int:
    """How many queries are worked on together: as many tiles as stay in the cache."""
    return max(TILE, min(ROWS, SIZE // D // TILE * TILE))


@functools.lru_cache(maxsize=32)
def forward_items(
    B: int, T: int, S: int, names: bytes | None, chunk: int
) -> tuple[np.ndarray, bool]:
    """The runs cut to chunks of queries, those with the most keys first: (N, RUN); holes."""
    rows, holes = runs(B, T, S, names)
    items = [
        (b, t, min(chunk, t0 + n - t), first, end)
        for b, t0, n, first, end in rows.tolist()
        for t in range(t0, t0 + n, chunk)
    ]
    items.sort(key=lambda item: item[3] - item[1])
    return np.array(items, np.int64).reshape(-1, RUN), holes


@functools.lru_cache(maxsize=32)
def backward_squares(
    B: int, T: int, S: int, names: bytes | None, chunk: int, reach: int, window: int
) -> tuple[list[np.ndarray], bool, int, int]:
    """Squares of a chunk of queries by a chunk of keys, in waves; holes; queries and keys in them.

    dQ is summed over ascending keys, dK and dV over ascending queries. So a square comes one wave
    after the squares to its left and above it; those of one wave share no sum. A square is: batch
    row, first query, queries, first key, end of the keys; whether these keys had no square before,
    whether these queries had none, whether these queries have none after.
    """
    waves: dict[int, list[tuple]] = {}
    queries = keys = 0
    rows, holes = runs(B, T, S, names)
    done: dict[tuple, list] = {}  # by segment, which may have several runs: chunks, columns
    for b, t0, n, first, end in rows.tolist():
        before, started = done.setdefault((b, first), [0, set()])
        done[b, first][0] += -(-n // chunk)
        for at, t in enumerate(range(t0, t0 + n, chunk), before):
            m = min(chunk, t0 + n - t)
            low = max(first, t + S - T - window + 1)
            high = min(end, t + m + S - T + reach)
            if high <= low:
                continue
            queries += m
            columns = range((low - first) // chunk, (high - first - 1) // chunk + 1)
            for c in columns:
                k, stop = first + c * chunk, min(end, first + (c + 1) * chunk)
                new = c not in started
                keys += (stop - k) * new
                started.add(c)
                square = (b, t, m, k, stop, new, c == columns[0], c == columns[-1])
                waves.setdefault(at + c, []).append(square)
    return [np.array(waves[w], np.int64) for w in sorted(waves)], holes, queries, keys
