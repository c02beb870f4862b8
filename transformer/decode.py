"""One step of decoding as one launch: the plain case of generation, made ready once.

What `Transformer` computes for one new token per sequence, with the same bits, as a program of
bodies on fixed buffers; no graph, no new arrays, no Python between the layers.
"""

# B sequences, S positions so far, H query heads, G key-value heads, D head size, C hidden size.

from __future__ import annotations

from typing import Any

import numpy as np

from ..autograd.buffers import empty
from ..autograd.lanes import load, store
from ..autograd.launch import JIT, body, device, strided
from ..autograd.mathf import sigmoid
from ..autograd.ops import few_rows
from ..autograd.ops.attention import decode_call
from ..autograd.ops.attention_forward import attention_forward_cpu
from ..autograd.ops.attention_tiles import PAD
from ..autograd.ops.embedding import embedding_rows
from ..autograd.ops.gemm import KC
from ..autograd.ops.norm import BLOCK, rms_forward
from ..autograd.precision import compute_dtype
from ..autograd.program import Program
from .layers import Linear, RMSNorm
from .llama import Transformer

CHUNK = 1024  # elements of a SwiGLU per index


def can_decode(model: Any, B: int) -> bool:
    """Whether `DecodeStep` can stand in for the model: few sequences, plain float32 layers."""
    if not JIT or type(model) is not Transformer or B > few_rows.FEW or compute_dtype() != "fp32":
        return False
    if model.config.head_size % PAD:
        return False
    for _, module in model.named_modules():
        if isinstance(module, Linear) and type(module) is not Linear:
            return False
    plain = all(
        isinstance(p.data, np.ndarray)
        and p.data.flags.c_contiguous
        and p.dtype in ((np.float32, np.uint16) if p.ndim > 1 else (np.float32,))
        for p in model.parameters()
    )
    return plain and _plain_names(model)


def _plain_names(model: Transformer) -> bool:
    """No module was replaced: the parameters are those of a new model."""
    own = [name for name, _ in model.named_parameters()]
    return own == [name for name, _ in Transformer.empty(model.config).named_parameters()]


