"""A token of greedy decoding, at the shape of SmolLM2-135M with random weights.

Beside reading all weights once, which no way of decoding alone can beat, and beside transformers
on PyTorch with its cache.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from afinar.autograd.lanes import load, splat, tree_sum
from afinar.autograd.launch import body
from afinar.transformer import (
    Transformer,
    TransformerConfig,
    load_pretrained,
    save_pretrained,
    stream,
)

from .finetune import SHAPE
from .harness import Row, in_turns, optional

PROMPT, LONGEST = list(range(100, 132)), 400
CHUNK = 1 << 16


@body
def _read(i, words, out):  # owns out[i], so that no read can be left out
    a = b = c = d = splat(np.float32(0))
    for n in range(i * CHUNK, min((i + 1) * CHUNK, words.size - 63), 64):
        a, b = a + load(words, n), b + load(words, n + 16)
        c, d = c + load(words, n + 32), d + load(words, n + 48)
    out[i] = tree_sum((a + b) + (c + d))


def reading(nbytes: int) -> Callable[[], None]:
    """Read so many bytes once, on all threads."""
    words = np.ones(nbytes // 4, np.float32)
    jobs = -(-words.size // CHUNK)
    out = np.empty(jobs, np.float32)
    return lambda: _read(jobs, words, out)


def ours(model: Transformer) -> Callable[[], Any]:
    """One more token."""
    steps = stream(model, [PROMPT], max_new_tokens=LONGEST)
    next(steps)
    return lambda: next(steps)


def theirs(folder: str, dtype: str) -> Callable[[], Any]:
    """One more token by transformers."""
    torch, transformers = optional("torch"), optional("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    state: dict[str, Any] = {"ids": torch.tensor([PROMPT]), "cache": None}

    def run() -> None:
        with torch.inference_mode():
            out = model(state["ids"], past_key_values=state["cache"], use_cache=True)
            state["cache"], state["ids"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

    return run


def rows(threads: int) -> Iterator[Row]:
    """float32 and bfloat16 weights, each beside its limit and its peer."""
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(Transformer(TransformerConfig(**SHAPE), seed=0), folder)
        for dtype in ("float32", "bfloat16"):
            model = load_pretrained(folder, dtype)
            assert isinstance(model, Transformer)
            runs = [ours(model), reading(sum(p.data.nbytes for p in model.parameters()))]
            if optional("transformers"):
                runs.append(theirs(folder, dtype))
            token, limit, *peer = in_turns(*runs, seconds=6.0)
            note = f"{1 / token:.0f} tokens/s"
            target = 0.7 if dtype == "bfloat16" else None
            yield Row("decode", dtype, threads, token, limit, "one reading", target, note)
            for seconds in peer:
                target = 1.5 if dtype == "float32" else None
                yield Row("decode", dtype, threads, token, seconds, "transformers", target, note)
