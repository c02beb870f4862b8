"""A frozen linear layer with a trained low-rank update."""

# I inputs, O outputs of the layer, N of them in a slice, R the rank.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..autograd import Tensor, cuda, linear, no_grad
from ..autograd.backend import array_module, kernel
from ..autograd.device import beside, to_host
from ..autograd.launch import body
from ..autograd.ops.gemm import widen
from ..autograd.precision import compute_in
from ..autograd.random import make_key, uniform
from ..autograd.tape import op
from ..transformer.dropout import dropped
from ..transformer.layers import Linear
from ..transformer.module import Module
from .config import LoRAConfig
from .pissa import principal_factors
from .quantized import QuantizedLinear
from .targets import Slice

Base = Linear | QuantizedLinear


class LoRALinear(Module):
    """y = W x + b, and in rows [start, stop) of each slice also scale B A drop(x).

    W (O, I) and b stay as they are. A (R, I) is uniform in +-1 / sqrt(I) and B (N, R) zero, so that
    at first nothing changes. One dropout mask per call serves all slices, and W x never sees it.

    With DoRA (Liu et al. 2024, arXiv:2402.09353) the rows of a slice are W' = m (W + scale B A) / n
    where n are the norms of the rows of W + scale B A, taken as constants, and m (N), which starts
    as the norms of W's rows, is trained.

    `init="pissa"` moves the largest singular triples of each slice of W into its factors;
    `quantize` holds what is left of W in 4 bits, of a kind that `QuantizedLinear` knows.
    """

    def __init__(
        self,
        base: Base,
        r: int | Sequence[int],
        alpha: float | Sequence[float],
        dropout: float = 0.0,
        slices: Sequence[tuple[int, int]] | None = None,
        *,
        use_rslora: bool = False,
        use_dora: bool = False,
        init: str = "default",
        quantize: str | None = None,
        seed: int = 0,
        name: str = "",
    ):
        if not isinstance(base, Linear | QuantizedLinear):
            raise TypeError(f"LoRALinear: a Linear is needed, given a {type(base).__name__}")
        O = base_shape(base)[0]  # noqa: E741
        self.slices = tuple(slices) if slices is not None else ((0, O),)
        if not self.slices:
            raise ValueError("LoRALinear: at least one slice is needed")
        end = 0
        for start, stop in self.slices:
            if not end <= start < stop <= O:
                raise ValueError(
                    f"LoRALinear: slices {self.slices} must ascend, apart, within 0 .. {O}"
                )
            end = stop
        self.ranks = _per_slice(r, len(self.slices))
        self.alphas = _per_slice(alpha, len(self.slices))
        of = LoRAConfig(use_rslora=use_rslora).scale
        self.scales = tuple(of(r, a) for r, a in zip(self.ranks, self.alphas, strict=True))
        self.use_rslora, self.dropout, self.name = use_rslora, dropout, name
        self.base: Base = base
        weight = base_weight(base)
        xp, dtype = array_module(weight), weight.dtype
        start = _principal if init == "pissa" else _default
        starts = [start(self, weight, n, seed) for n in range(len(self.slices))]
        pairs = [(xp.asarray(a, dtype), xp.asarray(b, dtype)) for a, b in starts]
        self.a = [_trained(a) for a, _ in pairs]
        self.b = [_trained(b) for _, b in pairs]
        # What the factors took from the base.
        self.moved = tuple((to_host(a), to_host(b)) for a, b in pairs) if init == "pissa" else ()
        if self.moved:
            self.base = plain_linear(self._without_moved(), self.bias)
        if quantize is not None:
            self.base = QuantizedLinear(base_weight(self.base), self.bias, quantize)
        for p in self.base.parameters():
            p.requires_grad = False
        rows = [row_norms(self._updated(n)) for n in range(len(pairs))] if use_dora else []
        self.m = [_trained(norms) for norms in rows]

    @property
    def bias(self) -> Tensor | None:
        """The base's bias."""
        return self.base.bias

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) if rank-stabilised, where all slices agree on it."""
        if len(set(self.scales)) > 1:
            raise ValueError(f"scale: the slices of {self.name} differ: {self.scales}")
        return self.scales[0]

    @property
    def r(self) -> int:
        """The rank, where all slices agree on it."""
        if len(set(self.ranks)) > 1:
            raise ValueError(f"r: the slices of {self.name} differ: {self.ranks}")
        return self.ranks[0]

    @property
    def factors(self) -> list[Tensor]:
        """Everything that is trained: the A's, the B's, the magnitudes."""
        return [*self.a, *self.b, *self.m]

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)"""
        y = self.base(x)
        p = self.dropout if self.training else 0.0
        d = dropped(x, p, self.name)
        scaled = [linear(d, a) * s for a, s in zip(self.a, self.scales, strict=True)]
        if not self.m and self.slices == ((0, y.shape[-1]),):
            return linear(scaled[0], self.b[0], residual=y)
        deltas = [linear(h, b) for h, b in zip(scaled, self.b, strict=True)]
        if not self.m:
            return add_slices(y, *deltas, slices=self.slices)
        base = self.base(d) if p else y
        if self.bias is not None:
            base = base - Tensor(widen(self.bias.data))
        for n, (start, stop) in enumerate(self.slices):
            # y + (m/n - 1) W d + (m/n) scale B A d
            ratio = self.m[n] / Tensor(row_norms(self._updated(n)))
            deltas[n] = (ratio - 1) * base[..., start:stop] + ratio * deltas[n]
        return add_slices(y, *deltas, slices=self.slices)

    def _updated(self, n: int) -> Any:
        """W + scale B A in the rows of slice n, as an array."""
        start, stop = self.slices[n]
        update = _product(self.b[n].data, self.a[n].data, self.scales[n])
        return base_weight(self.base)[start:stop] + update

    def _without_moved(self) -> Any:
        """The base's matrix less what the factors start with."""
        weight = base_weight(self.base).copy()
        for (start, stop), (a, b), scale in zip(self.slices, self.moved, self.scales, strict=True):
            weight[start:stop] -= _product(beside(b, weight), beside(a, weight), scale)
        return weight

    def merged_weight(self) -> Any:
        """The matrix (O, I) that gives what this layer gives: a float32 or float64 array."""
        weight = base_weight(self.base).copy()
        for n, (start, stop) in enumerate(self.slices):
            rows = self._updated(n)
            if self.m:
                rows = rows * (self.m[n].data / row_norms(rows))[:, None]
            weight[start:stop] = rows
        return weight

    def merged(self) -> Linear:
        """A plain linear layer that gives what this layer gives without dropout."""
        return plain_linear(self.merged_weight(), self.bias)


