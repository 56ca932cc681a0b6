"""Write and read the rows of events.jsonl (nissa/rows.py). E environments, S slots."""

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from esper.leyline.lifecycle.view import Bools, Floats
from esper.leyline.messages import InputError, counted, kind_of
from esper.nissa.rows import KINDS, SCHEMA, AnyRow, PlayedRow, Row, RunRow, axes_of
from esper.store.disk import open_regular

DIGITS = 5  # significant digits of measurements


def encode(row: Row) -> bytes:
    """Return the row as one line of strict JSON with its newline.

    In a list of lists, null stands for a list of nulls. A field that has its default is left out.
    """
    short = {name: _short(value) for name, _ in _DEPTHS[type(row)] if (value := getattr(row, name)) is not None}
    return _encoder.encode(msgspec.structs.replace(row, **short) if short else row) + b"\n"


def decode(line: bytes | str) -> Row:
    """Return the row of a line of events.jsonl, with every list at full length. InputError if it is no row of this version."""
    try:
        row = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"not a row of version {SCHEMA} of the events ({error})") from None
    for name, depth in _DEPTHS[type(row)]:
        value = getattr(row, name)
        if depth > 1 and value is not None:
            setattr(row, name, _full(value, _shape(value, depth)))
    return row


def record(row: Row) -> dict[str, Any]:
    """Return the fields of a row by their names in the file, with those that have their default.

    Fields that only a training has are left out of the rows of other runs.
    """
    names = zip(row.__struct_fields__, row.__struct_encode_fields__, strict=True)
    return {
        key: msgspec.to_builtins(value) for name, key in names if (value := getattr(row, name)) is not msgspec.UNSET
    }


def rounded(values: Any) -> Floats:
    """Round values to `DIGITS` significant digits; 0 and values that are not finite are returned unchanged."""
    values = np.asarray(values, np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.abs(values))))
        near: Floats = np.round(values * scale) / scale
    return np.where(np.isfinite(near), near, values)


def digits(value: float) -> float | None:
    """Return a number to `DIGITS` significant digits; None if it is not finite."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


class RunShape:
    """Checks that rows are of one run: lists have the lengths that their fields name, and environments and slots exist.

    The first `run` row says how many environments and slots there are. In a training these differ from population to population,
    so that lists of a row are compared with each other only.
    """

    def __init__(self) -> None:
        self._head: RunRow | None = None

    def check(self, row: Row) -> None:
        """Raise InputError if the next row is none of this run."""
        head = self._head
        if isinstance(row, RunRow):
            if head is not None and (row.envs, row.slots) != (head.envs, head.slots):
                raise InputError("envs or slots differ from those of the first row of kind run")
            if len(set(row.slots)) < len(row.slots):
                raise InputError("slots holds a name twice")
            self._head = head = head or row
        if isinstance(row, PlayedRow) and row.cohort is not msgspec.UNSET:
            head = None
        sizes = {} if head is None else {"E": head.envs, "S": len(head.slots)}
        for name, axes in _SHAPES[type(row)]:
            value = getattr(row, name)
            if value is None or (isinstance(row, RunRow) and not value):  # a training has no hosts of its own
                continue
            for key, part in value.items() if isinstance(value, dict) else [("", value)]:
                _check_lengths(f"{name}[{key!r}]" if key else name, part, axes, sizes)
        if head is None:
            return
        for name in _PLACES[type(row)]:
            value = getattr(row, name)
            for place in value if isinstance(value, list | dict) else [value]:
                if isinstance(place, int) and place >= head.envs:
                    raise InputError(f"{name} is {place}, and the run has {counted(head.envs, 'environment')}")
                if isinstance(place, str) and place not in head.slots:
                    raise InputError(f"{name} is {place!r}, and the run has the slots {', '.join(head.slots)}")


def _check_lengths(name: str, values: Any, axes: str, sizes: dict[str, int]) -> None:
    """Raise InputError if nested lists are not as long as `sizes`, by axis; an unknown axis there gets their length."""
    size = sizes.setdefault(axes[0], len(values))
    if len(values) != size:
        raise InputError(
            f"{name} has {counted(len(values), 'entry', 'entries')} where the run has {size} {_AXES[axes[0]]}"
        )
    for inner in values if len(axes) > 1 else ():
        if inner is not None:
            _check_lengths(name, inner, axes[1:], sizes)


def read_events(path: Path) -> Iterator[Row]:
    """Yield the rows of an events.jsonl, in order. A last line without a newline, which is still being written, is left out.

    InputError if the file cannot be read, has another version, or has a line that is not a row of its run.
    """
    with open_regular(path, "name the events.jsonl of a run folder") as file:
        yield from decode_lines(path, file)


def decode_lines(path: Path, lines: Iterable[bytes], first: int = 0, shape: RunShape | None = None) -> Iterator[Row]:
    """Yield the rows of lines of an events.jsonl, the first of which is line `first`, counted from 0. Raises as `read_events`.

    `shape` is that of the rows before; the file begins with these lines if it is None.
    """
    shape = shape or RunShape()
    for number, line in enumerate(lines, first):
        if number == 0:
            check_version(path, line)
        if line.endswith(b"\n"):
            try:
                row = decode(line)
                shape.check(row)
            except InputError as error:
                raise InputError(f"line {number + 1} of {path}: {error}") from None
            yield row


def check_version(path: Path, line: bytes) -> None:
    """Raise InputError if the first line of an events.jsonl is a run row of another version. A damaged line passes."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        head = msgspec.json.decode(line, type=AnyRow)
        if head.kind == "run" and head.schema != SCHEMA:
            raise InputError(
                f"{path} holds rows of version {head.schema}, this Esper reads version {SCHEMA}; read them, or "
                "resume the run, with the version of Esper that environment.json beside them names"
            )


