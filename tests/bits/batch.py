"""A sequence's logits and the gradient of its embeddings: alone, and as one of eight."""

import numpy as np

from afinar.transformer import Transformer, TransformerConfig

config = TransformerConfig(
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_kv_heads=2,
    vocab_size=300,
    max_position_embeddings=256,
)
model = Transformer(config, seed=3)
ids = np.random.default_rng(0).integers(0, config.vocab_size, (8, 70))
# Each row looks up rows of its own in the table, so that its gradients stay apart.
own = np.arange(8)[:, None] * 37 + ids % 37


def run(rows):
    model.zero_grad()
    logits = model(own[rows])
    model.loss(own[rows], np.roll(ids[rows], -1, axis=1), reduction="sum").backward()
    return logits.data, model.model.embed_tokens.weight.grad


all_logits, all_grads = run(slice(0, 8))
for n in range(8):
    logits, grads = run(slice(n, n + 1))
    assert logits[0].tobytes() == all_logits[n].tobytes(), f"logits of row {n}"
    mine = slice(37 * n, 37 * n + 37)
    assert grads[mine].tobytes() == all_grads[mine].tobytes(), f"gradients of row {n}"
print("equal")
