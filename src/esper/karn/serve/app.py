"""Answer the routes of the server, an ASGI application over runs. No text of a request becomes part of a path."""

import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from esper.karn.comparison import content_of, read_comparison
from esper.karn.reader import MEND
from esper.karn.report.frame import asset, render_content
from esper.karn.serve import pages
from esper.karn.serve.access import Door, Guard
from esper.karn.serve.library import KEPT, Followed, Library, ListedRun, Shown
from esper.leyline.intervals import plus_minus
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError, counted, system_in_words
from esper.nissa.events import decode
from esper.nissa.rows import DecisionRow, RunRow
from esper.store.disk import file_name, open_regular
from esper.store.files import CHANGES, CONFIG, CONTROLLER, ENVIRONMENT, EVENTS, MODELS, REPORT, SUMMARY

PATIENCE = 1.0  # longest wait for the report of a run before a page without it is sent, which gets it later [seconds]
MOST_COMPARED = 16  # most runs in one comparison


class RouteContext:
    """Answers the routes of the server from the runs that all routes share."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.follow = lru_cache(KEPT)(Followed)

    def folder(self, request: Request) -> Path:
        """Return the folder of the run that an address names. HTTPException (404) if there is none."""
        found = self.library.folder(request.path_params["key"])
        if found is None:
            raise HTTPException(404, "no such run")
        return found

    def runs(self, request: Request) -> Response:
        shown, query = self._runs(request), f"?{request.url.query}" if request.url.query else ""
        return pages.shell("Runs", shown.content, source=f"/content{query}", version=shown.version)

    def runs_content(self, request: Request) -> Response:
        return _newer(request, version_of(self.library.entries()), False, lambda: self._runs(request))

    def _runs(self, request: Request) -> Shown:
        query = request.query_params
        words, tags = query.get("q", ""), {tag: query.get(tag, "") for tag in pages.TAGS}
        entries = self.library.entries()
        shown = [entry for entry in entries if entry.fits(words, tags)]
        choices = [(tag, sorted({entry.tags[tag] for entry in entries} - {""})) for tag in pages.TAGS]
        every = len(shown) == len(entries)
        heading = counted(len(shown), "run") if every else f"{len(shown):,} of {len(entries):,} runs"
        if len(shown) > pages.LISTED:
            heading += f", of which the newest {pages.LISTED:,} are listed"
        nothing = "No run is here yet; one that begins appears by itself." if not entries else "No run is like that."
        chosen, said = {"words": words, **tags}, {"heading": heading, "nothing": nothing}
        content = pages.render("runs.html", entries=shown[: pages.LISTED], chosen=chosen, choices=choices, **said)
        return Shown(version_of(entries), content)

    def run(self, request: Request) -> Response:
        """Return the report of one run, which follows it."""
        folder, key = self.folder(request), request.path_params["key"]
        shown = self.follow(folder).page_within(PATIENCE)
        if shown is None:
            sentence, version = "The events of this run are being read; its report appears here.", ""
            content = pages.render("error.html", title=folder.name, sentence=sentence, role="status")
        else:
            content, version = shown.content, shown.version
        source = f"/runs/{key}/content"
        return pages.shell(folder.name, content, key=key, here="Report", source=source, version=version)

    def run_content(self, request: Request) -> Response:
        followed = self.follow(self.folder(request))
        return _newer(request, followed.version, followed.ended, followed.page)

    def compare(self, request: Request) -> Response:
        keys = list(dict.fromkeys(request.query_params.getlist("run")))
        found = [self.library.folder(key) for key in keys[: MOST_COMPARED + 1]]
        folders = [folder for folder in found if folder is not None]
        if len(folders) < len(found):
            raise HTTPException(404, "no such run")
        if not 2 <= len(folders) <= MOST_COMPARED:
            raise InputError(f"{counted(len(folders), 'run')} chosen; choose 2 to {MOST_COMPARED} in the list of runs")
        return pages.shell("Comparison", render_content(content_of(read_comparison(folders))))

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
        kept = {field: value for field, value in query.items() if field in FIELDS and value}

        def address(place: int) -> str:
            return f"?{urlencode(kept | {'start': str(place)})}"

        end = start + len(rows)
        content = pages.render(
            "decisions.html",
            name=folder.name,
            slots=head.slots if isinstance(head, RunRow) else (),
            operations=OPERATIONS,
            carried_out=CARRIED_OUT.items(),
            chosen=chosen,
            rows=rows,
            heading=counted(count, "decision"),
            caption=f"Decisions {start + 1:,} to {end:,} of {count:,}, in the order of the events",
            nothing="No decision is like that. Decisions are written with telemetry.level step or debug.",
            download=f"/runs/{key}/decisions.jsonl?{urlencode(kept)}",
            earlier=address(max(start - pages.PART, 0)) if start else None,
            later=address(end) if end < count else None,
            measured=plus_minus,
        )
        return pages.shell(f"Decisions of {folder.name}", content, key=key, here="Decisions")

    def decision_lines(self, request: Request) -> Response:
        """Return the same decisions, as the lines of the events."""
        folder, chosen = self.folder(request), read_filter(request.query_params)
        lines = (line for line, _ in decisions(folder, chosen))
        selected = filled(lambda file: file.writelines(lines))  # a damaged line is said before the download
        return _download(*selected, f"{file_name(folder.name)}-decisions.jsonl", FILES[EVENTS])

    def files(self, request: Request) -> Response:
        folder, key = self.folder(request), request.path_params["key"]
        there = {"files": files_of(folder), "archives": list(archives_of(folder))}
        content = pages.render("files.html", name=folder.name, key=key, **there)
        return pages.shell(f"Files of {folder.name}", content, key=key, here="Files")

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
        shown = f"{file_name(folder.name)}-{file_name(known[name].name)}.zip"
        return _download(*archive(known[name]), shown, "application/zip")


def style_or_script(request: Request) -> Response:
    """Return a file that pages load."""
    name = request.path_params["name"]
    if name not in pages.ASSETS:
        raise HTTPException(404, "no such file")
    return Response(asset(name), media_type=pages.ASSETS[name])


def create_app(library: Library, door: Door) -> ASGIApp:
    """Return the application. `server.Server` adds the headers of every answer."""
    site = RouteContext(library)
    routes: Sequence[tuple[str, Callable[[Request], Any]]] = (
        ("/", site.runs),
        ("/content", site.runs_content),
        ("/compare", site.compare),
        ("/assets/{name}", style_or_script),
        ("/runs/{key}", site.run),
        ("/runs/{key}/content", site.run_content),
        ("/runs/{key}/decisions", site.decisions),
        ("/runs/{key}/decisions.jsonl", site.decision_lines),
        ("/runs/{key}/files", site.files),
        ("/runs/{key}/files/{name}", site.file),
        ("/runs/{key}/archives/{name}", site.archive),
    )
    app = Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in routes],
        exception_handlers=dict.fromkeys((HTTPException, InputError, OSError, Exception), _explained),
    )
    app.router.redirect_slashes = False
    return Guard(app, door)


def version_of(entries: Sequence[ListedRun]) -> str:
    """Return a text that changes with the list of runs."""
    return f"{hash(tuple(entries)) & 0xFFFFFFFFFFFFFFFF:016x}"


def _newer(request: Request, version: str, ended: bool, page: Callable[[], Shown]) -> Response:
    """Return the content of a page with its version, or nothing if the page that asks has it; and whether none will follow."""
    if request.headers.get("X-Version") == version:
        return Response(status_code=204, headers={"X-Ended": "1"} if ended else {})
    shown = page()
    return HTMLResponse(shown.content, headers={"X-Version": shown.version})


def _download(file: IO[bytes], size: int, name: str, media_type: str) -> Response:
    """Return the first `size` bytes of a file, which may grow meanwhile, as a download."""
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(size)}
    return StreamingResponse(chunks(file, size), media_type=media_type, headers=headers)


def _explained(request: Request, error: Exception) -> Response:
    match error:
        case HTTPException(detail=detail, status_code=status):
            return pages.error_page("Not here", f"{detail}; the list of runs has all that there are.", status)
        case InputError():
            return pages.error_page("This cannot be shown", str(error), 422)
        case OSError():
            return pages.error_page("This cannot be read", str(error), 422)
    sentence = f"The page could not be made ({type(error).__name__}); the terminal of esper serve has the details."
    return pages.error_page("This failed", sentence, 500)


CARRIED_OUT = {"yes": True, "no": False}
OPERATIONS = tuple(op.name for op in Op if op != Op.WAIT)
FIELDS = ("env", "slot", "op", "carried_out", "text")
"""The fields of the form that selects decisions: of their rows, and a text in the reason of the decision or of its refusal."""


def read_filter(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that a form selects decisions by, without fields that are empty. InputError if a value is unknown."""
    chosen: dict[str, Any] = {field: query[field] for field in FIELDS if query.get(field)}
    env, op, carried_out = (chosen.get(field, "") for field in ("env", "op", "carried_out"))
    if env and not (env.isascii() and env.isdigit() and len(env) < 10):
        raise InputError(f"env is {env[:40]!r}; give the number of an environment")
    if op and op not in OPERATIONS:
        raise InputError(f"op is {op[:40]!r}; give one of {', '.join(OPERATIONS)}")
    if carried_out and carried_out not in CARRIED_OUT:
        raise InputError(f"carried_out is {carried_out[:40]!r}; give one of {', '.join(CARRIED_OUT)}")
    return (
        chosen | ({"env": int(env)} if env else {}) | ({"carried_out": CARRIED_OUT[carried_out]} if carried_out else {})
    )