def adapt(
    base: Base, slices: Sequence[Slice], config: LoRAConfig, seed: int, name: str
) -> LoRALinear:
    """The LoRALinear that `config` makes of a layer."""
    return LoRALinear(
        base,
        [s.r for s in slices],
        [s.alpha for s in slices],
        config.dropout,
        [(s.start, s.stop) for s in slices],
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        init=config.init,
        quantize=config.quantize,
        seed=seed,
        name=name,
    )


@op(register=False)
def add_slices(y, *deltas, slices):
    """y, plus delta in the channels [start, stop) of each slice; the others keep their bits.

    y (..., O), *deltas (..., N) -> (..., O)
    """
    rows = math.prod(y.shape[:-1])
    out = y.copy()
    for delta, (start, _) in zip(deltas, slices, strict=True):
        add_columns(delta.reshape(rows, delta.shape[-1]), start, out.reshape(rows, out.shape[-1]))

    def part(n):
        return lambda g: g[..., slice(*slices[n])]

    return out, (lambda g: g, *(part(n) for n in range(len(deltas))))


@kernel
def add_columns(delta, start, out):
    """out[:, start : start + N] += delta.   delta (rows, N)"""
    out[:, start : start + delta.shape[1]] += delta


@add_columns.cpu
def add_columns_cpu(delta, start, out):
    _add_columns(-(-len(out) // _ROWS), delta, start, out)


_ROWS = 64  # of an index of the body


@body
def _add_columns(i, delta, start, out):
    for r in range(i * _ROWS, min((i + 1) * _ROWS, len(out))):
        o, d = out[r, start : start + delta.shape[1]], delta[r]
        for c in range(len(o)):
            o[c] += d[c]


_source = cuda.Source(r"""
// delta (n / N, N) is added to N columns of out (n / N, O), from `start` on.
extern "C" __global__ void add_columns(const REAL *delta, REAL *out, i64 start, i64 N, i64 O,
                                       i64 n) {
    const i64 i = this_thread();
    if (i < n) out[i / N * O + start + i % N] += delta[i];
}
""")


@add_columns.gpu
def add_columns_gpu(delta, start, out):
    shape, n = (delta.shape[1], out.shape[1]), delta.size
    blocks = cuda.blocks(n)
    _source("add_columns", blocks, cuda.THREADS, delta, out, start, *shape, n, real=out.dtype)


def plain_linear(weight: Any, bias: Tensor | None) -> Linear:
    """A Linear of float32 or float64 that owns `weight` and may share the array of `bias`."""
    layer = Linear.__new__(Linear)
    layer.weight = Tensor(weight)
    layer.bias = None if bias is None else Tensor(widen(bias.data))
    return layer


def base_shape(base: Base) -> tuple[int, int]:
    """(O, I) of a frozen layer."""
    O, I = (base if isinstance(base, QuantizedLinear) else base.weight).shape  # noqa: E741
    return O, I


def base_weight(base: Base) -> Any:
    """The matrix of a frozen layer in float32 or float64, whatever it is stored in."""
    if isinstance(base, QuantizedLinear):
        return base.dequantized()
    return widen(base.weight.data)


def row_norms(weight: Any) -> Any:
    """The Euclidean norm of each row, at least 1e-8, since DoRA divides by it.   (N, I) -> (N)"""
    with no_grad():
        w = Tensor(weight)
        norms = (w * w).sum(axis=1).sqrt().data
    return array_module(norms).maximum(norms, norms.dtype.type(1e-8))


def _product(b: Any, a: Any, scale: float) -> Any:
    """scale B A in float32 or float64, whatever products are computed in."""
    with no_grad(), compute_in("fp32"):
        return (Tensor(b) @ Tensor(a) * scale).data


def _default(layer: LoRALinear, weight: Any, n: int, seed: int) -> tuple[Any, Any]:
    """A uniform in +-1 / sqrt(I), B zero."""
    (start, stop), R, I = layer.slices[n], layer.ranks[n], weight.shape[1]  # noqa: E741
    bound = 1 / math.sqrt(I)
    a = uniform(make_key("lora", seed, layer.name, n), (R, I), -bound, bound)
    return a, np.zeros((stop - start, R), np.float32)


def _principal(layer: LoRALinear, weight: Any, n: int, seed: int) -> tuple[Any, Any]:
    rows = Tensor(weight[slice(*layer.slices[n])]).numpy()
    return principal_factors(rows, layer.ranks[n], layer.scales[n], seed, f"{layer.name}.{n}")


def _trained(values: Any) -> Tensor:
    return Tensor(values.copy(), requires_grad=True)


def _per_slice(value: Any, n: int) -> tuple:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * n
    if len(values) != n:
        raise ValueError(f"LoRALinear: {n} slices need {n} ranks and alphas, given {values}")
    return values
