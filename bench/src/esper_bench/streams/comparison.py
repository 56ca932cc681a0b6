"""Compare methods on streams, from the arguments to the record. A folder keeps the comparison while it is made.

streams.json      the arguments, and at the end the record of `esper.stream`
METHOD/           state of the method that is played, in files as those of a checkpoint
METHOD.json       figures of a method that has been played to the end
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load

from esper.leyline.config.arguments import check_choice, to_path
from esper.leyline.config.input import show
from esper.leyline.config.tree import parse_setting
from esper.leyline.messages import InputError
from esper.runs.evaluation.statistics import Floats, Interval, interval, mean, mean_difference
from esper.runs.folder.interrupt import Interrupt
from esper.store import disk
from esper.store.disk import (
    Content,
    Retry,
    find_folder,
    read_kept,
    remove,
    remove_unfinished,
    write_atomic,
    write_folder,
    write_once,
)
from esper.store.files import to_json
from esper.store.lock import LOCK, locked_folder
from esper.store.tensors import flatten, to_parts, unflatten
from esper_bench.streams.data import RANGES, UPDATES, Change, DrawnStreams, draw_streams
from esper_bench.streams.decisions import Operation
from esper_bench.streams.learner import Price
from esper_bench.streams.methods import METHODS, build_learner, full_settings
from esper_bench.streams.own import DATA, OwnStreams, own_streams
from esper_bench.streams.play import Played, Player, segment_accuracy

Record = dict[str, Any]
RECORD, TENSORS, FACTS = "streams.json", "state.safetensors", "state.json"
MIXTURE = "mixture"
CHANGES = (*Change, MIXTURE)
DEFAULT = (
    "reset-blocks",
    "reset-blocks-annealed",
    "adamw",
    "ensemble",
    "ensemble-annealed",
    "ensemble-recognising",
    "reactivate",
    "adaptive",
    "shipped",
)
"""Methods that are compared if none is named. All others are compared with the first one."""
EVERY = 200
"""Updates between two saves of the state."""
MOST = 1_000_000
"""Most updates of a drawn stream, whose segments are held in memory."""
_LARGEST = 2**32  # bytes of a file of the folder that are read
_MEND = "name another folder, or replace the comparison with --overwrite"


def stream(
    methods: Sequence[str] | str = DEFAULT,
    change: str | None = None,
    *,
    data: str | PathLike[str] | Mapping[str, Any] | None = None,
    streams: int = 20,
    updates: int | None = None,
    part: str = "heldout",
    first: int = 0,
    settings: Mapping[str, Mapping[str, Any]] | Sequence[str] = (),
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    watch: Callable[[str], None] | None = None,
    ready: Callable[[Record], None] | None = None,
) -> Record:
    """Compare methods on the same streams of changing data, as `esper stream` does, and return the record.

    Each batch is scored before it is trained on. `change` is a `Change`, "recurring-shared" by default, or "mixture": the streams
    take turns in having one of them. Streams number `first` to `first + streams - 1` of the `part` ("training", "validation" or
    "heldout") are played for `updates` batches, 1,664 by default. `settings` are those of methods, as {"ensemble": {"lr": 0.01}}
    or ["ensemble.lr=0.01"].

    `data` is a stream of one's own in place of a change: a .npz file, or a mapping, with the arrays `features` (n, ...), `labels`
    (n,), and `contexts` (n,) or `segments` (S,), the lengths of segments. All streams are then these examples in their order, cut
    into batches of 32 from one context, and differ in the initial weights of the networks.

    With `out`, the state is kept in that folder: after an interrupt, the same call goes on from there and gets the same numbers
    as without it. `overwrite` allows to replace another comparison there. `watch` is told of progress in lines of text. `ready`
    gets the record before it is written to the folder, where a disk may be full. Raises InputError before anything is played,
    and KeyboardInterrupt if a signal ended the comparison.
    """
    names = [methods] if isinstance(methods, str) else list(methods)
    if data is None:
        change, updates = change or str(Change.SHARED), UPDATES if updates is None else updates
    elif change is not None:
        raise InputError(f"change is {show(change)}, but data are given, too; give one of them")
    asked = _arguments(names, change or DATA, streams, updates, part, first, settings)
    drawn = _read_own_streams(data, asked) if data is not None else drawn_streams(asked)
    ready = ready or (lambda record: None)
    if out is None:
        ready(record := _compared(asked, drawn, None, write_once, Interrupt(watch), watch))
        return record
    folder = to_path(out, "out")
    if folder.is_file():
        raise InputError(f"{folder} is a file; name a folder")
    note, interrupt = watch or (lambda line: None), Interrupt(watch)
    again = "give the same command again, which continues the comparison"
    retry = disk.DiskRetry(disk.PATIENCE, note, folder, lambda: interrupt.asked, further=again)
    with locked_folder(folder, note, retry):
        known = _resume_or_prepare(folder, asked, overwrite, retry)
        record = known or _compared(asked, drawn, folder, retry, interrupt, watch)
        ready(record)
        if known is None:
            _write(folder / RECORD, record, retry)
    return record


def _arguments(
    names: Sequence[str], change: str, streams: int, updates: int | None, part: str, first: int, settings: Any
) -> Record:
    """Check the arguments, and return them as they are kept in the folder. Raises InputError if one is bad."""
    if change != DATA:
        check_choice(change, "change", [str(each) for each in CHANGES])
    check_choice(part, "part", list(RANGES))
    for name, value, least in (
        ("streams", streams, 1),
        ("updates", 1 if updates is None else updates, 1),
        ("first", first, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            why = ", so a stream has no segments" if name == "updates" else ""
            raise InputError(f"{name} is {show(value)}{why}; give a whole number of at least {least}")
    if change != DATA and updates is not None and updates > MOST:
        raise InputError(f"updates is {updates:,}; give at most {MOST:,}")
    if first + streams > len(RANGES[part]):
        raise InputError(f"first + streams is {first + streams:,}, but {part} has {len(RANGES[part]):,} streams")
    if not names or len(set(names)) < len(names):
        raise InputError(f"the methods are {show(list(names))}; name each at most once, and at least one")
    given = _group_settings(settings)
    other = [name for name in given if name not in names]
    if other:
        raise InputError(f"settings are given for {show(other[0])}, which is not compared; the methods are {names}")
    return {
        "change": str(change),
        "part": part,
        "first": first,
        "streams": streams,
        "updates": updates,
        "settings": {name: dict(full_settings(name, given.get(name, {}))) for name in names},
    }


def _group_settings(settings: Any) -> dict[str, Mapping[str, Any]]:
    """Group settings by method. InputError if they have another form."""
    if isinstance(settings, Mapping):
        listed = [dict(settings)]
    else:
        listed = [parse_setting(each) for each in ([settings] if isinstance(settings, str) else settings)]
    found: dict[str, dict[str, Any]] = {}
    for layer in listed:
        for name, own in layer.items():
            if not isinstance(own, Mapping):
                raise InputError(f"the setting {show(name)} is {show(own)}; give METHOD.KEY=VALUE, as ensemble.lr=0.01")
            found.setdefault(name, {}).update(own)
    return dict(found)


def drawn_streams(asked: Record) -> DrawnStreams:
    """Draw the streams of a comparison."""
    start = RANGES[asked["part"]].start + asked["first"]
    every = list(Change)
    numbers = range(asked["first"], asked["first"] + asked["streams"])
    mixed = asked["change"] == MIXTURE
    changes = [every[number % len(every)] if mixed else Change(asked["change"]) for number in numbers]
    return draw_streams(range(start, start + asked["streams"]), changes, updates=asked["updates"])


def _read_own_streams(data: Any, asked: Record) -> OwnStreams:
    """Read the streams of one's own data, whose length and hash become arguments of the comparison."""
    start = RANGES[asked["part"]].start + asked["first"]
    streams = own_streams(data, range(start, start + asked["streams"]), updates=asked["updates"])
    hashed = sha256(streams.x.numpy().tobytes() + streams.y.numpy().tobytes() + streams.order.tobytes())
    asked |= {"updates": streams.updates, DATA: hashed.hexdigest()}
    return streams


