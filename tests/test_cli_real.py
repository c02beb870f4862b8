"""The command on a real model: SmolLM2-135M-Instruct, in the folder named by AFINAR_SMOLLM2."""

import json
import os
from pathlib import Path

import pytest

from afinar.train.cli import main

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        "AFINAR_SMOLLM2" not in os.environ, reason="AFINAR_SMOLLM2 names no SmolLM2 folder"
    ),
]


@pytest.fixture(scope="module")
def base():
    return os.environ["AFINAR_SMOLLM2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, n in (("train", 12), ("valid", 4)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for k in range(n):
                messages = [
                    {"role": "user", "content": f"What is {k} plus {k}?"},
                    {"role": "assistant", "content": f"It is {2 * k}, by my abacus."},
                ]
                file.write(json.dumps({"messages": messages}) + "\n")
    return folder


def test_greedy_continuation(base, capsys):
    args = ["--prompt", "The capital of France is", "--max-new-tokens", "3", "--temperature", "0"]
    assert main(["generate", base, *args]) == 0
    assert capsys.readouterr().out.startswith("The capital of France is Paris.")


def test_only_replies_of_a_chat_are_trained(base, data, capsys):
    args = ["--model", base, "--seq-len", "64", "--rows", "1"]
    assert main(["data", "show", str(data), *args]) == 0
    row = capsys.readouterr().out.partition("--- row 0\n")[2]
    assert "<|im_start|>assistant\n⟦It is" in row
    assert "by my abacus.<|im_end|>" in row.partition("⟦")[2].partition("⟧")[0]
    assert "What is" not in row.partition("⟦")[2].partition("⟧")[0]


def test_fine_tune_evaluate_merge(base, data, tmp_path, capsys):
    run, merged = tmp_path / "run", tmp_path / "merged"
    train = ["--model", base, "--data", data, "--lora", "q_proj,v_proj", "--out", run]
    train += ["--steps", "6", "--batch", "1", "--seq-len", "64", "--warmup", "1", "--lr", "2e-3"]
    assert main(["train", *map(str, train), "--snapshot-every", "3", "--eval-every", "6"]) == 0
    out = capsys.readouterr().out
    assert "trainable params: 460,800" in out
    assert "tok/s" in out
    merge = ["--model", base, "--adapter", run, "--out", merged]
    assert main(["merge", *map(str, merge)]) == 0
    names = {p.name for p in merged.iterdir()}
    copied = {p.name for p in Path(base).iterdir()} & {"tokenizer.json", "generation_config.json"}
    assert copied | {"config.json", "model.safetensors"} <= names
    capsys.readouterr()
    losses = []
    for model in ([base], [base, "--adapter", run], [merged]):
        call = ["eval", "--data", data, "--seq-len", "64", "--model", *model]
        assert main([str(a) for a in call]) == 0
        losses.append(float(capsys.readouterr().out.split()[1]))
    assert losses[1] < losses[0] - 0.3
    assert losses[1] == pytest.approx(losses[2], abs=1e-3)


@pytest.mark.parity
def test_a_merged_model_opens_in_transformers(base, data, tmp_path):
    transformers = pytest.importorskip("transformers")
    run, merged = tmp_path / "run", tmp_path / "merged"
    train = ["--model", base, "--data", data, "--lora", "qv", "--out", run, "--steps", "1"]
    assert main(["train", *map(str, train), "--batch", "1", "--seq-len", "64"]) == 0
    args = ["--model", base, "--adapter", run, "--out", merged]
    assert main(["merge", *map(str, args)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model.generate(ids, max_new_tokens=2, do_sample=False)[0]).endswith(
        " Paris."
    )
