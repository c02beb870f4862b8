"""The trainer does what its config says; expected values come from the equations it states."""

import dataclasses
import gc
import itertools
import math
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afinar.autograd import Tensor, cross_entropy
from afinar.lora import adapter_params
from afinar.optim import weights_sha256
from afinar.train import LMBatch, MetricsTracker, TransformerTrainConfig, TransformerTrainer
from afinar.transformer import Decoder, DecoderConfig, Transformer, TransformerConfig

V = 40


def small(**changes):
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": V,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return TransformerConfig(**{**shape, **changes})


def config(**changes):
    return TransformerTrainConfig(**{"model_config": small(), **changes})


def batches(n, B=2, T=8, seed=0):
    rng = np.random.default_rng(seed)
    return [
        LMBatch(rng.integers(0, V, (B, T)), rng.integers(0, V, (B, T)), rng.integers(1, T + 1, B))
        for _ in range(n)
    ]


def joined(many):
    return LMBatch(
        *(
            np.concatenate([getattr(b, name) for b in many])
            for name in ("inputs", "targets", "lengths")
        )
    )


def window_gradients(trainer, many):
    """The mean gradient of a window by parameter name, as the optimizer would get it."""
    for batch in many:
        trainer.compute_batch_gradients(batch)
    factor = 1 / (trainer._tokens * trainer._unit * trainer.scaler.scale)
    return {n: p.grad * factor for n, p in trainer.model.named_parameters() if p.grad is not None}


def digests(trainer):
    return weights_sha256(trainer.model), trainer.optimizer_state_sha256()


# --- the gradient of the mean over all counted tokens (A7 rows 6 and 7) ---


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_split_gives_the_big_batchs_gradient_and_loss(data):
    rows = data.draw(st.integers(1, 6), "rows")
    seed = data.draw(st.integers(0, 99), "seed")
    whole = batches(1, rows, 8, seed)[0]
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1)), "cuts")) if rows > 1 else []
    edges = [0, *cuts, rows]
    parts = [whole.rows(slice(a, b)) for a, b in itertools.pairwise(edges)]
    big = TransformerTrainer(config())
    split = TransformerTrainer(config(accumulation_steps=len(parts)))
    expected, found = window_gradients(big, [whole]), window_gradients(split, parts)
    assert expected.keys() == found.keys()
    for name, g in expected.items():
        np.testing.assert_allclose(found[name], g, rtol=1e-4, atol=2e-6, err_msg=name)
    assert split.clip_and_step().loss == pytest.approx(big.clip_and_step().loss, rel=1e-6)


def test_the_gradient_is_that_of_the_mean():
    trainer = TransformerTrainer(config(accumulation_steps=3))
    many = batches(3)
    found = window_gradients(trainer, many)
    model = Transformer(small(), seed=42)
    whole = joined(many)
    loss = cross_entropy(model(whole.inputs), whole.counted_targets)
    loss.backward()
    for name, p in model.named_parameters():
        np.testing.assert_allclose(found[name], p.grad, rtol=1e-4, atol=2e-6, err_msg=name)
    assert trainer.clip_and_step().loss == pytest.approx(loss.item(), rel=1e-6)


def test_mean_of_means_it_is_not():
    # One token with loss a, three with losses b, c, d: (a + b + c + d) / 4, not (a + mean) / 2.
    ids = np.arange(8).reshape(2, 4)
    one = LMBatch(ids[:1], ids[:1] + 1, np.array([1]))
    three = LMBatch(ids[1:], ids[1:] + 1, np.array([3]))
    trainer = TransformerTrainer(config(accumulation_steps=2))
    a, rest = trainer.train_batch(one), trainer.train_batch(three)
    assert trainer.last.loss == pytest.approx((a + 3 * rest) / 4, rel=1e-6)


def test_train_batch_returns_the_true_mean():
    trainer = TransformerTrainer(config(accumulation_steps=4))
    (batch,) = batches(1)
    loss = cross_entropy(Transformer(small(), seed=42)(batch.inputs), batch.counted_targets)
    assert trainer.train_batch(batch) == pytest.approx(loss.item(), rel=1e-5)


def test_an_empty_batch_is_nothing():
    trainer = TransformerTrainer(config())
    assert trainer.train_batch(LMBatch.from_sequences([], 0, 1)) == 0.0
    assert (trainer.step, trainer.batches) == (0, 0)


