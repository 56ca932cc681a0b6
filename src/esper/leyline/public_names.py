"""The public names of the package: the one table behind `import esper`, `esper.__all__` and the Python reference."""

from collections.abc import Mapping

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Grow, train and compare": {
        "grow": "api",
        "train": "api",
        "resume": "calls",
        "evaluate": "calls",
        "show": "calls",
        "stream": "runs.streaming",
        "open_run": "karn.reader",
        "report": "karn.report.page:write_report",
        "draw_report": "karn.report.page",
        "compare": "karn.report.compared",
    },
    "Grow in your own training loop": {
        "Growth": "runs.growth",
        "heal": "runs.healing",
        "Healed": "runs.healed",
        "graft": "kasmina.grafted",
        "ungraft": "kasmina.grafted",
        "attach": "kasmina.adapter",
        "load_grown": "kasmina.saving",
    },
    "Grown networks": {
        "load": "api",
        "GrownNetwork": "kasmina.network",
        "draw": "kasmina.drawing",
        "Interface": "leyline.task",
    },
    "Tasks and data": {
        "task": "tasks.custom:task_from",
        "get_task": "tasks.catalog",
        "Task": "leyline.task",
        "Mixture": "leyline.task",
        "Instance": "leyline.task",
        "Split": "leyline.task",
        "Objective": "leyline.task",
        "Pixels": "leyline.task",
        "Scaling": "leyline.task",
        "Room": "leyline.task",
        "Lengths": "leyline.task",
    },
    "Hosts and blueprints": {
        "mlp": "tasks.hosts",
        "cnn": "tasks.hosts",
        "transformer": "tasks.hosts",
        "gru": "tasks.hosts",
        "SegmentedHost": "kasmina.host",
        "SlotSpec": "leyline.slots",
        "Kind": "leyline.streams",
        "Site": "leyline.sites",
        "Stream": "leyline.streams",
        "Vector": "leyline.streams",
        "Map": "leyline.streams",
        "Sequence": "leyline.streams",
        "find_sites": "kasmina.find_sites",
        "FoundSites": "kasmina.find_sites",
        "Tap": "leyline.slots",
        "Linear": "kasmina.layers",
        "blueprint": "kasmina.blueprints",
        "check_rows": "api",
    },
    "Configuration": {
        "build_config": "leyline.config",
        "Config": "leyline.config",
        "RewardConfig": "leyline.config",
    },
    "Controllers and the engine": {
        "Cites": "leyline.protocols",
        "PolicyClient": "leyline.protocols",
        "Resumable": "leyline.protocols",
        "Senses": "leyline.protocols",
        "SelectsSensors": "leyline.protocols",
        "Explains": "leyline.protocols",
        "get_controller": "tamiyo.catalog",
        "VectorizedEngine": "tolaria.engine",
    },
    "What a controller decides": {
        "Actions": "leyline.actions",
        "Head": "leyline.actions",
        "Op": "leyline.actions",
        "Blend": "leyline.actions",
    },
    "What a controller sees": {
        "View": "leyline.view",
        "Space": "leyline.view",
        "BlueprintInfo": "leyline.view",
        "Seeds": "leyline.view",
        "Stage": "leyline.stages",
        "Masks": "leyline.view",
        "Measurements": "leyline.view",
        "Estimate": "leyline.view",
        "CoalitionValues": "leyline.view",
        "ComputeShares": "leyline.view",
    },
    "What came of a decision": {
        "Outcome": "leyline.view",
        "Scores": "leyline.view",
        "Refusal": "leyline.verdicts",
        "Vital": "leyline.verdicts",
        "Reward": "leyline.protocols",
    },
    "Errors": {
        "InputError": "leyline.errors",
        "DataFault": "leyline.errors",
        "LearningError": "leyline.errors",
        "OutOfMemory": "leyline.errors",
        "UserCodeError": "leyline.errors",
    },
}
"""By heading of the reference: each public name and its module, without the prefix `esper.`; after a colon, its name there."""

HOMES: Mapping[str, tuple[str, str]] = {
    name: (home.partition(":")[0], home.partition(":")[2] or name)
    for names in GROUPS.values()
    for name, home in names.items()
}
"""The module of every public name, without the prefix `esper.`, and its name in that module."""
