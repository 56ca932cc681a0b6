"""Make the mixture 'repair-tables': small tables of scikit-learn on the hosts of `repair`, sampled by key."""

from dataclasses import dataclass, replace
from functools import lru_cache

from esper.leyline.data import keys
from esper.leyline.data.batches import leaves
from esper.leyline.data.task import Instance, Lengths, Mixture, Room, Split, Task
from esper.tasks import repair, small
from esper.tasks.hosts import DamagedMLP
from esper.tasks.objectives import Classification

SUMMARY = "iris, wine and breast-cancer on the hosts of repair: sound, narrow, linear, frozen or slim MLPs"
TABLES = tuple(small.CLASSICAL)
"""The tables, which are drawn equally often."""
_DRAW = 1000  # of the table; the draws of `repair` come before it


@dataclass(frozen=True)
class TableCase:
    """Says what a key stands for, without its data.

    Attributes:
        key (int): key of the instance
        family (str): one of TABLES
        damage (str): a key of `repair.DAMAGES`
        host (DamagedMLP): factory of hosts with the features and classes of the table
    """

    key: int
    family: str
    damage: str
    host: DamagedMLP


def repair_tables() -> Mixture:
    """Sample iris, wine and breast-cancer on the hosts of repair: sound, narrow, linear, frozen or slim MLPs.

    A data set has a few hundred examples, and a host may be too narrow for it.

    The splits of a table are those of its task, the same for every key. Features are standardized by the train split.
    """
    tasks = [_table(name) for name in TABLES]
    mixture = repair.repair()
    room = mixture.room.host
    assert isinstance(room, DamagedMLP)
    inputs = -(-max(_features(task) for task in tasks) // 4) * 4  # as the room of a host rounds
    classes = max(task.objective.outputs for task in tasks)
    held = max(len(_read(task, part).y) for task in tasks for part in ("validation", "test"))
    return replace(
        mixture,
        name="repair-tables",
        summary=SUMMARY,
        room=Room(
            replace(room, inputs=inputs, outputs=classes),
            (inputs,),
            Lengths(probe=max(len(task.probe.y) for task in tasks), held=held),
        ),
        sample=sample,
        test=lambda key: _read(_table(describe(key).family), "test"),
        objective=Classification(classes),
    )


def sample(key: int) -> Instance:
    """Return the instance of a key, without its test split. InputError for a key outside `repair.RANGES`."""
    facts = describe(key)
    task = _table(facts.family)
    train, probe, validation = (_read(task, part) for part in ("train", "probe", "validation"))
    return Instance(facts.host, train, probe, validation, task.objective.outputs, classes=task.classes)


def describe(key: int) -> TableCase:
    """Return what a key stands for. InputError for a key outside `repair.RANGES`."""
    damaged = repair.describe(key)
    drawn = keys.uniform(keys.key(keys.Purpose.INSTANCE, key, _DRAW))[0]
    name = TABLES[int(drawn * len(TABLES))]
    task = _table(name)
    host = replace(damaged.host, inputs=_features(task), outputs=task.objective.outputs)
    return TableCase(key, name, damaged.damage, host)


@lru_cache
def _table(name: str) -> Task:
    return small.classical(name)


def _features(task: Task) -> int:
    return leaves(task.train.x)[0].shape[1]


def _read(task: Task, part: str) -> Split:
    """Return a split as hosts read it: the features are standardized, because rows of a mixture share no scaling."""
    split: Split | None = getattr(task, part)
    assert split is not None
    return Split(task.read(split.x), split.y)
