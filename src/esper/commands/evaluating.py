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

SearchEpisodes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Episodes of the search for the best fixed plan, and of fitting trees, on training instances; by default "
        "as many as the controllers were trained with, or 2048.",
    ),
]
Opponents = Annotated[
    str,
    typer.Option(
        metavar="NAME,...", help="Opponents of the tasks (`esper docs opponents`), such as tree,oracle; all, or none."
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
    search_episodes: SearchEpisodes = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the record and the figure; runs/evaluation/TASKS-HASH."),
    ] = None,
    settings: Settings = None,
    baselines: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="Static networks to compare with: same-size, plain, skips, or none."),
    ] = "same-size,plain,skips",
    opponents: Opponents = "all",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the record in DIR.")] = False,
    json_: Json = False,
    workers: Workers = None,
    devices: Devices = None,
    cluster: Cluster = None,
) -> None:
    """Compare controllers with rules and other opponents, on the same held-out instances with the same seeds.

    The rules never, random-valid and heuristic, and the best fixed plan, which is searched for, always take part. Every task
    adds opponents of its own, among them an oracle, which knows the best plan of each instance. Controllers are compared by J
    on the test split: the metric less rent for added parameters. Networks that an earlier call with the same settings has
    grown are used again. Without DIR, each set of arguments has its own folder.
    """
    use_one_thread()
    from rich.console import Console

    from esper.calls import evaluate as compare
    from esper.karn.evaluation import print_evaluation
    from esper.leyline.config import parse_setting
    from esper.runs.contenders import trainings
    from esper.runs.evaluation_folder import FIGURE, default_folder
    from esper.runs.ranks_crew import ACTOR
    from esper.store.files import EVALUATION, REPORT, to_json

    names = split_names(tasks) or []
    numbers: dict[str, Any] = {"instances": instances, "seeds": seeds, "first": first}
    contenders = [each for controller in controllers or () for each in trainings(controller)]
    static = [] if baselines == "none" else split_names(baselines)
    against = {"all": None, "none": []}.get(opponents, split_names(opponents))
    if out is None:
        layers = [*(parse_setting(setting) for setting in settings or ()), {"baselines": static, "opponents": against}]
        out = default_folder(contenders, names, layers, **numbers, search_episodes=search_episodes)
    options: dict[str, Any] = {"settings": settings or (), "baselines": static, "out": out, "overwrite": overwrite}
    options |= {"opponents": against, "search_episodes": search_episodes}
    options |= {"workers": workers, "devices": devices, "cluster": cluster}

    def printed(record: dict[str, Any]) -> None:
        if json_:
            typer.echo(to_json(record), nl=False)
        else:
            print_evaluation(record, Console())

    record = compare(contenders, names, **numbers, **options, progress=True, ready=printed)
    if record.get("status") == ACTOR or json_:
        return
    for what, name in (("record", EVALUATION), ("figure", FIGURE), ("report", REPORT)):
        if (out / name).exists():
            say(f"{what}: {out / name}")
