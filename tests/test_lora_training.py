"""Every variant of an adapter in the trainer: it learns, and a resumed run is the straight run."""

import numpy as np
import pytest

from afinar.lora import LoRAConfig, apply_lora, lora_modules
from afinar.optim import weights_sha256
from afinar.train import (
    LMBatch,
    TransformerTrainConfig,
    TransformerTrainer,
    load_snapshot,
    save_snapshot,
)
from afinar.transformer import Transformer, TransformerConfig
from afinar.transformer.decoder import Decoder, DecoderConfig

V = 40
LLAMA = TransformerConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=V,
    max_position_embeddings=32,
)
GPT = DecoderConfig(vocab=V, n_layer=2, n_head=2, d_model=16, block=32)
VARIANTS = {
    "dropout": LoRAConfig(r=2, dropout=0.3, targets="all_linear"),
    "rslora": LoRAConfig(r=4, use_rslora=True),
    "dora": LoRAConfig(r=2, use_dora=True, dropout=0.1),
    "pissa": LoRAConfig(r=2, init="pissa"),
    "int4": LoRAConfig(r=2, quantize="int4"),
    "nf4": LoRAConfig(r=2, quantize="nf4", modules_to_save=("norms",)),
}


def batch(i):
    ids = np.random.default_rng(i % 2).integers(1, V, (2, 9))
    return LMBatch(ids[:, :-1], ids[:, 1:])


def trainer_of(shape, lora):
    model = (Transformer if shape is LLAMA else Decoder)(shape, seed=0)
    apply_lora(model, lora, seed=1)
    config = TransformerTrainConfig(
        model_config=shape, lr=0.03, warmup_steps=2, max_steps=8, accumulation_steps=2
    )
    return TransformerTrainer.with_model(model.train(), config)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_variant_learns_and_resumes(shape, variant, tmp_path):
    straight = trainer_of(shape, VARIANTS[variant])
    losses = []
    for i in range(8):
        if i == 3:  # in the middle of a window
            save_snapshot(tmp_path, straight)
        losses.append(straight.train_batch(batch(i)))
    assert losses[7] < losses[1]  # of the same batch
    resumed = trainer_of(shape, VARIANTS[variant])
    load_snapshot(tmp_path, resumed)
    for i in range(resumed.batches, 8):
        resumed.train_batch(batch(i))
    assert weights_sha256(resumed.model) == weights_sha256(straight.model)
    assert resumed.optimizer_state_sha256() == straight.optimizer_state_sha256()


def test_4_bit_bases_are_a_setting_of_the_trainer():
    for setting, kind in (("quantize_nf4", "nf4"), ("double_quantize", "int4-double")):
        config = TransformerTrainConfig(model_config=LLAMA, lora_rank=2, **{setting: True})
        trainer = TransformerTrainer(config)
        assert {m.base.kind for _, m in lora_modules(trainer.model)} == {kind}
        assert trainer.train_batch(batch(0)) > 0
