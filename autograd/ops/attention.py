"""Attention that keeps no (T, S) scores (FlashAttention-2, Dao 2023, arXiv:2307.08691).

The order of every sum, for any device, in the type of q. A chain starts at +0 and takes one fused
multiply-add per term. `row_dot`, `tree_sum` (16 lanes), `exp_flushed` and `log` are those of
lanes.py and mathf.py. What a query does not see is left out: its score and its dS are no terms.

Forward, for query t of head h, with qs = q * scale. The keys are taken in tiles of 64, the first
of which starts at the first key of the segment (key 0 without segments), however the queries are
batched, padded, packed or cached:

    m = -inf, l = +0, o = +0                             # o (D)
    for each tile, ascending:
        s[j] = chain over d of qs[d] k[j, d]
        m' = max(m, the tile's s),  c = exp_flushed(m - m'),  p[j] = exp_flushed(s[j] - m')
        l = fma(l, c, tree_sum of p)                     # lane i: p[i], + p[16 + i], ...
        o[d] = o[d] * c, then the chain goes on over j with (p[j] * keep[j]) v[j, d];  m = m'
    out = o * (1 / l),  lse = m + log(l)

Backward, with delta = row_dot(g, out):

    p[t, j] = exp_flushed(s[t, j] - lse[t]),  dp[t, j] = chain over d of g[t, d] v[j, d]
    ds[t, j] = p[t, j] * (dp[t, j] * keep[t, j] - delta[t])
    dq[t, d] = (chain over j of ds[t, j] k[j, d]) * scale
    dk[j, d] = chain over t of ds[t, j] qs[t, d]         # one for each query head; then they are
    dv[j, d] = chain over t of (p[t, j] * keep[t, j]) g[t, d]          # added, heads ascending

Chains over j and t ascend over all that is seen, so tiles and chunks of queries only schedule.
"""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

import numpy as np

from .. import buffers
from ..backend import FLOATS, array_module, kernel
from ..device import to_host
from ..launch import get_num_threads, strided
from ..precision import compute_dtype
from ..random import key_words
from ..tape import op
from . import attention_backward as backward
from . import attention_forward as forward
from . import attention_plan as plan
from . import attention_tiles as tiles
from .dropout import drop_rule, keep_mask
from .gemm import widen
from .rounding import in_precision


@op
def attention(
    q, k, v, *, causal=True, segments=None, window=None, scale=None, dropout=0.0, key=None
):
    """softmax(scale q k^T) v, each query head h with the key-value head h // (H / G).

    q (B, T, H, D), k (B, S, G, D), v (B, S, G, D) -> (B, T, H, D)

    Query t sees key s iff s <= t + S - T (if causal), t + S - T - s < window, and both are of the
    same segment; segments (B, S) are those of the keys, the queries are its last T; a negative
    segment is padding. A query that sees nothing gives 0. scale is 1 / sqrt(D) if not given. On a
    GPU D is at most 256.
    In a 16-bit mode q, k, v are rounded, and kept so with out for the backward pass; all sums are
    float32.
    """
    if segments is not None:
        # Plans are made on the host, wherever the heads are: a buffer is no array of a device.
        # A copy, for backward reads it too.
        segments = np.array(to_host(segments), order="C")
    _check(q, k, v, segments, window, dropout, key)
    if segments is not None:
        segments = segments.astype(np.int64, copy=False).data
    mode = compute_dtype()
    scale = q.dtype.type(q.shape[3] ** -0.5 if scale is None else scale)
    options = scale, bool(causal), segments, window, dropout, key
    if q.size == 0 or k.size == 0:
        xp = array_module(q)
        return xp.zeros_like(q), lambda g: tuple(xp.zeros_like(x) for x in (q, k, v))
    q, k, v = (in_precision(x, mode) for x in (q, k, v))
    out, lse = attention_forward(q, k, v, *options)
    kept = in_precision(out, mode)
    return out, lambda g: attention_backward(g, q, k, v, kept, lse, *options)


