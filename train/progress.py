"""What a run shows while it goes: a live line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import shutil
import time
from collections import deque
from typing import Any, TextIO


class Progress:
    """Shows a metrics row per step; the first step, which may compile kernels, is timed apart."""

    def __init__(self, stream: TextIO, steps: int, done: int = 0, every: int | None = None):
        self.stream, self.steps = stream, steps
        self.live = stream.isatty()
        self.every = every or max(1, steps // 40)
        self.val_loss: float | None = None
        # (time, tokens) of the last steps; their first entry is the end of the first step.
        self.marks: deque[tuple[float, int]] = deque(maxlen=30)
        self.tokens = 0
        self.first = done + 1
        self.begun = time.perf_counter()
        self.first_step: float | None = None
        self.drawn = 0.0

    def step(self, row: dict[str, Any]) -> None:
        """Take note of a step's row and show it if it is time to."""
        now = time.perf_counter()
        self.tokens += row["tokens"]
        self.marks.append((now, self.tokens))
        if "val_loss" in row:
            self.val_loss = row["val_loss"]
        step, last = row["step"], row["step"] == self.steps
        if step == self.first:
            self.first_step = now - self.begun
            self.say(f"first step after {self.first_step:.1f} s")
        if self.live:
            if now - self.drawn > 0.1 or last:
                self._draw(self.text(row, bar=True))
                self.drawn = now
        elif (
            step % self.every == 0 or step == self.first or last or row.get("val_loss") is not None
        ):
            self.stream.write(self.text(row) + "\n")
            self.stream.flush()

    def say(self, text: str) -> None:
        """A line of its own, above the live line."""
        self.stream.write(("\r\x1b[K" if self.live else "") + text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Leave the live line as it stands."""
        if self.live and self.drawn:
            self.stream.write("\n")
            self.stream.flush()

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last steps, without the first one."""
        if len(self.marks) < 2:
            return None
        (t0, n0), (t1, n1) = self.marks[0], self.marks[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else None

    def eta(self, step: int) -> float | None:
        """Seconds that the remaining steps will take, at the pace of the last ones."""
        if len(self.marks) < 2:
            return None
        pace = (self.marks[-1][0] - self.marks[0][0]) / (len(self.marks) - 1)
        return pace * (self.steps - step)

    def text(self, row: dict[str, Any], bar: bool = False) -> str:
        """One line: step, loss, validation loss, learning rate, gradient norm, tokens/s, ETA."""
        step = row["step"]
        parts = [f"step {step}/{self.steps}"]
        if bar:
            full = 12 * step // self.steps
            parts.append("█" * full + "░" * (12 - full))
        parts.append(f"loss {_shown(row['loss'], '.4f')}")
        if self.val_loss is not None:
            parts.append(f"val {self.val_loss:.4f}")
        parts.append(f"lr {row['lr']:.2e}")
        parts.append(f"norm {_shown(row['grad_norm'], '.3f')}")
        rate, eta = self.tokens_per_second, self.eta(step)
        parts.append("- tok/s" if rate is None else f"{rate:,.0f} tok/s")
        parts.append("ETA -" if eta is None else f"ETA {clock(eta)}")
        return "  ".join(parts)

    def _draw(self, text: str) -> None:
        room = shutil.get_terminal_size().columns - 1
        self.stream.write("\r\x1b[K" + text[:room])
        self.stream.flush()


def _shown(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def clock(seconds: float) -> str:
    """`1:05` or `2:03:04`.

    >>> clock(65), clock(7384)
    ('1:05', '2:03:04')
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
