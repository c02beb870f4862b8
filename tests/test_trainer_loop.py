"""`fit` with callbacks that act, and `PretrainLoop` with its gates."""

import dataclasses
import json
import math

import numpy as np
import pytest

from afinar.optim import StepDecay, weights_sha256
from afinar.train import (
    Action,
    Callback,
    EarlyStopping,
    LMBatch,
    LRSchedule,
    Monitor,
    PretrainConfig,
    PretrainLoop,
    Progress,
    RunStatus,
    SnapshotCallback,
    TieredCurriculum,
    TransformerTrainConfig,
    TransformerTrainer,
    evaluate_batches,
    fit,
    list_snapshots,
    load_snapshot,
    save_snapshot,
)
from afinar.train.lock import Lock
from afinar.transformer import TransformerConfig

V = 40


pytestmark = pytest.mark.usefixtures("one_thread_per_module")


def trainer(**changes):
    model = TransformerConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=V,
        max_position_embeddings=32,
    )
    return TransformerTrainer(TransformerTrainConfig(**{"model_config": model, **changes}))


def batch(i, B=2, T=8):
    rng = np.random.default_rng(i)
    return LMBatch(rng.integers(0, V, (B, T)), rng.integers(0, V, (B, T)))


BATCHES = [batch(i) for i in range(5)]


class Recorder(Callback):
    """Notes every hook, and answers at one of them."""

    def __init__(self, at=None, answer=None):
        self.seen, self.at, self.answer = [], at, answer

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hook(context):
            self.seen.append((name[3:], context.epoch, context.step))
            return self.answer if self.seen[-1] == self.at else None

        return hook


# --- evaluation ---


