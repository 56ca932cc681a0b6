"""Compare controllers on held-out instances: `esper eval`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from esper.commands.options import PLACE, Cluster, Devices, Json, Settings, Workers, say, split_names, use_one_thread

Controllers = Annotated[
    list[str] | None,
    Argument(
        metavar="[CONTROLLER]...",
        help="Names, schedule files, run folders of trained controllers, NAME=FOLDER,FOLDER for several trainings of one, or "
        "path.py:function or path.py:Class for one of your own.",
        show_default=False,
    ),
]

Tasks = Annotated[str, Option(metavar="NAME,...", help=f"Tasks of `esper tasks`, or {PLACE}.")]
Instances = Annotated[int, Option(metavar="N", help="Held-out instances of each task.")]
Seeds = Annotated[
    int, Option(metavar="N", help="Runs of each instance, with N seeds that count up from `seed` of the config.")
]
First = Annotated[int, Option(metavar="N", help="Number of the first held-out instance.")]
RecordFolder = Annotated[
    Path | None, Option(metavar="DIR", help="Folder of the record and the figure; runs/evaluation/TASKS-HASH.")
]
Baselines = Annotated[
    str, Option(metavar="NAME,...", help="Static networks to compare with: same-size, plain, skips, or none.")
]
ReplaceRecord = Annotated[bool, Option("--overwrite", help="Replace the record in DIR.")]


def evaluate(
    controllers: Controllers = None,
    tasks: Tasks = "repair",
    instances: Instances = 200,
    seeds: Seeds = 3,
    first: First = 0,
    out: RecordFolder = None,
    settings: Settings = None,
    baselines: Baselines = "same-size,plain,skips",
    overwrite: ReplaceRecord = False,
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
    from esper.api import evaluate as compare
    from esper.leyline.config.tree import parse_setting
    from esper.runs.evaluation.contenders import trainings
    from esper.runs.evaluation.evaluation import default_folder

    names = split_names(tasks) or []
    numbers: dict[str, Any] = {"instances": instances, "seeds": seeds, "first": first}
    contenders = [each for controller in controllers or () for each in trainings(controller)]
    static = [] if baselines == "none" else split_names(baselines)
    if out is None:
        layers = [*(parse_setting(setting) for setting in settings or ()), {"baselines": static}]
        out = default_folder(contenders, names, layers, **numbers)
    options: dict[str, Any] = {"settings": settings or (), "baselines": static, "out": out, "overwrite": overwrite}
    options |= {"workers": workers, "devices": devices, "cluster": cluster}

    compare_and_print(partial(compare, contenders or None, names, **numbers, **options), out, json_)


def compare_and_print(compare: Callable[..., dict[str, Any]], folder: Path, as_json: bool) -> None:
    """Run a comparison, print its record as soon as it is there, and then name the files in its folder."""
    from rich.console import Console

    from esper.karn.evaluation import print_evaluation
    from esper.runs.evaluation.evaluation import FIGURE
    from esper.runs.workers.transports import WORKER
    from esper.store.files import EVALUATION, REPORT, to_json

    def printed(record: dict[str, Any]) -> None:
        if as_json:
            typer.echo(to_json(record), nl=False)
        else:
            print_evaluation(record, Console())

    record = compare(progress=True, ready=printed)
    if record.get("status") == WORKER or as_json:
        return
    for what, name in (("record", EVALUATION), ("figure", FIGURE), ("report", REPORT)):
        if (folder / name).exists():
            say(f"{what}: {folder / name}")
