"""Checkpoint folders: what comes back, what is refused, and what a broken file says."""

import dataclasses
import json
import os
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from afinar.autograd import no_grad
from afinar.transformer import (
    Decoder,
    DecoderConfig,
    Transformer,
    TransformerConfig,
    load_pretrained,
    save_apr,
    save_pretrained,
)
from afinar.transformer.files import atomic_file
from afinar.transformer.hf_config import config_from_hf
from afinar.transformer.safetensors_io import TensorFile, convert, write_safetensors
from afinar.transformer.shards import shard_limit

TINY = TransformerConfig.tiny()
SMALL = dataclasses.replace(TINY, vocab_size=50, intermediate_size=32)
GPT2 = DecoderConfig(vocab=50, n_layer=2, n_head=2, d_model=16, block=32, activation="gelu_tanh")
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    save_pretrained(Transformer(SMALL, seed=1), tmp_path)
    return tmp_path


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(folder, **tensors):
    """Tensors replaced, added, or (None) left out."""
    path = folder / "model.safetensors"
    old = safetensors.numpy.load_file(path)
    new = {k: v for k, v in (old | tensors).items() if v is not None}
    write_safetensors(path, new)


def same(a, b):
    for (name, p), (other, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert name == other
        np.testing.assert_array_equal(p.data, q.data)


# --- files ---------------------------------------------------------------------------------


def test_the_bytes_are_those_of_the_library(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "b": rng.normal(size=(3, 5)).astype(np.float32),
        "a": rng.normal(size=7).astype(np.float16),
        "é": rng.normal(size=(2, 1, 2)).astype(np.float32),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    expected = safetensors.numpy.save(tensors, {"format": "pt"})
    assert (tmp_path / "x.safetensors").read_bytes() == expected
    file = TensorFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"}
    for name, a in tensors.items():
        np.testing.assert_array_equal(file.read(name), a)


def test_arrays_in_any_layout_are_written_right(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {"f": np.asfortranarray(x), "t": x.T, "step": x[::2, ::3], "back": x[::-1]}
    write_safetensors(tmp_path / "x.safetensors", views)
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    for name, view in views.items():
        np.testing.assert_array_equal(loaded[name], view)


@given(st.lists(st.floats(width=32), max_size=20))
def test_bfloat16_rounds_to_nearest_even(values):
    x = np.array(values, np.float32)
    back = convert(convert(x, "F32", "BF16"), "BF16", "F32")
    bits = convert(x, "F32", "BF16").astype(np.int64)
    for a, b, n in zip(x.astype(np.float64), back.astype(np.float64), bits, strict=True):
        if np.isnan(a):
            assert np.isnan(b)
            continue
        sides = [
            float(convert(np.array([max(min(m, 0xFF80), 0)], np.uint16), "BF16", "F32")[0])
            for m in (n - 1, n + 1)
            if (m & 0x7FFF) <= 0x7F80 and (m ^ n) < 0x8000
        ]
        if np.isinf(b):
            assert np.isinf(a) or abs(a) >= 2.0**127 * (2 - 2.0**-8)
            continue
        assert all(abs(a - b) <= abs(a - s) for s in sides if np.isfinite(s))
        if any(abs(a - b) == abs(a - s) for s in sides):
            assert n % 2 == 0


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    with pytest.raises(TypeError), atomic_file(path) as f:
        f.writelines([b"half", "not bytes"])
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


# --- round trips ---------------------------------------------------------------------------


CONFIGS = {
    "tied": SMALL,
    "untied": dataclasses.replace(SMALL, tie_word_embeddings=False),
    "llama": dataclasses.replace(
        SMALL,
        attention_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_dim=20,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    ),
    "mistral": dataclasses.replace(SMALL, sliding_window=7, num_kv_heads=1),
    "qwen2": dataclasses.replace(
        SMALL,
        attention_bias=True,
        sliding_window=7,
        layer_types=("full_attention", "sliding_attention"),
    ),
    "qwen3": dataclasses.replace(SMALL, qk_norm=True, head_dim=20),
    "gpt2": GPT2,
    "gpt2-untied": dataclasses.replace(GPT2, tie=False, d_ff=24, activation="gelu"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name, tmp_path):
    config = CONFIGS[name]
    cls = Decoder if isinstance(config, DecoderConfig) else Transformer
    model = cls(config, seed=4)
    rng = np.random.default_rng(0)
    for p in model.parameters():
        p.data[...] += rng.normal(0, 0.1, p.shape)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert type(again) is cls
    same(model, again)
    for f in dataclasses.fields(config):
        if not f.name.startswith("hf_"):
            assert getattr(again.config, f.name) == getattr(config, f.name), f.name
    assert all(p.requires_grad for p in again.parameters())
    first = (tmp_path / "model.safetensors").read_bytes()
    config_json = (tmp_path / "config.json").read_bytes()
    save_pretrained(again, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == first
    assert (tmp_path / "config.json").read_bytes() == config_json


def test_bfloat16_stays_in_16_bits(tmp_path):
    model = Transformer(SMALL, seed=1)
    save_pretrained(model, tmp_path, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    short = load_pretrained(tmp_path, "bfloat16")
    wide = load_pretrained(tmp_path)
    for (name, p), q in zip(short.named_parameters(), wide.parameters(), strict=True):
        assert p.dtype == (np.uint16 if p.ndim == 2 else np.float32), name
        bits = p.data if p.ndim == 2 else convert(p.data, "F32", "BF16")
        np.testing.assert_array_equal(convert(bits, "BF16", "F32"), q.data)
    ids = np.random.default_rng(0).integers(0, 50, (2, 9))
    with no_grad():
        np.testing.assert_array_equal(short(ids).numpy(), wide(ids).numpy())
    assert short.loss(ids, ids).item() == wide.loss(ids, ids).item()
    first = (tmp_path / "model.safetensors").read_bytes()
    save_pretrained(short, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == first


def test_what_is_not_ours_in_the_config_is_kept(folder):
    change_config(folder, eos_token_id=[2, 3], _name_or_path="somewhere")
    model = load_pretrained(folder)
    save_pretrained(model, folder / "out")
    config = json.loads((folder / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["_name_or_path"]) == ([2, 3], "somewhere")


def test_other_arrays_than_the_model_s_own(folder):
    model = load_pretrained(folder)
    state = {k: a + 1 for k, a in model.state_dict().items()}
    save_pretrained(model, folder, state=state)
    for name, p in load_pretrained(folder).named_parameters():
        np.testing.assert_array_equal(p.data, state[name])
    with pytest.raises(ValueError, match=r"unexpected .*lora_A.*adapters must be merged"):
        save_pretrained(model, folder, state=state | {"x.lora_A.0": state[NAME]})


def test_a_head_beside_tied_embeddings(folder):
    table = load_pretrained(folder).model.embed_tokens.weight.data
    change_tensors(folder, **{"lm_head.weight": table.copy()})
    assert load_pretrained(folder).config.tie_word_embeddings
    change_tensors(folder, **{"lm_head.weight": table + 1})
    model = load_pretrained(folder)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.lm_head.weight.data, table + 1)
    save_pretrained(model, folder / "out")
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    same(model, load_pretrained(folder / "out"))


def test_gpt2_as_it_is_on_the_hub(tmp_path):
    """No `transformer.` prefix, mask buffers beside the weights, matrices as (in, out)."""
    model = Decoder(GPT2, seed=1)
    save_pretrained(model, tmp_path)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert stored["transformer.h.0.attn.c_attn.weight"].shape == (16, 48)
    bare = {name.removeprefix("transformer."): a for name, a in stored.items()}
    bare |= {f"h.{n}.attn.bias": np.ones((1, 1, 32, 32), np.float32) for n in range(2)}
    bare |= {"h.0.attn.masked_bias": np.array(-1e4, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", bare)
    same(model, load_pretrained(tmp_path))
    change_tensors(tmp_path, **{"h.1.attn.c_attn.bias": None})
    with pytest.raises(ValueError, match=r"missing blocks.1.attn.qkv.bias"):
        load_pretrained(tmp_path)


# --- shards --------------------------------------------------------------------------------


def shard(folder, parts=3):
    """The folder's file cut into shards, with an index."""
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{n % parts}.safetensors" for n, name in enumerate(sorted(stored))}
    for file in set(where.values()):
        write_safetensors(folder / file, {k: a for k, a in stored.items() if where[k] == file})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index, where


def test_shards(folder):
    model = load_pretrained(folder)
    shard(folder)
    same(model, load_pretrained(folder))


def test_a_wrong_index_is_named(folder):
    index, where = shard(folder)
    (folder / "folder").mkdir()
    for change, message in (
        ({NAME: "model-9.safetensors"}, f"{NAME} should be in model-9.safetensors, which does not"),
        ({"x": where[NAME]}, f"x should be in {where[NAME]}, which does not have it"),
        ({NAME: None}, f"{where[NAME]} has {NAME}, which the index does not list"),
        *(
            ({NAME: path}, f"{NAME} should be in {re.escape(repr(path))}, which is no file's name")
            for path in ("../model-0.safetensors", str(index), "a/b", "..", ".", "./x", 3, ["x"])
        ),
        ({NAME: "folder"}, f"{NAME} should be in folder, which does not exist"),
    ):
        changed = {k: v for k, v in (where | change).items() if v}
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ValueError, match=f"index.json: .*{message}"):
            load_pretrained(folder)
    first = json.dumps({"x": where[NAME]})[1:-1]
    for text, message in (
        ("{}", "not an index"),
        ('{"weight_map": []}', "not an index"),
        ("[]", "an object is needed"),
        ('{"weight_map": {' + f"{first}, {first}" + "}}", "'x' stands twice"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("[" * 100_000, "not JSON"),
        ("\ud800", "not JSON"),
    ):
        index.write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(ValueError, match=f"index.json.*{message}"):
            load_pretrained(folder)


def test_shards_without_an_index_are_not_loaded(folder):
    save_pretrained(load_pretrained(folder), folder, max_shard_size=9000)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has the shard model-00001-of-\d+.safetensors"):
        load_pretrained(folder)


def test_saving_in_shards(folder):
    model = load_pretrained(folder)
    save_pretrained(model, folder, max_shard_size=9000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    n = len(files)
    assert n > 2
    assert files == [f"model-{k:05}-of-{n:05}.safetensors" for k in range(1, n + 1)]
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        *files,
        "model.safetensors.index.json",
    ]
    parts = {file: safetensors.numpy.load_file(folder / file) for file in files}
    assert {k: f for f, part in parts.items() for k in part} == index["weight_map"]
    sizes = {f: sum(a.nbytes for a in part.values()) for f, part in parts.items()}
    assert all(sizes[f] <= 9000 or len(parts[f]) == 1 for f in files)
    assert index["metadata"]["total_size"] == sum(sizes.values()) == 4 * model.num_parameters
    same(model, load_pretrained(folder))

    # Other shards, one file, and shards again take the place of what was there.
    save_pretrained(model, folder, max_shard_size="20 KB", dtype="bfloat16")
    total = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
    assert total["total_size"] == 2 * model.num_parameters
    load_pretrained(folder)
    for limit in (None, 10**9, "5GB"):
        save_pretrained(model, folder, max_shard_size=limit)
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
        same(model, load_pretrained(folder))


def test_a_save_that_fails_leaves_the_old_weights(folder, monkeypatch):
    from afinar.transformer import shards

    model = load_pretrained(folder)
    old = model.state_dict()[NAME].copy()
    model.model.norm.weight.data[...] += 1
    written = []

    def failing(path, *rest):
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return write_safetensors(path, *rest)

    monkeypatch.setattr(shards, "write_safetensors", failing)
    with pytest.raises(OSError, match="No space left"):
        save_pretrained(model, folder, max_shard_size=9000)
    again = load_pretrained(folder)
    np.testing.assert_array_equal(again.state_dict()[NAME], old)
    np.testing.assert_array_equal(again.model.norm.weight.data, model.model.norm.weight.data - 1)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "5", "5 TB", "GB", "1.5GB", ""])
def test_wrong_shard_sizes_are_named(size, tmp_path):
    with pytest.raises(ValueError, match="max_shard_size is"):
        save_pretrained(Transformer(SMALL), tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()
    assert shard_limit("2MiB") == 2 * 1024**2


def test_numbered_steps_and_loose_files(folder):
    model = load_pretrained(folder)
    single = folder / "model.safetensors"
    for step in (9, 10, 2):
        state = {k: a + step for k, a in model.state_dict().items()}
        write_safetensors(folder / f"model-step-{step}.safetensors", state)
    single.rename(folder / "kept")
    loaded = load_pretrained(folder).state_dict()
    np.testing.assert_array_equal(loaded[NAME], model.state_dict()[NAME] + 10)
    for step in (9, 10, 2):
        (folder / f"model-step-{step}.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="No SafeTensors files found in"):
        load_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin is a pickle"):
        load_pretrained(folder)
    state = list(model.state_dict().items())
    write_safetensors(folder / "a.safetensors", dict(state[:5]))
    write_safetensors(folder / "b.safetensors", dict(state[5:]))
    same(model, load_pretrained(folder))
    write_safetensors(folder / "c.safetensors", dict(state[:1]))
    with pytest.raises(ValueError, match=f"{state[0][0]} is in a.safetensors and in c.safetensors"):
        load_pretrained(folder)


# --- refusals ------------------------------------------------------------------------------


def test_tensors_that_do_not_fit_are_named(folder):
    good = safetensors.numpy.load_file(folder / "model.safetensors")
    for change, message in (
        ({NAME: None}, f"missing {NAME}"),
        ({"other": good[NAME]}, "unexpected other"),
        ({NAME: good[NAME].T}, rf"{NAME} is \(64, 32\), the model needs \(32, 64\)"),
        ({NAME: good[NAME].astype(np.float16) * np.float16(np.inf)}, f"'{NAME}' at index 0"),
        ({NAME: np.where(good[NAME] == good[NAME][3, 5], np.nan, good[NAME])}, "at index 197"),
    ):
        write_safetensors(folder / "model.safetensors", good)
        change_tensors(folder, **change)
        with pytest.raises(ValueError, match=message):
            load_pretrained(folder)


def test_tensors_of_other_types_are_refused(folder):
    good = safetensors.numpy.load_file(folder / "model.safetensors")
    good[NAME] = good[NAME].astype(np.int8)
    safetensors.numpy.save_file(good, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{NAME} is stored as I8"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [1, 8], "data_offsets": [0, 32]}, "b": 3}, "not a safe"),
        ({"a": {"dtype": "F32", "shape": [-1, -8], "data_offsets": [0, 32]}}, "not whole numbers"),
        ({"a": {"dtype": "F32", "shape": [1, 8], "data_offsets": [0.0, 32]}}, "not whole numbers"),
        ({"a": {"dtype": "F32", "shape": [True, 8], "data_offsets": [0, 32]}}, "not whole number"),
        ({"a": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]}}, "overlap or leave holes"),
        ({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
          "b": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}}, "overlap"),
        ({"a": {"dtype": "I8", "shape": [8], "data_offsets": [32, 0]}}, "overlap"),
        ({"a": {"dtype": "F32", "shape": [8]}}, "data_offsets"),
        ({"__metadata__": 3}, "not a safetensors file"),
        ("[1, 2]", "an object is needed"),
        ('{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, '
         '"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}', "'a' stands twice"),
        ("[" * 100_000, "not a safetensors file"),
    ],
)  # fmt: skip
def test_headers_that_lie(folder, header, message):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    raw = struct.pack("<Q", len(text)) + text + bytes(32)
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(ValueError, match=f"model.safetensors: .*{message}"):
        load_pretrained(folder)


def test_what_is_no_file(folder):
    path = folder / "model.safetensors"
    path.rename(folder / "blob")
    path.symlink_to("blob")  # as in the cache of the hub
    load_pretrained(folder)
    (folder / "blob").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: no such file"):
        load_pretrained(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors: no such file"):
        load_pretrained(folder)


def test_a_file_that_cannot_be_read_is_named(folder):
    path = folder / "model.safetensors"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("the system lets this user read everything")
    with pytest.raises(PermissionError, match=r"model\.safetensors"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-10], "is cut off"),
        (lambda raw: raw[:40], "is cut off"),
        (lambda raw: raw[:3], "not a safetensors file"),
        (lambda raw: b"", "not a safetensors file"),
        (lambda raw: raw + b"x", "bytes that its header does not know"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        (lambda raw: raw[:9] + b"\xff" + raw[10:], "not a safetensors file"),
        (lambda raw: struct.pack("<Q", 10**12) + raw[8:], "not a safetensors file"),
        (lambda raw: raw.replace(b"[1,", b"[2,", 1), "not a safetensors file"),
    ],
)
def test_damaged_files_say_what_is_wrong(folder, damage, message):
    path = folder / "model.safetensors"
    write_safetensors(path, {"a": np.ones((1, 8), np.float32)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"model.safetensors.*{message}"):
        load_pretrained(folder)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_pretrained(tmp_path)
    for text, message in (
        ("{", "not JSON"),
        ("[]", "an object is needed"),
        ("version https://git-lfs.github.com", "Git LFS pointer"),
        ("[" * 100_000, "not JSON"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "'model_type' stands twice"),
        ("{}", "model_type None is not supported"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not 'float8'"):
        load_pretrained(tmp_path, "float8")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gemma2"),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("quantization_config", {"bits": 4}),
        ("residual_multiplier", 0.22),
        ("num_local_experts", 8),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("hidden_size", None),
    ],
)
def test_settings_that_change_the_maths_are_refused_by_name(folder, field, value):
    change_config(folder, **{field: value})
    name = "rope_" if field.startswith("rope_") else field.removesuffix("s")
    with pytest.raises(ValueError, match=name):
        load_pretrained(folder)


def test_partial_rotation_is_refused_where_version_5_has_it(folder):
    change_config(folder, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    with pytest.raises(ValueError, match=r"partial_rotary_factor is 0.5"):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_function", "relu"),
        ("scale_attn_by_inverse_layer_idx", True),
        ("reorder_and_upcast_attn", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("resid_pdrop", 0.3),
    ],
)
def test_gpt2_settings_that_are_refused(tmp_path, field, value):
    save_pretrained(Decoder(GPT2), tmp_path)
    change_config(tmp_path, **{field: value})
    with pytest.raises(ValueError, match=field):
        load_pretrained(tmp_path)


def test_what_absent_keys_mean():
    base = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "vocab_size": 50,
    }
    mistral = config_from_hf(base | {"model_type": "mistral"})
    assert (mistral.sliding_window, mistral.num_kv_heads) == (4096, 8)
    none = config_from_hf(base | {"model_type": "mistral", "sliding_window": None})
    assert none.sliding_window is None
    qwen2 = config_from_hf(base | {"model_type": "qwen2", "sliding_window": 8})
    assert (qwen2.sliding_window, qwen2.attention_bias, qwen2.o_bias) == (None, True, False)
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    qwen2 = config_from_hf(base | {"model_type": "qwen2"} | sliding)
    assert qwen2.layer_types == ("full_attention", "sliding_attention")
    assert [qwen2.window(n) for n in range(2)] == [None, 8]
    qwen3 = config_from_hf(base | {"model_type": "qwen3", "attention_bias": True})
    assert (qwen3.head_dim, qwen3.o_bias, qwen3.qk_norm) == (128, True, True)
    llama = config_from_hf(base | {"model_type": "llama", "rms_norm_eps": 1e-5})
    assert (llama.num_kv_heads, llama.rope_theta, llama.tie_word_embeddings) == (32, 1e4, False)
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 8, "vocab_size": 9}
    gpt2 = config_from_hf(gpt2 | {"model_type": "gpt2"})
    assert (gpt2.tie, gpt2.activation, gpt2.ff) == (True, "gelu_tanh", 128)


def test_models_that_transformers_has_no_name_for(tmp_path):
    for change, name in (
        ({"o_bias": True}, "o_bias"),
        ({"hf_model_type": "llama", "qk_norm": True}, "qk_norm"),
        ({"qk_norm": True, "qk_norm_eps": 1e-5}, "qk_norm_eps"),
    ):
        with pytest.raises(ValueError, match=f"no {name} = "):
            save_pretrained(Transformer(dataclasses.replace(SMALL, **change)), tmp_path)
    with pytest.raises(ValueError, match="learned positions"):
        save_pretrained(Decoder(dataclasses.replace(GPT2, pos="rope")), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    for model in (Transformer(SMALL), Decoder(GPT2)):
        state = model.state_dict()
        name = next(iter(state))
        # 3.4e38 is finite, but above all that bfloat16 holds.
        for value, dtype in ((np.nan, None), (-np.inf, None), (3.4e38, "bfloat16")):
            broken = state[name].copy()
            broken.reshape(-1)[7] = value
            with pytest.raises(ValueError, match=r"save_pretrained: NaN/Inf .* at index 7, "):
                save_pretrained(model, tmp_path / "new", state=state | {name: broken}, dtype=dtype)
        wide = state[name].astype(np.float64) + 1e300
        with pytest.raises(ValueError, match="at index 0"):
            save_pretrained(model, tmp_path / "new", state=state | {name: wide})
        with pytest.raises(ValueError, match="float32, float16 or bfloat16 is needed, given int"):
            save_pretrained(model, tmp_path / "new", state=state | {name: np.ones_like(wide, int)})
        with pytest.raises(TypeError, match="a dict of arrays is needed, given a list"):
            save_pretrained(model, tmp_path / "new", state=list(state.values()))
    with pytest.raises(TypeError, match="a Transformer or a Decoder is needed, given a str"):
        save_pretrained("x", tmp_path / "new")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="load_state_dict: a dict of arrays is needed"):
        Transformer(SMALL).load_state_dict([])


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file/sub/new"):
        with pytest.raises(ValueError, match=f"save_pretrained: {tmp_path}/file is a file; a fold"):
            save_pretrained(Transformer(SMALL), folder)
    with pytest.raises(ValueError, match="is a folder; the name of a file is needed"):
        save_apr(Transformer(SMALL), tmp_path)
    with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path}/none"):
        save_apr(Transformer(SMALL), tmp_path / "none/m.apr")
    assert (tmp_path / "file").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


def test_sizes_that_no_memory_holds_are_one_sentence(tmp_path):
    for model, field in (
        (Transformer(SMALL), "intermediate_size"),
        (Transformer(SMALL), "hidden_size"),
        (Transformer(SMALL), "vocab_size"),
        (Decoder(GPT2), "n_inner"),
        (Decoder(GPT2), "n_embd"),
        (Decoder(GPT2), "n_positions"),
        (Decoder(GPT2), "n_layer"),
    ):
        for size in (10**13 * 16, 10**18 * 16):
            save_pretrained(model, tmp_path)
            change_config(tmp_path, **{field: size})
            with pytest.raises(ValueError, match=f"{tmp_path}: .*{size}|shapes do not match"):
                load_pretrained(tmp_path)
    for size in (10**13, 10**18, 10**30):
        with pytest.raises(MemoryError, match=rf"\({size}, .* does not fit into memory; a small"):
            Transformer(dataclasses.replace(SMALL, intermediate_size=size))


def test_float64_is_no_type_of_a_checkpoint(folder):
    path = folder / "model.safetensors"
    file = TensorFile(path)
    tensors = {name: file.read(name) for name in file.entries}
    wide = {name: a.astype(np.float64) for name, a in tensors.items()}
    safetensors.numpy.save_file(wide, path)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(ValueError, match="is stored as F64; F32, F16 or BF16 is needed"):
            load_pretrained(folder, dtype)
    for name, a in wide.items():  # but snapshots of a training in float64 hold it
        np.testing.assert_array_equal(TensorFile(path).read(name), a)


# --- a real model --------------------------------------------------------------------------

FOLDER = os.environ.get("AFINAR_SMOLLM2")
real = pytest.mark.skipif(FOLDER is None, reason="AFINAR_SMOLLM2 names no folder")
IDS = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 7042, 314, 260, 3575, 282]
IDS += [4649, 28, 284, 11452, 314, 260, 3575, 282, 4521, 30]


@pytest.mark.real
@real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_has_its_published_loss(dtype):
    model = load_pretrained(FOLDER, dtype)
    assert abs(model.loss([IDS[:-1]], [IDS[1:]]).item() - 2.6648) < 1e-4


@pytest.mark.real
@real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_little_more_than_what_is_kept(dtype):
    program = f"""
from afinar.train.environment import peak_memory_mb
from afinar.transformer import load_pretrained
before = peak_memory_mb()
model = load_pretrained({FOLDER!r}, {dtype!r})
print((peak_memory_mb() - before) * 2**20 / sum(p.data.nbytes for p in model.parameters()))
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert float(out.stdout) <= 1.3


def test_token_0_of_gpt2_is_a_word(tmp_path):
    """Only a Decoder that says that 0 is padding ignores it; a folder keeps that."""
    model = Decoder(GPT2, seed=1)
    save_pretrained(model, tmp_path / "padded")
    assert load_pretrained(tmp_path / "padded").ignore_index == 0
    model.ignore_index = -100
    save_pretrained(model, tmp_path / "plain")
    loaded = load_pretrained(tmp_path / "plain")
    ids, targets = np.array([[3, 4]]), np.array([[0, 0]])
    logits = loaded(ids).data[0].astype(np.float64)
    expected = np.mean([np.log(np.exp(row).sum()) - row[0] for row in logits])
    assert loaded.loss(ids, targets).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", None),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", 0),
        ("rope_theta", "10000"),
        ("rope_theta", 0),
        ("rope_theta", float("nan")),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"rope_type": ["linear"]}),
        ("rope_scaling", {"rope_type": "linear", "factor": True}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "1e4"}),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("num_key_value_heads", 0),
        ("num_key_value_heads", 3),
        ("vocab_size", "50"),
        ("max_position_embeddings", -1),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("architectures", "LlamaForCausalLM"),
        ("model_type", ["llama"]),
    ],
)
def test_values_of_the_wrong_type_name_folder_and_field(folder, field, value):
    change_config(folder, **{field: value})
    shown = {"num_key_value_heads": "num_k", "rope_parameters": "rope_theta"}.get(field, field)
    with pytest.raises(ValueError, match=rf"{folder}: .*{shown}") as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_layer", 2.0),
        ("layer_norm_epsilon", "small"),
        ("activation_function", ["gelu"]),
        ("resid_pdrop", "0.1"),
        ("n_inner", 0),
    ],
)
def test_values_of_the_wrong_type_in_gpt2(tmp_path, field, value):
    save_pretrained(Decoder(GPT2), tmp_path)
    change_config(tmp_path, **{field: value})
    with pytest.raises(ValueError, match=field):
        load_pretrained(tmp_path)
