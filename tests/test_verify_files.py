"""`afinar verify`: every file of a run that something reads must be what the run wrote."""

import hashlib
import json
import shutil

import pytest

from afinar.train import verify
from afinar.train.cli import main

TOY = ["--seq-len", "16", "--batch", "2", "--eval-rows", "2", "--threads", "1"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run, a base folder with a tokenizer made of it, and a LoRA run on that."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("files")
    data = folder / "data.txt"
    data.write_text("".join(f"{k} squared is {k * k} .\n" for k in range(200)))
    args = ["train", "--data", str(data), *TOY]
    plain = ["--preset", "tiny", "--steps", "6", "--eval-every", "2", "--snapshot-every", "2"]
    assert main([*args, *plain, "--out", str(folder / "run")]) == 0
    base = folder / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / "run" / name, base / name)
    words = ["[UNK]", "<s>", "</s>", "squared", "is", ".", *map(str, range(50))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(base / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    lora = ["--model", str(base), "--lora", "q_proj,v_proj", "--steps", "2"]
    assert main([*args, *lora, "--out", str(folder / "tuned")]) == 0
    return folder


@pytest.fixture
def run(original, tmp_path):
    shutil.copytree(original / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def tuned(original, tmp_path):
    shutil.copytree(original / "tuned", tmp_path / "tuned")
    return tmp_path / "tuned"


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def found(run, **options):
    """The one departure of a run."""
    (problem,) = verify(run, **options).problems
    return problem


def test_runs_that_nobody_touched_are_verified(run, tuned):
    for folder in (run, tuned):
        report = verify(folder)
        assert (report.problems, report.notes) == ([], [])


# --- the model in the folder ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 3.0}),
        ("rope_theta", 10001.0),
        ("sliding_window", 4),
        ("use_sliding_window", True),
        ("layer_types", ["sliding_attention"] * 2),
        ("eos_token_id", 5),
        ("bos_token_id", 7),
        ("pad_token_id", 3),
        ("initializer_range", 9.0),
        ("torch_dtype", "float16"),
        ("dtype", "bfloat16"),
        ("hidden_dropout", 0.4),
        ("foo", None),
    ],
)
def test_any_change_of_config_json_is_found(run, key, value):
    edit(run / "config.json", lambda c: c.update({key: value}))
    assert found(run).startswith(f"config.json: {key} is ")


def test_a_field_that_is_gone_from_config_json_is_found(run):
    edit(run / "config.json", lambda c: c.pop("attention_dropout"))
    assert found(run) == "config.json: attention_dropout is missing, the run's is 0.0"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_dropout", 0.5),
        ("fan_in_fan_out", True),
        ("layers_to_transform", [0, 1]),
        ("task_type", "X"),
        ("inference_mode", False),
        ("lora_alpha", 17),
        ("use_rslora", True),
        ("alpha_pattern", {"q_proj": 99}),
        ("revision", None),
        ("base_model_name_or_path", "/nowhere"),
    ],
)
def test_any_change_of_adapter_config_json_is_found(tuned, key, value):
    edit(tuned / "adapter_config.json", lambda c: c.update({key: value}))
    assert found(tuned)


