"""Starting: import, the first step ever, the first step with a warm cache, installed size.

Every measurement is a process of its own, with a cache folder that was empty before the first.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import afinar.autograd

from .harness import Row

IMPORT = """
import time
start = time.perf_counter()
import numba
numba_done = time.perf_counter()
import afinar.autograd, afinar.optim, afinar.transformer, afinar.lora
print(numba_done - start, time.perf_counter() - numba_done)
"""
STEP = """
import time
start = time.perf_counter()
from benches.step import *
ids, targets = tokens(BATCH, LENGTH, 512)
step = our_step(Transformer(small_llama(), seed=1), ids, targets)
first = time.perf_counter()
step()
print(time.perf_counter() - first)
"""


def _seconds(code: str, **env: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(word) for word in done.stdout.split()]


def rows(threads: int) -> Iterator[Row]:
    """Times beside their limits: a ratio of 1 or more is within the limit."""
    with tempfile.TemporaryDirectory() as compiled:
        # as installed: with byte code, which pip writes
        env = {"PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
        imports = [_seconds(IMPORT, **env) for _ in range(6)][1:]
    beyond = statistics.median(i[1] for i in imports)
    numba = statistics.median(i[0] for i in imports)
    yield Row(
        "cold", "import beyond numba", threads, beyond, 0.15, "limit", 1.0, f"numba {numba:.2f} s"
    )
    with tempfile.TemporaryDirectory() as cache:
        env = {"NUMBA_CACHE_DIR": cache, "NUMBA_NUM_THREADS": str(threads)}
        yield Row("cold", "first step ever", threads, _seconds(STEP, **env)[0], 30, "limit", 1.0)
        warm = statistics.median(_seconds(STEP, **env)[0] for _ in range(3))
        yield Row("cold", "first step, warm cache", threads, warm, 1.5, "limit", 1.0)
    root = Path(afinar.autograd.__file__).parent.parent
    size = sum(p.stat().st_size for d in PACKAGES for p in (root / d).rglob("*.py"))
    yield Row("cold", f"installed size: {size / 1e3:.0f} kB of source", threads, 0.0)


PACKAGES = ("autograd", "transformer", "lora", "optim", "train")