def _compared(
    asked: Record,
    streams: DrawnStreams | OwnStreams,
    folder: Path | None,
    retry: Retry,
    interrupt: Interrupt,
    watch: Callable[[str], None] | None,
) -> Record:
    """Play every method that has not been played, and return the record."""
    found = dict[str, Record]()
    with interrupt:
        for name, settings in asked["settings"].items():
            kept = kept_name(name)
            file = None if folder is None else folder / f"{kept}.json"
            if file is not None and file.exists():
                found[name] = _read(file)
                continue
            player = Player(streams, build_learner(name, streams, **settings))
            if folder is not None:
                _load(player, folder / kept)
            while player.update < streams.updates:
                player.play(until=min(player.update + EVERY, streams.updates))
                if folder is not None:
                    _save(player, folder / kept, retry)
                if watch is not None:
                    watch(f"{name}: {player.update} of {streams.updates} updates")
                if interrupt.asked:
                    raise KeyboardInterrupt(f"the comparison was interrupted in {name} at update {player.update}")
            found[name] = _figures(streams, player.result())
            if file is not None:
                _write(file, found[name], retry)
                remove_folder(file.with_suffix(""))
    return _record(asked, streams, found)


def remove_folder(folder: Path) -> None:
    """Remove a folder that `write_folder` wrote, with what a killed process left of it under other names."""
    for path in (folder, folder.with_name(f".{folder.name}.old"), folder.with_name(f".{folder.name}.new")):
        remove(path)


