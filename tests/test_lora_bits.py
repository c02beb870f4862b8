"""Adapters of every variant have one digest, over threads, vector widths and code targets."""

import pytest
from test_bits import CELLS, output

pytestmark = pytest.mark.slow  # a process and its compilation for each cell


@pytest.mark.parametrize(
    "cell", ["one thread", "two threads", "vectors of 4", "vectors of 16", "code for AVX2"]
)
def test_adapters_have_one_digest(cell):
    if cell not in CELLS:
        pytest.skip(f"{cell}: not on this machine")
    expected = output("adapters").splitlines()
    got = output("adapters", **CELLS[cell], AFINAR_CELL=cell).splitlines()
    assert [a for a, b in zip(expected, got, strict=True) if a != b] == []
    assert len(expected) == 14
