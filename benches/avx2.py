"""The main rows on a machine without AVX-512: code generated for AVX2, in a process of its own.

The peers are told to do without it too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

from .harness import Row

OURS = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
THEIRS = {
    "OPENBLAS_CORETYPE": "Haswell",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
MEASURE = """
import json, sys
from dataclasses import asdict
from afinar.autograd import set_num_threads
from benches import matmul, step
from benches.harness import set_peer_threads
threads = int(sys.argv[1])
set_num_threads(threads)
set_peer_threads(threads)
rows = [*matmul.float32(threads), *step.rows(threads)]
print(json.dumps([asdict(row) for row in rows]))
"""


def rows(threads: int) -> Iterator[Row]:
    """float32 products and the training step; the targets hold for AVX-512 alone."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(threads)],
        env=os.environ | OURS | THEIRS | {"NUMBA_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=True,
    )
    for fields in json.loads(done.stdout.splitlines()[-1]):
        row = Row(**fields)
        yield replace(row, group="avx2", name=f"{row.group}: {row.name}", target=None)
