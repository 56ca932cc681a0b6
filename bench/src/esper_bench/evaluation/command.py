"""Compare controllers with opponents on held-out instances: `esper opponents`."""

from functools import partial
from typing import Annotated, Any

import typer

from esper.commands.evaluating import (
    Baselines,
    Controllers,
    First,
    Instances,
    RecordFolder,
    ReplaceRecord,
    Seeds,
    Tasks,
    compare_and_print,
)
from esper.commands.options import Cluster, Devices, Json, Settings, Workers, split_names, use_one_thread


def opponents(
    controllers: Controllers = None,
    tasks: Tasks = "repair",
    instances: Instances = 200,
    seeds: Seeds = 3,
    first: First = 0,
    search_episodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Episodes of the search for the best fixed plan, and of fitting trees, on training instances; by default "
            "as many as the controllers were trained with, or 2048.",
        ),
    ] = None,
    out: RecordFolder = None,
    settings: Settings = None,
    baselines: Baselines = "same-size,plain,skips",
    against: Annotated[
        str, typer.Option(metavar="NAME,...", help="Opponents of the tasks, such as tree,oracle; all, or none.")
    ] = "all",
    overwrite: ReplaceRecord = False,
    json_: Json = False,
    workers: Workers = None,
    devices: Devices = None,
    cluster: Cluster = None,
) -> None:
    """Compare controllers with rules and with searched, fitted and all-knowing opponents, on the same held-out instances.

    The best fixed plan, which is searched for, always takes part. Every task adds opponents of its own, among them an oracle,
    which knows the best plan of each instance. Otherwise as `esper eval`.
    """
    use_one_thread()
    from esper.leyline.config.tree import parse_setting
    from esper.runs.evaluation.contenders import trainings
    from esper.runs.evaluation.evaluation import default_folder
    from esper_bench.evaluation.rivals import evaluate

    names = split_names(tasks) or []
    numbers: dict[str, Any] = {"instances": instances, "seeds": seeds, "first": first}
    contenders = [each for controller in controllers or () for each in trainings(controller)]
    static = [] if baselines == "none" else split_names(baselines)
    rivals = {"all": None, "none": []}.get(against, split_names(against))
    if out is None:
        layers = [*(parse_setting(setting) for setting in settings or ()), {"baselines": static, "opponents": rivals}]
        out = default_folder(contenders, names, layers, **numbers, search_episodes=search_episodes)

    options: dict[str, Any] = {"settings": settings or (), "baselines": static, "out": out, "overwrite": overwrite}
    options |= {"opponents": rivals, "search_episodes": search_episodes}
    options |= {"workers": workers, "devices": devices, "cluster": cluster}
    compare_and_print(partial(evaluate, contenders, names, **numbers, **options), out, json_)
