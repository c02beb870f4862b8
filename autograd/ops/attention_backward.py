"""The backward pass of attention on a CPU, tile by tile."""

# B batch, T queries, S keys, H query heads, G key-value heads, D head size.

from __future__ import annotations

import numpy as np

from ..lanes import LANES, fma, load, splat, store, tree_sum
from ..launch import body, device
from ..mathf import exp_flushed
from .attention_plan import TILE
from .attention_tiles import (
    STRIP,
    add,
    clear,
    cover,
    draw,
    fetch,
    find_live,
    pack,
    product,
    put,
    scores,
    span,
)


def backward_size(rows: int, D: int) -> int:
    """Elements of a thread's workspace."""
    return 3 * rows * D + 2 * rows + 5 * TILE * D + 2 * TILE * TILE + STRIP * TILE + TILE


@body
def attention_backward_cpu(
    i, thread, squares, parts, g, q, k, v, out, lse, segments, holes, reach, window, scale,
    key0, key1, threshold, boost, blanks, work, dq, dk, dv,
):  # fmt: skip
    # owns, of one square and `H // parts` heads that share their keys, the queries' rows of dq
    # and the keys' rows of dk and dv, whose axis of heads has `parts`
    T, H, D = q.shape[1], q.shape[2], q.shape[3]
    S, G = k.shape[1], k.shape[2]
    square, part = i // parts, i % parts
    b, t0, n, k_low, k_high = (
        squares[square, 0], squares[square, 1], squares[square, 2],
        squares[square, 3], squares[square, 4],
    )  # fmt: skip
    new_keys, new_queries, ready = squares[square, 5], squares[square, 6], squares[square, 7]
    heads = H // parts
    h0, kv = part * heads, part * heads // (H // G)
    padded = (n + STRIP - 1) // STRIP * STRIP
    one, step, stride = dq.dtype.type(1), np.int64(1), np.int64(TILE)

    w = work[thread]
    qs = np.int64(0)  # (n, D), q * scale
    gs = qs + padded * D  # (n, D)
    dqs = gs + padded * D  # (n, D)
    ks = dqs + padded * D  # (TILE, D)
    kt = ks + TILE * D  # (D, TILE)
    vt = kt + TILE * D  # (D, TILE)
    dks = vt + TILE * D  # (TILE, D)
    dvs = dks + TILE * D  # (TILE, D)
    p = dvs + TILE * D  # (TILE, TILE), scores, then probabilities
    ds = p + TILE * TILE  # (TILE, TILE), g v, then the gradient of the scores
    factor = ds + TILE * TILE  # (STRIP, TILE), of dropout
    live = factor + STRIP * TILE  # (TILE)
    sums = live + TILE  # (n), lse
    delta = sums + padded  # (n), g out
    clear(w, qs + n * D, (padded - n) * D)
    clear(w, gs + n * D, (padded - n) * D)

    for h in range(h0, h0 + heads):
        fetch(q, b, t0, h, n, scale, w, qs)
        fetch(g, b, t0, h, n, one, w, gs)
        fetch(out, b, t0, h, n, one, w, dqs)
        for r in range(n):
            w[sums + r] = lse[b, h, t0 + r]
            w[delta + r] = dot(w, gs + r * D, dqs + r * D, D)
        if new_queries:
            clear(w, dqs, n * D)
        else:
            fetch(dq, b, t0, h, n, one, w, dqs)

        for k0 in range(k_low, k_high, TILE):
            nk = min(TILE, k_high - k0)
            fetch(v, b, k0, kv, nk, one, w, ks)
            pack(w, ks, vt, nk, D)
            fetch(k, b, k0, kv, nk, one, w, ks)
            pack(w, ks, kt, nk, D)
            if holes:
                find_live(segments, b, t0 + S - T, k0, nk, w, live)
            if new_keys:
                clear(w, dks, 2 * TILE * D)
            else:
                fetch(dk, b, k0, part, nk, one, w, dks)
                fetch(dv, b, k0, part, nk, one, w, dvs)

            for r0 in range(0, n, TILE):
                m = min(TILE, n - r0)
                p0 = t0 + r0 + S - T - k0  # the first query's place among the tile's keys
                for r in range(0, m, STRIP):
                    count = min(STRIP, m - r)
                    low, all_low, all_high, high = span(
                        p0 + r, p0 + r + count - 1, nk, reach, window
                    )
                    if high <= low:
                        continue
                    if holes:
                        all_low = all_high = high
                    whole = all_low == 0 and all_high == TILE
                    scores(w, qs + (r0 + r) * D, kt, D, low, high, p + r * TILE)
                    scores(w, gs + (r0 + r) * D, vt, D, low, high, ds + r * TILE)
                    if threshold:
                        for y in range(count):
                            word = ((b * H + h) * T + t0 + r0 + r + y) * S + k0
                            draw(key0, key1, threshold, boost, word, w, factor + y * TILE)
                    harden(
                        w, p + r * TILE, ds + r * TILE, count, sums + r0 + r, delta + r0 + r,
                        whole, p0 + r, nk, reach, window, holes, live, threshold, factor, blanks,
                    )  # fmt: skip
                    to = dqs + (r0 + r) * D
                    product(w, ds + r * TILE, stride, step, ks, to, D, low, all_low, all_high, high)
                for j in range(0, nk, STRIP):
                    last = min(j + STRIP, nk) - 1
                    low, high = max(0, j - reach - p0), min(m, last + window - p0)
                    all_low, all_high = max(low, last - reach - p0), min(high, j + window - p0)
                    if high <= low:
                        continue
                    if holes or all_high < all_low or j + STRIP > nk:
                        all_low = all_high = high
                    for c, x, to in ((p, gs, dvs), (ds, qs, dks)):
                        product(
                            w, c + j, step, stride, x + r0 * D, to + j * D, D,
                            low, all_low, all_high, high,
                        )  # fmt: skip

            if h > h0:
                add(dk, b, k0, part, nk, w, dks)
                add(dv, b, k0, part, nk, w, dvs)
            run = step if holes else nk
            for j in range(0, nk, run):
                if not holes or w[live + j] != 0:
                    put(w, dks + j * D, run, one, dk, b, k0 + j, part)
                    put(w, dvs + j * D, run, one, dv, b, k0 + j, part)
        put(w, dqs, n, scale if ready else one, dq, b, t0, h)


