"""Files of users, read with one clear error, and files of ours, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise ValueError if a file that starts so is what Git LFS leaves in the place of another."""
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError, naming the file, if it holds anything else."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return json_object(path, path.read_bytes())


def json_object(path: Path, text: bytes) -> dict[str, Any]:
    """The object that `text`, read from `path`, stands for; no key may stand twice in it."""
    refuse_lfs_pointer(path, text)
    try:
        values = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: an object is needed, given a {type(values).__name__}")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(k for k in keys if keys.count(k) > 1)!r} stands twice")
    return values


def make_folder(what: str, path: str | os.PathLike[str]) -> Path:
    """The folder `path`, made with all above it; ValueError if one of these is a file."""
    folder = Path(path)
    for part in (folder, *folder.parents):
        if part.exists() and not part.is_dir():
            raise ValueError(f"{what}: {part} is a file; a folder is needed")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` at the end, or never if something fails."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; the name of a file is needed")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent} to write it to")
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name is on the disk too
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
