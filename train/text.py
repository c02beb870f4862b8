"""Text to token ids and back: bytes, or a `tokenizer.json`; chat templates.

A folder's tokenizer is read as it is: `tokenizer.json` through the `tokenizers` library,
`tokenizer_config.json` for the names of the special tokens and the chat template. A folder
without one is byte-level: id 0 to 255 is that byte, 256 ends a document.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

from ..transformer import files

# What makes a folder's tokenizer; copied along with a model, hashed in this order.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# What a run copies from the folder that its model came from; generate and eval read it.
COPIED = (*TOKENIZER_FILES, "generation_config.json")


class Tokenizer(Protocol):
    """Ids of a text and back. `bos` is put before a document, `eos` after it, once each."""

    vocab_size: int
    bos: int | None
    eos: int | None
    sha256: str

    def encode(self, text: str) -> list[int]:
        """The ids of `text` alone: no special token is added."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens left out."""
        ...

    def show(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens by their names."""
        ...

    def chat(self, messages: list[dict]) -> tuple[list[int], list[bool]]:
        """The ids of a conversation, and which of them an assistant said."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids, and 256 for the end of a document.

    >>> ByteTokenizer().encode("né")
    [110, 195, 169]
    >>> ByteTokenizer().decode([110, 195, 169, 256])
    'né'
    """

    vocab_size = 257
    bos: int | None = None
    eos: int | None = 256
    sha256 = hashlib.sha256(b"bytes, 256 ends a document").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def show(self, ids: list[int]) -> str:
        pieces = bytes(i if i < 256 else 0 for i in ids).decode(errors="replace")
        return pieces.replace("\0", "<end>")

    def chat(self, messages: list[dict]) -> tuple[list[int], list[bool]]:
        raise ValueError(
            'data with "messages" needs a chat template, and a byte-level model has none: '
            'give "prompt" and "completion" instead, or a --model folder with a template'
        )


class FileTokenizer:
    """The tokenizer of a model folder, by the `tokenizers` library."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        with path.open("rb") as file:
            files.refuse_lfs_pointer(path, file.read(64))
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise ValueError(
                f"{path} needs the tokenizers library: pip install 'afinar[cli]'"
            ) from None
        try:
            self._library = Library.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} cannot be read: {error}") from None
        self._library.no_truncation()
        self._library.no_padding()
        self.folder = folder
        self.vocab_size = self._library.get_vocab_size(with_added_tokens=True)

        settings = read_json(folder / "tokenizer_config.json")
        names = read_json(folder / "special_tokens_map.json") | settings
        tokens = {k: _content(folder, k, names.get(k)) for k in ("bos_token", "eos_token")}
        self._names = {k: token for k, token in tokens.items() if token is not None}
        self.eos = self._id("eos_token")
        # A document starts with BOS iff the tokenizer's own post-processing would start it so.
        bos = self._id("bos_token")
        starts = self._library.encode("a").ids[:1] == [bos]
        self.bos = bos if starts or settings.get("add_bos_token") is True else None
        self._template = _chat_template(folder, settings)
        self.sha256 = tokenizer_sha256(folder)

    def _id(self, name: str) -> int | None:
        return self._library.token_to_id(self._names[name]) if name in self._names else None

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._library.decode(ids)

    def show(self, ids: list[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=False)

    def render(self, messages: list[dict], generate: bool = False) -> str:
        """The conversation as the model's template writes it; `generate` opens a reply."""
        if self._template is None:
            raise ValueError(
                f'data with "messages" needs a chat template, and {self.folder} has none: '
                'give "prompt" and "completion" instead'
            )
        return self._template(messages, generate, self._names)

    def chat(self, messages: list[dict]) -> tuple[list[int], list[bool]]:
        text = self.render(messages)
        spans = []  # of characters that an assistant said
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:k], generate=True)
            after = self.render(messages[: k + 1])
            if after.startswith(before) and text.startswith(after):
                spans.append((len(before), len(after)))
            elif k == len(messages) - 1 and text.startswith(before):
                spans.append((len(before), len(text)))
            # A template that rewrites past replies (drops their reasoning, say) shows the model
            # something else than what was said then: such a reply is context, not a target.
        coded = self._library.encode(text, add_special_tokens=False)
        said = [any(a <= s and e <= b and s < e for a, b in spans) for s, e in coded.offsets]
        return coded.ids, said


