"""How the step grows: with the batch, with the length of the sequences, with the threads.

`python -m benches growth` also draws both curves into `benches/pictures`. The time should be a
straight line in the batch; per token it should be flat in the length but for the attention term.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from afinar.autograd import set_num_threads
from afinar.train.plot import Curve, Panel, picture
from afinar.transformer import Transformer

from .harness import Row, in_turns, tokens
from .step import flops, our_step, small_llama

PICTURES = Path(__file__).parent / "pictures"
BATCHES, LENGTHS, TOKENS = (1, 2, 4, 8), (128, 256, 512, 1024, 2048), 2048


def rows(threads: int) -> Iterator[Row]:
    """Each step beside a line through the origin: 1.00 means linear."""
    config = small_llama()

    def step(batch: int, length: int):
        return our_step(Transformer(config, seed=1), *tokens(batch, length, config.vocab_size))

    in_batch = in_turns(*(step(B, 256) for B in BATCHES), seconds=2.0)
    for B, t in zip(BATCHES, in_batch, strict=True):
        line = in_batch[-1] * B / BATCHES[-1]
        yield Row("growth", f"step of batch {B} x 256", threads, t, line, "a straight line")
    in_length = in_turns(*(step(TOKENS // T, T) for T in LENGTHS), seconds=2.0)
    base = in_length[0] / flops(config, TOKENS // LENGTHS[0], LENGTHS[0])
    for T, t in zip(LENGTHS, in_length, strict=True):
        expected = base * flops(config, TOKENS // T, T)
        note = f"{t / TOKENS * 1e6:.1f} µs per token"
        yield Row(
            "growth", f"{TOKENS} tokens in rows of {T}", threads, t, expected, "FLOPs", note=note
        )
    if threads == 2:
        together = step(8, 256)

        def alone() -> float:
            set_num_threads(1)
            try:
                return together()
            finally:
                set_num_threads(2)

        two, one = in_turns(together, alone, seconds=6.0)
        yield Row("growth", "two threads", 2, two, one, "one thread", 1.85)
    ms = [(b, t * 1e3) for b, t in zip(BATCHES, in_batch, strict=True)]
    us = [(n, t / TOKENS * 1e6) for n, t in zip(LENGTHS, in_length, strict=True)]
    panels = [
        Panel(
            f"ms per step by batch of 256 tokens, {threads} threads", [Curve("step", ms, "#268")]
        ),
        Panel("µs per token by length, 2048 tokens a step", [Curve("token", us, "#a33")]),
    ]
    for n, panel in enumerate(panels):
        drawn = PICTURES / f"growth-{('batch', 'length')[n]}-{threads}.svg"
        drawn.write_text(picture([panel]))
