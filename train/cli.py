"""The `afinar` command: its verbs, what they print, and how they end.

Exit status 0: done. 1: failed, stopped, or departs from the record. 2: bad input, told in one
sentence before anything runs. The rest of the library never prints; this file and `progress` do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import warnings
from collections.abc import Sequence

from .settings import add_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from . import commands

    try:
        return getattr(commands, args.run)(args)
    except BrokenPipeError:  # the reader of our output has left
        return 1
    except (ValueError, TypeError, FileNotFoundError, PermissionError) as error:
        return _fail(error, 2)
    except (RuntimeError, OSError, MemoryError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 1)


def _fail(error: object, status: int) -> int:
    if isinstance(error, OSError) and error.strerror:  # the system's words without its number
        error = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    sys.stderr.write(f"afinar: error: {error}\n")
    return status


def _warn(message: Warning | str, *where: object) -> None:
    """A warning as a sentence, without the line of source that gave it."""
    sys.stderr.write(f"afinar: warning: {message}\n")


def _positive(text: str) -> int:
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError(f"{n} is not 1 or more")
    return n


def parser() -> argparse.ArgumentParser:
    """All verbs and flags."""
    top = argparse.ArgumentParser(
        prog="afinar", description="Train, fine-tune and verify transformers."
    )
    version = importlib.metadata.version("afinar")
    top.add_argument("--version", action="version", version=f"afinar {version}")
    verbs = top.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, help: str) -> argparse.ArgumentParser:
        p = verbs.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        p.set_defaults(run=name)
        return p

    p = verb("train", "train a model, or fine-tune one, into a run folder")
    p.add_argument("--config", metavar="FILE.toml", help="settings: flags with underscores")
    p.add_argument("--resume", metavar="RUN", help="continue a run where its last snapshot is")
    add_flags(p)

    p = verb("generate", "continue a text")
    p.add_argument("model", metavar="RUN_OR_FOLDER")
    p.add_argument("--adapter", metavar="DIR", help="a LoRA adapter on top of the model")
    _add_storage(p)
    p.add_argument("--prompt", metavar="TEXT", required=True)
    p.add_argument("--chat", action="store_true", help="the prompt is a message, not a beginning")
    p.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    p.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 is greedy")
    p.add_argument("--top-k", type=int, metavar="N")
    p.add_argument("--top-p", type=float, metavar="X")
    p.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    p.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; repeatable")
    p.add_argument("--seed", type=int, default=0, metavar="N")
    p.add_argument("--threads", type=int, metavar="N")
    _add_device(p)

    p = verb("eval", "loss, perplexity and accuracy of a model on data")
    p.add_argument("--model", required=True, metavar="RUN_OR_FOLDER")
    p.add_argument("--adapter", metavar="DIR", help="a LoRA adapter on top of the model")
    _add_storage(p)
    p.add_argument("--data", required=True, metavar="FILE_OR_FOLDER")
    p.add_argument("--seq-len", type=_positive, default=256, metavar="N")
    p.add_argument("--batch", type=_positive, default=4, metavar="N")
    p.add_argument(
        "--rows", type=_positive, metavar="N", help="only so many sequences, spread evenly"
    )
    p.add_argument("--mask-prompt", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--threads", type=int, metavar="N")
    _add_device(p)

    p = verb("merge", "write a model with its adapter folded into the weights")
    p.add_argument("--model", required=True, metavar="DIR")
    p.add_argument("--adapter", required=True, metavar="DIR")
    p.add_argument("--out", required=True, metavar="DIR")

    p = verb("verify", "replay a run and compare every digest it recorded")
    p.add_argument("folder", metavar="RUN")
    p.add_argument("--data", metavar="FILE_OR_FOLDER", help="where the run's data is now")
    p.add_argument("--from", dest="start", type=int, metavar="STEP", help="from this snapshot on")
    p.add_argument("--to", dest="stop", type=int, metavar="STEP", help="up to this step")
    p.add_argument("--threads", type=int, metavar="N")
    _add_device(p)

    p = verb("report", "write a run's curves, sample and digests as one HTML page")
    p.add_argument("folder", metavar="RUN")
    p.add_argument("--out", metavar="FILE.html", help="default: report.html in the run")

    p = verb("data", "look at data as the trainer sees it")
    actions = p.add_subparsers(metavar="ACTION", required=True)
    p = actions.add_parser("show", help="print tokens, the trained ones marked")
    p.set_defaults(run="data_show")
    p.add_argument("data", metavar="FILE_OR_FOLDER", help="or stdlib")
    p.add_argument("--model", metavar="RUN_OR_FOLDER", help="whose tokenizer to use")
    p.add_argument("--seq-len", type=_positive, default=256, metavar="N")
    p.add_argument(
        "--rows", type=_positive, default=2, metavar="N", help="how many sequences to print"
    )
    p.add_argument("--seed", type=int, default=42, metavar="N")
    p.add_argument("--mask-prompt", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--ids", action="store_true", help="print ids too")
    return top


def _add_device(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="where to run")


def _add_storage(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--storage",
        choices=("float32", "bfloat16"),
        default="float32",
        help="how weights are held; bfloat16 is half the memory and faster to generate with",
    )
