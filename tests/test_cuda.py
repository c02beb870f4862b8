"""What can be known about the CUDA sources without a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from afinar import lora, optim  # noqa: F401 - they have sources of their own
from afinar.autograd import cuda

HERE = Path(__file__).parent
NVCC = shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("real", ["float", "double"])
def test_every_source_compiles(real, tmp_path):
    code = "".join(
        f"namespace source{n} {{\n{source.code(real)}\n}}\n"
        for n, source in enumerate(cuda.SOURCES)
    ).replace('extern "C" ', "")
    (tmp_path / "all.cu").write_text(code)
    options = [o for o in cuda.OPTIONS if not o.startswith("--std")]
    run = subprocess.run(
        [NVCC, "-std=c++17", *options, "-arch=sm_90", "-cubin", "-o", "all.cubin", "all.cu"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    "chosen", ["gpu and not slow", pytest.param("gpu and slow", marks=pytest.mark.slow)]
)
def test_the_sources_give_the_bits_of_the_cpu(chosen):
    """The tests that a GPU would run, on a stand-in for it."""
    path = os.pathsep.join([str(HERE / "cuda_on_cpu"), str(HERE)])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", chosen, "-p",
         "no:cacheprovider", *map(str, sorted(HERE.glob("test_gpu*.py")))],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=HERE.parent,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
