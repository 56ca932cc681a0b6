"""Name the files in a run folder, and check for links."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from esper.leyline.messages import InputError

CONFIG = "config.yaml"  # all settings; a folder is a run if it has this file
CHANGES = "changes.json"  # later changes of the settings
ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
MODELS = "models"
BEST = "best"  # in `MODELS`, a copy of the network of the best environment
CHECKPOINTS = "checkpoints"
CONTROLLER = "controller"
SUMMARY = "summary.json"
REPORT = "report.html"
EVALUATION = "evaluation.json"  # the record of an evaluation, in a folder that is no run
NAMES = (CONFIG, CHANGES, ENVIRONMENT, EVENTS, SUMMARY, REPORT, MODELS, CHECKPOINTS, CONTROLLER)
"""What Esper writes into a run folder, except the lock."""
MARK = "# A run of Esper: `--overwrite` replaces the files of Esper in this folder.\n"
"""The first line of the config.yaml of every run folder."""


def to_json(value: Any) -> str:
    """Write indented JSON that ends in a newline. ValueError if a number is not finite."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def check_links(folder: Path) -> None:
    """Raise InputError if a file of Esper in a run folder is a link, which could lead elsewhere, or a pipe or device.

    The reader of checkpoints checks their files itself, and ignores those that it cannot use.
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
            raise InputError(
                f"{path} is a link, which is not followed; replace it by the file or folder that it points to"
            )
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise InputError(f"{path} is not a regular file; remove it, or restore the original file")
        if stat.S_ISDIR(mode) and path.name in (SUMMARY, CHANGES, ENVIRONMENT):
            raise InputError(f"{path} is a folder; remove it, or restore the original file")


def is_run(folder: Path) -> bool:
    """Return whether the folder holds a run, finished or not."""
    return (folder / CONFIG).is_file()


def check_is_run(folder: Path) -> None:
    """Raise InputError if the folder holds no run."""
    if not is_run(folder):
        raise InputError(f"{folder} is not a run folder: it has no {CONFIG}; name one that esper grow or train wrote")


def is_marked(folder: Path) -> bool:
    """Return whether config.yaml is a regular file, no link, that a run wrote."""
    path = folder / CONFIG
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


VARIABLE = "ESPER_CACHE"
"""The environment variable that names the cache folder of Esper."""


def cache_root() -> Path:
    """Return the folder that ESPER_CACHE names, or `esper` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(VARIABLE) or Path(user) / "esper")
