"""What all pages share: sections of sentences, tables and figures in one file that makes no request to any network."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, Template
from markupsafe import Markup

from esper.karn.report.drawing import draw
from esper.karn.report.figures import Content
from esper.leyline.distribution import installed_version
from esper.leyline.errors import InputError
from esper.leyline.text import printable
from esper.store.disk import write_atomic


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
