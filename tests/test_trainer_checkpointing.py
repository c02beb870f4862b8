"""What gradient checkpointing keeps, computes twice, and saves."""

import numpy as np
import pytest

from afinar.autograd import KERNELS, Tensor, buffers, checkpoint
from afinar.autograd.backend import Kernel
from afinar.autograd.tape import keep_results
from afinar.train import CheckpointConfig, LMBatch, TransformerTrainConfig, TransformerTrainer
from afinar.train.checkpointing import (
    binomial_layers,
    estimate_memory,
    optimal_segments,
    within_budget,
)
from afinar.transformer import TransformerConfig

SHAPE = TransformerConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=2,
    vocab_size=40,
    max_position_embeddings=128,
)


def trainer(policy):
    return TransformerTrainer(TransformerTrainConfig(model_config=SHAPE, checkpoint_config=policy))


def batch():
    rng = np.random.default_rng(0)
    return LMBatch(rng.integers(0, 40, (4, 128)), rng.integers(0, 40, (4, 128)))


def test_the_rules_that_say_which_layers_are_kept():
    def kept(config, layers):
        keep = config.starts(layers)
        return [n for n in range(layers) if keep(n)]

    assert kept(CheckpointConfig("segments", 4), 24) == [0, 6, 12, 18]
    assert kept(CheckpointConfig("segments"), 16) == [0, 4, 8, 12]
    assert kept(CheckpointConfig("blocks"), 3) == [0, 1, 2]
    assert kept(CheckpointConfig("every:2"), 5) == [0, 2, 4]
    assert CheckpointConfig("none").starts(9) is None
    assert binomial_layers(16) == [0, 4, 8, 12]
    assert (optimal_segments(32), optimal_segments(0)) == (6, 1)
    assert estimate_memory(16, 2, 10, 8) == (16 * 640, 4 * 640)
    for wrong in ("all", "every", "every:x", "every:0"):
        with pytest.raises(ValueError, match="policy"):
            CheckpointConfig(wrong)
    with pytest.raises(ValueError, match="segments"):
        CheckpointConfig("blocks", 3)


def calls(monkeypatch, name, run):
    """How often `run` calls the body of a kernel."""
    count = 0
    kernel = KERNELS[name]
    module, fast = next(iter(kernel.fast.items()))

    def counted(*args):
        nonlocal count
        count += 1
        return fast(*args)

    monkeypatch.setitem(kernel.fast, module, counted)
    run()
    return count


def test_keeping_matmuls_computes_none_twice(monkeypatch):
    counts = {}
    for policy in ("none", "blocks", "matmuls"):
        it = trainer(policy)
        with monkeypatch.context() as m:
            counts[policy] = [
                calls(m, name, lambda it=it: it.train_batch(batch()))
                for name in ("gemm.gemm", "attention.attention_forward", "norm.rms_norm_forward")
                if name in KERNELS
            ]
    assert counts["matmuls"][:2] == counts["none"][:2]
    assert counts["blocks"][1] == 2 * counts["none"][1]
    assert counts["blocks"][0] > counts["none"][0]


def peak(policy):
    it = trainer(policy)
    it.train_batch(batch())
    start = buffers.in_use()
    buffers.reset_peak()
    it.train_batch(batch())
    return buffers.peak() - start


def test_less_kept_is_less_memory():
    peaks = {p: peak(p) for p in ("none", "matmuls", "blocks", "segments")}
    assert peaks["none"] > peaks["matmuls"] > peaks["blocks"]
    assert peaks["segments"] < 0.7 * peaks["none"]


def test_a_budget_chooses_the_policy():
    it = trainer("none")
    it.train_batch(batch())
    start = buffers.in_use()
    with it._computing():
        loss = it.model.loss(batch().inputs, batch().targets)
    held = buffers.in_use() - start
    loss.backward()

    def fits(budget):
        try:
            within_budget(budget, SHAPE, 4, 128)
        except ValueError:
            return False
        return True

    chosen = [within_budget(int(held * f), SHAPE, 4, 128).policy for f in (1.3, 0.8, 0.5)]
    assert chosen[0] == "none"
    assert "none" not in chosen[1:]
    assert not fits(held // 20)
    with pytest.raises(ValueError, match="are needed for 4 sequences of 128 tokens"):
        within_budget(1000, SHAPE, 4, 128)


def test_nested_stretches_and_kept_results():
    x = np.random.default_rng(0).standard_normal((3, 3))
    grads = []
    for nested in (False, True):
        t = Tensor(x.copy(), requires_grad=True)

        def inner(y):
            return (y @ y).tanh()

        def outer(y, inner=inner, nested=nested):
            return checkpoint(inner, y) @ y if nested else inner(y) @ y

        with keep_results("gemm"):
            checkpoint(outer, t).sum().backward()
        grads.append(t.grad.tobytes())
    assert grads[0] == grads[1]


def test_names_that_are_kept_are_kernels():
    names = {k.__name__ for k in KERNELS.values() if isinstance(k, Kernel)}
    assert set(CheckpointConfig("matmuls").kept_kernels) <= names


def test_memory_stays_flat():
    it = TransformerTrainer(
        TransformerTrainConfig(
            model_config=TransformerConfig(
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                vocab_size=40,
                max_position_embeddings=128,
            )
        )
    )
    data = batch()
    live = []
    for n in range(60):
        it.train_batch(data)
        if n >= 10:
            live.append(buffers.in_use())
    assert len(set(live)) == 1
