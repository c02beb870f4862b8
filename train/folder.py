"""A run's folder: who may write it, and the files in it.

run.toml        the settings, complete; `--config` reads it
metrics.jsonl   one line per step; metrics.csv is the same as a table
digests.json    seed, data hash and digests: what the run must give anywhere
environment.json  versions, CPU, threads, times: what may differ
snapshots/      saved states, from which the run continues
loss.svg, sample.txt, and the model as Hugging Face files
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from ..transformer.files import json_object, read_json
from ..transformer.safetensors_io import atomic_file
from ..transformer.values import is_number, is_whole
from .lock import Lock
from .settings import Settings, read_settings


class RunFolder:
    """The files of a run."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """A run that exists; ValueError if `path` holds none."""
        folder = cls(path)
        if not (folder / "run.toml").is_file():
            raise ValueError(f"{path} is not a run: it has no run.toml")
        return folder

    @classmethod
    def create(cls, path: str | Path | None) -> RunFolder:
        """A new run; without a path, the first free `runs/NNN`.

        ValueError if it exists already or cannot be written.
        """
        if path is None:
            taken = [int(p.name) for p in Path("runs").glob("*") if p.name.isdigit()]
            path = Path("runs") / f"{max(taken, default=0) + 1:03}"
        folder = cls(path)
        if folder.path.exists() and not folder.is_new():
            raise ValueError(
                f"{path} exists already; give another --out, or continue it with --resume {path}"
            )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            (folder / ".probe").touch()
            (folder / ".probe").unlink()
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror})") from None
        return folder

    def is_new(self) -> bool:
        """Whether nothing is in it yet, but for what a run leaves that ended at its beginning."""
        return self.path.is_dir() and all(p.name in _BEGINNING for p in self.path.iterdir())

    def locked(self) -> Lock:
        """Refuse a second writer."""
        return Lock(self.path)

    def discard(self) -> None:
        """Remove a locked folder in which nothing was written."""
        if self.is_new():
            for path in self.path.iterdir():
                path.unlink()
            self.path.rmdir()

    # --- what is written ---

    def write(self, name: str, text: str) -> None:
        """Write a text file, whole or not at all."""
        write_atomic(self / name, text)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=1) + "\n")

    def write_metrics(self, rows: list[dict]) -> None:
        """All rows anew, as JSON lines and as a table."""
        self.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.write_table(rows)

    def add_metrics(self, row: dict) -> None:
        """One more row, at once."""
        path = self / "metrics.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise _unwritable(path, error) from error

    def write_table(self, rows: list[dict]) -> None:
        """`metrics.csv` of the rows; a figure that a step does not have is an empty cell."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        table = csv.DictWriter(text, names, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        self.write("metrics.csv", text.getvalue())

    # --- what is read ---

    def settings(self) -> Settings:
        return read_settings(self / "run.toml", {})

    def metrics(self) -> list[dict]:
        """The rows of `metrics.jsonl`; a last line that was cut off by a kill is left out.

        ValueError names the line that is no row: step n is the n-th line.
        """
        path = self / "metrics.jsonl"
        lines = _lines(path)
        return [_row(path, n, line) for n, line in enumerate(lines[:-1], 1)]

    def is_cut_off(self) -> bool:
        """Whether `metrics.jsonl` ends within a line, as a kill may leave it."""
        return _lines(self / "metrics.jsonl")[-1] != ""

    def digests(self) -> dict[str, Any]:
        """What digests.json holds; ValueError if it is no record of steps in their order."""
        path = self / "digests.json"
        if not path.is_file():
            return {"steps": []}
        found = read_json(path)
        steps = found.get("steps")
        if not isinstance(steps, list):
            raise ValueError(f"{path} is damaged: steps is {_shown(steps)}; a list is needed")
        before = -1
        for record in steps:
            _check_record(path, record, before)
            before = record["step"]
        return found

    def environment(self) -> dict[str, Any]:
        """What environment.json holds; ValueError if its sessions are not what a run writes."""
        path = self / "environment.json"
        if not path.is_file():
            return {}
        found = read_json(path)
        sessions = found.get("sessions", [])
        if not isinstance(sessions, list) or not all(map(_is_session, sessions)):
            raise ValueError(
                f"{path} is damaged: sessions is {_shown(sessions)}; a list is needed of what each "
                "session did, with the first and the last of its steps"
            )
        return found

    def samples(self) -> list[str]:
        """The text that the trained model wrote, if there is one."""
        path = self / "sample.txt"
        return [_text(path)] if path.is_file() else []


# --- what the files may hold ---------------------------------------------------------------

# What a run may leave that is killed before its settings are written.
_BEGINNING = (".lock", ".probe", "run.toml.tmp")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is damaged: it is not UTF-8 text") from None


def _lines(path: Path) -> list[str]:
    """The lines of a file, and what stands after the last of them."""
    return _text(path).split("\n") if path.is_file() else [""]


def _row(path: Path, n: int, line: str) -> dict[str, Any]:
    try:
        row = json_object(path, line.encode())
    except ValueError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path} is damaged: line {n}: {reason}") from None
    for name in ("step", "loss", "lr", "grad_norm", "tokens"):
        if name not in row:
            raise ValueError(f"{path} is damaged: line {n} has no {name}")
    if not is_whole(row["step"]) or row["step"] != n:
        raise ValueError(f"{path} is damaged: line {n} is of step {_shown(row['step'])}")
    for name, value in row.items():
        if name in ("tokens", "tokens_per_s") and value is None:
            raise ValueError(f"{path} is damaged: line {n}: {name} is null; a number is needed")
        if value is not None and not is_number(value):
            raise ValueError(
                f"{path} is damaged: line {n}: {name} is {_shown(value)}; a number is needed"
            )
    return row


def _check_record(path: Path, record: Any, before: int) -> None:
    if not isinstance(record, dict) or not is_whole(record.get("step")):
        raise ValueError(f"{path} is damaged: {_shown(record)} is no record of a step")
    step = record["step"]
    if step <= before:
        raise ValueError(
            f"{path} is damaged: step {step} stands "
            + ("first" if before < 0 else f"after step {before}")
        )
    tensors = record.get("tensors")
    texts = [record.get("weights"), record.get("optimizer"), record.get("device", "")]
    if isinstance(tensors, dict):
        texts += tensors.values()
    if not isinstance(tensors, dict) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path} is damaged: the digests of step {step} are not all texts")


def _is_session(session: Any) -> bool:
    steps = session.get("steps") if isinstance(session, dict) else None
    return isinstance(steps, list) and len(steps) == 2 and all(map(is_whole, steps))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one, whole."""
    try:
        with atomic_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> RuntimeError:
    return RuntimeError(f"{path} cannot be written ({error.strerror})")
