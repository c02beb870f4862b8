"""The forward pass of attention on a CPU, tile by tile."""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

import numpy as np

from ..lanes import LANES, fma, less, load, maximum, select, splat, store, tree_max, tree_sum
from ..launch import body, device
from ..mathf import exp_flushed, log
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
    return 2 * rows * D + 2 * rows + TILE * D + 2 * STRIP * TILE + TILE


@body
def attention_forward_cpu(
    i, thread, items, parts, q, k, v, segments, holes, reach, window, scale,
    key0, key1, threshold, boost, blanks, work, out, lse,
):  # fmt: skip
    # owns the queries of one item in `H // parts` heads that share their keys
    _, T, H, D = q.shape
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
    s, w = w[: STRIP * TILE], w[STRIP * TILE :]
    factor, w = w[: STRIP * TILE], w[STRIP * TILE :]
    live, w = w[:TILE], w[TILE:]
    m, total = w[:rows], w[rows : 2 * rows]

    for r in range(rows):
        at = offset(q, b, t0 + r % n, h0 + r // n)
        for d in range(0, D, LANES):
            store(qs, r * D + d, load(q, at + d) * scale)
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
            if threshold:
                for y in range(stop):
                    h, t = h0 + (r + y) // n, t0 + (r + y) % n
                    word = ((b * H + h) * T + t) * S + k0
                    draw(key0, key1, threshold, boost, word, factor, y * TILE)
            soften(
                s, r, stop, n, p0 - k0, nk, reach, window, whole, holes, live, threshold, factor,
                blanks, m, total, acc, D,
            )  # fmt: skip
            product(
                s, 0, TILE, 1,
                v, offset(v, b, k0, kv), row_stride(v),
                acc, r * D, D, low, all_low, all_high, high,
            )  # fmt: skip

    for r in range(rows):
        h, t = h0 + r // n, t0 + r % n
        lse[b, h, t] = 0
        inverse = out.dtype.type(0)
        if total[r] != 0:
            lse[b, h, t] = m[r] + log(total[r])
            inverse = out.dtype.type(1) / total[r]
        for d in range(0, D, LANES):
            store(out, ((b * T + t) * H + h) * D + d, load(acc, r * D + d) * inverse)


@device(forceinline=False)
def soften(
    s, r, count, n, p0, nk, reach, window, whole, holes, live, threshold, factor,
    blanks, m, total, acc, D,
):  # fmt: skip
    """Turn the scores of rows r .. r + count - 1 to probabilities under each maximum so far."""
    least, other, low, high = splat(s.dtype.type(-np.inf)), load(blanks, 0), 0, TILE
    for y in range(count):
        o = y * TILE
        x0, x1, x2, x3 = load(s, o), load(s, o + 16), load(s, o + 32), load(s, o + 48)
        if not whole:
            p = p0 + (r + y) % n
            low, high = max(0, p + 1 - window), min(nk, p + 1 + reach)
            x0, x1 = masked(x0, 0, low, high, least), masked(x1, 16, low, high, least)
            x2, x3 = masked(x2, 32, low, high, least), masked(x3, 48, low, high, least)
            if holes:
                x0, x1 = alive(x0, 0, live, least), alive(x1, 16, live, least)
                x2, x3 = alive(x2, 32, live, least), alive(x3, 48, live, least)
        before = m[r + y]
        top = maximum(before, tree_max(maximum(maximum(x0, x1), maximum(x2, x3))))
        base = select(less(s.dtype.type(-np.inf), top), top, s.dtype.type(0))
        x0, x1 = exp_flushed(x0 - base), exp_flushed(x1 - base)
        x2, x3 = exp_flushed(x2 - base), exp_flushed(x3 - base)
        shrink = exp_flushed(before - base)
        m[r + y] = top
        total[r + y] = fma(total[r + y], shrink, tree_sum(((x0 + x1) + x2) + x3))
        if shrink != 1:
            for d in range((r + y) * D, (r + y + 1) * D, LANES):
                store(acc, d, load(acc, d) * shrink)
        if threshold:
            x0, x1 = x0 * load(factor, o), x1 * load(factor, o + 16)
            x2, x3 = x2 * load(factor, o + 32), x3 * load(factor, o + 48)
        if not whole:
            x0, x1 = masked(x0, 0, low, high, other), masked(x1, 16, low, high, other)
            x2, x3 = masked(x2, 32, low, high, other), masked(x3, 48, low, high, other)
            if holes:
                x0, x1 = alive(x0, 0, live, other), alive(x1, 16, live, other)
                x2, x3 = alive(x2, 32, live, other), alive(x3, 48, live, other)
        store(s, o, x0)
        store(s, o + 16, x1)
        store(s, o + 32, x2)
        store(s, o + 48, x3)
