"""How everything here is measured: peers in turns, medians, results checked before timing."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass
class Row:
    """One line of the table: what, our time, the peer's, and how we compare with the target."""

    group: str
    name: str
    threads: int
    ours: float  # seconds
    peer: float | None = None  # seconds
    peer_name: str = ""
    target: float | None = None  # of ratio
    note: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """How many times faster than the peer."""
        return None if self.peer is None else self.peer / self.ours

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:6.2f} x {self.peer_name}"
        met = ""
        if self.target is not None and self.ratio is not None:
            met = f"(target {self.target:g}{'' if self.ratio >= self.target else ', MISSED'})"
        head = f"{self.group:10} {self.name:44} {self.threads}t {time_of(self.ours)}"
        return f"{head} {ratio:24} {met} {self.note}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


def time_of(seconds: float) -> str:
    """A time with a fitting unit."""
    for unit, size in (("s ", 1), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:8.2f} {unit}"
    return f"{seconds * 1e6:8.2f} µs"


def in_turns(*runs: Callable[[], Any], seconds: float = 1.0, most: int = 200) -> list[float]:
    """The median time of each of `runs`, called in turns for about `seconds` each, once warm.

    After a call the idle threads of a library spin for a while and would take a core from the
    next one's. So a turn begins with a pause and a call that is not timed, and then holds several.
    """
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + seconds * len(runs)
    while len(times[0]) < 3 or (time.perf_counter() < end and len(times[0]) < most):
        for run, taken in zip(runs, times, strict=True):
            time.sleep(PAUSE)
            start = now = time.perf_counter()
            run()
            while len(taken) < most and (now == start or now - start < TURN):
                before = time.perf_counter()
                run()
                now = time.perf_counter()
                taken.append(now - before)
    return [statistics.median(t) for t in times]


PAUSE, TURN = 0.005, 0.02  # seconds


def close(ours: Any, expected: Any, rtol: float = 1e-4) -> None:
    """Refuse to time a wrong result."""
    ours, expected = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    error = np.abs(ours - expected).max() / max(np.abs(expected).max(), 1e-30)
    if not error <= rtol:
        raise AssertionError(f"the result is off by {error:.2e} of the largest element")


def tokens(batch: int, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Random ids and their targets."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def optional(name: str) -> Any:
    """A peer's module, or None if it is not installed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def set_peer_threads(n: int) -> None:
    """PyTorch's thread count, where it is installed."""
    torch = optional("torch")
    if torch is not None:
        torch.set_num_threads(n)


def peak_memory() -> int:
    """The most bytes that this process has held.

    `ru_maxrss` would not do: it counts what the process held that started this one. Nor would
    `peak_memory_mb` of afinar.train, whose import a peer's process must not be charged with.
    """
    with open("/proc/self/status") as f:
        peak = next(line for line in f if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    # Here, not above: a peer's process must not hold our libraries when its memory is measured.
    from afinar.autograd import get_num_threads, launch

    versions = {"python": platform.python_version()}
    for name in ("numpy", "numba", "torch", "transformers", "peft"):
        module = optional(name)
        if module is not None:
            versions[name] = module.__version__
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            cpu = next((line.split(":")[1].strip() for line in f if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": get_num_threads(),
        "vector_width": launch.VECTOR_WIDTH,
        "threading_layer": launch.threading_layer(),
        "code_for": os.environ.get("NUMBA_CPU_NAME", "this CPU"),
        **versions,
    }
