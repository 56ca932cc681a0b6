"""Repair the events of a resumed run. Damaged events never prevent a run from being resumed: their valid rows are kept."""

import hashlib
import io
import itertools
import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from esper.leyline.messages import counted
from esper.nissa.events import check_version
from esper.nissa.rows import AnyRow
from esper.store.disk import write_atomic
from esper.store.files import EVENTS

Mark = dict[str, Any]
"""Identifies the first rows of a file: {"bytes": their length, "sha256": their sha256}."""

_LISTED = 3  # largest number of ranges in a sentence
_AT_END = ("episode", "evaluation", "checkpoint")  # kinds of the rows that a run writes at its end, before a run row
_decoder = msgspec.json.Decoder(AnyRow)


def resume_events(folder: Path, rows: int, mark: Mark | None, note: Callable[[str], None]) -> None:
    """Keep the first `rows` rows in the events of a run that is resumed after them.

    `mark` identifies these rows, if it is known. Later rows, which the run will write again, and a damaged file are moved to
    another file in the folder. A crash at any moment may leave rows twice, but loses none. InputError, before anything is
    changed, if the rows to keep are of another version.
    """
    path = folder / EVENTS
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        side = free_path(folder, "damaged")
        os.rename(path, side)
        note(f"{path} is not a regular file; it was moved to {side}")
    data = path.read_bytes() if path.exists() else b""
    if rows:
        check_version(path, io.BytesIO(data).readline())
    length = len(data) if mark is None else int(mark["bytes"])
    if mark is None or hashlib.sha256(memoryview(data)[:length]).hexdigest() != str(mark["sha256"]):
        found, _ = read_rows(data)
        kept = [line for number, line in found.items() if number < rows]
        content = b"".join(kept)
        length = len(content)
        if len(kept) < rows or not data.startswith(content):
            missing = describe_missing(found, rows)
            where = ""
            if data:
                side = free_path(folder, "damaged")
                write_atomic(side, data)
                write_atomic(path, content)
                where = f" and the file as it was is {side}"
            lost = "lines of it are not rows"
            if missing:
                lost = f"{'row' if rows - len(kept) == 1 else 'rows'} {missing} of {rows} cannot be read"
            note(
                f"{path} {'is damaged' if data else 'is missing or empty'}: {lost}; {counted(len(kept), 'whole row')} kept"
                f"{where}; the run goes on from its checkpoint"
            )
            return
        if mark is not None:
            note(
                f"{path} differs from what was written, by its sha256, though every row can be read: "
                f"{counted(rows, 'row')}"
            )
    if length == len(data):
        return
    side = free_path(folder, "cut")
    write_atomic(side, data[length:])
    os.truncate(path, length)
    *others, last = [_read(line.lstrip(b"\0")) for line in io.BytesIO(data[length:])]
    if last is None or not last.ends or not all(row is not None and row.kind in _AT_END for row in others):
        note(  # else the run ended regularly after its last checkpoint
            f"the run had written events after the checkpoint from which it goes on; it writes them again, and the old ones are "
            f"in {side} (nothing is lost)"
        )


def check_events(folder: Path) -> str | None:
    """Return what is wrong with the events of a finished run, in a sentence; None if they are complete."""
    path = folder / EVENTS
    if not os.path.lexists(path):
        return f"{path} is missing; the rows of this run are lost"
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return f"{path} is not a regular file; the rows of this run are lost"
    found, invalid = read_rows(path.read_bytes())
    count = max(found, default=-1) + 1
    missing = describe_missing(found, count)
    wrong = [
        *([f"missing rows: {missing}"] if missing else []),
        *([f"{counted(invalid, 'line')} without a row"] if invalid else []),
        *([] if count and _decoder.decode(found[count - 1]).ends else ["its end is missing"]),
    ]
    return f"{path} is damaged: {'; '.join(wrong)}" if wrong else None


def read_rows(data: bytes) -> tuple[dict[int, bytes], int]:
    """Return the valid rows of an events.jsonl by number, each a line, and the number of lines that are not valid.

    The numbers of the rows must rise. Zero bytes at the beginning of a line, which a crash of a file system may leave, are left
    out.
    """
    rows: dict[int, bytes] = {}
    invalid, last = 0, -1
    for each in io.BytesIO(data):
        line = each.lstrip(b"\0")
        row = _read(line)
        if row is None or row.seq <= last:
            invalid += 1
        else:
            rows[row.seq] = line
            last = row.seq
    return rows, invalid


def describe_missing(numbers: Collection[int], count: int) -> str:
    """Return the integers below `count` that are missing in `numbers`, which rise, as text: '6, 9 to 12 and 3 more'."""
    ranges, due = [], 0
    for number in (*(each for each in numbers if each < count), count):
        if due < number:
            ranges.append((due, number - 1))
        due = number + 1
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[:_LISTED]]
    more = sum(last - first + 1 for first, last in ranges[_LISTED:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def free_path(folder: Path, why: str) -> Path:
    """Return a path that does not exist, for rows that are moved: events-WHY-N.jsonl."""
    return next(path for n in itertools.count(1) if not os.path.lexists(path := folder / f"events-{why}-{n}.jsonl"))


def _read(line: bytes) -> AnyRow | None:
    """Return the row of a line; None if the line is not a row."""
    if not line.endswith(b"\n"):
        return None
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