@device(forceinline=False)
def dot(w, x, y, D):
    """The sum of w[x + d] w[y + d], in the order of lanes.row_dot."""
    total = splat(w.dtype.type(0))
    for d in range(0, D, LANES):
        total = fma(load(w, x + d), load(w, y + d), total)
    return tree_sum(total)


@device(forceinline=False)
def harden(
    w, p, ds, count, sums, delta, whole, p0, nk, reach, window, holes, live,
    threshold, factor, blanks,
):  # fmt: skip
    """From scores and g v: probabilities P and dS = P (dP - delta) of some rows."""
    other = load(blanks, 0)
    for y in range(count):
        for c in range(y * TILE, (y + 1) * TILE, LANES):
            x, dx = exp_flushed(load(w, p + c) - w[sums + y]), load(w, ds + c)
            kept = x
            if threshold:
                dropped = load(w, factor + c)
                dx, kept = dx * dropped, x * dropped
            store(w, p + c, kept)
            store(w, ds + c, x * (dx - w[delta + y]))
        if not whole:
            low, high = max(0, p0 + y + 1 - window), min(nk, p0 + y + 1 + reach)
            cover(w, p + y * TILE, low, high, holes, live, other)
            cover(w, ds + y * TILE, low, high, holes, live, other)


@body
def sum_heads(i, partial, out):  # owns out[i]
    G, D = out.shape[1], out.shape[2]
    R = partial.shape[1] // G
    for g in range(G):
        for d in range(D):
            total = partial[i, g * R, d]
            for h in range(g * R + 1, g * R + R):
                total += partial[i, h, d]
            out[i, g, d] = total
