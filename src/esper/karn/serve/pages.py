"""Write the pages of the server as HTML. Every text from a run is escaped, and no page has a style or a script of its own."""

import time

from markupsafe import Markup
from starlette.responses import HTMLResponse

from esper.karn.report.frame import TEMPLATES

ASSETS = {
    "report.css": "text/css",
    "report.js": "text/javascript",
    "serve.css": "text/css",
    "serve.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
"""The files that pages load, with their media types."""
LISTED = 1000  # most runs in the list
PART = 200  # decisions on one page
TAGS = ("task", "controller", "status")


def shell(title: str, content: str, status: int = 200, **known: str) -> HTMLResponse:
    """Return a whole page around its content.

    known: of a run's page, the `key` of the run and which page is `here`. Of one that follows runs, the address `source` that it
    asks, and its `version`.
    """
    return HTMLResponse(render("shell.html", title=title, content=Markup(content), **known), status)


def login_page(status: int = 200, *, wrong: bool = False) -> HTMLResponse:
    """Return the form for the token. It loads nothing, because nothing is sent without the token."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return HTMLResponse(render("login.html", wrong=wrong), status, headers)


def error_page(title: str, sentence: str, status: int) -> HTMLResponse:
    """Return a page with one sentence."""
    return shell(title, render("error.html", title=title, sentence=sentence, role="alert"), status)


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "-"


def render(template: str, /, **values: object) -> str:
    """Return a template with its values."""
    return TEMPLATES.get_template(template).render(**values)


TEMPLATES.filters["moment"] = _moment
