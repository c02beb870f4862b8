"""One digest: over threads, vector widths, code targets, checkpointing and repetition.

Each cell of the matrix is a process of its own; one axis varies at a time. Cells of another code
target have another cache folder (Numba's index holds the target's name and features).
"""

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from afinar.autograd import launch

if not launch.JIT:
    pytest.skip("bits are promised for the compiled bodies", allow_module_level=True)

PROGRAMS = Path(__file__).parent / "bits"
X86 = platform.machine() == "x86_64"
AVX2 = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+bmi,+bmi2,+f16c",
}
RUN_CELLS = ("one thread", "two threads", "vectors of 8")
CELLS = {
    "one thread": {"NUMBA_NUM_THREADS": "1"},
    "two threads": {"NUMBA_NUM_THREADS": "2"},
    "four threads on fewer cores": {"NUMBA_NUM_THREADS": "4"},
    "vectors of 4": {"AFINAR_VECTOR_WIDTH": "4"},
    "vectors of 8": {"AFINAR_VECTOR_WIDTH": "8"},
    "vectors of 16": {"AFINAR_VECTOR_WIDTH": "16"},
    "workqueue": {"NUMBA_THREADING_LAYER": "workqueue"},
    "run twice": {},
    **({"code for AVX2": AVX2} if X86 else {}),
}


# What needs code compiled for a target of its own takes minutes.
COMPILES = {"vectors of 4", "vectors of 8", "code for AVX2"}
cells = [pytest.param(c, marks=[pytest.mark.slow] if c in COMPILES else []) for c in CELLS]


@functools.cache
def output(program: str, *args: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, PROGRAMS / f"{program}.py", *args],
        capture_output=True,
        text=True,
        env=os.environ | env,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("cell", cells)
def test_every_op_has_the_same_bits(cell):
    """Forward and all gradients of every op in the registry, on fixed samples."""
    expected, got = output("ops"), output("ops", **CELLS[cell], AFINAR_CELL=cell)
    different = [a for a, b in zip(expected.splitlines(), got.splitlines(), strict=True) if a != b]
    assert not different, f"{cell}: other bits in {[line.split()[0] for line in different]}"


@pytest.mark.parametrize("cell", cells)
def test_twenty_steps_have_one_digest(cell):
    assert output("training", **CELLS[cell], AFINAR_CELL=cell) == output("training")


@pytest.mark.parametrize("cell", [c for c in cells if c.values[0] in RUN_CELLS])
def test_the_record_of_a_run_has_the_same_bytes(cell, tmp_path):
    """`afinar train` for 20 steps: digests.json, byte by byte, beside a run with other settings."""
    (tmp_path / "text.txt").write_text("".join(f"{k} squared is {k * k}.\n" for k in range(500)))
    flags = ["--preset", "tiny", "--steps", "20", "--batch", "3", "--seq-len", "64"]
    flags += ["--digest-every", "5", "--eval-rows", "2"]
    records = []
    for n, env in enumerate(({}, CELLS[cell])):
        out = tmp_path / f"run{n}"
        argv = ["train", "--data", str(tmp_path / "text.txt"), *flags, "--out", str(out)]
        subprocess.run(
            [sys.executable, "-m", "afinar.train", *argv],
            check=True,
            capture_output=True,
            env=os.environ | env,
            timeout=900,
        )
        records.append((out / "digests.json").read_bytes())
    assert records[0] == records[1]
    assert records[0].count(b"sha256") >= 1 or len(records[0]) > 500


@pytest.mark.parametrize("mode", ["checkpointed"])
def test_the_way_of_computing_changes_no_digest(mode):
    assert output("training", mode) == output("training")


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch():
    assert output("batch") == "equal\n"


def test_a_width_dependent_kernel_is_caught():
    """The matrix can fail: a sum over the vector's lanes is told apart."""
    widths = {output("wrong", AFINAR_VECTOR_WIDTH=w) for w in ("4", "8", "16")}
    assert len(widths) > 1


def test_a_racy_kernel_is_caught():
    threads = {output("wrong", NUMBA_NUM_THREADS=n) for n in ("1", "2")}
    assert len(threads) > 1
