"""Continuing texts: a cache of keys and values, and the choice of the next token."""

# B sequences, T new positions, S positions so far, G key-value heads, D head size, V vocabulary.

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ..autograd import Tensor, no_grad, softmax
from ..autograd.backend import array_module
from ..autograd.device import with_memory
from ..autograd.random import make_key, raw_words
from .decode import DecodeStep, can_decode
from .llama import Transformer
from .model import LanguageModel

R = TypeVar("R")


class KVCache:
    """The keys and values of all layers, for at most `capacity` positions of B sequences."""

    def __init__(self, model: LanguageModel, B: int, capacity: int):
        layers, G, D = model.cache_shape
        self.length = 0
        xp = array_module(model.parameters()[0].data)
        self.kv = [xp.empty((2, B, capacity, G, D), np.float32) for _ in range(layers)]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, the new ones last.   (B, T, G, D) -> (B, S, G, D)"""
        start, stop = self.length, self.length + k.shape[1]
        keys, values = self.kv[layer]
        keys[:, start:stop], values[:, start:stop] = k.data, v.data
        return Tensor(keys[:, :stop]), Tensor(values[:, :stop])


def generate(
    model: LanguageModel,
    ids: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[int | Sequence[int]] | None = None,
    seed: int = 0,
) -> Any:
    """The ids that follow each sequence of `ids`; a list of lists (or, for one list, a list).

    Sequences may differ in length; each gets what it would get alone. `temperature` 0 takes the
    likeliest token; otherwise one is drawn from softmax(logits / temperature), cut to the `top_k`
    likeliest and to the fewest that hold `top_p` of the probability (Holtzman et al. 2020,
    arXiv:1904.09751). `repetition_penalty` divides positive and multiplies negative logits of the
    ids already there (Keskar et al. 2019, arXiv:1909.05858). A sequence ends with the first id, or
    run of ids, of `stop` that it produces; that is kept. What is drawn depends on `seed`, the
    sequence and the position alone.

    Raises ValueError for an option out of its range, a sequence without ids, an id outside the
    vocabulary, or more positions than the model has.
    """
    rows, single = _rows(ids)
    new: list[list[int]] = [[] for _ in rows]
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    options |= {"repetition_penalty": repetition_penalty, "stop": stop, "seed": seed}
    for step in stream(model, rows, max_new_tokens=max_new_tokens, **options):
        for row, token in zip(new, step, strict=True):
            if token is not None:
                row.append(token)
    return new[0] if single else new


def stream(
    model: LanguageModel,
    ids: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[int | Sequence[int]] | None = None,
    seed: int = 0,
) -> Iterator[list[int | None]]:
    """As `generate`, step by step: the next id of each sequence, None for those that have ended."""
    rows, _ = _rows(ids)
    _check_options(max_new_tokens, temperature, top_k, top_p, repetition_penalty)
    stops = [[s] if isinstance(s, (int, np.integer)) else list(s) for s in stop or ()]
    if not all(stops):
        raise ValueError("generate: an entry of stop is empty; an id or a run of ids is needed")
    limit, longest = model.config.max_position_embeddings, max(map(len, rows))
    if longest + max_new_tokens > limit:
        raise ValueError(
            f"generate: {longest} ids and {max_new_tokens} new ones need "
            f"{longest + max_new_tokens} positions, the model has {limit}"
        )
    pick = _Picker(rows, temperature, top_k, top_p, repetition_penalty, seed)
    return _steps(model, rows, max_new_tokens, pick, stops)


def _steps(
    model: LanguageModel, rows: list[list[int]], n: int, pick: _Picker, stops: list[list[int]]
) -> Iterator[list[int | None]]:
    B, T = len(rows), max(map(len, rows))
    cache = _within_memory(lambda: KVCache(model, B, T + n), B, T + n)
    # Shorter sequences start later: what is before them is padding, a segment of its own.
    starts = np.array([T - len(row) for row in rows])
    padded = bool(starts.any())
    where = np.arange(T + n)
    segments = np.where(where >= starts[:, None], 0, -1) if padded else None
    positions = np.maximum(where - starts[:, None], 0) if padded else None
    ids = np.array([[0] * int(p) + row for p, row in zip(starts, rows, strict=True)], np.int64)
    ended = [False] * B
    training = model.training
    model.eval()
    try:
        step: Any = None
        for count in range(n):
            if count == 1 and isinstance(model, Transformer) and can_decode(model, B):
                step = DecodeStep(model, cache, starts)
            if step is None:
                logits = _last_logits(model, ids, positions, segments, cache)
            else:
                logits = step(ids[:, 0])
            tokens = [0 if end else pick(b, logits[b]) for b, end in enumerate(ended)]
            yield [None if end else t for t, end in zip(tokens, ended, strict=True)]
            for b, new in enumerate(pick.new):
                ended[b] = ended[b] or any(new[-len(s) :] == s for s in stops)
            if all(ended):
                return
            ids = np.array(tokens, np.int64)[:, None]
    finally:
        model.train(training)


def _last_logits(
    model: LanguageModel, ids: np.ndarray, positions: Any, segments: Any, cache: KVCache
) -> np.ndarray:
    """Logits of the token after the last of `ids`.   ids (B, T) -> (B, V)"""
    start, stop = cache.length, cache.length + ids.shape[1]
    if segments is not None:
        segments, positions = segments[:, :stop], positions[:, start:stop]

    def run() -> np.ndarray:
        cache.length = start
        with no_grad():
            x = model.hidden(ids, positions, segments, cache)
            return model.lm_head(x[:, -1]).numpy()

    return _within_memory(run, len(ids), stop)


def _within_memory(run: Callable[[], R], B: int, S: int) -> R:
    return with_memory(run, f"generate: {B} texts of {S} tokens", "give fewer or shorter ones")


class _Picker:
    """Chooses the next id of each sequence and remembers it."""

    def __init__(
        self,
        rows: list[list[int]],
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        penalty: float,
        seed: int,
    ):
        self.rows, self.seed = rows, seed
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.penalty = np.float32(penalty)
        self.new: list[list[int]] = [[] for _ in rows]
        # A sequence is known by its ids, and by how many equal ones are before it, so that it
        # draws the same alone and in a batch.
        self.names = [
            (hashlib.sha256(json.dumps(row).encode()).hexdigest(), rows[:b].count(row))
            for b, row in enumerate(rows)
        ]

    def __call__(self, b: int, logits: np.ndarray) -> int:
        if self.penalty != 1:
            logits = logits.copy()
            seen = np.unique(self.rows[b] + self.new[b])
            at = logits[seen]
            logits[seen] = np.where(at > 0, at / self.penalty, at * self.penalty)
        token = int(logits.argmax()) if self.temperature == 0 else self._draw(b, logits)
        self.new[b].append(token)
        return token

    def _draw(self, b: int, logits: np.ndarray) -> int:
        """Softmax by the engine's own exp, sums in one order: the same draw on every machine."""
        # Differences to the largest: a tiny temperature makes them -inf, never NaN.
        logits = (logits - logits.max()) / np.float32(self.temperature)
        if self.top_k is not None and self.top_k < len(logits):
            kth = np.partition(logits, -self.top_k)[-self.top_k]
            above, equal = np.flatnonzero(logits > kth), np.flatnonzero(logits == kth)
            kept = np.sort(np.concatenate([above, equal[: self.top_k - len(above)]]))
        else:
            kept = np.arange(len(logits))
        p = softmax(logits[kept]).data.astype(np.float64)
        if self.top_p is not None and self.top_p < 1:
            order = np.argsort(-p, kind="stable")
            before = np.add.accumulate(p[order]) - p[order]
            inside = order[before < self.top_p]
            kept, p = kept[inside], p[inside]
        total = np.add.accumulate(p)
        key = make_key("sample", self.seed, *self.names[b], len(self.rows[b]) + len(self.new[b]))
        u = int(raw_words(key, 1)[0] >> np.uint64(11)) * 2.0**-53
        return int(kept[min(np.searchsorted(total, u * total[-1], side="right"), len(p) - 1)])


def _rows(ids: Any) -> tuple[list[list[int]], bool]:
    """The sequences as lists, and whether it was one alone."""
    ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    single = bool(ids) and not isinstance(ids[0], (list, tuple, np.ndarray))
    rows = [ids] if single else ids
    if not rows or not all(len(row) for row in rows):
        raise ValueError("generate: at least one sequence, and an id in each, is needed")
    for row in rows:
        if not all(isinstance(i, (int, np.integer)) for i in row):
            raise TypeError(f"generate: ids are integers, given {row!r}")
    return [[int(i) for i in row] for row in rows], single


def _check_options(
    n: int, temperature: float, top_k: int | None, top_p: float | None, penalty: float
) -> None:
    for name, value, good, need in (
        ("max_new_tokens", n, n >= 0, "0 or more"),
        ("temperature", temperature, temperature >= 0, "0 or more"),
        ("top_k", top_k, top_k is None or top_k >= 1, "1 or more"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
        ("repetition_penalty", penalty, penalty > 0, "above 0"),
    ):
        if not good:
            raise ValueError(f"generate: {name} is {value}; needed: {need}")