def test_evaluation_weighs_every_token_the_same():
    it = trainer()
    one, two = batch(0), batch(1, 3)
    two.targets[:, 2:] = -100
    result = evaluate_batches(it.model, [one, two])
    total, right = 0.0, 0
    for b in (one, two):
        logits = it.model(b.inputs).data.astype(np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, t in np.argwhere(b.targets != -100):
            total -= logp[row, t, b.targets[row, t]]
            right += logits[row, t].argmax() == b.targets[row, t]
    assert result["tokens"] == 16 + 6
    assert result["loss"] == pytest.approx(total / 22, rel=1e-6)
    assert result["accuracy"] == right / 22
    assert result["perplexity"] == pytest.approx(math.exp(total / 22), rel=1e-5)
    with pytest.raises(ValueError, match="no target counts"):
        evaluate_batches(it.model, [])


# --- fit ---


def test_hooks_are_called_in_order():
    recorder = Recorder()
    fit(
        trainer(accumulation_steps=2), BATCHES[:3], epochs=1, valid=[batch(9)], callbacks=[recorder]
    )
    assert [name for name, _, _ in recorder.seen] == [
        "train_begin",
        "epoch_begin",
        *["step_begin", "step_end"] * 2,
        "validation",
        "epoch_end",
        "train_end",
    ]


def test_fit_is_what_epochs_are():
    one, two = trainer(accumulation_steps=2), trainer(accumulation_steps=2)
    result = fit(one, BATCHES, epochs=2)
    means = [two.train_epoch(BATCHES) for _ in range(2)]
    assert weights_sha256(one.model) == weights_sha256(two.model)
    assert result.losses == pytest.approx(means)
    assert one.metrics == two.metrics
    assert (result.steps, result.epochs, result.stopped) == (6, 2, False)


def test_batches_may_depend_on_the_epoch():
    it = trainer()
    fit(it, lambda epoch: iter(BATCHES[: epoch + 1]), epochs=3)
    assert it.step == 6


def test_max_steps_ends_training():
    it = trainer(max_steps=3)
    result = fit(it, BATCHES, epochs=4)
    assert (it.step, result.epochs) == (3, 1)


@pytest.mark.parametrize(
    ("at", "answer", "steps", "epochs"),
    [
        (("train_begin", 0, 0), Action.STOP, 0, 0),
        (("epoch_begin", 1, 0), Action.STOP, 5, 2),
        (("epoch_begin", 1, 0), Action.SKIP_EPOCH, 10, 3),
        (("step_begin", 0, 2), Action.STOP, 2, 1),
        (("step_end", 0, 2), Action.STOP, 2, 1),
        (("step_end", 0, 2), Action.SKIP_EPOCH, 12, 3),
        (("validation", 0, 5), Action.STOP, 5, 1),
        (("epoch_end", 1, 5), Action.STOP, 10, 2),
        (("step_end", 0, 2), Action.CONTINUE, 15, 3),
    ],
)
def test_answers_are_obeyed(at, answer, steps, epochs):
    it, last = trainer(), Recorder()
    result = fit(it, BATCHES, epochs=3, valid=[batch(9)], callbacks=[Recorder(at, answer), last])
    assert (it.step, result.epochs) == (steps, epochs)
    assert result.stopped == (answer is Action.STOP)
    assert last.seen[-1][0] == "train_end"  # a stop silences no other callback


def test_early_stopping_and_the_best_weights():
    it = trainer(lr=0.5, max_grad_norm=None)  # too fast: it gets worse
    stopping = EarlyStopping(patience=2, restore_best=True)
    result = fit(it, BATCHES, epochs=30, valid=BATCHES, callbacks=[stopping])
    assert result.stopped
    best = min(result.val_losses)
    assert result.val_losses[-3] == best
    assert evaluate_batches(it.model, BATCHES)["loss"] == pytest.approx(best, rel=1e-6)


def test_early_stopping_counts():
    class Context:
        val_loss = None
        loss = 0.0

    stopping, context, answers = EarlyStopping(patience=2, min_delta=0.1), Context(), []
    for context.loss in (1.0, 0.95, 0.8, math.nan, 0.75):
        answers.append(stopping.on_epoch_end(context))
    assert answers == [Action.CONTINUE] * 4 + [Action.STOP]
    with pytest.raises(ValueError, match="patience"):
        EarlyStopping(patience=0)


def test_progress_writes_lines():
    lines = []
    fit(trainer(), BATCHES, valid=[batch(9)], callbacks=[Progress(2, lines.append)])
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/1 step 2 loss ")
    assert "validation loss" in lines[2]


def test_a_schedule_callback_changes_the_learning_rate():
    it = trainer()
    fit(it, BATCHES, callbacks=[LRSchedule(StepDecay(0.1, 2, 0.5))])
    assert it.metrics.learning_rates == [0.1, 0.1, 0.05, 0.05, 0.025]
    assert it.optimizer.lr == 0.025


def test_the_monitor_stops_a_run_that_went_wrong():
    it, monitor = trainer(max_overflows=9), Monitor()
    good = it.model.model.norm.weight.data

    class Poison(Callback):
        def on_step_begin(self, context):
            if context.step == 2:
                it.model.model.norm.weight.data = good * np.float32(np.nan)

    with pytest.warns(RuntimeWarning, match="was dropped"):
        result = fit(it, BATCHES, callbacks=[Poison(), monitor])
    assert result.stopped
    assert it.step == 2
    assert "norm is nan" in monitor.reason
    assert fit(trainer(), BATCHES, callbacks=[Monitor(max_loss=1.0)]).steps == 1


def test_snapshots_are_taken_and_continue(tmp_path):
    it = trainer(checkpoint_dir=tmp_path, save_interval=2)
    fit(it, BATCHES, valid=[batch(9)])
    names = [p.name for p in list_snapshots(tmp_path)]
    assert names == ["step-00000002", "step-00000004", "step-00000005"]
    assert (tmp_path / "best").read_text() == "step-00000005"
    again = trainer(checkpoint_dir=tmp_path, save_interval=2)
    load_snapshot(tmp_path, again)
    assert weights_sha256(again.model) == weights_sha256(it.model)
    assert again.metrics.val_losses == it.metrics.val_losses


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 7, 8])
def test_a_resumed_fit_ends_with_the_bits_of_the_straight_one(tmp_path, stop):
    def shuffled(epoch):
        return [BATCHES[n] for n in np.random.default_rng(epoch).permutation(5)]

    class StopAt(Callback):
        def on_step_end(self, context):
            if context.global_step == stop:
                save_snapshot(tmp_path, context.trainer)
                raise KeyboardInterrupt

    settings = {"accumulation_steps": 2}
    straight, stopped, resumed = (trainer(**settings) for _ in range(3))
    fit(straight, shuffled, epochs=3, valid=[batch(9)])
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, shuffled, epochs=3, valid=[batch(9)], callbacks=[StopAt()])
    load_snapshot(tmp_path, resumed)
    fit(resumed, shuffled, epochs=3, valid=[batch(9)], resume=True)
    assert weights_sha256(resumed.model) == weights_sha256(straight.model)
    assert resumed.optimizer_state_sha256() == straight.optimizer_state_sha256()
    assert resumed.metrics == straight.metrics


