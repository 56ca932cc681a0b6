"""Write what a run holds for other programs: `esper events`, `export-events` and `export`."""

import csv
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from typer import Argument, Option

from esper.commands.options import fail, say
from esper.leyline.distribution import TARGETS, of_extra
from esper.leyline.messages import InputError, counted, system_in_words

if TYPE_CHECKING:
    from esper.karn.exporters import Box, Exporter
    from esper.karn.reader import OpenRun

FORMATS = ("jsonl", "csv", "parquet")


def events(
    run: Annotated[Path, Argument(help="A run folder.")],
    kind: Annotated[
        str | None, Option(help="Print rows of this kind only: run, step, lifecycle, ... (`esper docs events`).")
    ] = None,
    format_: Annotated[
        str, Option("--format", metavar="|".join(FORMATS), help="csv and parquet need --kind; parquet, --out.")
    ] = "jsonl",
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write to FILE, which gets its name when it is whole.")
    ] = None,
    follow: Annotated[bool, Option("--follow", help="Wait for further rows until the run ends; jsonl only.")] = False,
) -> None:
    """Print the events of a run, whether it goes on or has ended. `esper docs events` describes every field."""
    from esper.karn.reader import kind_of, open_run
    from esper.nissa.events import encode, record

    if format_ not in FORMATS:
        raise InputError(f"--format is {format_!r}; choose one of {', '.join(FORMATS)}")
    if format_ != "jsonl" and kind is None:
        raise InputError(f"--format {format_} is a table of one kind of rows; add --kind, for example --kind step")
    if format_ != "jsonl" and follow:
        raise InputError(f"--follow prints jsonl, and --format is {format_}; leave one of them out")
    if format_ == "parquet" and out is None:
        raise InputError("--format parquet is a binary file; name it with --out FILE")
    source, wanted = open_run(run), kind_of(kind)
    rows = (row for row in (source.follow() if follow else source.rows()) if isinstance(row, wanted))
    if format_ == "jsonl":
        with _opened(out, at_once=follow) as file:
            for row in rows:
                file.write(encode(row).decode())
                if follow:
                    file.flush()
    elif format_ == "csv":  # lists and mappings are JSON, and what was not measured is empty
        with _opened(out) as file:
            writer, names = csv.writer(file), wanted.__struct_encode_fields__
            writer.writerow(names)
            for values in (record(row) for row in rows):
                cells = [values.get(name) for name in names]
                writer.writerow([json.dumps(cell) if isinstance(cell, list | dict | bool) else cell for cell in cells])
    else:
        assert kind is not None
        assert out is not None
        frame = source.frame(kind)
        with of_extra("frames", "parquet needs pyarrow, which is"):
            import pyarrow  # noqa: F401  (pandas writes parquet with it)
        with _opened(out) as file:
            frame.to_parquet(file.buffer, index=False)


@contextmanager
def _opened(out: Path | None, *, at_once: bool = False) -> Iterator[TextIO]:
    """Open FILE for writing, or the terminal, which stays open. FILE is replaced when it is whole, or `at_once` for its readers.

    InputError if FILE cannot be written; OSError names it on a full disk.
    """
    from esper.store.disk import FULL, replacing

    if out is None:
        yield sys.stdout
        return
    whole = not at_once and (out.is_file() or not out.exists())  # a pipe or a device cannot be replaced
    try:
        with (
            replacing(Path(os.path.realpath(out))) if whole else nullcontext(out) as path
        ):  # behind a link, which stays
            with system_in_words(f"{out} cannot be written", "name another file"):
                file = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115 (closed below)
            with file:
                yield file
    except OSError as error:
        if error.errno in FULL:
            raise OSError(error.errno, os.strerror(error.errno), str(out)) from error
        if not whole:  # what is read meanwhile
            raise
        raise InputError(f"{out} cannot be written: {error.strerror or error}; name another file") from None


def export(
    run: Annotated[Path, Argument(help="A run folder.")],
    env: Annotated[int | None, Option(help="Export only the network of this environment, directly into DIR.")] = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Folder to write; RUN-networks in the current folder.")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the networks in DIR.")] = False,
    task: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="The task of the run, by name or path.py:function; a host of your own gets model.pt2 only with it.",
        ),
    ] = None,
) -> None:
    """Write the grown networks of a run to another folder, each with a new model.pt2 made from its verified weights."""
    from esper.commands.networks import export_networks

    target = out or Path(f"{run.resolve().name}-networks")
    topologies = export_networks(run, env, target, overwrite, task, lambda line: say(line, err=True))
    for name, topology in topologies.items():
        grew = ", ".join(f"{seed['blueprint']} at {seed['slot']}" for seed in topology["seeds"]) or "nothing grew"
        say(f"{target / name}: {topology['parameters']:,} parameters, {grew}")


def export_events(
    run: Annotated[Path, Argument(help="A run folder, of a run that goes on or has ended.")],
    to: Annotated[str, Option(metavar="|".join(TARGETS), help="What to export to; each needs its extra.")],
    into: Annotated[
        Path | None, Option(metavar="FOLDER", help="Folder to write to; exports/TARGET beside the run folder.")
    ] = None,
    follow: Annotated[bool, Option("--follow", help="Export further rows too, until the run ends.")] = False,
) -> None:
    """Export the curves, the best network and the final table of a run; `esper docs exporters` lists the curves.

    An export replaces the one before of the same run. Nothing goes to a network, except with W&B if WANDB_MODE asks for it.
    """
    from esper.karn.exporters import EVERY, ExportError, export_of
    from esper.karn.reader import open_run

    source = open_run(run)
    try:
        with export_of(source, to, into, patience=60.0 if follow else 0.0) as (export, folder):
            while follow and source.is_written:
                export.update()
                time.sleep(EVERY)
            status = export.end(network_boxes)
    except ExportError as error:
        fail(error, 1)
    place = "no points" if export.x < 0 else f"{counted(export.points, 'point')} up to x = {export.x:,}"
    say(f"{folder}: {to} has {place}, as the run {export.name}")
    if status in ("running", "killed"):
        state = "goes on" if status == "running" else "was killed"
        say(f"{run} {state}: what it has written so far is exported, without image and final table")
    elif not export.is_final:
        say(f"{run} has the status {status} and no final figures: there is no image and no table")


def exporter(folder: Path, target: str) -> "Exporter":
    """Return the exporter of a run with `telemetry.exporters`."""
    from esper.karn.exporters import Exporter

    return Exporter(folder, target, network_boxes)


def network_boxes(run: "OpenRun", summary: Mapping[str, Any]) -> "Sequence[Box] | None":
    """Return the parts of the best network; None if it was not exported, or if its host is code of the user's."""
    from esper.api import load
    from esper.karn.exporters import Box
    from esper.kasmina.network.drawing import parts_of
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
