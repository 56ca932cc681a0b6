"""What all pages share: sections of sentences, tables and figures in one file that makes no request to any network."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, Template
from markupsafe import Markup
from rich.table import Table as RichTable

from esper.karn.report.figures import Figure
from esper.karn.report.svg import draw
from esper.leyline.distribution import installed_version
from esper.leyline.errors import InputError
from esper.leyline.text import printable
from esper.store.disk import write_atomic


class Table(NamedTuple):
    """A table of a section; the first cell of a row is its name, and `texts` are the columns of words, which may wrap."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = ()


def table_of(caption: str, table: RichTable) -> Table:
    """A table that is printed elsewhere, with its header and cells as they are."""
    columns = [printable(str(column.header)) for column in table.columns]
    cells = [[printable(str(cell)) for cell in column.cells] for column in table.columns]
    return Table(caption, columns, list(zip(*cells, strict=True)))


class Section(NamedTuple):
    """A part of the page under its own heading.

    Attributes:
        key (str): anchor
        name (str): heading
        lines (sentences): plain text at the beginning
        tables (list of Table): tables
        figures (list of Figure): drawn below the tables
        extra (Markup): what follows them
        notes (sentences): plain text at the end
        papers (list of Figure): figures that are drawn as pictures alone, because the page shows the same with a slider
    """

    key: str
    name: str
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    extra: Markup = Markup()
    notes: Sequence[str] = ()
    papers: Sequence[Figure] = ()


class Content(NamedTuple):
    """What a page shows, without its style and scripts.

    Attributes:
        title (str): first heading
        heading (str): line below it
        sections (list of Section): parts
        data (Markup or None): JSON of the slider in the section "growth"; None without it
        last_step (int): last place of the slider
        missing (sentences): what the page leaves out because the run has none of it
    """

    title: str
    heading: str
    sections: Sequence[Section]
    data: Markup | None = None
    last_step: int = 0
    missing: Sequence[str] = ()


def render(content: Content) -> str:
    """The text of a self-contained page."""
    rendered: str = _template("report.html").render(
        **_named(content),
        css=Markup(asset("report.css")),
        script=Markup(asset("report.js")),
        version=installed_version() or "from its sources",
    )
    return rendered


def render_content(content: Content) -> Markup:
    """The header and the main part of a page, for a page that brings its own style and scripts."""
    return Markup(_template("content.html").render(**_named(content)))


def _named(content: Content) -> dict[str, Any]:
    return {**content._asdict(), "title": printable(content.title), "draw": draw}


def write_page(path: Path, content: str) -> Path:
    """Write a page and return its path. InputError if that is impossible."""
    try:
        write_atomic(path, content.encode())
    except OSError as error:
        raise InputError(f"the page {path} cannot be written: {error.strerror}; name another file") from None
    return path


@cache
def asset(name: str) -> str:
    """The text of a file of this package: a template, the style or the script."""
    return (files("esper.karn.report") / name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Template:
    return Environment(autoescape=True, trim_blocks=True, loader=FunctionLoader(asset)).get_template(name)


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A tree of settings as rows of a dotted key and a value."""
    rows = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += flat_settings(value, f"{prefix}{key}.")
        else:
            rows.append((printable(f"{prefix}{key}"), printable(json.dumps(value, ensure_ascii=False, default=str))))
    return rows