def test_the_base_of_an_adapter_may_be_a_copy_and_nothing_else(original, tuned, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(original / "base", other)
    edit(
        tuned / "adapter_config.json",
        lambda c: c.update(base_model_name_or_path=str(other)),
    )
    assert verify(tuned).ok
    edit(other / "config.json", lambda c: c.update(rope_theta=5.0))
    assert f"{other} holds another config.json" in found(tuned)
    shutil.copy(original / "base" / "config.json", other / "config.json")
    (other / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert f"{other} holds another generation_config.json" in found(tuned)


COPIES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
COPIES.append("generation_config.json")


@pytest.mark.parametrize("name", COPIES)
def test_what_was_copied_must_be_what_was_there(tuned, name):
    path = tuned / name
    content = path.read_text()
    path.write_text(content + " ")
    assert found(tuned) == f"{name} is not what the run copied into {tuned}"
    path.unlink()
    assert found(tuned) == f"{name} is missing in {tuned}"


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "adapter_config.json",
        "adapter.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_a_file_that_the_run_did_not_write_is_found(run, name):
    (run / name).write_text("{}")
    assert found(run) == f"{run / name} is there, which the run has not written"


@pytest.mark.parametrize(
    "change", [{"rope_theta": 5.0}, {"max_position_embeddings": 600}, {"eos_token_id": 1}]
)
def test_a_changed_config_of_the_base_is_found(original, tmp_path, change, capsys):
    base, out = tmp_path / "base", tmp_path / "tuned"
    shutil.copytree(original / "base", base)
    args = ["--model", base, "--lora", "q_proj", "--steps", "1", "--out", out]
    args += ["--data", original / "data.txt"]
    assert main(["train", *map(str, args), *TOY]) == 0
    edit(base / "config.json", lambda c: c.update(change))
    assert main(["verify", str(out)]) == 1
    assert "config.json of the model that it started from differs" in capsys.readouterr().out


# --- the record ----------------------------------------------------------------------------


def rewrite(run, change):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(change(lines)) + "\n")


def forged(line, **values):
    return json.dumps(json.loads(line) | values)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda rows: [*rows[:2], forged(rows[2], loss=0.1), *rows[2:]], "line 4 is of step 3"),
        (lambda rows: [*rows, forged(rows[2], loss=0.1)], "line 7 is of step 3"),
        (lambda rows: rows[::-1], "line 1 is of step 6"),
        (lambda rows: [forged(rows[0], step=0), *rows], "line 1 is of step 0"),
        (lambda rows: [forged(rows[0], step=-1), *rows], "line 1 is of step -1"),
        (lambda rows: [forged(rows[0], step=True), *rows[1:]], "line 1 is of step True"),
        (lambda rows: [forged(rows[0], step="1"), *rows[1:]], "line 1 is of step '1'"),
        (lambda rows: [forged(rows[0], step=1.0), *rows[1:]], "line 1 is of step 1.0"),
        (lambda rows: [*rows[:2], "", *rows[2:]], "line 3: not JSON"),
        (lambda rows: ["[]", *rows[1:]], "line 1: an object is needed, given a list"),
        (lambda rows: ["{}", *rows[1:]], "line 1 has no step"),
        (lambda rows: [forged(rows[0], loss="y"), *rows[1:]], "line 1: loss is 'y'"),
        (lambda rows: [forged(rows[0], loss=float("nan")), *rows[1:]], "line 1: loss is nan"),
    ],
)
def test_rows_are_those_of_the_steps_in_order(run, change, line):
    rewrite(run, change)
    assert f"metrics.jsonl is damaged: {line}" in found(run)


def test_a_row_has_no_other_fields(run):
    rewrite(run, lambda rows: [*rows[:2], forged(rows[2], foo=None), *rows[3:]])
    assert found(run) == "step 3: metrics.jsonl has foo, which the replay does not give"


def test_a_row_after_the_end_is_found(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 0.0}')
    assert found(run) == "metrics.jsonl goes on after step 6, the last of the run"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d["steps"].insert(0, dict(d["steps"][2])), "step 0 stands after step"),
        (lambda d: d["steps"].insert(1, dict(d["steps"][1])), "stands after step"),
        (lambda d: d["steps"].insert(0, d["steps"][0] | {"step": -3}), "step -3 stands first"),
        (lambda d: d["steps"].append(d["steps"][2] | {"step": 300}), "goes on to step 300"),
        (lambda d: d.update(foo=1), "holds foo, which no run writes"),
        (lambda d: d.pop("files"), "does not say of which files"),
        (lambda d: d.update(steps=[1]), "1 is no record of a step"),
        (lambda d: d.update(steps={}), "steps is {}; a list is needed"),
        (lambda d: d["steps"][1].update(weights=1), "are not all texts"),
        (lambda d: d.pop("config"), "the config differs"),
    ],
)
def test_digests_are_those_of_the_steps_in_order(run, change, problem):
    edit(run / "digests.json", change)
    assert problem in found(run)


# --- snapshots -----------------------------------------------------------------------------


def reseal(run, change, step=4):
    """Change the state of a snapshot, with a hash that fits."""
    path = run / "snapshots" / f"step-{step:08}" / "state.json"
    state = json.loads(json.loads(path.read_text())["state"])
    change(state)
    text = json.dumps(state, indent=1)
    whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "state": text}
    path.write_text(json.dumps(whole))