def test_pads_are_masked_by_length_not_by_value():
    # users.md P32: pad and eos share id 2; the real one counts, those after it do not.
    batch = LMBatch(np.array([[5, 6, 2, 2, 2]]), np.array([[6, 2, 2, 2, 2]]), np.array([2]))
    assert batch.counted_targets.tolist() == [[6, 2, -100, -100, -100]]
    trainer, short = TransformerTrainer(config()), TransformerTrainer(config())
    trainer.train_batch(batch)
    short.train_batch(LMBatch(np.array([[5, 6]]), np.array([[6, 2]])))
    assert trainer.last.loss == pytest.approx(short.last.loss, rel=1e-6)
    assert trainer.last.tokens == 2


# --- steps, epochs, max_steps ---


def test_a_window_is_as_many_batches_as_configured():
    trainer = TransformerTrainer(config(accumulation_steps=2))
    before = digests(trainer)
    trainer.train_batch(batches(1)[0])
    assert trainer.step == 0
    assert digests(trainer) == before
    trainer.train_batch(batches(1)[0])
    assert trainer.step == 1
    assert digests(trainer) != before


def test_a_begun_window_is_applied_at_the_end_of_the_epoch():
    trainer, other = TransformerTrainer(config(accumulation_steps=4)), TransformerTrainer(config())
    many = batches(3)
    trainer.train_epoch(many)
    assert (trainer.step, trainer.accumulated_batches) == (1, 0)
    other.train_batch(joined(many))
    for (name, p), (_, q) in zip(
        trainer.model.named_parameters(), other.model.named_parameters(), strict=True
    ):
        np.testing.assert_allclose(p.data, q.data, atol=1e-4, err_msg=name)


def test_epochs_count_and_return_the_mean_of_all_tokens():
    trainer = TransformerTrainer(config())
    losses, counts = [], []
    many = batches(5)

    def note(index, loss, it):
        assert it is trainer
        losses.append(loss)
        counts.append(many[index].num_tokens)

    mean = trainer.train_epoch_with_callback(many, note)
    assert mean == pytest.approx(np.dot(losses, counts) / sum(counts), rel=1e-9)
    assert trainer.metrics.epoch == 1
    assert trainer.metrics.losses == pytest.approx(losses)
    assert TransformerTrainer(config()).train_epoch([]) == 0.0


def test_max_steps_stops_and_none_does_not():
    trainer = TransformerTrainer(config(max_steps=2))
    trainer.train_epoch(batches(5))
    assert trainer.step == 2
    assert trainer.reached_max_steps
    endless = TransformerTrainer(config())
    endless.train_epoch(batches(5))
    assert endless.step == 5
    assert not endless.reached_max_steps


def test_a_callback_can_stop_an_epoch():
    trainer = TransformerTrainer(config())
    trainer.train_epoch_with_callback(batches(9), lambda index, loss, it: index < 2)
    assert trainer.step == 3


def test_an_exception_in_a_callback_leaves_a_trainer_that_goes_on():
    trainer = TransformerTrainer(config(accumulation_steps=2))

    def fail(index, loss, it):
        if index == 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trainer.train_epoch_with_callback(batches(4), fail)
    assert trainer.step == 1
    trainer.train_epoch(batches(2))
    assert trainer.step == 2


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="8 tokens, max_seq_len is 4"):
        TransformerTrainer(config(max_seq_len=4)).train_batch(batches(1)[0])


# --- what is applied (A7 rows 1, 2, 3) ---


def test_clipping_is_applied_and_the_norm_before_it_reported():
    (batch,) = batches(1)
    free, clipped = (TransformerTrainer(config(max_grad_norm=n)) for n in (None, 1e-3))
    norm = math.sqrt(
        sum(
            float((g.astype(np.float64) ** 2).sum())
            for g in window_gradients(free, [batch]).values()
        )
    )
    free.clip_and_step()
    clipped.train_batch(batch)
    assert norm > 0.1
    assert free.last_grad_norm == pytest.approx(norm, rel=1e-6)
    assert clipped.last_grad_norm == pytest.approx(norm, rel=1e-6)
    m = clipped.optimizer.first_moments
    total = math.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in m))
    assert total == pytest.approx(0.1 * 1e-3, rel=1e-4)  # (1 - beta1) g


