"""The curves of a run as an SVG picture, written by hand: no plotting library is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 860, 64, 20
INK, FAINT, GRID = "#24292f", "#6e7781", "#e6e8eb"
BLUE, ORANGE, GREEN, PURPLE = "#2563eb", "#ea580c", "#15803d", "#7c3aed"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


@dataclass
class Curve:
    """Points to join by a line (or to mark, with `dots`); values that are not finite are gaps."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.8
    opacity: float = 1.0
    dots: bool = False


@dataclass
class Panel:
    """One pair of axes."""

    title: str
    curves: list[Curve]
    height: int = 120


def run_curves(rows: Iterable[dict]) -> str:
    """Loss, validation loss, learning rate and gradient norm over the steps of `metrics.jsonl`."""
    rows = list(rows)
    loss = _points(rows, "loss")
    return picture(
        [
            Panel(
                "loss (nats per token)",
                [
                    Curve("every step", loss, BLUE, 1.0, 0.28),
                    Curve("smoothed", smoothed(loss), BLUE, 2.2),
                    Curve("validation", _points(rows, "val_loss"), ORANGE, 2.2, dots=True),
                ],
                300,
            ),
            Panel("learning rate", [Curve("", _points(rows, "lr"), GREEN)]),
            Panel("gradient norm", [Curve("", _points(rows, "grad_norm"), PURPLE, 1.2)]),
        ]
    )


def picture(panels: list[Panel]) -> str:
    """The panels under one another, on one axis of steps."""
    xs = [x for panel in panels for c in panel.curves for x, _ in c.points]
    x_range = (min(xs, default=0.0), max(xs, default=1.0))
    out, top = [], 12
    for panel in panels:
        out += _panel(panel, top, x_range)
        top += panel.height + 50
    size = f"viewBox='0 0 {WIDTH} {top}' width='{WIDTH}' height='{top}'"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT} font-size='12'>\n"
        "<rect width='100%' height='100%' rx='10' fill='#ffffff'/>\n"
        + "\n".join(out)
        + "\n</svg>\n"
    )


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """An exponential mean over about a fiftieth of the run, without a start-up bias."""
    keep = 1 - 1 / max(1.0, len(points) / 50)
    out, total, weight = [], 0.0, 0.0
    for x, y in points:
        if math.isfinite(y):
            total, weight = keep * total + y, keep * weight + 1
            out.append((x, total / weight))
    return out


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` + 1 round numbers (1, 2 or 5 times a power of ten) from low to high.

    >>> ticks(0.0, 9.3)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _points(rows: list[dict], key: str) -> list[tuple[float, float]]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


class _Axes:
    """From values to places in the picture."""

    def __init__(self, panel: Panel, top: int, x_range: tuple[float, float]):
        ys = [y for c in panel.curves for _, y in c.points if math.isfinite(y)]
        low, high = min(ys, default=0.0), max(ys, default=1.0)
        pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        self.low, self.high = low - pad, high + pad
        self.left, self.right = x_range
        self.top, self.bottom = top + 26, top + 26 + panel.height

    def x(self, x: float) -> float:
        span = self.right - self.left or 1.0
        return round(LEFT + (x - self.left) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(self, y: float) -> float:
        part = (y - self.low) / (self.high - self.low)
        return round(self.bottom - part * (self.bottom - self.top), 1)


def _panel(panel: Panel, top: int, x_range: tuple[float, float]) -> list[str]:
    axes, title = _Axes(panel, top, x_range), top + 12
    out = [_text(LEFT, title, panel.title, INK, "font-weight='600'")]
    for value in ticks(axes.low, axes.high, max(2, panel.height // 45)):
        y = axes.y(value)
        out += [
            f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y}' y2='{y}' stroke='{GRID}'/>",
            _text(LEFT - 8, y + 4, f"{value:.4g}", FAINT, "text-anchor='end'"),
        ]
    out.append(_text(LEFT - 8, axes.bottom + 16, "step", FAINT, "text-anchor='end'"))
    out += [
        _text(axes.x(value), axes.bottom + 16, f"{value:.6g}", FAINT, "text-anchor='middle'")
        for value in ticks(*x_range, 8)
    ]
    out += [_curve(c, axes) for c in panel.curves]
    x = WIDTH - RIGHT
    for c in reversed(panel.curves):
        if c.name and c.points:
            x -= 7 * len(c.name) + 34
            pen = f"stroke='{c.colour}' stroke-width='{c.width}' stroke-opacity='{c.opacity}'"
            out += [
                f"<line x1='{x}' x2='{x + 18}' y1='{title - 4}' y2='{title - 4}' {pen}/>",
                _text(x + 23, title, c.name, FAINT),
            ]
    return out


def _text(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    return f"<text x='{x}' y='{y}' fill='{colour}' {more}>{escape(text)}</text>"


def _curve(c: Curve, axes: _Axes) -> str:
    path, pen, marks = [], "M", []
    for x, y in c.points:
        if not math.isfinite(y):
            pen = "M"
            continue
        path.append(f"{pen}{axes.x(x)} {axes.y(y)}")
        pen = "L"
        if c.dots:
            marks.append(f"<circle cx='{axes.x(x)}' cy='{axes.y(y)}' r='3' fill='{c.colour}'/>")
    return (
        f"<path d='{' '.join(path)}' fill='none' stroke='{c.colour}' stroke-width='{c.width}' "
        f"stroke-opacity='{c.opacity}' stroke-linejoin='round'/>{''.join(marks)}"
    )
