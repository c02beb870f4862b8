"""APR v2: the bytes, the checks, and models through a file."""

import dataclasses
import json
import re
import struct
import zlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afinar.transformer import Transformer, TransformerConfig, load_apr, save_apr
from afinar.transformer.apr import AprEntry, apr_array, read_apr, write_apr
from afinar.transformer.apr_quantised import quantised

QWEN3 = dataclasses.replace(
    TransformerConfig.tiny(),
    num_kv_heads=1,
    head_dim=48,
    qk_norm=True,
    tie_word_embeddings=False,
    hf_model_type="qwen3",
    rope_scaling={"rope_type": "linear", "factor": 2.0},
)


def by_hand() -> bytes:
    """A file of one bfloat16 tensor, written from the description of the format alone."""
    meta = b'{"a":1}'
    index = struct.pack("<H", 1) + b"w" + bytes([30, 2]) + struct.pack("<4Q", 1, 3, 0, 6)
    head = b"APR\0" + bytes([2, 0]) + struct.pack("<HIQIQQ", 0x400, 1, 64, len(meta), 128, 192)
    head += struct.pack("<I", zlib.crc32(head + bytes(20))) + bytes(20)
    data = struct.pack("<3H", 0x3F80, 0x4000, 0xC040)
    body = b"".join(part.ljust(64, b"\0") for part in (head, meta, index, data))
    return body + struct.pack("<I", zlib.crc32(body))


def test_a_file_written_by_hand_is_read(tmp_path):
    (tmp_path / "x.apr").write_bytes(by_hand())
    metadata, entries = read_apr(tmp_path / "x.apr")
    assert metadata == {"a": 1}
    np.testing.assert_array_equal(apr_array("w", entries["w"]), [[1.0, 2.0, -3.0]])


def test_layout_of_what_is_written(tmp_path):
    path = tmp_path / "x.apr"
    b = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_apr(path, {"bb": b.T, "a": np.array([1, 2], np.float16)}, {"zz": 1, "name": "n"})
    raw = path.read_bytes()
    flags, count, at, size, index, data = struct.unpack("<HIQIQQ", raw[6:40])
    assert (raw[:6], flags, count, at) == (b"APR\0\2\0", 0x400, 2, 64)
    assert zlib.crc32(raw[:40] + raw[44:64]) == struct.unpack("<I", raw[40:44])[0]
    meta = raw[at : at + size]
    assert list(json.loads(meta)) == sorted(json.loads(meta))
    assert json.loads(meta)["created_at"] is None
    assert b": " not in meta
    assert index % 64 == data % 64 == 0
    assert not raw[at + size : index].strip(b"\0")
    assert raw[index : index + 5] == b"\1\0a\1\1"
    np.testing.assert_array_equal(np.frombuffer(raw[data : data + 4], "<f2"), [1, 2])
    np.testing.assert_array_equal(np.frombuffer(raw[data + 64 : data + 88], "<f4"), b.T.ravel())
    assert struct.unpack("<I", raw[-4:])[0] == zlib.crc32(raw[:-4])
    assert len(raw) == data + 64 + 64 + 4


@pytest.mark.parametrize("config", [TransformerConfig.tiny(), QWEN3], ids=["tied", "qwen3"])
def test_a_model_comes_back_with_its_bits_and_trains(tmp_path, config):
    model = Transformer(config, seed=3)
    save_apr(model, tmp_path / "m.apr")
    again = load_apr(tmp_path / "m.apr")
    assert dataclasses.replace(again.config, hf_model_type=config.hf_model_type) == config
    for (name, a), (other, b) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == other
        np.testing.assert_array_equal(a.data, b.data)
    again.loss([[1, 2]], [[2, 3]]).backward()
    assert all(p.grad is not None for p in again.parameters())
    save_apr(again, tmp_path / "again.apr", metadata={"architecture": config.hf_model_type_name})
    assert (tmp_path / "again.apr").read_bytes() == (tmp_path / "m.apr").read_bytes()


