"""Was a run done as its folder says? Do it again and compare.

What is promised: in float32 (and in 16 bits with `deterministic`) a run's digests are the same at
any number of threads and on any processor, so a replay elsewhere must give them all. In 16 bits
without `deterministic` that holds on processors of one kind. A GPU has bits of its own, unless
`deterministic`; its records say so. A replay needs the version of afinar that made the record.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..lora import lora_modules
from ..optim import weights_sha256
from ..transformer.hf_config import config_to_hf
from ..transformer.safetensors_io import TensorFile
from .bits import device_for, keeps_mode
from .data import STDLIB, find_files, hash_files
from .environment import environment
from .folder import RunFolder
from .run import OF_THE_MACHINE, Run, build, due, open_model, record, settings_sha256, steps
from .snapshot import DamagedError, list_snapshots, load_snapshot, read_snapshot


@dataclass
class Report:
    """What a replay found. `problems` is empty if everything is as recorded."""

    start: int
    stop: int
    compared: int = 0  # digests of weights and optimizers that were equal
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


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
    replay; the report names its step and tensor. Raises ValueError or FileNotFoundError if the
    run's data or the weights it started from are missing.
    """
    folder = RunFolder.open(run)
    try:
        written = folder.digests()
        settings = dataclasses.replace(folder.settings(), threads=threads)
        records = {r["step"]: r for r in written.get("steps", [])}
        rows = {row["step"]: row for row in folder.metrics()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Report(start or 0, stop or 0, problems=[f"the record cannot be read: {error}"])
    if not records:
        return Report(start or 0, stop or 0, problems=["digests.json records no step"])
    last = max(records)
    report = Report(start or 0, last if stop is None else stop)
    if not 0 <= report.start < report.stop <= last:
        raise ValueError(
            f"verify: steps {report.start} to {report.stop} were asked for; the record of {run} "
            f"goes from 0 to {last}"
        )
    if written.get("settings") != settings_sha256(settings):
        report.problems.append("run.toml does not hold the settings that digests.json was made of")
        return report
    wanted = [n for n in range(report.start, report.stop + 1) if due(n, settings)]
    if missing := [n for n in wanted if n not in records]:
        report.problems.append(f"digests.json has no digests of step {missing[0]}")
        return report
    done = [r for r in folder.digests()["steps"] if report.start < r["step"] <= report.stop]
    settings.device = device_for(done, device)
    if data is not None:
        settings.data = str(data)
    found = hash_files(find_files(settings.data or STDLIB))  # missing data is bad input
    if found != written.get("data") and settings.data != STDLIB:
        report.problems.append(f"the data differs: recorded {written.get('data')}, now {found}")
        return report
    replay = build(settings)
    for what, value in replay.identity().items():
        if written.get(what) != value:
            why = ""
            if what == "data" and settings.data == STDLIB:
                why = " (the standard library is another one in each version of Python)"
            report.problems.append(
                f"the {what} differs: recorded {written.get(what)}, now {value}{why}"
            )
    if report.problems:
        return report
    snapshots = {int(p.name[5:]): p for p in list_snapshots(folder / "snapshots")}
    if report.start and report.start not in snapshots:
        raise ValueError(
            f"verify: {run} has no snapshot of step {report.start} to start from; it has those of "
            f"{', '.join(map(str, snapshots)) or 'no step'}"
        )
    try:
        if report.start:
            load_snapshot(snapshots[report.start], replay.trainer)
            replay.step = report.start
        problem = _replay(replay, report, records, rows, snapshots, on_step)
    except DamagedError as error:  # a snapshot is not what was written
        problem = str(error)
    if problem is None and report.stop == last:
        problem = _final(replay, folder, records[last])
    if problem is not None:
        made_by, this = folder.environment().get("afinar"), environment()["afinar"]
        if made_by not in (None, this):
            problem += f" (the record is of afinar {made_by}, this is {this})"
        report.problems.append(problem)
    return report


def _replay(
    run: Run,
    report: Report,
    records: dict[int, dict],
    rows: dict[int, dict],
    snapshots: dict[int, Path],
    on_step: Callable[[dict[str, Any]], None],
) -> str | None:
    """The first departure from the record, in words."""
    if run.step in records:  # a run that was stopped has snapshots between its records
        if problem := _compare(records[run.step], record(run)):
            return problem
        report.compared += 1
    for row in steps(run, report.stop):
        on_step(row)
        if problem := _compare_row(rows.get(run.step), row):
            return problem
        if run.step in records:
            if problem := _compare(records[run.step], record(run)):
                return problem
            report.compared += 1
        if run.step in snapshots and (problem := _compare_snapshot(snapshots[run.step], run)):
            return problem
    return None


def _compare_snapshot(path: Path, run: Run) -> str | None:
    """Whether a snapshot holds the weights and moments of this step."""
    read_snapshot(path)
    weights, moments = (TensorFile(path / f"{n}.safetensors") for n in ("weights", "moments"))
    optimizer = run.trainer.optimizer
    names = {id(p): name for name, p in run.model.named_parameters()}
    for n, p in enumerate(optimizer.params):
        name = names[id(p)]
        for file, key, array in (
            (weights, name, p.data),
            (moments, f"first.{name}", optimizer.first_moments[n]),
            (moments, f"second.{name}", optimizer.second_moments[n]),
        ):
            if key not in file.entries or file.read(key).tobytes() != array.tobytes():
                return f"step {run.step}: the snapshot {path} departs in {key}"
    return None


def _compare_row(recorded: dict | None, row: dict) -> str | None:
    step = row["step"]
    if recorded is None:
        return f"step {step}: metrics.jsonl has no such step"
    for name in dict.fromkeys([*row, *recorded]):
        if name not in OF_THE_MACHINE and recorded.get(name) != row.get(name):
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


def _final(run: Run, folder: RunFolder, recorded: dict) -> str | None:
    """Whether the model in the folder is the one of the last step."""
    try:
        model = open_model(folder.path, dtype=run.settings.storage)
    except (ValueError, FileNotFoundError) as error:
        return f"the model in {folder.path} cannot be opened: {error}"
    if weights_sha256(model) != recorded.get("weights"):
        return f"the weights in {folder.path} are not those of step {run.step}"
    layers = zip(lora_modules(model), lora_modules(run.model), strict=True)
    for (name, found), (_, own) in layers:
        if found.scales != own.scales:
            return (
                f"adapter_config.json: the scale of {name} is {found.scales}, "
                f"the run's is {own.scales}"
            )
    if (folder / "config.json").is_file():
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key, value in config_to_hf(run.model.config, "float32").items():
            if "dtype" not in key and found.get(key) != value:
                return f"config.json: {key} is {found.get(key)}, the run's is {value}"
    return None
