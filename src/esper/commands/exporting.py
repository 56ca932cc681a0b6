"""`esper export` and `export-events`: the networks of a run in another folder, and its curves in TensorBoard and others."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esper.commands.options import fail, say
from esper.leyline.exporters import TARGETS

if TYPE_CHECKING:
    from esper.karn.export_targets import Box
    from esper.karn.exporters import Exporter
    from esper.karn.reader import OpenRun


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


def export_events(
    run: Annotated[Path, typer.Argument(help="A run folder, of a run that goes on or has ended.")],
    to: Annotated[str, typer.Option(metavar="|".join(TARGETS), help="What to export to; each needs its extra.")],
    into: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write to; exports/TARGET beside the run folder.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Export further rows too, until the run ends.")] = False,
) -> None:
    """Export the curves, the best network and the final table of a run; `esper docs exporters` lists the curves.

    Nothing is exported twice: a run that was continued is continued in the target too. Nothing goes to a network, except with
    W&B if WANDB_MODE asks for it.
    """
    from esper.karn.exporters import ExportError, begin_export
    from esper.karn.reader import open_run

    source = open_run(run)
    try:
        with closing(begin_export(source, to, into, patience=60.0 if follow else 0.0, draw=network_boxes)) as export:
            while follow and source.is_written:
                export.update()
                time.sleep(0.5)
            exported = export.end()
    except ExportError as error:
        fail(error, 1)
    place = "no points" if exported.x < 0 else f"points up to x = {exported.x:,}, of which {exported.points:,} are new"
    say(f"{exported.folder}: {to} has {place}, as the run {exported.name}")
    if exported.status in ("running", "killed"):
        state = "goes on" if exported.status == "running" else "was killed"
        say(f"{run} {state}: what it has written so far is exported, without image and final table")
    elif not exported.final:
        say(f"{run} has the status {exported.status} and no final figures: there is no image and no table")


def exporter(folder: Path, target: str) -> "Exporter":
    """The exporter of a run with `telemetry.exporters`."""
    from esper.karn.exporters import Exporter

    return Exporter(folder, target, network_boxes)


def network_boxes(run: "OpenRun", summary: Mapping[str, Any]) -> "Sequence[Box] | None":
    """The parts of the best network; None if it was not exported, or if its host is code of the user's."""
    from esper.api import load
    from esper.karn.export_targets import Box
    from esper.kasmina.network.drawing import parts_of
    from esper.leyline.errors import InputError
    from esper.store.files import MODELS

    try:
        network = load(run.folder / MODELS / f"env-{summary['best']['env']:03d}")
    except InputError:
        return None
    boxes = []
    for part in parts_of(network):
        params = "" if part.params is None else f"{part.params:,} parameters"
        head = f"{part.name}: {part.what}" if part.what else part.name
        boxes.append(Box(part.kind, head, ", ".join(filter(None, (params, part.note)))))
    return boxes
