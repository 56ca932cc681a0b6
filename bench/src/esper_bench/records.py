"""Keep figures in files that carry the version of the suite, so that figures of two versions never share a table."""

import io
import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from esper.leyline.messages import InputError
from esper.store.disk import write_atomic

SUITE = 1
"""Version of the suite. Raise it in the commit that changes what a figure of a task means: its keys, hosts, data, damage, budget,
rent or steps. Files of other versions are then refused, and the studies measure them again."""
FIELD = "suite"
"""The name of the version in a file."""


def save_figures(path: Path, **arrays: ArrayLike) -> None:
    """Write arrays, and the version of the suite, to a file `.npz`; an interrupted write leaves no file."""
    content = io.BytesIO()
    every: dict[str, Any] = {FIELD: SUITE, **arrays}
    np.savez(content, **every)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())


def load_figures(path: Path) -> dict[str, NDArray[Any]]:
    """Read what `save_figures` wrote. InputError if the file holds something else, or figures of another version."""
    try:
        with np.load(path) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} holds no figures of a study; delete it, and the study measures them again") from error
    check_suite(path, found.pop(FIELD).tolist() if FIELD in found else None)
    return found


def save_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, and the version of the suite, to a file of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({FIELD: SUITE, **record}) + "\n")


def load_record(path: Path) -> dict[str, Any]:
    """Read what `save_record` wrote. InputError if the file holds something else, or a record of another version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} holds no record of a study; delete it, and the study makes it again") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no record of a study; delete it, and the study makes it again")
    check_suite(path, found.pop(FIELD, None))
    return found


def check_suite(path: Path, found: Any) -> None:
    """Raise InputError if a file is of another version of the suite than this one."""
    if found != SUITE:
        of = "no version" if found is None else f"version {found}"
        raise InputError(
            f"{path} is of {of} of the suite, and figures of version {SUITE} are not compared with it; name another folder, or "
            "delete the file, and the study makes it again"
        )


def run_script(main: Callable[[], None]) -> None:
    """Call the main function of a script. Bad input ends the process with one sentence and exit code 2."""
    try:
        main()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
