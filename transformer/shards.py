"""The weights of a checkpoint folder: one safetensors file, or shards and an index of them.

model.safetensors
model-00001-of-00002.safetensors, ..., model.safetensors.index.json {weight_map: {name: file}}
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .files import atomic_file, read_json
from .safetensors_io import DTYPES, TensorFile, write_safetensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class TensorFolder:
    """The tensors of a checkpoint folder, in one file or in shards that an index lists."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.files: dict[str, TensorFile] = {}
        for file, names in self._parts():
            for name in names:
                if name in self.files:
                    other = self.files[name].path.name
                    raise ValueError(f"{self.folder}: {name} is in {other} and in {file.path.name}")
                self.files[name] = file

    def _parts(self) -> Iterator[tuple[TensorFile, list[str]]]:
        single, index = self.folder / SINGLE, self.folder / INDEX
        if single.exists():
            paths = [single]
        elif index.exists():
            yield from _indexed(index)
            return
        else:
            paths = _steps(self.folder)[-1:] or sorted(self.folder.glob("*.safetensors"))
        if not paths:
            pickles = sorted(p.name for p in self.folder.glob("pytorch_model*.bin"))
            why = (
                f"; {pickles[0]} is a pickle, which can run code when it is read" if pickles else ""
            )
            raise FileNotFoundError(f"No SafeTensors files found in {self.folder}{why}")
        if shards := [p.name for p in paths if _SHARD.fullmatch(p.name)]:
            raise FileNotFoundError(f"{self.folder} has the shard {shards[0]}, but no {INDEX}")
        for path in paths:
            file = TensorFile(path)
            yield file, list(file.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.files[name].entries[name].shape

    def dtype(self, name: str) -> str:
        """How a tensor is stored: "F32", "BF16", ..."""
        return self.files[name].entries[name].dtype

    def read(self, name: str, dtype: str | None = None, out: Any = None) -> np.ndarray:
        """As `TensorFile.read`."""
        return self.files[name].read(name, dtype, out)


def _indexed(index: Path) -> Iterator[tuple[TensorFile, list[str]]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: not an index of safetensors files: it has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard in ("", "..") or Path(shard).name != shard:
            raise ValueError(f"{index}: {name} should be in {shard!r}, which is no file's name")
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        names = [name for name, at in weight_map.items() if at == shard]
        if not path.is_file():
            raise ValueError(f"{index}: {names[0]} should be in {shard}, which does not exist")
        file = TensorFile(path)
        for name in names:
            if name not in file.entries:
                raise ValueError(f"{index}: {name} should be in {shard}, which does not have it")
        for name in file.entries:
            if name not in weight_map:
                raise ValueError(f"{index}: {shard} has {name}, which the index does not list")
        yield file, names


def _steps(folder: Path) -> list[Path]:
    """model-step-N.safetensors, by N."""
    numbered = [
        (p.stem.removeprefix("model-step-"), p) for p in folder.glob("model-step-*.safetensors")
    ]
    return [p for _, p in sorted((int(n), p) for n, p in numbered if n.isdigit())]


# --- writing -------------------------------------------------------------------------------


def shard_limit(size: int | str) -> int:
    """A largest size in bytes, which may be written as in transformers.

    >>> shard_limit("5GB"), shard_limit("512 KiB"), shard_limit(1000)
    (5000000000, 524288, 1000)
    """
    found = re.fullmatch(r"(\d+) ?([KMG]I?B)", size.upper()) if isinstance(size, str) else None
    limit = int(found[1]) * _UNITS[found[2]] if found else size
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(
            f'max_shard_size is {size!r}; needed: a number of bytes above 0, or such as "5GB"'
        )
    return limit


def write_weights(folder: Path, tensors: Mapping[str, Any], dtype: str, limit: int | None) -> None:
    """Write the weights as `dtype`, in shards if they are larger than `limit` bytes.

    A tensor is never cut. What was there before goes: until the last file is in its place, the
    folder holds the weights of before, or shards without an index, which are never loaded.
    """
    width = np.dtype(DTYPES[dtype]).itemsize
    parts: list[list[str]] = [[]]
    size = 0
    for name, a in tensors.items():
        size += math.prod(a.shape) * width
        if limit is not None and parts[-1] and size > limit:
            parts.append([])
            size = math.prod(a.shape) * width
        parts[-1].append(name)
    if len(parts) == 1:
        write_safetensors(folder / SINGLE, tensors, {"format": "pt"}, dtype)
        (folder / INDEX).unlink(missing_ok=True)
        keep = set()
    else:
        (folder / INDEX).unlink(missing_ok=True)
        names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
        for file, part in zip(names, parts, strict=True):
            write_safetensors(
                folder / file, {name: tensors[name] for name in part}, {"format": "pt"}, dtype
            )
        where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        total = width * sum(math.prod(a.shape) for a in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        with atomic_file(folder / INDEX) as f:
            f.write((json.dumps(index, indent=2) + "\n").encode())
        (folder / SINGLE).unlink(missing_ok=True)
        keep = set(names)
    for path in folder.glob("model-*-of-*.safetensors"):
        if _SHARD.fullmatch(path.name) and path.name not in keep:
            path.unlink()
