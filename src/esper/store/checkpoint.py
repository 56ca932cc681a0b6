"""Write and read checkpoints: the state of a run as two files in a folder that is either complete or absent.

    checkpoints/step-000120/state.safetensors    every array and tensor, by dotted name
    checkpoints/step-000120/state.json           format, run, sha256 and size of the other file, and the tree
    checkpoints/latest                           name of the last folder, and the sha256 of its state.json
    checkpoints/best                             the same for the best validated round of a training

Reading executes and unpickles nothing, and follows no link.
"""

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load

from esper.leyline.config.tree import CheckpointConfig
from esper.leyline.messages import InputError
from esper.store.background import Background
from esper.store.changes import read_trail
from esper.store.disk import (
    Retry,
    checksum_of,
    read_kept,
    remove,
    sha256_of,
    sync_folder,
    write_atomic,
    write_folder,
    write_once,
)
from esper.store.files import CHECKPOINTS, CONFIG
from esper.store.tensors import Tree, flatten, to_parts, unflatten

FORMAT = 12
"""Version of the files of a checkpoint; other versions are refused."""
LATEST, BEST, FACTS, TENSORS = "latest", "best", "state.json", "state.safetensors"
_LARGEST_POINTER, _LARGEST_FACTS, _LARGEST_TENSORS = 256, 64 * 2**20, 256 * 2**30  # bytes that are read
_NAME = re.compile(r"step-(\d{6,18})")


class Unusable(Exception):
    """Says why a checkpoint cannot be used, and of one that is whole also what to do where there is no other."""


class Checkpoint(NamedTuple):
    """Holds a checkpoint that was read."""

    number: int  # steps that the run had taken
    state: Tree  # the state of the run