def load_tokenizer(folder: str | Path | None) -> Tokenizer:
    """The tokenizer of a model folder; byte-level where it has none.

    ValueError for a folder whose tokenizer is of another kind than `tokenizer.json`.
    """
    if folder is None:
        return ByteTokenizer()
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"model: {folder} is not a folder")
    if (folder / "tokenizer.json").exists():
        return FileTokenizer(folder)
    for name in TOKENIZER_FILES:
        if (folder / name).exists():
            raise ValueError(
                f"{folder} has {name} but no tokenizer.json; transformers writes one: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
    return ByteTokenizer()


def tokenizer_sha256(folder: str | Path | None) -> str:
    """The `sha256` of the tokenizer that `load_tokenizer` gives, without loading it."""
    if folder is None or not (Path(folder) / "tokenizer.json").is_file():
        return ByteTokenizer.sha256
    return _hash_files([Path(folder) / name for name in TOKENIZER_FILES])


def folder_files(folder: str | Path | None) -> dict[str, str]:
    """What a model folder holds beside weights: the SHA-256 of each file that has a meaning."""
    if folder is None:
        return {}
    paths = [Path(folder) / name for name in ("config.json", *COPIED)]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths if p.is_file()}


def one_bos(tokenizer: Tokenizer, ids: list[int], said: list[bool]) -> tuple[list[int], list[bool]]:
    """`ids` with exactly one BOS in front if the tokenizer uses one, however many it came with."""
    bos = tokenizer.bos
    if bos is None:
        return ids, said
    start = 0
    while start < len(ids) and ids[start] == bos:
        start += 1
    return [bos, *ids[start:]], [False, *said[start:]]


class Stream:
    """Decodes ids one at a time, giving out whole characters only.

    >>> stream = Stream(ByteTokenizer())
    >>> [stream.add(i) for i in "né".encode()]
    ['n', '', 'é']
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._bytes = isinstance(tokenizer, ByteTokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """The text that `token` completes."""
        if self._bytes:
            return self._decoder.decode(bytes([token]) if token < 256 else b"")
        # A token's text depends on its neighbours (spaces, bytes of one character), so the
        # text of all tokens is compared with what was shown.
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new


# --- files of a tokenizer ------------------------------------------------------------------


def read_json(path: Path) -> dict:
    """The object in a JSON file; an empty one if there is no file."""
    return files.read_json(path) if path.is_file() else {}


def _content(folder: Path, name: str, token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{folder}: {name} is {token!r}; a string, or one as content, is needed")
    return text


def _hash_files(paths: list[Path]) -> str:
    sha = hashlib.sha256()
    for path in paths:
        if path.is_file():
            content = path.read_bytes()
            sha.update(f"{path.name} {len(content)}\n".encode() + content)
    return sha.hexdigest()


# What a template's own expressions raise, as Python's do.
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def _chat_template(folder: Path, settings: dict) -> Any:
    """The folder's chat template as a function of (messages, generate, names), or None."""
    source = settings.get("chat_template")
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
    if isinstance(source, list):  # several named templates
        named = [t for t in source if isinstance(t, dict) and t.get("name") == "default"]
        source = named[0].get("template") if named else None
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{folder}: chat_template is a {type(source).__name__}, not a string")

    def render(messages: list[dict], generate: bool, names: dict) -> str:
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError:
            raise ValueError(
                "a chat template needs the jinja2 library: pip install 'afinar[cli]'"
            ) from None

        class Generation(jinja2.ext.Extension):
            """`{% generation %} … {% endgeneration %}` marks replies; it prints what is inside."""

            tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare a tag

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda x, indent=None: json.dumps(
            x, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = refuse
        # No strftime_now: with today's date in it, the same data would not give the same tokens.
        try:
            return environment.from_string(source).render(
                messages=messages, add_generation_prompt=generate, tools=None, **names
            )
        except (jinja2.TemplateError, *_FAULTS) as error:
            raise ValueError(f"the chat template of {folder} refused: {error}") from None

    return render
