"""What a training step holds: checkpointing policies against depth, and the three precisions.

Activation memory is the most that was alive during a step beyond what was alive before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from afinar.autograd import buffers
from afinar.train import LMBatch, TransformerTrainConfig, TransformerTrainer
from afinar.transformer import TransformerConfig

from .harness import Row, tokens

POLICIES = ("none", "matmuls", "segments", "blocks")


def measure(layers: int, policy: str, precision: str) -> tuple[float, int]:
    """Seconds and bytes of a step of a narrow model."""
    shape = TransformerConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    config = TransformerTrainConfig(
        model_config=shape, checkpoint_config=policy, precision_config=precision
    )
    trainer = TransformerTrainer(config)
    batch = LMBatch(*tokens(4, 256, shape.vocab_size))
    trainer.train_batch(batch)
    before = buffers.in_use()
    buffers.reset_peak()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        trainer.train_batch(batch)
        times.append(time.perf_counter() - start)
    return sorted(times)[1], buffers.peak() - before


def rows(threads: int) -> Iterator[Row]:
    """Each policy at two depths beside none, then each precision beside float32."""
    for layers in (4, 16):
        found = {policy: measure(layers, policy, "fp32") for policy in POLICIES}
        yield from _rows(f"{layers} layers", "none", found, threads)
    found = {precision: measure(8, "none", precision) for precision in ("fp32", "bf16", "fp16")}
    yield from _rows("8 layers", "fp32", found, threads)


def _rows(what: str, base: str, found: dict[str, tuple[float, int]], threads: int) -> Iterator[Row]:
    for name, (t, m) in found.items():
        note = f"activations {m / 1e6:.0f} MB, {m / found[base][1]:.2f} of {base}"
        yield Row("memory", f"{what}, {name}", threads, t, found[base][0], base, note=note)