# --- what callbacks remember ---


class StopAt(Callback):
    """Interrupts at the n-th call of a hook, as Ctrl-C does."""

    def __init__(self, hook, n):
        self.left = n
        setattr(self, hook, self._hook)

    def _hook(self, context):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def overshooting(tmp_path, name):
    """A trainer that soon gets worse, with its snapshots."""
    folder = tmp_path / name
    return trainer(lr=0.3, max_grad_norm=None, checkpoint_dir=folder, save_interval=2)


def stopping_early(it, more=(), monitor_validation=True, **changes):
    early = EarlyStopping(2, restore_best=True, monitor_validation=monitor_validation)
    callbacks = [early, *more]
    return fit(it, BATCHES, epochs=20, valid=BATCHES[:2], callbacks=callbacks, **changes), early


@pytest.mark.parametrize("monitor_validation", [True, False])
def test_early_stopping_stops_a_resumed_run_where_it_stops_the_straight_one(
    tmp_path, monitor_validation
):
    straight = overshooting(tmp_path, "straight")
    expected, _ = stopping_early(straight, monitor_validation=monitor_validation)
    assert expected.stopped
    assert 3 <= expected.epochs < 15
    stops = [("on_step_end", n) for n in (1, 4, 5, 7, straight.step - 6, straight.step)]
    stops += [("on_validation", 2), ("on_epoch_end", 1), ("on_epoch_end", expected.epochs - 1)]
    for hook, n in stops:
        stopped, resumed = (overshooting(tmp_path, f"{hook}-{n}") for _ in range(2))
        with pytest.raises(KeyboardInterrupt):
            stopping_early(stopped, [StopAt(hook, n)], monitor_validation)
        if list_snapshots(resumed.config.checkpoint_dir):
            load_snapshot(resumed.config.checkpoint_dir, resumed)
        result, _ = stopping_early(resumed, (), monitor_validation, resume=True)
        assert result.stopped
        assert resumed.step == straight.step
        assert resumed.metrics == straight.metrics
        assert result.losses == expected.losses[-len(result.losses) :]
        assert weights_sha256(resumed.model) == weights_sha256(straight.model)
        assert resumed.optimizer_state_sha256() == straight.optimizer_state_sha256()


def test_a_run_that_was_stopped_early_stays_so(tmp_path):
    straight, again = (overshooting(tmp_path, "one") for _ in range(2))
    _, early = stopping_early(straight)
    load_snapshot(tmp_path / "one", again)
    result, other = stopping_early(again, resume=True)
    assert (result.steps, result.stopped) == (0, True)
    assert (other.best, other.counter) == (early.best, 2)
    assert weights_sha256(again.model) == weights_sha256(straight.model)
    # Another training with the same callback begins anew.
    assert fit(trainer(), BATCHES, callbacks=[other]).steps == 5


def test_a_training_stopped_in_mid_epoch_goes_on_there():
    class Once(Callback):
        def on_step_end(self, context):
            return Action.STOP if context.global_step == 2 and not context.resumed else None

    straight, stopped = trainer(), trainer()
    fit(straight, BATCHES, epochs=2)
    assert fit(stopped, BATCHES, epochs=2, callbacks=[Once()]).steps == 2
    assert fit(stopped, BATCHES, epochs=2, callbacks=[Once()], resume=True).steps == 8
    assert weights_sha256(stopped.model) == weights_sha256(straight.model)
    assert stopped.metrics == straight.metrics


