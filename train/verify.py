"""Was a run done as its folder says? Do it again and compare.

What is promised: in float32 (and in 16 bits with `deterministic`) a run's digests are the same at
any number of threads and on any processor, so a replay elsewhere must give them all. In 16 bits
without `deterministic` that holds on processors of one kind. A GPU has bits of its own, unless
`deterministic`; its records say so. A replay needs the version of afinar that made the record.

Compared are the settings, the data, the tokenizer and the weights that training began with, every
row of metrics.jsonl, every record of digests.json, every snapshot, the model and the files beside
it; not what is made from them (metrics.csv, loss.svg, sample.txt) nor what may differ
(environment.json).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..autograd import set_num_threads
from ..optim import weights_sha256
from ..transformer.values import is_whole
from .bits import device_for, keeps_mode
from .data import STDLIB, find_files, hash_files
from .environment import environment
from .folder import RunFolder
from .run import (
    OF_THE_MACHINE,
    Run,
    adapter_run,
    build,
    due,
    open_model,
    record,
    settings_sha256,
    steps,
)
from .settings import Settings
from .snapshot import DamagedError, list_snapshots
from .text import folder_files, tokenizer_sha256
from .verify_model import compare_copies, compare_model, model_files
from .verify_snapshots import compare_marks, compare_snapshot, load_snapshot_of


@dataclass
class Report:
    """What a replay found. `problems` is empty if everything is as recorded."""

    start: int
    stop: int
    compared: int = 0  # digests of weights and optimizers that were equal
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be compared, and why

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass
class Record:
    """What a run folder says was done."""

    head: dict[str, Any]  # of digests.json: what the run depends on
    digests: dict[int, dict]  # by step
    rows: dict[int, dict]  # of metrics.jsonl, by step
    ended: int | None  # the step whose model is in the folder, as environment.json has it
    made_by: str | None  # the version of afinar, as environment.json has it

    @classmethod
    def read(cls, folder: RunFolder) -> Record:
        """ValueError if it is not a record."""
        head = folder.digests()
        environment = folder.environment()
        sessions = environment.get("sessions", [])
        digests = {record["step"]: record for record in head.pop("steps")}
        rows = {row["step"]: row for row in folder.metrics()}
        ended = sessions[-1]["steps"][1] if sessions else None
        if not digests:
            raise ValueError("digests.json records no step")
        return cls(head, digests, rows, ended, environment.get("afinar"))

    @property
    def last(self) -> int:
        """The last step of which it says something: a row is written before its digests."""
        return max(self.rows, default=0)

    @property
    def killed(self) -> bool:
        """Whether the run did not come to write its model after the last row."""
        return self.ended is None or self.ended < self.last

    def missing(self, start: int, stop: int, settings: Settings) -> int | None:
        """The first step from `start` to `stop` whose digests should be there and are not.

        A kill may come between a step's row and its digests.
        """
        killed = self.last if self.killed else None
        wanted = (n for n in range(start, stop + 1) if due(n, settings) and n != killed)
        return next((n for n in wanted if n not in self.digests), None)


@keeps_mode
def verify(
    run: str | Path,
    *,
    data: str | Path | None = None,
    start: int | None = None,
    stop: int | None = None,
    threads: int | None = None,
    device: str = "auto",
    on_step: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Report:
    """Replay the steps after `start` (a snapshot's, or 0) up to `stop` and compare every record.

    The data is looked for where the run found it, or at `data`. The first departure ends the
    replay; the report names its step and tensor. A run that was stopped or killed is compared as
    far as it went. Raises ValueError or FileNotFoundError if the run's data or the weights it
    started from are missing.
    """
    for name, step in (("start", start), ("stop", stop)):
        if step is not None and not is_whole(step):
            raise TypeError(f"verify: {name} is {step!r}; a whole number is needed")
    folder = RunFolder.open(run)
    if threads is not None:
        set_num_threads(threads)
    report = Report(start or 0, stop or 0)
    try:
        written = Record.read(folder)
        settings = dataclasses.replace(folder.settings(), threads=threads)
    except ValueError as error:
        report.problems.append(f"the record cannot be read: {error}")
        return report
    last = written.last
    report.stop = last if stop is None else stop
    if not 0 <= report.start <= report.stop <= last:
        raise ValueError(
            f"verify: steps {report.start} to {report.stop} were asked for; the record of {run} "
            f"goes from 0 to {last}"
        )
    if written.head.get("settings") != settings_sha256(settings):
        report.problems.append("run.toml does not hold the settings that digests.json was made of")
        return report
    if (n := written.missing(report.start, report.stop, settings)) is not None:
        report.problems.append(f"digests.json has no digests of step {n}")
        return report
    done = [r for n, r in written.digests.items() if report.start < n <= report.stop]
    settings.device = device_for(done, device)
    if data is not None:
        settings.data = str(data)
    replay = _build(settings, written.head, report)
    if replay is None:
        return report
    snapshots = {int(p.name[5:]): p for p in list_snapshots(folder / "snapshots")}
    if report.start and report.start not in snapshots:
        raise ValueError(
            f"verify: {run} has no snapshot of step {report.start} to start from; it has those of "
            f"{', '.join(map(str, snapshots)) or 'no step'}"
        )
    ends: dict[int, str] = {}  # the weights at the steps that the model in the folder may be of
    try:
        if report.start:
            load_snapshot_of(snapshots[report.start], replay)
        problem = _replay(replay, report, written, snapshots, ends, on_step)
    except DamagedError as error:  # a snapshot is not what was written
        problem = str(error)
    if problem is None and report.stop == last:
        problem = _final(replay, report, folder, written, ends)
    elif problem is None:
        report.notes.append(
            f"the model in {folder.path} was not compared: the replay ended at step {report.stop}, "
            f"the record ends at {last}"
        )
    if problem is not None:
        made_by, this = written.made_by, environment()["afinar"]
        if made_by not in (None, this):
            problem += f" (the record is of afinar {made_by}, this is {this})"
        report.problems.append(problem)
    return report


# --- what the run was made of --------------------------------------------------------------


def _build(settings: Settings, head: dict[str, Any], report: Report) -> Run | None:
    """The run at step 0; None, with problems in the report, if it is made of something else."""
    try:
        run = build(settings)
    except (ValueError, TypeError, FileNotFoundError) as error:
        problem = _changed(settings, head)
        if problem is None:  # something is missing: bad input
            raise
        report.problems.append(f"{problem} ({error})")
        return None
    own = run.identity()
    for what in {**own, **head}:
        if what not in own:
            report.problems.append(f"digests.json holds {what}, which no run writes")
        elif what == "files":
            report.problems += _changed_files(head.get(what), own[what])
        elif head.get(what) != own[what]:
            why = ""
            if what == "data" and settings.data == STDLIB:
                why = " (the standard library is another one in each version of Python)"
            report.problems.append(
                f"the {what} differs: recorded {head.get(what)}, now {own[what]}{why}"
            )
    return None if report.problems else run


def _changed_files(recorded: Any, now: dict[str, str]) -> list[str]:
    """Which files of the folder that the run started from are not as they were."""
    if not isinstance(recorded, dict):
        return ["digests.json does not say of which files the run was made"]
    return [
        f"{name} of the model that it started from differs"
        for name in sorted({**recorded, **now})
        if recorded.get(name) != now.get(name)
    ]


def _changed(settings: Settings, head: dict[str, Any]) -> str | None:
    """What is there, but so changed that no run can be made of it."""
    data = hash_files(find_files(settings.data or STDLIB))
    if data != head.get("data"):
        return f"the data differs: recorded {head.get('data')}, now {data}"
    if settings.model is None or not Path(settings.model).is_dir():
        return None
    if tokenizer_sha256(settings.model) != head.get("tokenizer"):
        return "the tokenizer differs"
    found = folder_files(settings.model)
    changed = _changed_files(head.get("files"), found)
    if changed and "config.json" in found:
        return changed[0]
    try:
        base, adapter = adapter_run(Path(settings.model))
        if not (base / "config.json").is_file() or not any(base.glob("*.safetensors")):
            return None
        model = open_model(base, adapter)
    except (ValueError, TypeError):
        return f"the model that it started from, {settings.model}, cannot be read"
    return None if weights_sha256(model) == head.get("model") else "the model differs"


# --- what was done -------------------------------------------------------------------------


def _replay(
    run: Run,
    report: Report,
    written: Record,
    snapshots: dict[int, Path],
    ends: dict[int, str],
    on_step: Callable[[dict[str, Any]], None],
) -> str | None:
    """The first departure from the record, in words."""

    def here() -> str | None:
        if run.step in written.digests:
            if problem := _compare(written.digests[run.step], record(run)):
                return problem
            report.compared += 1
        if run.step in (written.ended, written.last):
            ends[run.step] = weights_sha256(run.model)
        if run.step not in snapshots:
            return None
        return compare_snapshot(snapshots[run.step], run, written.made_by)

    if problem := here():
        return problem
    for row in steps(run, report.stop):
        on_step(row)
        if problem := _compare_row(written.rows.get(run.step), row) or here():
            return problem
    if run.step < report.stop:
        return f"step {run.step}: --patience ends the run here, the record goes on"
    return None


def _compare_row(recorded: dict | None, row: dict) -> str | None:
    step = row["step"]
    if recorded is None:
        return f"step {step}: metrics.jsonl has no such step"
    for name in dict.fromkeys([*row, *recorded]):
        if name in OF_THE_MACHINE:
            continue
        if name not in row:
            return f"step {step}: metrics.jsonl has {name}, which the replay does not give"
        if name not in recorded or recorded[name] != row[name]:
            return (
                f"step {step}: {name} departs, recorded {recorded.get(name)}, "
                f"replayed {row.get(name)}"
            )
    return None


def _compare(recorded: dict, replayed: dict) -> str | None:
    """Where two records of one step differ, in words: the tensor that departs first."""
    names = ("weights", "first moments", "second moments")
    for tensor, digests in replayed["tensors"].items():
        before = recorded.get("tensors", {}).get(tensor, "").split()
        for what, a, b in zip(names, before, digests.split(), strict=False):
            if a != b:
                return f"step {replayed['step']}: the {what} of {tensor} depart"
    for what in ("weights", "optimizer", "tensors"):
        if recorded.get(what) != replayed[what]:
            return f"step {replayed['step']}: the digest of the {what} departs"
    return None


def _final(
    run: Run, report: Report, folder: RunFolder, written: Record, ends: dict[int, str]
) -> str | None:
    """Whether the model in the folder is the run's, and whether the run was done to its end."""
    if written.ended is not None and written.ended > written.last:
        return (
            f"environment.json says that the run went on to step {written.ended}; the record ends "
            f"at {written.last}"
        )
    if (beyond := max(written.digests)) > written.last:  # a kill while a resumed run began
        if run.complete or not written.killed:
            return f"digests.json goes on to step {beyond}, the run ended at {written.last}"
        report.notes.append(f"digests.json goes on to step {beyond}, metrics.jsonl does not")
    if problem := compare_marks(folder / "snapshots", written.rows, written.killed):
        return problem
    if folder.is_cut_off() and run.complete:
        return f"metrics.jsonl goes on after step {run.step}, the last of the run"
    if not run.complete:
        report.notes.append(f"the run ended early: after step {run.step} of {run.settings.steps}")
    if written.rows and (problem := compare_copies(folder.path, run)):
        return problem
    if written.ended is None and not all((folder / name).is_file() for name in model_files(run)):
        report.notes.append("the run ended before it wrote its model: there is none to compare")
        return None
    problem, weights = compare_model(folder.path, run, ends)
    earlier = written.ended is not None and written.ended < report.start
    if problem and earlier and weights not in ("", *ends.values()):
        report.notes.append(
            f"the model in {folder.path} was not compared: it is of step {written.ended}, the "
            f"replay began after step {report.start}"
        )
        return None
    return problem
