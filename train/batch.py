"""`LMBatch`: token ids and the tokens that should follow them."""

# B sequences, T positions.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .checks import whole

IGNORED = -100  # a target that does not count


def _integers(name: str, value: Any, ndim: int | None = None) -> np.ndarray:
    """`value` as an array of integers."""
    try:
        a = np.asarray(value)
    except ValueError:
        raise ValueError(
            f"LMBatch: {name} must be rows of one length; LMBatch.from_sequences pads rows that "
            "differ"
        ) from None
    if not a.size and value is not None:  # an empty list has no type of its own
        a = a.astype(np.int64)
    if a.dtype.kind not in "iu":
        raise TypeError(f"LMBatch: {name} must be integers, given {a.dtype} {_short(value)}")
    if ndim is not None and a.ndim != ndim:
        raise ValueError(f"LMBatch: {name} must be a list of integers, given {_short(value)}")
    return a


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else f"{text[:57]}..."


@dataclass
class LMBatch:
    """Integer `inputs` and `targets` (B, T), already shifted: target t is what follows input t.

    What counts is decided by length, never by value: row b counts up to `lengths[b]`, and a
    target of -100 does not count. `positions` and `segments` (B, T) go to the model as they are.
    """

    inputs: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray | None = None
    positions: np.ndarray | None = None
    segments: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("inputs", "targets", "lengths", "positions", "segments"):
            value = getattr(self, name)
            if value is not None or name in ("inputs", "targets"):
                setattr(self, name, _integers(name, value))
        if self.inputs.ndim != 2:
            raise ValueError(f"LMBatch: inputs must be (B, T), given {self.inputs.shape}")
        for name in ("targets", "positions", "segments"):
            value = getattr(self, name)
            if value is not None and value.shape != self.inputs.shape:
                raise ValueError(
                    f"LMBatch: {name} must have the shape of inputs, {self.inputs.shape}, "
                    f"given {value.shape}"
                )
        if self.lengths is not None:
            B, T = self.inputs.shape
            if self.lengths.shape != (B,) or ((self.lengths < 0) | (self.lengths > T)).any():
                raise ValueError(
                    f"LMBatch: lengths must be {B} numbers between 0 and {T}, given "
                    f"{self.lengths.tolist()}"
                )

    @classmethod
    def from_sequences(cls, seqs: Sequence[Sequence[int]], pad_id: int, eos_id: int) -> LMBatch:
        """A batch of token sequences.

        If all are of one length, a sequence t gives inputs t[:-1] and targets t[1:]. If not, the
        whole sequence is input, its targets end with `eos_id`, and rows are padded to the longest.

        >>> batch = LMBatch.from_sequences([[5, 6, 7], [8]], pad_id=0, eos_id=2)
        >>> batch.counted_targets.tolist()
        [[6, 7, 2], [2, -100, -100]]
        """
        whole("LMBatch: pad_id", pad_id, 0)
        whole("LMBatch: eos_id", eos_id, 0)
        rows = [_integers("a sequence's tokens", seq, 1) for seq in seqs]
        lengths = np.array([len(row) for row in rows], np.int64)
        if not rows:
            return cls(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.int64))
        if lengths.min() == lengths.max():
            if lengths[0] < 2:
                raise ValueError(
                    f"LMBatch: sequences of {lengths[0]} tokens have nothing to predict; "
                    "two are needed"
                )
            tokens = np.stack(rows)
            return cls(tokens[:, :-1], tokens[:, 1:])
        inputs = np.full((len(rows), lengths.max()), pad_id, np.int64)
        targets = inputs.copy()
        for b, row in enumerate(rows):
            n = len(row)
            inputs[b, :n] = row
            targets[b, :n] = [*row[1:], eos_id][:n]
        return cls(inputs, targets, lengths)

    @classmethod
    def single(cls, input: Sequence[int], target: Sequence[int]) -> LMBatch:
        """A batch of one row."""
        return cls(np.array([list(input)]), np.array([list(target)]))

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        return self.inputs.shape[0]

    @property
    def seq_len(self) -> int:
        """T, the number of positions of a row."""
        return self.inputs.shape[1]

    @property
    def counted_targets(self) -> np.ndarray:
        """The targets with -100 wherever none counts."""
        if self.lengths is None:
            return self.targets
        beyond = np.arange(self.seq_len) >= self.lengths[:, None]
        return np.where(beyond, IGNORED, self.targets)

    @property
    def num_tokens(self) -> int:
        """How many targets count."""
        return int((self.counted_targets != IGNORED).sum())

    def targets_for(self, model: Any) -> tuple[np.ndarray, int]:
        """The targets with the model's own `ignore_index` where none counts, and how many do."""
        targets = self.counted_targets
        targets = np.where(targets == IGNORED, model.ignore_index, targets)
        return targets, int((targets != model.ignore_index).sum())

    def get_input(self, i: int) -> np.ndarray | None:
        """Row i of the inputs; None if there is no such row."""
        return self.inputs[i] if 0 <= i < self.batch_size else None

    def get_target(self, i: int) -> np.ndarray | None:
        """Row i of the targets; None if there is no such row."""
        return self.targets[i] if 0 <= i < self.batch_size else None

    def rows(self, part: Any) -> LMBatch:
        """The rows `part` (a slice or indices) as a batch."""

        def pick(a: np.ndarray | None) -> Any:
            return None if a is None else a[part]

        return LMBatch(*map(pick, vars(self).values()))
