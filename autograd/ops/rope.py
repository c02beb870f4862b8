"""Rotary positions (Su et al. 2021, arXiv:2104.09864), in the half-split layout."""

# B batch, T positions, H heads, D head size.

from __future__ import annotations

from ..backend import array_module, kernel
from ..tape import op


@op
def rope(x, cos, sin):
    """Each pair (x[i], x[i + D/2]) turned by its angle.

    x (B, T, H, D), cos (B, T, D/2), sin (B, T, D/2) -> (B, T, H, D); cos and sin may be (T, D/2).
    """
    if x.shape[-1] % 2 or cos.shape[-1] != x.shape[-1] // 2 or cos.shape[-2] != x.shape[1]:
        raise ValueError(f"rope: x {x.shape} needs cos and sin of {(x.shape[1], x.shape[-1] // 2)}, given {cos.shape}")
    return rope_rotate(x, cos, sin), (lambda g: rope_rotate(g, cos, -sin), None, None)


@kernel(strides=("x",))
def rope_rotate(x, cos, sin):
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    cos, sin = cos[..., None, :], sin[..., None, :]
    return array_module(x).concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