class Checkpoints:
    """Writes, removes and reads the checkpoints of one run folder, and says when one is due."""

    def __init__(self, folder: Path, config: CheckpointConfig, retry: Retry = write_once) -> None:
        """The folder must hold config.yaml, because a run is identified by the sha256 of its first config.yaml."""
        self.folder, self.config, self.retry = folder / CHECKPOINTS, config, retry
        self.run = read_trail(folder).run
        self.last = 0  # steps at the last checkpoint
        self._started = time.monotonic()  # time of the last checkpoint
        self._background = Background()
        # the path that a thread is writing, its future, and its work, to be repeated if the disk was full
        self._writing: tuple[Path, Future[None], Callable[[], None]] | None = None
        # those of this process, and the one that was read, until the run has recorded them: the steps before it, its folder
        # within the run folder, its size in bytes, the seconds that its writing took, None for the one that was read, and `best`
        self.written = deque[dict[str, Any]]()

    def due(self, number: int) -> bool:
        """Return whether a checkpoint is due after `number` steps. Raises the error of the last checkpoint, if it failed."""
        config = self.config
        if self._writing is not None and self._writing[1].done():
            self.join()
        by_steps = config.every_steps > 0 and number - self.last >= config.every_steps
        by_time = config.every_seconds > 0 and time.monotonic() - self._started >= config.every_seconds
        return number > self.last and (by_steps or by_time)

    def begin(self, number: int, state: Tree, best: bool = False) -> None:
        """Copy the state after `number` steps, and start a thread that writes it as a checkpoint: see `write`.

        Waits for the checkpoint before it. An error of the thread is raised by the next `begin`, `due` or `join`.
        """
        self.join()
        tensors, plain = flatten(state)
        parts = to_parts(tensors)  # not in the thread: a process that exits while a thread runs torch code aborts
        put = partial(self._put, number, parts, plain, best)
        self.last, self._started = number, time.monotonic()
        self._writing = self.folder / _name(number), self._background.submit(put), put

    def join(self) -> None:
        """Wait until the checkpoint is written. If its thread found the disk full, try again from this thread."""
        if self._writing is None:
            return
        path, running, put = self._writing
        tries = iter([running.result])
        try:
            self.retry(path, lambda: next(tries, put)())
        finally:
            if running.done():  # false after a second SIGINT
                self._writing = None

    def close(self) -> None:
        """Wait until the thread is idle, and ignore its errors."""
        if self._writing is not None:
            wait([self._writing[1]])

    def latest(self) -> int | None:
        """Return the steps at the checkpoint that `latest` names; None if there is none. Waits for one that is being written."""
        self.close()
        name = self._pointed(LATEST)
        return None if name is None else int(name.removeprefix("step-"))

    def leave(self, after: Callable[[], None]) -> None:
        """Do not wait for a checkpoint that is being written, and let none follow; `after` is called once the thread is idle."""
        self._background.close(after)

    def write(self, number: int, state: Tree, best: bool = False) -> None:
        """Write the checkpoint after `number` steps, name it in `latest`, and remove old checkpoints.

        A checkpoint that is `best` is also named in `best`, and kept until another one is. After a crash at any moment,
        `latest` names a complete checkpoint: this one or the one before.
        """
        self.begin(number, state, best)
        self.join()

    def _put(self, number: int, parts: Sequence[bytes | memoryview], plain: Any, best: bool) -> None:
        name, begin = _name(number), time.monotonic()
        facts = {
            "format": FORMAT,
            "run": self.run,
            "steps": number,
            "files": {TENSORS: {"sha256": sha256_of(*parts), "bytes": sum(map(len, parts))}},
            "state": plain,
        }
        text = json.dumps({**facts, "checksum": checksum_of(facts)}, allow_nan=False).encode()
        self.folder.mkdir(exist_ok=True)
        sync_folder(self.folder.parent)
        self.sweep()
        if self._pointed(BEST) == name:
            (self.folder / BEST).unlink()  # it belongs to an earlier attempt at the same steps
        write_folder(self.folder / name, {TENSORS: parts, FACTS: text})
        for pointer in (BEST, LATEST) if best else (LATEST,):
            if (self.folder / pointer).is_dir() and not (self.folder / pointer).is_symlink():
                remove(self.folder / pointer)  # a folder of that name cannot be replaced by a file
            write_atomic(self.folder / pointer, f"{name} {sha256_of(text)}\n")
        size = len(text) + sum(map(len, parts))
        self._record(number, size, time.monotonic() - begin, best)
        # All stay but those before the last `config.keep`, and those that `latest` and `best` name.
        for each in _names(self.folder)[self.config.keep :]:
            if each not in (name, self._pointed(BEST)):
                os.rename(self.folder / each, self.folder / f".{each}.old")
        self.sweep()

    def _record(self, steps: int, size: int, seconds: float | None, best: bool) -> None:
        file = f"{CHECKPOINTS}/{_name(steps)}"
        self.written.append({"steps": steps, "file": file, "bytes": size, "seconds": seconds, "best": best})

    def _pointed(self, pointer: str) -> str | None:
        """Return the folder that `latest` or `best` names; None if the file is missing or damaged."""
        try:
            return _named(self.folder / pointer)[0]
        except Unusable:
            return None

    def sweep(self) -> None:
        """Remove files and folders with temporary names."""
        for path in (*self.folder.glob(".step-*"), *self.folder.glob(".*.tmp")):
            remove(path)

    def read(self, note: Callable[[str], None]) -> Checkpoint | None:
        """Return the checkpoint that `latest` names; if that is damaged, the newest valid checkpoint; None if there is none.

        `note` is told of every file that is refused, with the reason. InputError if the only valid checkpoints are of another
        format or another run.
        """
        if self.folder.is_symlink():
            raise InputError(f"{self.folder} is a link, which is not followed; replace it by the folder")
        best, latest = self.folder / BEST, self.folder / LATEST
        if os.path.lexists(best):  # reading does not depend on it
            try:
                name, digest = _named(best)
                if sha256_of(_content(self.folder / name / FACTS, _LARGEST_FACTS)) != digest:
                    raise Unusable(f"{best} names a {name} with another sha256 than the one in the folder")
            except Unusable as error:
                note(f"{error}; the next best checkpoint replaces it")
        tried: list[tuple[str, str | None]] = []
        if self.folder.is_dir():
            tried = [(name, None) for name in _names(self.folder)]
        refused, foreign, found = list[str](), "", None  # why files are not used, and what is said of a whole one
        if tried or os.path.lexists(latest):
            try:
                # again below without the sha256: if it differs, `latest` may be the damaged file
                tried.insert(0, _named(latest))
            except Unusable as error:
                refused.append(str(error))
        for name, sha256 in tried:
            try:
                found = self._verified(name, sha256)
            except Unusable as error:  # which is not kept, as its frames hold what was read
                reason, *mend = error.args
                refused.append(reason)
                if mend:
                    foreign = foreign or f"{reason}; {mend[0]}"
                continue
            self.last, folder = found.number, self.folder / name
            size = sum(path.stat().st_size for path in folder.iterdir())
            self._record(found.number, size, None, self._pointed(BEST) == name)
            break
        used = "no checkpoint verifies" if found is None else f"{name}, the newest that verifies, is used"
        for reason in dict.fromkeys(refused):
            note(f"{reason}; {used}")
        if found is None and foreign:
            raise InputError(foreign)
        return found

    def _verified(self, name: str, digest: str | None) -> Checkpoint:
        """Return the checkpoint of a folder, read and verified. Raises Unusable if it cannot be used."""
        folder = self.folder / name
        if folder.is_symlink() or not folder.is_dir():
            named = f", though {self.folder / LATEST} names it" if digest is not None else ""
            raise Unusable(f"{folder} is missing or no folder of this run{named}")
        path = folder / FACTS
        text = _content(path, _LARGEST_FACTS)
        if digest is not None and sha256_of(text) != digest:
            raise Unusable(f"{path} is not the file that {self.folder / LATEST} names, by its sha256")
        try:
            facts = json.loads(text)
            # first, because another format may have another checksum
            if isinstance(facts, dict) and facts.get("format", FORMAT) != FORMAT:
                raise Unusable(
                    f"{path} is of format {facts['format']!r}, this Esper reads format {FORMAT}",
                    "resume with the Esper that wrote it, or start a new run",
                )
            whole = isinstance(facts, dict) and facts.pop("checksum", None) == checksum_of(facts)
        except (ValueError, RecursionError):
            whole = False
        if not whole:
            raise Unusable(f"{path} is damaged, by its checksum")
        try:  # malformed facts raise many kinds of errors
            if facts["run"] != self.run:
                raise Unusable(
                    f"{path} belongs to another run, or {CONFIG} was changed since",
                    f"restore the original {CONFIG}, or start a new run",
                )
            if _name(facts["steps"]) != name:
                raise Unusable(f"{path} is that of another checkpoint, of step {facts['steps']}")
            known = facts["files"][TENSORS]
            data = _content(folder / TENSORS, _LARGEST_TENSORS)
            if sha256_of(data) != known["sha256"]:
                raise Unusable(f"{folder / TENSORS} is damaged, by its sha256")
            return Checkpoint(facts["steps"], unflatten(load(data), facts["state"]))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError, SafetensorError) as error:
            raise Unusable(f"{path} and {TENSORS} beside it do not hold a checkpoint together ({error!r})") from None


def _named(path: Path) -> tuple[str, str]:
    """Return the folder that `latest` or `best` names, and the sha256 of its state.json. Unusable if the file is not valid."""
    text = _content(path, _LARGEST_POINTER).decode("utf-8", "replace")
    said = re.fullmatch(rf"({_NAME.pattern}) ([0-9a-f]{{64}})\n", text)
    if said is None:
        raise Unusable(f"{path} names no checkpoint")
    return said[1], said[3]


def _content(path: Path, largest: int) -> bytes:
    """Return the content of a regular file, no link, of at most `largest` bytes. Raises Unusable otherwise."""
    try:
        return read_kept(path, largest, "")
    except InputError as error:
        raise Unusable(str(error).removesuffix("; ")) from None


def _name(number: int) -> str:
    return f"step-{number:06d}"


def _names(folder: Path) -> list[str]:
    """Return the names of the folders of checkpoints, newest first."""
    found = [(int(match[1]), path.name) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [name for _, name in sorted(found, reverse=True)]