def test_bfloat16_storage(tmp_path):
    save_apr(Transformer(TransformerConfig.tiny()), tmp_path / "m.apr")
    short = load_apr(tmp_path / "m.apr", "bfloat16")
    assert short.model.embed_tokens.weight.dtype == np.uint16
    save_apr(short, tmp_path / "short.apr")
    again = load_apr(tmp_path / "short.apr", "bfloat16")
    for a, b in zip(short.parameters(), again.parameters(), strict=True):
        np.testing.assert_array_equal(a.data, b.data)


def test_an_empty_head_is_a_tied_one(tmp_path):
    model = Transformer(TransformerConfig.tiny())
    state = model.state_dict() | {
        "lm_head.weight": np.zeros(0, np.float32),
        "__training__.block_optimizer.0.m.w_q": np.zeros(3, np.float32),
    }
    c = model.config
    meta = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 1000}
    meta |= {"intermediate_size": 256, "architecture": "llama"}
    write_apr(tmp_path / "m.apr", state, meta)
    loaded = load_apr(tmp_path / "m.apr").config
    assert loaded.tie_word_embeddings
    assert (loaded.max_position_embeddings, loaded.rope_theta) == (32768, c.rope_theta)


# --- the quantised types -------------------------------------------------------------------

CODES = {"q4": 128, "q8": 129}


def expected_bytes(values, kind):
    """The format's description in exact arithmetic, one value at a time."""

    def scale_and_codes(block, most, least):
        scale = np.float32(max(abs(v) for v in block)) / np.float32(most) or np.float32(1)
        exact = (Fraction(float(np.float32(v) / scale)) for v in block)
        q = [int(abs(t) + Fraction(1, 2)) * (1 if t >= 0 else -1) for t in exact]
        return scale, [max(least, min(most, c)) for c in q]

    values = [np.float32(v) for v in values]
    if not values:
        return b""
    if kind == "q8":
        scale, q = scale_and_codes(values, 127, -127)
        return struct.pack(f"<f{len(q)}b", scale, *q)
    out = b""
    for n in range(0, len(values), 32):
        scale, q = scale_and_codes(values[n : n + 32], 7, -8)
        nibbles = [c + 8 for c in q] + [0] * (32 - len(q))
        out += struct.pack("<e", scale)
        out += bytes(nibbles[k] + 16 * nibbles[k + 1] for k in range(0, 32, 2))
    return out


def test_quantised_types_are_read():
    q8 = struct.pack("<f3b", 0.5, -127, 0, 4)
    entry = AprEntry(129, (3,), memoryview(q8))
    np.testing.assert_array_equal(apr_array("w", entry), [-63.5, 0, 2])
    nibbles = bytes([(0 + 8) | (7 + 8) << 4, (-7 + 8) | (1 + 8) << 4] + [0x88] * 14)
    entry = AprEntry(128, (4,), memoryview(struct.pack("<e", 0.25) + nibbles))
    np.testing.assert_array_equal(apr_array("w", entry), [0, 1.75, -1.75, 0.25])
    with pytest.raises(ValueError, match="w: type 12"):
        apr_array("w", AprEntry(12, (4,), memoryview(b"1234")))


def test_quantised_bytes_by_hand():
    """s = 7 / 7 = 1, halves away from zero; even indices low; what fills the block is 0."""
    block = [7, -7, 0.5, -0.5, 1.5, 0.25, 2.5]
    nibbles = [15, 1, 9, 7, 10, 8, 11]
    pairs = [1 * 16 + 15, 7 * 16 + 9, 8 * 16 + 10, 11]
    assert nibbles[0] + 16 * nibbles[1] == pairs[0]
    assert quantised("w", np.array(block), 128) == b"\x00\x3c" + bytes(pairs + [0] * 12)
    scale = struct.pack("<f", 2.0)
    assert quantised("w", np.array([254, -1, 1, 3, 0]), 129) == scale + bytes([127, 255, 1, 2, 0])
    assert quantised("w", np.zeros(2), 129) == struct.pack("<f2b", 1, 0, 0)
    assert quantised("w", np.zeros(1), 128) == b"\x00\x3c\x08" + bytes(15)
    assert quantised("w", np.zeros((0, 4)), 128) == quantised("w", np.zeros(0), 129) == b""


