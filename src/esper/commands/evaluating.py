"""`esper eval`: controllers compared on held-out instances."""

from pathlib import Path
from typing import Annotated, Any

import typer

from esper.commands.options import (
    PLACE,
    Cluster,
    Devices,
    Json,
    Settings,
    Workers,
    say,
    split_names,
    use_one_thread,
)

Controllers = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONTROLLER]...",
        help="Names, schedule files, run folders of trained controllers, NAME=FOLDER,FOLDER for several trainings of one, or "
        "path.py:function or path.py:Class for one of your own.",
        show_default=False,
    ),
]


def evaluate(
    controllers: Controllers = None,
    tasks: Annotated[str, typer.Option(metavar="NAME,...", help=f"Tasks of `esper tasks`, or {PLACE}.")] = "repair",
    instances: Annotated[int, typer.Option(metavar="N", help="Held-out instances of each task.")] = 200,
    seeds: Annotated[
        int,
        typer.Option(metavar="N", help="Runs of each instance, with N seeds that count up from `seed` of the config."),
    ] = 3,
    first: Annotated[int, typer.Option(metavar="N", help="Number of the first held-out instance.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the record and the figure; runs/evaluation/TASKS-HASH."),
    ] = None,
    settings: Settings = None,
    baselines: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="Static networks to compare with: same-size, plain, skips, or none."),
    ] = "same-size,plain,skips",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the record in DIR.")] = False,
    json_: Json = False,
    workers: Workers = None,
    devices: Devices = None,
    cluster: Cluster = None,
) -> None:
    """Compare controllers with rules and static networks, on the same held-out instances with the same seeds.

    The rules never, random-valid and heuristic always take part. Controllers are compared by J on the test split: the metric
    less rent for added parameters. Networks that an earlier call with the same settings has grown are used again. Without DIR,
    each set of arguments has its own folder.
    """
    use_one_thread()
    from rich.console import Console

    from esper.calls import evaluate as compare
    from esper.karn.evaluation import print_evaluation
    from esper.leyline.config.tree import parse_setting
    from esper.runs.evaluation.contenders import trainings
    from esper.runs.evaluation.evaluation import FIGURE, default_folder
    from esper.runs.workers.transports import ACTOR
    from esper.store.files import EVALUATION, REPORT, to_json

    names = split_names(tasks) or []
    numbers: dict[str, Any] = {"instances": instances, "seeds": seeds, "first": first}
    contenders = [each for controller in controllers or () for each in trainings(controller)]
    static = [] if baselines == "none" else split_names(baselines)
    if out is None:
        layers = [*(parse_setting(setting) for setting in settings or ()), {"baselines": static}]
        out = default_folder(contenders, names, layers, **numbers)
    options: dict[str, Any] = {"settings": settings or (), "baselines": static, "out": out, "overwrite": overwrite}
    options |= {"workers": workers, "devices": devices, "cluster": cluster}

    def printed(record: dict[str, Any]) -> None:
        if json_:
            typer.echo(to_json(record), nl=False)
        else:
            print_evaluation(record, Console())

    record = compare(contenders or None, names, **numbers, **options, progress=True, ready=printed)
    if record.get("status") == ACTOR or json_:
        return
    for what, name in (("record", EVALUATION), ("figure", FIGURE), ("report", REPORT)):
        if (out / name).exists():
            say(f"{what}: {out / name}")
