"""An extension of Griffe for the Python reference: fields and parameters are described as the sources describe them."""

import ast
import re
from typing import Any

from griffe import Attribute, Class, Docstring, Extension, Function


class Fields(Extension):
    """Reads `name: type  # description` in the body of a class, and the lists of fields and parameters in docstrings."""

    def on_attribute_instance(self, *, node: Any, attr: Attribute, **_: Any) -> None:
        """Give a field without a docstring the comment at its end."""
        if attr.docstring is not None or not isinstance(node, ast.AnnAssign | ast.Assign) or attr.endlineno is None:
            return
        line = attr.lines_collection[attr.filepath][attr.endlineno - 1]
        _, mark, comment = line.partition("  # ")
        if mark and attr.parent is not None and attr.parent.is_class:
            attr.docstring = Docstring(comment.strip(), lineno=attr.endlineno, parent=attr)

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Give each field of a record its entry `name (shape): meaning` under "Attributes:" in the docstring of the class."""
        text, mark, entries = (cls.docstring.value if cls.docstring else "").partition("\n\nAttributes:\n")
        if not mark or cls.docstring is None:
            return
        cls.docstring.value = text
        for name, kind, meaning in re.findall(r"^    (\w+)(?: \((.+?)\))?: (\S.*(?:\n {8}.*)*)", entries, re.MULTILINE):
            words = f"{kind}: {meaning}" if kind else meaning
            member, shown = cls.members.get(name), " ".join(words.split())
            if member is None:  # a field that the class inherits is described in its own text
                cls.docstring.value += f"\n\n`{name}`: {shown}"
            else:
                member.docstring = Docstring(shown, lineno=member.lineno, parent=member)

    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        """Make a list of the paragraphs that describe one parameter after the other."""
        if func.docstring is not None:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = listed(func.docstring.value, names)


def listed(text: str, names: set[str]) -> str:
    """The text, with each paragraph whose first line is `name: ...` or `name, name: ...` of known names made a list."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(_list(lines, names) if _begins(lines, names) else lines for lines in paragraphs)


def _begins(line: str, names: set[str]) -> bool:
    found = re.match(r"\w+(, \w+)*(?=: )", line)
    return found is not None and set(found[0].split(", ")) <= names


def _list(paragraph: str, names: set[str]) -> str:
    lines = []
    for line in paragraph.splitlines():
        if _begins(line, names):
            known, _, rest = line.partition(": ")
            lines.append(f"- {', '.join(f'`{name}`' for name in known.split(', '))}: {rest}")
        else:
            lines.append(f"    {line.strip()}")
    return "\n".join(lines)
