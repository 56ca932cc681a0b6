"""`esper tasks`, `esper blueprints`, `esper controller` and `esper config`: commands that list what Esper has."""

from typing import Annotated, Any

import typer

from esper.commands.options import PLACE, print_columns, say
from esper.leyline.errors import InputError


def tasks(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK]...", help=f"Tasks to list, or {PLACE}; all of Esper's own.", show_default=False),
    ] = None,
) -> None:
    """List tasks with their slots and menus. cifar10 and tinystories read files of yours, and the list says what is missing."""
    from esper.tasks.catalog import get_task, task_names

    for name in names or task_names():
        try:
            task = get_task(name)
        except InputError as error:  # the files of its data are missing
            if names:
                raise
            say(f"{name}: {task_names()[name]}")
            say(f"  missing   {error}")
        else:
            _print_task(name, task)


def _print_task(name: str, task: Any) -> None:
    import torch

    from esper.leyline.data.task import Mixture

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
    say(f"  slots     {', '.join(f'{slot.name} (width {slot.width})' for slot in slots)}")
    say(f"  menu      {', '.join(task.menu)}")


def blueprints() -> None:
    """List the blueprints: what each reads, and what it costs between two streams of width 16."""
    from esper.kasmina.blueprints import BLUEPRINTS

    rows = [("blueprint", "kind", "reads", "parameters", "summary")]
    rows += [
        (name, str(kind), str(blueprint.tap), f"{blueprint.parameters(16, 16):,}", blueprint.summary)
        for (kind, name), blueprint in BLUEPRINTS.items()
    ]
    print_columns(rows)


def controller(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A name of the list.", show_default=False)
    ] = None,
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
    yaml: Annotated[bool, typer.Option("--yaml", help="Print the defaults as YAML, to start a file from.")] = False,
) -> None:
    """Print every configuration key with its default, its type and its meaning."""
    from esper.leyline.config.tree import Config, dump_config, reference

    if yaml:
        typer.echo(dump_config(Config()), nl=False)
        return
    rows = [("key", "default", "type", "meaning")]
    rows += [(key, default, kind, meaning) for key, kind, default, meaning in reference()]
    print_columns(rows)
