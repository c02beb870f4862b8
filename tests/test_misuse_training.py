"""Misuse of trainers, snapshots and the command is one sentence, and nothing is left behind."""

import numpy as np
import pytest

from afinar.train import (
    LMBatch,
    TransformerTrainConfig,
    TransformerTrainer,
    load_snapshot,
    save_snapshot,
    verify,
)
from afinar.train.cli import main
from afinar.transformer import Transformer, TransformerConfig, save_pretrained


@pytest.fixture
def trainer():
    config = TransformerConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return TransformerTrainer(TransformerTrainConfig(model_config=config, lr=1e-3))


def test_a_failed_save_leaves_nothing_behind(trainer, tmp_path):
    with pytest.raises(TypeError, match="more has a value that JSON has not"):
        save_snapshot(tmp_path, trainer, {(1, 2): 3})
    assert [p.name for p in tmp_path.iterdir()] == []


def test_wrong_kinds_are_named(trainer, tmp_path):
    with pytest.raises(TypeError, match="config is a NoneType; a TransformerTrainConfig"):
        TransformerTrainer(None)
    with pytest.raises(TypeError, match="config is a dict; a TransformerTrainConfig"):
        TransformerTrainer.with_model(trainer.model, {})
    for method in (trainer.train_batch, trainer.compute_batch_gradients):
        with pytest.raises(TypeError, match="batch is a ndarray; an LMBatch is needed"):
            method(np.zeros((2, 4), np.int64))
    with pytest.raises(TypeError, match="keep is 'a'; a whole number"):
        save_snapshot(tmp_path, trainer, keep="a")
    for act in (save_snapshot, load_snapshot):
        with pytest.raises(TypeError, match="a TransformerTrainer is needed, given a NoneType"):
            act(tmp_path, None)
    with pytest.raises(TypeError, match="start is '2'; a whole number"):
        verify(tmp_path, start="2")
    with pytest.raises(TypeError, match=r"stop is 2\.5; a whole number"):
        verify(tmp_path, stop=2.5)
    trainer.train_batch(LMBatch.single([1, 2], [2, 3]))


@pytest.fixture
def model(tmp_path, trainer):
    assert isinstance(trainer.model, Transformer)
    save_pretrained(trainer.model, tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stop", ""], "--stop is empty"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--max-new-tokens", "9999"], "the model has 32"),
    ],
)
def test_generate_checks_its_options_before_it_prints(model, options, says, capsys):
    assert main(["generate", model, "--prompt", "hello", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


def test_eval_names_a_seq_len_that_is_too_long(model, tmp_path, capsys):
    (tmp_path / "d.txt").write_text("some text " * 30)
    args = ["eval", "--model", model, "--data", str(tmp_path / "d.txt"), "--seq-len"]
    assert main([*args, "33"]) == 2
    assert "--seq-len is 33; the model has 32 positions" in capsys.readouterr().err
    assert main([*args, "32"]) == 0