CHANGES = [
    lambda s: s["rng"].update(seed=7),
    lambda s: s["config"].update(lr=7),
    lambda s: s["config"].update(foo=7),
    lambda s: s["model"].update(hidden_size=7),
    lambda s: s.update(frozen_sha256="7"),
    lambda s: s.update(schedule=[]),
    lambda s: s.update(more={}),
    lambda s: s["more"].update(run_id="0"),
    lambda s: s.update(version="9.9"),
    lambda s: s.update(trainer={}),
    lambda s: s.update(trainer="x"),
    lambda s: s["trainer"]["metrics"].update(losses=["x"]),
    lambda s: s["trainer"]["metrics"].update(foo=1),
    lambda s: s["trainer"].update(epoch=[]),
    lambda s: s["trainer"].update(windows=3),
    lambda s: s["optimizer"].update(lr="x"),
    lambda s: s["optimizer"].update(step_count=None),
    lambda s: s["digests"].update(weights="0"),
    lambda s: s["files"].pop("moments.safetensors"),
    lambda s: s.update(foo=1),
    lambda s: s.update(foo=None),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_field_of_a_snapshot_is_compared(run, change, capsys):
    reseal(run, change)
    assert "step-00000004" in found(run)
    assert main(["verify", str(run), "--from", "4"]) == 1
    assert "DEPARTS" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_mark_on_another_snapshot_is_found(run, name):
    right = (run / "snapshots" / name).read_text()
    assert right == "step-00000006"
    for wrong in ("step-00000004", "step-6", "6", "\xff"):
        (run / "snapshots" / name).write_text(wrong)
        assert f"does not name the {name} snapshot, {right}" in found(run)


def test_a_model_that_was_not_compared_is_named(run, capsys):
    assert main(["verify", str(run), "--from", "4", "--to", "5"]) == 0
    note = f"the model in {run} was not compared: the replay ended at step 5, the record ends at 6"
    assert f"note: {note}\n" in capsys.readouterr().out


# --- damaged files -------------------------------------------------------------------------

DAMAGED = [
    ("metrics.jsonl", b"[1]\n"),
    ("metrics.jsonl", b'{"loss": 1}\n'),
    ("metrics.jsonl", b'{"step": "x", "loss": "y"}\n'),
    ("metrics.jsonl", b"\xff\n"),
    ("digests.json", b"[]"),
    ("digests.json", b'{"steps": [1]}'),
    ("digests.json", b"\xff"),
    ("environment.json", b"[]"),
    ("environment.json", b'{"sessions": "abc"}'),
    ("environment.json", b'{"sessions": [{"steps": [1]}]}'),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_a_damaged_file_is_one_sentence(run, name, content, capsys):
    (run / name).write_bytes(content)
    for verb in (["report"], ["train", "--resume"]):
        assert main([*verb, str(run)]) == 2
        assert f"{name}" in capsys.readouterr().err.splitlines()[-1]
    assert main(["verify", str(run)]) == 1
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("change", CHANGES[9:17])
def test_a_damaged_state_is_not_resumed(run, change, capsys):
    for path in (run / "snapshots").glob("step-*"):
        if path.name != "step-00000004":
            shutil.rmtree(path)
    reseal(run, change)
    status = main(["train", "--resume", str(run)])
    assert status in (0, 2)
    if status == 2:
        assert "step-00000004" in capsys.readouterr().err


@pytest.mark.parametrize("left", [[".lock"], [".lock", ".probe"], [".lock", "run.toml.tmp"]])
def test_a_folder_of_a_run_killed_at_once_is_new(original, tmp_path, left):
    out = tmp_path / "run"
    out.mkdir()
    for name in left:
        (out / name).write_text("")
    args = ["train", "--preset", "tiny", "--steps", "1", "--data", str(original / "data.txt")]
    assert main([*args, *TOY, "--out", str(out)]) == 0
    assert not (out / ".probe").exists()
    assert not (out / "run.toml.tmp").exists()


def test_the_name_of_a_lone_file_says_nothing(original, run, tmp_path):
    shutil.copy(original / "data.txt", tmp_path / "other.txt")
    assert verify(run, data=tmp_path / "other.txt").ok
