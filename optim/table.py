"""One launch for many arrays on a GPU: a table there says where each of them lies.

A row of the table stands for one parameter: the number of its first block, its size, and the
addresses of its arrays. Each block of threads looks up which row it belongs to, and takes the next
4096 elements of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..autograd import cuda

CHUNK = 4096  # elements of a block; those that one float64 sum of a norm is taken over

# `columns` are those of the table: 2 and the number of arrays.
LOOKUP = r"""
// The last row whose first block is not after this one: rows of no elements have no block.
__device__ inline const i64 *row_of(const i64 *table, i64 count, i64 columns, i64 block) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (table[middle * columns] <= block) low = middle;
        else high = middle;
    }
    return table + low * columns;
}
"""


def on_gpu(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, int]:
    """The table of these rows of C-contiguous arrays of one shape, and how many blocks it has."""
    sizes = np.array([row[0].size for row in rows])
    blocks = -(-sizes // CHUNK)
    first = np.cumsum(blocks) - blocks
    addresses = [[a.data.ptr for a in row] for row in rows]
    table = np.column_stack([first, sizes, np.array(addresses, np.int64)])
    return cuda.asarray(np.ascontiguousarray(table)), int(blocks.sum())


def update_all(source: cuda.Source, name: str, updates: Sequence[tuple]) -> None:
    """Launch `name` over updates (array, ..., constants), once for each type of float."""
    for dtype in (np.float32, np.float64):
        mine = [u for u in updates if u[0].dtype == dtype]
        if mine:
            table, blocks = on_gpu([u[:-1] for u in mine])
            constants = cuda.asarray(np.array([u[-1] for u in mine]).astype(dtype))
            source(name, blocks, cuda.THREADS, table, len(mine), constants, real=dtype)
