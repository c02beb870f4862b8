"""Resuming gives the bits of the straight run, from any point, in every mode, after any kill."""

import json
import math
import os
import random
import resource
import shutil
import signal
import time
import warnings

import numpy as np
import pytest

from afinar.optim import weights_sha256
from afinar.train import (
    LMBatch,
    TransformerTrainConfig,
    TransformerTrainer,
    list_snapshots,
    load_snapshot,
    read_snapshot,
    save_snapshot,
)
from afinar.transformer import DecoderConfig, TransformerConfig

V = 40
LLAMA = TransformerConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=V,
    max_position_embeddings=32,
)
DROPPING = DecoderConfig(vocab=V, n_layer=1, n_head=2, d_model=16, block=16, dropout=0.2)

MODES = {
    "plain": {"model_config": LLAMA},
    "dropout": {"model_config": DROPPING},
    "lora": {"model_config": LLAMA, "lora_rank": 2},
    "lora_norms": {"model_config": LLAMA, "lora_rank": 2, "lora_train_norms": True},
    "fp16": {"model_config": LLAMA, "precision_config": "fp16"},
    "bf16": {"model_config": LLAMA, "precision_config": "bf16"},
    "checkpointed": {"model_config": LLAMA, "checkpoint_config": "blocks"},
}
BATCHES = 9


def make(mode="plain", **changes):
    fields = {"accumulation_steps": 2, "warmup_steps": 2, "max_steps": 8, "lr_schedule": "cosine"}
    return TransformerTrainer(TransformerTrainConfig(**{**fields, **MODES[mode], **changes}))


def batch(i):
    rng = np.random.default_rng(i)
    return LMBatch(rng.integers(0, V, (2, 8)), rng.integers(1, V, (2, 8)), rng.integers(1, 9, 2))


def digests(trainer):
    return weights_sha256(trainer.model), trainer.optimizer_state_sha256()


def go_on(trainer, stop=BATCHES):
    """Train up to batch `stop`; the digests after each window."""
    found = {}
    while trainer.batches < stop:
        trainer.train_batch(batch(trainer.batches))
        if not trainer.accumulated_batches:
            found[trainer.windows] = digests(trainer)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_any_stop_resumes_to_the_bits_of_the_straight_run(mode, tmp_path):
    straight = make(mode)
    expected = go_on(straight)
    for stop in range(BATCHES):
        stopped = make(mode)
        go_on(stopped, stop)
        path = save_snapshot(tmp_path / str(stop), stopped)
        resumed = make(mode, seed=42)
        load_snapshot(path, resumed)
        assert resumed.batches == stop - stop % 2  # a begun window is redone from its first batch
        assert go_on(resumed).items() <= expected.items()
        assert digests(resumed) == digests(straight)
        assert resumed.metrics == straight.metrics
        assert resumed.current_lr == straight.current_lr


def test_scaler_and_overflow_counters_resume(tmp_path):
    trainer = make("fp16", accumulation_steps=1)
    trainer.train_batch(batch(0))
    trainer.compute_batch_gradients(batch(1))
    trainer.optimizer.params[0].grad[:] = np.inf
    trainer.clip_and_step()
    assert trainer.grad_scaler_stats == (32768.0, 1, 1)
    save_snapshot(tmp_path, trainer)
    again = make("fp16", accumulation_steps=1)
    load_snapshot(tmp_path, again)
    assert again.scaler.state_dict() == trainer.scaler.state_dict()
    assert (again.overflows_in_a_row, again.step, again.windows) == (1, 1, 2)


def test_a_snapshot_holds_what_the_folder_says(tmp_path):
    trainer = make()
    go_on(trainer, 4)
    path = save_snapshot(tmp_path, trainer, {"data": "abc", "best": math.inf, "x": 0.1})
    assert path.name == "step-00000002"
    assert (tmp_path / "last").read_text() == path.name
    snapshot = read_snapshot(path)
    assert snapshot.more == {"data": "abc", "best": math.inf, "x": 0.1}
    assert snapshot.state["digests"] == dict(
        zip(["weights", "optimizer"], digests(trainer), strict=True)
    )
    assert snapshot.state["rng"] == {"seed": 42, "window": 2}
    assert snapshot.state["schedule"][0] == "WarmupCosineDecay"
    from safetensors.numpy import load_file  # the files are ordinary safetensors

    weights = load_file(path / "weights.safetensors")
    for name, p in trainer.model.named_parameters():
        assert (weights[name] == p.data).all()
    moments = load_file(path / "moments.safetensors")
    assert len(moments) == 2 * len(weights)


