"""`afinar verify`: a run replays to its own digests, and every kind of tampering is found."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from afinar.train import MetricsTracker, verify
from afinar.train.cli import main

TOY = ["--preset", "tiny", "--lr", "3e-3", "--batch", "2", "--seq-len", "16", "--steps", "6"]
TOY += ["--eval-every", "3", "--eval-rows", "2", "--digest-every", "2", "--snapshot-every", "3"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A finished run beside its data."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "data.txt").write_text("".join(f"{k} squared is {k * k}.\n" for k in range(200)))
    args = ["--data", str(folder / "data.txt"), "--out", str(folder / "run"), "--threads", "1"]
    assert main(["train", *TOY, *args]) == 0
    return folder


@pytest.fixture
def run(original, tmp_path):
    """A copy to tamper with; its data stays where it is."""
    shutil.copytree(original / "run", tmp_path / "run")
    return tmp_path / "run"


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_run_replays_at_any_number_of_threads(run):
    for threads in (2, 1):
        report = verify(run, threads=threads)
        assert report.ok
        assert (report.start, report.stop, report.compared) == (0, 6, 5)


def test_a_part_between_snapshots_replays(run, capsys):
    assert main(["verify", str(run), "--from", "3", "--to", "4"]) == 0
    assert "steps 3 to 4" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match="no snapshot of step 2 to start from; it has those of 3, 6"
    ):
        verify(run, start=2)
    with pytest.raises(ValueError, match=r"steps 0 to 7 were asked for; the record .* 0 to 6"):
        verify(run, stop=7)


def test_moved_data_is_given_by_hand(original, run, tmp_path):
    shutil.copy(original / "data.txt", tmp_path / "data.txt")
    assert verify(run, data=tmp_path / "data.txt").ok


def test_missing_data_is_bad_input(run, tmp_path, capsys):
    assert main(["verify", str(run), "--data", str(tmp_path / "gone")]) == 2
    assert "neither a file nor a folder" in capsys.readouterr().err


def test_changed_data_is_found(run, original, tmp_path, capsys):
    text = (original / "data.txt").read_text()
    (tmp_path / "data.txt").write_text(text.replace("49", "50"))
    assert main(["verify", str(run), "--data", str(tmp_path / "data.txt")]) == 1
    assert "the data differs" in capsys.readouterr().out


def test_changed_weights_are_found(run):
    weights = load_file(run / "model.safetensors")
    weights["model.norm.weight"][5] = np.nextafter(weights["model.norm.weight"][5], np.float32(9))
    save_file(weights, run / "model.safetensors", {"format": "pt"})
    assert verify(run).problems == [f"the weights in {run} are not those of step 6"]


def test_changed_settings_are_found(run):
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text.replace("lr = 0.003", "lr = 0.004"))
    assert "run.toml does not hold the settings" in verify(run).problems[0]
    edit(run / "digests.json", lambda d: d.update(settings=_settings_sha(run)))
    # Even with a settings hash that fits, the replay departs.
    assert "step 1: lr departs" in verify(run).problems[0]


def _settings_sha(run):
    from afinar.train.folder import RunFolder
    from afinar.train.run import settings_sha256

    return settings_sha256(RunFolder.open(run).settings())


def test_changed_model_config_is_found(run):
    edit(run / "config.json", lambda c: c.update(rms_norm_eps=1e-5))
    assert verify(run).problems == ["config.json: rms_norm_eps is 1e-05, the run's is 1e-06"]


@pytest.mark.parametrize("what", ["weights", "optimizer"])
def test_a_changed_digest_is_found(run, what):
    def change(record):
        step = record["steps"][2]
        step[what] = step[what][:-1] + ("0" if step[what][-1] != "0" else "1")

    edit(run / "digests.json", change)
    assert verify(run).problems == [f"step 3: the digest of the {what} departs"]


def test_a_changed_tensor_is_named(run):
    name = "model.layers.1.mlp.up_proj.weight"

    def change(record):
        tensors = record["steps"][1]["tensors"]
        first, second, third = tensors[name].split()
        tensors[name] = f"{first} {second[::-1]} {third}"

    edit(run / "digests.json", change)
    assert verify(run).problems == [f"step 2: the first moments of {name} depart"]


def test_a_left_out_digest_is_found(run):
    edit(run / "digests.json", lambda d: d["steps"].pop(1))
    assert verify(run).problems == ["digests.json has no digests of step 2"]


def test_a_changed_seed_is_found(run):
    edit(run / "digests.json", lambda d: d.update(seed=7))
    assert verify(run).problems == ["the seed differs: recorded 7, now 42"]


def test_changed_metrics_are_found(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[3])
    row["loss"] -= 1e-7
    lines[3] = json.dumps(row)
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "step 4: loss departs" in verify(run).problems[0]


def test_a_left_out_step_is_found(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:4] + lines[5:]) + "\n")
    (problem,) = verify(run).problems
    assert problem.endswith("metrics.jsonl is damaged: line 5 is of step 6")


def test_a_changed_snapshot_is_found(run):
    path = run / "snapshots" / "step-00000003" / "moments.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "is not what was written" in verify(run).problems[0]
    assert "is not what was written" in verify(run, start=3).problems[0]


def test_a_run_of_a_changed_model_is_found(original, tmp_path, capsys):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    shutil.copytree(original / "run", base)
    args = ["--model", base, "--data", original / "data.txt", "--out", tuned, "--steps", "1"]
    assert main(["train", *map(str, args), "--batch", "2", "--seq-len", "16"]) == 0
    assert verify(tuned).ok
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert "the model differs" in verify(tuned).problems[0]
    assert main(["verify", str(tuned)]) == 1
    shutil.rmtree(base)
    assert main(["verify", str(tuned)]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_weights_that_cannot_be_read_depart_and_missing_ones_are_bad_input(
    original, tmp_path, capsys
):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    shutil.copytree(original / "run", base)
    args = ["--model", base, "--data", original / "data.txt", "--out", tuned, "--steps", "1"]
    args += ["--lora", "qv", "--batch", "2", "--seq-len", "16"]
    assert main(["train", *map(str, args)]) == 0
    whole = (base / "model.safetensors").read_bytes()
    config = (base / "config.json").read_bytes()
    for content in (whole[:-5], whole[:100], b"", b"x" * 100):
        (base / "model.safetensors").write_bytes(content)
        capsys.readouterr()
        assert main(["verify", str(tuned)]) == 1
        out = capsys.readouterr().out
        assert f"DEPARTS: the model that it started from, {base}, cannot be read (" in out
    (base / "model.safetensors").write_bytes(whole)
    (base / "config.json").write_text("{")
    assert main(["verify", str(tuned)]) == 1
    (base / "config.json").write_bytes(config)
    assert main(["verify", str(tuned)]) == 0
    (base / "model.safetensors").unlink()
    capsys.readouterr()
    assert main(["verify", str(tuned)]) == 2
    assert str(base) in capsys.readouterr().err
    (base / "model.safetensors").write_bytes(whole)
    (base / "config.json").unlink()
    assert main(["verify", str(tuned)]) == 2


# --- runs that were not done to their end ---


def killed(run, step, *, model=False):
    """What a kill after the row of `step` leaves of a run."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:step]))
    edit(
        run / "digests.json", lambda d: d.update(steps=[r for r in d["steps"] if r["step"] < step])
    )
    for path in (run / "snapshots").glob("step-*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    if not model:
        for name in ("environment.json", "model.safetensors", "config.json"):
            (run / name).unlink()


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_killed_run_is_compared_as_far_as_it_went(run, step, capsys):
    killed(run, step)
    report = verify(run)
    assert report.problems == []
    assert (report.start, report.stop) == (0, step)
    assert report.notes[0] == f"the run ended early: after step {step} of 6"
    assert main(["verify", str(run)]) == 0
    assert "note: the run ended early" in capsys.readouterr().out
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    row["grad_norm"] += 1e-6
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    assert verify(run).problems[0].startswith(f"step {step}: grad_norm departs")


def test_a_run_killed_before_it_wrote_its_model(run):
    (run / "environment.json").unlink()
    (run / "model.safetensors").unlink()
    report = verify(run)
    assert report.problems == []
    assert report.notes == ["the run ended before it wrote its model: there is none to compare"]


def test_a_resumed_run_that_was_killed_holds_the_model_of_its_first_end(run, tmp_path):
    """The model is of step 3, where the run was stopped; it went on to step 5."""
    killed(run, 5, model=True)
    edit(run / "environment.json", lambda e: e["sessions"][0].update(steps=[1, 3]))
    assert "the weights" in verify(run).problems[0]  # of step 6: neither of step 3 nor of 5
    part = run / "snapshots" / "step-00000003" / "weights.safetensors"
    weights = load_file(part)
    save_file(weights, run / "model.safetensors", {"format": "pt"})
    report = verify(run)
    assert report.problems == []
    assert report.notes == ["the run ended early: after step 5 of 6"]
    assert verify(run, start=3).problems == []


def test_a_record_cut_short_is_not_taken_for_a_killed_run(run):
    killed(run, 5, model=True)
    assert "the run went on to step 6; the record ends at 5" in verify(run).problems[0]


def test_a_record_beyond_the_end_of_patience_is_found(run):
    text = (run / "run.toml").read_text()
    (run / "run.toml").write_text(text + "patience = 1\n")
    shutil.rmtree(run / "snapshots")
    edit(run / "digests.json", lambda d: d.update(settings=_settings_sha(run)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MetricsTracker, "validations_since_best", property(lambda m: len(m.val_losses))
        )
        assert verify(run).problems == ["step 3: --patience ends the run here, the record goes on"]


def test_a_changed_state_of_a_snapshot_is_found(run):
    """Even with a hash that fits."""
    path = run / "snapshots" / "step-00000003" / "state.json"
    whole = json.loads(path.read_text())
    whole["state"] = whole["state"].replace('"overflows_in_a_row": 0', '"overflows_in_a_row": 7')
    whole["sha256"] = hashlib.sha256(whole["state"].encode()).hexdigest()
    path.write_text(json.dumps(whole))
    assert "step-00000003 departs in the state of the trainer" in verify(run).problems[0]


def test_what_is_no_run_is_bad_input(tmp_path):
    with pytest.raises(ValueError, match="is not a run"):
        verify(tmp_path)


def test_data_that_became_too_short_departs(run, tmp_path, capsys):
    """Present with another hash: status 1, even if no run could be made of it."""
    short = tmp_path / "short.txt"
    short.write_text("x")
    assert main(["verify", str(run), "--data", str(short)]) == 1
    assert "the data differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content"),
    [("digests.json", '{"steps": []}'), ("metrics.jsonl", "{}\n"), ("run.toml", "what = 1\n")],
)
def test_a_record_that_cannot_be_read_departs(run, name, content, capsys):
    (run / name).write_text(content)
    assert main(["verify", str(run)]) == 1
    assert "DEPARTS" in capsys.readouterr().out
