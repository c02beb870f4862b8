"""APR v2 files, byte for byte the same for the same model.

    header 64 | metadata, JSON | tensor index, sorted by name | data | CRC-32 of all before it

All numbers are little-endian; each section, and each tensor within the data, is padded with zeros
to a multiple of 64.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .apr_quantised import Q4, Q8, dequantised, quantised
from .config import APR_EXTRA, TransformerConfig
from .files import atomic_file, refuse_lfs_pointer
from .hf import (
    STORAGE,
    check_finite,
    check_sizes,
    check_writable,
    new_model,
    place_parameters,
    without_tied_head,
)
from .llama import Transformer
from .module import check_names, check_shapes, check_state
from .safetensors_io import convert, dtype_name

MAGIC = b"APR\0"
# magic, version, flags, tensors, metadata at, its size, index at, data at, CRC of the header
_HEADER = struct.Struct("<4sBBHIQIQQI20x")
_QUANTIZED, _ROW_MAJOR, _COLUMN_MAJOR = 0x20, 0x400, 0x800
_UNREADABLE = {0x1: "LZ4", 0x2: "ZSTD", 0x4: "encryption", 0x10: "sharding"}
_CODES = {"F32": 0, "F16": 1, "BF16": 30}
_NAMES = {code: name for name, code in _CODES.items()}
_LEGACY = {8: Q4, 9: Q8}
_QUANTISED = {"q4": Q4, "q8": Q8}
_LIMIT_NAME, _LIMIT_DIMS = 256, 8

# The fields that every file has, null where nothing is known.
_FIELDS = (
    "name",
    "description",
    "author",
    "license",
    "data_source",
    "data_license",
    "version",
    "source",
    "original_format",
    "created_at",
    "quantization",
    "sharding",
    "chat_template",
    "chat_format",
    "special_tokens",
    "architecture",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "vocab_size",
    "intermediate_size",
    "max_position_embeddings",
    "rope_theta",
    "rope_type",
    "rms_norm_eps",
    "head_dim",
    "num_experts",
)


@dataclass(frozen=True)
class AprEntry:
    """A tensor of a file: its type, its shape, and the bytes that hold it."""

    dtype: int
    shape: tuple[int, ...]
    data: memoryview

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def write_apr(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write float32, float16 or bfloat16 arrays, or entries; metadata is any JSON, keys get sorted.

    The same arguments give the same bytes, and what `read_apr` gives is written as it was. Raises
    ValueError for a name or a shape that the format cannot hold.
    """
    full = dict.fromkeys(_FIELDS) | {"model_type": "", "total_size": 0, "param_count": 0}
    full |= dict(metadata or {})
    try:
        text = json.dumps(full, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"write_apr: metadata that JSON holds is needed ({error})") from None
    meta, index, at = text.encode(), b"", 0
    order = sorted(tensors, key=lambda name: name.encode())
    codes = {name: _code(name, tensors[name]) for name in order}
    for name in order:
        shape, size, raw = tensors[name].shape, tensors[name].nbytes, name.encode()
        if len(raw) > _LIMIT_NAME or len(shape) > _LIMIT_DIMS:
            raise ValueError(
                f"write_apr: {name!r} {shape}: names of at most {_LIMIT_NAME} bytes and "
                f"{_LIMIT_DIMS} axes are needed"
            )
        index += struct.pack("<H", len(raw)) + raw
        index += struct.pack(f"<BB{len(shape) + 2}Q", codes[name], len(shape), *shape, at, size)
        at += _padded(size)
    index_at = 64 + _padded(len(meta))
    data_at = index_at + _padded(len(index))
    flags = _ROW_MAJOR | (_QUANTIZED if {Q4, Q8} & set(codes.values()) else 0)
    fields = (MAGIC, 2, 0, flags, len(order), 64, len(meta), index_at, data_at)
    header = _HEADER.pack(*fields, 0)
    crc = zlib.crc32(header[:40] + header[44:])
    with atomic_file(path) as f:
        total = 0

        def put(part: Any) -> None:
            nonlocal total
            part = bytes(part) + bytes(_padded(len(part)) - len(part))
            total = zlib.crc32(part, total)
            f.write(part)

        put(_HEADER.pack(*fields, crc))
        put(meta)
        put(index)
        for name in order:
            put(_bytes(tensors[name]))
        f.write(struct.pack("<I", total))


