"""The folder of a run: its names, who may write there, and files that are whole or absent."""

import os
import shutil
from pathlib import Path

from esper.leyline.errors import InputError

CONFIG = "config.yaml"  # everything that was asked for; its presence is what makes a folder a run
ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
MODELS = "models"
SUMMARY = "summary.json"
OWN = (EVENTS, SUMMARY, ENVIRONMENT, MODELS, "checkpoints", "controller", "report.html", CONFIG)
"""What Esper writes into a run folder, the config last: until it is gone, the folder counts as a run."""


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `path` so that a reader, or a crash, finds either the old content or all of the new.

    The content goes to a temporary name beside it, is flushed to the disk, and takes the name in one rename.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run, whatever became of it."""
    return (folder / CONFIG).is_file()


def check_folder(folder: Path, overwrite: bool = False) -> None:
    """See that a run may be written to `folder`, without touching anything. InputError where it may not."""
    try:
        content = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        content = []
    except NotADirectoryError:
        raise InputError(f"the run folder {folder} is a file, or lies under one; name a folder") from None
    except OSError as error:
        raise InputError(f"the run folder {folder} cannot be read: {error.strerror}; name another") from None
    if is_run(folder) and not overwrite:
        raise InputError(f"{folder} already holds a run; name another with --run, or replace it with --overwrite")
    if content and not is_run(folder):
        raise InputError(f"{folder} holds other files and no run; name a new or an empty folder with --run")
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"no permission to write to {place}, where the run was to go; name another folder with --run")


def create_folder(folder: Path, overwrite: bool = False) -> None:
    """Make the folder, and free it of an earlier run's files where `overwrite` says so; other files stay."""
    check_folder(folder, overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in OWN:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {error.filename}: {error.strerror}; name another folder with --run"
        ) from None
