"""Looking rows of a table up."""

from __future__ import annotations

import numpy as np

from ..backend import array_module, kernel
from ..tape import op


@op
def embedding(weight, ids):
    """weight[ids].   weight (V, C), ids (...) -> (..., C)"""
    if ids.dtype.kind not in "iu":
        raise TypeError(f"embedding: ids are integers, given {ids.dtype}")
    V = weight.shape[0]
    if ids.size and (ids.min() < 0 or ids.max() >= V):
        where = tuple(int(n[0]) for n in ((ids < 0) | (ids >= V)).nonzero())
        raise ValueError(f"embedding: id {int(ids[where])} at {where} is not in 0 .. {V - 1}")
    return embedding_rows(weight, ids), (lambda g: embedding_backward(g, ids, V), None)


@kernel
def embedding_rows(weight, ids):
    rows = weight[ids]
    return widen(rows) if rows.dtype == np.uint16 else rows


@kernel
def embedding_backward(g, ids, V):
    """The rows of g added up per id, positions ascending."""
    out = array_module(g).zeros((V, g.shape[-1]), g.dtype)
    array_module(g).add.at(out, ids.reshape(-1), g.reshape(-1, g.shape[-1]))
    return out


def widen(bits):
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
