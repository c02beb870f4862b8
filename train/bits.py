"""On which device a run has its bits: what is recorded, and what a replay needs.

In float32, and in 16 bits with `deterministic`, digests are the same wherever they are computed.
Else they are a GPU's own (its fast mode), or, in 16 bits, a CPU's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..autograd import is_deterministic, set_deterministic
from ..autograd.device import gpu_name, resolve_device, why_no_gpu
from .trainer import StepRecord, TransformerTrainer


def own_device(trainer: TransformerTrainer) -> str | None:
    """The device whose own the digests are, "cpu" or "gpu"; None if any other gives the same."""
    if is_deterministic() or (trainer.device == "cpu" and not trainer.is_mixed_precision):
        return None
    return trainer.device


def describe_device(trainer: TransformerTrainer) -> dict[str, Any]:
    """The device and its mode, for the record of a session."""
    return {
        "device": trainer.device,
        "gpu": gpu_name() if trainer.device == "gpu" else None,
        "deterministic": is_deterministic(),
    }


def memory_mb(step: StepRecord) -> dict[str, float]:
    """MiB of GPU memory that arrays used, and that the pool held; nothing on a CPU."""
    if step.gpu_memory is None:
        return {}
    used, held = (round(n / 2**20, 1) for n in step.gpu_memory)
    return {"gpu_used_mb": used, "gpu_held_mb": held}


def device_for(steps: list[dict[str, Any]], asked: str) -> str:
    """The device to replay these records on, which are set up for: "cpu" or "gpu".

    Records that hold everywhere are replayed in the order that holds everywhere, on the CPU if
    nobody asks for another. ValueError if they do not hold everywhere, and the device that made
    them is not `asked` for or is not there.
    """
    made = {record.get("device") for record in steps}
    if made <= {None}:
        set_deterministic(True)
        return "cpu" if asked == "auto" else resolve_device(asked)
    if len(made) > 1:
        raise ValueError(
            "verify: the steps were computed partly on one device and partly on another, in modes "
            "whose bits are their own; verify between two snapshots, with --from and --to"
        )
    (device,) = made
    what = "a GPU in its fast mode" if device == "gpu" else "a CPU in 16 bits"
    because = (
        f"verify: the steps were computed on {what}, whose bits no other device has; replay them "
        f"there (--device {device}), or train with --deterministic"
    )
    if asked not in (device, "auto"):
        raise ValueError(because)
    if device == "gpu" and (why := why_no_gpu()) is not None:
        raise ValueError(f"{because}; {why}")
    return str(device)


def keeps_mode(fn: Callable) -> Callable:
    """Leave `set_deterministic` as it was before the call."""

    @functools.wraps(fn)
    def call(*args: Any, **options: Any) -> Any:
        before = is_deterministic()
        try:
            return fn(*args, **options)
        finally:
            set_deterministic(before)

    return call
