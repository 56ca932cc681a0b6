"""Trains neural networks that grow.

    import esper
    summary = esper.grow(esper.get_task("digits"), esper.build_config({"task": "digits"}))
    network = esper.load("runs/demo")

The public names are those of `__init__.pyi`. Each is imported when it is first used, so that `esper --help` does not wait for
torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from esper.leyline.distribution import installed_version, warn_of_conflict

warn_of_conflict()


def _read_stub() -> dict[str, tuple[str, str]]:
    """Return the module of every public name, and its name there. `report = write_report` gives a function another name."""
    found, imported = {}, {}
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                (found if name.asname else imported)[name.name] = (node.module, name.name)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = imported[ast.unparse(node.value)]
    return found


_HOMES = _read_stub()
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return installed_version() or "unknown"
    if name not in _HOMES:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    found = getattr(import_module(module), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*_HOMES, *(name for name in globals() if name.startswith("__"))})