def test_warmup_and_schedule_are_used():
    trainer = TransformerTrainer(config(lr=0.1, warmup_steps=4, max_steps=9, lr_schedule="cosine"))
    used = []
    for batch in batches(9):
        used.append(trainer.current_lr)
        trainer.train_batch(batch)
    assert trainer.metrics.learning_rates == used
    assert used[:5] == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])
    expected = [0.05 * (1 + math.cos(math.pi * n / 5)) for n in range(5)]
    assert used[4:] == pytest.approx(expected)
    assert trainer.optimizer.lr == used[-1]


def test_a_learning_rate_of_zero_changes_nothing():
    trainer = TransformerTrainer(config(warmup_steps=3))
    before = weights_sha256(trainer.model)
    trainer.train_batch(batches(1)[0])
    assert weights_sha256(trainer.model) == before
    trainer.train_batch(batches(1)[0])
    assert weights_sha256(trainer.model) != before


def test_betas_and_decay_reach_the_optimizer():
    trainer = TransformerTrainer(
        config(beta1=0.8, beta2=0.9, weight_decay=0.3, adam_form="epsilon_hat")
    )
    assert all(g["betas"] == (0.8, 0.9) for g in trainer.optimizer.groups)
    assert trainer.optimizer.form == "epsilon_hat"
    decayed = {n for g in trainer.optimizer.groups if g["weight_decay"] for n in g["names"]}
    assert decayed == {n for n, p in trainer.model.named_parameters() if p.ndim == 2}
    both = TransformerTrainer(config(decay="all", weight_decay=0.3))
    assert [g["weight_decay"] for g in both.optimizer.groups] == [0.3]


def test_the_optimizer_goes_by_the_models_order():
    trainer = TransformerTrainer(config())
    assert trainer.optimizer.params == trainer.model.parameters()


# --- determinism (A0) ---


def test_same_seed_same_run_and_another_seed_another():
    runs = []
    for seed in (1, 1, 2):
        trainer = TransformerTrainer(config(seed=seed))
        trainer.train_epoch(batches(3))
        runs.append((digests(trainer), trainer.metrics.losses))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def dropping(**changes):
    shape = DecoderConfig(vocab=V, n_layer=2, n_head=2, d_model=16, block=16, dropout=0.3)
    return config(model_config=shape, **changes)


def test_dropout_masks_depend_on_window_and_micro_batch():
    trainer = TransformerTrainer(dropping(accumulation_steps=2, lr=1e-12))
    (batch,) = batches(1)
    losses = [trainer.train_batch(batch) for _ in range(4)]
    assert len(set(losses)) == 4
    again = TransformerTrainer(dropping(accumulation_steps=2, lr=1e-12))
    assert [again.train_batch(batch) for _ in range(4)] == losses


def test_a_decoder_trains_and_its_pad_target_never_counts():
    trainer = TransformerTrainer(dropping())
    assert isinstance(trainer.model, Decoder)
    trainer.train_batch(LMBatch(np.array([[3, 4, 5, 6]]), np.array([[4, 5, 0, 0]]), np.array([3])))
    assert trainer.last.tokens == 2


