"""Count what a reader of the library has to hold in their head: lines, files, small functions called once, and long walks.

    python scripts/size.py            # the table
    python scripts/size.py --walks    # also every stay of the three walks, in the order of the code

A *walk* follows one parameter from call to call, by the names in the source: into every function of the package that it is
passed to by its own name, depth first, each function once. A *stay* is counted whenever that leads to another file than the
one before. Calls through objects whose class the source does not name are not followed, so a walk is a lower bound.
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
WALKS = (
    ("the task of `esper grow`", "esper.runs.grow", "grow", "task"),
    ("the model of `Growth`", "esper.runs.live.growth", "Growth", "model"),
    ("the name of a controller", "esper.api", "grow", "controller"),
)
SMALL = 8
"""Functions of fewer lines than this that are called once are counted."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """Names a function of the package: its module, its class or "", and its name."""

    module: str
    owner: str
    name: str


class Package:
    """Reads the modules of the package, their definitions, and what each module imports."""

    def __init__(self) -> None:
        self.trees: dict[str, ast.Module] = {}
        for path in sorted(SOURCE.rglob("*.py")):
            module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
            self.trees[module] = ast.parse(path.read_text(encoding="utf-8"))
        self.functions: dict[Place, Function] = {}
        self.imports: dict[str, dict[str, tuple[str, str]]] = {}
        for module, tree in self.trees.items():
            self.imports[module] = {
                name.asname or name.name: (node.module, name.name)
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module is not None
                for name in node.names
            }
            for node in tree.body:
                if isinstance(node, Function):
                    self.functions[Place(module, "", node.name)] = node
                for inner in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(inner, Function):
                        self.functions[Place(module, node.name, inner.name)] = inner

    def called(self, at: Place, call: ast.Call) -> Place | None:
        """Return the function of the package that a call runs; None if the source does not say."""
        match call.func:
            case ast.Name(name):
                module, name = self.imports[at.module].get(name, (at.module, name))
                places = (Place(module, "", name), Place(module, name, "__init__"))
            case ast.Attribute(ast.Name("self"), name):
                places = (Place(at.module, at.owner, name),)
            case ast.Attribute(ast.Name(holder), name):
                module, holder = self.imports[at.module].get(holder, (at.module, holder))
                places = (Place(module, holder, name), Place(f"{module}.{holder}", "", name))
            case _:
                places = ()
        return next((place for place in places if place in self.functions), None)

    def walk(self, at: Place, names: frozenset[str], seen: set[tuple[Place, frozenset[str]]]) -> Iterator[Place]:
        """Yield each function that a parameter reaches. names: what it is called there."""
        if (at, names) in seen:
            return
        seen.add((at, names))
        yield at
        for call in (node for node in ast.walk(self.functions[at]) if isinstance(node, ast.Call)):
            place = self.called(at, call)
            if place is None:
                continue
            arguments = self.functions[place].args
            parameters = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
            parameters = parameters[1:] if place.owner and parameters[:1] in (["self"], ["cls"]) else parameters
            passed = [(parameters[index], value) for index, value in enumerate(call.args[: len(parameters)])]
            passed += [(each.arg, each.value) for each in call.keywords if each.arg is not None]
            entered = {name for name, value in passed if isinstance(value, ast.Name) and value.id in names}
            if entered:
                yield from self.walk(place, frozenset(entered), seen)


def stays(places: list[Place]) -> list[Place]:
    """Return the places at which a walk comes to another file than the one before."""
    return [
        place
        for before, place in zip([None, *places], places, strict=False)
        if not before or before.module != place.module
    ]


def called_once(package: Package) -> list[Place]:
    """Return the private functions of fewer than SMALL lines whose name stands in the package once beside their definition."""
    words = Counter(
        word for path in SOURCE.rglob("*.py") for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    )
    return [
        place
        for place, node in package.functions.items()
        if place.name.startswith("_")
        and not place.name.startswith("__")
        and (node.end_lineno or 0) - node.lineno + 1 < SMALL
        and words[place.name] == 2
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", action="store_true", help="print every stay of the walks")
    arguments = parser.parse_args()
    package = Package()
    files = list(SOURCE.rglob("*.py"))
    folders = Counter(path.parent for path in files)
    largest, most = folders.most_common(1)[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    code = [number for number, line in enumerate(readme, 1) if line.startswith("```py")]
    grows = next((number for number, line in enumerate(readme, 1) if "Growth(model" in line), 0)
    loop = max((number for number in code if number < grows), default=None)
    rows = [
        ("lines of src/esper", sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)),
        ("files", len(files)),
        (f"largest folder ({largest.relative_to(SOURCE)})", most),
        (f"private functions under {SMALL} lines that are called once", len(called_once(package))),
        ("lines of the README", len(readme)),
        ("line of its first Python", code[0] if code else None),
        ("line at which its first own loop begins", loop),
    ]
    for name, value in rows:
        print(f"{value!s:>7}  {name}")
    for name, module, function, parameter in WALKS:
        entry = Place(module, "", function)
        entry = entry if entry in package.functions else Place(module, function, "__init__")
        route = stays(list(package.walk(entry, frozenset([parameter]), set())))
        print(f"{len(route):7}  stays of {name}, in {len({place.module for place in route})} files")
        for place in route if arguments.walks else ():
            print(f"           {place.module}: {'.'.join(filter(None, (place.owner, place.name)))}")


if __name__ == "__main__":
    main()
