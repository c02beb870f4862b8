"""How well a model predicts rows of tokens."""

from __future__ import annotations

from typing import Any

from ..autograd import cross_entropy, no_grad
from .batch import IGNORED
from .metrics import perplexity
from .sequences import Rows


def evaluate(model: Any, rows: Rows, B: int, most: int | None = None) -> dict[str, float]:
    """Mean loss, accuracy and perplexity over the targets that count, each weighing the same.

    `most` limits the evaluation to so many rows, spread evenly over all.
    """
    training = model.training
    model.eval()
    total, right, count = 0.0, 0, 0
    try:
        with no_grad():
            for numbers in rows.in_order(B, most):
                batch = rows.stack(numbers)
                logits = model(batch.inputs, segments=batch.segments)  # (B, T, V)
                loss = cross_entropy(logits, batch.targets, ignore_index=IGNORED, reduction="sum")
                counted = batch.targets != IGNORED
                total += loss.item()
                right += int((logits.data.argmax(-1) == batch.targets)[counted].sum())
                count += int(counted.sum())
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
