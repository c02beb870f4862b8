"""Initial weights, each a function of (seed, the parameter's full name) and of nothing else."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

from ..autograd.random import make_key, normal
from .module import Module
from .values import is_whole

DEFAULT_SEED = 42
_seed: contextvars.ContextVar[int] = contextvars.ContextVar("init_seed", default=DEFAULT_SEED)


@contextlib.contextmanager
def lock_init_seed(seed: int) -> Iterator[None]:
    """Models made within this block without a seed of their own start from `seed`.

    The seed holds for this thread (or task) alone: threads that make models at the same time with
    different seeds do not see each other's.

    >>> with lock_init_seed(7):
    ...     model = Transformer(TransformerConfig.tiny())  # doctest: +SKIP
    """
    token = _seed.set(chosen_seed("lock_init_seed", seed))
    try:
        yield
    finally:
        _seed.reset(token)


def chosen_seed(what: str, seed: int | None) -> int:
    """`seed`, or if it is None what `lock_init_seed` holds here, 42 outside of it.

    TypeError, naming `what`, if it is no integer.
    """
    if seed is None:
        return _seed.get()
    if not is_whole(seed):
        raise TypeError(f"{what}: the seed must be an integer, given {seed!r}")
    return int(seed)


def init_weights(model: Module, seed: int | None, std: Callable[[str], float]) -> None:
    """Draw every matrix from N(0, std(name)); norms and biases keep their ones and zeros."""
    seed = chosen_seed(type(model).__name__, seed)
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            p.data[...] = normal(make_key("init", seed, name), p.shape, std(name))
