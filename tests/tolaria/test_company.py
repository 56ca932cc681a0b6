"""Check that environments of the mixture `repair`, whose splits differ in size, are bitwise the same in any company."""

import numpy as np
import pytest
import torch

from esper.kasmina.stack.body import APART
from esper.leyline.data.task import Lengths
from esper.leyline.lifecycle.slots import Kind
from esper.leyline.lifecycle.view import take
from esper.leyline.lifecycle.vocabulary import ADDED, IN_BUDGET, Actions, Stage, among
from esper.leyline.messages import InputError
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.repair import POOLS, SIZES, RepairSplit, describe, held_back, repair, sample
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.stacked.data import Format, stack_splits
from populations import small_config

SHORT = (1375, 2244, 31901)  # probe splits of 46, 46 and 121 examples; the second has a block that is frozen
LONG = next(key for key in range(1000) if describe(key).damage == "frozen" and len(sample(key).probe.y) == 200)
OTHERS = (3, 4, 5, 6, 7)
KEYS = (*SHORT, LONG)
STEPS = 10


def decided(view):
    """Return random valid decisions that depend on an environment's own instance and masks alone."""
    own = [
        RandomValid().act(
            view._replace(
                masks=take(view.masks, slice(env, env + 1)),
                space=view.space._replace(seed=int(key), number=np.zeros(1, np.int64)),
            )
        )
        for env, key in enumerate(view.space.instance)
    ]
    return Actions(*(np.concatenate(head) for head in zip(*own, strict=True)))


def leaves(value):
    """List the arrays of a record, nested or not, in order; scalars as arrays."""
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, tuple) else [np.asarray(value)]


def grown(keys, **top):
    """Grow by random decisions; return what each instance's episode measures and trains, by key, and the stages of its slots."""
    config = small_config({"probe": {"sensors_every": 2}}, envs=len(keys), steps=STEPS, **top)
    engine = VectorizedEngine(repair(), config)
    view = engine.reset(np.array(keys))
    seen, stages = [[] for _ in keys], []
    for _ in range(STEPS):
        view, outcome = engine.step(decided(view))
        stages.append(view.seeds.stage.copy())
        for env, found in enumerate(seen):
            here = slice(env, env + 1)
            record = view.measurements, view.seeds, view.masks, outcome.after, view.added_params, outcome.accepted
            found += [leaf for part in record for leaf in leaves(take(part, here))]
            for name, column in engine.population.body.host.columns.items():
                # what is left over from a step, and there only where some row needs it
                if name not in ("gradient", "fixed"):
                    found.append(column[env].cpu().numpy().copy())
            for slot in np.flatnonzero(among(view.seeds.stage[env], IN_BUDGET)).tolist():
                module = engine.population.body.seed_module(view.seeds, env, slot)
                found += [parameter.detach().cpu().numpy().copy() for parameter in module.parameters()]
    for split in (engine.population.validation_splits(), [held_back(key) for key in keys]):
        for figures in engine.evaluate(split):
            for env, found in enumerate(seen):
                found.append(figures[env : env + 1])
    return dict(zip(keys, seen, strict=True)), np.stack(stages, 1)


def assert_bitwise(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@pytest.fixture(scope="module", params=["shadow", pytest.param("ste", marks=pytest.mark.slow)])
def singles(request):
    """Grow each instance with no other; return the config of an incubation, and what each grew to, by key."""
    top = {"lifecycle": {"incubation": request.param, "max_training_seeds": 2}}
    return top, {key: grown((key,), **top) for key in KEYS}


def test_the_instances_differ_in_every_size():
    sizes = {(len(sample(key).train.y), len(sample(key).probe.y), len(held_back(key).y)) for key in KEYS}
    assert len({probe for _, probe, _ in sizes}) == 3
    assert min(train for train, _, _ in sizes) < 256 < max(train for train, _, _ in sizes)


def test_every_instance_trains_seeds_and_some_take_part(singles):
    stages = {key: stage for key, (_, stage) in singles[1].items()}
    assert all((stage == Stage.TRAINING).any() for stage in stages.values())
    assert sum(among(stage, ADDED).any() for stage in stages.values()) > 1


def test_an_instance_is_bitwise_the_same_alone_and_in_company(singles):
    top, alone = singles
    for keys in ((SHORT[2], LONG), SHORT[:2], (*OTHERS, LONG, *SHORT)):
        together, _ = grown(keys, **top)
        for known in set(keys) & set(alone):
            assert_bitwise(together[known], alone[known][0][known])


def test_an_instance_is_bitwise_the_same_beside_its_twin(singles):
    top, alone = singles
    key = SHORT[2]
    assert_bitwise(grown((key, LONG), twin=True, **top)[0][key], alone[key][0][key])


def test_no_split_of_repair_is_longer_than_its_room():
    assert repair().lengths == Lengths(probe=SIZES[RepairSplit.PROBE], held=SIZES[RepairSplit.TEST])
    assert SIZES[RepairSplit.VALIDATION] <= SIZES[RepairSplit.TEST]
    assert POOLS[RepairSplit.PROBE] >= SIZES[RepairSplit.PROBE]


def test_rows_of_a_length_are_padded_alike_with_one_split_or_several():
    splits, row = [sample(key).probe for key in SHORT[1:]], np.array([0, 1, 0])
    together = stack_splits(splits, row, Format((64,), torch.device("cpu")), length=200)
    one = stack_splits(splits[:1], np.zeros(2, np.int64), Format((64,), torch.device("cpu")), length=200)
    for mine, theirs in zip(one[:4], together[:4], strict=True):
        assert torch.equal(mine[0], theirs[0])
    assert together.real.sum(1).tolist() == [46, 121, 46]


def test_a_split_that_is_longer_than_the_room_is_refused():
    probe = sample(SHORT[2]).probe
    with pytest.raises(InputError, match="a split has 121 examples, more than the 120 that every row"):
        stack_splits([probe], np.zeros(2, np.int64), Format((64,), torch.device("cpu")), length=120)


def test_an_instance_that_runs_by_itself_is_bitwise_the_same_at_another_index(monkeypatch):
    monkeypatch.setitem(APART, Kind.VECTOR, 1)
    alone, among_others = grown((SHORT[2],)), grown((SHORT[0], SHORT[2]))
    assert_bitwise(alone[0][SHORT[2]], among_others[0][SHORT[2]])