def decisions(folder: Path, chosen: Mapping[str, Any]) -> Iterator[tuple[bytes, DecisionRow]]:
    """Yield the lines of events.jsonl that hold the selected decisions, with their rows. InputError if the file is damaged.

    Only lines of decisions are decoded, and nothing is kept.
    """
    path, text = folder / EVENTS, chosen.get("text", "").casefold()
    exact = {field: value for field, value in chosen.items() if field != "text"}
    if not path.exists():
        return
    with open_regular(path, MEND) as file:
        for number, line in enumerate(file, 1):
            if b'"decision"' not in line or not line.endswith(b"\n"):
                continue
            try:
                row = decode(line)
            except InputError as error:
                raise InputError(f"line {number} of {path}: {error}") from None
            if not isinstance(row, DecisionRow) or any(getattr(row, field) != exact[field] for field in exact):
                continue
            if text in f"{row.why or ''}\n{row.refusal or ''}".casefold():
                yield line, row


FILES = {
    CONFIG: "application/yaml",
    SUMMARY: "application/json",
    EVENTS: "application/x-ndjson",
    ENVIRONMENT: "application/json",
    CHANGES: "application/json",
    REPORT: "text/html; charset=utf-8",
}
"""The files of a run folder that can be downloaded, with their media types."""
CHUNK = 2**18  # bytes


