"""Text, tokenizers and the rows that a run trains on."""

import json

import numpy as np
import pytest

from afinar.train.batch import IGNORED
from afinar.train.data import load_data, read_documents, stdlib_files
from afinar.train.sequences import PADDING, Packed, Windows
from afinar.train.text import ByteTokenizer, Stream, load_tokenizer, one_bos
from afinar.transformer import Transformer, TransformerConfig

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def lines(path, *rows):
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return path


@pytest.fixture
def folder(tmp_path):
    """A model folder with a tokenizer that, as Llama's does, puts BOS in front of everything."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=280,
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello there, what is that? it is a hat"] * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    where = tmp_path / "model"
    where.mkdir()
    tokenizer.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
        )
    )
    return where


# --- tokenizers ---


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("mañana 🌱")) == "mañana 🌱"
    assert max(tokenizer.encode("\xff")) < tokenizer.eos < tokenizer.vocab_size


def test_a_stream_gives_whole_characters_only(folder):
    for tokenizer in (ByteTokenizer(), load_tokenizer(folder)):
        stream = Stream(tokenizer)
        parts = [stream.add(i) for i in tokenizer.encode("a 🌱 tree")]
        assert "".join(parts) == "a 🌱 tree"
        assert not any("\ufffd" in part for part in parts)


def test_exactly_one_bos_however_many_there_were(folder):
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos, tokenizer.eos) == (0, 1)
    for ids in ([7, 8], [0, 7, 8], [0, 0, 7, 8]):
        assert one_bos(tokenizer, ids, [True] * len(ids)) == ([0, 7, 8], [False, True, True])


def test_a_conversation_has_one_bos_and_trains_replies_only(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    messages = [
        {"role": "user", "content": "what is that?"},
        {"role": "assistant", "content": "a hat"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hello there"},
    ]
    path = lines(tmp_path / "d.jsonl", {"messages": messages})
    (document,) = read_documents(path, tokenizer)
    assert document.ids.count(0) == 1
    assert document.ids[0] == 0
    trained = [i for i, t in zip(document.ids, document.trained, strict=True) if t]
    assert trained == [
        *tokenizer.encode("a hat"),
        tokenizer.eos,
        *tokenizer.encode("hello there"),
        tokenizer.eos,
    ]
    (document,) = read_documents(path, tokenizer, mask_prompt=False)
    assert document.trained == [False] + [True] * (len(document.ids) - 1)


def test_a_template_is_rendered_in_a_sandbox(folder, tmp_path):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages.__class__.__mro__ }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="refused"):
        load_tokenizer(folder).render([{"role": "user", "content": "x"}])


def test_a_template_may_refuse(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="roles must alternate"):
        load_tokenizer(folder).render([{"role": "user", "content": "x"}])


# --- documents ---


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{{ messages[99].role }}",
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{% for %}",
        "{{ nothing.of.this }}",
        "{{ raise_exception('no system') }}",
    ],
)
def test_a_template_that_fails_is_one_sentence(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=f"the chat template of {folder} refused"):
        load_tokenizer(folder).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_pointers_of_git_lfs_in_the_place_of_a_tokenizer(folder, name):
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match=rf"{folder / name} is a Git LFS pointer"):
        load_tokenizer(folder)


def test_a_tokenizer_of_another_kind_is_not_taken_for_bytes(tmp_path):
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    for name in ("vocab.json", "merges.txt", "tokenizer.model", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ValueError, match=rf"{tmp_path} has {name} but no tokenizer.json"):
            load_tokenizer(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", "", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: an object is needed"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token is 3"),
        ("tokenizer_config.json", '{"eos_token": {"content": []}}', "eos_token is"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template is a int"),
        ("special_tokens_map.json", "3", "special_tokens_map.json: an object is needed"),
    ],
)
def test_damaged_tokenizer_files_are_named(folder, name, text, says):
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=says) as error:
        load_tokenizer(folder)
    assert str(folder) in str(error.value)


def test_a_completion_is_trained_with_its_end_and_its_prompt_is_not(tmp_path):
    tokenizer = ByteTokenizer()
    path = lines(tmp_path / "d.jsonl", {"prompt": "1+1=", "completion": "2"})
    (document,) = read_documents(path, tokenizer)
    assert document.ids == [*b"1+1=2", tokenizer.eos]
    assert document.trained == [False] * 4 + [True] * 2


def test_text_is_trained_whole(tmp_path):
    path = lines(tmp_path / "d.jsonl", {"text": "ab"}, "\n", {"text": "c", "more": 1})
    documents = read_documents(path, ByteTokenizer())
    assert [d.ids for d in documents] == [[97, 98, 256], [99, 256]]
    assert all(all(d.trained) for d in documents)
    assert documents[1].where == f"{path}:3"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{'text': 1}\n", "not JSON"),
        ("[1]\n", "a JSON object is needed, not a list"),
        ({"prompt": "x"}, '"completion", or "messages"; it has "prompt"'),
        ({"text": 7}, '"text" must be a string, not int'),
        ({"messages": []}, '"messages" must be a list'),
        ({"messages": [{"role": "user"}]}, '"messages" must be a list'),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, row, says):
    path = lines(tmp_path / "d.jsonl", "\n", row)
    with pytest.raises(ValueError, match=says) as error:
        read_documents(path, ByteTokenizer())
    assert str(error.value).startswith(f"{path}:2: ")


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_a_line(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "ab"}\r\n\r\n{"text": "c"}\r\n')
    assert [d.ids for d in read_documents(path, ByteTokenizer())] == [[97, 98, 256], [99, 256]]


def test_a_line_of_another_format_is_an_error(tmp_path):
    path = lines(tmp_path / "d.jsonl", {"text": "a"}, {"prompt": "b", "completion": "c"})
    with pytest.raises(ValueError, match=r'd\.jsonl:2: needs "text", as the lines before'):
        read_documents(path, ByteTokenizer())


def test_messages_need_a_template(tmp_path):
    path = lines(tmp_path / "d.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(ValueError, match=r"d\.jsonl:1: .*needs a chat template"):
        read_documents(path, ByteTokenizer())


# --- sources ---


def test_standard_library_leaves_out_tests_and_installed_packages():
    names = [name for name, _ in stdlib_files()]
    assert "argparse.py" in names
    assert all(name.endswith(".py") for name in names)
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    assert not any(left_out.intersection(name.split("/")) for name in names)
    assert names == sorted(names, key=str.encode)


def load(source, **options):
    return load_data(source, ByteTokenizer(), **{"seq_len": 8, "seed": 1, **options})


def test_a_folder_of_text_is_one_stream_in_path_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("b" * 40)
    (tmp_path / "a.txt").write_text("a" * 60)
    (tmp_path / ".hidden").write_text("h" * 100)
    (tmp_path / "picture").write_bytes(b"\x89PNG\x00\xff")
    data = load(tmp_path)
    stream = np.concatenate([data.train.stream, data.valid.stream])
    assert bytes(stream[:60].astype(np.uint8)) == b"a" * 60
    assert stream[60] == 256
    assert bytes(stream[61:101].astype(np.uint8)) == b"b" * 40
    assert data.notes == ["skipped what is not UTF-8 text: picture"]


def test_the_hash_names_content_and_paths(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("x" * 50)
    first = load(file).sha256
    assert load(file).sha256 == first
    file.write_text("x" * 49 + "y")
    assert load(file).sha256 != first
    file.write_text("x" * 50)
    again = load(file.rename(tmp_path / "b.txt"))
    assert again.sha256 == first  # the name of a lone file is no data
    (tmp_path / "c.txt").write_text("z" * 50)
    both = load(tmp_path).sha256
    (tmp_path / "c.txt").rename(tmp_path / "a.txt")
    assert load(tmp_path).sha256 != both


def test_held_out_lines_are_valid_jsonl_or_the_last_twentieth(tmp_path):
    rows = [{"text": f"{k:02}"} for k in range(40)]
    lines(tmp_path / "train.jsonl", *rows)
    data = load(tmp_path, pack=False)
    assert (len(data.train), len(data.valid)) == (38, 2)
    lines(tmp_path / "valid.jsonl", {"text": "zz"})
    data = load(tmp_path, pack=False)
    assert (len(data.train), len(data.valid)) == (40, 1)


def test_what_is_cut_off_or_left_out_is_said(tmp_path):
    path = lines(
        tmp_path / "d.jsonl",
        {"prompt": "p", "completion": "c" * 20},
        {"prompt": "p" * 30, "completion": "c"},
        {"prompt": "p", "completion": "c"},
    )
    data = load(path)
    assert data.notes == [
        "train: 2 of 2 documents are longer than 8 tokens; their last 36 tokens were cut off",
        "train: 1 of 2 documents were left out: nothing in them is trained",
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "holds no text"), ("short", "holds 6 tokens, fewer than one sequence needs")],
)
def test_too_little_text(tmp_path, content, says):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match=says):
        load(tmp_path / "a.txt")


def test_missing_and_empty_sources(tmp_path):
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no file"):
        load(tmp_path)
    with pytest.raises(ValueError, match="holds no line"):
        load(lines(tmp_path / "train.jsonl"))


# --- rows ---


def test_windows_predict_every_id_once():
    windows = Windows(np.arange(26), 5)
    rows = [windows.row(n) for n in range(len(windows))]
    assert np.concatenate([r["targets"] for r in rows]).tolist() == list(range(1, 26))
    assert all((r["targets"] - r["inputs"] == 1).all() for r in rows)


def test_batch_i_is_a_function_of_seed_and_i():
    rows = Windows(np.arange(7 * 4 + 1), 4, seed=3)
    ahead = rows.batch(5, 3).inputs
    for i in range(5):
        rows.batch(i, 3)
    np.testing.assert_array_equal(rows.batch(5, 3).inputs, ahead)
    for epoch in range(3):  # each epoch has every row once, in an order of its own
        seen = [rows.batch(7 * epoch + i, 1).inputs[0, 0] // 4 for i in range(7)]
        assert sorted(seen) == list(range(7))
    orders = [[int(rows.batch(7 * e + i, 1).inputs[0, 0]) for i in range(7)] for e in range(3)]
    assert orders[0] != orders[1] != orders[2]
    other = Windows(np.arange(7 * 4 + 1), 4, seed=4)
    assert [int(other.batch(i, 1).inputs[0, 0]) for i in range(7)] != orders[0]


def test_packing_keeps_documents_apart_and_loses_nothing():
    rng = np.random.default_rng(0)
    documents = [
        (list(rng.integers(1, 200, n)), [bool(b) for b in rng.integers(0, 2, n)])
        for n in rng.integers(2, 18, 50)
    ]
    packed = Packed(documents, 17, seed=5)
    assert sorted(d for row in packed.rows for d in row) == list(range(50))
    assert len(packed) < 40
    for n, members in enumerate(packed.rows):
        row = packed.row(n)
        for segment, d in enumerate(members):
            ids, trained = (np.array(x) for x in documents[d])
            inside = row["segments"] == segment
            np.testing.assert_array_equal(row["inputs"][inside], ids[:-1])
            expected = np.where(trained[1:], ids[1:], IGNORED)
            np.testing.assert_array_equal(row["targets"][inside], expected)
        outside = row["segments"] == PADDING
        assert (row["targets"][outside] == IGNORED).all()
    assert len(Packed(documents, 17, together=False)) == 50


def test_the_end_is_trained_even_if_padding_has_its_id():
    # The row [5, 6, 2] with 2 as its end, padded by whatever: its first 2 is a target.
    row = Packed([([5, 6, 2], [True] * 3)], 5).row(0)
    assert row["targets"].tolist() == [6, 2, IGNORED, IGNORED, IGNORED]


def test_evaluation_rows_are_spread_over_all():
    rows = Windows(np.arange(101), 5)
    assert rows.in_order(3, 5) == [[0, 4, 8], [12, 16]]
    assert sum(map(len, rows.in_order(4))) == 20


def test_a_packed_document_is_computed_as_if_alone():
    model = Transformer(TransformerConfig.tiny(), seed=1)
    rng = np.random.default_rng(2)
    documents = [(rng.integers(0, 1000, n).tolist(), [True] * n) for n in (70, 9, 33, 80, 5)]
    packed = Packed(documents, 128, seed=3)
    assert sorted(len(row) for row in packed.rows) == [1, 4]
    for n, members in enumerate(packed.rows):
        batch = packed.stack([n])
        logits = model(batch.inputs, segments=batch.segments).data[0]
        for segment, d in enumerate(members):
            alone = model(np.array(documents[d][0][:-1]))
            np.testing.assert_array_equal(logits[batch.segments[0] == segment], alone.data)


def test_half_a_pair_of_surrogates_is_named(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00 whole"}\n' * 4)
    assert load(path).train is not None
    path.write_text('{"text": "a whole line"}\n{"text": "a \\uD800 b"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl:2: an escape .* half of a pair"):
        load(path)
