"""Which dropout mask is drawn: a function of (seed, step, micro-batch, site), never of history.

A training step runs inside `dropout_scope(seed, step, micro)`, and every place that drops names
its site. So a re-run of a checkpointed stretch, a resumed run and a run on other threads draw the
masks that the first run drew.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator

from ..autograd import Tensor, ops
from ..autograd.random import make_key

_scope: contextvars.ContextVar[tuple[int, int, int] | None] = contextvars.ContextVar(
    "dropout_scope", default=None
)
_calls = itertools.count()


@contextlib.contextmanager
def dropout_scope(seed: int, step: int, micro: int = 0) -> Iterator[None]:
    """Within this block masks are those of (seed, step, micro-batch)."""
    token = _scope.set((seed, step, micro))
    try:
        yield
    finally:
        _scope.reset(token)


@contextlib.contextmanager
def call_scope() -> Iterator[None]:
    """The scope in force; where there is none, a fresh one, so that each call draws anew."""
    if _scope.get() is not None:
        yield
        return
    with dropout_scope(0, next(_calls)):
        yield


def site_key(site: str) -> bytes:
    """The key of the masks drawn at `site` in the scope in force."""
    scope = _scope.get()
    if scope is None:
        raise RuntimeError(
            f"dropout at {site!r}: call the model, or its parts within `dropout_scope(seed, step)`"
        )
    seed, step, micro = scope
    return make_key("dropout", seed, step, micro, site)


def dropped(x: Tensor, p: float, site: str) -> Tensor:
    """x / (1 - p) where the mask of `site` keeps it, else 0; x itself if p is 0.

    x (...) -> (...)
    """
    return ops.dropout(x, p=p, key=site_key(site)) if p else x
