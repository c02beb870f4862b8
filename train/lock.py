"""One writer at a time in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows; a second writer is then not noticed
    fcntl = None


class Lock:
    """The right to write into a folder; ValueError if it cannot be had at once.

    The system lets go of it when its process ends, however that ends. The file `.lock` stays: were
    it removed, one process could hold the removed file and another a new one.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / ".lock").open("w")
        except OSError as error:
            raise ValueError(f"{folder} cannot be written ({error.strerror})") from None
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(
                f"{folder} is being written by another trainer; wait for it, stop it, or write "
                "into another folder"
            ) from None

    def release(self) -> None:
        """Let others write."""
        self._file.close()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: Any) -> None:
        self.release()
