"""Results of populations that are stored in a folder and reused. E environments."""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.runs.static_contenders import Arrays
from esper.store.disk import file_name, write_atomic
from esper.store.full_disk import DiskRetry


class Kept:
    """Stores arrays of populations on `data` in a folder, and reads them.

    folder: None stores nothing. data: the fingerprint of the task.
    """

    def __init__(
        self, folder: Path | None, data: Mapping[str, str], note: Callable[[str], None] = lambda line: None
    ) -> None:
        """`note` is told if the disk is full; `faults.disk_seconds` of a population's config says how long to wait then."""
        self.folder, self.data, self.note = folder, data, note

    def look(self, who: Sequence[str], config: Config, needed: Collection[str]) -> Arrays | None:
        """Return the stored arrays of `who` under a config; None if there are none. `needed` names some that it must have.

        Raises InputError if the stored file is damaged.
        """
        if self.folder is None or not (path := self._path(self.folder, who, config)).exists():
            return None
        return _read(path, needed)

    def store(self, who: Sequence[str], config: Config, made: Arrays) -> None:
        """Store arrays of `who` under a config, if there is a folder."""
        if self.folder is not None:
            path, content = self._path(self.folder, who, config), io.BytesIO()
            np.savez_compressed(content, allow_pickle=False, **made)
            retry = disk_retry(config, self.note, self.folder)
            retry(path, lambda: write_atomic(path, content.getvalue()))

    def _path(self, folder: Path, who: Sequence[str], config: Config) -> Path:
        asked = json.dumps([*who, config.model_dump(mode="json"), self.data], sort_keys=True)
        tag = hashlib.sha256(asked.encode()).hexdigest()[:16]
        name = f"{file_name(config.task)}-{file_name(who[0])[-40:]}-s{config.seed}-{config.first_instance}-{tag}.npz"
        return folder / name


def disk_retry(config: Config, note: Callable[[str], None], folder: Path) -> DiskRetry:
    """What waits for room on a full disk while an evaluation is written to a folder."""
    again = "give the same command again, which goes on from what was grown"
    return DiskRetry(config.faults.disk_seconds, note, folder, lambda: False, further=again)


def _read(path: Path, needed: Collection[str]) -> Arrays:
    try:
        with zipfile.ZipFile(path) as parts:
            if sum(part.file_size for part in parts.infolist()) > 2**30:
                raise ValueError("more than any figures")
        with np.load(path, allow_pickle=False) as arrays:
            found = dict(arrays)
        if set(needed) - set(found):
            raise KeyError("some figures")
    except (OSError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error):
        raise InputError(f"{path} cannot be read as kept figures; remove it, and they are grown again") from None
    return found