@given(st.lists(st.floats(-1e4, 1e4, width=32), max_size=70), st.sampled_from(["q4", "q8"]))
def test_quantised_bytes_are_those_of_the_description(values, kind):
    raw = quantised("w", np.array(values, np.float32), CODES[kind])
    assert raw == expected_bytes(values, kind)
    back = apr_array("w", AprEntry(CODES[kind], (len(values),), memoryview(raw)))
    width = 32 if kind == "q4" else max(len(values), 1)
    for n in range(0, len(values), width):
        x = np.array(values[n : n + width], np.float32)
        most = np.abs(x).max()
        # Half a step; AprQ4's scale was rounded to float16 (2^-11, or 2^-25 where that is less).
        half = most / 254 if kind == "q8" else most / 14 + max(most * 2.0**-11, 7 * 2.0**-25)
        assert np.abs(back[n : n + width] - x).max() <= half * 1.0001 + 1e-36  # subnormal scales


@pytest.mark.parametrize("kind", CODES)
def test_a_quantised_model_comes_back_and_its_file_is_stable(tmp_path, kind):
    model = Transformer(QWEN3, seed=3)
    save_apr(model, tmp_path / "m.apr", quantize=kind)
    metadata, entries = read_apr(tmp_path / "m.apr")
    assert (tmp_path / "m.apr").read_bytes()[6] & 0x20  # the flag QUANTIZED
    for name, p in model.named_parameters():
        e = entries[name]
        if p.ndim == 2 and ".layers." in name:
            assert e.dtype == CODES[kind]
            assert bytes(e.data) == expected_bytes(p.data.reshape(-1).tolist(), kind)
        else:
            assert e.dtype == 0
    write_apr(tmp_path / "again.apr", entries, metadata)
    assert (tmp_path / "again.apr").read_bytes() == (tmp_path / "m.apr").read_bytes()
    again = load_apr(tmp_path / "m.apr")
    worst = 1 / 14 if kind == "q4" else 1 / 254
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert np.abs(a.data - b.data).max() <= 1.01 * worst * np.abs(a.data).max()
    again.loss([[1, 2]], [[2, 3]]).backward()
    save_apr(load_apr(tmp_path / "m.apr", "bfloat16"), tmp_path / "short.apr", quantize=kind)


def test_what_cannot_be_quantised_is_refused(tmp_path):
    for bad in (np.inf, np.nan, 5e5):
        with pytest.raises(ValueError, match="w: finite values below 458528"):
            quantised("w", np.array([1, bad], np.float32), 128)
    with pytest.raises(ValueError, match="quantize is None"):
        save_apr(Transformer(TransformerConfig.tiny()), tmp_path / "m.apr", quantize="q5")


def damaged(change):
    raw = bytearray(by_hand())
    change(raw)
    return bytes(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n" * 3, "Git LFS pointer"),
        (b"GGUF" + bytes(100), "does not start"),
        (b"APR", "too short"),
        (damaged(lambda r: r.__setitem__(130, 7)), "checksum at its end"),
        (damaged(lambda r: r.__setitem__(9, 7)), "checksum of the header"),
        (by_hand()[:-70], "cut off"),
        (by_hand()[:-7], "cut off"),
    ],
)
def test_damaged_files_are_refused(tmp_path, raw, message):
    (tmp_path / "x.apr").write_bytes(raw)
    with pytest.raises(ValueError, match=f"x.apr.*{message}"):
        read_apr(tmp_path / "x.apr")


def test_column_major_and_other_versions_are_refused(tmp_path):
    for at, value, message in ((7, 0x0C, "column-major"), (4, 1, "version 1"), (6, 1, "LZ4")):
        raw = bytearray(by_hand())
        raw[at] = value
        raw[40:44] = struct.pack("<I", zlib.crc32(raw[:40] + raw[44:64]))
        (tmp_path / "x.apr").write_bytes(raw)
        with pytest.raises(ValueError, match=message):
            read_apr(tmp_path / "x.apr")


