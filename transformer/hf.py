"""Checkpoint folders of Hugging Face: config.json and safetensors, in and out."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..autograd.buffers import ALIGN
from ..autograd.device import to_host
from .config import TransformerConfig
from .decoder import PAD, Decoder, DecoderConfig
from .files import atomic_file, make_folder, read_json
from .hf_config import Config, config_from_hf, config_to_hf
from .llama import Transformer
from .module import check_names, check_shapes, check_state
from .safetensors_io import DTYPES, convert, dtype_name
from .shards import TensorFolder, shard_limit, write_weights

STORAGE = {"float32": "F32", "bfloat16": "BF16"}
# Buffers that some versions wrote beside the weights: causal masks and rotary frequencies.
_BUFFERS = re.compile(r"(^|\.)h\.\d+\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
_CONV1D = re.compile(r"\.(qkv|proj|fc)\.weight$")  # GPT-2 stores these as (in, out)


def load_pretrained(
    folder: str | os.PathLike[str], dtype: str = "float32"
) -> Transformer | Decoder:
    """The model in a checkpoint folder, with `training` off; in float32 ready to be trained.

    With `dtype="bfloat16"` the matrices stay in 16 bits and are widened where they are used; the
    norms and biases, and "float32" as a whole, are float32. A head that is stored beside tied
    embeddings and differs from them unties them.

    Raises FileNotFoundError or ValueError, and loads nothing, if the folder is not whole, if the
    tensors are not those of the model that config.json describes, if one is not finite, or if
    that model has an architecture or a setting that is not implemented.
    """
    if not isinstance(dtype, str) or dtype not in STORAGE:
        raise ValueError(f'load_pretrained: dtype is "float32" or "bfloat16", not {dtype!r}')
    source = read_config(folder)
    try:
        config = config_from_hf(source)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    files = TensorFolder(folder)
    names = _own_names(files, config)
    check_sizes(str(folder), config, {own: files.shape(name) for own, name in names.items()})
    config = _untied_if_needed(config, files, names)
    model = new_model(config, str(folder))
    parameters = dict(model.named_parameters())
    head = "lm_head.weight"
    if head in names and head not in parameters:
        del names[head]  # tied, and equal
    check_names(str(folder), parameters, names)
    shapes = {own: files.shape(name) for own, name in names.items()}
    for own in shapes:
        if isinstance(model, Decoder) and _CONV1D.search(own):
            shapes[own] = shapes[own][::-1]
    check_shapes(str(folder), {own: p.shape for own, p in parameters.items()}, shapes)
    place_parameters(model, STORAGE[dtype])
    for own, p in parameters.items():
        turned = isinstance(model, Decoder) and _CONV1D.search(own)
        files.read(names[own], dtype_name(p.data), p.data.T if turned else p.data)
        check_finite(names[own], p.data)
    model.source = source
    if isinstance(model, Decoder) and source.get("pad_token_id") != PAD:
        model.ignore_index = -100  # in GPT-2's vocabulary 0 is a word
    model.eval()  # no dropout until it is trained, as transformers does
    return model


def check_sizes(what: str, config: Config, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if a model has far more values than `shapes`, before memory is taken."""
    if isinstance(config, DecoderConfig):
        C, first = config.d_model, "blocks.0."
        wanted = {"tokens.weight": (config.vocab, C), "positions.weight": (config.block, C)}
        wanted[f"{first}mlp.fc.weight"] = C, config.ff
    else:
        C, first = config.hidden_size, "model.layers.0."
        wanted = {"model.embed_tokens.weight": (config.vocab_size, C)}
        wanted[f"{first}mlp.gate_proj.weight"] = config.intermediate_size, C
        wanted[f"{first}self_attn.q_proj.weight"] = config.q_dim, C
        wanted[f"{first}self_attn.k_proj.weight"] = config.kv_dim, C
    there = {name: shapes[name] for name in wanted if name in shapes}
    check_shapes(what, {name: wanted[name] for name in there}, there)
    if config.num_hidden_layers > max(len(shapes), 1000):
        raise ValueError(
            f"{what}: the config says {config.num_hidden_layers} layers, but there are only "
            f"{len(shapes)} tensors"
        )


