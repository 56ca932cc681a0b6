"""Find what other installed packages add to Esper, through entry points: tasks, controllers, outputs and commands."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from esper.leyline.messages import InputError, typed_line

TASKS, CONTROLLERS, OUTPUTS, COMMANDS = "esper.tasks", "esper.controllers", "esper.outputs", "esper.commands"
"""The groups of entry points that Esper reads (`esper docs plugins`)."""


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name. Reads metadata of installed packages and imports none of them."""
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}


def load_plugin(group: str, name: str) -> Any:
    """Import and return the object of an entry point. InputError, which names the package, if its code cannot be imported."""
    entry = plugins(group)[name]
    try:
        return entry.load()
    except Exception as error:  # whatever the package raises while it is imported, an InputError of its own too
        package = entry.dist.name if entry.dist is not None else entry.module
        raise InputError(
            f"{name!r} comes from the package {package}, which cannot be imported: {typed_line(error)}; install it again, or "
            f"remove it (pip uninstall {package})"
        ) from error


def lacking(name: str) -> str:
    """Return a hint for an unknown name that the benchmark package has: which package to install; empty for other names."""
    known = name.partition(":")[0] in _BENCH or name.startswith(("heal-", "repair-", "shipped-"))
    package = "esper-bench"
    return f"{name!r} is part of the package {package}: pip install {package}" if known else ""


_BENCH = (
    *("heal", "stream"),  # tasks and commands
    *("tree", "shipped", "uniform", "participation", "collapse", "sites", "inner-use", "drift", "bandit", "trials"),
)
"""Names that the benchmark package adds, for the hint where it is not installed."""
