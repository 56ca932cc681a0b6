"""`esper export`: the networks of a run, written to another folder."""

from pathlib import Path
from typing import Annotated

import typer

from esper.commands.options import say


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    env: Annotated[
        int | None, typer.Option(help="Export only the network of this environment, directly into DIR.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write; RUN-networks in the current folder.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the networks in DIR.")] = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The task of the run, by name or path.py:function; a host of your own gets model.pt2 only with it.",
        ),
    ] = None,
) -> None:
    """Write the grown networks of a run to another folder, each with a new model.pt2 made from its verified weights."""
    from esper.commands.networks import export_networks, how_to_name, networks_of
    from esper.tasks.catalog import get_task

    sources = networks_of(run, env)
    target = out or Path(f"{run.resolve().name}-networks")
    host = None if task is None else get_task(task)
    topologies = export_networks(
        sources, target, overwrite, host, lambda line: say(line, err=True), how_to_name(run, target, env)
    )
    for name, topology in topologies.items():
        grew = ", ".join(f"{seed['blueprint']} at {seed['slot']}" for seed in topology["seeds"]) or "nothing grew"
        say(f"{target / name}: {topology['parameters']:,} parameters, {grew}")
