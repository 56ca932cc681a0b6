"""The folder of a run: its names, who may write there, and where its events are cut."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

from esper.leyline.disk import remove, unfinished, write_atomic
from esper.leyline.errors import InputError
from esper.nissa.lock import is_lock

CONFIG = "config.yaml"  # everything that was asked for; its presence is what makes a folder a run
CHANGES = "changes.json"  # what of it was changed later
ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
MODELS = "models"
CHECKPOINTS = "checkpoints"
CONTROLLER = "controller"
SUMMARY = "summary.json"
OWN = (EVENTS, SUMMARY, ENVIRONMENT, MODELS, CHECKPOINTS, CONTROLLER, CHANGES, "report.html", CONFIG)
"""What Esper writes into a run folder beside its lock, the config last: until it is gone, the folder counts as a run."""


def to_json(value: Any) -> str:
    """Strict JSON for people: indented, and a ValueError rather than a NaN."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def check_links(folder: Path) -> None:
    """See that nothing that Esper reads or writes in a run folder is a link, which could lead out of it. InputError if so.

    Checkpoints are left to their reader, which goes on without those that it cannot use.
    """
    own = [*folder.glob("events-cut-*.jsonl"), *folder.glob(".*"), *(folder / name for name in OWN)]
    inside = [
        path for name in (CONTROLLER, MODELS) if not (folder / name).is_symlink() for path in (folder / name).rglob("*")
    ]
    for path in (*own, *inside):
        if path.is_symlink():
            raise InputError(f"{path} is a link, which is not followed; put what it stands for in its place")


def cut_events(folder: Path, rows: int) -> Path | None:
    """Leave the first `rows` rows in the events of a run, and move what follows to a file beside it, which is returned.

    What a killed run wrote behind its last checkpoint is written again when it is taken up there. A crash between the two
    steps leaves rows twice and loses none. InputError where there are fewer rows.
    """
    path = folder / EVENTS
    data = path.read_bytes() if path.exists() else b""
    lines = data.splitlines(keepends=True)
    whole = len(lines) - (bool(lines) and not lines[-1].endswith(b"\n"))
    if whole < rows:
        raise InputError(f"{path} holds {whole} rows, but the checkpoint was taken after {rows}; put the file back")
    kept = sum(map(len, lines[:rows]))
    if kept == len(data):
        return None
    number = next(n for n in itertools.count(1) if not (folder / f"events-cut-{n}.jsonl").exists())
    side = folder / f"events-cut-{number}.jsonl"
    write_atomic(side, data[kept:])
    os.truncate(path, kept)
    return side


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run, whatever became of it."""
    return (folder / CONFIG).is_file()


def check_folder(folder: Path, overwrite: bool = False) -> None:
    """See that a run may be written to `folder`, without touching anything. InputError where it may not."""
    try:
        content = [path.name for path in folder.iterdir() if not _unborn(path)]
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


def make_folder(folder: Path) -> None:
    """Make the folder where it is missing. InputError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error) from None


def create_folder(folder: Path, overwrite: bool = False) -> None:
    """Make the folder, and free it of an earlier run's files where `overwrite` says so; other files, and the lock, stay."""
    check_folder(folder, overwrite)
    make_folder(folder)
    try:
        for path in (
            *folder.glob("events-cut-*.jsonl"),
            *folder.glob(f".{CONTROLLER}.*"),
            *(unfinished(folder / name) for name in OWN),
            *(folder / name for name in OWN),
        ):
            remove(path)
    except OSError as error:
        raise _unwritable(error) from None


def _unborn(path: Path) -> bool:
    """Whether a file is what a process leaves that is killed before its run has a config."""
    return is_lock(path) or path == unfinished(path.with_name(CONFIG))


def _unwritable(error: OSError) -> InputError:
    return InputError(f"cannot write to {error.filename}: {error.strerror}; name another folder with --run")