def files_of(folder: Path) -> dict[str, int]:
    """Return the files of a run folder that can be downloaded and are there, with their sizes [bytes]; links are left out."""
    found = {}
    for name in FILES:
        with suppress(OSError):
            state = os.lstat(folder / name)
            if stat.S_ISREG(state.st_mode):
                found[name] = state.st_size
    return found


def archives_of(folder: Path) -> dict[str, Path]:
    """Return the folders of networks, and of a controller, by the name of their archive; links are left out."""
    models = folder / MODELS
    paths = [*(sorted(models.iterdir()) if _is_folder(models) else ()), folder / CONTROLLER]
    return {f"{path.name}.zip": path for path in paths if _is_folder(path)}


def chunks(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file, which may grow meanwhile; the file is closed at the end."""
    with file:
        while size > 0 and (data := file.read(min(CHUNK, size))):
            size -= len(data)
            yield data


def filled(fill: Callable[[IO[bytes]], None]) -> tuple[IO[bytes], int]:
    """Return a file without a name that `fill` has written, from its beginning on, and its size; `chunks` closes it."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        fill(file)
    except BaseException:
        file.close()
        raise
    size = file.tell()
    file.seek(0)
    return file, size


def archive(folder: Path) -> tuple[IO[bytes], int]:
    """Return a zip archive of the files in a folder of `archives_of`, in a file without a name, and its size.

    Weights are stored and not compressed, because they do not become smaller. InputError if the folder is gone, OSError if a file
    cannot be read.
    """

    def pack(packed: IO[bytes]) -> None:
        # The folder is held open, so that no link can take its place while its files are read.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        with system_in_words(str(folder), MEND):
            parent = os.open(folder.parent, flags)
            try:
                opened = os.open(folder.name, flags, dir_fd=parent)
            finally:
                os.close(parent)
        try:
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as target:
                for name in sorted(os.listdir(opened)):
                    if not stat.S_ISREG(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode):
                        continue
                    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=opened)
                    inside = f"{folder.name}/{name}"
                    with os.fdopen(descriptor, "rb") as file, target.open(inside, "w", force_zip64=True) as entry:
                        shutil.copyfileobj(file, entry, CHUNK)
        finally:
            os.close(opened)

    return filled(pack)


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
