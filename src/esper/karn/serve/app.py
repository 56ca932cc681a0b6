"""The routes of the server: an ASGI application over the runs of a library."""

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from esper.karn.comparison import content_of, read_comparison
from esper.karn.reader import MEND
from esper.karn.report.frame import render_content
from esper.karn.serve import pages
from esper.karn.serve.access import Door, Guard
from esper.karn.serve.contents import (
    FATES,
    FILES,
    OPERATIONS,
    Filter,
    archive,
    archives_of,
    chunks,
    decisions,
    files_of,
    read_filter,
)
from esper.karn.serve.library import KEPT, Followed, Library, ListedRun, Selection
from esper.leyline.errors import InputError
from esper.leyline.text import counted, printable
from esper.nissa.rows import DecisionRow, RunRow
from esper.store.disk import file_name, open_regular
from esper.store.files import EVENTS

LOOK = 0.5  # pause between two looks at the files of a run that is followed [seconds]
SILENCE = 15.0
"""Longest time without a word to a page that follows [seconds]; proxies close a connection that is silent for long."""
PATIENCE = 1.0  # longest wait for the report of a run before a page without it is sent, which gets it later [seconds]
MOST_COMPARED = 16  # most runs in one comparison


class RouteContext:
    """What the routes share.

    library: the runs. stop: set when the server ends, so that pages that follow a run do not hold it up.
    """

    def __init__(self, library: Library, stop: threading.Event) -> None:
        self.library, self.stop = library, stop
        self.follow = lru_cache(KEPT)(Followed)

    def folder(self, request: Request) -> Path:
        """The folder of the run that an address names. HTTPException (404) if there is none."""
        found = self.library.folder(request.path_params["key"])
        if found is None:
            raise HTTPException(404, "no such run")
        return found

    def runs(self, request: Request) -> Response:
        content, version = self._runs(request)
        query = f"?{request.url.query}" if request.url.query else ""
        return pages.shell("Runs", content, live=("/live", f"/content{query}", version))

    def runs_content(self, request: Request) -> Response:
        content, version = self._runs(request)
        return HTMLResponse(content, headers={"X-Version": version})

    def _runs(self, request: Request) -> tuple[str, str]:
        query = request.query_params
        chosen = Selection(query.get("q", ""), *(query.get(tag, "") for tag in pages.TAGS))
        entries = self.library.entries()
        shown = [entry for entry in entries if chosen.accepts(entry)]
        read = {"task": lambda e: e.task, "controller": lambda e: e.controller, "status": lambda e: e.state}
        choices = [(tag, sorted({read[tag](entry) for entry in entries} - {""})) for tag in pages.TAGS]
        every = len(shown) == len(entries)
        heading = counted(len(shown), "run") if every else f"{len(shown):,} of {len(entries):,} runs"
        if len(shown) > pages.LISTED:
            heading += f", of which the newest {pages.LISTED:,} are listed"
        nothing = "No run is here yet; one that begins appears by itself." if not entries else "No run is like that."
        words = {"heading": heading, "nothing": nothing}
        listed = shown[: pages.LISTED]
        content = pages.render("runs.html", entries=listed, chosen=chosen._asdict(), choices=choices, **words)
        return content, version_of(entries)

    async def runs_live(self, request: Request) -> Response:
        return _events(request, self._changes(lambda: (version_of(self.library.entries()), False)))

    def run(self, request: Request) -> Response:
        """The report of one run, which follows it."""
        folder, key = self.folder(request), request.path_params["key"]
        shown = self.follow(folder).page_within(PATIENCE)
        if shown is None:
            sentence, version = "The events of this run are being read; its report appears here.", ""
            content = pages.render("error.html", title=printable(folder.name), sentence=sentence, role="status")
        else:
            content, version = shown.content, shown.version
        live = (f"/runs/{key}/live", f"/runs/{key}/content", version)
        return pages.shell(folder.name, content, links=pages.run_links(key), here="Report", live=live)

    def run_content(self, request: Request) -> Response:
        shown = self.follow(self.folder(request)).page()
        return HTMLResponse(shown.content, headers={"X-Version": shown.version})

    async def run_live(self, request: Request) -> Response:
        """Events that say that the report of a run has changed, until the run has ended."""
        followed = await run_in_threadpool(lambda: self.follow(self.folder(request)))

        def look() -> tuple[str, bool]:
            if self.library.folder(request.path_params["key"]) is None:
                return "gone", True  # the page asks for its content, and learns that there is none
            return followed.version, followed.ended

        return _events(request, self._changes(look))

    async def _changes(self, look: Callable[[], tuple[str, bool]]) -> AsyncIterator[str]:
        """Server-sent events: `changed` with each new version, and `ended` after the last."""
        sent, silent = None, 0.0
        while not self.stop.is_set():
            version, ended = await run_in_threadpool(look)
            if version != sent:
                yield f"event: changed\ndata: {version}\n\n"
                sent, silent = version, 0.0
            if ended:
                yield "event: ended\ndata: \n\n"
                return
            if silent >= SILENCE:
                yield ": still here\n\n"
                silent = 0.0
            await asyncio.sleep(LOOK)
            silent += LOOK

    def compare(self, request: Request) -> Response:
        keys = list(dict.fromkeys(request.query_params.getlist("run")))
        found = [self.library.folder(key) for key in keys[: MOST_COMPARED + 1]]
        folders = [folder for folder in found if folder is not None]
        if len(folders) < len(found):
            raise HTTPException(404, "no such run")
        if not 2 <= len(folders) <= MOST_COMPARED:
            raise InputError(f"{counted(len(folders), 'run')} chosen; choose 2 to {MOST_COMPARED} in the list of runs")
        content = render_content(content_of(read_comparison(folders)))
        return pages.shell("Comparison", content)

    def decisions(self, request: Request) -> Response:
        folder, key, query = self.folder(request), request.path_params["key"], request.query_params
        chosen, text = read_filter(query), query.get("start", "")
        if text and not (text.isascii() and text.isdigit() and len(text) < 13):
            raise InputError(f"start is {text[:40]!r}; give the place of the first decision that is shown")
        start = int(text or 0)
        count, rows = 0, list[DecisionRow]()
        for _, row in decisions(folder, chosen):
            if start <= count < start + pages.PART:
                rows.append(row)
            count += 1
        head = next(iter(self.follow(folder).run.rows("run")), None)
        kept = {field: value for field, value in query.items() if field in Filter._fields and value}

        def address(place: int) -> str:
            return f"?{urlencode(kept | {'start': str(place)})}"

        end = start + len(rows)
        content = pages.render(
            "decisions.html",
            name=folder.name,
            slots=head.slots if isinstance(head, RunRow) else (),
            operations=OPERATIONS,
            fates=FATES.items(),
            chosen=chosen,
            rows=rows,
            heading=counted(count, "decision"),
            caption=f"Decisions {start + 1:,} to {end:,} of {count:,}, in the order of the events",
            nothing="No decision is like that. Decisions are written with telemetry.level step or debug.",
            download=f"/runs/{key}/decisions.jsonl?{urlencode(kept)}",
            earlier=address(max(start - pages.PART, 0)) if start else None,
            later=address(end) if end < count else None,
            measured=pages.measured,
        )
        return pages.shell(f"Decisions of {folder.name}", content, links=pages.run_links(key), here="Decisions")

    def decision_lines(self, request: Request) -> Response:
        """The same decisions, as the lines of the events."""
        folder, chosen = self.folder(request), read_filter(request.query_params)
        selected = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `chunks`; a damaged line is said before it)
        try:
            selected.writelines(line for line, _ in decisions(folder, chosen))
        except BaseException:
            selected.close()
            raise
        size = selected.tell()
        selected.seek(0)
        return _download(selected, size, f"{file_name(folder.name)}-decisions.jsonl", FILES[EVENTS])

    def files(self, request: Request) -> Response:
        folder, key = self.folder(request), request.path_params["key"]
        there = {"files": files_of(folder), "archives": list(archives_of(folder))}
        content = pages.render("files.html", name=folder.name, key=key, **there)
        return pages.shell(f"Files of {folder.name}", content, links=pages.run_links(key), here="Files")

    def file(self, request: Request) -> Response:
        folder, name = self.folder(request), request.path_params["name"]
        if name not in files_of(folder):
            raise HTTPException(404, "no such file")
        opened = open_regular(folder / name, MEND)
        return _download(opened, os.fstat(opened.fileno()).st_size, f"{file_name(folder.name)}-{name}", FILES[name])

    def archive(self, request: Request) -> Response:
        folder = self.folder(request)
        known = archives_of(folder)
        name = request.path_params["name"]
        if name not in known:
            raise HTTPException(404, "no such network")
        packed, size = archive(known[name])
        shown = f"{file_name(folder.name)}-{file_name(known[name].name)}.zip"
        return _download(packed, size, shown, "application/zip")


