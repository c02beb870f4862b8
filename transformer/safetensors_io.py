"""safetensors files, read tensor by tensor and written atomically.

    8 bytes: N, little-endian | N bytes: JSON {name: {dtype, shape, data_offsets}} | the data

Own code rather than the library's, because its NumPy side cannot read bfloat16, writes
non-contiguous arrays wrongly, and holds a file in memory as a whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

# bfloat16 is held as its bits. Sorted as the library sorts: wider types first.
DTYPES = {"F64": np.float64, "F32": np.float32, "BF16": np.uint16, "F16": np.float16}
_NAMES = {np.dtype(t): name for name, t in DTYPES.items()}
_HEADER_LIMIT = 100_000_000
_CHUNK = 1 << 20  # elements converted at a time


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class TensorFile:
    """An open safetensors file. `entries` says what is in it, `metadata` what it says of itself.

    Raises ValueError, naming the file, for a Git LFS pointer, a file that is cut off and anything
    else that is not a safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        size = self.path.stat().st_size
        with open(self.path, "rb") as f:
            refuse_lfs_pointer(self.path, f.read(64))
            f.seek(0)
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > _HEADER_LIMIT:
                raise ValueError(f"{self.path}: not a safetensors file (header of {length} bytes)")
            if size < 8 + length:
                raise ValueError(
                    f"{self.path} is cut off: its header needs {8 + length} bytes, "
                    f"the file has {size}"
                )
            try:
                header = json.loads(f.read(length))
                self.metadata: dict[str, str] = header.pop("__metadata__", {})
                self.entries = {name: _entry(e, 8 + length) for name, e in header.items()}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"{self.path}: not a safetensors file ({error})") from None
        end = 8 + length
        for e in sorted(self.entries.values(), key=lambda e: (e.start, e.nbytes)):
            if e.start != end or e.nbytes < 0:
                raise ValueError(
                    f"{self.path}: not a safetensors file (tensors overlap or leave holes)"
                )
            end += e.nbytes
        if size != end:
            what = "is cut off" if size < end else "has bytes that its header does not know"
            raise ValueError(f"{self.path} {what}: {end} bytes needed, the file has {size}")

    def read(self, name: str, dtype: str | None = None, out: Any = None) -> np.ndarray:
        """The tensor `name`, converted to `dtype` ("F32", "BF16", ...) or as it is stored.

        With `out` it is written there, the transpose of a matrix included (`out.T`).
        """
        entry = self.entries[name]
        stored = DTYPES.get(entry.dtype)
        if stored is None:
            raise ValueError(
                f"{self.path}: {name} is stored as {entry.dtype}; F32, F16 or BF16 is needed"
            )
        dtype = dtype or entry.dtype
        if out is None:
            out = np.empty(entry.shape, DTYPES[dtype])
        with open(self.path, "rb") as f:
            f.seek(entry.start)
            if dtype == entry.dtype and out.flags.c_contiguous:
                f.readinto(out.reshape(-1).data.cast("B"))
            else:
                _read_converted(f, entry, dtype, out)
        return out


def _entry(e: Any, base: int) -> Entry:
    (start, stop), shape = e["data_offsets"], tuple(e["shape"])
    known = DTYPES.get(e["dtype"])
    if start < 0 or (known and stop - start != math.prod(shape) * np.dtype(known).itemsize):
        raise ValueError(f"shape {shape} and offsets {start}, {stop} do not fit")
    return Entry(e["dtype"], shape, base + start, stop - start)


def _read_converted(f: BufferedReader, entry: Entry, dtype: str, out: np.ndarray) -> None:
    """Read a few rows at a time, so that the tensor is never held twice."""
    rows = entry.shape[0] if entry.shape else 1
    width = math.prod(entry.shape[1:])
    step = max(1, _CHUNK // max(width, 1))
    target = out if entry.shape else out.reshape(1)
    for n in range(0, rows, step):
        part = np.empty((min(step, rows - n), *entry.shape[1:]), DTYPES[entry.dtype])
        f.readinto(part.reshape(-1).data.cast("B"))
        target[n : n + step] = convert(part, entry.dtype, dtype)


def convert(a: np.ndarray, source: str, target: str) -> np.ndarray:
    """`a` of the type called `source` in the type called `target`; bfloat16 rounds to even."""
    if source == target:
        return a
    if source == "BF16":
        a = (a.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if target != "BF16":
        return a.astype(DTYPES[target])
    bits = a.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)  # rounding could make it infinite
    return np.where(nan, bits >> np.uint32(16) | np.uint32(0x40), rounded).astype(np.uint16)


def dtype_name(a: Any) -> str:
    """The safetensors name of an array's type."""
    if a.dtype not in _NAMES:
        raise ValueError(f"safetensors: float32, float16 or bfloat16 is needed, given {a.dtype}")
    return _NAMES[a.dtype]


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    dtype: str | None = None,
) -> None:
    """Write `tensors` (any memory layout), all as `dtype` if given, with the library's bytes.

    The file appears under its name when it is whole and on the disk.
    """
    types = {name: dtype or dtype_name(a) for name, a in tensors.items()}
    order = sorted(tensors, key=lambda name: (list(DTYPES).index(types[name]), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        nbytes = tensors[name].size * np.dtype(DTYPES[types[name]]).itemsize
        header[name] = {
            "dtype": types[name],
            "shape": list(tensors[name].shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            a = tensors[name] if isinstance(tensors[name], np.ndarray) else tensors[name].get()
            a = convert(a, dtype_name(a), types[name])
            f.write(np.ascontiguousarray(a).data)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` at the end, or never if something fails."""
    path = Path(path)
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


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise ValueError if a file that starts so is what Git LFS leaves in the place of another."""
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )


# --- folders -------------------------------------------------------------------------------


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
        single, index = self.folder / "model.safetensors", self.folder / INDEX
        if single.exists():
            paths = [single]
        elif index.exists():
            yield from _indexed(index)
            return
        else:
            paths = _steps(self.folder)[-1:] or sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"No SafeTensors files found in {self.folder}")
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


INDEX = "model.safetensors.index.json"


def _indexed(index: Path) -> Iterator[tuple[TensorFile, list[str]]]:
    try:
        refuse_lfs_pointer(index, index.read_bytes()[:64])
        weight_map = dict(json.loads(index.read_text("utf-8"))["weight_map"])
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("file names are needed")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{index}: not an index of safetensors files ({error})") from None
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        names = [name for name, at in weight_map.items() if at == shard]
        if path.parent != index.parent or not path.exists():
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
