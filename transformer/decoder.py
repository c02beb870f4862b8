"""A GPT decoder with one fused matrix for queries, keys and values, the whole model on one page.

LayerNorm before each part (Radford et al. 2019), biases everywhere, GELU, learned or rotary
positions, the output head tied to the token table. GPT-2 checkpoints map onto it name by name.
"""

# B sequences, T tokens each, H heads of D channels, C = H D channels, F hidden ones, V ids.

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..autograd import Tensor, attention, gelu, rope, rope_table
from ..autograd.device import beside
from .dropout import call_scope, dropped, site_key
from .init import init_weights
from .inputs import check_ids, check_positions
from .layers import Embedding, LayerNorm, Linear
from .model import LanguageModel
from .module import Module
from .values import is_flag, is_number, is_whole, plain

PAD = 0  # the target that is never counted
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a `Decoder`.

    `d_ff` defaults to 4 * d_model. `pos` is "learned" (a table of `block` positions) or "rope".
    `activation` is "gelu" (exact) or "gelu_tanh" (GPT-2's approximation). Wrong values raise a
    ValueError.
    """

    vocab: int = 2030
    n_layer: int = 12
    n_head: int = 8
    d_model: int = 512
    d_ff: int | None = None
    block: int = 200
    dropout: float = 0.0
    pos: str = "learned"
    tie: bool = True
    activation: str = "gelu"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab", "n_layer", "n_head", "d_model", "block", "d_ff"):
            value = getattr(self, name)
            if not (is_whole(value) and value > 0) and (name, value) != ("d_ff", None):
                raise ValueError(f"DecoderConfig: {name} must be positive and whole, not {value!r}")
        if not (is_number(self.eps) and 0 < self.eps < 1):
            raise ValueError(f"DecoderConfig: eps must be between 0 and 1, not {self.eps!r}")
        if self.d_model % self.n_head:
            raise ValueError(
                f"DecoderConfig: d_model={self.d_model} is not divisible by n_head={self.n_head}"
            )
        if not (is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ValueError(f"DecoderConfig: dropout must be in [0, 1), not {self.dropout!r}")
        if not is_flag(self.tie):
            raise ValueError(f"DecoderConfig: tie must be True or False, not {self.tie!r}")
        if not isinstance(self.pos, str) or self.pos not in ("learned", "rope"):
            raise ValueError(f'DecoderConfig: pos is "learned" or "rope", not {self.pos!r}')
        if self.pos == "rope" and self.head_dim % 2:
            raise ValueError(
                f"DecoderConfig: rope needs an even head dimension, not {self.head_dim}"
            )
        kinds = ("gelu", "gelu_tanh")
        if not isinstance(self.activation, str) or self.activation not in kinds:
            raise ValueError(
                f'DecoderConfig: activation is "gelu" or "gelu_tanh", not {self.activation!r}'
            )
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain(value))

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.d_model // self.n_head

    @property
    def ff(self) -> int:
        """Hidden channels of the MLP."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def vocab_size(self) -> int:
        """How many ids there are, under the name that all models share."""
        return self.vocab

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence, under the name that all models share."""
        return self.block

    @property
    def num_hidden_layers(self) -> int:
        """How many blocks there are, under the name that all models share."""
        return self.n_layer

    def to_dict(self) -> dict[str, Any]:
        """Field names and values, ready for JSON."""
        return asdict(self)


_PRESETS = {
    "tiny": DecoderConfig(n_layer=6, n_head=4, d_model=256),
    "small": DecoderConfig(),
    "medium": DecoderConfig(n_layer=16, n_head=12, d_model=768),
}


def preset(name: str) -> DecoderConfig:
    """The shape called "tiny" (5.3 M parameters), "small" (39 M) or "medium" (115 M)."""
    if not isinstance(name, str) or name not in _PRESETS:
        raise ValueError(f"preset: unknown name {name!r}; known: {', '.join(_PRESETS)}")
    return _PRESETS[name]


class Decoder(LanguageModel):
    """Token ids in, logits of the next token out.

    Weights start from N(0, 0.02), those that lead back into the residual stream from
    N(0, 0.02 / sqrt(2 L)), each a function of `seed` and its own name.

    >>> model = Decoder(DecoderConfig(n_layer=2, n_head=2, d_model=16, block=8), seed=0)
    >>> model.num_parameters
    39200
    >>> model([1, 2, 3]).shape
    (3, 2030)
    """

    def __init__(self, config: DecoderConfig, seed: int | None = None):
        self._build(config)
        small = 0.02 / math.sqrt(2 * config.n_layer)
        init_weights(self, seed, lambda name: small if name.endswith("proj.weight") else 0.02)

    ignore_index = PAD

    def _build(self, config: DecoderConfig) -> None:
        if not isinstance(config, DecoderConfig):
            raise TypeError(f"Decoder: a DecoderConfig is needed, given a {type(config).__name__}")
        self.config = config
        self.tokens = Embedding(config.vocab, config.d_model)
        learned = config.pos == "learned"
        self.positions = Embedding(config.block, config.d_model) if learned else None
        self.blocks = [Block(config, n) for n in range(config.n_layer)]
        self.ln_f = LayerNorm(config.d_model, config.eps)
        self.lm_head = Linear(config.d_model, config.vocab, bias=False)
        if config.tie:
            self.lm_head.weight = self.tokens.weight
        known = np.arange(config.block)
        self._turn = None if learned else rope_table(known, config.head_dim, ROPE_THETA)

    @staticmethod
    def hf_name(path: str) -> str:
        """What GPT-2 calls the module or parameter at `path`.

        >>> Decoder.hf_name("blocks.0.attn.qkv.weight")
        'transformer.h.0.attn.c_attn.weight'
        """
        names = [_GPT2.get(step, step) for step in path.split(".")]
        if names[0] in ("wte", "wpe", "h", "ln_f"):
            names.insert(0, "transformer")
        return ".".join(names)

    def num_params(self, non_embedding: bool = True) -> int:
        """The number of values; by nanoGPT's rule `non_embedding` leaves the position table out."""
        if non_embedding and self.positions is not None:
            return self.num_parameters - self.positions.weight.size
        return self.num_parameters

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.config.n_layer, self.config.n_head, self.config.head_dim

    def hidden(
        self, ids: Any, positions: Any = None, segments: Any = None, cache: Any = None
    ) -> Tensor:
        ids = check_ids(ids, self.config.vocab)
        start = 0 if cache is None else cache.length
        if start + ids.shape[1] > self.config.block and positions is None:
            raise ValueError(
                f"Decoder: a sequence of {start + ids.shape[1]} tokens is longer than block "
                f"{self.config.block}"
            )
        at, segments = check_positions(ids.shape, positions, segments, start, self.config.block)
        p = self.config.dropout if self.training else 0.0
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(at)
        turn = None
        if self._turn is not None:
            turn = tuple(beside(table[at], x.data) for table in self._turn)
        with call_scope():
            x = dropped(x, p, "embedding")
            x = self._through(self.blocks, x, turn, segments, cache, p)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.ln_f(x)

    def next_logits(self, ids: Any) -> Tensor:
        """Logits after the last token, the last `block` tokens read.   ids (B, T) -> (B, V)"""
        return self.lm_head(self.hidden(np.asarray(ids)[:, -self.config.block :])[:, -1])


_GPT2 = {
    "tokens": "wte",
    "positions": "wpe",
    "blocks": "h",
    "ln1": "ln_1",
    "ln2": "ln_2",
    "qkv": "c_attn",
    "proj": "c_proj",
    "fc": "c_fc",
}


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).   x (B, T, C) -> (B, T, C)"""

    def __init__(self, config: DecoderConfig, layer: int):
        self.ln1 = LayerNorm(config.d_model, config.eps)
        self.attn = Attention(config, layer)
        self.ln2 = LayerNorm(config.d_model, config.eps)
        self.mlp = MLP(config, layer)

    def __call__(self, x: Tensor, turn: Any, segments: Any, cache: Any, p: float) -> Tensor:
        x = x + self.attn(self.ln1(x), turn, segments, cache, p)
        return x + self.mlp(self.ln2(x), p)


class Attention(Module):
    """Causal self-attention; rows [0, C) of `qkv` make queries, then keys, then values."""

    def __init__(self, config: DecoderConfig, layer: int):
        self.heads, self.layer = config.n_head, layer
        self.qkv = Linear(config.d_model, 3 * config.d_model)
        self.proj = Linear(config.d_model, config.d_model)

    def __call__(self, x: Tensor, turn: Any, segments: Any, cache: Any, p: float) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]  # (B, T, H, D) each
        if turn is not None:
            q, k = rope(q, *turn), rope(k, *turn)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        site = f"blocks.{self.layer}.attn"
        key = site_key(f"{site}.probabilities") if p else None
        y = attention(q, k, v, segments=segments, dropout=p, key=key)
        return dropped(self.proj(y.reshape(B, T, C)), p, f"{site}.proj")


class MLP(Module):
    """proj(gelu(fc(x))).   x (B, T, C) -> (B, T, C)"""

    def __init__(self, config: DecoderConfig, layer: int):
        self.approximate = "none" if config.activation == "gelu" else "tanh"
        self.layer = layer
        self.fc = Linear(config.d_model, config.ff)
        self.proj = Linear(config.ff, config.d_model)

    def __call__(self, x: Tensor, p: float) -> Tensor:
        y = self.proj(gelu(self.fc(x), approximate=self.approximate))
        return dropped(y, p, f"blocks.{self.layer}.mlp.proj")