POLICIES = ["blocks", "segments", "every:2", "matmuls"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lora", [None, 4])
def test_checkpointing_changes_no_bit(policy, lora):
    shape = small(num_hidden_layers=4)
    runs = []
    for chosen in ("none", policy):
        trainer = TransformerTrainer(
            config(
                model_config=shape, checkpoint_config=chosen, lora_rank=lora, accumulation_steps=2
            )
        )
        assert trainer.is_checkpointing == (chosen != "none")
        trainer.train_epoch(batches(4))
        runs.append((digests(trainer), trainer.metrics.losses, trainer.metrics.grad_norms))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpointing_with_dropout_changes_no_bit(policy):
    runs = []
    for chosen in ("none", policy):
        trainer = TransformerTrainer(dropping(checkpoint_config=chosen))
        trainer.train_epoch(batches(3))
        runs.append(digests(trainer))
    assert runs[0] == runs[1]


# --- faults ---


def poison(trainer, name="model.norm.weight"):
    p = dict(trainer.model.named_parameters())[name]
    p.data = p.data * np.float32(np.nan)


def test_a_gradient_that_is_not_finite_is_dropped_and_named():
    trainer = TransformerTrainer(config())
    before = weights_sha256(trainer.model)
    good = trainer.model.model.norm.weight.data
    poison(trainer)
    with pytest.warns(
        RuntimeWarning, match="was dropped: the gradient of model.embed_tokens.weight"
    ):
        trainer.train_batch(batches(1)[0])
    trainer.model.model.norm.weight.data = good
    assert weights_sha256(trainer.model) == before
    assert (trainer.step, trainer.windows, trainer.optimizer.step_count) == (0, 1, 0)
    assert "not finite" in trainer.last.skipped
    trainer.train_batch(batches(1)[0])
    assert trainer.step == 1


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_overflows_in_a_row_end_training_with_a_message(precision):
    trainer = TransformerTrainer(config(max_overflows=3, precision_config=precision))
    poison(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train_batch(batches(1)[0])
        trainer.train_batch(batches(1)[0])
        with pytest.raises(RuntimeError, match="gave up after step 0: 3 windows in a row"):
            trainer.train_batch(batches(1)[0])


def test_one_bad_micro_batch_drops_the_whole_window_once():
    # users.md P25: infinity in micro-batch 2 of 4, then finite ones.
    trainer = TransformerTrainer(config(accumulation_steps=4, precision_config="fp16"))
    many = batches(8)
    before = weights_sha256(trainer.model)
    for n, batch in enumerate(many[:4]):
        trainer.train_batch(batch)
        if n == 1:
            trainer.model.model.norm.weight.grad[0] = np.inf
    assert trainer.grad_scaler_stats == (32768.0, 1, 0)
    assert (trainer.step, trainer.windows) == (0, 1)
    assert weights_sha256(trainer.model) == before
    for batch in many[4:]:
        trainer.train_batch(batch)
    assert trainer.grad_scaler_stats == (32768.0, 1, 1)
    assert trainer.step == 1
    assert trainer.metrics.learning_rates == [1e-3]


def test_a_window_without_tokens_is_skipped_with_a_warning():
    trainer = TransformerTrainer(config())
    ids = np.zeros((2, 4), np.int64)
    with pytest.warns(RuntimeWarning, match="no token counts"):
        loss = trainer.train_batch(LMBatch(ids, np.full((2, 4), -100)))
    assert loss == 0
    assert (trainer.step, trainer.optimizer.step_count, trainer.windows) == (0, 0, 1)


def test_a_micro_batch_without_tokens_counts_for_nothing():
    (batch,) = batches(1)
    nothing = LMBatch(batch.inputs, np.full_like(batch.targets, -100))
    with_it, without = (
        TransformerTrainer(config(accumulation_steps=2)),
        TransformerTrainer(config()),
    )
    with_it.train_batch(nothing)
    with_it.train_batch(batch)
    without.train_batch(batch)
    assert digests(with_it) == digests(without)


def test_a_trainable_that_got_no_gradient_is_named():
    model = Transformer(small(), seed=0)
    model.extra = Tensor(np.ones(3, np.float32), requires_grad=True)
    trainer = TransformerTrainer.with_model(model, config())
    with pytest.warns(RuntimeWarning, match="got no gradient: extra"):
        trainer.train_batch(batches(1)[0])


# --- precision ---


def test_scaling_by_powers_of_two_changes_no_bit():
    runs = []
    for scale in (1.0, 1024.0):
        trainer = TransformerTrainer(config())
        trainer.scaler.scale = scale
        trainer.train_epoch(batches(3))
        runs.append(digests(trainer))
    assert runs[0] == runs[1]


def test_precisions_learn_alike():
    # The band: half a percent of the loss at every step, while it falls by more than a third.
    # (bfloat16 rounds to one part in 256; an even warmup keeps the curve from amplifying that.)
    curves = {}
    for precision in ("fp32", "fp16", "bf16"):
        trainer = TransformerTrainer(config(precision_config=precision, lr=3e-3, warmup_steps=10))
        (batch,) = batches(1, 4, 16)
        curves[precision] = [trainer.train_batch(batch) for _ in range(40)]
        assert trainer.is_mixed_precision == (precision != "fp32")
        assert all(p.dtype == np.float32 for p in trainer.model.parameters())
    assert curves["fp32"][-1] < 0.65 * curves["fp32"][0]
    np.testing.assert_allclose(curves["fp16"], curves["fp32"], rtol=5e-3)
    np.testing.assert_allclose(curves["bf16"], curves["fp32"], rtol=5e-3)
    assert curves["fp16"] != curves["fp32"]


def test_scaler_stats_of_each_precision():
    stats = [
        TransformerTrainer(config(precision_config=p)).grad_scaler_stats
        for p in ("fp32", "fp16", "bf16")
    ]
    assert stats == [(1, 0, 0), (65536, 0, 0), (1, 0, 0)]


# --- LoRA ---


@pytest.mark.parametrize(
    ("targets", "layers"),
    [(["qv"], 4), (["all_linear"], 14), (["attention"], 8), (["mlp"], 6), (None, 4)],
)
def test_lora_layers(targets, layers):
    trainer = TransformerTrainer(config(lora_rank=2, lora_target_modules=targets))
    assert len(trainer.lora_layers) == layers
    assert trainer.is_lora


def test_lora_trains_the_adapters_and_nothing_else():
    model = Transformer(small(), seed=0)
    base = {name: p.data.copy() for name, p in model.named_parameters()}
    trainer = TransformerTrainer.with_model(model, config(lora_rank=4))
    assert len(trainer.optimizer.params) == len(adapter_params(model)) == 8
    trainer.train_epoch(batches(4))
    for name, p in model.named_parameters():
        plain = name.replace(".base.", ".")
        if plain in base:
            assert (p.data == base[plain]).all()
            assert p.grad is None


def test_lora_norms_train_when_asked_for():
    trainer = TransformerTrainer(config(lora_rank=4, lora_train_norms=True))
    before = trainer.model.model.norm.weight.data.copy()
    q = trainer.model.model.layers[0].self_attn.q_proj
    trainer.train_epoch(batches(2))
    assert (trainer.model.model.norm.weight.data != before).any()
    assert q.base.weight.grad is None if hasattr(q, "base") else True


def test_lora_plus_is_a_learning_rate():
    ratio = 16.0
    trainer = TransformerTrainer(
        config(lora_rank=4, lora_plus_ratio=ratio, lr=1e-3, weight_decay=0.0)
    )
    plain = TransformerTrainer(config(lora_rank=4, lr=1e-3, weight_decay=0.0))
    (batch,) = batches(1)
    for it in (trainer, plain):
        it.train_batch(batch)
    b = {n: p.data for n, p in trainer.model.named_parameters() if ".b." in n}
    c = {n: p.data for n, p in plain.model.named_parameters() if ".b." in n}
    assert b
    for name in b:  # B starts at zero: its first update is the learning rate times a sign
        np.testing.assert_allclose(b[name], ratio * c[name], rtol=1e-5)


def test_saved_models_are_merged(tmp_path):
    from afinar.transformer import load_pretrained

    trainer = TransformerTrainer(config(lora_rank=4, lr=0.05))
    trainer.train_epoch(batches(4))
    ids = batches(1)[0].inputs
    adapted = trainer.model(ids).data
    state = digests(trainer)
    trainer.save(tmp_path / "folder")
    trainer.save(tmp_path / "one.safetensors", "mine", "llama")
    assert digests(trainer) == state
    np.testing.assert_allclose(load_pretrained(tmp_path / "folder")(ids).data, adapted, atol=1e-4)
    assert (tmp_path / "one.safetensors").stat().st_size > 1000
    trainer.train_batch(batches(1)[0])
    assert trainer.step == 5


@pytest.mark.parametrize("norms", [False, True])
def test_base_and_saved_adapter_are_the_trained_model(tmp_path, norms):
    from afinar.lora import load_adapter_peft

    base = Transformer(small(), seed=0)
    trainer = TransformerTrainer.with_model(
        Transformer(small(), seed=0), config(lora_rank=4, lora_train_norms=norms, lr=0.05)
    )
    trainer.train_epoch(batches(4))
    trainer.save_lora_adapter(tmp_path, "base")
    load_adapter_peft(base, tmp_path)
    ids = batches(1)[0].inputs
    assert (base(ids).data == trainer.model(ids).data).all()


def test_save_apr_is_the_trained_model(tmp_path):
    from afinar.transformer import load_apr

    trainer = TransformerTrainer(config())
    trainer.train_epoch(batches(2))
    trainer.save_apr(tmp_path / "model.apr")
    ids = batches(1)[0].inputs
    assert (load_apr(tmp_path / "model.apr")(ids).data == trainer.model(ids).data).all()


def test_save_lora_adapter_needs_lora(tmp_path):
    with pytest.raises(ValueError, match="Cannot save adapter: LoRA not enabled"):
        TransformerTrainer(config()).save_lora_adapter(tmp_path)


# --- config ---


def test_defaults_are_the_seeds():
    c = config()
    assert (c.lr, c.beta1, c.beta2, c.weight_decay) == (1e-3, 0.9, 0.999, 0.01)
    assert (c.max_seq_len, c.seed, c.max_grad_norm, c.log_interval) == (512, 42, 1.0, 10)
    assert not c.is_lora
    assert (c.world_size, c.rank, c.is_distributed) == (1, 0, False)


def test_builders_change_one_thing():
    c = config().with_lora(8).with_accumulation_steps(0).with_grad_clip(0.5).with_bf16().with_fp16()
    assert (c.lora_rank, c.accumulation_steps, c.max_grad_norm) == (8, 1, 0.5)
    assert c.precision_config.compute == "fp16"
    assert c.with_checkpointing(4).checkpoint_config.segments == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"accumulation_steps": 0},
        {"max_steps": 0},
        {"beta2": 1.0},
        {"lr_schedule": "cosine"},
        {"lr_schedule": "polynomial"},
        {"decay": "none"},
        {"precision_config": "fp8"},
        {"checkpoint_config": "every:0"},
        {"lora_alpha": 8.0},
        {"lora_plus_ratio": 2.0},
        {"quantize_nf4": True},
        {"distributed": "ddp"},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": 0.0},
        {"lora_target_modules": ["q_proj"]},
        {"lora_target_modules": [], "lora_rank": 2},
        {"lora_target_modules": "", "lora_rank": 2},
        {"lora_target_modules": [1], "lora_rank": 2},
        {"double_quantize": True, "quantize_nf4": True, "lora_rank": 2},
        {"warmup_steps": 1.5},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
        config(**wrong)


CHOICES = {"precision_config": "fp32", "checkpoint_config": "none", "device": "cpu"}
MAY_BE_NONE = ("max_steps", "max_grad_norm", "save_interval", "checkpoint_dir", "distributed")


@pytest.mark.parametrize(
    "field",
    [f.name for f in dataclasses.fields(TransformerTrainConfig) if f.name != "model_config"],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_is_needed(field):
    wrong = [math.nan, [1], {}, -1.0, np.zeros(2), object()]
    wrong += [None] if field not in MAY_BE_NONE and not field.startswith("lora_") else []
    wrong += [] if field == "checkpoint_dir" else ["nonsense"]
    wrong += [] if field in ("deterministic", "lora_train_norms") or "quanti" in field else [True]
    for value in wrong:
        with pytest.raises(
            ValueError, match=rf"^({field} must be |precision:|checkpointing:)"
        ) as e:
            config(**{field: value})
        assert repr(value) in str(e.value)


def test_numbers_of_numpy_are_numbers():
    c = config(max_steps=np.int64(3), lr=np.float32(0.5), accumulation_steps=np.uint8(2))
    assert c == config(max_steps=3, lr=0.5, accumulation_steps=2)
    assert [type(v) for v in (c.max_steps, c.lr)] == [int, float]


def test_a_model_config_is_needed():
    with pytest.raises(TypeError, match="model_config must be"):
        TransformerTrainer(config(model_config=None))


def test_unknown_settings_are_refused():
    with pytest.raises(TypeError, match="learning_rate"):
        config(learning_rate=1.0)
    with pytest.raises(TypeError):
        TransformerTrainConfig(small())


def test_every_nth_window_is_profiled():
    trainer = TransformerTrainer(config(profile_interval=2))
    trainer.train_batch(batches(1)[0])
    first = trainer.profile
    assert first.keys() == {"forward", "backward", "optimizer"}
    trainer.train_batch(batches(1)[0])
    assert trainer.profile is first
    trainer.train_batch(batches(1)[0])
    assert trainer.profile is not first
    assert all(seconds > 0 for seconds in trainer.profile.values())


def test_concurrent_construction_keeps_seeds_apart():
    alone = {seed: weights_sha256(TransformerTrainer(config(seed=seed)).model) for seed in range(6)}
    found = {}

    def build(seed):
        found[seed] = weights_sha256(TransformerTrainer(config(seed=seed)).model)

    threads = [threading.Thread(target=build, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone
    assert len(set(alone.values())) == 6


def test_training_turns_dropout_on_again():
    trainer, other = TransformerTrainer(dropping()), TransformerTrainer(dropping())
    trainer.model.eval()
    assert trainer.train_batch(batches(1)[0]) == other.train_batch(batches(1)[0])


@pytest.mark.slow
def test_memory_stays_flat_over_a_thousand_steps(resident):
    trainer = TransformerTrainer(config(accumulation_steps=2))
    many = batches(20, 4, 32)
    for n in range(3200):
        if n == 1200:
            gc.collect()
            before = resident()
        trainer.train_batch(many[n % 20])
    assert trainer.step == 1600
    gc.collect()
    assert resident() - before < 1e6


# --- one sequence ---


def test_forward_single():
    trainer = TransformerTrainer(config())
    value, loss, logits = trainer.forward_single([1, 2, 3], [2, 3, 4])
    assert logits.shape == (3, V)
    assert value == loss.item() == pytest.approx(math.log(V), rel=0.05)
    loss.backward()
    assert trainer.model.model.norm.weight.grad is not None


# --- LMBatch and metrics ---


def test_from_sequences():
    uniform = LMBatch.from_sequences([[1, 2, 3], [4, 5, 6]], 0, 9)
    assert uniform.inputs.tolist() == [[1, 2], [4, 5]]
    assert uniform.targets.tolist() == [[2, 3], [5, 6]]
    assert uniform.num_tokens == 4
    ragged = LMBatch.from_sequences([[1, 2, 3], [4]], 0, 9)
    assert ragged.inputs.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert ragged.counted_targets.tolist() == [[2, 3, 9], [9, -100, -100]]
    assert ragged.lengths.tolist() == [3, 1]
    assert LMBatch.from_sequences([[1, 2], []], 0, 9).num_tokens == 2
    assert LMBatch.from_sequences([], 0, 9).batch_size == 0
    assert LMBatch.single([1, 2], [2, 3]).get_input(0).tolist() == [1, 2]
    assert uniform.get_target(1).tolist() == [5, 6]
    assert uniform.get_input(2) is None
    with pytest.raises(ValueError, match="nothing to predict"):
        LMBatch.from_sequences([[1]], 0, 9)
    with pytest.raises(ValueError, match="targets must have the shape"):
        LMBatch(np.zeros((2, 3), int), np.zeros((2, 2), int))
    with pytest.raises(ValueError, match="lengths"):
        LMBatch(np.zeros((2, 3), int), np.zeros((2, 3), int), np.array([4, 1]))
    with pytest.raises(TypeError, match="inputs must be integers, given float64"):
        LMBatch(np.zeros((2, 3)), np.zeros((2, 3), int))
    with pytest.raises(ValueError, match="inputs must be rows of one length"):
        LMBatch([[1, 2], [3]], [[1, 2], [3]])
    with pytest.raises(TypeError, match=r"targets must be integers, given object \[\[None\]\]"):
        LMBatch([[1]], [[None]])
    with pytest.raises(TypeError, match=r"tokens must be integers, given <U1 \['a'\]"):
        LMBatch.from_sequences([[1, 2], ["a"]], 0, 1)
    with pytest.raises(ValueError, match="must be a list of integers, given 1"):
        LMBatch.from_sequences([1, 2], 0, 1)
    with pytest.raises(ValueError, match="eos_id must be a whole number of at least 0, given None"):
        LMBatch.from_sequences([[1, 2], [3]], 0, None)


def test_metrics():
    m = MetricsTracker()
    assert m.avg_loss(3) == 0
    assert m.best_loss is None
    for loss in (3.0, 2.0, 2.5, math.nan):
        m.record_step(loss, 0.1, 1.0)
    m.record_val_loss(1.5)
    assert (m.steps, m.best_loss, m.best_val_loss) == (4, 2.0, 1.5)
    assert MetricsTracker([3.0, 2.0]).avg_loss(5) == 2.5
    assert MetricsTracker([1.0]).is_improving(3)
    assert MetricsTracker([1.0, 0.9, 0.8]).is_improving(3)
    assert not MetricsTracker([0.5, 0.6, 0.7]).is_improving(3)
    assert not MetricsTracker([0.5, 0.7, 0.6, 0.7]).is_improving(3)  # oscillating is not improving
