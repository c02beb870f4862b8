"""The `afinar` command, at toy size."""

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import warnings

import pytest

from afinar.autograd import set_num_threads
from afinar.train import read_snapshot
from afinar.train.cli import main
from afinar.train.folder import RunFolder
from afinar.train.run import OF_THE_MACHINE

TOY = [
    "--preset",
    "tiny",
    "--lr",
    "3e-3",
    "--batch",
    "2",
    "--seq-len",
    "16",
    "--steps",
    "6",
    "--warmup",
    "2",
]
TOY += ["--eval-every", "3", "--eval-rows", "2", "--digest-every", "2", "--snapshot-every", "3"]


pytestmark = pytest.mark.usefixtures("one_thread_per_module")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{k} squared is {k * k}.\n" for k in range(200)))
    return path


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A finished run; tests only read it."""
    out = tmp_path_factory.mktemp("runs") / "toy"
    assert main(["train", *TOY, "--data", str(text), "--out", str(out)]) == 0
    return out


def error(capsys, *args):
    """The one line that a call with bad input prints."""
    assert main([str(a) for a in args]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("afinar: error: ")
    return lines[0]


def without_machine(rows):
    return [{k: v for k, v in row.items() if k not in OF_THE_MACHINE} for row in rows]


# --- train ---


def test_a_run_folder_holds_what_it_should(run):
    names = {p.name for p in run.iterdir()} - {".lock"}
    assert names == {
        "run.toml",
        "metrics.jsonl",
        "metrics.csv",
        "digests.json",
        "environment.json",
        "snapshots",
        "loss.svg",
        "sample.txt",
        "model.safetensors",
        "config.json",
    }
    folder = RunFolder.open(run)
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "val_loss" in row] == [3, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (run / "metrics.csv").read_text().startswith("step,loss,lr,grad_norm,tokens,")
    assert json.loads((run / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (run / "loss.svg").read_text().startswith("<svg")
    assert "squa" in (run / "sample.txt").read_text()


def test_the_record_holds_only_what_is_equal_everywhere(run):
    record = json.loads((run / "digests.json").read_text())
    head = {"seed", "settings", "data", "tokenizer", "model", "config", "files"}
    assert set(record) == {*head, "steps"}
    assert [r["step"] for r in record["steps"]] == [0, 2, 3, 4, 6]
    assert record["steps"][0]["weights"] == record["model"]
    assert set(record["steps"][0]) == {"step", "weights", "optimizer", "tensors"}


def test_the_first_step_uses_a_positive_rate_after_warmup_from_zero(run):
    # lr(0) = 0 under warmup, as Hugging Face's schedules; then lr / 2, then lr.
    rates = [row["lr"] for row in RunFolder.open(run).metrics()]
    assert rates[:3] == [0.0, 0.0015, 0.003]


def test_threads_and_a_config_file_give_the_same_record(run, text, tmp_path):
    out = tmp_path / "again"
    config = ["--config", str(run / "run.toml"), "--out", str(out)]
    assert main(["train", *config, "--threads", "2"]) == 0
    set_num_threads(1)
    assert (out / "digests.json").read_bytes() == (run / "digests.json").read_bytes()
    assert (out / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_plain_lines_when_it_is_no_terminal(text, tmp_path, capsys):
    args = ["train", *TOY, "--steps", "2", "--data", str(text), "--out", str(tmp_path / "r")]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "\r" not in out
    assert "1 thread, vectors of " in out
    assert "threading layer" in out
    line = next(line for line in out.splitlines() if line.startswith("step 2/2"))
    for word in ("loss ", "val ", "lr ", "norm ", "tok/s", "ETA "):
        assert word in line


def test_without_out_a_new_numbered_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for n in ("001", "002"):
        assert main(["train", *TOY, "--steps", "1", "--data", str(text)]) == 0
        assert (tmp_path / "runs" / n / "model.safetensors").is_file()


def test_flags_win_over_the_config_file(text, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(
        'preset = "tiny"\nsteps = 9\nbatch = 2\nseq_len = 16\nlr = 1e-5\nwarmup = 0\n'
    )
    args = ["--config", str(config), "--data", str(text), "--out", str(tmp_path / "r")]
    assert main(["train", *args, "--steps", "1"]) == 0
    written = tomllib.loads((tmp_path / "r" / "run.toml").read_text())
    assert (written["steps"], written["lr"], written["seed"]) == (1, 1e-5, 42)
    assert written["data"] == str(text)


def test_training_goes_on_from_a_run(run, text, tmp_path):
    out = tmp_path / "tuned"
    args = ["--model", str(run), "--data", str(text), "--out", str(out), "--steps", "1"]
    assert main(["train", *args, "--batch", "2", "--seq-len", "16"]) == 0
    start = json.loads((out / "digests.json").read_text())["model"]
    assert start == json.loads((run / "digests.json").read_text())["steps"][-1]["weights"]


# --- bad input: one sentence, exit status 2, nothing left behind ---


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--data", "nowhere"], "nowhere is neither a file nor a folder"),
        (["--data", "EMPTY"], "holds no text"),
        (["--data", "SHORT"], "fewer than one sequence needs"),
        (["--data", "SHORT", "--seq-len", "2", "--batch", "9"], "fewer than a batch of 9"),
        (["--seq-len", "4096"], "the model has 512 positions"),
        (["--preset", "huge"], "known presets are tiny, llama2_7b"),
        (["--lr", "0"], "--lr is 0.0; it must be above 0"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--lora", "q_proj"], "name it with --model"),
        (["--model", "x"], "pick one"),
        (["--storage", "bfloat16"], "use --lora"),
        (["--checkpointing", "some"], "the policy is one of"),
        (["--threads", "100000"], "100000 asked for"),
        (["--patience", "0"], "--patience is 0; it must be at least 1"),
        (["--weight-decay", "inf"], "--weight-decay is inf; it must be 0 or more"),
        (["--lr", "nan"], "--lr is nan; it must be above 0"),
        (["--config", "UNKNOWN"], "unknown keys learning_rate, speed; known are data, model"),
        (["--config", "TYPE"], "batch must be int, not '4'"),
        (["--config", "CHOICE"], "precision must be one of fp32, bf16, fp16"),
        (["--config", "BROKEN"], "is not TOML"),
        (["--config", "nowhere.toml"], "cannot be read"),
        (["--device", "gpu"], "GPU"),
        (["--resume", "nowhere"], "is not a run"),
    ],
)
def test_bad_input(args, says, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {
        "EMPTY": "",
        "SHORT": "short",
        "UNKNOWN": "learning_rate = 1\nspeed = 2\n",
        "TYPE": "batch = '4'\n",
        "CHOICE": "precision = 'fp8'\n",
        "BROKEN": "= 1\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    defaults = ["--data", str(text), "--preset", "tiny", "--out", "out"]
    assert says in error(capsys, "train", *defaults, *args)
    assert not (tmp_path / "out").exists()


def test_a_run_that_exists_is_not_overwritten(run, text, capsys):
    before = (run / "model.safetensors").read_bytes()
    message = error(capsys, "train", *TOY, "--data", text, "--out", run)
    assert "exists already; give another --out, or continue it with --resume" in message
    assert (run / "model.safetensors").read_bytes() == before


def test_a_folder_that_cannot_be_written(text, capsys):
    message = error(capsys, "train", *TOY, "--data", text, "--out", text / "inside")
    assert "cannot be written" in message


def test_a_second_writer_is_refused(run, capsys):
    with RunFolder.open(run).locked():
        message = error(capsys, "train", "--resume", run)
    assert "is being written by another trainer" in message


def test_other_flags_and_errors_of_argparse(capsys):
    for args in (["train", "--speed", "9"], ["train", "--precision", "fp8"], ["nothing"], []):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("afinar ")


# --- stop and resume ---


def command(*args):
    return [sys.executable, "-m", "afinar.train", *map(str, args)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_whole_and_goes_on_as_if_it_had_not_stopped(number, text, tmp_path):
    args = ["--config", tmp_path / "c.toml", "--data", text, "--threads", "1"]
    (tmp_path / "c.toml").write_text(
        'preset = "tiny"\nsteps = 200\nbatch = 1\nseq_len = 8\neval_every = 40\neval_rows = 2\n'
        "digest_every = 40\nsnapshot_every = 100\n"
    )
    stopped = tmp_path / "stopped"
    process = subprocess.Popen(
        command("train", *args, "--out", stopped), stdout=subprocess.PIPE, text=True
    )
    with process:
        for line in process.stdout:
            if line.startswith("step 10/"):
                process.send_signal(number)
    assert process.returncode == 1
    folder = RunFolder.open(stopped)
    done = folder.metrics()[-1]["step"]
    assert 10 <= done < 200
    assert folder.digests()["steps"][-1]["step"] == done
    assert (stopped / "model.safetensors").is_file()
    assert main(["verify", str(stopped)]) == 0

    assert main(["train", "--resume", str(stopped)]) == 0
    straight = tmp_path / "straight"
    assert main(["train", *map(str, args), "--out", str(straight)]) == 0
    assert (stopped / "digests.json").read_bytes() == (straight / "digests.json").read_bytes()
    rows, expected = (RunFolder.open(r).metrics() for r in (stopped, straight))
    assert without_machine(rows) == without_machine(expected)
    assert len(folder.environment()["sessions"]) == 2


def test_the_peak_of_memory_is_the_process_s_own():
    """Linux's getrusage hands on the peak of the process that started this one."""
    own = "from afinar.train.environment import peak_memory_mb as peak; print(peak())"
    program = f"""
import subprocess, sys
held = b"1" * 2**30
subprocess.run([sys.executable, "-c", {own!r}])
"""
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 20 < float(out.stdout) < 900


