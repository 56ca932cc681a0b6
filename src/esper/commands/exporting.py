"""`esper export-events`: the curves of a run for TensorBoard, Weights & Biases, MLflow or trackio."""

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from esper.commands.options import fail, say
from esper.leyline.exporters import TARGETS

if TYPE_CHECKING:
    from esper.karn.exporters.export import Exported, More
    from esper.karn.exporters.final import Box
    from esper.karn.reader import OpenRun


def export_events(
    run: Annotated[Path, typer.Argument(help="A run folder, of a run that goes on or has ended.")],
    to: Annotated[str, typer.Option(metavar="|".join(TARGETS), help="What to export to; each needs its extra.")],
    into: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write to; exports/TARGET beside the run folder.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Export further rows too, until the run ends.")] = False,
    beside: Annotated[bool, typer.Option("--beside-run", hidden=True)] = False,
) -> None:
    """Export the curves, the best network and the final table of a run; `esper docs exporters` lists the curves.

    Nothing is exported twice: a run that was continued is continued in the target too. Nothing goes to a network, except with
    W&B if WANDB_MODE asks for it.
    """
    from esper.karn.exporters.export import ExportError, export_run
    from esper.karn.reader import open_run

    source = open_run(run)
    if beside:
        _stay_behind()
    more: More | None = _until_told(source) if beside else _until_ended(source) if follow else None
    try:
        exported = export_run(source, to, into, more=more, draw=network_boxes)
    except ExportError as error:
        fail(error, 1)
    for line in _lines(exported, source, to):
        say(line)


def network_boxes(run: "OpenRun", summary: Mapping[str, Any]) -> "Sequence[Box] | None":
    """The parts of the best network; None if it was not exported, or if its host is code of the user's."""
    from esper.api import load
    from esper.karn.exporters.final import Box
    from esper.kasmina.drawing import parts_of
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


def _lines(exported: "Exported", run: "OpenRun", to: str) -> list[str]:
    """What was exported, and what is missing."""
    place = "no points" if exported.x < 0 else f"points up to x = {exported.x:,}, of which {exported.points:,} are new"
    lines = [f"{exported.folder}: {to} has {place}, as the run {exported.name}"]
    if exported.status in ("running", "killed"):
        state = "goes on" if exported.status == "running" else "was killed"
        lines.append(f"{run.folder} {state}: what it has written so far is exported, without image and final table")
    elif not exported.final:
        lines.append(
            f"{run.folder} has the status {exported.status} and no final figures: there is no image and no table"
        )
    return lines


def _until_ended(run: "OpenRun", every: float = 0.5) -> "More":
    def more() -> bool:
        going = run.is_written
        if going:
            time.sleep(every)
        return going

    return more


def _until_told(run: "OpenRun", every: float = 0.5) -> "More":
    """Until the process that writes the run closes our stdin, or is gone."""

    def more() -> bool:
        told, _, _ = select.select([sys.stdin], [], [], every)
        return not told and run.is_written

    return more


def _stay_behind() -> None:
    """Leave the processor to the run, and end in good order if the machine ends all processes."""
    with suppress(OSError):
        os.nice(10)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
