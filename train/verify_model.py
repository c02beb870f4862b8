"""Is the model in a run's folder the one that a replay ends with, in every file that is read?

Its weights are compared with those of the replay, its config.json or adapter_config.json with what
would be written now, key by key, and what was copied from the folder that the run started from with
that folder. A file that the run would not have written, but generate or eval would read, departs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..lora import lora_modules
from ..lora.native import ADAPTER_FILE
from ..lora.peft import peft_config
from ..optim import weights_sha256
from ..transformer.files import read_json
from ..transformer.hf import checkpoint_config, smallest_exact
from .run import Run, open_model
from .text import COPIED, folder_files

PLAIN = ("model.safetensors", "config.json")
ADAPTER = ("adapter_model.safetensors", "adapter_config.json")
OTHERS = ("model.safetensors.index.json", ADAPTER_FILE)


def model_files(run: Run) -> tuple[str, ...]:
    """What the run writes of its model."""
    return ADAPTER if lora_modules(run.model) else PLAIN


def compare_copies(folder: Path, run: Run) -> str | None:
    """Where the files beside the model are not those that the run copied, in words."""
    found = folder_files(folder)
    for name in COPIED:
        if found.get(name) != run.files.get(name):
            if name not in run.files:
                return f"{folder / name} is there, which the run has not written"
            what = "is missing in" if name not in found else "is not what the run copied into"
            return f"{name} {what} {folder}"
    for name in (*PLAIN, *ADAPTER, *OTHERS):
        if name not in model_files(run) and (folder / name).exists():
            return f"{folder / name} is there, which the run has not written"
    return None


def compare_model(folder: Path, run: Run, ends: dict[int, str]) -> tuple[str | None, str]:
    """Where the model in the folder departs, if it does, and the digest of its weights.

    `ends` are the digests that it may have, by step.
    """
    try:
        model = open_model(folder, dtype=run.settings.storage)
    except (ValueError, FileNotFoundError) as error:
        return f"the model in {folder} cannot be opened: {error}", ""
    weights = weights_sha256(model)
    if weights not in ends.values():
        return f"the weights in {folder} are not those of step {run.step}", weights
    compare = _compare_adapter if lora_modules(run.model) else _compare_config
    return compare(folder, run, model), weights


def _compare_config(folder: Path, run: Run, model: Any) -> str | None:
    expected = checkpoint_config(run.model, smallest_exact(model.state_dict()))
    return _compare_json(folder / "config.json", expected)


def _compare_adapter(folder: Path, run: Run, model: Any) -> str | None:
    """The base may be another folder that holds the same."""
    path = folder / "adapter_config.json"
    base = read_json(path).get("base_model_name_or_path")
    if problem := _compare_json(path, peft_config(run.model, base)):
        return problem
    files = folder_files(base)
    for name in sorted({**files, **run.files}):
        if files.get(name) != run.files.get(name):
            return f"{path.name}: {base} holds another {name} than the folder that was trained on"
    if model.config != run.model.config:
        return f"{path.name}: {base} holds a model of another config than the one trained on"
    return None


def _compare_json(path: Path, expected: dict[str, Any]) -> str | None:
    found = read_json(path)
    for key in {**expected, **found}:
        if key not in expected:
            return f"{path.name}: {key} is {as_text(found[key])}, the run has written none"
        if key not in found:
            return f"{path.name}: {key} is missing, the run's is {as_text(expected[key])}"
        there, own = as_text(found[key]), as_text(expected[key])
        if there != own:
            return f"{path.name}: {key} is {there}, the run's is {own}"
    return None


def as_text(value: Any) -> str:
    """A value as JSON has it: 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)
