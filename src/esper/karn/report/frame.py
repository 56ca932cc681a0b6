"""Frame pages: sections of sentences, tables and figures in one file without requests, or the figures as pictures."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader
from markupsafe import Markup

from esper.karn.report.drawing import LASTING, Figure, draw, paint
from esper.karn.terminal.console import Table
from esper.leyline.config.input import dotted
from esper.leyline.distribution import installed_version
from esper.leyline.messages import InputError, printable, system_in_words
from esper.store.disk import write_atomic

FORMATS = ("png", "pdf", "svg")


class ReportSection(NamedTuple):
    """Holds a part of the page under its own heading."""

    key: str  # anchor
    name: str  # heading
    lines: Sequence[str] = ()  # sentences at the beginning
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()  # drawn below the tables
    notes: Sequence[str] = ()  # sentences at the end
    papers: Sequence[Figure] = ()  # drawn as pictures alone, because the page shows the same with a slider


class Content(NamedTuple):
    """Holds what a page shows, without its style and scripts."""

    title: str  # first heading
    heading: str  # line below it
    sections: Sequence[ReportSection]
    data: Markup | None = None  # JSON of the slider in the section "growth"; None without it
    missing: Sequence[str] = ()  # what the page leaves out because the run has none of it, in sentences


def render(content: Content) -> str:
    """Return the text of a self-contained page."""
    return TEMPLATES.get_template("report.html").render(
        **content._asdict(),
        css=Markup(asset("report.css")),
        script=Markup(asset("report.js")),
        version=installed_version() or "from its sources",
    )


def render_content(content: Content) -> Markup:
    """Return the header and the main part of a page, for a page that brings its own style and scripts."""
    return Markup(TEMPLATES.get_template("content.html").render(**content._asdict()))


def write_page(path: Path, content: Content) -> Path:
    """Write a page and return its path. InputError if that is impossible."""
    with system_in_words(f"the page {path} cannot be written", "name another file"):
        write_atomic(path, render(content))
    return path


@cache
def asset(name: str) -> str:
    """Return the text of a file of the reports or of the server: a template, a style or a script."""
    places = (files("esper.karn") / folder / name for folder in ("report", "serve"))
    return next(place for place in places if place.is_file()).read_text(encoding="utf-8")


def _shown(value: object) -> object:
    """Return what a template writes for a value: a text that controls no terminal and hides nothing, unless it is markup."""
    return value if isinstance(value, Markup) else printable(value)


TEMPLATES = Environment(autoescape=True, trim_blocks=True, loader=FunctionLoader(asset), finalize=_shown)
TEMPLATES.filters["draw"] = draw
TEMPLATES.globals["stages"] = LASTING


def flat_settings(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a tree of settings as rows of a dotted key and a value."""
    return [(key, json.dumps(value, ensure_ascii=False, default=str)) for key, value in dotted(values)]


class Pictures(NamedTuple):
    """Lists the figures that were drawn and those that were not.

    Attributes:
        paths (list of Path): the files that were written, in the order of the page
        absent (sentences): figures that there are no data for, with the reason
    """

    paths: list[Path]
    absent: list[str]


def write_pictures(content: Content, folder: Path, form: str = "png") -> Pictures:
    """Write every figure of a page to a file that is named after its place, section and name, such as `03-curves-loss.png`.

    InputError if the folder cannot be written, or if `form` is not one of `FORMATS`.
    """
    if form not in FORMATS:
        raise InputError(f"unknown format of pictures {form!r}; choose one of {', '.join(FORMATS)}")
    paths: list[Path] = []
    absent = list(content.missing)
    figures = [(section, figure) for section in content.sections for figure in (*section.figures, *section.papers)]
    with system_in_words(f"cannot write pictures to {folder}", "name another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for section, figure in figures:
            if figure.absent is not None:
                absent.append(f"{section.name}, {figure.name}: {figure.absent}")
                continue
            stem = re.sub(r"[^a-z0-9]+", "-", figure.name.split(":")[0].lower()).strip("-")[:48] or "figure"
            path = folder / f"{len(paths) + 1:02}-{section.key}-{stem}.{form}"
            write_atomic(path, paint(figure, form))
            paths.append(path)
    return Pictures(paths, absent)
