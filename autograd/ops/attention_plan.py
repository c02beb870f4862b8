"""Which blocks of attention there are to compute: rows of integers that the bodies read."""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

import functools
from typing import Any

import numpy as np

TILE = 64  # keys whose maximum and sum are taken together: part of the contract
FAR = 1 << 40  # further than any key
ROWS, SIZE = 512, 512 * 64  # a chunk has at most so many rows, and so many elements: half of an L2

RUN = 5  # batch row, first query, queries, first key, end of the keys


def runs(B: int, T: int, S: int, segments: Any) -> tuple[np.ndarray, bool]:
    """The stretches of consecutive queries of one segment, (N, RUN), without the padding.

    The second result says whether a segment has other segments' keys between its own.
    """
    if segments is None:
        rows = np.zeros((B, RUN), np.int64)
        rows[:, 0], rows[:, 2], rows[:, 4] = np.arange(B), T, S
        return rows, False
    start = np.ones((B, S), bool)
    start[:, 1:] = segments[:, 1:] != segments[:, :-1]
    names = np.stack([np.repeat(np.arange(B), S), segments.reshape(-1)])  # a segment of one row
    _, first, which = np.unique(names, axis=1, return_index=True, return_inverse=True)
    which, last = which.reshape(B, S), np.zeros(len(first), np.int64)
    np.maximum.at(last, which.reshape(-1), np.arange(B * S))
    holes = bool(start.sum() > len(first))

    start[:, S - T] = True
    b, s = np.nonzero(start[:, S - T :])
    s += S - T
    ends = np.append(b * S + s, B * S)[1:]
    n = np.minimum(ends, (b + 1) * S) - (b * S + s)
    name = which[b, s]
    rows = np.stack([b, s - (S - T), n, first[name] - b * S, last[name] + 1 - b * S], axis=1)
    return rows[segments[b, s] >= 0], holes


def chunk_rows(D: int) -> int:
    """How many queries are worked on together: as many tiles as stay in the cache."""
    return max(TILE, min(ROWS, SIZE // D // TILE * TILE))


@functools.lru_cache(maxsize=64)
def plain_forward(B: int, T: int, S: int, chunk: int) -> np.ndarray:
    """`forward_items` of sequences without segments."""
    return forward_items(runs(B, T, S, None)[0], chunk)


def forward_items(rows: np.ndarray, chunk: int) -> np.ndarray:
    """The runs cut to chunks of queries, those with the most keys first: (N, RUN)."""
    items = [
        (b, t, min(chunk, t0 + n - t), first, end)
        for b, t0, n, first, end in rows.tolist()
        for t in range(t0, t0 + n, chunk)
    ]
    items.sort(key=lambda item: item[3] - item[1])
    return np.array(items, np.int64).reshape(-1, RUN)


@functools.lru_cache(maxsize=64)
def plain_backward(B: int, T: int, S: int, chunk: int, reach: int, window: int) -> Any:
    """`backward_squares` of sequences without segments."""
    return backward_squares(runs(B, T, S, None)[0], chunk, S - T, reach, window)


def backward_squares(
    rows: np.ndarray, chunk: int, shift: int, reach: int, window: int
) -> tuple[list[np.ndarray], int, int]:
    """Squares of a chunk of queries by a chunk of keys, in waves; how many queries and keys.

    dQ is summed over ascending keys, dK and dV over ascending queries. So a square comes one wave
    after the squares to its left and above it; those of one wave share no sum. A square is: batch
    row, first query, queries, first key, end of the keys; whether these keys had no square before,
    whether these queries had none, whether these queries have none after.
    """
    waves: dict[int, list[tuple]] = {}
    queries = keys = 0
    done: dict[tuple, list] = {}  # by segment, which may have several runs: chunks, columns
    for b, t0, n, first, end in rows.tolist():
        before, started = done.setdefault((b, first), [0, set()])
        done[b, first][0] += -(-n // chunk)
        for at, t in enumerate(range(t0, t0 + n, chunk), before):
            m = min(chunk, t0 + n - t)
            low = max(first, t + shift - window + 1)
            high = min(end, t + m + shift + reach)
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
    return [np.array(waves[w], np.int64) for w in sorted(waves)], queries, keys
