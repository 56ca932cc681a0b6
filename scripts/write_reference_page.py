"""Write docs/reference.md from the table of public names and the first sentence of each docstring."""

import inspect
import re
from pathlib import Path

import esper
from esper.leyline.public_names import GROUPS

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
HEAD = """# Python reference

Every name that `import esper` offers, in one line each and then in full. These names, those of `esper.gym` and
`esper.callbacks`, the files of a run folder and the command `esper` are public. Every other name and module is private and may
change in any version. Shapes are written as (E, S): E is the number of environments, S the number of slots. The
[glossary](glossary.md) explains the words.
"""


def page() -> str:
    """The whole page: a table of every group's names, and an entry for each that the documentation site fills in."""
    parts = [HEAD]
    for heading, names in GROUPS.items():
        rows = [f"| `esper.{name}` | {summary(name)} |" for name in names]
        parts.append("\n".join([f"## {heading}", "", "| name | what it is |", "|---|---|", *rows]) + "\n")
        parts += [f"::: esper.{name}\n" for name in names]
    return "\n".join(parts)


def summary(name: str) -> str:
    """The first sentence of a public name's docstring."""
    text = inspect.getdoc(getattr(esper, name))
    assert text is not None, name
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z])", paragraph)[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
