"""Gradient checkpointing: which layers' activations are kept, and what that saves.

Chen et al. 2016, arXiv:1604.06174. What is not kept is computed again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

POLICIES = ("none", "blocks", "segments", "matmuls", "every:K")


@dataclass(frozen=True)
class CheckpointConfig:
    """Which activations are kept.

    `policy`: "none": all are; "blocks": only the input of each block; "segments": only the input
    of each of `segments` runs of blocks (about sqrt(L) of L if not given); "every:K": the input of
    every K-th block; "matmuls": the input of each block and what matrix products and attention
    returned, so that only cheap things are computed twice.
    """

    policy: str = "none"
    segments: int | None = None

    def __post_init__(self) -> None:
        head, _, k = str(self.policy).partition(":")
        every = head == "every" and k.isdigit() and int(k) > 0
        if not every and self.policy not in POLICIES[:-1]:
            raise ValueError(
                f"checkpointing: the policy is one of {', '.join(POLICIES)}, not {self.policy!r}"
            )
        if self.segments is not None and (self.segments < 1 or self.policy != "segments"):
            raise ValueError(
                f"checkpointing: segments={self.segments} needs the policy 'segments' and a number "
                "of at least 1"
            )

    @property
    def enabled(self) -> bool:
        """Whether anything is computed twice."""
        return self.policy != "none"

    @property
    def kept_kernels(self) -> tuple[str, ...]:
        """The kernels whose results are kept beside the inputs of blocks."""
        return ("gemm", "attention_forward") if self.policy == "matmuls" else ()

    def starts(self, layers: int) -> Callable[[int], bool] | None:
        """For a model of so many layers: whether a layer's input is kept. None: all is kept.

        >>> keep = CheckpointConfig("segments", segments=4).starts(24)
        >>> [n for n in range(24) if keep(n)]
        [0, 6, 12, 18]
        """
        if self.policy == "none":
            return None
        every = 1
        if self.policy == "segments":
            every = segment_length(layers, self.segments or optimal_segments(layers))
        elif self.policy.startswith("every:"):
            every = int(self.policy[6:])
        return lambda n: n % every == 0


def optimal_segments(layers: int) -> int:
    """ceil(sqrt(L)) segments need the least memory; one for no layers.

    >>> optimal_segments(32), optimal_segments(0)
    (6, 1)
    """
    root = math.isqrt(layers)
    return max(1, root + (root * root < layers))


def segment_length(layers: int, segments: int) -> int:
    """ceil(L / segments) layers make a segment."""
    return max(1, -(-layers // segments))


def binomial_layers(layers: int) -> list[int]:
    """The layers kept with a step of L // ceil(sqrt(L)).

    >>> binomial_layers(16)
    [0, 4, 8, 12]
    """
    step = max(1, layers // optimal_segments(layers))
    return list(range(0, layers, step))


def estimate_memory(
    layers: int, batch: int, length: int, hidden: int, segments: int | None = None
) -> tuple[int, int]:
    """Bytes of block inputs kept: of all layers, and with checkpointing."""
    one = batch * length * hidden * 4
    return layers * one, max(optimal_segments(layers), segments or 0) * one


def within_budget(max_bytes: int, model: Any, batch: int, length: int) -> CheckpointConfig:
    """The policy that recomputes least of those whose kept activations fit in `max_bytes`.

    `model` is a `TransformerConfig`. ValueError if not even segments fit; it says what would.
    """
    L, tokens = model.num_hidden_layers, batch * length * 4
    block = tokens * (
        5 * model.hidden_size + 2 * model.q_dim + 4 * model.kv_dim + 3 * model.intermediate_size
    )
    products = tokens * (
        3 * model.hidden_size + 2 * model.q_dim + 2 * model.kv_dim + 2 * model.intermediate_size
    )
    S = optimal_segments(L)
    needs = {
        "none": L * block,
        "matmuls": L * products + block,
        "segments": S * tokens * model.hidden_size + segment_length(L, S) * block,
        "blocks": L * tokens * model.hidden_size + block,
    }
    for policy, bytes_needed in needs.items():
        if bytes_needed <= max_bytes:
            return CheckpointConfig(policy)
    raise ValueError(
        f"checkpointing: no policy fits {max_bytes:,} bytes; {min(needs.values()):,} are needed "
        f"for {batch} sequences of {length} tokens"
    )
