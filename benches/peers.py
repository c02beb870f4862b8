"""The peer of the step benches: a Llama in plain PyTorch, as a user would write it."""

from __future__ import annotations

from typing import Any

from .harness import optional

torch = optional("torch")


def build(config: Any) -> Any:
    """A PyTorch model of the shape of a `TransformerConfig`: ids (B, T) -> loss."""
    nn, F = torch.nn, torch.nn.functional
    C, H, G = config.hidden_size, config.num_attention_heads, config.kv_heads
    D = C // H

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(C, eps=1e-6), nn.RMSNorm(C, eps=1e-6)
            self.q, self.o = nn.Linear(C, C, bias=False), nn.Linear(C, C, bias=False)
            self.k = nn.Linear(C, G * D, bias=False)
            self.v = nn.Linear(C, G * D, bias=False)
            inner = config.intermediate_size
            self.gate, self.up = nn.Linear(C, inner, bias=False), nn.Linear(C, inner, bias=False)
            self.down = nn.Linear(inner, C, bias=False)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            B, T, _ = x.shape
            h = self.n1(x)
            q = turn(self.q(h).view(B, T, H, D).transpose(1, 2), cos, sin)
            k = turn(self.k(h).view(B, T, G, D).transpose(1, 2), cos, sin)
            v = self.v(h).view(B, T, G, D).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=G != H)
            x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
            h = self.n2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def turn(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(config.vocab_size, C)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(config.num_hidden_layers))
            self.norm = nn.RMSNorm(C, eps=1e-6)

        def forward(self, ids: Any, targets: Any) -> Any:
            T, device = ids.shape[1], ids.device
            frequency = config.rope_theta ** (-torch.arange(0, D, 2, device=device) / D)
            angle = torch.arange(T, device=device)[:, None] * frequency
            cos, sin = angle.cos(), angle.sin()
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, cos, sin)
            logits = F.linear(self.norm(x), self.embed.weight)
            return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))

    return Llama()


def copy_weights(ours: Any, theirs: Any) -> None:
    """Give the peer our weights, so that both compute the same loss."""
    state = ours.state_dict()
    pairs = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    names = {
        "n1": "input_layernorm",
        "n2": "post_attention_layernorm",
        **{x: f"self_attn.{x}_proj" for x in "qkvo"},
        **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }
    for n in range(ours.config.num_hidden_layers):
        for short, long in names.items():
            pairs[f"blocks.{n}.{short}.weight"] = f"model.layers.{n}.{long}.weight"
    theirs.load_state_dict({a: torch.from_numpy(state[b].copy()) for a, b in pairs.items()})