def asset(request: Request) -> Response:
    """A style or a script."""
    name = request.path_params["name"]
    if name not in pages.ASSETS:
        raise HTTPException(404, "no such file")
    return Response(pages.asset(name), media_type=pages.ASSETS[name])


def create_app(library: Library, door: Door, stop: threading.Event) -> ASGIApp:
    """The application. `stop` ends the events of pages that follow a run. `server.Server` adds the headers of every answer."""
    site = RouteContext(library, stop)
    routes: Sequence[tuple[str, Callable[[Request], Any]]] = (
        ("/", site.runs),
        ("/content", site.runs_content),
        ("/live", site.runs_live),
        ("/compare", site.compare),
        ("/assets/{name}", asset),
        ("/runs/{key}", site.run),
        ("/runs/{key}/content", site.run_content),
        ("/runs/{key}/live", site.run_live),
        ("/runs/{key}/decisions", site.decisions),
        ("/runs/{key}/decisions.jsonl", site.decision_lines),
        ("/runs/{key}/files", site.files),
        ("/runs/{key}/files/{name}", site.file),
        ("/runs/{key}/archives/{name}", site.archive),
    )
    app = Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes],
        exception_handlers={
            HTTPException: _not_found,
            InputError: partial(_refused, "This cannot be shown"),
            OSError: partial(_refused, "This cannot be read"),
            Exception: _failed,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, door)


def version_of(entries: Sequence[ListedRun]) -> str:
    """A text that changes with the list of runs."""
    return f"{hash(tuple(entries)) & 0xFFFFFFFFFFFFFFFF:016x}"


def _events(request: Request, content: AsyncIterator[str]) -> Response:
    """An answer of server-sent events; only its headers where no more is asked for, because the events do not end."""
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    return StreamingResponse(content, media_type="text/event-stream")


def _download(file: IO[bytes], size: int, name: str, media_type: str) -> Response:
    """The first `size` bytes of a file, which may grow meanwhile, as a download."""
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(size)}
    return StreamingResponse(chunks(file, size), media_type=media_type, headers=headers)


def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return pages.error_page("Not here", f"{error.detail}; the list of runs has all that there are.", error.status_code)


def _refused(title: str, request: Request, error: Exception) -> Response:
    return pages.error_page(title, str(error), 422)


def _failed(request: Request, error: Exception) -> Response:
    sentence = f"The page could not be made ({type(error).__name__}); the terminal of esper serve has the details."
    return pages.error_page("This failed", sentence, 500)
