"""The verbs of the command, one function each; they return the exit status."""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from ..autograd import set_num_threads
from ..autograd.device import resolve_device
from .settings import KINDS, read_settings
from .text import COPIED, ByteTokenizer, FileTokenizer, Stream, load_tokenizer, one_bos, read_json


def say(text: str = "", end: str = "\n") -> None:
    """Print, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def train(args: Namespace) -> int:
    from . import session

    flags = {name: value for name, value in vars(args).items() if name in KINDS}
    if args.resume is None:
        return session.train(read_settings(args.config, flags), sys.stdout)
    if args.config is not None:
        raise ValueError("--resume continues a run with its own settings: leave out --config")
    return session.resume(args.resume, flags, sys.stdout)


def generate(args: Namespace) -> int:
    from ..transformer.generate import stream

    _threads(args)
    model, tokenizer = _open(args.model, args.adapter, args.storage, args.device)
    if args.chat:
        if not isinstance(tokenizer, FileTokenizer):
            raise ValueError(f"--chat needs a chat template, and {args.model} has none")
        messages = [{"role": "user", "content": args.prompt}]
        ids = tokenizer.encode(tokenizer.render(messages, generate=True))
    else:
        ids = tokenizer.encode(args.prompt)
    ids, _ = one_bos(tokenizer, ids, [])
    if not ids:
        raise ValueError("--prompt is empty; this model needs a beginning")
    if "" in (args.stop or []):
        raise ValueError("--stop is empty; a text is needed")
    steps = stream(
        model,
        ids,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        stop=end_ids(args.model, tokenizer),
        seed=args.seed,
    )
    if not args.chat:
        say(args.prompt, end="")
    for text in until((step[0] for step in steps), Stream(tokenizer), args.stop or []):
        say(text, end="")
    say()
    return 0


def end_ids(folder: str, tokenizer: Any) -> list[int]:
    """The ids that end a text: the tokenizer's, and those of generation_config.json."""
    ends = [] if tokenizer.eos is None else [tokenizer.eos]
    more = read_json(Path(folder) / "generation_config.json").get("eos_token_id")
    return ends + (more if isinstance(more, list) else [] if more is None else [more])


def until(tokens: Any, decoder: Stream, stops: list[str]) -> Any:
    """The text of `tokens` piece by piece, up to the first of `stops` in it.

    What may be the beginning of one is held back until it is known.
    """
    held = ""
    for token in tokens:
        held += decoder.add(token)
        ends = [held.find(s) for s in stops if s in held]
        if ends:
            yield held[: min(ends)]
            return
        keep = max((n for s in stops for n in range(len(s)) if held.endswith(s[:n])), default=0)
        yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    yield held


def eval(args: Namespace) -> int:
    from .data import load_data
    from .evaluate import evaluate

    _threads(args)
    model, tokenizer = _open(args.model, args.adapter, args.storage, args.device)
    limit = model.config.max_position_embeddings
    if args.seq_len > limit:
        raise ValueError(f"--seq-len is {args.seq_len}; the model has {limit} positions")
    data = load_data(
        args.data,
        tokenizer,
        seq_len=args.seq_len,
        seed=0,
        mask_prompt=args.mask_prompt,
        hold_out=False,
    )
    for note in data.notes:
        say(note)
    result = evaluate(model, data.valid or data.train, args.batch, args.rows)
    say(
        f"loss {result['loss']:.4f}  perplexity {result['perplexity']:.4f}  "
        f"accuracy {result['accuracy']:.4f}  over {result['tokens']:,} tokens"
    )
    return 0


def merge(args: Namespace) -> int:
    from ..lora import merge_lora
    from ..transformer import save_pretrained

    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; give another --out")
    model, _ = _open(args.model, args.adapter)
    count = merge_lora(model, keep=False)
    save_pretrained(model, out)
    for name in COPIED:
        if (Path(args.model) / name).is_file():
            shutil.copyfile(Path(args.model) / name, out / name)
    say(f"merged the adapters of {count} modules into {out}")
    return 0


def verify(args: Namespace) -> int:
    from .folder import RunFolder
    from .progress import Progress
    from .verify import Record
    from .verify import verify as replay

    folder = RunFolder.open(args.folder)
    try:
        last = Record.read(folder).last
    except ValueError:
        last = 0  # the replay says what is wrong with the record
    progress = Progress(sys.stdout, args.stop or last, args.start or 0)
    report = replay(
        args.folder,
        data=args.data,
        start=args.start,
        stop=args.stop,
        threads=args.threads,
        device=args.device,
        on_step=progress.step,
    )
    progress.close()
    for problem in report.problems:
        say(f"DEPARTS: {problem}")
    if report.ok:
        for note in report.notes:
            say(f"note: {note}")
        say(
            f"verified: steps {report.start} to {report.stop} of {args.folder} replayed, "
            f"{report.compared} records equal in every digest"
        )
    return 0 if report.ok else 1


def report(args: Namespace) -> int:
    from .report import write_report

    say(str(write_report(args.folder, args.out)))
    return 0


def data_show(args: Namespace) -> int:
    from .data import load_data
    from .show import show_rows

    tokenizer = load_tokenizer(args.model)
    data = load_data(
        args.data,
        tokenizer,
        seq_len=args.seq_len,
        seed=args.seed,
        mask_prompt=args.mask_prompt,
    )
    for line in show_rows(data, tokenizer, args.rows, ids=args.ids, colour=sys.stdout.isatty()):
        say(line)
    return 0


def _threads(args: Namespace) -> None:
    if args.threads is not None:
        set_num_threads(args.threads)


def _open(
    folder: str, adapter: str | None, storage: str = "float32", device: str = "cpu"
) -> tuple[Any, Any]:
    from .run import open_model

    resolve_device(device)  # an error here comes before a long read
    model = open_model(folder, adapter, storage).to(device)
    tokenizer = load_tokenizer(folder)
    if isinstance(tokenizer, ByteTokenizer) and model.config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"{folder} has no tokenizer.json, and its vocabulary of {model.config.vocab_size} is "
            f"too small for bytes"
        )
    return model, tokenizer
