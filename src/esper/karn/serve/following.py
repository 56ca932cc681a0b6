"""The page of one run, made again when the run has gone on, and no more often than its making costs."""

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from esper.karn.reader import Tail, complete, open_run
from esper.karn.report.frame import render_content
from esper.karn.report.page import content_of
from esper.karn.run_model import RunModel
from esper.karn.serve.library import file_state
from esper.store.files import EVENTS

SHARE = 0.1  # largest share of the time in which the page of a run is made again
LEAST = 1.0  # least time between two pages of a run [seconds]
PART = 2**22  # events that are read at once, so that memory holds few rows of a long run [bytes]
KEPT = 8  # runs whose rows are kept in memory, those that were asked for last
_makers = ThreadPoolExecutor(4, "page")


class Shown(NamedTuple):
    """A page of a run."""

    version: str  # changes with the page
    status: str  # how the run stands
    content: Markup  # header and main part


class Followed:
    """A run whose rows are read once, as they come. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """InputError if `folder` is not a run folder."""
        self.run = open_run(folder)
        self._lock = threading.Lock()
        self._tail, self._model = Tail(folder / EVENTS), RunModel()
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
        """The page of what the run has written. InputError if a file is damaged."""
        with self._lock:
            version = self._state()
            if self._shown is not None and (version == self._shown.version or time.monotonic() < self._due):
                return self._shown
            self._read()  # each row once, which is not held against the next page
            start = time.monotonic()
            model = complete(self._model, self.run)
            content = render_content(content_of(model, self.run.folder.name))
            self._shown = Shown(version, model.status, content)
            self._due = start + max(LEAST, (time.monotonic() - start) / SHARE)
            return self._shown

    def page_within(self, seconds: float) -> Shown | None:
        """The page, or None if making it takes longer; it is made nevertheless. Raises as `page`."""
        try:
            return _makers.submit(self.page).result(seconds)
        except TimeoutError:
            return None

    def _read(self) -> None:
        restarts = self._tail.restarts
        while rows := self._tail.read(PART):
            if self._tail.restarts != restarts:  # a resume cut rows off, and all of them come again
                self._model, restarts = RunModel(), self._tail.restarts
            self._model.update(rows)

    def _state(self) -> str:
        return hashlib.sha256(repr(file_state(self.run.folder)).encode()).hexdigest()[:16]
