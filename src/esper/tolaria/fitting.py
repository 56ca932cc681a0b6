"""Check a task against a config, and derive the instances, the menu and the usable slots. S slots."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, drawn_with, get_blueprint
from esper.kasmina.body import Body, runs_by_row
from esper.kasmina.host import SegmentedHost, dtype_of
from esper.leyline.batches import leaves, shape_leaves
from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.leyline.task import AnyTask, Task
from esper.leyline.text import counted
from esper.tolaria.optimizer import StackedOptimizer
from esper.tolaria.runtime import resolve_device


def check_memory(task: AnyTask, config: Config, available: int) -> None:
    """Raise InputError if a population and its data alone would take more memory than is available.

    The estimate is a lower bound: value, gradient and moments of every host's parameters, the snapshots of the governor
    and of early stopping, one batch of inputs, and a copy of the examples in memory. The problems of a mixture are not known
    yet, and are left out.
    """
    rows = config.envs * (1 + config.twin) + needs_ghost(task, config)
    moments = len(StackedOptimizer(config.optimizer).rule.moments)
    with drawn_with(0):
        host = sum(parameter.nbytes for parameter in task.largest().parameters())
    numbers = sum(math.prod(shape) for shape in shape_leaves(task.inputs))
    inputs = config.data.batch_size * numbers * torch.get_default_dtype().itemsize
    snapshots = config.governor.enabled + config.early_stopping.enabled
    copies = 2 + moments + snapshots * (1 + moments)
    data = 0
    if isinstance(task, Task):
        splits = [task.train, task.probe, *([task.validation] if config.early_stopping.enabled else [])]
        parts = [part for split in splits for part in (*leaves(split.x), split.y)]
        wide = dtype_of(task.largest()).itemsize
        data = sum(part.numel() * (wide if part.is_floating_point() else part.element_size()) for part in parts)
    needed = rows * (host * copies + inputs) + data
    if needed > available:
        whose = f"whose {counted(rows, 'network')} take" if data < needed / 2 else "and the data take"
        mend = "lower envs" if data < needed / 2 else "give fewer examples, or a Dataset with stream=True"
        raise InputError(
            f"envs is {config.envs:,}, {whose} at least {needed / 2**30:,.1f} GiB, but "
            f"{available / 2**30:,.1f} GiB of memory are available; {mend}"
        )


def needs_ghost(task: AnyTask, config: Config) -> bool:
    """Return whether a row alone must run beside a copy of itself to have the bits that it has in a larger population.

    A product of one row can be rounded differently from one of several rows. Where each row runs by itself, on a CPU, there is
    no product of several rows.
    """
    if config.envs * (1 + config.twin) > 1:
        return False
    device = resolve_device(config.device)
    with drawn_with(0):
        host = task.largest()
    assert isinstance(host, SegmentedHost)
    loop = device.type == "cpu" and config.mapping == "loop"
    return not loop and not runs_by_row(host, device, config.mapping, compiled=config.compile != "off")


def instance_keys(task: AnyTask, config: Config) -> NDArray[np.int64]:
    """Return (E,) the instances that the config names."""
    keys = task.keys(config.instances)
    first, last = config.first_instance, config.first_instance + config.envs - 1
    if last >= len(keys):
        raise InputError(
            f"first_instance {first} with {counted(config.envs, 'environment')} asks for instance {last} of the "
            f"{config.instances} instances of {task.name}, which has {len(keys)}; lower one of them"
        )
    return keys.start + first + np.arange(config.envs)


def menu_of(task: AnyTask, config: Config) -> tuple[Blueprint, ...]:
    """Return the blueprints that the menu names, each of the kinds that the host's slots have."""
    names = config.blueprints if config.blueprints is not None else task.menu
    if not names:
        raise InputError(f"the menu of task {task.name!r} is empty; name at least one blueprint")
    with drawn_with(0):
        host = task.largest()
    assert isinstance(host, SegmentedHost)
    kinds = list(dict.fromkeys(slot.kind for slot in host.slots))
    if len(kinds) == 1:
        return tuple(get_blueprint(name, kinds[0]) for name in names)
    known = [[kind for kind in kinds if (kind, name) in BLUEPRINTS] for name in names]
    return tuple(
        get_blueprint(name, kind) for name, found in zip(names, known, strict=True) for kind in found or kinds[:1]
    )


def selected(body: Body, config: Config) -> NDArray[np.bool_]:
    """Return (S,) bool: the slots that may be used."""
    names = [slot.name for slot in body.slots]
    if config.slots is None:
        return np.ones(len(names), bool)
    for name in config.slots:
        if name not in names:
            raise InputError(f"the host has no slot {name!r}; it has {', '.join(names) or 'none'}")
    return np.array([name in config.slots for name in names], bool)