def new_model(config: Config, what: str = "save_pretrained") -> Transformer | Decoder:
    """A model without values for its matrices; MemoryError, naming `what`, if it does not fit."""
    kind = Transformer if isinstance(config, TransformerConfig) else Decoder
    try:
        return kind.empty(config)
    except MemoryError as error:
        raise MemoryError(f"{what}: {error}") from None


def place_parameters(model: Transformer | Decoder, storage: str) -> None:
    """Give the parameters new arrays in one stretch of memory, matrices of the type `storage`.

    The system maps a large stretch in large pages, and decoding reads it up to a third faster.
    """
    types = [DTYPES[storage if p.ndim > 1 else "F32"] for p in model.parameters()]
    sizes = [p.size * np.dtype(t).itemsize for p, t in zip(model.parameters(), types, strict=True)]
    ends = np.cumsum([-(-n // ALIGN) * ALIGN for n in sizes])
    raw = np.empty(int(ends[-1]) + ALIGN, np.uint8)
    # Memory, not a view of an array: each parameter is locked and unlocked for itself.
    memory = raw.data[-raw.ctypes.data % ALIGN :]
    for p, t, n, end in zip(model.parameters(), types, sizes, ends, strict=True):
        start = int(end) - -(-n // ALIGN) * ALIGN
        if t == np.uint16:
            p.requires_grad = False
        p.data = np.frombuffer(memory[start : start + n], t).reshape(p.shape)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint folder: it has no config.json")
    return read_json(path)


def _own_names(files: TensorFolder, config: Config) -> dict[str, str]:
    """Our name of each stored weight -> the name in the files."""
    stored = [name for name in files.files if not _BUFFERS.search(name)]
    if isinstance(config, TransformerConfig):
        return {name: name for name in stored}
    # The names alone, of a model that takes no memory: the sizes are not checked yet.
    layers = min(config.n_layer, len(stored) + 1)
    small = dataclasses.replace(
        config, n_layer=layers, n_head=1, d_model=1, d_ff=1, vocab=1, block=1
    )
    back = {Decoder.hf_name(own): own for own, _ in Decoder.empty(small).named_parameters()}
    back["lm_head.weight"] = "lm_head.weight"
    # Files of the bare GPT-2, as on the hub, lack the prefix.
    full = {name: name if name in back else f"transformer.{name}" for name in stored}
    return {back.get(full[name], name): name for name in stored}


def _untied_if_needed(config: Config, files: TensorFolder, names: Mapping[str, str]) -> Config:
    llama = isinstance(config, TransformerConfig)
    table, head = "model.embed_tokens.weight" if llama else "tokens.weight", "lm_head.weight"
    if not (config.tie_word_embeddings if llama else config.tie):
        return config
    if head not in names or table not in names:
        return config
    a, b = names[table], names[head]
    if files.shape(a) == files.shape(b) and np.array_equal(files.read(a), files.read(b)):
        return config
    return dataclasses.replace(config, **{"tie_word_embeddings" if llama else "tie": False})


def check_finite(name: str, a: np.ndarray) -> None:
    """Raise ValueError at the first NaN or infinity of a float32 array or bfloat16 bits."""
    flat = a.reshape(-1)
    for n in range(0, flat.size, 1 << 20):
        part = flat[n : n + (1 << 20)]
        wrong = (part & 0x7F80) == 0x7F80 if a.dtype == np.uint16 else ~np.isfinite(part)
        if wrong.any():
            at = n + int(wrong.argmax())
            raise ValueError(f"NaN/Inf detected in weight '{name}' at index {at}")


def check_writable(what: str, tensors: Mapping[str, Any], dtype: str | None = None) -> None:
    """Raise ValueError for arrays that, as `dtype` or as they are, no loader would take."""
    for name, a in tensors.items():
        a = to_host(a)
        try:
            stored = dtype_name(a)
        except ValueError as error:
            raise ValueError(f"{what}: {name}: {error}") from None
        try:
            with np.errstate(over="ignore"):
                check_finite(name, convert(a, stored, dtype or stored))
        except ValueError as error:
            raise ValueError(f"{what}: {error}, which could not be loaded") from None


# --- saving --------------------------------------------------------------------------------


def save_pretrained(
    model: Transformer | Decoder,
    folder: str | os.PathLike[str],
    *,
    state: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Write a checkpoint folder that `load_pretrained` and transformers open.

    `state` holds other arrays than the model's own, under its names (merged adapters); `dtype` is
    "float32" or "bfloat16", by default the smallest that keeps every value. Weights of more than
    `max_shard_size` bytes (or such as "5GB") are cut into shards with an index. Each file appears
    when it is whole, the index last. Raises ValueError, and writes nothing, for a model that no
    architecture of transformers equals, for one that carries adapters when no `state` without them
    is given, and for values that are not finite in `dtype`.
    """
    if not isinstance(model, Transformer | Decoder):
        raise TypeError(
            f"save_pretrained: a Transformer or a Decoder is needed, given a {type(model).__name__}"
        )
    if dtype is not None and not (isinstance(dtype, str) and dtype in STORAGE):
        raise ValueError(f'save_pretrained: dtype is "float32" or "bfloat16", not {dtype!r}')
    limit = None if max_shard_size is None else shard_limit(max_shard_size)
    state = model.state_dict() if state is None else state
    check_state("save_pretrained", state)
    plain = {name: p.shape for name, p in new_model(model.config).named_parameters()}
    table = "tokens.weight" if isinstance(model, Decoder) else "model.embed_tokens.weight"
    state = without_tied_head("save_pretrained", plain, state, table)
    try:
        check_names("save_pretrained", plain, state)
    except ValueError as error:
        raise ValueError(f"{error}; adapters must be merged first, or `state` be given") from None
    check_shapes("save_pretrained", plain, {name: a.shape for name, a in state.items()})
    tensors = dict(state)
    if isinstance(model, Decoder):
        turned = {k: a.T if _CONV1D.search(k) else a for k, a in tensors.items()}
        tensors = {Decoder.hf_name(k): a for k, a in turned.items()}
    check_writable("save_pretrained", tensors, STORAGE[dtype or "float32"])
    dtype = dtype or smallest_exact(tensors)
    config = checkpoint_config(model, dtype)
    folder = make_folder("save_pretrained", folder)
    write_weights(folder, tensors, STORAGE[dtype], limit)
    with atomic_file(folder / "config.json") as f:
        f.write((json.dumps(config, indent=2) + "\n").encode())


def without_tied_head(what: str, plain: Any, state: Mapping[str, Any], table: str) -> dict:
    """`state` as NumPy arrays, without the head of a model that ties it to its table.

    ValueError if the two differ.
    """
    head, state = "lm_head.weight", {name: to_host(a) for name, a in state.items()}
    if head in plain or head not in state:
        return state
    if table in state and not np.array_equal(state[head], state[table]):
        raise ValueError(
            f"{what}: the head and the embeddings are one tensor of this model, but the given "
            "arrays differ; merge_lora the model and save that, without `state`"
        )
    return {k: v for k, v in state.items() if k != head}


def checkpoint_config(model: Transformer | Decoder, dtype: str) -> dict[str, Any]:
    """The config.json that `save_pretrained` writes beside weights held as `dtype`."""
    config = dict(model.source or {})
    for name in ("rope_parameters", "dtype"):  # version 5 of what stands in ours as version 4
        config.pop(name, None)
    config |= config_to_hf(model.config, dtype)
    if isinstance(model, Decoder) and model.ignore_index == PAD:
        config["pad_token_id"] = PAD
    return config


def smallest_exact(tensors: Mapping[str, Any]) -> str:
    """ "bfloat16" if matrices are held so and the rest loses nothing by it, else "float32"."""
    kinds = {dtype_name(a) for a in tensors.values() if a.ndim > 1}
    if kinds != {"BF16"}:
        return "float32"
    for a in tensors.values():
        if dtype_name(a) != "BF16":
            short = convert(convert(a, "F32", "BF16"), "BF16", "F32")
            if not np.array_equal(short, a):
                return "float32"
    return "bfloat16"
