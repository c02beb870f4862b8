"""Which parameters decay."""

from __future__ import annotations

from typing import Any


def param_groups(model: Any, weight_decay: float, decay: str = "matrices") -> list[dict[str, Any]]:
    """The trainable parameters of a model in groups: those that decay, and those that do not.

    `decay="matrices"`: parameters of two or more axes decay, norms and biases do not; "all": all
    do. Each run of equal settings is a group, so that the groups, one after the other, keep the
    model's order.
    """
    if decay not in ("matrices", "all"):
        raise ValueError(f'param_groups: decay is "matrices" or "all", not {decay!r}')
    groups: list[dict[str, Any]] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        amount = weight_decay if decay == "all" or p.ndim >= 2 else 0.0
        if not groups or groups[-1]["weight_decay"] != amount:
            groups.append({"params": [], "names": [], "weight_decay": amount})
        groups[-1]["params"].append(p)
        groups[-1]["names"].append(name)
    return groups
