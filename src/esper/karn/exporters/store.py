"""The folder that an exporter writes to, and what it remembers of each run, so that no point is written twice."""

import hashlib
import re
import time
from pathlib import Path

import msgspec

from esper.leyline.errors import InputError
from esper.store.disk import file_name, write_atomic
from esper.store.lock import Lock
from esper.store.reading import read_kept

EXPORTS = "exports"
"""The folder beside the run folders that exporters write to unless another one is named."""
KEPT = ".esper"
"""The folder of the records in a folder of exports; no program that shows runs looks into it."""
TARGET = "target"
RECORD = "record.json"
PATIENCE = 60.0  # how long an exporter waits for another one [seconds]
_LONGEST = 80  # characters of a run's name
_LARGEST = 2**20  # bytes of a record that are read
_MEND = "remove the folder of exports, and export again"


class Record(msgspec.Struct):
    """What was exported of one run to one target.

    Attributes:
        name (str): name of the run in the target
        known (str or None): what identifies it there; None before it was opened
        values (int): number of values that were written
        digest (str): sha256 of these values
        x (int): of the last of them; -1 before the first
        final (str or None): sha256 of the table and the image that were written; None if none were
        closed (bool): whether everything is written; False while an exporter is at work, or if it was killed
    """

    name: str
    known: str | None = None
    values: int = 0
    digest: str = hashlib.sha256().hexdigest()
    x: int = -1
    final: str | None = None
    closed: bool = True


class Exports:
    """The record of one run in a folder of exports to one target."""

    def __init__(self, folder: Path, target: str, run: Path) -> None:
        """InputError if `folder` holds anything but exports to `target`."""
        self.folder, self.target, self._run = folder, target, run.resolve()
        check_exports(folder, target)
        place = hashlib.sha256(str(self._run).encode(errors="surrogateescape")).hexdigest()[:12]
        self._own = folder / KEPT / f"{file_name(self._run.name)}-{place}"
        self.lock = Lock(self._own, lambda line: None)

    def make(self) -> None:
        """Make the folder. InputError if that is not possible."""
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / KEPT / TARGET, f"{self.target}\n")
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be written: {error.strerror}; name another folder (--into)"
            ) from None

    def read(self) -> Record:
        """The record, or a new one under a name that no other run has in the folder."""
        path = self._own / RECORD
        return _read(path) if path.exists() else Record(self.free_name())

    def write(self, record: Record) -> None:
        """Keep the record."""
        write_atomic(self._own / RECORD, msgspec.json.encode(record))

    def free_name(self) -> str:
        """A name for the run that is not taken: that of its folder, or with a number behind it."""
        taken = {_read(path).name for path in (self.folder / KEPT).glob(f"*/{RECORD}")}
        base = re.sub(r"[^\w.+-]+", "-", self._run.name)[:_LONGEST].strip("-.") or "run"
        name, count = base, 1
        while name in taken:
            count += 1
            name = f"{base}-{count}"
        return name


def check_exports(folder: Path, target: str) -> None:
    """InputError if `folder` exists and holds anything but exports to `target`. Nothing is changed."""
    try:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise InputError(f"{folder} cannot be read as a folder: {error.strerror}; name another one (--into)") from None
    marked = folder / KEPT / TARGET
    if marked.exists():
        held = read_kept(marked, _LARGEST, _MEND).decode(errors="replace").strip()
        if held != target:
            raise InputError(f"{folder} holds exports to {held}, not to {target}; name another folder (--into)")
    elif names and names != [KEPT]:  # a crash may leave the folder of the records without the name of the target
        raise InputError(f"{folder} holds other files and no exports; name a new or an empty folder (--into)")


def wait_for(lock: Lock, patience: float = PATIENCE) -> None:
    """Take a lock. InputError if another process still holds it after `patience` seconds."""
    until = time.monotonic() + patience
    while True:
        try:
            return lock.take()
        except InputError:
            if time.monotonic() >= until:
                raise
        time.sleep(0.2)


def _read(path: Path) -> Record:
    data = read_kept(path, _LARGEST, _MEND)
    try:
        return msgspec.json.decode(data, type=Record)
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is damaged ({error}); {_MEND}") from None


class Ledger:
    """Counts values and takes their sha256, to recognise those that were written before."""

    def __init__(self) -> None:
        self.values = 0
        self._digest = hashlib.sha256()

    def add(self, x: int, name: str, value: float) -> None:
        """The next value."""
        self.values += 1
        self._digest.update(f"{x} {name} {value!r}\n".encode())

    @property
    def digest(self) -> str:
        """sha256 of the values so far."""
        return self._digest.hexdigest()
