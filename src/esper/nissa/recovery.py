"""The events of a resumed run: which rows are kept, which are removed, and what the user is told.

A checkpoint holds the number of rows before it, and the length and sha256 of these rows. Damaged events never prevent a run
from being resumed: the damaged file is renamed, and its valid rows are kept.
"""

import hashlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from esper.leyline.text import counted
from esper.store.disk import write_atomic
from esper.store.files import EVENTS

Mark = dict[str, Any]
"""Identifies the first rows of a file: {"bytes": their length, "sha256": their sha256}."""

_LISTED = 3  # largest number of ranges in a sentence


_AT_END = ("episode", "evaluation", "checkpoint")


class ValidRows(NamedTuple):
    """The content of an events.jsonl."""

    rows: dict[int, bytes]  # valid rows by number, each a line
    invalid: int  # number of lines that are not rows, or whose number is out of order


class _Numbered(msgspec.Struct):
    """The fields that rows of every kind and version have."""

    seq: int
    kind: str
    status: str | None = None


_numbered = msgspec.json.Decoder(_Numbered)


def resume_events(folder: Path, rows: int, mark: Mark | None, note: Callable[[str], None]) -> None:
    """Keep the first `rows` rows in the events of a run that is resumed after them.

    `mark` identifies these rows, if it is known. Later rows, which the run will write again, and a damaged file are moved to
    another file in the folder. A crash at any moment may leave rows twice, but loses none.
    """
    path = folder / EVENTS
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        side = free_path(folder, "damaged")
        os.rename(path, side)
        note(f"{path} is not a regular file; it was moved to {side}")
    data = path.read_bytes() if path.exists() else b""
    if mark is not None and _is_marked(data, mark):
        _cut(folder, int(mark["bytes"]), data, note)
        return
    found = read_rows(data)
    kept = [line for number, line in found.rows.items() if number < rows]
    whole = data.startswith(b"".join(kept))
    if whole and len(kept) == rows:
        if mark is not None:
            note(
                f"{path} differs from what was written, by its sha256, though every row can be read: "
                f"{counted(rows, 'row')}"
            )
        _cut(folder, sum(map(len, kept)), data, note)
        return
    missing = describe_ranges(missing_ranges(found.rows, rows))
    where = ""
    if data:
        side = free_path(folder, "damaged")
        write_atomic(side, data)
        write_atomic(path, b"".join(kept))
        where = f" and the file as it was is {side}"
    lost = (
        f"{'row' if rows - len(kept) == 1 else 'rows'} {missing} of {rows} cannot be read"
        if missing
        else "lines of it are not rows"
    )
    note(
        f"{path} {'is damaged' if data else 'is missing or empty'}: {lost}; {counted(len(kept), 'whole row')} kept"
        f"{where}; the run goes on from its checkpoint"
    )


def check_events(folder: Path) -> str | None:
    """What is wrong with the events of a finished run, in a sentence; None if they are complete."""
    path = folder / EVENTS
    if not os.path.lexists(path):
        return f"{path} is missing; the rows of this run are lost"
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return f"{path} is not a regular file; the rows of this run are lost"
    found = read_rows(path.read_bytes())
    count = max(found.rows, default=-1) + 1
    missing = describe_ranges(missing_ranges(found.rows, count))
    wrong = [
        *([f"missing rows: {missing}"] if missing else []),
        *([f"{counted(found.invalid, 'line')} without a row"] if found.invalid else []),
        *([] if count and _ends(found.rows[count - 1]) else ["its end is missing"]),
    ]
    return f"{path} is damaged: {'; '.join(wrong)}" if wrong else None


def read_rows(data: bytes) -> ValidRows:
    """The valid rows of an events.jsonl, whose numbers must rise, and the number of other lines."""
    rows: dict[int, bytes] = {}
    invalid, last = 0, -1
    for line in _lines(data):
        number = _number(line)
        if number is None or number <= last:
            invalid += 1
        else:
            rows[number] = line
            last = number
    return ValidRows(rows, invalid)


def missing_ranges(numbers: Iterable[int], count: int) -> list[tuple[int, int]]:
    """(first, last) of each range of integers below `count` that is missing in `numbers`, which rise."""
    found, due = [], 0
    for number in numbers:
        if due < number and due < count:
            found.append((due, min(number, count) - 1))
        due = number + 1
    return [*found, (due, count - 1)] if due < count else found


def describe_ranges(ranges: Sequence[tuple[int, int]]) -> str:
    """The first few ranges as text: '6, 9 to 12 and 3 more'."""
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[:_LISTED]]
    more = sum(last - first + 1 for first, last in ranges[_LISTED:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _lines(data: bytes) -> Iterator[bytes]:
    """Lines with their newline, without leading zero bytes, which a crash of a file system may leave."""
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin) + 1 or len(data)
        yield data[begin:end].lstrip(b"\0")
        begin = end


def _number(line: bytes) -> int | None:
    """The number of the row in a line; None if the line is not a row."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = _numbered.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return row.seq if row.seq >= 0 else None


def _ends(line: bytes) -> bool:
    """Whether a row is the last row of a run."""
    row = _numbered.decode(line)
    return row.kind == "run" and row.status != "running"


def _is_closing(data: bytes) -> bool:
    """Whether the data hold exactly the rows that a run writes at its end, the last of which is a run row."""
    *others, last = _lines(data)
    numbers = [_number(line) for line in (*others, last)]
    if None in numbers or not _ends(last):
        return False
    return all(_numbered.decode(line).kind in _AT_END for line in others)


def _is_marked(data: bytes, mark: Mapping[str, Any]) -> bool:
    length = int(mark["bytes"])
    return len(data) >= length and hashlib.sha256(memoryview(data)[:length]).hexdigest() == str(mark["sha256"])


def _cut(folder: Path, length: int, data: bytes, note: Callable[[str], None]) -> None:
    """Move what follows the first `length` bytes to another file in the folder."""
    if length == len(data):
        return
    side = free_path(folder, "cut")
    write_atomic(side, data[length:])
    os.truncate(folder / EVENTS, length)
    if _is_closing(data[length:]):
        return  # the run ended regularly after its last checkpoint
    note(
        f"the run had written events after the checkpoint from which it goes on; it writes them again, and the old ones are in "
        f"{side} (nothing is lost)"
    )


def free_path(folder: Path, why: str) -> Path:
    """A path that does not exist, for rows that are moved: events-WHY-N.jsonl."""
    return next(path for n in itertools.count(1) if not os.path.lexists(path := folder / f"events-{why}-{n}.jsonl"))