def test_a_monitored_run_stays_stopped(tmp_path):
    one, two = trainer(checkpoint_dir=tmp_path), trainer(checkpoint_dir=tmp_path)
    fit(one, BATCHES, callbacks=[Monitor(max_loss=1.0)])
    load_snapshot(tmp_path, two)
    monitor = Monitor(max_loss=1.0)
    assert fit(two, BATCHES, callbacks=[monitor], resume=True).steps == 0
    assert monitor.reason.startswith("step 1: the loss")


def test_another_schedule_than_the_runs_is_refused(tmp_path):
    settings = {"checkpoint_dir": tmp_path, "max_steps": 3}
    fit(trainer(**settings), BATCHES, callbacks=[LRSchedule(StepDecay(0.1, 2, 0.5))])

    def resumed(*callbacks):
        it = trainer(**settings)
        load_snapshot(tmp_path, it)
        return fit(it, BATCHES, callbacks=callbacks, resume=True)

    assert resumed(LRSchedule(StepDecay(0.1, 2, 0.5))).steps == 0
    with pytest.raises(ValueError, match=r"the rate of step 2 was 0.05, is 0.025"):
        resumed(LRSchedule(StepDecay(0.1, 2, 0.25)))
    with pytest.warns(RuntimeWarning, match="goes on without: LRSchedule"):
        resumed()


@pytest.mark.parametrize("stop", [3, 4, 9, 11])
def test_a_curriculum_goes_on_where_it_was(tmp_path, stop):
    tiers = [[batch(10 * tier + i) for i in range(3)] for tier in range(3)]

    def train(folder, *more, **changes):
        it = trainer(checkpoint_dir=tmp_path / folder)
        if changes:
            load_snapshot(tmp_path / folder, it)
        curriculum = TieredCurriculum((0.001, 0.002), patience=2)
        callbacks, valid = [*more, curriculum], [batch(99, 8)]
        fit(
            it,
            lambda _: tiers[curriculum.tier],
            epochs=5,
            valid=valid,
            callbacks=callbacks,
            **changes,
        )
        return it, curriculum

    straight, expected = train("straight")
    assert expected.tier == 2
    with pytest.raises(KeyboardInterrupt):
        train("stopped", StopAt("on_step_end", stop))
    resumed, found = train("stopped", resume=True)
    assert found.state() == expected.state()
    assert weights_sha256(resumed.model) == weights_sha256(straight.model)


def test_two_of_a_kind_keep_their_states_apart(tmp_path):
    def pair():
        return EarlyStopping(5, monitor_validation=False), EarlyStopping(3)

    one, two = trainer(checkpoint_dir=tmp_path), trainer(checkpoint_dir=tmp_path)
    first, again = pair(), pair()
    fit(one, BATCHES, valid=[batch(9)], callbacks=first)
    load_snapshot(tmp_path, two)
    fit(two, BATCHES, valid=[batch(9)], callbacks=again, resume=True)
    assert [e.best for e in again] == [e.best for e in first]
    assert again[0].best != again[1].best


def test_two_trainers_do_not_write_into_one_folder(tmp_path):
    refused = []

    class Second(Callback):
        def on_step_end(self, context):
            with pytest.raises(ValueError, match="is being written by another trainer") as error:
                fit(trainer(checkpoint_dir=tmp_path, seed=1), BATCHES)
            refused.append(error)

    it = trainer(checkpoint_dir=tmp_path)
    fit(it, BATCHES[:2], callbacks=[Second()])
    assert len(refused) == 2
    assert [p.name for p in list_snapshots(tmp_path)] == ["step-00000002"]
    fit(it, BATCHES[:2])  # the first one is done, and let go
    with pytest.raises(ValueError, match="another trainer"):
        fit(it, BATCHES[:2], callbacks=[SnapshotCallback(tmp_path)])
    fit(it, BATCHES[:2])


