"""Where a run runs: what may differ between two machines without the result differing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

from ..autograd import backend, get_num_threads
from ..autograd.launch import VECTOR_WIDTH, threading_layer


def environment() -> dict[str, Any]:
    """Versions, processor, cores, threads, vector width and threading layer."""
    libraries = ("afinar", "numpy", "numba", "llvmlite", "safetensors", "tokenizers", "jinja2")
    cupy = backend.cupy
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in libraries},
        "cupy": None if cupy is None else cupy.__version__,
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": get_num_threads(),
        "vector_width": VECTOR_WIDTH,
        "threading_layer": threading_layer(),
    }


def one_line(env: dict[str, Any]) -> str:
    """What a run prints at its start."""
    return (
        f"{env['cpu']}: {_count(env['cores'], 'core')}, {_count(env['threads'], 'thread')}, "
        f"vectors of {env['vector_width']} floats, threading layer {env['threading_layer']}"
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("s" if n != 1 else "")


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    return _stated("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def peak_memory_mb() -> float | None:
    """The most memory this process has held, in MiB."""
    peak = _stated("/proc/self/status", "VmHWM")  # such as "12345 kB"
    if peak is not None:
        return round(int(peak.split()[0]) / 2**10, 1)
    try:
        import resource
    except ImportError:
        return None
    # On Linux this counts what the process held that started this one, up to the exec.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def _stated(path: str, name: str) -> str | None:
    """What a file of Linux's says after `name` and a colon; None where there is none."""
    if Path(path).is_file():
        for line in Path(path).read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