def test_the_last_and_the_best_are_kept(tmp_path):
    trainer = make(accumulation_steps=1)
    for n in range(6):
        trainer.train_batch(batch(n))
        save_snapshot(tmp_path, trainer, keep=2, best=n == 1)
    assert [p.name[-1] for p in list_snapshots(tmp_path)] == ["2", "5", "6"]
    again = make(accumulation_steps=1)
    load_snapshot(tmp_path, again, "best")
    assert again.step == 2
    load_snapshot(tmp_path, again)
    assert again.step == 6


def test_saving_the_same_step_again_replaces_it(tmp_path):
    trainer = make()
    save_snapshot(tmp_path, trainer, {"n": 1})
    path = save_snapshot(tmp_path, trainer, {"n": 2})
    assert read_snapshot(path).more == {"n": 2}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


# --- damage ---


def damages():
    def cut(p):
        p.write_bytes(p.read_bytes()[:-7])

    def flip(p):
        data = bytearray(p.read_bytes())
        data[-1] ^= 1
        p.write_bytes(data)

    for name in ("weights.safetensors", "moments.safetensors", "state.json"):
        for damage in (cut, flip, os.unlink):
            yield pytest.param(name, damage, id=f"{name} {damage.__name__}")


@pytest.mark.parametrize(("name", "damage"), list(damages()))
def test_a_damaged_snapshot_is_passed_over_for_the_one_before(tmp_path, name, damage):
    trainer = make(accumulation_steps=1)
    for n in range(3):
        trainer.train_batch(batch(n))
        save_snapshot(tmp_path, trainer)
    damage(tmp_path / "step-00000003" / name)
    again = make(accumulation_steps=1)
    with pytest.warns(RuntimeWarning, match="step-00000002 is used instead"):
        snapshot = load_snapshot(tmp_path, again)
    assert again.step == 2
    assert "step-00000003" in snapshot.notes[0]
    with pytest.raises(ValueError, match="step-00000003"):
        read_snapshot(tmp_path / "step-00000003")


def test_a_changed_state_is_found(tmp_path):
    path = save_snapshot(tmp_path, make()) / "state.json"
    whole = json.loads(path.read_bytes())
    whole["state"] = whole["state"].replace('"batches": 0', '"batches": 2')
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="no usable snapshot"):
        load_snapshot(tmp_path, make())


def test_nothing_to_load(tmp_path):
    with pytest.raises(ValueError, match="holds no last snapshot"):
        load_snapshot(tmp_path, make())
    save_snapshot(tmp_path, make())
    with pytest.raises(ValueError, match="holds no best snapshot"):
        load_snapshot(tmp_path, make(), "best")


# --- what may differ ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 1e-2}, "lr was 0.001, is 0.01"),
        ({"seed": 1}, "seed was 42, is 1"),
        ({"max_steps": 9}, "max_steps was 8, is 9"),
        ({"precision_config": "bf16"}, "precision_config"),
        ({"lora_rank": 2}, "lora_rank was None, is 2"),
        ({"model_config": DROPPING}, "another model"),
    ],
)
def test_what_would_compute_something_else_is_refused(tmp_path, changes, message):
    save_snapshot(tmp_path, make())
    trainer = make(**changes)
    before = digests(trainer)
    with pytest.raises(ValueError, match=message):
        load_snapshot(tmp_path, trainer)
    assert digests(trainer) == before


def test_what_is_harmless_is_reported(tmp_path):
    save_snapshot(tmp_path, make())
    with pytest.warns(RuntimeWarning, match="log_interval was 10, is 5"):
        snapshot = load_snapshot(tmp_path, make(log_interval=5))
    assert len(snapshot.notes) == 1


def test_another_version_is_reported(tmp_path, monkeypatch):
    save_snapshot(tmp_path, make())
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    with pytest.warns(RuntimeWarning, match=r"saved by afinar .*, this is 9\.9"):
        load_snapshot(tmp_path, make())


