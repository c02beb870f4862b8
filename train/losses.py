"""Losses: of the next token, of classes, and of numbers.

All are called with predictions (a Tensor) and targets, and return a Tensor; `per_sample` gives one
loss for each row of the first axis. Gradients are those of the ops they are built from.
"""

# N samples, T positions, V classes.

from __future__ import annotations

from typing import Any

import numpy as np

from ..autograd import Tensor, cross_entropy, log_softmax, logsumexp, maximum, stack, where
from ..autograd.backend import array_module, is_array
from ..autograd.device import beside
from .batch import IGNORED


class Loss:
    """A number to make small. A subclass has `name` and defines `__call__` and `per_sample`."""

    name = ""

    def __call__(self, predictions: Tensor, targets: Any) -> Tensor:
        """The loss of all samples together.   predictions (N, ...) -> ()"""
        raise NotImplementedError

    def per_sample(self, predictions: Tensor, targets: Any) -> Tensor:
        """The loss of each sample.   predictions (N, ...) -> (N)"""
        raise NotImplementedError


class CausalLMLoss(Loss):
    """The mean of -log softmax(predictions)[target] over the targets that are not `ignore_index`.

    Targets are already shifted. A target outside the vocabulary raises ValueError; with no target
    that counts the loss is 0.
    """

    name = "CausalLM"

    def __init__(self, vocab_size: int, ignore_index: int = IGNORED):
        self.vocab_size, self.ignore_index = vocab_size, ignore_index

    def _shaped(self, predictions: Tensor, targets: Any) -> tuple[Tensor, np.ndarray]:
        targets = np.asarray(targets)
        if predictions.size != targets.size * self.vocab_size:
            raise ValueError(
                f"CausalLMLoss: Predictions must be seq_len * vocab_size = {targets.size} * "
                f"{self.vocab_size} numbers, given {predictions.size}"
            )
        return predictions.reshape(*targets.shape, self.vocab_size), targets

    def __call__(self, predictions: Tensor, targets: Any) -> Tensor:
        """predictions (..., T, V) or flat, targets (..., T) -> ()"""
        logits, targets = self._shaped(predictions, targets)
        return cross_entropy(logits, targets, ignore_index=self.ignore_index)

    def per_sample(self, predictions: Tensor, targets: Any) -> Tensor:
        """predictions (N, T, V), targets (N, T) -> (N)"""
        logits, targets = self._shaped(predictions, targets)
        losses = [
            cross_entropy(logits[n], targets[n], ignore_index=self.ignore_index)
            for n in range(len(targets))
        ]
        return stack(*losses)


class CrossEntropyLoss(Loss):
    """The sum of -target log softmax(predictions), targets one-hot or other probabilities."""

    name = "CrossEntropy"

    def __call__(self, predictions: Tensor, targets: Any) -> Tensor:
        """predictions (..., V), targets (..., V) -> ()"""
        return self._elements(predictions, targets).sum()

    def per_sample(self, predictions: Tensor, targets: Any) -> Tensor:
        """predictions (N, ..., V), targets (N, ..., V) -> (N)"""
        return _rows(self._elements(predictions, targets)).sum(axis=1)

    def _elements(self, predictions: Tensor, targets: Any) -> Tensor:
        return -(log_softmax(predictions) * _targets(self, predictions, targets))


