"""What all pages share: sections of sentences, tables and figures in one file that makes no request to any network."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

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


class Section(NamedTuple):
    """A part of the page under its own heading.

    Attributes:
        key (str): anchor
        name (str): heading
        lines (sentences): plain text at the beginning
        tables (list of Table): tables
        figures (list of Markup): SVG with its legend
        extra (Markup): what follows them
        notes (sentences): plain text at the end
    """

    key: str
    name: str
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Markup] = ()
    extra: Markup = Markup()
    notes: Sequence[str] = ()


def render(
    title: str, heading: str, sections: Sequence[Section], *, data: Markup | None = None, last_step: int = 0
) -> str:
    """The text of a page. `data` is the JSON of the slider in the section "growth", whose last place is `last_step`."""
    rendered: str = _template().render(
        title=printable(title),
        heading=heading,
        sections=sections,
        css=Markup(_asset("report.css")),
        script=Markup(_asset("report.js")),
        data=data,
        last_step=last_step,
        version=installed_version() or "from its sources",
    )
    return rendered


def write_page(path: Path, content: str) -> Path:
    """Write a page and return its path. InputError if that is impossible."""
    try:
        write_atomic(path, content.encode())
    except OSError as error:
        raise InputError(f"the page {path} cannot be written: {error.strerror}; name another file") from None
    return path


@cache
def _asset(name: str) -> str:
    return (files("esper.karn.report") / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    return Environment(autoescape=True, trim_blocks=True).from_string(_asset("report.html"))


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A tree of settings as rows of a dotted key and a value."""
    rows = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += flat_settings(value, f"{prefix}{key}.")
        else:
            rows.append((printable(f"{prefix}{key}"), printable(json.dumps(value, ensure_ascii=False, default=str))))
    return rows
