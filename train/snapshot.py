"""Saved state: a folder of snapshots from which training goes on with the same bits.

    snapshots/step-00000120/weights.safetensors    what is trained
                            moments.safetensors    `first.NAME`, `second.NAME`
                            callbacks.safetensors  arrays that callbacks hold, if any
                            state.json             everything else, and the hash of each file
    snapshots/last, snapshots/best                the name of one of them

A snapshot takes its name when it is whole and on the disk, so a kill leaves the ones before. Frozen
weights are not saved; their hash is. There is no pickle here: loading cannot run code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..autograd.device import beside
from ..optim.optimizer import tensors_sha256, weights_sha256
from ..transformer.module import check_names, check_shapes
from ..transformer.safetensors_io import TensorFile, atomic_file, write_safetensors
from ..transformer.values import is_whole
from .trainer import TransformerTrainer

FORMAT = "afinar-snapshot-1"
# Settings that may differ on resume: they do not change what is computed.
HARMLESS = (
    "log_interval",
    "save_interval",
    "checkpoint_dir",
    "profile_interval",
    "checkpoint_config",
    "max_overflows",
)


@dataclass
class Snapshot:
    """What was read: the folder, `more` as it was saved, and remarks worth showing."""

    path: Path
    state: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def more(self) -> dict[str, Any]:
        """What `save_snapshot` was given beside the trainer."""
        return self.state["more"]


class DamagedError(ValueError):
    """A snapshot that is not what was written."""


class NoSnapshotError(ValueError):
    """There is no snapshot, damaged or not."""


# --- saving --------------------------------------------------------------------------------


def save_snapshot(
    folder: str | os.PathLike[str],
    trainer: TransformerTrainer,
    more: dict[str, Any] | None = None,
    *,
    keep: int = 3,
    best: bool = False,
) -> Path:
    """Save the trainer into `folder`, with `more` (JSON values) beside it.

    State is that of the begun window's start. The last `keep` snapshots stay, and the one that
    `best` marked last. RuntimeError if it cannot be written; the snapshots before are then intact.
    """
    check_trainer("save_snapshot", trainer)
    if not is_whole(keep):
        raise TypeError(f"save_snapshot: keep is {keep!r}; a whole number is needed")
    if keep < 1:
        raise ValueError(f"save_snapshot: at least 1 snapshot must be kept, given {keep}")
    folder = Path(folder)
    target = folder / f"step-{trainer.windows:08}"
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write(temporary, trainer, more or {})
        _replace(temporary, target)
        _name(folder, "last", target.name)
        for left in folder.glob(".*.tmp"):  # of a run that was killed
            shutil.rmtree(left)
        if best:
            _name(folder, "best", target.name)
        _prune(folder, keep)
    except OSError as error:
        raise RuntimeError(
            f"the snapshot {target} cannot be written ({error.strerror or error}); "
            "those before it are intact"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write(folder: Path, trainer: TransformerTrainer, more: dict[str, Any]) -> None:
    for name, tensors in snapshot_arrays(trainer).items():
        write_safetensors(folder / f"{name}.safetensors", tensors)
    state = {**snapshot_state(trainer), "more": more}
    state["files"] = {p.name: _file_sha256(p) for p in sorted(folder.glob("*.safetensors"))}
    try:
        text = json.dumps(state, indent=1, default=_json_value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"save_snapshot: more has a value that JSON has not: {error}") from None
    whole = {"sha256": _sha256(text.encode()), "state": text}
    with atomic_file(folder / "state.json") as f:
        f.write(json.dumps(whole).encode())


def snapshot_arrays(trainer: TransformerTrainer) -> dict[str, dict[str, np.ndarray]]:
    """The tensors of a snapshot, by file and name."""
    trained, optimizer = trainer.trained_parameters(), trainer.optimizer
    slots = {"first": optimizer.first_moments, "second": optimizer.second_moments}
    found = {
        "weights": {name: p.data for name, p in trained.items()},
        "moments": {
            f"{slot}.{name}": a
            for slot, arrays in slots.items()
            for name, a in zip(trained, arrays, strict=False)  # none before the first step
            if a is not None
        },
        "callbacks": {
            f"{callback}.{key}": value
            for callback, state in trainer.callback_states().items()
            for key, value in state.items()
            if isinstance(value, np.ndarray)
        },
    }
    if not found["callbacks"]:
        del found["callbacks"]
    return found


def snapshot_state(trainer: TransformerTrainer) -> dict[str, Any]:
    """What a snapshot says of the trainer besides, as JSON values."""
    model, optimizer = trainer.model, trainer.optimizer
    return {
        "format": FORMAT,
        "version": importlib.metadata.version("afinar"),
        "trainer": _trainer_state(trainer),
        "optimizer": {"step_count": optimizer.step_count, "lr": optimizer.lr},
        "schedule": [type(trainer.schedule).__name__, _plain(trainer.schedule)],
        "rng": {"seed": trainer.config.seed, "window": trainer.windows},
        "config": _plain(trainer.config),
        "model": _plain(model.config),
        "frozen_sha256": _frozen_sha256(trainer),
        "digests": {"weights": weights_sha256(model), "optimizer": optimizer.state_sha256()},
    }


def _trainer_state(trainer: TransformerTrainer) -> dict[str, Any]:
    own = trainer.state_dict()
    own["callbacks"] = {
        callback: {k: v for k, v in state.items() if not isinstance(v, np.ndarray)}
        for callback, state in own["callbacks"].items()
    }
    return _plain(own)


def _plain(config: Any) -> Any:
    """A dataclass as JSON values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    return json.loads(json.dumps(config, default=_json_value))


