"""Find and follow the runs below the folders that the user named; the browser knows them by opaque names."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from esper.karn.reader import Status, Tail, open_run
from esper.karn.report.frame import render_content
from esper.karn.report.page import content_of
from esper.karn.run_model import RunModel
from esper.leyline.messages import InputError, first_line
from esper.nissa.rows import RunRow
from esper.store.files import CONFIG, ENVIRONMENT, EVENTS, SUMMARY, is_run
from esper.store.lock import LOCK, lives, owner_of

SHARE = 0.1  # largest share of the time in which the page of a run is made again
LEAST = 1.0  # least time between two pages of a run [seconds]
PART = 2**22  # events that are read at once, so that memory holds few rows of a long run [bytes]
KEPT = 8  # runs whose rows are kept in memory, those that were asked for last
_makers = ThreadPoolExecutor(4, "page")
DEPTH = 4  # levels of folders below a named one in which runs are looked for
KNOWN = 2**14  # entries of runs that are kept, each with the state of the files that it was read from
LOOK_EVERY = 2.0  # least time between two searches for runs [seconds]


class ListedRun(NamedTuple):
    """Describes a run in the list."""

    key: str  # opaque name of the run in addresses
    name: str  # path of the folder below the folder that the user named
    folder: Path
    task: str  # its task, several with commas between them; empty if that is unknown
    controller: str  # name of the controller; empty if that is unknown
    status: Status | None  # how the run stands; None if the folder is damaged
    envs: int | None  # environments
    began: float  # when the first row was written, or else the config [seconds since 1970]
    error: str | None  # what is wrong with the folder

    @property
    def tags(self) -> dict[str, str]:
        """What the list can be filtered by."""
        return {"task": self.task, "controller": self.controller, "status": self.status or "damaged"}

    def fits(self, words: str, tags: Mapping[str, str]) -> bool:
        """Return whether every word occurs in the name or a tag, in any case, and its tags are these; an empty text fits all."""
        text = "\n".join((self.name, *self.tags.values())).casefold()
        found = all(word in text for word in words.casefold().split())
        return found and all(value in ("", self.tags[tag]) for tag, value in tags.items())


class Library:
    """Finds the runs below some folders, anew whenever the list is asked for. Safe to use from several threads.

    A link below a named folder is not followed, also if it has taken the place of a run since the last search.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                raise InputError(
                    f"{root} is not a folder; name run folders, or folders that hold some, as in `esper serve runs`"
                )
        self.roots = [root.resolve() for root in roots]
        self._lock = threading.Lock()
        self._found: dict[str, tuple[str, Path]] = {}  # name and folder by key
        self._entry = lru_cache(KNOWN)(_entry)
        self._looked = float("-inf")

    def entries(self) -> list[ListedRun]:
        """Return all runs, the newest first."""
        with self._lock:
            self._look()
            there = [(key, *found) for key, found in self._found.items() if _is_there(found[1])]
            found = [self._entry(key, name, folder, file_state(folder)) for key, name, folder in there]
        return sorted(found, key=lambda entry: (-entry.began, entry.name))

    def folder(self, key: str) -> Path | None:
        """Return the folder of a run by its opaque name; None if there is no such run, or no more, or a link in its place."""
        with self._lock:
            if key not in self._found:
                self._look()
            found = self._found.get(key)
        return found[1] if found is not None and _is_there(found[1]) else None

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        found = ((root, folder) for root in self.roots for folder in _runs_below(root))
        self._found = {
            key_of(folder): (folder.name if folder == root else str(folder.relative_to(root)), folder)
            for root, folder in found
        }


def _entry(key: str, name: str, folder: Path, state: object) -> ListedRun:
    """Return the entry of a folder whose files have a state, from its config, its summary and the first row of its events."""
    try:
        run = open_run(folder)
        began = (folder / CONFIG).stat().st_mtime
        config, status = run.config, run.status
        head = next(run.rows(), None)
        task = ", ".join(map(str, config.get("tasks") or (config.get("task"),)))
        controller = str(config.get("controller"))
        envs = config.get("envs") if isinstance(config.get("envs"), int) else None
        if isinstance(head, RunRow):
            controller, envs, began = head.controller, head.envs, head.time
        return ListedRun(key, name, folder, task, controller, status, envs, began, None)
    except (InputError, OSError) as error:
        began = 0.0
        with suppress(OSError):
            began = folder.stat().st_mtime
        return ListedRun(key, name, folder, "", "", None, None, began, first_line(error))


def key_of(folder: Path) -> str:
    """Return the opaque name of a folder in addresses, the same whenever the folder is served."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:20]


def file_state(folder: Path) -> tuple[object, ...]:
    """Return what changes when a file of a run or its process does, found without reading rows."""
    stats = []
    for name in (EVENTS, SUMMARY, CONFIG, ENVIRONMENT):
        with suppress(OSError):
            found = os.lstat(folder / name)
            stats.append((name, found.st_ino, found.st_size, found.st_mtime_ns))
    owner = owner_of(folder / LOCK)
    return (*stats, owner is not None and lives(owner))


def _runs_below(root: Path) -> Iterator[Path]:
    """Yield the run folders at a folder or below it, without following links. A folder that cannot be read has none."""
    for place, inside, _ in os.walk(root):
        folder = Path(place)
        found = is_run(folder)
        if found:
            yield folder
        inside.sort()
        if found or len(folder.relative_to(root).parts) == DEPTH:
            inside.clear()  # the walk goes on with what is left in it


def _is_there(folder: Path) -> bool:
    """Return whether a run that was found is still there, and no folder on the way to it has become a link."""
    return os.path.realpath(folder) == str(folder) and is_run(folder)


class Shown(NamedTuple):
    """Holds a page that changes."""

    version: str  # changes with the page
    content: str  # header and main part
    status: str = "running"  # how the run stands


class Followed:
    """Follows a run: reads its rows once, as they come, and makes its page. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.run = open_run(folder)
        self._lock = threading.Lock()
        self._tail = Tail(folder / EVENTS, self._begin_model)
        self._begin_model()
        self._shown: Shown | None = None
        self._due = float("-inf")  # before this time the last page is shown again [seconds of the monotonic clock]

    @property
    def version(self) -> str:
        """The version of the page that `page` would return, found without making it."""
        shown, due = self._shown, self._due
        return shown.version if shown is not None and time.monotonic() < due else self._state()

    @property
    def ended(self) -> bool:
        """Whether the last page shows the run as it stands at its end, so that no other page will follow."""
        shown = self._shown
        return shown is not None and shown.status != "running" and shown.version == self._state()

    def page(self) -> Shown:
        """Return the page of what the run has written. InputError if a file is damaged."""
        with self._lock:
            version = self._state()
            if self._shown is not None and (version == self._shown.version or time.monotonic() < self._due):
                return self._shown
            for rows in self._tail.parts(PART):  # each row once, which is not held against the next page
                self._model.update(rows)
            start = time.monotonic()
            model = self._model.complete(self.run)
            content = render_content(content_of(model, self.run.folder.name))
            self._shown = Shown(version, content, model.status)
            self._due = start + max(LEAST, (time.monotonic() - start) / SHARE)
            return self._shown

    def page_within(self, seconds: float) -> Shown | None:
        """Return the page, or None if making it takes longer; it is made nevertheless. Raises as `page`."""
        try:
            return _makers.submit(self.page).result(seconds)
        except TimeoutError:
            return None

    def _begin_model(self) -> None:
        self._model = RunModel()

    def _state(self) -> str:
        return hashlib.sha256(repr(file_state(self.run.folder)).encode()).hexdigest()[:16]
