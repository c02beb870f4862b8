"""The layers that all models share. Each owns its parameters and calls one op."""

# I inputs, O outputs, V rows of an embedding, C channels.

from __future__ import annotations

from typing import Any

import numpy as np

from ..autograd import Tensor, embedding, layer_norm, linear, rms_norm
from .module import Module


def _parameter(*shape: int, fill: float | None = None) -> Tensor:
    try:
        data = np.empty(shape, np.float32) if fill is None else np.full(shape, fill, np.float32)
    except (MemoryError, ValueError, OverflowError):  # each says it, by how far it is too large
        raise MemoryError(
            f"a parameter of shape {shape} does not fit into memory; a smaller model is needed"
        ) from None
    return Tensor(data, requires_grad=True)


class Linear(Module):
    """x weight^T + bias.   x (..., I), weight (O, I), bias (O) -> (..., O)

    The weight's values are left open; the model that owns the layer sets them.
    """

    def __init__(self, I: int, O: int, bias: bool = True):  # noqa: E741
        self.weight = _parameter(O, I)
        self.bias = _parameter(O, fill=0) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(Module):
    """weight[ids].   weight (V, C), ids (...) -> (..., C)"""

    def __init__(self, V: int, C: int):
        self.weight = _parameter(V, C)

    def __call__(self, ids: Any) -> Tensor:
        return embedding(self.weight, ids)


class RMSNorm(Module):
    """x / sqrt(mean(x**2) + eps) * weight.   x (..., C), weight (C) -> (..., C)"""

    def __init__(self, C: int, eps: float):
        self.weight, self.eps = _parameter(C, fill=1), eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)


class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) * weight + bias.   x (..., C), weight, bias (C) -> (..., C)"""

    def __init__(self, C: int, eps: float = 1e-5, bias: bool = True):
        self.weight, self.bias = _parameter(C, fill=1), _parameter(C, fill=0) if bias else None
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)