def test_an_exception_in_a_callback_still_ends_the_others(tmp_path):
    class Fail(Callback):
        def on_step_end(self, context):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(trainer(), BATCHES, callbacks=[Fail(), SnapshotCallback(tmp_path)])
    assert [p.name for p in list_snapshots(tmp_path)] == ["step-00000001"]


# --- PretrainLoop ---


def pretrain(**changes):
    fields = {"total_steps": 10, "steps_per_epoch": 4, "warmup_steps": 2, "lr_max": 1e-2}
    fields |= {"batch_size": 2, "seq_length": 8}
    return PretrainConfig(**{**fields, **changes})


def test_pretrain_defaults():
    c = PretrainConfig()
    assert (c.lr_max, c.lr_min, c.warmup_steps, c.total_steps) == (5e-5, 1e-6, 100, 1000)
    assert (c.batch_size, c.seq_length, c.target_val_loss, c.num_epochs) == (16, 1024, 2.2, 10)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        PretrainConfig(steps_per_epoch=0)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PretrainConfig)])
def test_pretrain_settings_of_the_wrong_kind_are_named(field):
    for value in (math.nan, "a", [1], -1.0, True):
        with pytest.raises(ValueError, match=f"^{field} must be ") as error:
            PretrainConfig(**{field: value})
        assert repr(value) in str(error.value)


def test_what_contradicts_the_trainer_or_the_data_is_refused():
    def loop(config, data=batch, **changes):
        return PretrainLoop(config, trainer(**changes), data, [batch(99)])

    loop(pretrain(seed=1, grad_clip=None), seed=1, max_grad_norm=None)
    for wrong, changes, says in (
        ({"seed": 1}, {}, "seed is 1 and the trainer's seed is 42"),
        ({"grad_clip": 2.0}, {}, "grad_clip is 2.0 and the trainer's max_grad_norm is 1.0"),
        ({"weight_decay": 0.0}, {}, "weight_decay is 0.0 and the trainer's weight_decay is 0.01"),
        ({}, {"max_steps": 11}, "total_steps makes 12 steps, the trainer's max_steps is 11"),
    ):
        with pytest.raises(ValueError, match=says):
            loop(pretrain(**wrong), **changes)
    for wrong in ({"batch_size": 3}, {"seq_length": 7}):
        with pytest.raises(ValueError, match="batch 0 has 2 sequences of 8 tokens; batch_size is"):
            loop(pretrain(**wrong)).run()

    def exhausted(i):
        raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data"):  # which is no divergence
        loop(pretrain(), exhausted).run()


@pytest.mark.parametrize("stop", [1, 6, 14])
def test_a_pretraining_that_was_killed_goes_on_after_its_last_epoch(tmp_path, stop):
    config = pretrain(total_steps=40, patience=3, min_epochs=1, lr_max=0.1, grad_clip=None)

    def loop(name, data=batch):
        it = trainer(accumulation_steps=2, max_grad_norm=None)
        return PretrainLoop(config, it, data, [batch(99)], tmp_path / name)

    def killed(i):
        if i == 2 * stop:
            raise KeyboardInterrupt
        return batch(i)

    straight = loop("straight")
    expected = straight.run()
    assert expected.status is RunStatus.EARLY_STOP
    assert expected.epochs[-1].epoch >= 3
    with pytest.raises(KeyboardInterrupt):
        loop("killed", killed).run()
    resumed = loop("killed")
    if list_snapshots(tmp_path / "killed" / "snapshots"):
        load_snapshot(tmp_path / "killed" / "snapshots", resumed.trainer)
    result = resumed.run(resume=True)
    assert (result.status, result.message) == (expected.status, expected.message)
    again = [dataclasses.replace(e, wall_seconds=0) for e in result.epochs]
    whole = [dataclasses.replace(e, wall_seconds=0) for e in expected.epochs]
    assert again == whole[-len(again) :]
    assert len(again) == len(whole) - stop // 4
    assert weights_sha256(resumed.trainer.model) == weights_sha256(straight.trainer.model)
    assert resumed.trainer.metrics == straight.trainer.metrics
    assert loop("straight").trainer.step == 0
    with (
        Lock(tmp_path / "killed" / "snapshots"),
        pytest.raises(ValueError, match="another trainer"),
    ):
        resumed.run()


