"""Digests of adapters of every variant after five steps, adapted and merged."""

import numpy as np

from afinar.autograd.random import make_key, raw_words
from afinar.lora import LoRAConfig, adapter_params, apply_lora, lora_param_groups, merge_lora
from afinar.optim import AdamW, weights_sha256
from afinar.transformer import Decoder, DecoderConfig, Transformer, TransformerConfig
from afinar.transformer.dropout import dropout_scope

LLAMA = TransformerConfig(
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_kv_heads=2,
    vocab_size=300,
    max_position_embeddings=128,
)
GPT = DecoderConfig(vocab=300, n_layer=2, n_head=4, d_model=64, block=128, dropout=0.1)
VARIANTS = {
    "slices": (GPT, LoRAConfig(r=5, targets="all_linear", dropout=0.2)),
    "whole": (LLAMA, LoRAConfig(r=8, targets="all-linear", modules_to_save=("norms",))),
    "dora": (LLAMA, LoRAConfig(r=4, use_dora=True, use_rslora=True, dropout=0.1)),
    "pissa": (GPT, LoRAConfig(r=4, init="pissa")),
    "int4": (LLAMA, LoRAConfig(r=4, quantize="int4")),
    "int4-double": (GPT, LoRAConfig(r=4, quantize="int4-double")),
    "nf4": (LLAMA, LoRAConfig(r=4, quantize="nf4", targets="all-linear")),
}

for name, (shape, lora) in VARIANTS.items():
    model = (Transformer if shape is LLAMA else Decoder)(shape, seed=3)
    apply_lora(model, lora, seed=5)
    optimizer = AdamW(lora_param_groups(model, 1e-2, lora_plus_ratio=4), lr=1e-2)
    for step in range(5):
        words = raw_words(make_key("bits", 0, step), 2 * 101) % np.uint64(300)
        tokens = words.astype(np.int64).reshape(2, 101)
        optimizer.zero_grad()
        with dropout_scope(7, step):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None for p in adapter_params(model))
    print(name, loss.item().hex(), weights_sha256(model), optimizer.state_sha256())
    merge_lora(model)
    print(name, "merged", weights_sha256(model))
