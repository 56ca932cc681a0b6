"""The files that Esper writes into a run folder, checks of a folder for a new run, and their removal by `--overwrite`.

A folder is recognised as a run by the contents of its config.yaml and environment.json. Within it, the files of Esper are
recognised by their names and places. Other files are never removed.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Union

from esper.leyline.errors import InputError
from esper.leyline.parsing import LARGEST_YAML, parse_json, parse_yaml
from esper.store.disk import unfinished
from esper.store.files import (
    BEST,
    CHANGES,
    CHECKPOINTS,
    CONFIG,
    CONTROLLER,
    ENVIRONMENT,
    MODELS,
    REPORT,
    SUMMARY,
    is_run,
)
from esper.store.lock import LOCK, is_lock
from esper.store.reading import read_kept

Names = Mapping[str, Union["Names", None]]
"""Patterns of names in a folder. The value is None for a file, and the patterns inside for a folder."""

OWN: Names = {
    re.escape(CONFIG): None,
    re.escape(CHANGES): None,
    re.escape(ENVIRONMENT): None,
    r"events(-(cut|damaged)-\d+)?\.jsonl": None,
    re.escape(SUMMARY): None,
    re.escape(REPORT): None,
    MODELS: {rf"env-\d+|{BEST}": {r"(model|topology)\.[\w.]+": None, "SHA256SUMS": None}},
    CONTROLLER: {r"controller\.\w+": None},
    CHECKPOINTS: {"latest": None, "best": None, r"step-\d+": {r"state\.\w+": None}},
}
"""The files and folders of a run, without the lock."""

_OF_CONFIG = {"task", "controller", "envs", "steps", "seed", "optimizer", "lifecycle", "governor"}
_OF_ENVIRONMENT = {"esper", "python", "torch", "platform", "command"}
_LARGEST = 64 * 2**20  # largest environment.json that is read [bytes]
_ASIDE = re.compile(r"\.(.+)\.(new|old)")
_NAMED = 3  # largest number of files that a message names


class Contents(NamedTuple):
    """The contents of a run folder.

    Attributes:
        own (paths): files and links that Esper wrote
        folders (paths): folders that Esper created, inner folders first
        others (paths): other files and folders, which a run does not touch
        in_the_way (paths): other files and folders that a run would overwrite
    """

    own: list[Path]
    folders: list[Path]
    others: list[Path]
    in_the_way: list[Path]


def list_contents(folder: Path) -> Contents:
    """Classify the contents of a run folder. Other folders are not searched, and links are not followed."""
    found = Contents([], [], [], [])
    _list(folder, OWN, found)
    return found


def check_folder(folder: Path, overwrite: bool = False) -> None:
    """Check, without changing anything, that a run can be written to `folder`. Raises InputError if it cannot."""
    try:
        content = [path.name for path in folder.iterdir() if not _unborn(path)]
    except FileNotFoundError:
        content = []
    except NotADirectoryError:
        raise InputError(f"the run folder {folder} is a file, or lies under one; name a folder") from None
    except OSError as error:
        raise InputError(f"the run folder {folder} cannot be read: {error.strerror}; name another") from None
    if is_run(folder) and not overwrite:
        raise InputError(
            f"{folder} already holds a run; name another (--run, run=), or replace it (--overwrite, overwrite=True)"
        )
    if content and not is_run(folder):
        raise InputError(f"{folder} holds other files and no run; name a new or an empty folder (--run, run=)")
    if content:
        check_own(folder)
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(
            f"no permission to write to {place}, the folder for the run; name another folder (--run, run=)"
        )


def make_folder(folder: Path) -> None:
    """Create the folder if it does not exist. Raises InputError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error) from None


def create_folder(folder: Path, overwrite: bool = False, note: Callable[[str], None] | None = None) -> None:
    """Create the folder, and with `overwrite` remove the files of an earlier run. Other files and the lock stay.

    note: called with a line that names the other files.
    """
    check_folder(folder, overwrite)
    make_folder(folder)
    try:
        stay = remove_own(folder)
    except OSError as error:
        raise _unwritable(error) from None
    if stay and note is not None:
        note(f"{listed(stay)} in {folder} {'were' if len(stay) > 1 else 'was'} not written by Esper and not removed")


