"""Write docs/reference.md from the table of public names, and from their signatures and docstrings in the sources."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import esper
from esper.leyline.config.tree import reference

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
WIDE = 100
"""Longest signature on one line [characters]."""
SECTIONS = {"Args": "Parameters", "Attributes": "Fields", "Raises": "Raises"}
"""The sections of docstrings, and what the page calls them."""
HEAD = """# Python reference

Every name that `import esper` offers, in one line each and then in full. These names, those of `esper.gym` and
`esper.callbacks`, the files of a run folder and the command `esper` are public. Every other name and module is private and may
change in any version. Shapes are written as (E, S): E is the number of environments, S the number of slots. The
[glossary](glossary.md) explains the words. In Python, `help(esper.grow)` shows the same.
"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """Return the whole page: a table of every group's names, and an entry for each."""
    parts = [HEAD.strip()]
    for heading, names in groups().items():
        rows = [f"| [`esper.{name}`](#esper.{name}) | {summary(name)} |" for name in names]
        parts.append("\n".join([f"## {heading}", "", "| name | what it is |", "|---|---|", *rows]))
        parts += [part for name in names for part in entry(name) if part]
    return "\n\n".join(parts) + "\n"


def groups() -> dict[str, list[str]]:
    """List the public names by heading: the imports of `__init__.pyi` below each of its comments."""
    found: dict[str, list[str]] = {}
    for line in Path(esper.__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            found[line.removeprefix("# ")] = []
        elif (name := re.fullmatch(r"from .* as (\w+)|(\w+) = \w+", line)) is not None:
            found[next(reversed(found))].append(name[1] or name[2])
    return found


def summary(name: str) -> str:
    """Return the first sentence of a public name's docstring."""
    text = inspect.getdoc(getattr(esper, name))
    assert text is not None, name
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z])", paragraph)[0].replace("|", "\\|")


def entry(name: str) -> Iterator[str]:
    """Yield the heading, the signature and the docstring of a public name, and the members of a class."""
    member = getattr(esper, name)
    described = prose(inspect.getdoc(member) or "")
    yield f'<a id="esper.{name}"></a>\n\n### esper.{name}'
    if not inspect.isclass(member):
        yield signature(f"esper.{name}", parsed(member))
        yield described
    elif issubclass(member, BaseModel):
        yield described
        yield from keys(name)
    else:
        made = [node for node in parsed(member).body if isinstance(node, Function) and node.name == "__init__"]
        yield from (signature(f"esper.{name}", node, drop=1) for node in made)
        yield described
        yield from (prose(ast.get_docstring(node) or "") for node in made)
        yield from members(name, member)


def keys(name: str) -> Iterator[str]:
    """Say where the keys of a config are described, and list those of one section."""
    prefix = "" if name == "Config" else f"{name.removesuffix('Config').lower()}."
    listed = [row for row in reference() if prefix and row[0].startswith(prefix)]
    yield "[The configuration](config.md) has every key with its default, its type and its meaning."
    if listed:
        yield "\n".join(
            f"- `{key.removeprefix(prefix)}` ({kind}; {default}): {text}" for key, kind, default, text in listed
        )


def members(name: str, cls: type) -> list[str]:
    """List the fields that the docstring of a class does not describe, and its public methods, which may be of private bases."""
    private = [base for base in cls.__mro__[1:] if base.__module__.startswith("esper.") and not public(base)]
    seen = set()
    documented = set(re.findall(r"^    (\w+)(?: \(|:)", inspect.getdoc(cls) or "", re.MULTILINE))
    fields, methods = [], []
    for base in (cls, *private):
        lines = inspect.getsource(base).splitlines()
        for node in parsed(base).body:
            own = getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", None)
            if own is None or own.startswith("_") or own in seen or own in documented:
                continue
            seen.add(own)
            if isinstance(node, ast.AnnAssign) and base is cls:
                if isinstance(node.value, ast.Constant) and "ClassVar" in ast.unparse(node.annotation):
                    continue  # what Esper calls the class, in files and in messages
                _, _, comment = lines[(node.end_lineno or 1) - 1].partition("  # ")
                fields.append(f"- `{own}` ({ast.unparse(node.annotation)})" + (f": {comment}" if comment else ""))
            elif isinstance(node, Function):
                methods.append(method(name, node))
    return (["**Fields**\n\n" + "\n".join(fields)] if fields else []) + methods


def method(name: str, node: Function) -> str:
    """Describe a method or a property of a class."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    text = prose(ast.get_docstring(node) or "")
    if "property" in decorators:
        kind = f": {ast.unparse(node.returns)}" if node.returns else ""
        called = f"```py\n{name}.{node.name}{kind}\n```"
    else:
        called = signature(f"{name}.{node.name}", node, drop=0 if "staticmethod" in decorators else 1)
    return "\n\n".join(part for part in (f"#### {name}.{node.name}", called, text) if part)


def public(cls: type) -> bool:
    """Return whether a class has an entry of its own."""
    return any(getattr(esper, name) is cls for name in esper.__all__)


def parsed(member: Any) -> Any:
    """Parse the definition of a function or a class in its source."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(member)))).body[0]


def signature(called: str, node: Function, drop: int = 0) -> str:
    """Return a block with a call: on one line, or with a line for each parameter. `drop` leaves out `self`."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    parts = [_parameter(each, default) for each, default in zip(plain, defaults, strict=True)][drop:]
    if arguments.vararg:
        parts.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [
        _parameter(each, default) for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parts.append("**" + _parameter(arguments.kwarg, None))
    end = f" -> {ast.unparse(node.returns)}" if node.returns and ast.unparse(node.returns) != "None" else ""
    line = f"{called}({', '.join(parts)}){end}"
    if len(line) > WIDE:
        line = f"{called}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"
    return f"```py\n{line}\n```"


def _parameter(node: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(node.annotation)}" if node.annotation else ""
    return f"{node.arg}{kind}" + ("" if default is None else f" = {ast.unparse(default)}")


def prose(text: str) -> str:
    """Convert a docstring to Markdown: sections and paragraphs that describe one name after the other become lists."""
    parts = []
    for part in re.split(r"\n\n(?=\S)", text):
        section, _, entries = part.partition(":\n")
        if section in SECTIONS and entries.startswith("    "):
            parts.append(f"**{SECTIONS[section]}**\n\n{_list(textwrap.dedent(entries))}")
        elif re.match(r"[a-z_]\w*(, [a-z_]\w*)*( \([^)]*\))?: ", part):
            parts.append(_list(part))
        else:
            parts.append(part)
    return "\n\n".join(parts)


def _list(entries: str) -> str:
    """Convert lines `name (kind): meaning`, each with the lines that go on with it, to a list."""
    lines = []
    for line in entries.splitlines():
        found = re.match(r"(\w+(?:, \w+)*)((?: \(.+?\))?): (.*)", line)
        if found and not line.startswith(" "):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines.append(f"- {names}{found[2]}: {found[3]}")
        else:
            lines.append(f"    {line.strip()}" if line.strip() else "")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
