"""The forward pass of attention on a CPU, tile by tile."""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

import numpy as np

from ..lanes import fma, less, load, maximum, select, splat, store, tree_max, tree_sum
from ..launch import body, device
from ..mathf import exp, log
from .attention_plan import TILE
from .attention_tiles import (
    STRIP,
    alive,
    draw,
    find_live,
    masked,
    offset,
    pack,
    product,
    row_stride,
    scores,
    span,
)


def forward_size(rows: int, D: int) -> int:
    """Elements of a thread's workspace."""
    return 2 * rows * D + 2 * rows + TILE * D + TILE * TILE + 2 * TILE


@body
def attention_forward_cpu(
    i, thread, items, parts, q, k, v, segments, holes, scale, reach, window,
    key0, key1, threshold, boost, blanks, work, out, lse,
):  # fmt: skip
    # owns the queries of one item in `H // parts` heads that share their keys
    B, T, H, D = q.shape
    S, G = k.shape[1], k.shape[2]
    b, t0, n, first, end = items[i // parts]
    h0 = (i % parts) * (H // parts)
    kv = h0 // (H // G)
    rows = (H // parts) * n  # row r is query t0 + r % n of head h0 + r // n
    padded = (rows + STRIP - 1) // STRIP * STRIP
    p0 = t0 + S - T  # its place among the keys

    w = work[thread]
    qs, w = w[: padded * D], w[padded * D :]
    acc, w = w[: padded * D], w[padded * D :]
    kt, w = w[: TILE * D], w[TILE * D :]
    s, w = w[: TILE * TILE], w[TILE * TILE :]
    live, factor, w = w[:TILE], w[TILE : 2 * TILE], w[2 * TILE :]
    m, total = w[:rows], w[rows : 2 * rows]

    for r in range(rows):
        row, x = qs[r * D : (r + 1) * D], q[b, t0 + r % n, h0 + r // n]
        for d in range(D):
            row[d] = x[d] * scale
        m[r] = -np.inf
        total[r] = 0
    qs[rows * D :] = 0
    acc[:] = 0

    start = first + (max(first, p0 - window + 1) - first) // TILE * TILE
    for k0 in range(start, min(end, p0 + n + reach), TILE):
        nk = min(TILE, end - k0)
        pack(k, b, k0, kv, nk, kt)
        if holes:
            find_live(segments, b, p0, k0, nk, live)
        for r in range(0, rows, STRIP):
            t, stop = r % n, min(STRIP, rows - r)
            near, far = (p0 + t, p0 + t + stop - 1) if t + stop <= n else (p0, p0 + n - 1)
            low, all_low, all_high, high = span(near, far, nk, k0, reach, window)
            if high <= low:
                continue
            if holes:
                all_low = all_high = high
            whole = all_low == 0 and all_high == TILE
            scores(qs[r * D :], STRIP, kt, D, low, high, s)
            for y in range(r, r + stop):
                h, t = h0 + y // n, t0 + y % n
                row = s[(y - r) * TILE : (y - r + 1) * TILE]
                if threshold:
                    draw(key0, key1, threshold, boost, ((b * H + h) * T + t) * S + k0, factor)
                p = t + S - T - k0
                seen = max(0, p + 1 - window), min(nk, p + 1 + reach)
                shrink = soften(
                    row, whole, seen, holes, live, threshold, factor, blanks, m, total, y
                )
                if shrink != 1:
                    for d in range(y * D, (y + 1) * D):
                        acc[d] *= shrink
            product(
                s, 0, TILE, 1,
                v, offset(v, b, k0, kv), row_stride(v),
                acc, r * D, D, low, all_low, all_high, high,
            )  # fmt: skip

    for r in range(rows):
        h, t = h0 + r // n, t0 + r % n
        o = out[b, t, h]
        inverse = out.dtype.type(1) / total[r] if total[r] != 0 else total[r]
        for d in range(D):
            o[d] = acc[r * D + d] * inverse
        lse[b, h, t] = m[r] + log(total[r]) if total[r] != 0 else total[r]


@device(forceinline=False)
def soften(row, whole, seen, holes, live, threshold, factor, blanks, m, total, y):
    """Turn the scores of row y to probabilities under its maximum so far; how the old ones shrink."""
    low, high = seen
    least = splat(row.dtype.type(-np.inf))
    x0, x1, x2, x3 = load(row, 0), load(row, 16), load(row, 32), load(row, 48)
    if not whole:
        x0, x1 = masked(x0, 0, low, high, least), masked(x1, 16, low, high, least)
        x2, x3 = masked(x2, 32, low, high, least), masked(x3, 48, low, high, least)
        if holes:
            x0, x1 = alive(x0, 0, live, least), alive(x1, 16, live, least)
            x2, x3 = alive(x2, 32, live, least), alive(x3, 48, live, least)
    top = maximum(m[y], tree_max(maximum(maximum(x0, x1), maximum(x2, x3))))
    base = select(less(row.dtype.type(-np.inf), top), top, row.dtype.type(0))
    x0, x1, x2, x3 = exp(x0 - base), exp(x1 - base), exp(x2 - base), exp(x3 - base)
    shrink = exp(m[y] - base)
    total[y] = fma(total[y], shrink, tree_sum(((x0 + x1) + x2) + x3))
    m[y] = top
    if threshold:
        x0, x1 = x0 * load(factor, 0), x1 * load(factor, 16)
        x2, x3 = x2 * load(factor, 32), x3 * load(factor, 48)
    if not whole:
        other = load(blanks, 0)
        x0, x1 = masked(x0, 0, low, high, other), masked(x1, 16, low, high, other)
        x2, x3 = masked(x2, 32, low, high, other), masked(x3, 48, low, high, other)
        if holes:
            x0, x1 = alive(x0, 0, live, other), alive(x1, 16, live, other)
            x2, x3 = alive(x2, 32, live, other), alive(x3, 48, live, other)
    store(row, 0, x0)
    store(row, 16, x1)
    store(row, 32, x2)
    store(row, 48, x3)
    return shrink
