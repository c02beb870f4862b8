"""Attention that keeps no (T, S) scores (FlashAttention-2, Dao 2023, arXiv:2307.08691)."""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

import numpy as np

from ..backend import array_module, kernel
from ..tape import op


@op
def attention(q, k, v, *, causal=True, segments=None, window=None, scale=None, dropout=0.0, key=None):
    """softmax(scale q k^T) v, each query head h with the key-value head h // (H / G).

    q (B, T, H, D), k (B, S, G, D), v (B, S, G, D) -> (B, T, H, D)

    Query t sees key s iff s <= t + S - T (if causal), t + S - T - s < window, and both are of the
    same segment; segments (B, S) are those of the keys, the queries are its last T; a negative
    segment is padding. A query that sees nothing gives 0. scale is 1 / sqrt(D) if not given.
    """
    if q.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"attention: shapes do not fit: q {q.shape}, k {k.shape}, v {v.shape}")
    scale = q.dtype.type(q.shape[3] ** -0.5 if scale is None else scale)
    out, lse = attention_forward(q, k, v, scale, causal, segments, window, dropout, key)

    def vjp(g):
        return attention_backward(g, q, k, v, out, lse, scale, causal, segments, window, dropout, key)

    return out, vjp


def _seen(T, S, causal, segments, window):
    """Which query sees which key: (B or 1, T, S)."""
    t, s = np.arange(T)[:, None] + S - T, np.arange(S)[None, :]
    seen = np.ones((1, T, S), bool)
    if causal:
        seen &= s <= t
    if window is not None:
        seen &= t - s < window
    if segments is not None:
        seen = seen & (segments[:, S - T :, None] == segments[:, None, :]) & (segments[:, None, :] >= 0)
    return seen


def _probabilities(q, k, scale, causal, segments, window):
    xp = array_module(q)
    k = k.repeat(q.shape[2] // k.shape[2], axis=2)
    scores = xp.einsum("bthd,bshd->bhts", q, k) * scale
    scores = xp.where(xp.asarray(_seen(q.shape[1], k.shape[1], causal, segments, window))[:, None], scores, -xp.inf)
    top = scores.max(axis=-1, keepdims=True)
    e = xp.exp(scores - xp.where(xp.isfinite(top), top, 0))
    total = e.sum(axis=-1, keepdims=True)
    return e / xp.where(total == 0, 1, total), (xp.log(xp.where(total == 0, 1, total)) + xp.where(xp.isfinite(top), top, 0))[..., 0]


@kernel(strides=("q", "k", "v"))
def attention_forward(q, k, v, scale, causal, segments, window, dropout, key):
    """The output, and the log-sum-exp of each query: (B, T, H, D), (B, H, T)."""
    p, lse = _probabilities(q, k, scale, causal, segments, window)
    if dropout:
        p = p * _dropped(p.shape, dropout, key, q.dtype)
    return array_module(q).einsum("bhts,bshd->bthd", p, v.repeat(q.shape[2] // v.shape[2], axis=2)), lse


@kernel(strides=("g", "q", "k", "v"))
def attention_backward(g, q, k, v, out, lse, scale, causal, segments, window, dropout, key):
    # P = softmax(scale Q K^T), O = P V; dV = P^T g, dP = g V^T, dS = P (dP - rowsum(g O)) scale
    xp = array_module(q)
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    p, _ = _probabilities(q, k, scale, causal, segments, window)
    dp = xp.einsum("bthd,bshd->bhts", g, v.repeat(H // G, axis=2))
    pv = p
    if dropout:
        keep = _dropped(p.shape, dropout, key, q.dtype)
        dp, pv = dp * keep, p * keep
    ds = p * (dp - (g * out).sum(axis=-1).swapaxes(1, 2)[..., None]) * scale
    dq = xp.einsum("bhts,bshd->bthd", ds, k.repeat(H // G, axis=2))
    dk = xp.einsum("bhts,bthd->bshd", ds, q).reshape(B, S, G, H // G, D).sum(axis=3)
    dv = xp.einsum("bhts,bthd->bshd", pv, g).reshape(B, S, G, H // G, D).sum(axis=3)
    return dq, dk, dv


def _dropped(shape, p, key, dtype):
    from .dropout import keep_mask

    return keep_mask(shape, p, key, dtype)