def check_own(folder: Path) -> None:
    """Raise InputError, with the reason, if `--overwrite` cannot replace the run in a folder."""
    mend = "name another folder (--run, run=)"
    if not _is_config(folder / CONFIG):
        raise InputError(
            f"{folder / CONFIG} does not hold the config of an Esper run, so "
            f"--overwrite (overwrite=True) leaves {folder} as it is; {mend}"
        )
    found = list_contents(folder)
    written = [path for path in found.own if path.name != CONFIG and unfinished(path) is None]
    # A process that is killed early leaves a config.yaml without an environment.json.
    if written and not _is_environment(folder / ENVIRONMENT):
        raise InputError(
            f"{folder / ENVIRONMENT} is missing or does not hold what Esper writes there, so "
            f"--overwrite (overwrite=True) leaves {folder} as it is; {mend}"
        )
    if found.in_the_way:
        raise InputError(
            f"a run would overwrite {listed(found.in_the_way)}, which Esper did not write, so "
            f"--overwrite (overwrite=True) leaves {folder} as it is; move those files elsewhere, or {mend}"
        )


def remove_own(folder: Path) -> list[Path]:
    """Remove the files of a run, and return the other files, without the lock.

    The environment and the config are removed last, because they make the folder recognisable as a run.
    """
    found = list_contents(folder)
    last = [folder / ENVIRONMENT, folder / CONFIG]
    for path in found.own:
        if path not in last:
            path.unlink()
    for path in found.folders:
        if not any(path.iterdir()):
            path.rmdir()
    for path in last:
        path.unlink(missing_ok=True)
    return found.others


def sweep(folder: Path) -> None:
    """Remove the temporary files that a killed process left in a run folder."""
    for path in list_contents(folder).own:
        if path.parent == folder and unfinished(path) is not None:
            path.unlink(missing_ok=True)


def listed(paths: list[Path]) -> str:
    """Return the first paths, separated by commas, and the number of further paths."""
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(map(str, paths[:_NAMED])) + more


def _list(folder: Path, names: Names, found: Contents) -> None:
    replaced_whole = all(inside is None for inside in names.values())
    for path in sorted(folder.iterdir()):
        if path.name == LOCK and names is OWN and is_lock(path):
            continue
        pattern = next((pattern for pattern in names if re.fullmatch(pattern, _intended(path))), None)
        inside = None if pattern is None else names[pattern]
        is_folder = path.is_dir() and not path.is_symlink()
        if pattern is None:
            taken = replaced_whole or (path.name == LOCK and names is OWN)
            (found.in_the_way if taken else found.others).append(path)
        elif not path.is_symlink() and is_folder != (inside is not None):
            found.in_the_way.append(path)
        elif is_folder and inside is not None:
            _list(path, inside, found)
            found.folders.append(path)
        else:
            found.own.append(path)


def _intended(path: Path) -> str:
    """Return the final name of a file or folder with a temporary name."""
    aside = _ASIDE.fullmatch(path.name)
    return unfinished(path) or (aside[1] if aside else path.name)


def _is_config(path: Path) -> bool:
    try:
        content = parse_yaml(read_kept(path, LARGEST_YAML, ""), "", "")
    except InputError:
        return False
    return isinstance(content, dict) and set(content) >= _OF_CONFIG


def _is_environment(path: Path) -> bool:
    try:
        content = parse_json(read_kept(path, _LARGEST, ""), path, "")
    except InputError:
        return False
    return isinstance(content, dict) and set(content) >= _OF_ENVIRONMENT


def _unborn(path: Path) -> bool:
    """Whether a file can remain from a process that was killed before it wrote the config of its run."""
    return is_lock(path) or unfinished(path) == CONFIG


def _unwritable(error: OSError) -> InputError:
    return InputError(f"cannot write to {error.filename}: {error.strerror}; name another folder (--run, run=)")
