"""How well a model predicts tokens."""

# C hidden size, V vocabulary.

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..autograd import Tensor, cross_entropy, no_grad
from ..autograd.device import beside, to_host, with_memory
from .batch import LMBatch
from .metrics import perplexity
from .sequences import Rows

BLOCK = 1024  # tokens whose logits are held at once


def evaluate(model: Any, rows: Rows, B: int, most: int | None = None) -> dict[str, float]:
    """`evaluate_batches` on `rows`, or on `most` of them, spread evenly, `B` at a time."""
    return evaluate_batches(model, (rows.stack(n) for n in rows.in_order(B, most)))


def evaluate_batches(model: Any, batches: Iterable[LMBatch]) -> dict[str, float]:
    """Mean loss, accuracy and perplexity over the targets that count, each weighing the same.

    ValueError if none counts.
    """
    training = model.training
    model.eval()
    total, right, count = 0.0, 0, 0
    try:
        with no_grad():
            for batch in batches:
                loss, hits, targets = with_memory(
                    functools.partial(_score, model, batch),
                    f"evaluate: {batch.batch_size} sequences of {batch.seq_len} tokens",
                    "make the batch smaller or the sequences shorter",
                )
                total, right, count = total + loss, right + hits, count + targets
    finally:
        model.train(training)
    if count == 0:
        raise ValueError("evaluate: no target counts in these rows")
    loss = total / count
    return {
        "loss": loss,
        "accuracy": right / count,
        "perplexity": perplexity(loss),
        "tokens": count,
    }


def _score(model: Any, batch: LMBatch) -> tuple[float, int, int]:
    """Summed loss, right guesses and targets that count."""
    targets, count = batch.targets_for(model)
    x = model.hidden(batch.inputs, batch.positions, batch.segments).data
    targets = targets.reshape(-1)
    counted = np.flatnonzero(targets != model.ignore_index)
    x, targets = x.reshape(-1, x.shape[-1])[beside(counted, x)], targets[counted]  # (N, C), (N)
    loss, right = 0.0, 0
    for n in range(0, count, BLOCK):
        part = slice(n, n + BLOCK)
        logits = model.lm_head(Tensor(x[part]))  # (N, V)
        loss += cross_entropy(logits, targets[part], reduction="sum").item()
        right += int((to_host(logits.data.argmax(-1)) == targets[part]).sum())
    return loss, right, count
