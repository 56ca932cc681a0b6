"""`esper opponents`: controllers compared with opponents on held-out instances."""

from pathlib import Path
from typing import Annotated, Any

import typer

from esper.commands.evaluating import Controllers
from esper.commands.options import PLACE, Cluster, Devices, Json, Settings, Workers, say, split_names, use_one_thread


def opponents(
    controllers: Controllers = None,
    tasks: Annotated[str, typer.Option(metavar="NAME,...", help=f"Tasks of `esper tasks`, or {PLACE}.")] = "repair",
    instances: Annotated[int, typer.Option(metavar="N", help="Held-out instances of each task.")] = 200,
    seeds: Annotated[
        int,
        typer.Option(metavar="N", help="Runs of each instance, with N seeds that count up from `seed` of the config."),
    ] = 3,
    first: Annotated[int, typer.Option(metavar="N", help="Number of the first held-out instance.")] = 0,
    search_episodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Episodes of the search for the best fixed plan, and of fitting trees, on training instances; by default "
            "as many as the controllers were trained with, or 2048.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the record and the figure; runs/evaluation/TASKS-HASH."),
    ] = None,
    settings: Settings = None,
    baselines: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="Static networks to compare with: same-size, plain, skips, or none."),
    ] = "same-size,plain,skips",
    against: Annotated[
        str, typer.Option(metavar="NAME,...", help="Opponents of the tasks, such as tree,oracle; all, or none.")
    ] = "all",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the record in DIR.")] = False,
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
    from rich.console import Console

    from esper.karn.evaluation import print_evaluation
    from esper.leyline.config.tree import parse_setting
    from esper.runs.evaluation.contenders import trainings
    from esper.runs.evaluation.evaluation import FIGURE, default_folder
    from esper.runs.workers.transports import ACTOR
    from esper.store.files import EVALUATION, REPORT, to_json
    from esper_bench.evaluation.rivals import evaluate

    names = split_names(tasks) or []
    numbers: dict[str, Any] = {"instances": instances, "seeds": seeds, "first": first}
    contenders = [each for controller in controllers or () for each in trainings(controller)]
    static = [] if baselines == "none" else split_names(baselines)
    rivals = {"all": None, "none": []}.get(against, split_names(against))
    if out is None:
        layers = [*(parse_setting(setting) for setting in settings or ()), {"baselines": static, "opponents": rivals}]
        out = default_folder(contenders, names, layers, **numbers, search_episodes=search_episodes)

    def printed(record: dict[str, Any]) -> None:
        if json_:
            typer.echo(to_json(record), nl=False)
        else:
            print_evaluation(record, Console())

    record = evaluate(
        contenders,
        names,
        **numbers,
        settings=settings or (),
        baselines=static,
        out=out,
        overwrite=overwrite,
        opponents=rivals,
        search_episodes=search_episodes,
        workers=workers,
        devices=devices,
        cluster=cluster,
        progress=True,
        ready=printed,
    )
    if record.get("status") == ACTOR or json_:
        return
    for what, name in (("record", EVALUATION), ("figure", FIGURE), ("report", REPORT)):
        if (out / name).exists():
            say(f"{what}: {out / name}")
