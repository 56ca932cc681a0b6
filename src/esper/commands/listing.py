"""List what Esper has: `esper tasks`, `blueprints`, `controller`, `config` and `docs`."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from esper.commands.options import PLACE, print_columns, say
from esper.leyline.messages import InputError, did_you_mean


def tasks(
    names: Annotated[
        list[str] | None,
        Argument(metavar="[TASK]...", help=f"Tasks to list, or {PLACE}; all of Esper's own.", show_default=False),
    ] = None,
) -> None:
    """List tasks with their slots and menus. cifar10 and tinystories read files of yours, and the list says what is missing."""
    import torch

    from esper.leyline.data.task import Mixture
    from esper.tasks.catalog import get_task, task_names

    for name in names or task_names():
        try:
            task: Any = get_task(name)
        except InputError as error:  # the files of its data are missing
            if names:
                raise
            say(f"{name}: {task_names()[name]}")
            say(f"  missing   {error}")
            continue
        say(f"{name}: {task.summary}")
        say(f"  metric    {task.objective.metric}")
        if isinstance(task, Mixture):
            say(f"  instances {', '.join(f'{part} {len(keys):,}' for part, keys in task.ranges.items())}")
        else:
            held = {"probe": task.probe, "validation": task.validation, "test": task.test}
            sizes = [f"{split} {len(part.y):,}" for split, part in held.items() if part is not None]
            say(f"  examples  {', '.join([f'train {task.examples:,}', *sizes])}")
        with torch.random.fork_rng(devices=[]):
            slots = task.largest().slots
        spans = [
            "" if slot.start == slot.after else f", around segments {slot.start} to {slot.after}" for slot in slots
        ]
        each = [f"{slot.name} (width {slot.width}{span})" for slot, span in zip(slots, spans, strict=True)]
        say(f"  slots     {', '.join(each)}")
        say(f"  menu      {', '.join(task.menu)}")


def blueprints() -> None:
    """List the blueprints: what each reads, and what it costs between two streams of width 16."""
    from esper.kasmina.blueprints import BLUEPRINTS, LIVE_BLUEPRINTS

    rows = [("blueprint", "kind", "reads", "parameters", "summary")]
    rows += [
        (
            name,
            str(kind),
            str(blueprint.tap),
            "a copy's" if blueprint.copies else f"{blueprint.parameters(16, 16):,}",
            blueprint.summary,
        )
        for (kind, name), blueprint in {**BLUEPRINTS, **LIVE_BLUEPRINTS}.items()
    ]
    print_columns(rows)


def controller(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="A name of the list.", show_default=False)] = None,
) -> None:
    """List the controllers, or print what is known about one of them."""
    from esper.tamiyo.catalog import controller_summaries, find_controller

    if name is None:
        own = "a function or class of your own that makes a controller (`esper docs own-controller`)"
        print_columns([("controller", "summary"), *controller_summaries().items(), ("path.py:function", own)])
        return
    spec = find_controller(name)
    if spec.card is not None:
        for line in spec.card().splitlines():
            say(line)
        return
    say(f"{spec.name}: {spec.summary or 'a controller by path'}")
    episodes = "unknown" if spec.episodes is None else f"{spec.episodes:,}" if spec.episodes else "none, it is a rule"
    say(f"  episodes of training  {episodes}")
    for key, value in spec.settings.items():
        say(f"  sets                  {key}: {value}")


def config(
    yaml: Annotated[bool, Option("--yaml", help="Print the defaults as YAML, to start a file from.")] = False,
) -> None:
    """Print every configuration key with its default, its type and its meaning."""
    from esper.leyline.config.tree import Config, dump_config, reference

    if yaml:
        typer.echo(dump_config(Config()), nl=False)
        return
    rows = [("key", "default", "type", "meaning")]
    rows += [(key, default, kind, meaning) for key, kind, default, meaning in reference()]
    print_columns(rows)


def docs(
    page: Annotated[
        str | None,
        Argument(metavar="[PAGE]", help="Page to show, such as growth; by default all are listed.", show_default=False),
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
    """Return the folder of the pages: that of the package, or docs/ of the checkout that is installed in editable mode."""
    package = Path(__file__).parents[1]
    for folder in (package / "docs", package.parents[1] / "docs"):
        if (folder / "glossary.md").is_file():
            return folder
    raise InputError(f"{package} has no pages of the documentation; install Esper again")


def pages_of(folder: Path) -> dict[str, Path]:
    """Return the pages below a folder by name: those at its top, and then those of its folders, as `walkthroughs/gpt`."""
    found = sorted(folder.rglob("*.md"), key=lambda path: (path.parent != folder, path))
    return {path.relative_to(folder).with_suffix("").as_posix().removesuffix("/README"): path for path in found}


def find_page(given: str, pages: dict[str, Path]) -> str:
    """Return the name of the page that is given by its name, path, or the last part of its name. InputError if there is none."""
    name = given.strip("/").removeprefix("docs/").partition("#")[0].removesuffix(".md").removesuffix("/README").lower()
    ends = [page for page in pages if page.rpartition("/")[2] == name]
    if name in pages:
        return name
    if len(ends) == 1:
        return ends[0]
    hint = did_you_mean(name, pages, first=ends, most=3, similarity=0.4)
    raise InputError(f"there is no page {given!r}; {f'{hint} ' if hint else ''}`esper docs` lists all pages")


def first_sentence(text: str) -> str:
    """Return the first sentence of a page below its heading that says what it is about, without links and other marks."""
    paragraph = next(
        part
        for part in re.split(r"\n\s*\n", text)
        if part.strip() and not part.lstrip().startswith(("#", "<", "!", "```"))
    )
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[*`]", lambda found: found[1] or "", " ".join(paragraph.split()))
    first, *others = re.split(r"(?<=[.:])\s(?=[A-Z])", plain)
    return others[0] if first.startswith("The glossary explains") and others else first
