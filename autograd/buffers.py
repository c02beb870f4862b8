"""Memory for large arrays, used again: a fresh page costs four times what a touched one does.

`empty` hands out an ordinary NumPy array. When the last view of it is gone, its memory goes back
to a free list instead of to the operating system, and the next request of that size gets it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .launch import address

ALIGN = 64  # a cache line, and the widest vector register
SMALL = 1 << 16  # below this malloc keeps its own free lists


class _State:
    def __init__(self) -> None:
        self.free: OrderedDict[int, list[Any]] = OrderedDict()
        self.live = self.cached = self.peak = 0


_state = _State()


class _Owner(np.ndarray):
    """What owns the memory. A class of its own, for NumPy looks for bases through plain arrays."""


class _Memory(np.ndarray):
    """A view of all of an owner, lent to an array as its `base`; when it dies, nobody reads."""

    def __del__(self, state: _State = _state) -> None:
        # May run at any point, in any thread, and when Python ends: only single operations, each
        # atomic, on no global name.
        size = self.size
        state.live -= size
        state.cached += size
        state.free.setdefault(size, []).append(self.base)


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
    """An uninitialised C-contiguous array, aligned to 64 bytes, from memory in use before."""
    dtype = np.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < SMALL:
        return np.empty(shape, dtype)
    size = -(-nbytes // 4096) * 4096 + ALIGN
    memory = _take(size).view(_Memory)
    _state.live += size
    _state.peak = max(_state.peak, _state.live)
    return np.ndarray(shape, dtype, memory, offset=-address(memory) % ALIGN)


def zeros(shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
    """`empty`, filled with zeros."""
    out = empty(shape, dtype)
    out.fill(0)
    return out


class _Scratch(threading.local):
    memory: Any = np.empty(0, np.uint8)
    start = 0


_scratch = _Scratch()


def scratch(nbytes: int) -> int:
    """The address of memory that a launch may use until it ends; the next one gets the same.

    Each thread of Python has its own.
    """
    if nbytes + ALIGN > _scratch.memory.size:
        _scratch.memory = np.empty(nbytes + ALIGN, np.uint8)
        _scratch.start = -(-address(_scratch.memory) // ALIGN) * ALIGN
    return _scratch.start


def _take(size: int) -> Any:
    same = _state.free.get(size)
    if same:
        try:
            raw = same.pop()
        except IndexError:  # another thread was faster
            pass
        else:
            _state.cached -= size
            return raw
    # Never hold more than was once in use: what is kept but not wanted goes first.
    while _state.cached and _state.live + _state.cached + size > _state.peak:
        trim(size)
    return _Owner(size, np.uint8)


def trim(nbytes: int | None = None) -> None:
    """Give unused memory back to the operating system: at least `nbytes`, or all of it."""
    freed = 0
    for size in list(_state.free):
        blocks = _state.free[size]
        while blocks and (nbytes is None or freed < nbytes):
            blocks.pop()
            _state.cached -= size
            freed += size
        if not blocks:
            del _state.free[size]
    if nbytes is None or not _state.free:
        _state.cached = sum(size * len(blocks) for size, blocks in _state.free.items())


def in_use() -> int:
    """Bytes of large arrays alive now."""
    return _state.live


def peak() -> int:
    """The most bytes of large arrays that were alive at once since `reset_peak`."""
    return _state.peak


def reset_peak() -> None:
    """Start the count of `peak` again from what is alive now."""
    _state.peak = _state.live
