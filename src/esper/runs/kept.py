"""Results of populations that are stored in a folder and reused. E environments."""

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from esper.kasmina.static import Absent
from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.runs.static_contenders import Arrays
from esper.store.disk import file_name, write_atomic


class Kept:
    """Computes arrays of populations on `data`, or reads them from a folder where they are stored.

    folder: None stores nothing. data: the fingerprint of the task.
    """

    def __init__(self, folder: Path | None, data: Mapping[str, str]) -> None:
        self.folder, self.data = folder, data

    def find(
        self, who: Sequence[str], config: Config, needed: Collection[str], make: Callable[[], Arrays | Absent]
    ) -> Arrays | Absent:
        """Return the arrays that `make` makes for `who` under a config. `needed` are names that must be among them.

        Raises InputError if a stored file is damaged.
        """
        if self.folder is None:
            return make()
        asked = json.dumps([*who, config.model_dump(mode="json"), self.data], sort_keys=True)
        tag = hashlib.sha256(asked.encode()).hexdigest()[:16]
        name = f"{file_name(config.task)}-{file_name(who[0])[-40:]}-s{config.seed}-{config.first_instance}-{tag}.npz"
        path = self.folder / name
        if path.exists():
            return _read(path, needed)
        made = make()
        if not isinstance(made, Absent):
            content = io.BytesIO()
            np.savez_compressed(content, allow_pickle=False, **made)
            write_atomic(path, content.getvalue())
        return made


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