def _code(name: str, tensor: Any) -> int:
    if isinstance(tensor, AprEntry):
        return tensor.dtype
    code = _CODES.get(dtype_name(tensor))
    if code is None:
        raise ValueError(
            f"write_apr: {name} is {tensor.dtype}; float32, float16 or bfloat16 needed"
        )
    return code


def _bytes(tensor: Any) -> Any:
    if isinstance(tensor, AprEntry):
        return tensor.data
    a = tensor if isinstance(tensor, np.ndarray) else tensor.get()
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def _padded(n: int) -> int:
    return n + -n % 64


def read_apr(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, AprEntry]]:
    """The metadata and the tensors of a file, after both checksums were found right.

    Raises ValueError, naming the file and what is wrong with it.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    raw = path.read_bytes()
    refuse_lfs_pointer(path, raw[:64])

    def refuse(what: str) -> ValueError:
        return ValueError(f"{path}: not a readable APR v2 file: {what}")

    if len(raw) < 68 or raw[:4] != MAGIC:
        raise refuse("it does not start with an APR header" if len(raw) >= 68 else "too short")
    _, major, _, flags, count, meta_at, meta_size, index_at, data_at, crc = _HEADER.unpack(raw[:64])
    if zlib.crc32(raw[:40] + raw[44:64]) != crc:
        raise refuse("the checksum of the header is wrong")
    if major != 2:
        raise refuse(f"version {major}")
    if flags & _COLUMN_MAJOR:
        raise refuse("its matrices are column-major")
    for bit, name in _UNREADABLE.items():
        if flags & bit:
            raise refuse(f"it uses {name}, which is not supported")
    if not 64 <= meta_at <= meta_at + meta_size <= index_at <= data_at <= len(raw) - 4:
        raise refuse("its sections lie outside the file; it may be cut off")
    if zlib.crc32(memoryview(raw)[:-4]) != struct.unpack("<I", raw[-4:])[0]:
        raise refuse("the checksum at its end is wrong; it is cut off or damaged")
    try:
        metadata = json.loads(raw[meta_at : meta_at + meta_size])
        entries = _read_index(memoryview(raw)[index_at:data_at], count, memoryview(raw)[data_at:-4])
    except (struct.error, ValueError, RecursionError) as error:
        raise refuse(str(error)) from None
    if not isinstance(metadata, dict):
        raise refuse(f"its metadata is a {type(metadata).__name__}, not an object")
    return metadata, entries


def _read_index(index: memoryview, count: int, data: memoryview) -> dict[str, AprEntry]:
    entries: dict[str, AprEntry] = {}
    at, last = 0, b""
    for _ in range(count):
        (length,) = struct.unpack_from("<H", index, at)
        name = bytes(index[at + 2 : at + 2 + length])
        at += 2 + length
        code, ndim = struct.unpack_from("<BB", index, at)
        if length > _LIMIT_NAME or ndim > _LIMIT_DIMS:
            raise ValueError(f"entry {name[:40]!r}: {length} bytes of name, {ndim} axes")
        *shape, start, size = struct.unpack_from(f"<{ndim + 2}Q", index, at + 2)
        at += 2 + 8 * (ndim + 2)
        if entries and name <= last:
            raise ValueError(f"{name.decode()} stands after {last.decode()}: not sorted")
        if start + size > len(data):
            raise ValueError(f"{name.decode()} lies outside the data")
        last = name
        code = _LEGACY.get(code, code)
        entries[name.decode()] = AprEntry(code, tuple(shape), data[start : start + size])
    return entries


def apr_array(name: str, entry: AprEntry, dtype: str = "F32") -> np.ndarray:
    """The tensor in "F32" or "BF16", widened or rounded if it is stored otherwise."""
    n = math.prod(entry.shape)
    if entry.dtype in _NAMES:
        stored = _NAMES[entry.dtype]
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[stored]
        if len(entry.data) != n * np.dtype(kind).itemsize:
            raise ValueError(f"{name}: shape {entry.shape} and {len(entry.data)} bytes do not fit")
        values = np.frombuffer(entry.data, kind)
    else:
        raw = np.frombuffer(entry.data, np.uint8)
        stored, values = "F32", dequantised(name, raw, n, entry.dtype)
    out = convert(values, stored, dtype)
    return (out.copy() if out is values else out).reshape(entry.shape)


# --- models --------------------------------------------------------------------------------


def save_apr(
    model: Transformer,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
    quantize: str | None = None,
) -> None:
    """Write a `Transformer` as an APR v2 file; `metadata` adds to what it says of itself.

    `state` holds other arrays than the model's own, under its names (merged adapters). A tied
    head is not written. `quantize` is "q8" or "q4": the matrices of the layers are then AprQ8 or
    AprQ4; embeddings, head, norms and biases stay as they are. Raises ValueError, and writes
    nothing, if `metadata` describes another model or `state` is not finite.
    """
    if quantize not in (None, *_QUANTISED):
        raise ValueError(f'save_apr: quantize is None, "q8" or "q4", not {quantize!r}')
    if not isinstance(model, Transformer):
        raise TypeError(f"save_apr: a Transformer is needed, given {type(model).__name__}")
    config = model.config
    plain = {name: p.shape for name, p in Transformer.empty(config).named_parameters()}
    state = model.state_dict() if state is None else state
    check_state("save_apr", state)
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"save_apr: metadata is a dict, not a {type(metadata).__name__}")
    state = without_tied_head("save_apr", plain, state, "model.embed_tokens.weight")
    check_names("save_apr", plain, state)
    check_shapes("save_apr", plain, {name: a.shape for name, a in state.items()})
    fields = {
        "architecture": config.hf_model_type_name,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "head_dim": config.head_dim,
    }
    own = fields | {name: getattr(config, name) for name in APR_EXTRA}
    _check_metadata(metadata or {}, own)
    check_writable("save_apr", state)
    if quantize is not None:
        state = {name: _quantised(name, a, _QUANTISED[quantize]) for name, a in state.items()}
    write_apr(path, state, own | dict(metadata or {}))


def _check_metadata(metadata: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError if a user's metadata describes another model than `own` does."""
    for name in metadata.keys() & own.keys():
        value, right = metadata[name], own[name]
        if name == "architecture":  # any name of a decoder
            good = isinstance(value, str) and "bert" not in value.lower()
        else:
            good = value == (list(right) if isinstance(value, list) and right else right)
        if not good:
            raise ValueError(
                f"save_apr: metadata says {name} is {value!r}, the model's is {right!r}; "
                "leave it out"
            )


