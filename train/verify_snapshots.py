"""Are a run's snapshots, and the marks on the last and the best, what a replay comes to?"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from ..transformer.safetensors_io import TensorFile
from .run import Run
from .snapshot import (
    DamagedError,
    list_snapshots,
    load_snapshot,
    read_snapshot,
    snapshot_arrays,
    snapshot_state,
)
from .verify_model import as_text

# What of a trainer's settings a resumed run may change.
_FREE_CONFIG = ("device", "checkpoint_config")


def load_snapshot_of(path: Path, run: Run) -> None:
    """Go to the snapshot's step; DamagedError if it is not of this run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the comparison finds what differs
            load_snapshot(path, run.trainer)
    except ValueError as error:
        raise DamagedError(str(error)) from None
    if run.trainer.windows != int(path.name[5:]):
        raise DamagedError(f"{path} holds the state after step {run.trainer.windows}")
    run.step = run.trainer.windows


def compare_snapshot(path: Path, run: Run, made_by: str | None) -> str | None:
    """Whether a snapshot holds the state of this step, saved by this afinar or by `made_by`."""
    snapshot, own = read_snapshot(path), snapshot_state(run.trainer)
    arrays = snapshot_arrays(run.trainer)
    expected = sorted(f"{name}.safetensors" for name in arrays)
    if sorted(snapshot.state["files"]) != expected:
        return f"step {run.step}: the snapshot {path} departs in its files"
    for name, tensors in arrays.items():
        file = TensorFile(path / f"{name}.safetensors")
        for key in {**tensors, **file.entries}:
            same = key in tensors and key in file.entries
            if not same or file.read(key).tobytes() != tensors[key].tobytes():
                return f"step {run.step}: the snapshot {path} departs in {key}"
    own["more"] = run.mark()
    for state in (snapshot.state, own):
        state.pop("files", None)
        state["config"] = {k: v for k, v in state["config"].items() if k not in _FREE_CONFIG}
    for what in {**own, **snapshot.state}:
        recorded, replayed = snapshot.state.get(what), own.get(what)
        if what == "version" and recorded == made_by:
            continue
        if what not in own or as_text(recorded) != as_text(replayed):
            if what == "more":
                return f"step {run.step}: the snapshot {path} says that it is of another run"
            return f"step {run.step}: the snapshot {path} departs in the state of the {what}"
    return None


def compare_marks(folder: Path, rows: dict[int, dict], killed: bool) -> str | None:
    """Whether `last` and `best` name the snapshots that they should.

    A kill may come between a snapshot and its marks, which are then those of the one before. A mark
    on a snapshot that was removed leads nowhere.
    """
    found = [int(path.name[5:]) for path in list_snapshots(folder)]
    validated = {n: r["val_loss"] for n, r in rows.items() if r.get("val_loss") is not None}
    before = found[-2:] if killed else found[-1:]
    losses = [{n: loss for n, loss in validated.items() if n <= step} for step in before]
    wanted = {
        "last": before,
        "best": [min(some, key=some.__getitem__) for some in losses if some],
    }
    for name, numbers in wanted.items():
        path = folder / name
        names = [f"step-{step:08}" for step in numbers]
        named = path.read_bytes() if path.is_file() else b""
        match = re.fullmatch(rb"step-(\d+)", named)
        gone = match is not None and int(match[1]) not in found
        if named and not gone and named not in [text.encode() for text in names]:
            return f"{path} does not name the {name} snapshot, {' or '.join(names) or 'of none'}"
    return None
