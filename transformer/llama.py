"""`Transformer`: the Llama family (Llama, Mistral, Qwen 2, Qwen 3) in one set of blocks.

Parameters carry Hugging Face's names, because modules and attributes do.
"""

# B batch, T positions, H query heads, G key-value heads, D head size, C hidden size.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..autograd import Tensor, attention, rope, swiglu
from ..autograd.device import beside
from .config import TransformerConfig
from .init import init_weights
from .inputs import check_ids, check_positions
from .layers import Embedding, Linear, RMSNorm
from .model import LanguageModel
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


class Transformer(LanguageModel):
    """A decoder of the Llama family.

    Weights start from N(0, 0.02), each a function of `seed` and its own name.
    """

    def __init__(self, config: TransformerConfig, seed: int | None = None):
        self._build(config)
        init_weights(self, seed, lambda name: 0.02)

    def _build(self, config: TransformerConfig) -> None:
        check_supported(config)
        self.config = config
        self.model = Trunk(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.turns = RopeTable(config.head_size, config.rope_theta, config.rope_scaling)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.config.num_hidden_layers, self.config.kv_heads, self.config.head_size

    def hidden(
        self, ids: Any, positions: Any = None, segments: Any = None, cache: Any = None
    ) -> Tensor:
        ids = check_ids(ids, self.config.vocab_size)
        start = 0 if cache is None else cache.length
        positions, segments = check_positions(
            ids.shape, positions, segments, start, self.config.max_position_embeddings
        )
        x = self.model.embed_tokens(ids)
        turn = tuple(beside(table, x.data) for table in self.turns.at(positions))
        x = self._through(self.model.layers, x, turn, segments, cache)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.model.norm(x)


def check_supported(config: TransformerConfig) -> None:
    """Raise ValueError, by name, for a config that this architecture cannot run."""
    if not isinstance(config, TransformerConfig):
        raise TypeError(
            f"Transformer: a TransformerConfig is needed, given a {type(config).__name__}"
        )
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
