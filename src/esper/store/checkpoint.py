"""Checkpoints: the state of a run as two files in a folder that is whole or absent, and the way back.

    checkpoints/step-000120/state.safetensors    every array and tensor, by dotted name
    checkpoints/step-000120/state.json           format, run, sha256 and size of the other, and the tree they stand in
    checkpoints/latest                           name of the last complete folder, and the sha256 of its state.json
    checkpoints/best                             likewise of a training, behind the round whose validation was best

Nothing that is read here is executed or unpickled, and no link is followed.
"""

import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from esper.leyline.config import CheckpointConfig
from esper.leyline.errors import InputError
from esper.store.background import Background
from esper.store.changes import read_trail
from esper.store.disk import Patient, at_once, remove, sync_folder, write_atomic, write_folder
from esper.store.files import CHECKPOINTS, CONFIG
from esper.store.tensors import to_parts

Tree = dict[str, Any]
"""Nested dicts (with names as keys) and lists of arrays, tensors, numbers, texts, booleans and None."""

FORMAT = 4
"""Of the files of a checkpoint; no other is read."""
LATEST, BEST, FACTS, TENSORS = "latest", "best", "state.json", "state.safetensors"
_LARGEST_POINTER, _LARGEST_FACTS, _LARGEST_TENSORS = 256, 64 * 2**20, 256 * 2**30  # bytes that are read
_NAME = re.compile(r"step-(\d{6,18})")
_ARRAY, _TENSOR, _NUMBER = "$array", "$tensor", "$number"  # what stands in the tree for what JSON cannot hold


class Damaged(Exception):
    """A checkpoint that is not used, with the file and the reason."""


class Foreign(Damaged):
    """An undamaged checkpoint, but of another format or run."""


class Checkpoint(NamedTuple):
    """What was read back."""

    number: int  # steps that had been taken
    state: Tree


class Writing(NamedTuple):
    """A checkpoint that a thread is writing."""

    path: Path
    running: Future[None]
    put: Callable[[], None]  # what the thread does, to be done again where it found no room


# Trees as files.


def flatten(tree: Any, name: str = "") -> tuple[dict[str, Tensor], Any]:
    """The arrays and tensors of a tree by dotted name, copied to the host, and the rest as JSON that says where they stood.

    `unflatten` is its inverse, bit for bit, but for tuples, which become lists. TypeError where a leaf is none of a `Tree`.
    """
    tensors: dict[str, Tensor] = {}

    def put(value: Tensor, name: str, kind: str) -> dict[str, str]:
        assert name not in tensors, f"two leaves are called {name}"
        tensors[name] = value
        return {kind: name}

    def walk(value: Any, name: str) -> Any:
        match value:
            case Tensor():
                return put(value.detach().to("cpu", copy=True).contiguous(), name, _TENSOR)
            case np.ndarray():
                return put(torch.from_numpy(np.array(value, order="C")), name, _ARRAY)
            case dict():
                assert all(isinstance(key, str) and not key.startswith("$") for key in value), list(value)
                return {key: walk(item, f"{name}.{key}" if name else key) for key, item in value.items()}
            case list() | tuple():
                return [walk(item, f"{name}.{index}" if name else str(index)) for index, item in enumerate(value)]
            case float() if not math.isfinite(value):
                return {_NUMBER: repr(float(value))}
            case bool() | str() | None:
                return value
            case int() | float():
                return value
        raise TypeError(f"{name} is a {type(value).__name__}, which no checkpoint holds")

    return tensors, walk(tree, name)


def unflatten(tensors: Mapping[str, Tensor], plain: Any) -> Any:
    """The tree that `flatten` took apart, in memory of its own. KeyError where a tensor is missing."""
    match plain:
        case {"$tensor": str(name)}:
            return tensors[name].clone()  # aligned as torch aligns, which a view of the file is not
        case {"$array": str(name)}:
            return tensors[name].clone().numpy()
        case {"$number": str(text)}:
            return float(text)
        case dict():
            return {key: unflatten(tensors, item) for key, item in plain.items()}
        case list():
            return [unflatten(tensors, item) for item in plain]
    return plain


# Writing.


