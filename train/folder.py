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

from ..transformer.safetensors_io import atomic_file
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
        """Whether nothing is in it yet, but for the lock of a run that ended at its beginning."""
        return self.path.is_dir() and all(p.name == ".lock" for p in self.path.iterdir())

    def locked(self) -> Lock:
        """Refuse a second writer."""
        return Lock(self.path)

    def discard(self) -> None:
        """Remove a locked folder in which nothing was written."""
        if self.is_new():
            (self / ".lock").unlink()
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
        """The rows of `metrics.jsonl`; a last line that was cut off by a kill is left out."""
        path = self / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").split("\n")
        try:
            return [json.loads(line) for line in lines[:-1]]
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def digests(self) -> dict[str, Any]:
        return self._read_json("digests.json", {"steps": []})

    def environment(self) -> dict[str, Any]:
        return self._read_json("environment.json", {})

    def samples(self) -> list[str]:
        path = self / "sample.txt"
        return [path.read_text(encoding="utf-8")] if path.is_file() else []

    def _read_json(self, name: str, default: Any) -> Any:
        path = self / name
        if not path.is_file():
            return default
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one, whole."""
    try:
        with atomic_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> RuntimeError:
    return RuntimeError(f"{path} cannot be written ({error.strerror})")