def _quantised(name: str, a: Any, code: int) -> Any:
    if a.ndim < 2 or not name.startswith("model.layers."):
        return a
    wide = convert(np.frombuffer(_bytes(a), a.dtype), dtype_name(a), "F32")
    return AprEntry(code, a.shape, memoryview(quantised(name, wide, code)))


def load_apr(path: str | os.PathLike[str], dtype: str = "float32") -> Transformer:
    """The model in an APR v2 file, trainable in float32; `dtype` as in `load_pretrained`.

    A head without values stands for a tied one. Tensors named `__training__.…` are passed over.
    Raises ValueError as `read_apr` does, and for tensors that do not make up the model.
    """
    if not isinstance(dtype, str) or dtype not in STORAGE:
        raise ValueError(f'load_apr: dtype is "float32" or "bfloat16", not {dtype!r}')
    metadata, entries = read_apr(path)
    head = "lm_head.weight"
    entries = {
        name: e
        for name, e in entries.items()
        if not name.startswith("__training__.") and not (name == head and not len(e.data))
    }
    try:
        config = TransformerConfig.from_apr_metadata(metadata)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: its metadata describes no model: {error}") from None
    if config is None:
        raise ValueError(f"{path}: its metadata does not give the sizes of the model")
    config = dataclasses.replace(config, tie_word_embeddings=head not in entries)
    check_sizes(str(path), config, {name: e.shape for name, e in entries.items()})
    model = new_model(config, str(path))
    assert isinstance(model, Transformer)
    parameters = dict(model.named_parameters())
    check_names(str(path), parameters, entries)
    check_shapes(
        str(path),
        {name: p.shape for name, p in parameters.items()},
        {name: e.shape for name, e in entries.items()},
    )
    place_parameters(model, STORAGE[dtype])
    for name, p in parameters.items():
        try:
            p.data[...] = apr_array(name, entries[name], dtype_name(p.data))
            check_finite(name, p.data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return model
