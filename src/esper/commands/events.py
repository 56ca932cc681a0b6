"""`esper events`: the rows of a run, for other programs."""

import csv
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, TextIO

import typer

from esper.leyline.errors import InputError

FORMATS = ("jsonl", "csv", "parquet")


def events(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    kind: Annotated[
        str | None, typer.Option(help="Print rows of this kind only: run, step, lifecycle, ... (`esper docs events`).")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="csv and parquet need --kind; parquet, --out.")
    ] = "jsonl",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write to FILE, which gets its name when it is whole.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Wait for further rows until the run ends; jsonl only.")
    ] = False,
) -> None:
    """Print the events of a run, whether it goes on or has ended. `esper docs events` describes every field."""
    from esper.karn.reader import fields_of, kind_of, open_run
    from esper.leyline.distribution import pip_install
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
            writer, names = csv.writer(file), fields_of(wanted)
            writer.writerow(names)
            for values in (record(row) for row in rows):
                cells = [values.get(name) for name in names]
                writer.writerow([json.dumps(cell) if isinstance(cell, list | dict | bool) else cell for cell in cells])
    else:
        assert kind is not None
        assert out is not None
        frame = source.frame(kind)
        try:
            import pyarrow  # noqa: F401  (pandas writes parquet with it)
        except ImportError:
            raise InputError(f"parquet needs pyarrow, which is not installed; run {pip_install('frames')}") from None
        with _beside(out) as temporary:
            frame.to_parquet(temporary, index=False)


@contextmanager
def _opened(out: Path | None, *, at_once: bool = False) -> Iterator[TextIO]:
    """FILE for writing, or the terminal, which stays open. `at_once` writes FILE itself, which others read meanwhile."""
    if out is None:
        yield sys.stdout
        return
    with nullcontext(out) if at_once else _beside(out) as path:
        try:
            file = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise InputError(f"{out} cannot be written: {error.strerror}; name another file") from None
        with file:
            yield file


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A temporary file that replaces FILE once the body has written all of it.

    Raises InputError if FILE cannot be written, and OSError with FILE as its name on a full disk.
    """
    from esper.store.disk import FULL, replacing

    if out.exists() and not out.is_file():  # a pipe or a device, which cannot be replaced
        yield out
        return
    try:
        with replacing(Path(os.path.realpath(out))) as temporary:  # behind a link, which stays
            yield temporary
    except OSError as error:
        if error.errno in FULL:
            raise OSError(error.errno, os.strerror(error.errno), str(out)) from error
        raise InputError(f"{out} cannot be written: {error.strerror or error}; name another file") from None
