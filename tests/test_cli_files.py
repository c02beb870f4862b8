"""The command on folders and files as users have them, whole and broken."""

import json
import shutil

import numpy as np
import pytest

from afinar.lora import LoRAConfig, adapter_params, apply_lora, save_adapter, save_adapter_peft
from afinar.train.cli import main
from afinar.transformer import Transformer, TransformerConfig, load_pretrained, save_pretrained

CONFIG = TransformerConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save_pretrained(Transformer(CONFIG, seed=1), folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """One adapter as PEFT's folder, as a native folder and as its file."""
    model = load_pretrained(base)
    apply_lora(model, LoRAConfig(r=2, alpha=4, targets=("q", "mlp_out")))
    rng = np.random.default_rng(0)
    for p in adapter_params(model):
        p.data = p.data + (0.3 * rng.standard_normal(p.shape)).astype(np.float32)
    peft = save_adapter_peft(model, tmp_path_factory.mktemp("peft"))
    native = save_adapter(model, tmp_path_factory.mktemp("native") / "adapter.safetensors")
    renamed = save_adapter(model, tmp_path_factory.mktemp("renamed") / "mine.safetensors")
    return {"peft": peft, "native": native.parent, "file": renamed}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a line of text, and another\n" * 20)
    return path


def fails(capsys, *args):
    """The one line that a call with bad input prints."""
    assert main([str(a) for a in args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("afinar: error: ")
    assert err.count("\n") == 1
    assert "Errno" not in err
    return err


def test_every_kind_of_adapter_gives_the_same(base, adapters, text, tmp_path, capsys):
    said = {}
    for kind, adapter in adapters.items():
        options = ["--model", str(base), "--adapter", str(adapter)]
        assert main(["eval", *options, "--data", str(text), "--seq-len", "32"]) == 0
        score = capsys.readouterr().out
        prompt = ["--prompt", "a line", "--temperature", "0", "--max-new-tokens", "9"]
        assert main(["generate", str(base), *options[2:], *prompt]) == 0
        new = capsys.readouterr().out
        merged = tmp_path / kind
        assert main(["merge", *options, "--out", str(merged)]) == 0
        capsys.readouterr()
        said[kind] = score, new, (merged / "model.safetensors").read_bytes()
    assert said["peft"] == said["native"] == said["file"]


@pytest.mark.parametrize("verb", ["merge", "eval", "generate"])
def test_adapters_that_are_none(verb, base, text, tmp_path, capsys):
    more = {
        "merge": ["--model", base, "--out", tmp_path / "out"],
        "eval": ["--model", base, "--data", text],
        "generate": [base, "--prompt", "a"],
    }[verb]
    empty = tmp_path / "empty"
    empty.mkdir()
    for adapter in (tmp_path / "nofolder", empty, base, text):
        assert str(adapter) in fails(capsys, verb, *more, "--adapter", adapter)
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model(adapters, text, tmp_path, capsys):
    import dataclasses

    other = dataclasses.replace(CONFIG, num_hidden_layers=3, hidden_size=32)
    save_pretrained(Transformer(other), tmp_path / "other")
    for adapter in adapters.values():
        err = fails(
            capsys, "eval", "--model", tmp_path / "other", "--data", text, "--adapter", adapter
        )
        assert "layers.2" in err


def test_a_tokenizer_that_is_no_tokenizer_json(base, text, tmp_path, capsys):
    folder = shutil.copytree(base, tmp_path / "model")
    (folder / "vocab.json").write_text("{}")
    for args in (
        ("eval", "--model", folder, "--data", text),
        ("generate", folder, "--prompt", "a"),
        ("train", "--model", folder, "--data", text, "--out", tmp_path / "out"),
        ("data", "show", text, "--model", folder),
    ):
        assert "has vocab.json but no tokenizer.json" in fails(capsys, *args)
    (folder / "vocab.json").rename(folder / "tokenizer.json")
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "tokenizer.json is a Git LFS pointer" in fails(
        capsys, "eval", "--model", folder, "--data", text
    )


def test_more_ids_than_the_model_has(text, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    import dataclasses

    vocab = {chr(n): n for n in range(32, 127)} | {"\n": 0, "é": 200}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    folder = tmp_path / "model"
    save_pretrained(Transformer(dataclasses.replace(CONFIG, vocab_size=128)), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert main(["eval", "--model", str(folder), "--data", str(text), "--seq-len", "16"]) == 0
    capsys.readouterr()
    text.write_text("é" * 40)
    err = fails(capsys, "eval", "--model", folder, "--data", text, "--seq-len", 16)
    assert "200" in err
    assert "127" in err
    err = fails(capsys, "generate", folder, "--prompt", "é")
    assert "id 200 is outside the vocabulary, 0 .. 127" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--top-k", "0"], "top_k is 0"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["--max-new-tokens", "9999"], "positions, the model has 64"),
        (["--prompt", ""], "--prompt is empty"),
    ],
)
def test_generation_options_out_of_range(args, message, base, capsys):
    assert message in fails(capsys, "generate", base, "--prompt", "a", *args)


def test_folders_that_are_broken(base, text, tmp_path, capsys):
    folder = shutil.copytree(base, tmp_path / "model")

    def refused(change):
        shutil.copytree(base, folder, dirs_exist_ok=True)
        change()
        return fails(capsys, "eval", "--model", folder, "--data", text)

    config, weights = folder / "config.json", folder / "model.safetensors"
    values = json.loads(config.read_text())
    for change, message in (
        (lambda: config.write_text("{"), "config.json: not JSON"),
        (lambda: config.write_text(json.dumps(values | {"rms_norm_eps": "x"})), "rms_norm_eps"),
        (
            lambda: config.write_text(json.dumps(values | {"vocab_size": 10**12})),
            "(1000000000000, 16)",
        ),
        (
            lambda: config.write_text(json.dumps(values | {"num_hidden_layers": 10**9})),
            "says 1000000000 layers",
        ),
        (lambda: weights.write_bytes(weights.read_bytes()[:-4]), "is cut off"),
        (lambda: weights.write_bytes(b""), "not a safetensors file"),
        (lambda: weights.write_bytes(b"version https://git-lfs.github.com/spec/v1"), "Git LFS"),
    ):
        assert message in refused(change)
