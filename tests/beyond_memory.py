"""Arrays larger than memory, for kernels whose indices must not end at 32 bits. Stand-in only."""

import mmap

import numpy as np
import pytest

from afinar.autograd import cuda
from afinar.autograd.backend import cupy

emulated = pytest.mark.skipif(not hasattr(cupy, "EMULATED"), reason="needs memory without pages")


def endless(shape, dtype):
    """An array of the GPU that may be far larger than memory: what is not written is 0."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    no_reserve = 0x4000  # of Linux; Python names it from 3.13 on
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return cupy.ndarray(np.frombuffer(memory, dtype).reshape(shape))


@pytest.fixture
def last_block(monkeypatch):
    """Launches run nothing but the last block of their grid."""
    found = cuda._function

    def only(source, name, real):
        run = found(source, name, real)
        return lambda grid, block, args: run(grid, block, args, first=grid[0] - 1, blocks=1)

    monkeypatch.setattr(cuda, "_function", only)


@pytest.fixture
def without_pages(monkeypatch):
    """Large results of kernels have no pages but those that are written."""
    empty = cuda.empty
    monkeypatch.setattr(
        cuda, "empty", lambda s, dtype: (endless if np.prod(s) > 1 << 30 else empty)(s, dtype)
    )
