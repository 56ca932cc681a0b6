"""How a run is resumed, as a command and as a call, with the arguments that this run needs."""

import shlex
from collections.abc import Sequence
from pathlib import Path


def is_reference(name: str) -> bool:
    """Whether a task's name is the place of a function, which is imported and called to make the task."""
    return ":" in name


def resume_command(folder: Path, tasks: Sequence[str]) -> str:
    """The command that resumes a run on tasks of these names: `esper resume runs/mine --task path.py:function`.

    `--task` names every task whose code a run folder may not start.
    """
    named = [f"--task {shlex.quote(name)}" for name in tasks if is_reference(name)]
    return " ".join([f"esper resume {shlex.quote(str(folder))}", *named])


def resume_call(folder: Path, tasks: Sequence[str], made: Sequence[str] = ()) -> str:
    """The call that resumes a run on tasks of these names: `esper.resume('runs/mine', task='path.py:function')`.

    `made` are the arguments, "task" or "controller", that were objects made in Python and are given again.
    """
    places = [name for name in tasks if is_reference(name)]
    given = []
    if "task" in made:
        given.append("task=...")
    elif places:
        given.append(f"task={places[0]!r}" if len(places) == 1 else f"task={places!r}")
    given += ["controller=..."] * ("controller" in made)
    return f"esper.resume({', '.join([repr(str(folder)), *given])})"
