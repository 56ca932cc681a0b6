"""What was changed of the config of a run, and by what the run is known all the same: changes.json.

    [{"time": 1750000000.0, "steps": 120, "set": ["optimizer.lr=0.001"], "from": "<sha256>", "to": "<sha256>"}, ...]

An entry with other versions or data than the run began with has `noted`, in words, and `origin` beside.

A run is known by the sha256 of its first config.yaml. From a later one the entries lead back to it; from one that was edited by
hand they lead nowhere, so that it is known for another run's.
"""

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from esper.leyline.errors import InputError
from esper.leyline.parsing import parse_json
from esper.store.disk import write_atomic
from esper.store.files import CHANGES, CONFIG, to_json
from esper.store.reading import read_kept

_LARGEST = 2**20  # bytes of it that are read
_MEND = "put back what was there"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Entry(NamedTuple):
    """One change."""

    time: float  # [seconds since 1970]
    steps: int  # that the run had taken
    settings: tuple[str, ...]  # as `--set` named them
    source: str  # sha256 of config.yaml before
    target: str  # and after
    noted: tuple[str, ...] = ()  # other versions and data that the run went on with, in words
    origin: Mapping[str, Any] | None = None  # the versions and the fingerprints of the data from then on


class Trail(NamedTuple):
    """The way from the first config of a run to the present one."""

    run: str  # sha256 of the first
    entries: list[Entry]  # the changes that are in effect


def read_trail(folder: Path) -> Trail:
    """That of a run folder. InputError where changes.json cannot be read.

    An entry is written before the config that it leads to, so that one behind which a crash came leads nowhere: it is no part.
    """
    digest, entries = digest_of((folder / CONFIG).read_bytes()), []
    for entry in reversed(_read(folder)):
        if entry.target == digest:
            digest = entry.source
            entries.append(entry)
    return Trail(digest, entries[::-1])


def record_change(folder: Path, config: str, settings: Sequence[str], steps: int) -> None:
    """Write the entry for a config that is about to be written. A second call for the same one writes it once."""
    source, target = digest_of((folder / CONFIG).read_bytes()), digest_of(config.encode())
    if source != target:
        _append(folder, Entry(time.time(), steps, tuple(settings), source, target))


def record_origin(folder: Path, noted: Sequence[str], origin: Mapping[str, Any], steps: int) -> None:
    """Write an entry for the versions and the data with which a run goes on, under the config that it has."""
    digest = digest_of((folder / CONFIG).read_bytes())
    _append(folder, Entry(time.time(), steps, (), digest, digest, tuple(noted), origin))


def _append(folder: Path, entry: Entry) -> None:
    """Add an entry, but for one that is the last one already."""
    known = _read(folder)
    if not known or known[-1]._replace(time=entry.time) != entry:
        write_atomic(folder / CHANGES, to_json([_plain(each) for each in (*known, entry)]))


def _plain(entry: Entry) -> dict[str, Any]:
    """An entry as JSON has it."""
    origin = {} if entry.origin is None else {"noted": entry.noted, "origin": entry.origin}
    named = {"time": entry.time, "steps": entry.steps, "set": entry.settings, "from": entry.source, "to": entry.target}
    return {**named, **origin}


def digest_of(content: bytes) -> str:
    """The sha256 by which a config is known."""
    return hashlib.sha256(content).hexdigest()


def _read(folder: Path) -> list[Entry]:
    path = folder / CHANGES
    if not path.exists() and not path.is_symlink():
        return []
    found = parse_json(read_kept(path, _LARGEST, _MEND), path, _MEND)
    try:
        return [_entry(entry) for entry in found]
    except (KeyError, OverflowError, TypeError, ValueError):
        raise InputError(f"{path} does not hold the changes of a run; {_MEND}") from None


def _entry(entry: Any) -> Entry:
    """An entry from JSON. KeyError, OverflowError, TypeError or ValueError where it is none."""
    known = Entry(
        float(entry["time"]),
        int(entry["steps"]),
        tuple(map(str, entry["set"])),
        entry["from"],
        entry["to"],
        tuple(map(str, entry.get("noted", ()))),
        entry.get("origin"),
    )
    if not isinstance(known.origin, dict | None):
        raise TypeError("origin is no mapping")
    if not _DIGEST.fullmatch(known.source) or not _DIGEST.fullmatch(known.target):
        raise ValueError("no sha256")
    return known
