"""What a run trains on: text files, folders and JSON lines, read, hashed and cut into sequences.

    data = load_data(path, tokenizer, seq_len=256, seed=42)
    data.train.batch(i, 8), data.valid, data.sha256, data.notes

Plain text is one stream of documents, cut into windows; the last twentieth is held out. JSON
lines are documents of their own, packed into rows as segments, so that a document is trained as
if it stood alone; `valid.jsonl` beside `train.jsonl` is the validation
set, else the last twentieth of the lines is.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .sequences import Packed, Rows, Windows
from .text import ByteTokenizer, Tokenizer, one_bos

STDLIB = "stdlib"  # the name of the default data
HELD_OUT = 20  # one part in so many is kept for validation


@dataclass
class Document:
    """A text's ids, which of them are trained (as targets), and the line it came from."""

    ids: list[int]
    trained: list[bool]
    where: str


@dataclass
class Data:
    """Training and validation rows of `seq_len` tokens, and what they were made from."""

    train: Rows
    valid: Rows | None
    sha256: str
    source: str
    notes: list[str] = field(default_factory=list)


def load_data(
    source: str | Path,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    seed: int,
    mask_prompt: bool = True,
    pack: bool = True,
    hold_out: bool = True,
) -> Data:
    """The rows of a file, a folder or the standard library (`"stdlib"`).

    With `hold_out` off nothing is kept apart for validation (a `valid.jsonl` is read all the
    same), and the end of a text counts too.

    Raises ValueError for data that is missing, empty, malformed (named by file and line) or
    shorter than one sequence.
    """
    parts = find_files(source)
    data = Data(None, None, hash_files(parts), str(source))  # type: ignore[arg-type]
    if "text" in parts:
        stream = _read_stream(parts["text"], tokenizer, data.notes)
        if hold_out:
            data.train, data.valid = _split_stream(stream, seq_len, seed, source)
        elif len(stream) > 1:
            data.train = Windows(stream, seq_len, seed, whole=True)
        else:
            raise ValueError(f"data: {source} holds no text to predict")
        return data
    documents = {}
    for part, files in parts.items():
        documents[part] = read_documents(files[0][1], tokenizer, mask_prompt)
    if hold_out and "valid" not in documents and len(documents["train"]) > 1:
        held = max(1, len(documents["train"]) // HELD_OUT)
        documents["valid"] = documents["train"][-held:]
        del documents["train"][-held:]
    rows = {}
    for part, some in documents.items():
        kept = _cut(some, seq_len, part, data.notes)
        if not kept:
            raise ValueError(f"{source}: no {part} document has a token to train on")
        rows[part] = Packed([(d.ids, d.trained) for d in kept], seq_len, seed, together=pack)
    data.train, data.valid = rows["train"], rows.get("valid")
    return data


# --- files ---------------------------------------------------------------------------------

_STDLIB_LEAVES_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def find_files(source: str | Path) -> dict[str, list[tuple[str, Path]]]:
    """The files of a source, as (name in the hash, path), by part: text, or train and valid."""
    if str(source) == STDLIB:
        return {"text": stdlib_files()}
    path = Path(source)
    if path.is_file():
        return {"train" if path.suffix == ".jsonl" else "text": [(path.name, path)]}
    if not path.is_dir():
        raise ValueError(f"data: {path} is neither a file nor a folder")
    if (path / "train.jsonl").is_file():
        parts = {"train": path / "train.jsonl", "valid": path / "valid.jsonl"}
        return {part: [(p.name, p)] for part, p in parts.items() if p.is_file()}
    if lines := sorted(path.glob("*.jsonl")):
        raise ValueError(
            f"data: {path} has {lines[0].name} but no train.jsonl; name the file itself"
        )
    files = _below(path, lambda names: not any(name.startswith(".") for name in names))
    if not files:
        raise ValueError(f"data: the folder {path} holds no file")
    return {"text": files}


def stdlib_files() -> list[tuple[str, Path]]:
    """The Python files of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = _below(root, lambda names: not _STDLIB_LEAVES_OUT.intersection(names), ".py")
    if not files:
        raise ValueError(f"data: no Python file below {root}; give --data FILE_OR_FOLDER")
    return files


def _below(root: Path, wanted: Any, suffix: str = "") -> list[tuple[str, Path]]:
    found = []
    for path in root.rglob("*" + suffix):
        name = path.relative_to(root)
        if wanted(name.parts) and path.is_file():
            found.append((name.as_posix(), path))
    return sorted(found, key=lambda f: f[0].encode(errors="surrogateescape"))


def hash_files(parts: dict[str, list[tuple[str, Path]]]) -> str:
    """SHA-256 over every file: its part, name and length, then its bytes.

    The name of a file that is alone says nothing about the data.
    """
    sha, alone = hashlib.sha256(), sum(map(len, parts.values())) == 1
    for part, files in parts.items():
        for name, path in files:
            content = path.read_bytes()
            named = "" if alone else name
            sha.update(f"{part}\0{named}\0{len(content)}\0".encode(errors="surrogateescape"))
            sha.update(content)
    return sha.hexdigest()


# --- plain text ----------------------------------------------------------------------------


def _read_stream(
    files: list[tuple[str, Path]], tokenizer: Tokenizer, notes: list[str]
) -> np.ndarray:
    """All files as one run of ids, each begun and ended as the tokenizer does it."""
    pieces, skipped = [], []
    lead = [] if tokenizer.bos is None else [tokenizer.bos]
    tail = [] if tokenizer.eos is None else [tokenizer.eos]
    for name, path in files:
        content = path.read_bytes()
        if not content:
            continue
        try:
            text = content.decode()
            if "\0" in text:
                raise ValueError
        except ValueError:
            skipped.append(name)
            continue
        if isinstance(tokenizer, ByteTokenizer):  # the same ids without a list of ints
            pieces.append(np.frombuffer(content, np.uint8).astype(np.int32))
            pieces.append(np.array(tail, np.int32))
        else:
            ids, _ = one_bos(tokenizer, tokenizer.encode(text), [])
            pieces.append(np.array((ids or lead) + tail, np.int32))
    if skipped:
        more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        notes.append(f"skipped what is not UTF-8 text: {', '.join(skipped[:3])}{more}")
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


def _split_stream(
    stream: np.ndarray, T: int, seed: int, source: Any
) -> tuple[Windows, Windows | None]:
    if not len(stream):
        raise ValueError(f"data: {source} holds no text")
    if len(stream) < T + 1:
        raise ValueError(
            f"data: {source} holds {len(stream)} tokens, fewer than one sequence needs "
            f"({T + 1}); give more text or a smaller --seq-len"
        )
    held = max(len(stream) // HELD_OUT, T + 1)
    if len(stream) - held < T + 1:  # too little to hold anything out
        return Windows(stream, T, seed), None
    return Windows(stream[:-held], T, seed), Windows(stream[-held:], T)


# --- JSON lines ----------------------------------------------------------------------------

FORMATS = (("messages",), ("prompt", "completion"), ("text",))


def read_documents(path: Path, tokenizer: Tokenizer, mask_prompt: bool = True) -> list[Document]:
    """The documents of a JSON-lines file; its first line decides between the three formats.

    With `mask_prompt` only a completion, or what an assistant says, is trained.
    """
    documents, keys = [], None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = _parse(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, where)
            keys = keys or _format(row, where)
            _check(row, keys, where)
            try:
                documents.append(_encode(row, keys, tokenizer, mask_prompt, where))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{where}: {error}") from None
    if not documents:
        raise ValueError(f"data: {path} holds no line")
    return documents


def _parse(line: bytes, where: str) -> dict:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON object is needed, not a {type(row).__name__}")
    if b"\\ud" in line.lower():  # an escape may be half of a pair, which is no character
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{where}: an escape \\ud... is half of a pair of surrogates, not a character"
            ) from None
    return row


def _format(row: dict, where: str) -> tuple[str, ...]:
    for keys in FORMATS:
        if all(key in row for key in keys):
            return keys
    raise ValueError(
        f'{where}: needs "text", "prompt" and "completion", or "messages"; it has {_keys(row)}'
    )


def _keys(row: dict) -> str:
    return ", ".join(f'"{key}"' for key in row) or "no keys"


def _check(row: dict, keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        if key not in row:
            raise ValueError(f'{where}: needs "{key}", as the lines before; it has {_keys(row)}')
        if key != "messages" and not isinstance(row[key], str):
            raise ValueError(f'{where}: "{key}" must be a string, not {type(row[key]).__name__}')
    if keys == ("messages",):
        messages = row["messages"]
        good = isinstance(messages, list) and all(
            isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content"))
            for m in messages
        )
        if not good or not messages:
            raise ValueError(
                f'{where}: "messages" must be a list of objects with "role" and "content" strings'
            )


def _encode(
    row: dict, keys: tuple[str, ...], tokenizer: Tokenizer, mask_prompt: bool, where: str
) -> Document:
    end = [] if tokenizer.eos is None else [tokenizer.eos]
    if keys == ("messages",):  # the template writes the ends
        ids, said = tokenizer.chat(row["messages"])
    elif keys == ("text",):
        ids = tokenizer.encode(row["text"]) + end
        said = [True] * len(ids)
    else:
        # Coded apart: the prompt's ids are then what the model is given when it is used.
        prompt, reply = tokenizer.encode(row["prompt"]), tokenizer.encode(row["completion"]) + end
        ids, said = prompt + reply, [False] * len(prompt) + [True] * len(reply)
    if not mask_prompt:
        said = [True] * len(ids)
    ids, said = one_bos(tokenizer, ids, said)
    return Document(ids, said, where)


def _cut(documents: list[Document], T: int, part: str, notes: list[str]) -> list[Document]:
    """Documents no longer than a row, with something to train on; says what was lost."""
    kept, cut, lost = [], 0, 0
    for d in documents:
        if len(d.ids) > T + 1:
            cut += 1
            lost += len(d.ids) - T - 1
            d = Document(d.ids[: T + 1], d.trained[: T + 1], d.where)
        if any(d.trained[1:]):
            kept.append(d)
    if cut:
        notes.append(
            f"{part}: {cut} of {len(documents)} documents are longer than {T} tokens; "
            f"their last {lost} tokens were cut off"
        )
    if len(kept) < len(documents):
        notes.append(
            f"{part}: {len(documents) - len(kept)} of {len(documents)} documents were left out: "
            "nothing in them is trained"
        )
    return kept