def test_a_killed_run_loses_no_more_than_since_its_snapshot(text, tmp_path):
    out = tmp_path / "killed"
    args = ["--data", text, "--preset", "tiny", "--steps", "200", "--batch", "1", "--seq-len", "8"]
    args += ["--threads", "1"]
    process = subprocess.Popen(
        command("train", *args, "--snapshot-every", "7", "--out", out), stdout=subprocess.DEVNULL
    )
    while not (out / "snapshots" / "step-00000014").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')  # a line cut off by the kill
    assert main(["train", "--resume", str(out)]) == 0
    assert [row["step"] for row in RunFolder.open(out).metrics()] == list(range(1, 201))
    assert main(["verify", str(out), "--from", "199"]) == 2  # no snapshot there


def test_a_run_killed_before_its_first_step_goes_on(run, text, tmp_path, capsys):
    out = tmp_path / "killed"
    process = subprocess.Popen(
        command("train", *TOY, "--data", text, "--threads", "1", "--out", out),
        stdout=subprocess.DEVNULL,
    )
    while not (out / "snapshots" / "step-00000000").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert main(["verify", str(out)]) == 0
    assert main(["report", str(out)]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", str(out)]) == 0
    assert (out / "digests.json").read_bytes() == (run / "digests.json").read_bytes()
    # Ended while the folder was made: nothing but the lock, and a folder as good as new.
    shutil.rmtree(out)
    out.mkdir()
    (out / ".lock").touch()
    assert main(["train", *TOY, "--data", str(text), "--out", str(out)]) == 0
    # Ended before the first record: begun again.
    (out / "digests.json").unlink()
    shutil.rmtree(out / "snapshots")
    assert main(["train", "--resume", str(out)]) == 0
    assert (out / "digests.json").read_bytes() == (run / "digests.json").read_bytes()


def test_patience_ends_a_resumed_run_where_it_ends_the_straight_one(text, tmp_path, capsys):
    args = ["--data", text, "--preset", "tiny", "--batch", "2", "--seq-len", "16", "--warmup", "0"]
    args += ["--steps", "200", "--eval-every", "2", "--eval-rows", "2", "--snapshot-every", "5"]
    args += ["--lr", "0.1", "--patience", "3", "--threads", "1"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert main([str(a) for a in ("train", *args, "--out", straight)]) == 0
    out = capsys.readouterr().out
    folder = RunFolder.open(straight)
    losses = [row["val_loss"] for row in folder.metrics() if "val_loss" in row]
    last = 2 * len(losses)
    assert last < 100
    assert losses.index(min(losses)) == len(losses) - 4
    assert f"stopped early: --patience 3 ended after {last} steps" in out
    assert (straight / "snapshots" / "best").read_text() == f"step-{last - 6:08}"
    assert main(["verify", str(straight)]) == 0
    assert "note" not in capsys.readouterr().out
    assert main(["train", "--resume", str(straight)]) == 0
    assert f"is complete: with --patience {last} steps are done" in capsys.readouterr().out

    def forget(path, step):
        """What a kill after `step` leaves, but for snapshots that were pruned."""
        rows = [json.dumps(row) + "\n" for row in folder.metrics() if row["step"] <= step]
        (path / "metrics.jsonl").write_text("".join(rows))
        (path / "environment.json").unlink()
        for snapshot in (path / "snapshots").glob("step-*"):
            if int(snapshot.name[5:]) > step:
                shutil.rmtree(snapshot)

    kept = sorted(int(p.name[5:]) for p in (straight / "snapshots").glob("step-*"))
    assert kept[0] == last - 6
    for step in (*kept, kept[0] + 1, 1):
        shutil.rmtree(stopped, ignore_errors=True)
        shutil.copytree(straight, stopped)
        forget(stopped, step)
        assert main(["train", "--resume", str(stopped)]) == 0
        assert (stopped / "digests.json").read_bytes() == (straight / "digests.json").read_bytes()
        assert without_machine(RunFolder(stopped).metrics()) == without_machine(folder.metrics())


def test_a_full_disk_ends_a_run_in_one_sentence_and_it_goes_on_later(run, text, tmp_path):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    args = [*TOY, "--data", text, "--threads", "1", "--out"]
    # Too little for the first snapshot, and for the moments of the second one.
    for size, says in ((100_000, "step-00000000"), (1_000_000, "step-00000003")):
        out = tmp_path / str(size)
        done = subprocess.run(
            command("train", *args, out), preexec_fn=limit, capture_output=True, text=True
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("afinar: error: the snapshot ")
        assert f"{says} cannot be written (File too large)" in line
        assert main(["train", "--resume", str(out)]) == 0
        assert (out / "digests.json").read_bytes() == (run / "digests.json").read_bytes()


def test_a_run_that_diverges_ends_in_one_sentence_with_a_good_snapshot(text, tmp_path, capsys):
    out = tmp_path / "out"
    args = [*TOY, "--steps", "40", "--lr", "1e30", "--max-grad-norm", "1e30", "--data", str(text)]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["train", *args, "--out", str(out)]) == 1
    *warned, last = capsys.readouterr().err.splitlines()
    assert last.startswith("afinar: error: training gave up after step 2: 25 windows in a row were")
    assert all(line.startswith("afinar: warning: window ") for line in warned)
    weights = read_snapshot(out / "snapshots" / "step-00000024")
    assert weights.state["optimizer"]["step_count"] == 2


def test_metrics_that_cannot_be_written_end_a_run_in_one_sentence(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "snapshots")
    folder, calls = RunFolder.open(copy), []
    with pytest.MonkeyPatch.context() as patch:
        add = RunFolder.add_metrics

        def full(self, row):
            calls.append(row)
            if len(calls) == 3:
                (copy / "metrics.jsonl").unlink()
                (copy / "metrics.jsonl").mkdir()
            add(self, row)

        patch.setattr(RunFolder, "add_metrics", full)
        assert main(["train", "--resume", str(copy)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"afinar: error: {copy}/metrics.jsonl cannot be written (Is a directory)"
    assert folder.settings().steps == 6


def test_a_damaged_snapshot_is_passed_over_and_said_so(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "snapshots" / "step-00000006" / "weights.safetensors").write_bytes(b"")
    assert main(["train", "--resume", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "weights.safetensors is not what was written" in out
    assert "step-00000003 is used instead" in out
    assert f"continuing {copy} after step 3 of 6" in out
    assert (copy / "digests.json").read_bytes() == (run / "digests.json").read_bytes()
    assert without_machine(RunFolder(copy).metrics()) == without_machine(RunFolder(run).metrics())


def test_a_run_without_a_snapshot_starts_again(run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "snapshots")
    assert main(["train", "--resume", str(copy)]) == 0
    assert (copy / "digests.json").read_bytes() == (run / "digests.json").read_bytes()


def test_checkpointing_changes_no_byte_of_the_record_and_may_change(run, tmp_path):
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "snapshots" / "step-00000006")
    assert main(["train", "--resume", str(copy), "--checkpointing", "segments"]) == 0
    config = ["--config", str(run / "run.toml"), "--checkpointing", "blocks", "--out", str(other)]
    assert main(["train", *config]) == 0
    for again in (copy, other):
        assert (again / "digests.json").read_bytes() == (run / "digests.json").read_bytes()
        assert main(["verify", str(again)]) == 0


def test_a_resumed_run_keeps_its_settings_and_data(run, text, tmp_path, capsys):
    assert "--lr 0.1 differs from the run's 0.003" in error(
        capsys, "train", "--resume", run, "--lr", "0.1"
    )
    assert "--keep is 0; it must be" in error(capsys, "train", "--resume", run, "--keep", "0")
    other = tmp_path / "other.txt"
    other.write_text("x" * 1000)
    assert "the data is not the run's any more" in error(
        capsys, "train", "--resume", run, "--data", other
    )
    assert main(["train", "--resume", str(run)]) == 0
    assert "is complete: all 6 steps are done" in capsys.readouterr().out


# --- the other verbs ---


def test_generate_continues_a_prompt_and_is_repeatable(run, capsys):
    args = ["generate", str(run), "--prompt", "12 squared", "--max-new-tokens", "20"]
    assert main(args) == 0
    first = capsys.readouterr().out
    assert first.startswith("12 squared")
    assert main(args) == 0
    assert capsys.readouterr().out == first
    assert "needs a chat template" in error(capsys, *args, "--chat")


def test_stop_texts_end_a_generation():
    from afinar.train.commands import until
    from afinar.train.text import ByteTokenizer, Stream

    def cut(text, *stops):
        return "".join(until(iter(text.encode()), Stream(ByteTokenizer()), list(stops)))

    assert cut("one two three", " three", "two") == "one "
    assert cut("one tw", "two") == "one tw"
    assert cut("aab", "ab") == "a"
    assert cut("one") == "one"


def test_eval_counts_every_token(run, tmp_path, capsys):
    file = tmp_path / "t.txt"
    file.write_text("7 squared is 49.\n" * 3)
    assert main(["eval", "--model", str(run), "--data", str(file), "--seq-len", "16"]) == 0
    assert "over 51 tokens" in capsys.readouterr().out  # 51 bytes and the end, but not the first


def test_data_show_marks_what_is_trained(tmp_path, capsys):
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    assert main(["data", "show", str(file), "--seq-len", "8"]) == 0
    out = capsys.readouterr().out
    assert "1+1=⟦2<end>⟧ | 3 places of padding" in out
    assert main(["data", "show", str(file), "--seq-len", "8", "--no-mask-prompt", "--ids"]) == 0
    assert "49:'1'⟦43:'+' 49:'1' 61:'=' 50:'2' 256:'<end>'⟧" in capsys.readouterr().out


def test_the_live_line_of_a_terminal():
    import io

    from afinar.train.progress import Progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    progress = Progress(screen, 2)
    row = {"loss": 1.5, "lr": 1e-3, "grad_norm": 0.5, "tokens": 64}
    progress.step({**row, "step": 1})
    progress.drawn = 0.0
    progress.step({**row, "step": 2, "val_loss": 1.25})
    progress.close()
    lines = screen.getvalue().split("\r\x1b[K")
    assert lines[1].startswith("first step after")
    assert lines[-1].startswith("step 2/2  ████████████  loss 1.5000  val 1.2500  lr 1.00e-03")
    assert screen.getvalue().endswith("\n")


# --- adapters ---


@pytest.fixture(scope="module")
def adapted(run, text, tmp_path_factory):
    """A LoRA run on top of the run."""
    out = tmp_path_factory.mktemp("runs") / "lora"
    args = ["--model", run, "--data", text, "--out", out, "--steps", "4", "--batch", "2"]
    args += ["--seq-len", "16", "--lora", "q_proj,v_proj", "--lora-r", "2", "--lora-alpha", "4"]
    assert main(["train", *map(str, args), "--snapshot-every", "2", "--warmup", "0"]) == 0
    return out


def test_a_lora_run_holds_an_adapter_in_place_of_the_weights(adapted, run):
    names = {p.name for p in adapted.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "digests.json"} <= names
    assert "model.safetensors" not in names
    config = json.loads((adapted / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4)
    assert config["base_model_name_or_path"] == str(run)


def test_a_lora_run_replays(adapted):
    assert main(["verify", str(adapted)]) == 0
    assert main(["verify", str(adapted), "--from", "3"]) == 0


def test_adapted_and_merged_model_score_the_same(adapted, run, text, tmp_path, capsys):
    merged = tmp_path / "merged"
    args = ["merge", "--model", str(run), "--adapter", str(adapted), "--out", str(merged)]
    assert main(args) == 0
    assert "merged the adapters of 4 modules" in capsys.readouterr().out
    assert "exists already" in error(capsys, *args)
    args[4], args[6] = str(tmp_path / "nofolder"), str(tmp_path / "other")
    assert "nofolder holds no adapter_config.json" in error(capsys, *args)
    assert not (tmp_path / "other").exists()
    losses = []
    for model in ([run], [run, "--adapter", adapted], [adapted], [merged]):
        call = ["eval", "--data", text, "--seq-len", "16", "--rows", "8", "--model", *model]
        assert main([str(a) for a in call]) == 0
        losses.append(float(capsys.readouterr().out.split()[1]))
    assert losses[1] == losses[2] == pytest.approx(losses[3], abs=1e-4)
    assert losses[0] != losses[1]


def test_generate_under_an_adapter(adapted, run, capsys):
    shown = []
    for model in ([adapted], [run, "--adapter", adapted]):
        args = ["generate", *model, "--prompt", "12 ", "--max-new-tokens", "8"]
        assert main([str(a) for a in args]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_training_goes_on_from_a_lora_run(adapted, text, tmp_path):
    first, second = tmp_path / "full", tmp_path / "lora"
    args = ["--model", adapted, "--data", text, "--steps", "1", "--batch", "2", "--seq-len", "16"]
    assert main(["train", *map(str, args), "--out", str(first)]) == 0
    assert (first / "model.safetensors").is_file()
    assert main(["train", *map(str, args), "--out", str(second), "--lora", "mlp"]) == 0
    for run in (first, second):
        assert main(["verify", str(run)]) == 0
    merged = tmp_path / "merged"
    merge = ["merge", "--model", adapted, "--adapter", second, "--out", merged]
    assert main([str(a) for a in merge]) == 0


def test_a_base_held_in_16_bits(run, text, tmp_path, capsys):
    out = tmp_path / "half"
    args = ["--model", run, "--data", text, "--out", out, "--steps", "2", "--batch", "2"]
    args += ["--seq-len", "16", "--lora", "qv", "--storage", "bfloat16"]
    assert main(["train", *map(str, args)]) == 0
    assert main(["verify", str(out)]) == 0
    call = ["eval", "--data", text, "--seq-len", "16", "--rows", "4", "--model", out]
    capsys.readouterr()
    losses = []
    for storage in ("float32", "bfloat16"):
        assert main([*map(str, call), "--storage", storage]) == 0
        losses.append(float(capsys.readouterr().out.split()[1]))
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
