"""The command and the Python call that resume a run, with the arguments that the run needs."""

import shlex
from collections.abc import Sequence
from pathlib import Path


def is_reference(name: str) -> bool:
    """Whether the name of a task refers to a function, `path.py:function` or `module:function`, that makes the task."""
    return ":" in name


def resume_command(folder: Path, tasks: Sequence[str]) -> str:
    """The command that resumes a run on these tasks: `esper resume runs/mine --task path.py:function`.

    `--task` repeats the tasks that are made by functions, because a run folder alone may not start code.
    """
    named = [f"--task {shlex.quote(name)}" for name in tasks if is_reference(name)]
    return " ".join([f"esper resume {shlex.quote(str(folder))}", *named])


def resume_call(folder: Path, tasks: Sequence[str], made: Sequence[str] = ()) -> str:
    """The call that resumes a run on these tasks: `esper.resume('runs/mine', task='path.py:function')`.

    `made` lists the arguments, "task" or "controller", that were Python objects and must be given again.
    """
    places = [name for name in tasks if is_reference(name)]
    given = []
    if "task" in made:
        given.append("task=...")
    elif places:
        given.append(f"task={places[0]!r}" if len(places) == 1 else f"task={places!r}")
    given += ["controller=..."] * ("controller" in made)
    return f"esper.resume({', '.join([repr(str(folder)), *given])})"
