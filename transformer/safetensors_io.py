"""safetensors files, read tensor by tensor and written atomically.

    8 bytes: N, little-endian | N bytes: JSON {name: {dtype, shape, data_offsets}} | the data

Own code rather than the library's, because its NumPy side cannot read bfloat16, writes
non-contiguous arrays wrongly, and holds a file in memory as a whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from .files import atomic_file, json_object, refuse_lfs_pointer

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
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file")
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
                header = json_object(self.path, f.read(length))
                self.metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
                self.entries = {name: _entry(e, 8 + length) for name, e in header.items()}
            except (ValueError, TypeError, KeyError) as error:
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
        dtype = dtype or entry.dtype
        # F64 is what training in float64 saves of itself; no checkpoint loses half of its digits.
        narrowed = entry.dtype == "F64" != dtype
        if entry.dtype not in DTYPES or narrowed:
            raise ValueError(
                f"{self.path}: {name} is stored as {entry.dtype}; F32, F16 or BF16 is needed"
            )
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
    if not all(type(n) is int and n >= 0 for n in (start, stop, *shape)):
        raise ValueError(f"shape {shape} and offsets {start}, {stop} are not whole numbers >= 0")
    if known and stop - start != math.prod(shape) * np.dtype(known).itemsize:
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