def _check(q, k, v, segments, window, dropout, key):
    B, T, H, D = q.shape if q.ndim == 4 else (-1,) * 4
    if k.ndim != 4 or v.shape != k.shape or k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            "attention: q (B, T, H, D) and k, v (B, S, G, D) needed, "
            f"given q {q.shape}, k {k.shape}, v {v.shape}"
        )
    S, G = k.shape[1:3]
    if G == 0 or H % G:
        raise ValueError(
            f"attention: the {H} query heads must be a multiple of the {G} key-value heads"
        )
    if D == 0:
        raise ValueError("attention: heads of size 0 given, at least 1 needed")
    if not (q.dtype == k.dtype == v.dtype and q.dtype in FLOATS):
        raise TypeError(
            "attention: q, k and v all in float32 or float64 needed, given "
            f"{q.dtype}, {k.dtype} and {v.dtype}"
        )
    if segments is not None:
        if segments.shape != (B, S) or segments.dtype.kind not in "iu":
            raise ValueError(
                f"attention: segments must be integers of shape {(B, S)}, one for each key, given "
                f"{segments.dtype} of shape {segments.shape}"
            )
        if T > S:
            raise ValueError(
                f"attention: with segments every query is one of the keys, given {T} queries "
                f"and {S} keys"
            )
    if window is not None and (not isinstance(window, int | np.integer) or window < 1):
        raise ValueError(f"attention: window must be a positive integer or None, given {window!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"attention: dropout must be in [0, 1), given {dropout}")
    if dropout:
        key_words(key)


def _seen(T, S, causal, segments, window):
    """Which query sees which key: (B or 1, T, S)."""
    t, s = np.arange(T)[:, None] + S - T, np.arange(S)[None, :]
    seen = np.ones((1, T, S), bool)
    if causal:
        seen &= s <= t
    if window is not None:
        seen &= t - s < window
    if segments is not None:
        segments = np.asarray(segments)
        seen = (
            seen
            & (segments[:, S - T :, None] == segments[:, None, :])
            & (segments[:, None, :] >= 0)
        )
    return seen


def _probabilities(q, k, scale, causal, segments, window):
    xp = array_module(q)
    k = k.repeat(q.shape[2] // k.shape[2], axis=2)
    scores = xp.einsum("bthd,bshd->bhts", q, k) * scale
    scores = xp.where(
        xp.asarray(_seen(q.shape[1], k.shape[1], causal, segments, window))[:, None],
        scores,
        -xp.inf,
    )
    top = scores.max(axis=-1, keepdims=True)
    e = xp.exp(scores - xp.where(xp.isfinite(top), top, 0))
    total = e.sum(axis=-1, keepdims=True)
    return e / xp.where(total == 0, 1, total), (
        xp.log(xp.where(total == 0, 1, total)) + xp.where(xp.isfinite(top), top, 0)
    )[..., 0]


@kernel(strides=("q", "k", "v"))
def attention_forward(q, k, v, scale, causal, segments, window, dropout, key):
    """The output, and the log-sum-exp of each query: (B, T, H, D), (B, H, T)."""
    q, k, v = widen(q), widen(k), widen(v)
    p, lse = _probabilities(q, k, scale, causal, segments, window)
    if dropout:
        p = p * keep_mask(p.shape, dropout, key, q.dtype)
    return array_module(q).einsum(
        "bhts,bshd->bthd", p, v.repeat(q.shape[2] // v.shape[2], axis=2)
    ), lse


@kernel(strides=("g", "q", "k", "v"))
def attention_backward(g, q, k, v, out, lse, scale, causal, segments, window, dropout, key):
    # P = softmax(scale Q K^T), O = P V; dV = P^T g, dP = g V^T, dS = P (dP - rowsum(g O)) scale
    xp = array_module(q)
    q, k, v, out = widen(q), widen(k), widen(v), widen(out)
    B, _, H, D = q.shape
    S, G = k.shape[1:3]
    p, _ = _probabilities(q, k, scale, causal, segments, window)
    dp = xp.einsum("bthd,bshd->bhts", g, v.repeat(H // G, axis=2))
    pv = p
    if dropout:
        keep = keep_mask(p.shape, dropout, key, q.dtype)
        dp, pv = dp * keep, p * keep
    ds = p * (dp - (g * out).sum(axis=-1).swapaxes(1, 2)[..., None]) * scale
    dq = xp.einsum("bhts,bshd->bthd", ds, k.repeat(H // G, axis=2))
    dk = xp.einsum("bhts,bthd->bshd", ds, q).reshape(B, S, G, H // G, D).sum(axis=3)
    dv = xp.einsum("bhts,bthd->bshd", pv, g).reshape(B, S, G, H // G, D).sum(axis=3)
    return dq, dk, dv


# --- CPU -----------------------------------------------------------------------------------


@attention_forward.cpu
def attention_forward_cpu(q, k, v, scale, causal, segments, window, dropout, key):
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    q, k, v = _filled(q), _filled(k), _filled(v)
    wide, dtype = q.shape[3], scale.dtype
    rows = plan.chunk_rows(wide)
    items, holes = plan.forward_items(B, T, S, plan.segment_names(segments), rows)
    # Few queries: those of the heads that share their keys are rows of one block.
    parts = G if rows >= H // G * T else H
    new = buffers.empty if items[:, 2].sum() == B * T else buffers.zeros
    out, lse = new((B, T, H, wide), dtype), new((B, H, T), dtype)
    forward.attention_forward_cpu(
        len(items) * parts, items, parts, strided(q), strided(k), strided(v),
        *_masks(segments, holes, causal, window), scale, *drop_rule(dropout, key, dtype),
        tiles.blank(dtype), _workspace(forward.forward_size(rows, wide), dtype), strided(out),
        lse,
    )  # fmt: skip
    return out if wide == D else np.ascontiguousarray(out[..., :D]), lse


def decode_call(starts, q, k, v, window, out, lse):
    """The number of indices and the arguments for one query per sequence and all keys up to it.

    `starts` (B) says where each sequence begins among the keys. Argument 0 holds, in its last
    column, the number of keys; it and axis 1 of k and v may grow from call to call.
    """
    B, _, _, D = q.shape
    G, S = k.shape[2], k.shape[1]
    items = np.zeros((B, plan.RUN), np.int64)
    items[:, 0], items[:, 2], items[:, 3], items[:, 4] = np.arange(B), 1, starts, S
    work = _workspace(forward.forward_size(plan.chunk_rows(D), D), q.dtype)
    return B * G, (
        items, G, strided(q), strided(k), strided(v), *_masks(None, False, True, window),
        q.dtype.type(D**-0.5), *drop_rule(0.0, None, q.dtype), tiles.blank(q.dtype), work,
        strided(out), lse,
    )  # fmt: skip


@attention_backward.cpu
def attention_backward_cpu(g, q, k, v, out, lse, scale, causal, segments, window, dropout, key):
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    g, q, k, v, out = _filled(g), _filled(q), _filled(k), _filled(v), _filled(out)
    wide, dtype = q.shape[3], scale.dtype
    rows = plan.chunk_rows(wide)
    sight = plan.sight(causal, window)
    squares, holes, queries, keys = plan.backward_squares(
        B, T, S, plan.segment_names(segments), rows, *sight
    )
    # Each head has sums of its own; they are added when it is done, or by a pass at the end.
    together = 4 * get_num_threads() <= B * G and len(squares) == 1 and rows >= T
    parts = G if together else H
    new = buffers.empty if queries == B * T else buffers.zeros
    dq = new((B, T, H, wide), dtype)
    new = buffers.empty if keys == B * S and not holes else buffers.zeros
    dk, dv = (new((B, S, parts, wide), dtype) for _ in range(2))
    work = _workspace(backward.backward_size(rows, wide), dtype)
    for wave in squares:
        backward.attention_backward_cpu(
            len(wave) * parts, wave, parts, strided(g), strided(q), strided(k), strided(v),
            strided(out), lse, *_masks(segments, holes, causal, window), scale,
            *drop_rule(dropout, key, dtype), tiles.blank(dtype), work, strided(dq), strided(dk),
            strided(dv),
        )  # fmt: skip
    if parts != G:
        dk, dv = (_sum_heads(x, G) for x in (dk, dv))
    return tuple(x if wide == D else np.ascontiguousarray(x[..., :D]) for x in (dq, dk, dv))


def _sum_heads(x, G):
    B, S, H, D = x.shape
    out = buffers.empty((B, S, G, D), x.dtype)
    backward.sum_heads(B * S, x.reshape(B * S, H, D), out.reshape(B * S, G, D))
    return out


def _filled(x):
    """x, its last axis filled up with zeros to a multiple of tiles.PAD."""
    D = x.shape[-1]
    wide = max(1, -(-D // tiles.PAD)) * tiles.PAD
    if wide == D:
        return x
    out = buffers.zeros((*x.shape[:-1], wide), x.dtype)
    out[..., :D] = x
    return out


_NO_SEGMENTS = np.zeros((1, 1), np.int64)


def _masks(segments, holes, causal, window):
    """What the bodies see keys by: segments, and how far a query sees ahead and back."""
    return (
        _NO_SEGMENTS if segments is None else np.asarray(segments),
        int(holes),
        *plan.sight(causal, window),
    )


def _workspace(size, dtype):
    return buffers.empty((get_num_threads(), size), dtype)
