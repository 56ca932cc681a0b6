"""List what a run folder holds: decisions that a filter selects, and files. No text of a request becomes part of a path."""

import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from esper.karn.reader import MEND
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError, system_in_words
from esper.nissa.events import decode
from esper.nissa.rows import DecisionRow
from esper.store.disk import open_regular
from esper.store.files import CHANGES, CONFIG, CONTROLLER, ENVIRONMENT, EVENTS, MODELS, REPORT, SUMMARY

CARRIED_OUT = {"yes": True, "no": False}
OPERATIONS = tuple(op.name for op in Op if op != Op.WAIT)
FIELDS = ("env", "slot", "op", "carried_out", "text")
"""The fields of the form that selects decisions: of their rows, and a text in the reason of the decision or of its refusal."""


def read_filter(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that a form selects decisions by, without fields that are empty. InputError if a value is unknown."""
    chosen: dict[str, Any] = {field: query[field] for field in FIELDS if query.get(field)}
    env, op, carried_out = (chosen.get(field, "") for field in ("env", "op", "carried_out"))
    if env and not (env.isascii() and env.isdigit() and len(env) < 10):
        raise InputError(f"env is {env[:40]!r}; give the number of an environment")
    if op and op not in OPERATIONS:
        raise InputError(f"op is {op[:40]!r}; give one of {', '.join(OPERATIONS)}")
    if carried_out and carried_out not in CARRIED_OUT:
        raise InputError(f"carried_out is {carried_out[:40]!r}; give one of {', '.join(CARRIED_OUT)}")
    return (
        chosen | ({"env": int(env)} if env else {}) | ({"carried_out": CARRIED_OUT[carried_out]} if carried_out else {})
    )


def decisions(folder: Path, chosen: Mapping[str, Any]) -> Iterator[tuple[bytes, DecisionRow]]:
    """Yield the lines of events.jsonl that hold the selected decisions, with their rows. InputError if the file is damaged.

    Only lines of decisions are decoded, and nothing is kept.
    """
    path, text = folder / EVENTS, chosen.get("text", "").casefold()
    exact = {field: value for field, value in chosen.items() if field != "text"}
    if not path.exists():
        return
    with open_regular(path, MEND) as file:
        for number, line in enumerate(file, 1):
            if b'"decision"' not in line or not line.endswith(b"\n"):
                continue
            try:
                row = decode(line)
            except InputError as error:
                raise InputError(f"line {number} of {path}: {error}") from None
            if not isinstance(row, DecisionRow) or any(getattr(row, field) != exact[field] for field in exact):
                continue
            if text in f"{row.why or ''}\n{row.refusal or ''}".casefold():
                yield line, row


FILES = {
    CONFIG: "application/yaml",
    SUMMARY: "application/json",
    EVENTS: "application/x-ndjson",
    ENVIRONMENT: "application/json",
    CHANGES: "application/json",
    REPORT: "text/html; charset=utf-8",
}
"""The files of a run folder that can be downloaded, with their media types."""
CHUNK = 2**18  # bytes


def files_of(folder: Path) -> dict[str, int]:
    """Return the files of a run folder that can be downloaded and are there, with their sizes [bytes]; links are left out."""
    found = {}
    for name in FILES:
        with suppress(OSError):
            state = os.lstat(folder / name)
            if stat.S_ISREG(state.st_mode):
                found[name] = state.st_size
    return found


def archives_of(folder: Path) -> dict[str, Path]:
    """Return the folders of networks, and of a controller, by the name of their archive; links are left out."""
    models = folder / MODELS
    paths = [*(sorted(models.iterdir()) if _is_folder(models) else ()), folder / CONTROLLER]
    return {f"{path.name}.zip": path for path in paths if _is_folder(path)}


def chunks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file, which may grow meanwhile; the file is closed at the end."""
    with file:
        while size > 0 and (data := file.read(min(CHUNK, size))):
            size -= len(data)
            yield data


def filled(fill: Callable[[IO[bytes]], None]) -> tuple[IO[bytes], int]:
    """Return a file without a name that `fill` has written, from its beginning on, and its size; `chunks` closes it."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        fill(file)
    except BaseException:
        file.close()
        raise
    size = file.tell()
    file.seek(0)
    return file, size


def archive(folder: Path) -> tuple[IO[bytes], int]:
    """Return a zip archive of the files in a folder of `archives_of`, in a file without a name, and its size.

    Weights are stored and not compressed, because they do not become smaller. InputError if the folder is gone, OSError if a file
    cannot be read.
    """

    def pack(packed: IO[bytes]) -> None:
        # The folder is held open, so that no link can take its place while its files are read.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        with system_in_words(str(folder), MEND):
            parent = os.open(folder.parent, flags)
            try:
                opened = os.open(folder.name, flags, dir_fd=parent)
            finally:
                os.close(parent)
        try:
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as target:
                for name in sorted(os.listdir(opened)):
                    if not stat.S_ISREG(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode):
                        continue
                    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=opened)
                    inside = f"{folder.name}/{name}"
                    with os.fdopen(descriptor, "rb") as file, target.open(inside, "w", force_zip64=True) as entry:
                        shutil.copyfileobj(file, entry, CHUNK)
        finally:
            os.close(opened)

    return filled(pack)


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
