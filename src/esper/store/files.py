"""The folder of a run: its names, and what in it is refused."""

import json
import stat
from pathlib import Path
from typing import Any

from esper.leyline.errors import InputError

CONFIG = "config.yaml"  # everything that was asked for; its presence is what makes a folder a run
CHANGES = "changes.json"  # what of it was changed later
ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
MODELS = "models"
CHECKPOINTS = "checkpoints"
CONTROLLER = "controller"
SUMMARY = "summary.json"
NAMES = (CONFIG, CHANGES, ENVIRONMENT, EVENTS, SUMMARY, MODELS, CHECKPOINTS, CONTROLLER)
"""What Esper writes into a run folder beside its lock; `contents.OWN` says what within."""


def to_json(value: Any) -> str:
    """Strict JSON for people: indented, and a ValueError rather than a NaN."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def check_links(folder: Path) -> None:
    """See that nothing that Esper reads or writes in a run folder is a link, which could lead out of it, or a pipe or device,
    which could be waited for. InputError if so.

    Checkpoints are left to their reader, which goes on without those that it cannot use.
    """
    own = [*folder.glob("events-*.jsonl"), *folder.glob(".*"), *(folder / name for name in NAMES)]
    inside = [
        path for name in (CONTROLLER, MODELS) if not (folder / name).is_symlink() for path in (folder / name).rglob("*")
    ]
    for path in (*own, *inside):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode):
            raise InputError(f"{path} is a link, which is not followed; put what it stands for in its place")
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise InputError(f"{path} is no regular file; remove it, or put back what was there")


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run, whatever became of it."""
    return (folder / CONFIG).is_file()
