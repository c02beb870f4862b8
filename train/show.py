"""Rows of data as text, to look at what is trained before training it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .batch import IGNORED
from .data import Data
from .sequences import PADDING
from .text import Tokenizer


def show_rows(
    data: Data, tokenizer: Tokenizer, n: int, *, ids: bool = False, colour: bool = False
) -> Iterator[str]:
    """Lines: what the data holds, then the first `n` rows of the first epoch, token by token.

    A trained token is shown in green, or between ⟦ and ⟧ where there are no colours; a bar
    separates documents.
    """
    held = f", {len(data.valid):,} held out" if data.valid is not None else ""
    yield f"{data.source}: {len(data.train):,} sequences of {data.train.T} tokens{held}"
    yield f"sha256 {data.sha256}"
    yield from data.notes
    on, off = ("\x1b[32m", "\x1b[0m") if colour else ("⟦", "⟧")
    yield f"trained tokens are {on}marked{off}"
    for k in range(min(n, len(data.train))):
        batch = data.train.batch(k, 1)
        segments = None if batch.segments is None else batch.segments[0]
        yield ""
        yield f"--- row {k}"
        yield _row(batch.inputs[0], batch.targets[0], segments, tokenizer, ids, (on, off))


def _row(
    inputs: np.ndarray,
    targets: np.ndarray,
    segments: np.ndarray | None,
    tokenizer: Tokenizer,
    with_ids: bool,
    marks: tuple[str, str],
) -> str:
    if segments is None:
        segments = np.zeros_like(inputs)
    out: list[str] = []
    for segment in range(segments.max() + 1):
        inside = segments == segment
        shown = [int(inputs[inside][0]), *targets[inside].tolist()]
        trained = [False] + [t != IGNORED for t in shown[1:]]
        # A target that is not trained is the next input.
        following = [*inputs[inside][1:].tolist(), None]
        shown[1:] = [f if t == IGNORED else t for t, f in zip(shown[1:], following, strict=True)]
        tokens = [(t, on) for t, on in zip(shown, trained, strict=True) if t is not None]
        out += [" | "] if segment else []
        out += _marked(tokens, tokenizer, with_ids, marks)
    padding = int((segments == PADDING).sum())
    return "".join(out) + (f" | {padding} places of padding" if padding else "")


def _marked(
    tokens: list[tuple[int, bool]], tokenizer: Tokenizer, with_ids: bool, marks: tuple[str, str]
) -> list[str]:
    """Runs of trained and of other tokens, each run decoded as a whole."""
    out, k = [], 0
    while k < len(tokens):
        on, run = tokens[k][1], [tokens[k][0]]
        k += 1
        while k < len(tokens) and tokens[k][1] == on:
            run.append(tokens[k][0])
            k += 1
        text = tokenizer.show(run)
        if with_ids:
            text = " ".join(f"{i}:{tokenizer.show([i])!r}" for i in run)
        out.append(f"{marks[0]}{text}{marks[1]}" if on else text)
    return out