class ElementLoss(Loss):
    """The mean of a function of each prediction and its target."""

    def elements(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """That function.   predictions (...), targets (...) -> (...)"""
        raise NotImplementedError

    def __call__(self, predictions: Tensor, targets: Any) -> Tensor:
        return self.elements(predictions, _targets(self, predictions, targets)).mean()

    def per_sample(self, predictions: Tensor, targets: Any) -> Tensor:
        return _rows(self.elements(predictions, _targets(self, predictions, targets))).mean(axis=1)


class BCEWithLogitsLoss(ElementLoss):
    """log(1 + exp(x)) - x y: the binary cross-entropy of sigmoid(x), safe for any x."""

    name = "BCEWithLogits"

    def elements(self, predictions: Tensor, targets: Tensor) -> Tensor:
        zero = Tensor(array_module(predictions.data).zeros_like(predictions.data))
        return logsumexp(stack(zero, predictions), axis=0) - predictions * targets


class MSELoss(ElementLoss):
    """(x - y)^2"""

    name = "MSE"

    def elements(self, predictions: Tensor, targets: Tensor) -> Tensor:
        d = predictions - targets
        return d * d


class L1Loss(ElementLoss):
    """|x - y|, with slope 0 at 0"""

    name = "L1"

    def elements(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return _absolute(predictions - targets)


class HuberLoss(ElementLoss):
    """d^2 / 2 up to |d| = delta, then delta (|d| - delta / 2), for d = x - y.

    Huber 1964.
    """

    name = "Huber"

    def __init__(self, delta: float = 1.0):
        if not delta > 0:
            raise ValueError(f"HuberLoss: delta must be positive, given {delta}")
        self.delta = delta

    def elements(self, predictions: Tensor, targets: Tensor) -> Tensor:
        d = predictions - targets
        far = (_absolute(d) - 0.5 * self.delta) * self.delta
        return where(abs(d.data) <= self.delta, d * d * 0.5, far)


class WeightedLoss(Loss):
    """`weight` times another loss, gradient included."""

    name = "Weighted"

    def __init__(self, inner: Loss, weight: float):
        self.inner, self.weight = inner, weight

    def __call__(self, predictions: Tensor, targets: Any) -> Tensor:
        return self.inner(predictions, targets) * self.weight

    def per_sample(self, predictions: Tensor, targets: Any) -> Tensor:
        return self.inner.per_sample(predictions, targets) * self.weight


class SampleWeightedLoss(Loss):
    """The mean of another loss over samples that count differently: sum(w loss) / sum(w)."""

    name = "SampleWeighted"

    def __init__(self, inner: Loss, weights: Any):
        self.inner, self.weights = inner, np.asarray(weights, np.float64)
        if self.weights.ndim != 1 or (self.weights < 0).any() or not self.weights.any():
            raise ValueError(
                "SampleWeightedLoss: one weight a sample, not negative and not all zero, needed, "
                f"given {weights}"
            )

    def __call__(self, predictions: Tensor, targets: Any) -> Tensor:
        share = self.weights / self.weights.sum()
        share = beside(share.astype(predictions.dtype), predictions.data)
        return (self.per_sample(predictions, targets) * share).sum()

    def per_sample(self, predictions: Tensor, targets: Any) -> Tensor:
        losses = self.inner.per_sample(predictions, targets)
        if losses.shape != self.weights.shape:
            raise ValueError(
                f"SampleWeightedLoss: {len(self.weights)} weights for {len(losses)} samples"
            )
        return losses


LOSSES: dict[str, type[Loss]] = {
    loss.name: loss
    for loss in (
        CausalLMLoss,
        CrossEntropyLoss,
        BCEWithLogitsLoss,
        MSELoss,
        L1Loss,
        HuberLoss,
        WeightedLoss,
        SampleWeightedLoss,
    )
}


def _targets(loss: Loss, predictions: Tensor, targets: Any) -> Tensor:
    """Targets as numbers of the predictions' type and shape."""
    data = targets.data if isinstance(targets, Tensor) else targets
    data = beside(np.asarray(data) if not is_array(data) else data, predictions.data)
    data = data.astype(predictions.dtype, copy=False)
    if data.shape != predictions.shape:
        raise ValueError(
            f"{loss.name}: predictions {predictions.shape} need targets of that shape, "
            f"given {data.shape}"
        )
    return Tensor(data)


def _absolute(x: Tensor) -> Tensor:
    return maximum(x, -x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(-1, 1)
