"""`esper docs`: the pages of the documentation, which come with the package."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from esper.commands.options import print_columns
from esper.leyline.errors import InputError
from esper.leyline.text import did_you_mean


def docs(
    page: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAGE]", help="Page to show, such as growth; by default all are listed.", show_default=False
        ),
    ] = None,
) -> None:
    """Show a page of the documentation, or list all pages with the first sentence of each."""
    pages = pages_of(docs_folder())
    if page is None:
        rows = [(name, first_sentence(path.read_text(encoding="utf-8"))) for name, path in pages.items()]
        print_columns([("page", "about"), *rows])
        return
    text = pages[find_page(page, pages)].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        typer.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    # A terminal cannot follow a link to another page, and anchors are for links alone.
    text = re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)[^)]*\)|<a id=\"[^\"]*\"></a>", lambda found: found[1] or "", text)
    os.environ.setdefault("LESS", "-R")  # so that less shows colours
    console = Console(width=min(Console().width, 120))
    with console.pager(styles=True):
        console.print(Markdown(text, hyperlinks=False))


def docs_folder() -> Path:
    """The folder of the pages: that of the package, or docs/ of the checkout that is installed in editable mode."""
    package = Path(__file__).parents[1]
    for folder in (package / "docs", package.parents[1] / "docs"):
        if (folder / "glossary.md").is_file():
            return folder
    raise InputError(f"{package} has no pages of the documentation; install Esper again")


def pages_of(folder: Path) -> dict[str, Path]:
    """The pages below a folder by name: those at its top, and then those of its folders, as `walkthroughs/gpt`."""
    found = sorted(folder.rglob("*.md"), key=lambda path: (path.parent != folder, path))
    return {path.relative_to(folder).with_suffix("").as_posix().removesuffix("/README"): path for path in found}


def find_page(given: str, pages: dict[str, Path]) -> str:
    """The name of a page that is given by its name, its path, or the last part of its name. InputError if there is none."""
    name = given.strip("/").removeprefix("docs/").partition("#")[0].removesuffix(".md").removesuffix("/README").lower()
    ends = [page for page in pages if page.rpartition("/")[2] == name]
    if name in pages:
        return name
    if len(ends) == 1:
        return ends[0]
    hint = did_you_mean(name, pages, first=ends, most=3, similarity=0.4)
    raise InputError(f"there is no page {given!r}; {f'{hint} ' if hint else ''}`esper docs` lists all pages")


def first_sentence(text: str) -> str:
    """The first sentence of a page below its heading that says what it is about, without links and other marks."""
    paragraph = next(
        part
        for part in re.split(r"\n\s*\n", text)
        if part.strip() and not part.lstrip().startswith(("#", "<", "!", "```"))
    )
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", lambda found: found[1] or "", " ".join(paragraph.split()))
    first, *others = re.split(r"(?<=[.:])\s(?=[A-Z])", plain)
    return others[0] if first.startswith("The glossary explains") and others else first
