"""Continuing texts: a cache of keys and values, and the choice of the next token."""

# B sequences, T new positions, S positions so far, G key-value heads, D head size, V vocabulary.

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

import numpy as np

from ..autograd import Tensor, no_grad, softmax
from ..autograd.backend import array_module
from ..autograd.device import with_memory
from ..autograd.random import make_key, raw_words
from .decode import DecodeStep, can_decode
from .llama import Transformer
from .model import LanguageModel
from .module import check_model
from .values import is_number, is_whole

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


F = TypeVar("F", bound=Callable[..., Any])
_MOST = 1e30  # logits divided or multiplied by it are still float32


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of `generate` and `stream`; ValueError names the one that is wrong."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    stop: Sequence[int | Sequence[int]] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        n, k, p = self.max_new_tokens, self.top_k, self.top_p
        t, penalty = self.temperature, self.repetition_penalty
        for name, good, need in (
            ("max_new_tokens", is_whole(n) and n >= 0, "a whole number, 0 or more"),
            ("temperature", is_number(t) and 0 <= float(t) <= _MOST, f"a number from 0 to {_MOST}"),
            ("top_k", k is None or (is_whole(k) and k >= 1), "a whole number, 1 or more"),
            ("top_p", p is None or (is_number(p) and 0 < p <= 1), "above 0 and at most 1"),
            (
                "repetition_penalty",
                is_number(penalty) and 1 / _MOST <= float(penalty) <= _MOST,
                f"a number from {1 / _MOST} to {_MOST}",
            ),
            ("stop", _is_stop(self.stop), "a list of ids and of runs of ids, none empty"),
            ("seed", is_whole(self.seed), "a whole number"),
        ):
            if not good:
                raise ValueError(f"generate: {name} is {getattr(self, name)!r}; needed: {need}")
        for name, kind in (("max_new_tokens", int), ("temperature", float), ("seed", int)):
            object.__setattr__(self, name, kind(getattr(self, name)))  # NumPy's would wrap around

    @property
    def stops(self) -> list[list[int]]:
        """What ends a sequence, each as a run of ids."""
        return [[int(i) for i in np.ravel(s)] for s in (() if self.stop is None else self.stop)]


def _is_stop(stop: Any) -> bool:
    if stop is None:
        return True
    kinds = (list, tuple, np.ndarray)
    return isinstance(stop, kinds) and all(
        is_whole(s) or (isinstance(s, kinds) and len(s) > 0 and all(map(is_whole, s))) for s in stop
    )


def _takes_options(function: F) -> F:
    """The function, with the fields of `Options` in its signature."""
    own = [p for p in signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = signature(Options).parameters.values()
    vars(function)["__signature__"] = signature(function).replace(parameters=[*own, *more])
    return function


@_takes_options
def generate(model: LanguageModel, ids: Any, **options: Any) -> Any:
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
    check_model("generate", model, LanguageModel)
    rows, single = _rows(ids, model.config.vocab_size)
    new: list[list[int]] = [[] for _ in rows]
    for step in stream(model, rows, **options):
        for row, token in zip(new, step, strict=True):
            if token is not None:
                row.append(token)
    return new[0] if single else new


@_takes_options
def stream(model: LanguageModel, ids: Any, **options: Any) -> Iterator[list[int | None]]:
    """As `generate`, step by step: the next id of each sequence, None for those that have ended."""
    check_model("generate", model, LanguageModel)
    try:
        chosen = Options(**options)
    except TypeError as error:
        raise TypeError(str(error).replace("Options.__init__()", "generate")) from None
    rows, _ = _rows(ids, model.config.vocab_size)
    limit, longest = model.config.max_position_embeddings, max(map(len, rows))
    if longest + chosen.max_new_tokens > limit:
        raise ValueError(
            f"generate: {longest} ids and {chosen.max_new_tokens} new ones need "
            f"{longest + chosen.max_new_tokens} positions, the model has {limit}"
        )
    return _steps(model, rows, chosen)


def _steps(
    model: LanguageModel, rows: list[list[int]], options: Options
) -> Iterator[list[int | None]]:
    n, pick, stops = options.max_new_tokens, _Picker(rows, options), options.stops
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

    def __init__(self, rows: list[list[int]], options: Options):
        self.rows, self.options = rows, options
        self.temperature = np.float32(options.temperature)
        self.penalty = np.float32(options.repetition_penalty)
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
        top_k, top_p = self.options.top_k, self.options.top_p
        # Differences to the largest: a tiny temperature makes them -inf, never NaN.
        logits = (logits - logits.max()) / self.temperature
        if top_k is not None and top_k < len(logits):
            kth = np.partition(logits, -top_k)[-top_k]
            above, equal = np.flatnonzero(logits > kth), np.flatnonzero(logits == kth)
            kept = np.sort(np.concatenate([above, equal[: top_k - len(above)]]))
        else:
            kept = np.arange(len(logits))
        p = softmax(logits[kept]).data.astype(np.float64)
        if top_p is not None and top_p < 1:
            order = np.argsort(-p, kind="stable")
            before = np.add.accumulate(p[order]) - p[order]
            inside = order[before < top_p]
            kept, p = kept[inside], p[inside]
        total = np.add.accumulate(p)
        key = make_key(
            "sample", self.options.seed, *self.names[b], len(self.rows[b]) + len(self.new[b])
        )
        u = int(raw_words(key, 1)[0] >> np.uint64(11)) * 2.0**-53
        return int(kept[min(np.searchsorted(total, u * total[-1], side="right"), len(p) - 1)])


def _rows(ids: Any, vocab_size: int) -> tuple[list[list[int]], bool]:
    """The sequences as lists, and whether it was one alone."""
    kinds = (list, tuple, np.ndarray)
    if not isinstance(ids, kinds):
        raise TypeError(f"generate: ids is a {type(ids).__name__}; a list of lists is needed")
    ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    single = bool(ids) and not isinstance(ids[0], kinds)
    rows = [ids] if single else ids
    for row in rows:
        if not isinstance(row, kinds):
            raise TypeError(f"generate: ids mix lists and {row!r}; a list of lists is needed")
    if not rows or not all(len(row) for row in rows):
        raise ValueError("generate: at least one sequence, and an id in each, is needed")
    for row in rows:
        for i in row:
            if not is_whole(i):
                raise TypeError(f"generate: ids are whole numbers, given {i!r}")
            if not 0 <= i < vocab_size:
                raise ValueError(
                    f"generate: id {i} is outside the vocabulary, 0 .. {vocab_size - 1}"
                )
    return [[int(i) for i in row] for row in rows], single