def test_wrong_tensors_are_named(tmp_path):
    model = Transformer(TransformerConfig.tiny())
    save_apr(model, tmp_path / "m.apr")
    metadata, _ = read_apr(tmp_path / "m.apr")
    state = model.state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    for value, message in (
        (state[name].T, f"{name} is \\(64, 256\\)"),
        (np.full_like(state[name], np.nan), f"NaN/Inf detected in weight '{name}' at index 0"),
    ):
        write_apr(tmp_path / "bad.apr", state | {name: value}, metadata)
        with pytest.raises(ValueError, match=message):
            load_apr(tmp_path / "bad.apr")
    for field, message in (("vocab_size", "the model needs"), ("num_layers", "layers")):
        write_apr(tmp_path / "bad.apr", state, metadata | {field: 10**12})
        with pytest.raises(ValueError, match=f"bad.apr: .*{message}"):
            load_apr(tmp_path / "bad.apr")
    write_apr(tmp_path / "bad.apr", {"x": state[name]}, metadata)
    with pytest.raises(ValueError, match=r"missing model\.embed_tokens.weight.*unexpected x"):
        load_apr(tmp_path / "bad.apr")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (b"[1]", "its metadata is a list"),
        (b"[" * 100_000, "not a readable APR v2 file"),
        (b"{", "not a readable APR v2 file"),
        (b"{}", "does not give the sizes"),
    ],
)
def test_metadata_that_describes_no_model(tmp_path, metadata, message):
    size = len(metadata)
    index = 64 + size + -size % 64
    head = b"APR\0" + bytes([2, 0]) + struct.pack("<HIQIQQ", 0x400, 0, 64, size, index, index)
    head += struct.pack("<I", zlib.crc32(head + bytes(20))) + bytes(20)
    body = head + metadata.ljust(index - 64, b"\0")
    (tmp_path / "x.apr").write_bytes(body + struct.pack("<I", zlib.crc32(body)))
    with pytest.raises(ValueError, match=f"x.apr.*{message}"):
        load_apr(tmp_path / "x.apr")


def test_sizes_of_the_wrong_type_are_named(tmp_path):
    save_apr(Transformer(TransformerConfig.tiny()), tmp_path / "m.apr")
    metadata, entries = read_apr(tmp_path / "m.apr")
    for field, value in (("hidden_size", "wide"), ("rope_theta", "x"), ("num_kv_heads", [2])):
        write_apr(tmp_path / "m.apr", entries, metadata | {field: value})
        with pytest.raises(ValueError, match=f"m.apr: its metadata describes no model.*{field} is"):
            load_apr(tmp_path / "m.apr")


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    model, path = Transformer(TransformerConfig.tiny(), seed=1), tmp_path / "m.apr"
    state = model.state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    broken = state[name].copy()
    broken[2, 3] = np.inf
    for options, message in (
        ({"metadata": {"hidden_size": 5}}, "hidden_size is 5, the model's is 64"),
        ({"metadata": {"num_kv_heads": "2"}}, "num_kv_heads is '2', the model's is 2"),
        ({"metadata": {"qk_norm": True}}, "qk_norm is True, the model's is False"),
        ({"metadata": {"architecture": "roberta"}}, "architecture is 'roberta'"),
        ({"metadata": {"x": float("nan")}}, "JSON"),
        ({"metadata": {"x": {1, 2}}}, "JSON"),
        ({"metadata": {1: 2, "x": 3}}, "JSON"),
        ({"state": state | {name: broken}}, f"'{name}' at index {2 * broken.shape[1] + 3}"),
        ({"state": state | {name: state[name].astype(int)}}, name),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            save_apr(model, path, **options)
    for options in ({"metadata": [1]}, {"state": list(state.values())}):
        with pytest.raises(TypeError, match=r"save_apr: .* a list"):
            save_apr(model, path, **options)
    assert not list(tmp_path.iterdir())
    save_apr(model, path, metadata={"hidden_size": 64, "author": "me"})
    assert read_apr(path)[0]["author"] == "me"
    assert load_apr(path).config.hidden_size == 64


def test_a_model_that_no_memory_holds_is_one_sentence(tmp_path):
    save_apr(Transformer(TransformerConfig.tiny()), tmp_path / "m.apr")
    metadata, entries = read_apr(tmp_path / "m.apr")
    for size in (10**13, 10**18):
        write_apr(tmp_path / "m.apr", entries, metadata | {"intermediate_size": size})
        with pytest.raises(ValueError, match=rf"m.apr: .*gate_proj.weight is .*\({size}, 64\)"):
            load_apr(tmp_path / "m.apr")