def test_the_result_says_whether_the_target_was_reached():
    far, near = (
        PretrainLoop(pretrain(target_val_loss=t), trainer(), batch, [batch(99)]).run()
        for t in (0.1, 9.0)
    )
    assert (far.status, far.reached_target) == (RunStatus.OK, False)
    best = min(e.val_loss for e in far.epochs)
    assert far.message == f"the best validation loss, {best:.4f}, is above the target 0.1"
    assert (near.status, near.reached_target, near.message) == (RunStatus.OK, True, "")


def test_epochs_have_full_length_and_leave_files(tmp_path):
    it = trainer()
    loop = PretrainLoop(pretrain(), it, batch, [batch(99)], tmp_path)
    result = loop.run()
    assert result.status is RunStatus.OK
    assert (len(result.epochs), it.step, len(result.steps)) == (3, 12, 12)
    assert it.metrics.learning_rates == [pretrain().schedule(n) for n in range(12)]
    for n, epoch in enumerate(result.epochs):
        assert epoch.tokens_seen == 64 * (n + 1)
        assert epoch.val_ppl == pytest.approx(math.exp(epoch.val_loss))
        steps = result.steps[4 * n : 4 * n + 4]
        assert epoch.grad_norm_max == max(s.grad_norm for s in steps)
        assert epoch.train_loss == pytest.approx(np.mean([s.train_loss for s in steps]))
    names = sorted(p.name for p in (tmp_path / "ckpt").iterdir())
    assert names == [f"epoch-00{n}.{end}" for n in range(3) for end in ("apr", "metadata.json")]
    saved = json.loads((tmp_path / "ckpt" / "epoch-002.metadata.json").read_text())
    assert saved["optimizer_state_sha"] == it.optimizer_state_sha256()


def test_gates_on_validation():
    it = trainer()
    aborted = PretrainLoop(pretrain(max_first_loss=1.0), it, batch, [batch(99)]).run()
    assert aborted.status is RunStatus.ABORTED
    assert aborted.message.startswith("DIVERGENCE at epoch 0: validation loss")
    assert aborted.epochs == []
    loop = PretrainLoop(pretrain(), trainer(), batch, [batch(99)])
    assert loop._divergence(3, 4.0, 2.0) is None  # exactly twice is allowed
    assert loop._divergence(3, 4.1, 2.0).startswith("DIVERGENCE at epoch 3")
    assert "not finite" in loop._divergence(1, math.nan, 2.0)


def test_a_step_that_is_not_finite_aborts_and_leaves_no_file(tmp_path):
    it = trainer()
    it.model.model.norm.weight.data = it.model.model.norm.weight.data * np.float32(np.nan)
    result = PretrainLoop(pretrain(), it, batch, [batch(99)], tmp_path).run()
    assert result.status is RunStatus.ABORTED
    assert result.message.startswith("DIVERGENCE at epoch 0: step 1")
    assert not (tmp_path / "ckpt").exists()


def test_patience_is_strict_and_waits_for_min_epochs():
    loop = PretrainLoop(pretrain(patience=1, min_epochs=3), trainer(), batch, [batch(99)])
    assert [loop.check_convergence(n, 1.0) for n in range(2)] == [False, False]
    assert loop.patience_count == 1
    assert loop.check_convergence(2, 1.0)
    assert not loop.check_convergence(3, 0.9)


def test_a_copy_that_cannot_be_written_only_warns(tmp_path):
    (tmp_path / "ckpt").touch()
    loop = PretrainLoop(pretrain(total_steps=4), trainer(), batch, [batch(99)], tmp_path)
    with pytest.warns(RuntimeWarning, match="was not written"):
        assert loop.run().status is RunStatus.OK
