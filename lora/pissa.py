"""PiSSA: the largest singular triples of a matrix start as its adapter (arXiv:2404.02948)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..autograd import Tensor, no_grad
from ..autograd.random import make_key, normal

_ITERATIONS, _EXTRA = 20, 8


def principal_factors(weight: Any, r: int, scale: float, seed: int, name: str) -> tuple[Any, Any]:
    """A = sqrt(S / scale) V^T and B = U sqrt(S / scale) of the r largest singular triples.

    weight (N, I) -> A (r, I), B (N, r), float32. Subspace iteration (Halko et al. 2011,
    arXiv:0909.4061) and Jacobi rotations in the engine's own arithmetic, so that the bits do not
    depend on a linear algebra library.
    """
    w = weight.astype(np.float64)
    if r > min(w.shape):
        raise ValueError(f"pissa: {name} {w.shape} has no {r} singular values")
    k = min(r + _EXTRA, *w.shape)
    q = normal(make_key("pissa", seed, name), (w.shape[1], k)).astype(np.float64)
    for _ in range(_ITERATIONS):
        q = _orthonormal(_times(w.T, _orthonormal(_times(w, q))))
    image = _times(w, q)  # (N, k), whose singular triples are almost those of w
    values, turn = _jacobi(_times(image.T, image))  # image^T image = turn diag(values) turn^T
    order = np.argsort(-values, kind="stable")[:r]
    root = np.sqrt(np.sqrt(np.maximum(values[order], 0)))  # sqrt(S)
    v, u_s = _times(q, turn[:, order]), _times(image, turn[:, order])  # V, U S
    safe = np.where(root > 0, root, 1)
    a, b = (v * root).T, u_s / safe
    part = math.sqrt(scale)
    return (a / part).astype(np.float32), (b / part).astype(np.float32)


def _times(a: Any, b: Any) -> Any:
    with no_grad():
        return (Tensor(np.ascontiguousarray(a)) @ Tensor(np.ascontiguousarray(b))).data.copy()


def _orthonormal(x: Any) -> Any:
    """An orthonormal basis of the columns of x; zeros for columns that add nothing.

    x^T x = L L^T, so the columns of x L^-T are orthonormal; done twice against rounding.
    """
    for _ in range(2):
        x = _times(x, _inverse_factor(_times(x.T, x)).T)
    return x


def _inverse_factor(g: Any) -> Any:
    """L^-1 of the Cholesky factor of a symmetric matrix, with zeros where a pivot vanishes."""
    g, inverse = g.copy(), np.eye(len(g))
    smallest = 1e-13 * g.diagonal()
    for n in range(len(g)):
        if g[n, n] <= smallest[n]:
            g[n:, n], inverse[n] = 0, 0
            continue
        pivot = math.sqrt(g[n, n])
        column = g[n + 1 :, n] / pivot
        inverse[n] /= pivot
        inverse[n + 1 :] -= column[:, None] * inverse[n]
        g[n + 1 :, n + 1 :] -= column[:, None] * column
    return inverse


def _jacobi(g: Any) -> tuple[Any, Any]:
    """Eigenvalues and eigenvectors (columns) of a symmetric matrix, by cyclic rotations."""
    g, turn = g.copy(), np.eye(len(g))
    for _ in range(30):
        off = np.abs(g - np.diag(np.diag(g))).max()
        if off <= 1e-15 * np.abs(np.diag(g)).max():
            break
        for p in range(len(g) - 1):
            for q in range(p + 1, len(g)):
                if g[p, q] == 0:
                    continue
                theta = (g[q, q] - g[p, p]) / (2 * g[p, q])
                t = math.copysign(1, theta) / (abs(theta) + math.sqrt(theta * theta + 1))
                c = 1 / math.sqrt(t * t + 1)
                s = t * c
                for m in (g, turn):
                    mp, mq = m[:, p].copy(), m[:, q].copy()
                    m[:, p], m[:, q] = c * mp - s * mq, s * mp + c * mq
                gp, gq = g[p].copy(), g[q].copy()
                g[p], g[q] = c * gp - s * gq, s * gp + c * gq
    return np.diag(g).copy(), turn
