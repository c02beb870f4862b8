"""APR v2: the bytes, the checks, and models through a file."""

import dataclasses
import json
import struct
import zlib

import numpy as np
import pytest

from afinar.transformer import Transformer, TransformerConfig, load_apr, save_apr
from afinar.transformer.apr import apr_array, read_apr, write_apr

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


def test_quantised_types_are_read():
    from afinar.transformer.apr import AprEntry

    q8 = struct.pack("<f3b", 0.5, -127, 0, 4)
    entry = AprEntry(129, (3,), memoryview(q8))
    np.testing.assert_array_equal(apr_array("w", entry), [-63.5, 0, 2])
    nibbles = bytes([(0 + 8) | (7 + 8) << 4, (-7 + 8) | (1 + 8) << 4] + [0x88] * 14)
    entry = AprEntry(128, (4,), memoryview(struct.pack("<e", 0.25) + nibbles))
    np.testing.assert_array_equal(apr_array("w", entry), [0, 1.75, -1.75, 0.25])
    with pytest.raises(ValueError, match="w: type 12"):
        apr_array("w", AprEntry(12, (4,), memoryview(b"1234")))


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
    write_apr(tmp_path / "bad.apr", {"x": state[name]}, metadata)
    with pytest.raises(ValueError, match=r"missing model\.embed_tokens.weight.*unexpected x"):
        load_apr(tmp_path / "bad.apr")