class DecodeStep:
    """Logits after one more token of each sequence; keys and values go into `cache`."""

    def __init__(self, model: Transformer, cache: Any, starts: np.ndarray):
        config, trunk = model.config, model.model
        B, C, H, G = len(starts), config.hidden_size, config.num_attention_heads, config.kv_heads
        D, inner = config.head_size, config.intermediate_size
        self.model, self.cache, self.starts = model, cache, starts
        self.program, self.growing, self.items = Program(), [], []
        self.tables: list[Any] = []

        def new(*shape: int) -> Any:
            return empty(shape, np.float32)

        self.x, self.logits = new(B, C), new(B, config.vocab_size)
        self.cos, self.sin = new(B, D // 2), new(B, D // 2)
        h, q, k, v, a = new(B, C), new(B, H, D), new(B, G, D), new(B, G, D), new(B, H, D)
        gate, up, both = new(B, inner), new(B, inner), new(B, inner)
        r, r_heads, lse = new(B), new(B * H), new(B, H, 1)
        turned_q, turned_k = (new(B, H, D), new(B, G, D)) if config.qk_norm else (q, k)
        for n, block in enumerate(trunk.layers):
            at, mlp = block.self_attn, block.mlp
            keys, values = cache.kv[n]
            self._norm(self.x, block.input_layernorm, h, r)
            self._linear(h, [(at.q_proj, q), (at.k_proj, k), (at.v_proj, v)])
            if at.q_norm is not None and at.k_norm is not None:
                self._norm(q.reshape(B * H, D), at.q_norm, turned_q.reshape(B * H, D), r_heads)
                self._norm(k.reshape(B * G, D), at.k_norm, turned_k.reshape(B * G, D), r_heads)
            self._grows(_turn_place, B, (4, 5), turned_q, turned_k, v, self.cos, self.sin,
                        strided(keys), strided(values))  # fmt: skip
            count, args = decode_call(
                starts, turned_q[:, None], keys, values, config.window(n), a[:, None], lse
            )
            self.items.append(args[0])
            self._grows(attention_forward_cpu, count, (3, 4), *args)
            self._linear(a.reshape(B, H * D), [(at.o_proj, self.x)], self.x)
            self._norm(self.x, block.post_attention_layernorm, h, r)
            self._linear(h, [(mlp.gate_proj, gate), (mlp.up_proj, up)])
            flat = gate.reshape(-1), up.reshape(-1), both.reshape(-1)
            self.program.add(_swiglu, -(-B * inner // CHUNK), *flat)
            self._linear(both, [(mlp.down_proj, self.x)], self.x)
        self._norm(self.x, trunk.norm, h, r)
        self._linear(h, [(model.lm_head, self.logits)])
        few_rows.fetch_ahead(self.tables)
        self.program.finish()

    def _norm(self, x: Any, norm: RMSNorm, y: Any, r: Any) -> None:
        eps = x.dtype.type(norm.eps)
        self.program.add(rms_forward, -(-len(x) // BLOCK), x, norm.weight.data, eps, y, r)

    def _linear(self, x: Any, layers: list[tuple[Any, Any]], residual: Any = None) -> None:
        tables = []
        for layer, out in layers:
            bias = None if layer.bias is None else layer.bias.data
            out = out.reshape(len(out), -1)
            tables.append(few_rows.jobs(layer.weight.data, bias, residual, out))
        table = np.concatenate(tables)
        self.tables.append(table)
        self.program.add(few_rows.job, len(table), *few_rows.arguments(table, x, KC))

    def _grows(self, of: Any, n: int, arguments: tuple[int, ...], *args: Any) -> None:
        """A call whose `arguments` are views of the cache that get longer."""
        call = self.program.add(of, n, *args)
        self.growing += [self.program.place(call, k, 1) for k in arguments]

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """ids (B) -> logits (B, V), valid until the next call."""
        position = self.cache.length
        S = self.cache.length = position + 1
        self.x[...] = embedding_rows(self.model.model.embed_tokens.weight.data, ids)
        self.cos[...], self.sin[...] = self.model.turns.at(position - self.starts)
        self.program.words[self.growing] = S
        for items in self.items:
            items[:, 4] = S
        self.program.run()
        return self.logits


@body
def _turn_place(i, q, k, v, cos, sin, keys, values):
    """Turn sequence i's query and key, and put its key and value at the end of the cache."""
    H, G, D = q.shape[1], k.shape[1], q.shape[2]
    half, last = D // 2, keys.shape[1] - 1
    for h in range(H):
        _turn(q, (i * H + h) * D, cos, sin, i * half, half, q, (i * H + h) * D)
    for g in range(G):
        at = (i * keys.strides[0] + last * keys.strides[1] + g * keys.strides[2]) // 4
        _turn(k, (i * G + g) * D, cos, sin, i * half, half, keys, at)
        at = (i * values.strides[0] + last * values.strides[1] + g * values.strides[2]) // 4
        for d in range(0, D, 16):
            store(values, at + d, load(v, (i * G + g) * D + d))


@device
def _turn(x, at, cos, sin, c, half, out, to):
    for d in range(0, half, 16):
        x1, x2 = load(x, at + d), load(x, at + half + d)
        cd, sd = load(cos, c + d), load(sin, c + d)
        store(out, to + d, x1 * cd - x2 * sd)
        store(out, to + half + d, x2 * cd + x1 * sd)


@body
def _swiglu(i, gate, up, out):
    start, stop = i * CHUNK, min(gate.size, (i + 1) * CHUNK)
    whole = start + (stop - start) // 16 * 16
    for n in range(start, whole, 16):
        g = load(gate, n)
        store(out, n, g * sigmoid(g) * load(up, n))
    for n in range(whole, stop):
        out[n] = gate[n] * sigmoid(gate[n]) * up[n]