def _short(values: Any) -> list[Any]:
    """Shorten lists of numbers: None for a list of nothing, and integers, which take less room, for whole numbers."""
    array = np.asarray(values, np.float64)
    whole = (np.rint(array) == array) & (np.abs(array) < 2**53)  # those that a float holds exactly
    short = array
    if whole.any():
        short = array.astype(object)
        short[whole] = array[whole].astype(np.int64)
    return _without_nothing(short.tolist(), np.isnan(array)) if array.ndim > 1 and array.size else short.tolist()


def _without_nothing(lists: list[Any], absent: Bools) -> list[Any]:
    """Put None for each list whose numbers are all absent."""
    nothing = np.asarray(absent.reshape(len(lists), -1).all(1))
    if absent.ndim > 2:
        return [None if none else _without_nothing(*each) for none, *each in zip(nothing, lists, absent, strict=True)]
    for place in np.flatnonzero(nothing).tolist():
        lists[place] = None
    return lists


def _shape(values: Any, depth: int) -> tuple[int, ...]:
    """Return the lengths of nested lists, some of which are None; shorter than `depth` where all of a level are."""
    shape, level = [], [values]
    for _ in range(depth):
        level = [value for value in level if value is not None]
        if not level:
            break
        shape.append(len(level[0]))
        level = [inner for value in level for inner in value]
    return tuple(shape)


def _full(values: Any, shape: tuple[int, ...]) -> Any:
    """Restore nested lists of a shape, with lists of None for each None in `values`."""
    if not shape:
        return values
    return [_full(value, shape[1:]) for value in (values if values is not None else [None] * shape[0])]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a row cannot hold {kind_of(value)}")


def _holds(kind: Any, wanted: type) -> bool:
    """Return whether a type is another one or has it within it."""
    return wanted in (kind, get_origin(kind)) or any(_holds(part, wanted) for part in get_args(kind))


_AXES = {"E": "environments", "S": "slots", "F": "sensors"}
_LISTS = {
    row: [(field, axes) for field in msgspec.structs.fields(row) if (axes := axes_of(field.type))]
    for row in KINDS.values()
}
_SHAPES = {row: [(field.name, axes) for field, axes in lists if axes.isalpha()] for row, lists in _LISTS.items()}
"""The fields that hold lists over environments, slots or sensors, each with its axes, by kind of row."""
_DEPTHS = {
    row: [
        (field.name, len(axes))
        for field, axes in lists
        if _holds(field.type, float) and not _holds(field.type, Mapping)
    ]
    for row, lists in _LISTS.items()
}
"""Fields that hold lists of numbers, each with the depth of its lists, by kind of row."""
_NAMING = "env", "failed_envs", "failed_twins", "slot", "pruned", "unfinished", "grown"
_PLACES = {row: [name for name in _NAMING if name in row.__struct_fields__] for row in KINDS.values()}
"""Fields that name environments or slots, by kind of row."""

_encoder = msgspec.json.Encoder(enc_hook=_plain)
_decoder: msgspec.json.Decoder[Row] = msgspec.json.Decoder(functools.reduce(operator.or_, KINDS.values()))