def _figures(streams: DrawnStreams | OwnStreams, played: Played) -> Record:
    """Return what a record holds of a method: lists over streams."""
    return {
        "returned": played.returned.tolist(),
        "retention": played.retention.tolist(),
        "alarms": played.alarms.sum(0).tolist(),
        "not_finite": (~np.isfinite(played.loss)).sum(0).tolist(),
        "operations": {each.name: played.operations[:, each].tolist() for each in Operation},
        "multiply_adds": {each.name: played.price[:, each].tolist() for each in Price},
        "segment_accuracy": [own.tolist() for own in segment_accuracy(streams, played.accuracy)],
    }


def _record(asked: Record, streams: DrawnStreams | OwnStreams, found: Mapping[str, Record]) -> Record:
    """Make the record: arguments, streams, and for each method its figures and how it compares with the first one."""
    reference = next(iter(found))

    def strata(name: str) -> list[Floats]:
        """Group the returns by change, because the streams of one change are alike."""
        own, kinds = np.array(found[name]["returned"])[:, None], np.array([str(each) for each in streams.changes])
        return [own[kinds == kind] for kind in sorted(set(kinds.tolist()))]

    methods = {}
    for name, figures in found.items():
        over = None if name == reference else interval(mean_difference, strata(name), strata(reference))
        methods[name] = {
            "accuracy": _bounds(interval(mean, strata(name))),
            "over_reference": None if over is None else _bounds(over),
            "settings": asked["settings"][name],
            **figures,
        }
    return {
        "status": "finished",
        **asked,
        "reference": reference,
        "keys": streams.keys.tolist(),
        "changes": [str(each) for each in streams.changes],
        "segments": [[list(segment) for segment in own] for own in streams.segments],
        "methods": methods,
    }


def _bounds(found: Interval) -> dict[str, float | None]:
    return {name: value if np.isfinite(value) else None for name, value in found._asdict().items()}


# The folder.


def _resume_or_prepare(folder: Path, asked: Record, overwrite: bool, retry: Retry) -> Record | None:
    """Return the record of a finished comparison with these arguments; if there is none, make the folder ready and return None.

    InputError if the folder holds another comparison or other files.
    """
    known = _read(folder / RECORD) if (folder / RECORD).exists() else None
    names = {*METHODS, *map(kept_name, (known or {}).get("settings", {}))}
    own = {RECORD, *names, *(f"{name}.json" for name in names)}
    remove_unfinished(folder, own)
    if known is not None and not overwrite:
        differs = [name for name, value in asked.items() if known.get(name) != value]
        if differs:
            was, now = (show(each.get(differs[0])) for each in (known, asked))
            raise InputError(f"{folder} holds a comparison whose {differs[0]} is {was}, not {now}; {_MEND}")
        return known if "methods" in known else None
    own |= {LOCK, *(f".{name}.{state}" for name in names for state in ("new", "old"))}
    other = sorted(path.name for path in folder.iterdir() if path.name not in own)
    if other:
        raise InputError(f"{folder} holds {show(other[0])}, which is no file of a comparison; name another folder")
    for name in own - {LOCK, RECORD}:  # the record last: a process that is killed here leaves what it may replace
        remove(folder / name)
    _write(folder / RECORD, asked, retry)
    return None


def kept_name(method: str) -> str:
    """Name the files that keep a method: by its own name, or for a path by the name of the file and a hash of the path."""
    return method if method in METHODS else f"{Path(method).stem}-{sha256(method.encode()).hexdigest()[:8]}"


def _read(path: Path) -> Record:
    try:
        found = json.loads(read_kept(path, _LARGEST, _MEND))
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); {_MEND}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is damaged (it holds no mapping); {_MEND}")
    return found


def _write(path: Path, record: Record, retry: Retry) -> None:
    retry(path, lambda: write_atomic(path, to_json(record)))


def _save(player: Player, folder: Path, retry: Retry) -> None:
    tensors, plain = flatten(player.snapshot())
    files: dict[str, Content] = {TENSORS: to_parts(tensors), FACTS: json.dumps(plain, allow_nan=False).encode()}
    retry(folder, lambda: write_folder(folder, files))


def _load(player: Player, folder: Path) -> None:
    """Load the state that was saved in a folder, if there is one. InputError if it is damaged."""
    folder = find_folder(folder)
    if not folder.exists():
        return
    try:
        tensors = load(read_kept(folder / TENSORS, _LARGEST, _MEND))
        player.load(unflatten(tensors, json.loads(read_kept(folder / FACTS, _LARGEST, _MEND))))
    except (AttributeError, KeyError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        name = type(error).__name__
        raise InputError(f"{folder} is damaged, or was saved by another version of Esper ({name}); {_MEND}") from None
