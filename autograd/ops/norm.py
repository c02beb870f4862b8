"""Normalisation of rows."""

# N rows of C channels; r is 1 / rms or 1 / std, one per row.

from __future__ import annotations

from ..backend import array_module, kernel
from ..tape import op


@op
def rms_norm(x, weight, *, eps=1e-6):
    """x r weight, with r = 1 / sqrt(mean(x**2) + eps).   Zhang & Sennrich 2019, arXiv:1910.07467

    x (..., C), weight (C) -> (..., C)
    """
    rows = x.reshape(-1, x.shape[-1])  # (N, C)
    y, r = rms_norm_forward(rows, weight, eps)  # (N, C), (N,)

    def vjp(g):
        dx, dweight = rms_norm_backward(g.reshape(rows.shape), rows, weight, r)
        return dx.reshape(x.shape), dweight  # (..., C), (C,)

    return y.reshape(x.shape), vjp


@kernel
def rms_norm_forward(x, weight, eps):
    r = 1 / array_module(x).sqrt((x * x).mean(axis=1) + x.dtype.type(eps))
    return x * r[:, None] * weight, r


@kernel
def rms_norm_backward(g, x, weight, r):
    # y = x r w and dr/dx = -r**3 x / C, so dx = r (g w) - x r**3 mean(g w x)
    gw, r = g * weight, r[:, None]
    dx = r * gw - x * r**3 * (gw * x).mean(axis=1, keepdims=True)
    return dx, (g * x * r).sum(axis=0)


@op
def layer_norm(x, weight, bias=None, *, eps=1e-5):
    """(x - mean) r weight + bias, with r = 1 / sqrt(var + eps).   Ba et al. 2016, arXiv:1607.06450

    x (..., C), weight (C), bias (C) -> (..., C)
    """
    rows = x.reshape(-1, x.shape[-1])
    y, mean, r = layer_norm_forward(rows, weight, bias, eps)

    def vjp(g):
        dx, dweight, dbias = layer_norm_backward(g.reshape(rows.shape), rows, weight, mean, r)
        return dx.reshape(x.shape), dweight, dbias

    return y.reshape(x.shape), vjp


@kernel
def layer_norm_forward(x, weight, bias, eps):
    mean = x.mean(axis=1)
    d = x - mean[:, None]
    r = 1 / array_module(x).sqrt((d * d).mean(axis=1) + x.dtype.type(eps))
    y = d * r[:, None] * weight
    return y if bias is None else y + bias, mean, r


@kernel
def layer_norm_backward(g, x, weight, mean, r):
    # with h = (x - mean) r: dx = r (g w - mean(g w) - h mean(g w h))
    h, gw = (x - mean[:, None]) * r[:, None], g * weight
    dx = r[:, None] * (gw - gw.mean(axis=1, keepdims=True) - h * (gw * h).mean(axis=1, keepdims=True))
    return dx, (g * h).sum(axis=0), g.sum(axis=0)
