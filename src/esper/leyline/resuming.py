"""The command and the Python call that resume a run, with the arguments that the run needs."""

import shlex
from collections.abc import Sequence
from pathlib import Path

TRIALS = "trials:"
"""Prefix of the names of controllers that try the candidates of a rule."""
PAID_BY = "ppo, paid by "
"""How the config of a training names its controller if the reward was given; the name of the reward follows."""


def is_reference(name: str) -> bool:
    """Whether the name of a task refers to a function, `path.py:function` or `module:function`, that makes the task."""
    return ":" in name


def is_own_controller(name: str) -> bool:
    """Whether the name of a controller refers to a function or a class that makes it."""
    return is_reference(name) and not name.startswith(TRIALS)


def own_code(controller: str) -> tuple[str, str] | None:
    """The argument of `resume`, controller or reward, and the reference to give with it, by the `controller` of a config.

    None if the controller and the reward were no references.
    """
    if controller.startswith(PAID_BY):
        reward = controller.removeprefix(PAID_BY)
        return ("reward", reward) if is_reference(reward) else None
    return ("controller", controller) if is_own_controller(controller) else None


def resume_command(folder: Path, tasks: Sequence[str], controller: str = "") -> str:
    """The command that resumes a run on these tasks: `esper resume runs/mine --task path.py:function`.

    controller: that of the config. The command repeats what is made by functions, because a run folder alone may not start code.
    """
    named = [f"--task {shlex.quote(name)}" for name in tasks if is_reference(name)]
    if (own := own_code(controller)) is not None:
        named.append(f"--{own[0]} {shlex.quote(own[1])}")
    return " ".join([f"esper resume {shlex.quote(str(folder))}", *named])


def resume_call(folder: Path, tasks: Sequence[str], made: Sequence[str] = (), controller: str = "") -> str:
    """The call that resumes a run on these tasks: `esper.resume('runs/mine', task='path.py:function')`.

    `made` lists the arguments, "task" or "controller", that were Python objects and must be given again. controller: that of the
    config.
    """
    places = [name for name in tasks if is_reference(name)]
    given = []
    if "task" in made:
        given.append("task=...")
    elif places:
        given.append(f"task={places[0]!r}" if len(places) == 1 else f"task={places!r}")
    if "controller" in made:
        given.append("controller=...")
    elif (own := own_code(controller)) is not None:
        given.append(f"{own[0]}={own[1]!r}")
    return f"esper.resume({', '.join([repr(str(folder)), *given])})"
