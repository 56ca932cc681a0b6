"""The folder of an evaluation: one process at a time, and no record is replaced unless that is asked for."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from esper.leyline.errors import InputError
from esper.runs.contenders import Contender
from esper.store.lock import Lock

RECORD, FIGURE, GROWN = "evaluation.json", "evaluation.png", "grown"
ROOT = Path("runs/evaluation")
"""Where evaluations without a folder of their own go, each under a name from its arguments; they share what was grown."""


class EvaluationFolder:
    """One that is open. What was grown is kept in it, or in the folder above where `shared`, and is not grown again."""

    def __init__(
        self, path: Path, note: Callable[[str], None], *, overwrite: bool = False, shared: bool = False
    ) -> None:
        self.path, self.overwrite = path, overwrite
        self.made: list[Path] = []  # folders, the innermost first
        self.grown = (path.parent if shared else path) / GROWN
        self.lock = Lock(path, note)

    def __enter__(self) -> Self:
        """Make and lock the folder. InputError where another process is at it, or it holds a record that would be replaced."""
        self.made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot write to {error.filename}: {error.strerror}; name another folder (--out, out=)"
            ) from None
        self.lock.take()
        if (self.path / RECORD).exists() and not self.overwrite:
            self.lock.release()
            raise InputError(
                f"{self.path / RECORD} is the record of an evaluation; name another folder (--out, out=), or replace "
                "it (--overwrite, overwrite=True), which keeps what was grown"
            )
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lock, and remove the folders that were made and hold nothing, as where bad input was refused."""
        self.lock.release()
        for folder in self.made:
            with suppress(OSError):  # it holds something, as all others then do
                folder.rmdir()


def default_folder(
    controllers: Sequence[Contender], tasks: Sequence[str], settings: Sequence[Mapping[str, Any]], **numbers: int
) -> Path:
    """The folder for an evaluation's arguments: the same for the same ones, whatever the order of `numbers`."""
    asked = [[each.name, each.content, dict(each.settings)] for each in controllers]
    digest = hashlib.sha256(json.dumps([asked, tasks, settings, numbers], sort_keys=True, default=str).encode())
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in "+".join(tasks))[:40]
    return ROOT / f"{readable}-{digest.hexdigest()[:8]}"