class Checkpoints:
    """Those of one run folder: when one is due, how it is written, which are kept, and which is read."""

    def __init__(self, folder: Path, config: CheckpointConfig, patience: Patient = at_once) -> None:
        """The folder's config.yaml must be there: a run is known by the sha256 of its first one."""
        self.folder, self.config, self.patience = folder / CHECKPOINTS, config, patience
        self.run = read_trail(folder).run
        self.last = 0  # steps that had been taken at the last one
        self._started = time.monotonic()  # when that was
        self._background = Background()
        self._writing: Writing | None = None

    def due(self, number: int) -> bool:
        """Whether a checkpoint is due by the config's cadences after so many steps. Raises what the last one failed with."""
        config = self.config
        if self._writing is not None and self._writing.running.done():
            self.join()
        by_steps = config.every_steps > 0 and number - self.last >= config.every_steps
        by_time = config.every_seconds > 0 and time.monotonic() - self._started >= config.every_seconds
        return number > self.last and (by_steps or by_time)

    def begin(self, number: int, state: Tree, best: bool = False) -> None:
        """Copy the state after `number` steps, and begin to write it as a checkpoint: see `write`. A thread does the rest.

        One is written at a time: the one before is waited for. What fails there is raised here, in `due` or in `join`.
        """
        self.join()
        tensors, plain = flatten(state)
        parts = to_parts(tensors)  # here, as the end of a process aborts it where a thread is in torch

        def put() -> None:
            self._put(number, parts, plain, best)

        self.last, self._started = number, time.monotonic()
        self._writing = Writing(self.folder / _name(number), self._background.submit(put), put)

    def join(self) -> None:
        """Wait until what was begun is written. Where its thread found no room, it is written from here, with patience."""
        if self._writing is None:
            return
        path, running, put = self._writing
        tries = iter([running.result])
        try:
            self.patience(path, lambda: next(tries, put)())
        finally:
            if running.done():  # or a second SIGINT ended the waiting
                self._writing = None

    def close(self) -> None:
        """Wait until nothing is being written any more, whatever becomes of it."""
        if self._writing is not None:
            wait([self._writing.running])

    def latest(self) -> int | None:
        """Steps that had been taken at the checkpoint from which the run goes on; None where `latest` names none.

        Waits for one that is being written.
        """
        self.close()
        try:
            return int(_named(self.folder / LATEST)[0].removeprefix("step-"))
        except Damaged:
            return None

    def leave(self, after: Callable[[], None]) -> None:
        """Wait for nothing: what is being written may be done or be cut off, which leaves the checkpoint before it.

        `after` is called where nothing is being written any more, if the process lives to see that. No checkpoint may follow.
        """
        self._background.close(after)

    def write(self, number: int, state: Tree, best: bool = False) -> None:
        """Write the checkpoint after `number` steps, name it in `latest`, and remove those that are not kept.

        One that is `best` is named so too, in place of an earlier one, and kept until another is.
        A crash at any moment leaves `latest` naming a whole checkpoint, where there was one, or this one.
        """
        self.begin(number, state, best)
        self.join()

    def _put(self, number: int, parts: Sequence[bytes | memoryview], plain: Any, best: bool) -> None:
        name = _name(number)
        facts = {
            "format": FORMAT,
            "run": self.run,
            "steps": number,
            "files": {TENSORS: {"sha256": _sha256(*parts), "bytes": sum(map(len, parts))}},
            "state": plain,
        }
        text = json.dumps({**facts, "checksum": _checksum(facts)}, allow_nan=False).encode()
        self.folder.mkdir(exist_ok=True)
        sync_folder(self.folder.parent)
        self.sweep()
        if self._best() == name:
            (self.folder / BEST).unlink()  # it was of a run that took another course from here
        write_folder(self.folder / name, {TENSORS: parts, FACTS: text})
        for pointer in (BEST, LATEST) if best else (LATEST,):
            if (self.folder / pointer).is_dir() and not (self.folder / pointer).is_symlink():
                remove(self.folder / pointer)  # the reader has refused it, and no file could take its name
            write_atomic(self.folder / pointer, f"{name} {_sha256(text)}\n")
        self._retain(name)

    def _retain(self, latest: str) -> None:
        """Remove all but the last `keep`; those that `latest` and `best` name stay."""
        stay = {latest, self._best()}
        for name in _names(self.folder)[self.config.keep :]:
            if name not in stay:
                os.rename(self.folder / name, self.folder / f".{name}.old")
        self.sweep()

    def _best(self) -> str | None:
        """What `best` names; None where there is none, or it is damaged."""
        try:
            return _named(self.folder / BEST)[0]
        except Damaged:
            return None

    def sweep(self) -> None:
        """Remove what a crash, or `_retain`, left under a temporary name."""
        for path in (*self.folder.glob(".step-*"), *self.folder.glob(".*.tmp")):
            remove(path)

    # Reading.

    def read(self, note: Callable[[str], None]) -> Checkpoint | None:
        """The checkpoint that `latest` names; where that is damaged, the newest that verifies; None where there is none.

        Every file that is refused is told to `note`, with the reason. InputError where nothing can be used but something is
        whole that belongs to another format or another config.
        """
        foreign: Foreign | None = None
        refused: list[str] = []
        self._look_at_best(note)
        for name, digest in self._candidates(note):
            try:
                found = self._verified(name, digest)
            except Damaged as error:
                foreign = foreign or (error if isinstance(error, Foreign) else None)
                if str(error) not in refused:
                    refused.append(str(error))
                    note(f"{error}; the newest checkpoint that verifies is used")
                continue
            self.last = found.number
            return found
        if foreign is not None:
            raise InputError(str(foreign))
        return None

    def _look_at_best(self, note: Callable[[str], None]) -> None:
        """Say where `best` does not name a checkpoint of the folder. The way back does not lead through it."""
        path = self.folder / BEST
        if self.folder.is_symlink() or not os.path.lexists(path):
            return
        try:
            name, digest = _named(path)
            if _sha256(_content(self.folder / name / FACTS, _LARGEST_FACTS)) != digest:
                raise Damaged(f"{path} names another {name} than the one that is there, by its sha256")
        except Damaged as error:
            note(f"{error}; the next checkpoint that is the best is named in its place")

    def _candidates(self, note: Callable[[str], None]) -> list[tuple[str, str | None]]:
        """Names of folders in the order in which they are tried, with the sha256 of state.json where `latest` tells it."""
        if self.folder.is_symlink():
            raise InputError(f"{self.folder} is a link, which is not followed; put the folder itself there")
        names = _names(self.folder) if self.folder.is_dir() else []
        if not names and not os.path.lexists(self.folder / LATEST):
            return []
        try:
            named = _named(self.folder / LATEST)
        except Damaged as error:
            note(f"{error}; the newest checkpoint that verifies is used")
            return [(name, None) for name in names]
        # once more without the sha256: where it does not fit, `latest` may be what is damaged
        return [named, *((name, None) for name in names)]

    def _verified(self, name: str, digest: str | None) -> Checkpoint:
        """The checkpoint of a folder, read and checked. Damaged where it is not to be used."""
        folder = self.folder / name
        if folder.is_symlink() or not folder.is_dir():
            named = f", though {self.folder / LATEST} names it" if digest is not None else ""
            raise Damaged(f"{folder} is missing or no folder of this run{named}")
        path = folder / FACTS
        text = _content(path, _LARGEST_FACTS)
        if digest is not None and _sha256(text) != digest:
            raise Damaged(f"{path} is not the file that {self.folder / LATEST} names, by its sha256")
        try:
            facts = json.loads(text)
            whole = isinstance(facts, dict) and facts.pop("checksum", None) == _checksum(facts)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            raise Damaged(f"{path} is damaged, by its checksum")
        if facts.get("format") != FORMAT:
            raise Foreign(
                f"{path} is of format {facts.get('format')!r}, this Esper reads format {FORMAT}; resume with the Esper that "
                "wrote it, or start a new run"
            )
        try:
            return self._filled(folder, facts)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError, SafetensorError) as error:
            raise Damaged(f"{path} and {TENSORS} beside it do not hold a checkpoint together ({error!r})") from None

    def _filled(self, folder: Path, facts: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint of which `facts` tell, with its arrays. What is not as it should be may raise anything."""
        if facts["run"] != self.run:
            raise Foreign(
                f"{folder / FACTS} belongs to another run, or {CONFIG} was changed since; put back what was there, or start a "
                "new run"
            )
        if _name(facts["steps"]) != folder.name:
            raise Damaged(f"{folder / FACTS} is that of another checkpoint, of step {facts['steps']}")
        path, known = folder / TENSORS, facts["files"][TENSORS]
        data = _content(path, _LARGEST_TENSORS, known["bytes"])
        if _sha256(data) != known["sha256"]:
            raise Damaged(f"{path} is damaged, by its sha256")
        return Checkpoint(facts["steps"], unflatten(load(data), facts["state"]))


def _named(path: Path) -> tuple[str, str]:
    """The folder that `latest` or `best` names, and the sha256 of its state.json. Damaged where there is none, or it is."""
    text = _content(path, _LARGEST_POINTER).decode("utf-8", "replace")
    said = re.fullmatch(rf"({_NAME.pattern}) ([0-9a-f]{{64}})\n", text)
    if said is None:
        raise Damaged(f"{path} names no checkpoint")
    return said[1], said[3]


def _content(path: Path, largest: int, exactly: int | None = None) -> bytes:
    """The bytes of a regular file, no link, of at most so many, or exactly so many. Damaged where it is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):  # `open` would refuse a folder with an error of its own
        os.close(descriptor)
        raise Damaged(f"{path} is no regular file")
    with open(descriptor, "rb") as file:
        if found.st_size > largest:
            raise Damaged(f"{path} has {found.st_size:,} bytes, more than any of its kind")
        if exactly is not None and found.st_size != exactly:
            raise Damaged(f"{path} has {found.st_size:,} bytes instead of {exactly:,}")
        return file.read()


def _name(number: int) -> str:
    """The folder of the checkpoint after so many steps."""
    return f"step-{number:06d}"


def _names(folder: Path) -> list[str]:
    """The folders that may hold a checkpoint, the newest first."""
    found = [(int(match[1]), path.name) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [name for _, name in sorted(found, reverse=True)]


def _checksum(facts: Mapping[str, Any]) -> str:
    """sha256 of the content of state.json without the checksum itself."""
    return _sha256(json.dumps(facts, sort_keys=True).encode())


def _sha256(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