def test_a_constant_schedule_may_go_on_for_longer(tmp_path):
    save_snapshot(tmp_path, make(lr_schedule="constant"))
    with pytest.warns(RuntimeWarning, match="max_steps was 8, is 9"):
        load_snapshot(tmp_path, make(lr_schedule="constant", max_steps=9))


def test_other_frozen_weights_are_refused(tmp_path):
    save_snapshot(tmp_path, make("lora"))
    trainer = make("lora")
    frozen = next(p for p in trainer.model.parameters() if not p.requires_grad)
    frozen.data = frozen.data + np.float32(1)
    with pytest.raises(ValueError, match="other frozen weights"):
        load_snapshot(tmp_path, trainer)


# --- a machine that fails ---


def test_a_full_disk_is_an_error_and_leaves_the_snapshot_before(tmp_path):
    trainer = make(accumulation_steps=1)
    trainer.train_batch(batch(0))
    save_snapshot(tmp_path, trainer)
    expected = digests(trainer)
    trainer.train_batch(batch(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(RuntimeError, match="cannot be written"):
            save_snapshot(tmp_path, trainer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step-00000001"]
    again = make(accumulation_steps=1)
    load_snapshot(tmp_path, again)
    assert digests(again) == expected


def test_an_unwritable_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="cannot be written"):
        save_snapshot(tmp_path / "file" / "snapshots", make())


def kill_and_resume(folder, steps, kills, seed):
    """Run in children that are killed at random moments; how many kills it took."""
    rng, done = random.Random(seed), 0
    last_seen = 0
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a threaded process forks: the child starts no thread
            child = os.fork()
        if child == 0:
            status = 1
            try:
                trainer = make(accumulation_steps=1)
                if list_snapshots(folder):
                    load_snapshot(folder, trainer)
                while trainer.batches < steps:
                    trainer.train_batch(batch(trainer.batches % 50))
                    save_snapshot(folder, trainer, keep=2)
                status = 0
            finally:
                os._exit(status)
        if done < kills:
            time.sleep(rng.uniform(0.02, 0.12))
            os.kill(child, signal.SIGKILL)
            done += 1
        _, status = os.waitpid(child, 0)
        if list_snapshots(folder):
            trainer = make(accumulation_steps=1)
            load_snapshot(folder, trainer)  # a warning of a damaged one would be an error here
            assert trainer.step >= last_seen
            last_seen = trainer.step
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            if done >= kills:
                return
            shutil.rmtree(folder)
            last_seen = 0


def in_a_child_that_kills_itself(action):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_while_a_snapshot_is_replaced_loses_no_step(tmp_path, monkeypatch, renames, earlier):
    """The same step is saved twice; the kill comes before, between or after its two renames."""
    trainer = make(accumulation_steps=1)
    if earlier:
        save_snapshot(tmp_path, trainer)
    trainer.train_batch(batch(0))
    target = save_snapshot(tmp_path, trainer, {"n": 1})
    expected = digests(trainer)
    rename, done = type(target).rename, []

    def counted(path, to):
        if len(done) == renames:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(path)
        return rename(path, to)

    def killed():
        monkeypatch.setattr(type(target), "rename", counted)
        save_snapshot(tmp_path, trainer, {"n": 2})
        os.kill(os.getpid(), signal.SIGKILL)

    in_a_child_that_kills_itself(killed)
    assert target.exists() == (renames != 1)
    again = make(accumulation_steps=1)
    snapshot = load_snapshot(tmp_path, again)
    assert digests(again) == expected
    assert snapshot.more == {"n": 2 if renames == 2 else 1}
    assert snapshot.notes == []
    again.train_batch(batch(1))
    save_snapshot(tmp_path, again)
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_lose_nothing(tmp_path, kills):
    folder = tmp_path / "snapshots"
    straight = make(accumulation_steps=1)
    for n in range(60):
        straight.train_batch(batch(n % 50))
    kill_and_resume(folder, 60, kills, seed=kills)
    again = make(accumulation_steps=1)
    load_snapshot(folder, again)
    assert digests(again) == digests(straight)
    assert [p.name for p in folder.iterdir() if p.name.endswith(".tmp")] == []
