"""The two devices: which can be used, how arrays get from one to the other, and what they hold.

The GPU is CuPy's current one. Everything else in the engine asks an array where it lives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from . import backend, buffers
from .backend import array_module

Result = TypeVar("Result")

DEVICES = ("cpu", "gpu", "auto")


def why_no_gpu() -> str | None:
    """What is needed before a GPU can be used here, as a sentence; None if one can be."""
    cupy = backend.cupy
    if cupy is None:
        return f"CuPy is needed for a GPU: pip install 'afinar[gpu]' ({backend.no_cupy})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CUDARuntimeError, which only a CuPy that works could name
        return (
            f"CuPy is installed, but an NVIDIA driver for it and a GPU are needed ({_line(error)})"
        )
    if not count:
        return "CuPy is installed, but there is no GPU that it can see"
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        return (
            f"CuPy finds no CUDA compiler: pip install 'afinar[gpu]' brings NVRTC ({_line(error)})"
        )
    return None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def resolve_device(name: str) -> str:
    """ "cpu" or "gpu": what `name` means here; "auto" is the GPU if one can be used.

    ValueError for "gpu" where none can be used; it says what is needed.
    """
    if name not in DEVICES:
        raise ValueError(f'device: "cpu", "gpu" or "auto" needed, given {name!r}')
    if name == "cpu":
        return name
    why = why_no_gpu()
    if name == "gpu" and why is not None:
        raise ValueError(f'device: "gpu" was asked for; {why}')
    return "cpu" if why else "gpu"


# --- arrays -------------------------------------------------------------------------------


def device_of(x: Any) -> str:
    """ "cpu" or "gpu": where an array lives."""
    return "cpu" if array_module(x) is np else "gpu"


def to_host(x: Any) -> np.ndarray:
    """An array of either device, or anything else that NumPy makes one of, as NumPy's."""
    return np.asarray(x) if array_module(x) is np else x.get()


def to_device(x: Any, device: str) -> Any:
    """The array on the device that `resolve_device` named; itself if it is there already."""
    if device_of(x) == device:
        return x
    return to_host(x) if device == "cpu" else backend.cupy.asarray(x, order="C")


def beside(x: Any, other: Any) -> Any:
    """The array x where `other` lives."""
    return to_device(x, device_of(other))


# --- memory -------------------------------------------------------------------------------


def gpu_memory() -> tuple[int, int]:
    """Bytes of GPU memory in use by arrays, and bytes that CuPy's pool holds for them."""
    pool = backend.cupy.get_default_memory_pool()
    return pool.used_bytes(), pool.total_bytes()


def gpu_name() -> str:
    """What the maker calls the GPU."""
    runtime = backend.cupy.cuda.runtime
    return runtime.getDeviceProperties(runtime.getDevice())["name"].decode()


def finish(device: str) -> None:
    """Wait until the device has done all that it was asked to: for whoever measures time."""
    if device == "gpu":
        backend.cupy.cuda.Stream.null.synchronize()


def with_memory(
    run: Callable[[], Result],
    what: str,
    advice: str,
    again: Callable[[], Result] | None = None,
) -> Result:
    """`run()`; if memory ends, give back what is held unused and run once more.

    `again` is what to run then, where `run` cannot be repeated. MemoryError, if that fails too,
    says `what` did not fit and gives `advice`.
    """
    try:
        return run()
    except Exception as error:
        if not _memory_ended(error):
            raise
    # Past the block the error is gone, and with it all that its frames held.
    release_memory()
    try:
        return (again or run)()
    except Exception as error:
        if not _memory_ended(error):
            raise
        last = _line(error)
    raise MemoryError(f"{what}: too much for the memory, tried twice; {advice} ({last})")


def _memory_ended(error: Exception) -> bool:
    # CuPy's pool raises a MemoryError; libraries that allocate beside it have errors of their own.
    words = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "ALLOC_FAILED")
    return isinstance(error, MemoryError) or any(w in str(error) for w in words)


def release_memory() -> None:
    """Give unused memory of both devices back to their systems."""
    gc.collect()
    buffers.trim()
    if why_no_gpu() is None:
        backend.cupy.get_default_memory_pool().free_all_blocks()
