"""Rotary positions (Su et al. 2021, arXiv:2104.09864), in the half-split layout."""

# B batch, T positions, H heads, D head size.

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import cuda, mathf
from ..backend import array_module, kernel
from ..buffers import empty
from ..lanes import load, store
from ..launch import body, strided
from ..tape import op
from .elementwise import add_arrays, mul_arrays, neg_array
from .reduce import sum_axes


@op
def rope(x, cos, sin):
    """Each pair (x[i], x[i + D/2]) turned by its angle.

    x (B, T, H, D), cos (B, T, D/2), sin (B, T, D/2) -> (B, T, H, D); cos and sin may be (T, D/2).
    """
    B, T, _, D = x.shape if x.ndim == 4 else (0, 0, 0, 1)
    tables = ((B, T, D // 2), (1, T, D // 2), (T, D // 2))
    if D % 2 or cos.shape not in tables or sin.shape != cos.shape:
        raise ValueError(
            f"rope: x (B, T, H, D) with an even D needs cos and sin (B, T, D/2) or (T, D/2), "
            f"given x {x.shape}, cos {cos.shape}, sin {sin.shape}"
        )
    half = D // 2
    cos, sin = (a if a.ndim == 3 else a[None] for a in (cos, sin))
    return rope_rotate(x, cos, sin), (
        lambda g: rope_rotate(g, cos, -sin),
        lambda g: _over_heads(g, x[..., :half], x[..., half:]),
        lambda g: _over_heads(g, neg_array(x[..., half:]), x[..., :half]),
    )


def _over_heads(g, by1, by2):
    # y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin
    half = g.shape[-1] // 2
    both = add_arrays(mul_arrays(g[..., :half], by1), mul_arrays(g[..., half:], by2), None)
    return sum_axes(both, (2,))  # (B, T, D/2)


@kernel(strides=("x",))
def rope_rotate(x, cos, sin):
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    cos, sin = cos[..., None, :], sin[..., None, :]
    return array_module(x).concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def rope_table(
    positions: Any, D: int, theta: float = 10000.0, scaling: dict[str, Any] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * frequency: float32 arrays (*positions.shape, D / 2).

    Computed in float64 and rounded once. `scaling` is Hugging Face's `rope_scaling` or
    `rope_parameters`; see `rope_frequencies`.
    """
    angles = np.asarray(positions, np.float64)[..., None] * rope_frequencies(D, theta, scaling)
    return mathf.host_cos(angles).astype(np.float32), mathf.host_sin(angles).astype(np.float32)


def rope_frequencies(
    D: int, theta: float = 10000.0, scaling: dict[str, Any] | None = None
) -> np.ndarray:
    """Radians per position of each pair: theta**(-2 i / D), scaled; float64 (D / 2).

    `rope_type` (or `type`) is "default", "linear" (all divided by `factor`) or "llama3" (those
    that turn fewer than `low_freq_factor` times within the original context are divided by
    `factor`, those that turn more than `high_freq_factor` times are kept, linear in between).
    """
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    frequencies = mathf.host_pow(theta, np.arange(0, D, 2) / -D)
    if kind == "default":
        return frequencies
    if kind not in ("linear", "llama3"):
        raise ValueError(f'rope scaling {kind!r}: "default", "linear" or "llama3" needed')
    factor = _setting(scaling, kind, "factor")
    if kind == "linear":
        return frequencies / factor
    low, high = (_setting(scaling, kind, f"{end}_freq_factor") for end in ("low", "high"))
    if not low < high:
        raise ValueError(
            f"rope scaling 'llama3' needs a high_freq_factor above low_freq_factor, "
            f"given {high} and {low}"
        )
    turns = _setting(scaling, kind, "original_max_position_embeddings") * frequencies / math.tau
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * (frequencies / factor) + kept * frequencies


def _setting(scaling: dict[str, Any], kind: str, name: str) -> float:
    value = scaling.get(name)
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"rope scaling {kind!r} needs a positive {name}, given {value!r}")
    return float(value)


# --- CPU -----------------------------------------------------------------------------------

BLOCK = 16  # positions per index


@rope_rotate.cpu
def rope_rotate_cpu(x, cos, sin):
    out = empty(x.shape, x.dtype)
    positions = x.shape[0] * x.shape[1]
    cos, sin = (a.astype(x.dtype, copy=False) for a in (cos, sin))
    _rotate(-(-positions // BLOCK), strided(x), cos, sin, out)
    return out


@body
def _rotate(i, x, cos, sin, out):
    B, T, H, D = x.shape
    half = D // 2
    for n in range(i * BLOCK, min((i + 1) * BLOCK, B * T)):
        b, t = n // T, n % T
        turn = b if cos.shape[0] > 1 else 0
        c, s = cos[turn, t], sin[turn, t]
        for h in range(H):
            row, to = x[b, t, h], out[b, t, h]
            for k in range(0, half - 15, 16):
                x1, x2, ck, sk = load(row, k), load(row, k + half), load(c, k), load(s, k)
                store(to, k, x1 * ck - x2 * sk)
                store(to, k + half, x2 * ck + x1 * sk)
            for k in range(half - half % 16, half):
                x1, x2 = row[k], row[k + half]
                to[k] = x1 * c[k] - x2 * s[k]
                to[k + half] = x2 * c[k] + x1 * s[k]


# --- GPU -----------------------------------------------------------------------------------

_source = cuda.Source(r"""
// A thread a pair; x has strides b_step, t_step, h_step, and turns is T, or 0 if all rows of the
// batch have the same angles.
extern "C" __global__ void rotate(const REAL *x, i64 b_step, i64 t_step, i64 h_step,
                                  const REAL *cos, const REAL *sin, i64 turns, REAL *out, i64 T,
                                  i64 H, i64 half, i64 n) {
    const i64 i = this_thread();
    if (i >= n) return;
    const i64 k = i % half, row = i / half, h = row % H, t = row / H % T, b = row / H / T;
    const REAL *pair = x + b * b_step + t * t_step + h * h_step + k;
    const i64 angle = (b * turns + t) * half + k;
    const REAL x1 = pair[0], x2 = pair[half], c = cos[angle], s = sin[angle];
    out[row * 2 * half + k] = x1 * c - x2 * s;
    out[row * 2 * half + half + k] = x2 * c + x1 * s;
}
""")


@rope_rotate.gpu
def rope_rotate_gpu(x, cos, sin):
    out, (_, T, H, D) = cuda.empty(x.shape, x.dtype), x.shape
    cos, sin = (a.astype(x.dtype, copy=False) for a in (cos, sin))
    steps = (s // x.itemsize for s in x.strides[:3])
    rest = cos, sin, T if cos.shape[0] > 1 else 0, out, T, H, D // 2
    n = out.size // 2
    _source("rotate", cuda.blocks(n), cuda.THREADS, x, *steps, *rest, n, real=x.dtype)
    return out
