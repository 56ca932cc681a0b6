"""The events of a run that goes on: what of them is whole, what is cut, and what is said.

A checkpoint knows how many rows were written before it and, by length and sha256, the bytes that they are. Rows are never a
reason not to go on: what is damaged is moved aside as it is, and the rows that are whole are kept.
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
"""By what the first rows of a file are known: {"bytes": their length, "sha256": of them}."""

_LISTED = 3  # ranges of rows that a sentence names


class Found(NamedTuple):
    """The content of an events.jsonl."""

    rows: dict[int, bytes]  # the whole ones by number, each a line
    spoilt: int  # lines that are no row, or one that comes too late


class _Numbered(msgspec.Struct):
    """What every row has, of whatever kind and version."""

    seq: int
    kind: str
    status: str | None = None


_numbered = msgspec.json.Decoder(_Numbered)


def take_up_events(folder: Path, rows: int, mark: Mark | None, note: Callable[[str], None]) -> None:
    """Leave the first `rows` rows in the events of a run that goes on behind them; those that `mark` is of, where it is known.

    What follows is written again by the run, and is moved to a file beside it, as is a file that is damaged. A crash at any
    moment leaves rows twice and loses none.
    """
    path = folder / EVENTS
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        side = beside(folder, "damaged")
        os.rename(path, side)
        note(f"{path} is no regular file; it was moved to {side}")
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
                f"{path} holds other bytes than were written, by their sha256, though every row can be read: "
                f"{counted(rows, 'row')}"
            )
        _cut(folder, sum(map(len, kept)), data, note)
        return
    missing = words(gaps(found.rows, rows))
    where = ""
    if data:
        side = beside(folder, "damaged")
        write_atomic(side, data)
        write_atomic(path, b"".join(kept))
        where = f" and the file as it was is {side}"
    lost = (
        f"{'row' if rows - len(kept) == 1 else 'rows'} {missing} of {rows} cannot be read"
        if missing
        else "lines of it are no rows"
    )
    note(
        f"{path} {'is damaged' if data else 'is missing or empty'}: {lost}; {counted(len(kept), 'whole row')} kept"
        f"{where}; the run goes on from its checkpoint"
    )


def look_at_events(folder: Path) -> str | None:
    """What is wrong with the events of a finished run, in a sentence; None where nothing is."""
    path = folder / EVENTS
    if not os.path.lexists(path):
        return f"{path} is missing; the rows of this run are lost"
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return f"{path} is no regular file; the rows of this run are lost"
    found = read_rows(path.read_bytes())
    count = max(found.rows, default=-1) + 1
    missing = words(gaps(found.rows, count))
    wrong = [
        *([f"missing rows: {missing}"] if missing else []),
        *([f"{counted(found.spoilt, 'line')} without a row"] if found.spoilt else []),
        *([] if count and _ends(found.rows[count - 1]) else ["its end is missing"]),
    ]
    return f"{path} is damaged: {'; '.join(wrong)}" if wrong else None


def read_rows(data: bytes) -> Found:
    """The whole rows of an events.jsonl, whose numbers rise; other lines are counted."""
    rows: dict[int, bytes] = {}
    spoilt, last = 0, -1
    for line in _lines(data):
        number = _number(line)
        if number is None or number <= last:
            spoilt += 1
        else:
            rows[number] = line
            last = number
    return Found(rows, spoilt)


def gaps(numbers: Iterable[int], count: int) -> list[tuple[int, int]]:
    """First and last of every run of numbers below `count` that is missing among rising ones."""
    found, due = [], 0
    for number in numbers:
        if due < number and due < count:
            found.append((due, min(number, count) - 1))
        due = number + 1
    return [*found, (due, count - 1)] if due < count else found


def words(ranges: Sequence[tuple[int, int]]) -> str:
    """Ranges of numbers, the first few of them: '6, 9 to 12 and 3 more'."""
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[:_LISTED]]
    more = sum(last - first + 1 for first, last in ranges[_LISTED:])
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _lines(data: bytes) -> Iterator[bytes]:
    """Each with its newline, and without the zeros before it that the crash of a file system may leave."""
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin) + 1 or len(data)
        yield data[begin:end].lstrip(b"\0")
        begin = end


def _number(line: bytes) -> int | None:
    """Of the row that a line is; None where it is none."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = _numbered.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return row.seq if row.seq >= 0 else None


def _ends(line: bytes) -> bool:
    """Whether a row is the last one of a run."""
    row = _numbered.decode(line)
    return row.kind == "run" and row.status != "running"


def _is_closing(data: bytes) -> bool:
    """Whether rows are those that a run writes at its end and no other: what its episodes came to, and its last row."""
    *episodes, last = _lines(data)
    numbers = [_number(line) for line in (*episodes, last)]
    if None in numbers or not _ends(last):
        return False
    return all(_numbered.decode(line).kind == "episode" for line in episodes)


def _is_marked(data: bytes, mark: Mapping[str, Any]) -> bool:
    length = int(mark["bytes"])
    return len(data) >= length and hashlib.sha256(memoryview(data)[:length]).hexdigest() == str(mark["sha256"])


def _cut(folder: Path, length: int, data: bytes, note: Callable[[str], None]) -> None:
    """Move what follows the first bytes to a file beside."""
    if length == len(data):
        return
    side = beside(folder, "cut")
    write_atomic(side, data[length:])
    os.truncate(folder / EVENTS, length)
    if _is_closing(data[length:]):
        return  # the run was left in order, behind its last checkpoint
    note(
        f"the run had written events after the checkpoint from which it goes on; it writes them again, and the old ones are in "
        f"{side} (nothing is lost)"
    )


def beside(folder: Path, why: str) -> Path:
    """A free name for rows that are moved."""
    return next(path for n in itertools.count(1) if not os.path.lexists(path := folder / f"events-{why}-{n}.jsonl"))
