"""Record the changes of the config of a run, in changes.json, and identify a run across these changes.

    [{"time": 1750000000.0, "steps": 120, "set": ["optimizer.lr=0.001"], "from": "<sha256>", "to": "<sha256>"}, ...]

If the versions or the data differ from those at the start of the run, the entry also has `noted` (text) and `origin`.

A run is identified by the sha256 of its first config.yaml. The entries lead from a later config.yaml back to the first. They do
not lead back from a config.yaml that was edited by hand, which therefore counts as another run.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from esper.leyline.config.parsing import parse_json
from esper.leyline.messages import InputError
from esper.store.disk import read_kept, sha256_of, write_atomic
from esper.store.files import CHANGES, CONFIG, to_json

_LARGEST = 2**20  # bytes of it that are read
_MEND = "restore the original file"
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class RunChange(
    msgspec.Struct, frozen=True, omit_defaults=True, rename={"settings": "set", "source": "from", "target": "to"}
):
    """Records one change of a run."""

    time: float  # when the change was made [seconds since 1970]
    steps: int  # steps that the run had taken
    settings: tuple[str, ...]  # the changed settings, as given to `--set`
    source: _Digest  # sha256 of config.yaml before the change
    target: _Digest  # sha256 of config.yaml after the change
    noted: tuple[str, ...] = ()  # sentences about versions and data that differ from those at the start of the run
    # versions, and fingerprints of the data, from this change on; None if they are unchanged
    origin: dict[str, Any] | None = None


class Trail(NamedTuple):
    """Holds the changes from the first config of a run to the present one."""

    run: str  # sha256 of the first config.yaml, which identifies the run
    entries: list[RunChange]  # the changes in effect, oldest first


def read_trail(folder: Path) -> Trail:
    """Return the changes of a run folder, without an entry whose config.yaml a crash prevented. InputError if unreadable."""
    digest, entries = sha256_of((folder / CONFIG).read_bytes()), []
    for entry in reversed(_read(folder)):
        if entry.target == digest:
            digest = entry.source
            entries.append(entry)
    return Trail(digest, entries[::-1])


def record_change(folder: Path, config: str, settings: Sequence[str], steps: int) -> None:
    """Write the entry of a config that is about to be written, unless the last entry is the same."""
    source, target = sha256_of((folder / CONFIG).read_bytes()), sha256_of(config.encode())
    if source != target:
        _append(folder, RunChange(time.time(), steps, tuple(settings), source, target))


def record_origin(folder: Path, noted: Sequence[str], origin: dict[str, Any], steps: int) -> None:
    """Write an entry for new versions and data under an unchanged config, unless the last entry is the same."""
    digest = sha256_of((folder / CONFIG).read_bytes())
    _append(folder, RunChange(time.time(), steps, (), digest, digest, tuple(noted), origin))


def _append(folder: Path, entry: RunChange) -> None:
    known = _read(folder)
    if not known or msgspec.structs.replace(known[-1], time=entry.time) != entry:
        write_atomic(folder / CHANGES, to_json(msgspec.to_builtins([*known, entry])))


def _read(folder: Path) -> list[RunChange]:
    path = folder / CHANGES
    if not path.exists() and not path.is_symlink():
        return []
    found = parse_json(read_kept(path, _LARGEST, _MEND), path, _MEND)
    try:
        return msgspec.convert(found, list[RunChange])
    except msgspec.ValidationError:
        raise InputError(f"{path} does not hold the changes of a run; {_MEND}") from None
