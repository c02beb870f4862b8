"""Reads the shape line of an op's docstring and holds drawn shapes to it."""

import re

import numpy as np

LINE = re.compile(r"((?:\*?\w+ \([^()]*\)(?:, )?)+) -> \(([^()]*)\)")


def parse(doc: str) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """`x (..., C), weight (C) -> (..., C)` as ([("x", ["...", "C"]), ...], ["...", "C"])."""
    found = LINE.search(doc)
    assert found, f"no shape line in {doc!r}"
    inputs = re.findall(r"(\*?\w+) \(([^()]*)\)", found[1])
    return [(name, _dims(dims)) for name, dims in inputs], _dims(found[2])


def _dims(text: str) -> list[str]:
    return [d.strip() for d in text.split(",") if d.strip()]


def check(doc: str, inputs: list[tuple[int, ...]], result: tuple[int, ...]) -> None:
    """Raise AssertionError unless the shapes agree: one letter, one size; `...` broadcasts."""
    specs, out = parse(doc)
    if specs[0][0].startswith("*"):
        specs = specs[:1] * len(inputs)
    sizes: dict[str, int] = {}
    leads = [_bind(dims, shape, sizes) for (_, dims), shape in zip(specs, inputs, strict=False)]
    lead = _bind(out, result, sizes)
    if lead is not None:
        assert lead == np.broadcast_shapes(*(one for one in leads if one is not None))


def _bind(dims: list[str], shape: tuple[int, ...], sizes: dict[str, int]) -> tuple[int, ...] | None:
    if dims == ["*"]:
        return None
    lead = None
    if dims[:1] == ["..."]:
        split = len(shape) - len(dims) + 1
        lead, shape, dims = shape[:split], shape[split:], dims[1:]
    assert len(shape) == len(dims), f"{shape} is not {dims}"
    for name, size in zip(dims, shape, strict=True):
        name, _, part = name.partition("/")
        size *= int(part or 1)
        assert sizes.setdefault(name, size) == size, f"{name} is {sizes[name]} and {size}"
    return lead