def _json_value(value: Any) -> Any:
    return str(value)


def _replace(temporary: Path, target: Path) -> None:
    if target.exists():  # written before the run went back to an earlier one, or damaged
        old = target.with_name(f".{target.name}.old.tmp")
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(folder: Path, name: str, target: str) -> None:
    with atomic_file(folder / name) as f:
        f.write(target.encode())


def _prune(folder: Path, keep: int) -> None:
    best = _named(folder, "best")
    for path in list_snapshots(folder)[:-keep]:
        if path != best:
            gone = path.with_name(f".{path.name}.old.tmp")
            path.rename(gone)  # at once: a half-deleted snapshot has no name
            shutil.rmtree(gone)


def _named(folder: Path, name: str) -> Path | None:
    with contextlib.suppress(OSError):
        return folder / (folder / name).read_text()
    return None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _frozen_sha256(trainer: TransformerTrainer) -> str:
    trained = {id(p) for p in trainer.optimizer.params}
    frozen = [(n, p) for n, p in trainer.model.named_parameters() if id(p) not in trained]
    return tensors_sha256(frozen)


# --- loading -------------------------------------------------------------------------------


def list_snapshots(folder: str | os.PathLike[str]) -> list[Path]:
    """The snapshots in a folder, oldest first."""
    return sorted(p for p in Path(folder).glob("step-*") if p.name[5:].isdigit())


def _usable(folder: Path) -> list[Path]:
    """Newest first, what may hold a snapshot.

    A kill while a snapshot was replaced by another of its step leaves it under a hidden name.
    """
    hidden = folder.glob(".step-*.old.tmp")
    return sorted([*list_snapshots(folder), *hidden], key=_step_and_place)[::-1]


def _step_and_place(path: Path) -> tuple[str, bool]:
    return path.name.lstrip(".").removesuffix(".old.tmp"), not path.name.startswith(".")


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """What a snapshot says of itself; ValueError if any of its bytes is not what was written."""
    path = Path(path)
    try:
        whole = json.loads((path / "state.json").read_bytes())
        if whole["sha256"] != _sha256(whole["state"].encode()):
            raise DamagedError(f"{path / 'state.json'} is not what was written")
        state = json.loads(whole["state"])
        if state["format"] != FORMAT:
            raise DamagedError(
                f"{path} is a snapshot of the format {state['format']}, not {FORMAT}"
            )
        _check_kinds(path / "state.json", "the state", state, _KINDS)
        for name, sha in state["files"].items():
            if _file_sha256(path / name) != sha:
                raise DamagedError(f"{path / name} is not what was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{path} is not a whole snapshot: {error}") from None
    return Snapshot(path, state)


# What state.json holds, by an example of each kind; `_check_state` looks at the trainer's own.
_KINDS: dict[str, Any] = {
    "format": "",
    "version": "",
    "trainer": {},
    "optimizer": {"step_count": 0, "lr": 0.0},
    "schedule": [],
    "rng": {"seed": 0, "window": 0},
    "config": {},
    "model": {},
    "frozen_sha256": "",
    "digests": {"weights": "", "optimizer": ""},
    "more": {},
    "files": {},
}


def _check_kinds(path: Path, what: str, found: Any, like: Any) -> None:
    """Raise DamagedError unless `found` has the kind of `like` and, below it, all its keys."""
    number = isinstance(like, (int, float)) and not isinstance(like, bool)
    kind = (int if isinstance(like, int) else (int, float)) if number else type(like)
    if not isinstance(found, kind) or (number and isinstance(found, bool)):
        needed = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
        shown = json.dumps(found)
        raise DamagedError(
            f"{path}: {what} is {shown if len(shown) <= 60 else shown[:57] + '...'}; "
            f"{needed.get(type(like), 'a number')} is needed"
        )
    for key, value in like.items() if isinstance(like, dict) else ():
        if key not in found:
            raise DamagedError(f"{path}: {key} is missing in {what}")
        if value is not None:
            _check_kinds(path, key, found[key], value)


def _check_state(snapshot: Snapshot, trainer: TransformerTrainer) -> None:
    """Raise DamagedError unless the trainer can take this state."""
    path, found = snapshot.path / "state.json", snapshot.state["trainer"]
    like = {**_trainer_state(trainer), "lora": None, "callbacks": {}}
    _check_kinds(path, "trainer", found, like)
    for name in found["metrics"]:
        if name not in like["metrics"]:
            raise DamagedError(f"{path}: metrics has an unknown {name}")
    for name, values in {**found["metrics"], "epoch": found["epoch"]}.items():
        for value in values if isinstance(values, list) else ():
            _check_kinds(path, f"one of {name}", value, 0.0)
    if len(found["epoch"]) != 2:
        raise DamagedError(f"{path}: epoch holds {len(found['epoch'])} numbers; 2 are needed")
    for name, value in found["callbacks"].items():
        _check_kinds(path, f"the state of the callback {name}", value, {})


