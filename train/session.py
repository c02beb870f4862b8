"""Writing a run: its steps go into the folder as they are done, and any stop leaves it whole."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ..autograd import get_num_threads
from ..lora import lora_modules, trainable_line
from ..transformer import generate, save_pretrained
from .bits import describe_device, own_device
from .data import STDLIB
from .environment import environment, one_line, peak_memory_mb
from .folder import RunFolder
from .plot import run_curves
from .progress import Progress, clock
from .run import FREE, Run, at, build, due, record, steps
from .settings import Settings, flag
from .snapshot import NoSnapshotError, load_snapshot, save_snapshot
from .text import COPIED


def train(settings: Settings, stream: TextIO) -> int:
    """Make a new run folder and train into it; the exit status."""
    settings = _absolute(settings.complete())
    folder = RunFolder.create(settings.out)
    with folder.locked():
        try:
            session = Session.begin(settings, folder, stream)
        except BaseException:
            folder.discard()
            raise
        return session.run_to_end()


def resume(path: str, flags: dict[str, Any], stream: TextIO) -> int:
    """Continue a run from its last snapshot; the exit status."""
    folder = RunFolder.open(path)
    settings = folder.settings()
    for name, value in flags.items():
        if name not in FREE and value != getattr(settings, name):
            raise ValueError(
                f"{flag(name)} {value} differs from the run's {getattr(settings, name)}; a resumed "
                f"run keeps its settings (but for {', '.join(map(flag, FREE))})"
            )
    settings = _absolute(dataclasses.replace(settings, **flags).complete())
    with folder.locked():
        begun = (folder / "digests.json").is_file()  # else it was killed while it began
        session = (Session.again if begun else Session.begin)(settings, folder, stream)
        step, done = session.run.step, folder.environment().get("sessions", [])
        # The last file that a run writes tells a finished run from one killed at its end.
        if session.run.complete and done and done[-1]["steps"][1] == step:
            steps = "all" if step == settings.steps else "with --patience"
            session.say(f"{path} is complete: {steps} {step} steps are done")
            return 0
        return session.run_to_end()


def _absolute(settings: Settings) -> Settings:
    """The same with paths that hold wherever the run is looked at from."""
    paths = {"data": settings.data or STDLIB, "model": settings.model}
    found = {k: v if v in (None, STDLIB) else str(Path(v).resolve()) for k, v in paths.items()}
    return dataclasses.replace(settings, **found)


class Session:
    """A run, its folder, and what is in it so far."""

    def __init__(self, run: Run, folder: RunFolder, stream: TextIO):
        self.run, self.folder, self.stream = run, folder, stream
        self.records: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    @classmethod
    def begin(cls, settings: Settings, folder: RunFolder, stream: TextIO) -> Session:
        """A run at step 0, its folder begun."""
        run = build(settings)
        session = cls(run, folder, stream)
        session._introduce()
        session.records.append(record(run))
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run whose record is lost
        folder.write("run.toml", dataclasses.replace(settings, out=None).toml())
        session._write_record()
        session._copy_tokenizer()
        session._save(best=False)
        return session

    @classmethod
    def again(cls, settings: Settings, folder: RunFolder, stream: TextIO) -> Session:
        """A run where its newest whole snapshot left it; what was written after that is redone."""
        run = build(settings)
        written = folder.digests()
        for what, value in run.identity().items():
            if written.get(what) != value:
                raise ValueError(
                    f"{folder.path}: the {what} is not the run's any more "
                    f"(recorded {written.get(what)}, found {value})"
                )
        session = cls(run, folder, stream)
        session._introduce()
        with contextlib.suppress(NoSnapshotError):
            with warnings.catch_warnings(action="ignore"):
                snapshot = load_snapshot(folder / "snapshots", run.trainer)
            run.step = run.trainer.windows
            for note in snapshot.notes:
                session.say(f"note: {note}")
        folder.write_metrics([row for row in folder.metrics() if row["step"] <= run.step])
        session.records = [
            r for r in written["steps"] if r["step"] <= run.step and due(r["step"], settings)
        ]
        session._write_record()
        session._copy_tokenizer()
        session.say(f"continuing {folder.path} after step {run.step} of {settings.steps}")
        if any(r.get("device") != own_device(run.trainer) for r in session.records):
            session.say(
                "note: the steps before were computed on another device, or in another mode: those "
                "that follow will not have the bits of a run that was not stopped"
            )
        return session

    def run_to_end(self) -> int:
        """Do the steps that remain, or until a signal; the exit status."""
        run, last = self.run, self.run.settings.steps or 0
        progress = Progress(self.stream, last, run.step)
        begun, clock0, before = time.time(), time.perf_counter(), run.step
        with stop_signals(progress.say) as stopped:
            for row in steps(run, last):
                self.folder.add_metrics(row)
                progress.step(row)
                final = stopped()  # asked once: what ends the run must also be kept
                self._keep(row, final or run.complete)
                if final:
                    break
        progress.close()
        self._finish(
            {
                "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
                "steps": [before + 1, run.step],
                "threads": get_num_threads(),
                **describe_device(run.trainer),
                "seconds": round(time.perf_counter() - clock0, 2),
                "first_step_seconds": round(progress.first_step or 0.0, 2),
                "peak_memory_mb": peak_memory_mb(),
            }
        )
        if not run.complete:
            self.say(
                f"stopped after step {run.step} of {last}; what was trained is in "
                f"{self.folder.path}, and afinar train --resume {self.folder.path} continues it"
            )
            return 1
        return 0

    # --- what is said and written ---

    def _introduce(self) -> None:
        run = self.run
        s, data = run.settings, run.data
        self.say(one_line(environment()))
        if run.trainer.device == "gpu":
            device = describe_device(run.trainer)
            mode = "the CPU's bits (deterministic)" if device["deterministic"] else "its fast mode"
            self.say(f"on {device['gpu']}, in {mode}")
        held = f", {len(data.valid):,} held out" if data.valid is not None else ""
        self.say(f"data: {data.source}, {len(data.train):,} sequences of {s.seq_len} tokens{held}")
        for note in data.notes:
            self.say(f"  {note}")
        count = sum(t.size for _, t in run.model.named_parameters())
        self.say(f"model: {count:,} parameters" + (f", from {s.model}" if s.model else ""))
        if lora_modules(run.model):
            self.say(trainable_line(run.model))
        per_step = s.batch * s.accumulate * s.seq_len
        self.say(f"{s.steps} steps of {per_step:,} tokens into {self.folder.path}")

    def _keep(self, row: dict[str, Any], final: bool) -> None:
        """Records and snapshots that are due after this step."""
        run = self.run
        s = run.settings
        if not (final or due(run.step, s)):
            return
        self.records.append(record(run))
        self._write_record()
        validated = row.get("val_loss") is not None
        best = validated and run.trainer.metrics.validations_since_best == 0
        if final or best or at(run.step, s.snapshot_every, s.steps):
            self._save(best)

    def _save(self, best: bool) -> None:
        run = self.run
        keep = run.settings.keep
        save_snapshot(self.folder / "snapshots", run.trainer, run.mark(), keep=keep, best=best)

    def _copy_tokenizer(self) -> None:
        base = self.run.settings.model
        for name in COPIED:
            if base is not None and (Path(base) / name).is_file():
                shutil.copyfile(Path(base) / name, self.folder / name)

    def _write_record(self) -> None:
        self.folder.write_json("digests.json", {**self.run.identity(), "steps": self.records})

    def _finish(self, times: dict[str, Any]) -> None:
        """The model, the curves, a sample, and where it all ran."""
        run, folder = self.run, self.folder
        if lora_modules(run.model):
            base = str(Path(run.settings.model or "").resolve())
            run.trainer.save_lora_adapter(folder.path, base)
        else:
            save_pretrained(run.model, folder.path)
        rows = folder.metrics()
        folder.write_table(rows)
        folder.write("loss.svg", run_curves(rows))
        prompt, text = sample(run)
        folder.write("sample.txt", prompt + text)
        earlier = folder.environment().get("sessions", [])
        folder.write_json("environment.json", {**environment(), "sessions": [*earlier, times]})
        if run.out_of_patience:
            self.say(
                f"stopped early: --patience {run.settings.patience} ended after {run.step} steps"
            )
        validated = run.trainer.metrics.val_losses
        if validated:
            self.say(f"validation loss {validated[-1]:.4f} nats per token")
            best = run.trainer.metrics.best_val_loss
            if best is not None and validated[-1] > best:
                self.say(
                    f"note: it was best, {best:.4f}, at an earlier step: snapshots/best "
                    "holds that state, the files of the run are of the last step"
                )
        self.say(f"done in {clock(times['seconds'])}; a sample:\n\n{prompt}{text}\n")


def sample(run: Run, n: int = 300) -> tuple[str, str]:
    """The run's prompt, and how its model continues it."""
    tokenizer, prompt = run.tokenizer, run.settings.prompt
    if prompt is None and run.data.source == STDLIB:
        prompt = "def "
    if prompt is None:
        rows = run.data.valid or run.data.train
        prompt = tokenizer.decode(rows.row(0)["inputs"][:16].tolist())
    lead = [] if tokenizer.bos is None else [tokenizer.bos]
    ids = [*lead, *tokenizer.encode(prompt)] or [tokenizer.eos or 0]
    room = run.model.config.max_position_embeddings - len(ids)
    new = generate(
        run.model,
        ids,
        max_new_tokens=max(0, min(n, room)),
        temperature=0.7,
        stop=None if tokenizer.eos is None else [tokenizer.eos],
        seed=run.settings.seed,
    )
    return prompt, tokenizer.decode(new)


@contextlib.contextmanager
def stop_signals(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C or SIGTERM only makes the yielded function true."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def stop(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        say("stopping after this step; once more to stop at once")

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
