"""Rows of T tokens and the order they come in: batch i is a function of (seed, i) alone.

A row is what `LMBatch` takes, each part (T). Nothing is drawn from a generator with a state, so a
run can be entered at any step.
"""

from __future__ import annotations

import bisect
import functools

import numpy as np

from ..autograd.random import make_key, raw_words
from .batch import IGNORED, LMBatch

PADDING = -1  # the segment of what is no document

Row = dict[str, np.ndarray]


def permutation(purpose: str, seed: int, n: int, *more: int) -> np.ndarray:
    """0 .. n - 1 in the order of n random words."""
    return np.argsort(raw_words(make_key(purpose, seed, *more), n), kind="stable")


class Rows:
    """Some rows, in a new order every epoch."""

    T: int
    seed: int = 0

    def __len__(self) -> int:
        raise NotImplementedError

    def row(self, n: int) -> Row:
        """Row `n`."""
        raise NotImplementedError

    def batch(self, i: int, B: int) -> LMBatch:
        """Batch `i` of `B` rows; row number i B + b belongs to epoch (i B + b) // rows."""
        epochs, places = np.divmod(np.arange(i * B, (i + 1) * B), len(self))
        return self.stack([int(self._order(e)[p]) for e, p in zip(epochs, places, strict=True)])

    def in_order(self, B: int, most: int | None = None) -> list[list[int]]:
        """Row numbers for an evaluation: `most` of them, spread evenly, `B` at a time."""
        n = len(self) if most is None else min(most, len(self))
        chosen = [k * len(self) // n for k in range(n)]
        return [chosen[k : k + B] for k in range(0, n, B)]

    def stack(self, numbers: list[int]) -> LMBatch:
        """Those rows as one batch."""
        rows = [self.row(n) for n in numbers]
        return LMBatch(**{part: np.stack([row[part] for row in rows]) for part in rows[0]})

    @functools.lru_cache(maxsize=2)  # noqa: B019 - rows live as long as the run
    def _order(self, epoch: int) -> np.ndarray:
        return permutation("order", self.seed, len(self), int(epoch))


class Windows(Rows):
    """A stream cut into windows of T + 1 ids that overlap by one, so that every id is predicted.

    A last window that is not full is left out, or with `whole` filled up with what does not count.
    """

    def __init__(self, stream: np.ndarray, T: int, seed: int = 0, *, whole: bool = False):
        self.stream, self.T, self.seed, self.whole = stream, T, seed, whole

    def __len__(self) -> int:
        n = len(self.stream) - 1
        return -(-n // self.T) if self.whole else n // self.T

    def row(self, n: int) -> Row:
        T = self.T
        window = self.stream[n * T : n * T + T + 1].astype(np.int64)
        missing = T + 1 - len(window)
        return {
            "inputs": np.pad(window[:-1], (0, missing)),
            "targets": np.pad(window[1:], (0, missing), constant_values=IGNORED),
        }


class Packed(Rows):
    """Documents put together into rows, each its own segment.

    A segment's positions count from 0, it does not see the others, and no target reaches over a
    boundary, so a document has the loss it has alone. Longest first, each into the fullest row
    that has room (best fit, decreasing). With `together` off each has a row to itself.
    """

    def __init__(
        self,
        documents: list[tuple[list[int], list[bool]]],
        T: int,
        seed: int = 0,
        *,
        together: bool = True,
    ):
        self.documents, self.T, self.seed = documents, T, seed
        self.rows: list[list[int]] = []
        shuffled = permutation("pack", seed, len(documents))
        room: list[tuple[int, int]] = []  # (free places, row), sorted
        for d in sorted(shuffled.tolist(), key=lambda d: -len(documents[d][0])):
            size = len(documents[d][0]) - 1  # the last id is only a target
            k = bisect.bisect_left(room, (size, -1))
            if together and k < len(room):
                free, row = room.pop(k)
                self.rows[row].append(d)
            else:
                free, row = T, len(self.rows)
                self.rows.append([d])
            bisect.insort(room, (free - size, row))

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, n: int) -> Row:
        T = self.T
        inputs, targets = np.zeros(T, np.int64), np.full(T, IGNORED, np.int64)
        segments = np.full(T, PADDING, np.int64)
        start = 0
        for segment, d in enumerate(self.rows[n]):
            ids, trained = (np.array(x) for x in self.documents[d])
            part = slice(start, start + len(ids) - 1)
            inputs[part] = ids[:-1]
            targets[part] = np.where(trained[1:], ids[1:], IGNORED)
            segments[part] = segment
            start = part.stop
        return {"inputs": inputs, "targets": targets, "segments": segments}
