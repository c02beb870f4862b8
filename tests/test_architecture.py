"""The layers stand on each other one way only, and the house rules hold."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "autograd": set(),
    "optim": {"autograd"},
    "transformer": {"autograd"},
    "lora": {"autograd", "transformer", "optim"},
    "train": {"autograd", "optim", "transformer", "lora"},
}
SOURCES = sorted(p for name in MAY_IMPORT for p in (ROOT / name).rglob("*.py"))


def _imports(path):
    """(absolute module or package of ours, is it ours)"""
    depth = len(path.relative_to(ROOT).parts) - 1
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level > depth:  # beyond this package: a sister
                names = [node.module] if node.module else [a.name for a in node.names]
                yield from ((name.split(".")[0], True) for name in names)
            elif node.level == 0:
                yield node.module, False


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    package = path.relative_to(ROOT).parts[0]
    for name, ours in _imports(path):
        if ours:
            assert name in MAY_IMPORT[package], f"{path.name} imports {name}"
        assert not name.startswith("afinar"), "imports inside the packages are relative"
        if name.split(".")[0] == "cupy":
            assert path.name == "backend.py"
        assert name.split(".")[0] != "pickle"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_says_what_it_is(path):
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "a module docstring is missing"
