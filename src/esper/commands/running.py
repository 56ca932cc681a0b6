"""Make run folders: `esper grow`, `esper train` and `esper resume`."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from esper.commands import options
from esper.commands.viewing import Watched, open_window
from esper.leyline.messages import InputError


def grow(
    task: Annotated[str, Argument(help=f"A task of `esper tasks`, or {options.PLACE}.")],
    controller: Annotated[
        str | None,
        Option(
            help="The name of a controller (`esper controller`), a schedule file, a file of trees, the run folder of a "
            "trained controller, or path.py:function or path.py:Class for one of your own (`esper docs own-controller`); by "
            "default heuristic."
        ),
    ] = None,
    envs: options.Envs = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    seed: options.Seed = None,
    device: options.Device = None,
    compile_: options.Compile = None,
    run: Annotated[
        Path | None, options.of_output(metavar="DIR", help="Run folder; runs/TASK-CONTROLLER-sSEED.")
    ] = None,
    config_file: options.ConfigFile = None,
    settings: options.Settings = None,
    json_: options.Json = False,
    overwrite: options.Overwrite = False,
    models: Annotated[str | None, options.of_output(metavar="all|best|none", help="Networks to export.")] = None,
    slots: Annotated[str | None, Option(metavar="NAME,...", help="Slots that may be planted.")] = None,
    baselines: Annotated[
        str | None,
        Option(metavar="NAME,...", help="Static networks to compare with: twin, same-size, plain, skips, or none."),
    ] = None,
    twin: Annotated[bool | None, Option("--twin/--no-twin", help="Add or remove the baseline twin.")] = None,
    watch: Watched = False,
    workers: options.Workers = None,
    devices: options.Devices = None,
) -> None:
    """Grow a population on a task, compare it with static networks (`esper docs baselines`), and export the networks.

    Settings are taken from the task, a trained controller, FILE, --set and the other options; a later one of these overrides
    an earlier one.
    """
    options.use_one_thread()
    from esper import api
    from esper.leyline.reference import is_own_controller
    from esper.runs.configuration import growth_config, load_config_file
    from esper.store.disk import file_name
    from esper.tasks.catalog import get_task

    chosen = get_task(task)
    from_file = {} if config_file is None else load_config_file(str(config_file))
    if from_file.get("task", task) != task:
        mend = f"not {task!r}; name the one you mean"
        raise InputError(f"--config {config_file} is of task {from_file['task']!r}, {mend}")
    code = from_file.get("controller")
    if controller is None and isinstance(code, str) and is_own_controller(code):
        raise InputError(
            f"--config {config_file} names the controller {code!r}, whose code a file of settings may not start; if you "
            f"trust it, give --controller {code}"
        )
    given: dict[str, Any] = {"task": task, "controller": controller, "envs": envs, "steps": steps, "epochs": epochs}
    given |= {"seed": seed, "device": device, "models": models, "slots": options.split_names(slots)}
    given |= {"baselines": baselines, "twin": twin, "compile": compile_}
    layers = options.read_layers("grow", from_file, settings, given)
    config, _ = growth_config(chosen, *layers)
    named = config.controller if is_own_controller(config.controller) else Path(config.controller).stem
    folder = run or Path("runs") / f"{file_name(task)}-{file_name(named)}-s{config.seed}"
    made: dict[str, Any] = {"run": folder, "overwrite": overwrite, "workers": workers, "devices": devices}
    with open_window(folder, watch):  # no bar while the window has the terminal
        summary = api.grow(chosen, config, progress=not watch, on_interrupt="return", **made)
    options.finish(summary, folder, json_)


def train(
    tasks: Annotated[
        list[str] | None,
        Argument(metavar="[TASK]...", help=f"Tasks of `esper tasks`, or {options.PLACE}; repair.", show_default=False),
    ] = None,
    preset: Annotated[
        str,
        Option(
            metavar="quick|standard|long",
            help="Length of the training: 2,432, 30,592 or 96,512 episodes of a task; on repair 5 minutes, 1 or 3 hours of a "
            "core, on heal 9 minutes, 2 or 6 hours.",
        ),
    ] = "quick",
    rounds: Annotated[
        str | None, Option(metavar="N", help="Rounds: one episode of every environment, and one update.")
    ] = None,
    envs: Annotated[str | None, Option(metavar="E", help="Environments of each task.")] = None,
    steps: options.Steps = None,
    epochs: options.Epochs = None,
    seed: options.Seed = None,
    device: options.Device = None,
    reward: Annotated[
        str | None,
        Option(
            metavar="PLACE",
            help="path.py:function or module:function that makes a reward of your own (`esper docs own-controller`), instead of "
            "that of the config (the keys reward.*).",
        ),
    ] = None,
    run: Annotated[Path | None, options.of_output(metavar="DIR", help="Run folder; runs/train-TASKS-sSEED.")] = None,
    config_file: options.ConfigFile = None,
    settings: options.Settings = None,
    json_: options.Json = False,
    overwrite: options.Overwrite = False,
    twin: Annotated[bool | None, Option("--twin/--no-twin", help="Train never-grow twins too.")] = None,
    watch: Watched = False,
    workers: options.Workers = None,
    devices: options.Devices = None,
    cluster: options.Cluster = None,
) -> None:
    """Train a controller by growing populations of hosts; `esper grow TASK --controller DIR` then uses it.

    Settings are taken from the task, the defaults of training, the preset, FILE, --set and the other options; a later one of
    these overrides an earlier one.
    """
    options.use_one_thread()
    from esper import api
    from esper.runs.configuration import load_config_file, training_configs
    from esper.simic.rewards import get_reward
    from esper.store.disk import file_name
    from esper.tasks.catalog import get_task

    from_file = {} if config_file is None else dict(load_config_file(str(config_file)))
    listed = from_file.pop("tasks", None) or ([from_file["task"]] if "task" in from_file else None)
    if listed is not None and (not isinstance(listed, list) or not all(isinstance(name, str) for name in listed)):
        raise InputError(
            f"--config {config_file} names the tasks {listed!r}; give a list of names, as [repair, digits]"
        )
    names = list(tasks or listed or ("repair",))
    if listed is not None and names != listed:
        mend = f"not {', '.join(names)}; name the ones you mean"
        raise InputError(f"--config {config_file} is of {', '.join(listed)}, {mend}")
    chosen = [get_task(name) for name in names]
    given: dict[str, Any] = {"envs": envs, "steps": steps, "epochs": epochs, "seed": seed, "device": device}
    given |= {"twin": twin, "ppo": None if rounds is None else {"rounds": rounds}}
    configs = training_configs(chosen, preset, *options.read_layers("train", from_file, settings, given))
    folder = run or Path("runs") / f"train-{'+'.join(map(file_name, names))}-s{configs[0].seed}"
    made: dict[str, Any] = {"run": folder, "overwrite": overwrite, "progress": not watch, "on_interrupt": "return"}
    made |= {"workers": workers, "devices": devices, "cluster": cluster}
    with open_window(folder, watch):
        summary = api.train(chosen, configs, reward=reward or get_reward, **made)
    options.finish(summary, folder, json_)


def resume(
    run: Annotated[Path, Argument(help="The run folder of `esper grow` or `esper train`.")],
    tasks: Annotated[list[str] | None, options.of_place("the run's task", "--task")] = None,
    controller: Annotated[str | None, options.of_place("the run's controller")] = None,
    reward: Annotated[str | None, options.of_place("the reward of a training")] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Change a key of the config, on record; may be repeated."),
    ] = None,
    other_data: Annotated[
        bool, Option("--other-data", help="Continue although the data differ from the run's, on record.")
    ] = False,
    json_: options.Json = False,
    workers: options.Workers = None,
    devices: options.Devices = None,
    cluster: options.Cluster = None,
) -> None:
    """Continue a run that was interrupted or killed; it gets the same numbers as without the break (`esper docs checkpoints`).

    The run continues from its last checkpoint, or starts again from its config.yaml if it has none. The summary of a finished
    run is printed. With --set, as steps=48 or ppo.rounds=200, a finished run continues too. A run on a task, a controller or a
    reward of your own needs --task, --controller or --reward, because a run folder alone may not start code. A controller that
    was a Python object must be given in Python: esper.resume(RUN, controller=...).
    """
    options.use_one_thread()
    from esper import api

    made: dict[str, Any] = {
        "task": tasks or None,
        "controller": controller,
        "reward": reward,
        "settings": settings or (),
    }
    made |= {"other_data": other_data, "workers": workers, "devices": devices, "cluster": cluster}
    summary = api.resume(run, progress=True, on_interrupt="return", **made)
    options.finish(summary, run, json_)
