"""The folder of an evaluation: locked by one process, and with a record that is replaced only on request."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esper.leyline.errors import InputError
from esper.runs.contenders import Contender
from esper.store.disk import remove_unfinished
from esper.store.files import EVALUATION
from esper.store.full_disk import DiskRetry
from esper.store.lock import locked_folder

FIGURE, GROWN = "evaluation.png", "grown"
ROOT = Path("runs/evaluation")
"""The parent of default folders. A default folder is named after the arguments; all of them share the stored populations."""


@contextmanager
def evaluation_folder(
    path: Path, note: Callable[[str], None], *, overwrite: bool = False, shared: bool = False
) -> Iterator[Path]:
    """Make and lock the folder of an evaluation, and give the folder in which results of populations are stored and reused.

    That folder is in the folder of the evaluation, or with `shared` beside it. Raises InputError if another process holds the
    lock, or a record would be replaced that `overwrite` does not allow to replace.
    """
    retry = DiskRetry(0.0, note, path, lambda: False, further="give the same command again")  # nothing is lost yet
    with locked_folder(path, note, retry):
        if (path / EVALUATION).exists() and not overwrite:
            raise InputError(
                f"{path / EVALUATION} is the record of an evaluation; name another folder (--out, out=), or replace "
                "it (--overwrite, overwrite=True), which keeps the networks that were grown"
            )
        remove_unfinished(path)
        if not shared:  # other processes may be writing to one that is shared
            remove_unfinished(path / GROWN)
        yield (path.parent if shared else path) / GROWN


def default_folder(
    controllers: Sequence[Contender], tasks: Sequence[str], settings: Sequence[Mapping[str, Any]], **numbers: int | None
) -> Path:
    """Return the default folder for the arguments of an evaluation, which is a function of the arguments."""
    asked = [[each.name, each.content, dict(each.settings)] for each in controllers]
    digest = hashlib.sha256(json.dumps([asked, tasks, settings, numbers], sort_keys=True, default=str).encode())
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in "+".join(tasks))[:40]
    return ROOT / f"{readable}-{digest.hexdigest()[:8]}"
