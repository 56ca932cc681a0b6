"""Compare methods on streams of changing data: `esper stream`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from esper.commands.options import Json, say, use_one_thread

Methods = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[METHOD]...",
        help="Methods, compared with the first; without any, reset-blocks, reset-blocks-annealed, adamw, "
        "ensemble, ensemble-annealed, ensemble-recognising, reactivate, adaptive and shipped. "
        "A path ending in .json is a controller that bench/scripts/fit_streams.py fitted.",
        show_default=False,
    ),
]
Change = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How the data change: novel, recurring, recurring-shared (the default), half-and-half, novel-labels, class-arrival, "
        "drift, or mixture, where streams take turns.",
        show_default=False,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.npz",
        help="A stream of your own instead: features, labels, and contexts or lengths of segments. Streams then differ in their "
        "initial weights.",
    ),
]


def stream(
    methods: Methods = None,
    change: Change = None,
    data: Data = None,
    streams: Annotated[int, typer.Option(metavar="N", help="Streams.")] = 20,
    updates: Annotated[
        int | None,
        typer.Option(metavar="T", help="Batches of each stream; 1664, or all of --data.", show_default=False),
    ] = None,
    part: Annotated[str, typer.Option(metavar="training|validation|heldout", help="Part of the streams.")] = "heldout",
    first: Annotated[int, typer.Option(metavar="N", help="Number of the first stream of the part.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="METHOD.KEY=VALUE", help="Set a key of a method, as ensemble.lr=0.01; may be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the state and the record; the same command goes on from there."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the comparison in DIR.")] = False,
    json_: Json = False,
) -> None:
    """Compare networks on streams of data that change at times that they are not told (`esper docs streams`).

    Each batch is scored before it is trained on. The methods learn the same streams, so differences are paired.
    """
    use_one_thread()
    from rich.console import Console

    from esper.store.files import to_json
    from esper_bench.streams.comparison import DEFAULT
    from esper_bench.streams.comparison import stream as compare
    from esper_bench.streams.console import print_streams

    def printed(record: dict[str, Any]) -> None:
        if json_:
            typer.echo(to_json(record), nl=False)
        else:
            print_streams(record, Console())

    try:
        compare(
            methods or DEFAULT,
            change,
            data=data,
            streams=streams,
            updates=updates,
            part=part,
            first=first,
            settings=settings or (),
            out=out,
            overwrite=overwrite,
            watch=partial(say, err=True),
            ready=printed,
        )
    except KeyboardInterrupt as interrupt:
        after = "nothing was kept, as --out was not given" if out is None else "the same command continues it"
        say(f"{str(interrupt) or 'the comparison was interrupted'}; {after}", err=True)
        raise typer.Exit(130) from None
