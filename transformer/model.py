"""What the two decoders share: from ids to logits or a loss, through a stack of blocks."""

# B batch, T positions, C hidden size, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from ..autograd import Tensor, checkpoint, cross_entropy, linear_cross_entropy
from .dropout import call_scope
from .inputs import as_ids
from .layers import Linear
from .module import Module


class LanguageModel(Module):
    """A decoder with a head. A subclass sets `lm_head` and defines `_build` and `hidden`.

    `checkpointing` may be set to a function of a layer's number: the activations from one layer
    where it is true up to the next such layer are not kept but computed again in the backward
    pass.
    """

    config: Any
    lm_head: Module
    checkpointing: Callable[[int], bool] | None = None
    ignore_index = -100
    source: dict[str, Any] | None = None  # the config.json that the model was loaded with

    def _build(self, config: Any) -> None:
        raise NotImplementedError

    @classmethod
    def empty(cls, config: Any) -> Self:
        """A model whose matrices hold no values yet, for a loader to fill."""
        model = cls.__new__(cls)
        model._build(config)
        return model

    def named_parameters(self, hf: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(path, parameter) in the order of the optimizer's state; `hf`: the checkpoint's names."""
        own = super().named_parameters()
        return ((self.hf_name(name), p) for name, p in own) if hf else own

    @staticmethod
    def hf_name(path: str) -> str:
        """What a checkpoint of transformers calls the module or parameter at `path`."""
        return path

    def hidden(
        self, ids: Any, positions: Any = None, segments: Any = None, cache: Any = None
    ) -> Tensor:
        """What the head reads, after the last norm.   ids (B, T) -> (B, T, C)

        Arguments and errors as in `__call__`. With a `cache` the ids continue what is in it, and
        `segments` covers the cached positions too.
        """
        raise NotImplementedError

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(layers, key-value heads, head size): what a cache of keys and values must hold."""
        raise NotImplementedError

    def _through(self, blocks: Sequence[Module], x: Tensor, *context: Any) -> Tensor:
        """`x` through the blocks, each called with `context` too."""
        if self.checkpointing is None:
            return _run(blocks, x, context)
        starts = [n for n in range(len(blocks)) if n == 0 or self.checkpointing(n)]
        for a, b in zip(starts, [*starts[1:], len(blocks)], strict=True):
            x = checkpoint(lambda x, part=blocks[a:b]: _run(part, x, context), x)
        return x

    def __call__(
        self, ids: Any, positions: Any = None, segments: Any = None, cache: Any = None
    ) -> Tensor:
        """Logits of the token after each position.   ids (B, T) or (T,) -> (B, T, V) or (T, V)

        `segments` (B, T) separates texts that share a row: a query sees its own segment only, and
        a negative segment is padding. `positions` (T,) or (B, T) count from 0 in each segment if
        not given. Raises ValueError for no ids, an id outside the vocabulary, or a position
        beyond what the model has.
        """
        ids = as_ids("ids", ids)
        with call_scope():
            if ids.ndim != 1:
                return self.lm_head(self.hidden(ids, positions, segments, cache))
            segments = None if segments is None else np.asarray(segments)[None]
            return self.lm_head(self.hidden(ids[None], positions, segments, cache))[0]

    def loss(
        self,
        ids: Any,
        targets: Any,
        positions: Any = None,
        segments: Any = None,
        *,
        ignore_index: int | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Cross-entropy of `targets`, already shifted, over those that are not `ignore_index`.

        ids (B, T), targets (B, T) -> ()      0 if none counts
        """
        ids, targets = as_ids("ids", ids), as_ids("targets", targets)
        if targets.shape != ids.shape:
            raise ValueError(
                f"loss: ids {ids.shape} need targets of that shape, given {targets.shape}"
            )
        ignored = self.ignore_index if ignore_index is None else ignore_index
        options = {"ignore_index": ignored, "reduction": reduction}
        with call_scope():
            x = self.hidden(ids, positions, segments)
            if type(self.lm_head) is Linear:
                return linear_cross_entropy(x, self.lm_head.weight, targets, **options)
            return cross_entropy(self.lm_head(x), targets, **options)


def _run(blocks: Sequence[Any], x: Tensor, context: tuple[Any, ...]) -> Tensor:
    for block in blocks:
        x = block(x, *context)
    return x
