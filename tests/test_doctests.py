"""The examples in docstrings and in the README run as they stand."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

PACKAGES = ("autograd", "optim", "transformer", "lora", "train")


def _modules():
    for package in PACKAGES:
        root = importlib.import_module(f"afinar.{package}")
        yield root.__name__
        for found in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
            if not found.name.endswith("__main__"):
                yield found.name


@pytest.mark.parametrize("name", sorted(_modules()))
def test_doctests(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_the_readme_runs():
    readme = Path(__file__).parent.parent / "README.md"
    result = doctest.testfile(str(readme), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