def check_trainer(what: str, trainer: Any) -> None:
    """Raise TypeError if `trainer` is none."""
    if not isinstance(trainer, TransformerTrainer):
        kind = type(trainer).__name__
        raise TypeError(f"{what}: a TransformerTrainer is needed, given a {kind}")


def load_snapshot(
    path: str | os.PathLike[str], trainer: TransformerTrainer, which: str = "last"
) -> Snapshot:
    """Put the trainer where the snapshot was taken.

    `path` is one snapshot or a folder of them; of a folder, `which` names the "last" or the
    "best". A damaged last one is passed over for the one before, which `notes` and a warning say.
    Raises ValueError, before anything is changed, if there is none, or if it is of another model,
    other frozen weights, or of settings that compute something else.
    """
    check_trainer("load_snapshot", trainer)
    snapshot = _find(Path(path), which)
    _check_state(snapshot, trainer)
    _compare(snapshot, trainer)
    if snapshot.notes:
        warnings.warn("; ".join(snapshot.notes), RuntimeWarning, 2)
    _install(snapshot, trainer)
    return snapshot


def _find(path: Path, which: str) -> Snapshot:
    if (path / "state.json").exists():
        return read_snapshot(path)
    if which not in ("last", "best"):
        raise ValueError(f'load_snapshot: which is "last" or "best", not {which!r}')
    candidates = _usable(path)
    if which == "best":
        best = _named(path, "best")
        candidates = [p for p in candidates if best and _step_and_place(p)[0] == best.name]
    if not candidates:
        raise NoSnapshotError(f"{path} holds no {which} snapshot")
    notes: list[str] = []
    for candidate in candidates:
        try:
            snapshot = read_snapshot(candidate)
        except DamagedError as error:
            notes.append(str(error))
            continue
        if notes:
            notes.append(f"{candidate.name} is used instead")
        snapshot.notes += notes
        return snapshot
    raise ValueError(f"{path} holds no usable snapshot: {'; '.join(notes)}")


def _compare(snapshot: Snapshot, trainer: TransformerTrainer) -> None:
    state = snapshot.state
    theirs, ours = state["config"], _plain(trainer.config)
    changed = [
        name
        for name in sorted(theirs.keys() | ours.keys())
        if name not in ("model_config", "device") and theirs.get(name) != ours.get(name)
    ]
    harmless = {*HARMLESS, *(("max_steps",) if ours["lr_schedule"] == "constant" else ())}
    serious = [name for name in changed if name not in harmless]
    if serious:
        raise ValueError(
            f"{snapshot.path} was saved with other settings: "
            + ", ".join(f"{n} was {theirs.get(n)}, is {ours.get(n)}" for n in serious)
        )
    version = importlib.metadata.version("afinar")
    if state["version"] != version:
        snapshot.notes.append(f"it was saved by afinar {state['version']}, this is {version}")
    for name in changed:
        snapshot.notes.append(f"{name} was {theirs.get(name)}, is {ours.get(name)}")
    model = _plain(trainer.model.config)
    if state["model"] != model:
        fields = [n for n in state["model"] if state["model"][n] != model.get(n)]
        raise ValueError(
            f"{snapshot.path} is of another model: "
            + ", ".join(f"{n} was {state['model'][n]}, is {model.get(n)}" for n in fields)
        )
    if state["frozen_sha256"] != _frozen_sha256(trainer):
        raise ValueError(f"{snapshot.path} was trained on other frozen weights than this model has")


def _install(snapshot: Snapshot, trainer: TransformerTrainer) -> None:
    weights = TensorFile(snapshot.path / "weights.safetensors")
    moments = TensorFile(snapshot.path / "moments.safetensors")
    optimizer, own = trainer.optimizer, trainer.trained_parameters()
    check_names("load_snapshot", own, weights.entries)
    shapes = {name: p.shape for name, p in own.items()}
    check_shapes("load_snapshot", shapes, {n: e.shape for n, e in weights.entries.items()})
    optimizer.load_state_dict(
        {
            **snapshot.state["optimizer"],
            "shapes": [list(p.shape) for p in own.values()],
            "first_moments": list(_read(moments, "first", own)),
            "second_moments": list(_read(moments, "second", own)),
        }
    )
    state = snapshot.state["trainer"]
    if "callbacks.safetensors" in snapshot.state["files"]:
        arrays = TensorFile(snapshot.path / "callbacks.safetensors")
        for key in arrays.entries:
            callback, _, name = key.partition(".")
            state["callbacks"][callback][name] = arrays.read(key)
    trainer.load_state_dict(state)
    for name, p in own.items():
        p.data = beside(weights.read(name), p.data)


def _read(file: TensorFile, slot: str, names: Any) -> Iterator[Any]:
    for name in names:
        key = f"{slot}.{name}"
        yield file.read(key) if key in file.entries else None
