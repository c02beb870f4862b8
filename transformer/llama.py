"""`Transformer`: the Llama family (Llama, Mistral, Qwen 2, Qwen 3) in one set of blocks.

Parameters carry Hugging Face's names, because modules and attributes do.
"""

# B batch, T positions, H query heads, G key-value heads, D head size, C hidden size, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..autograd import (
    Tensor,
    attention,
    checkpoint,
    cross_entropy,
    linear_cross_entropy,
    rope,
    swiglu,
)
from .config import TransformerConfig
from .dropout import call_scope
from .init import init_weights
from .inputs import check_ids, check_positions
from .layers import Embedding, Linear, RMSNorm
from .module import Module
from .rope import RopeTable


class Attention(Module):
    """Causal self-attention; each key-value head serves H / G consecutive query heads."""

    def __init__(self, config: TransformerConfig, layer: int):
        C, q_dim, kv_dim = config.hidden_size, config.q_dim, config.kv_dim
        self.q_proj = Linear(C, q_dim, config.attention_bias)
        self.k_proj = Linear(C, kv_dim, config.attention_bias)
        self.v_proj = Linear(C, kv_dim, config.attention_bias)
        self.o_proj = Linear(q_dim, C, config.o_bias)
        self.q_norm = RMSNorm(config.head_size, config.qk_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.qk_norm_eps) if config.qk_norm else None
        self.layer, self.window = layer, config.window(layer)
        self.heads = (config.num_attention_heads, config.kv_heads, config.head_size)

    def _walk(self) -> Iterator[tuple[str, Tensor]]:
        # The order that optimizer state goes by: weights, then biases, then the norms of q and k.
        return iter(sorted(super()._walk(), key=_rank))

    def __call__(self, x: Tensor, turn: Any, segments: Any, cache: Any) -> Tensor:
        B, T, _ = x.shape
        H, G, D = self.heads
        q = self.q_proj(x).reshape(B, T, H, D)
        k = self.k_proj(x).reshape(B, T, G, D)
        v = self.v_proj(x).reshape(B, T, G, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rope(q, *turn), rope(k, *turn)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y = attention(q, k, v, segments=segments, window=self.window)
        return self.o_proj(y.reshape(B, T, H * D))


class SwiGLU(Module):
    """down(silu(gate(x)) * up(x)).   Shazeer 2020, arXiv:2002.05202"""

    def __init__(self, config: TransformerConfig):
        C, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(C, inner, config.mlp_bias)
        self.up_proj = Linear(C, inner, config.mlp_bias)
        self.down_proj = Linear(inner, C, config.mlp_bias)

    def _walk(self) -> Iterator[tuple[str, Tensor]]:
        return iter(sorted(super()._walk(), key=_rank))

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def _rank(item: tuple[str, Tensor]) -> int:
    name = item[0]
    return 2 if name.startswith(("q_norm.", "k_norm.")) else 1 if name.endswith(".bias") else 0


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TransformerConfig, layer: int):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.mlp = SwiGLU(config)

    def __call__(self, x: Tensor, turn: Any, segments: Any, cache: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, segments, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(Module):
    """Everything but the head."""

    def __init__(self, config: TransformerConfig):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = [Block(config, n) for n in range(config.num_hidden_layers)]


class Transformer(Module):
    """A decoder of the Llama family.

    Weights start from N(0, 0.02), each a function of `seed` and its own name. `checkpointing`
    may be set to a function of a layer's number: the activations from one layer where it is true
    up to the next such layer are not kept but computed again in the backward pass.
    """

    def __init__(self, config: TransformerConfig, seed: int | None = None):
        self._build(config)
        init_weights(self, seed, lambda name: 0.02)

    @classmethod
    def empty(cls, config: TransformerConfig) -> Transformer:
        """A model whose matrices hold no values yet, for a loader to fill."""
        model = cls.__new__(cls)
        model._build(config)
        return model

    def _build(self, config: TransformerConfig) -> None:
        check_supported(config)
        self.config = config
        self.checkpointing: Callable[[int], bool] | None = None
        self.model = Trunk(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._rope = RopeTable(config)

    def named_parameters(self, hf: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(path, parameter) in the order of the optimizer's state; `hf` changes nothing here."""
        del hf
        return super().named_parameters()

    @property
    def head_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits, (V, C)."""
        if type(self.lm_head) is not Linear:
            raise TypeError(
                f"head_weight: the head is a {type(self.lm_head).__name__}; call lm_head"
            )
        return self.lm_head.weight

    def hidden(
        self, ids: Any, positions: Any = None, segments: Any = None, cache: Any = None
    ) -> Tensor:
        """What the head reads, after the last norm.   ids (B, T) -> (B, T, C)

        ids, positions, segments and errors as in `__call__`. With a `cache` the ids continue what
        is in it, and `segments` covers the cached positions too.
        """
        ids = check_ids(ids, self.config.vocab_size)
        start = 0 if cache is None else cache.length
        positions, segments = check_positions(
            ids.shape, positions, segments, start, self.config.max_position_embeddings
        )
        turn = self._rope.at(positions) if self.config.rope_theta else None
        x = self.model.embed_tokens(ids)
        with call_scope():
            for blocks in self._stretches():
                run = _stretch(blocks, turn, segments, cache)
                x = run(x) if self.checkpointing is None else checkpoint(run, x)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.model.norm(x)

    def _stretches(self) -> list[list[Block]]:
        layers = self.model.layers
        if self.checkpointing is None:
            return [layers]
        starts = [n for n in range(len(layers)) if n == 0 or self.checkpointing(n)]
        return [layers[a:b] for a, b in zip(starts, [*starts[1:], len(layers)], strict=True)]

    def __call__(
        self, ids: Any, positions: Any = None, segments: Any = None, cache: Any = None
    ) -> Tensor:
        """Logits of the token after each position.   ids (B, T) or (T,) -> (B, T, V) or (T, V)

        `segments` (B, T) separates texts that share a row: a query sees its own segment only, and
        a negative segment is padding. `positions` (T,) or (B, T) count from 0 in each segment if
        not given. Raises ValueError for an empty row, an id outside the vocabulary, or a position
        outside `max_position_embeddings`.
        """
        flat = np.ndim(ids) == 1
        if flat:
            ids, segments = (
                np.asarray(ids)[None],
                None if segments is None else np.asarray(segments)[None],
            )
        logits = self.lm_head(self.hidden(ids, positions, segments, cache))
        return logits.reshape(logits.shape[1:]) if flat else logits

    def loss(
        self,
        ids: Any,
        targets: Any,
        positions: Any = None,
        segments: Any = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """Cross-entropy of `targets`, already shifted, over those that count.

        ids (B, T), targets (B, T) -> ()
        """
        x = self.hidden(ids, positions, segments)
        targets = np.asarray(targets)
        if targets.shape != x.shape[:2]:
            raise ValueError(
                f"loss: ids {x.shape[:2]} need targets of that shape, given {targets.shape}"
            )
        options = {"ignore_index": ignore_index, "reduction": reduction}
        if type(self.lm_head) is Linear:
            return linear_cross_entropy(x, self.lm_head.weight, targets, **options)
        return cross_entropy(self.lm_head(x), targets, **options)


def _stretch(
    blocks: list[Block], turn: Any, segments: Any, cache: Any
) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, turn, segments, cache)
        return x

    return run


def check_supported(config: TransformerConfig) -> None:
    """Raise ValueError, by name, for a config that this architecture cannot run."""
    if config.architecture == "encoder":
        raise ValueError(
            f"Transformer: {config.hf_architecture_name} is an encoder (codebert); "
            "a decoder of the Llama family is needed"
        )
    if config.hf_model_type == "qwen3_5":
        raise ValueError(
            "Transformer: qwen3_5_9b mixes attention with linear recurrences, which are not "
            "implemented; a decoder of the Llama family is needed"
        )
