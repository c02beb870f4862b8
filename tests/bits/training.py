"""Digests of weights and moments after 20 steps of a small Llama, by the name of a mode."""

import sys

import numpy as np

from afinar.autograd.random import make_key, raw_words
from afinar.optim import AdamW, clip_grad_norm, weights_sha256
from afinar.transformer import Transformer, TransformerConfig

mode = sys.argv[1] if len(sys.argv) > 1 else "plain"
config = TransformerConfig(
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_kv_heads=2,
    vocab_size=300,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
model = Transformer(config, seed=3)
if mode == "checkpointed":
    model.checkpointing = lambda layer: layer % 2 == 0
optimizer = AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    words = raw_words(make_key("bits", 0, step), 4 * 101) % np.uint64(config.vocab_size)
    tokens = words.astype(np.int64).reshape(4, 101)
    optimizer.zero_grad()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    norm = clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    print(step, loss.item().hex(), norm.hex())
print(weights_sha256(model), optimizer.state_sha256())
