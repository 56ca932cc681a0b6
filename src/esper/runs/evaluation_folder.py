"""The folder of an evaluation: locked by one process, and with a record that is replaced only on request."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from esper.leyline.errors import InputError
from esper.runs.contenders import Contender
from esper.store.files import EVALUATION
from esper.store.lock import Lock

FIGURE, GROWN = "evaluation.png", "grown"
ROOT = Path("runs/evaluation")
"""The parent of default folders. A default folder is named after the arguments; all of them share the stored populations."""


class EvaluationFolder:
    """An open folder. Results of populations are stored in it, or with `shared` in its parent, and reused."""

    def __init__(
        self, path: Path, note: Callable[[str], None], *, overwrite: bool = False, shared: bool = False
    ) -> None:
        self.path, self.overwrite = path, overwrite
        self.made: list[Path] = []  # created folders, innermost first
        self.grown = (path.parent if shared else path) / GROWN
        self.lock = Lock(path, note)

    def __enter__(self) -> Self:
        """Create and lock the folder. Raises InputError if another process holds the lock, or a record would be replaced."""
        self.made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot write to {error.filename}: {error.strerror}; name another folder (--out, out=)"
            ) from None
        self.lock.take()
        if (self.path / EVALUATION).exists() and not self.overwrite:
            self.lock.release()
            raise InputError(
                f"{self.path / EVALUATION} is the record of an evaluation; name another folder (--out, out=), or replace "
                "it (--overwrite, overwrite=True), which keeps the networks that were grown"
            )
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lock, and remove created folders that are empty."""
        self.lock.release()
        for folder in self.made:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()


def default_folder(
    controllers: Sequence[Contender], tasks: Sequence[str], settings: Sequence[Mapping[str, Any]], **numbers: int | None
) -> Path:
    """Return the default folder for the arguments of an evaluation, which is a function of the arguments."""
    asked = [[each.name, each.content, dict(each.settings)] for each in controllers]
    digest = hashlib.sha256(json.dumps([asked, tasks, settings, numbers], sort_keys=True, default=str).encode())
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in "+".join(tasks))[:40]
    return ROOT / f"{readable}-{digest.hexdigest()[:8]}"
