"""Test the game `heal-unknown`: what its keys stand for, and that its budget can be moved and its compute costs."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from esper.leyline.config.tree import Config, build_config
from esper.leyline.lifecycle.masks import complete, defaults
from esper.leyline.lifecycle.view import View
from esper.leyline.lifecycle.vocabulary import Actions, Head, Op, Refusal, Stage
from esper.leyline.messages import InputError
from esper.leyline.protocols import Controller
from esper.tamiyo.rules.base import Never
from esper.tolaria.engine import Observer, Step, VectorizedEngine, play
from esper_bench.controllers.placement import Uniform
from esper_bench.controllers.regrow import Regrow
from esper_bench.evaluation.plan_search import probe_objective
from esper_bench.healing import heal as healing
from esper_bench.healing.heal import describe, heal
from esper_bench.healing.hosts import VECTORS
from esper_bench.healing.unknown import KEYS, KNOWN, MOST_SITES, UNKNOWN, UNKNOWN_HOSTS
from quick_healing import quick_hosts


@pytest.fixture(autouse=True, scope="module")
def _quick_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_hosts(tmp_path_factory.mktemp("cache")):
        yield


def engine_for(envs: int = 4, **settings: object) -> tuple[VectorizedEngine, Config]:
    task = heal(UNKNOWN_HOSTS)
    config = build_config(task.defaults, {"task": task.name, "envs": envs, "baselines": []}, settings)
    engine = VectorizedEngine(task.sealed(), config)
    engine.reset(np.array(task.keys("training")[:envs]))
    return engine, config


def test_a_key_stands_for_the_same_network_and_examples_in_every_call() -> None:
    task = heal(UNKNOWN_HOSTS)
    one, other = task.instance(KEYS["training"][5]), task.instance(KEYS["training"][5])
    assert torch.equal(one.train.x, other.train.x)
    assert torch.equal(one.probe.y, other.probe.y)
    mine, theirs = one.host().state_dict(), other.host().state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def test_the_kinds_of_damage_of_the_test_are_in_no_training() -> None:
    kinds = {part: {describe(key, UNKNOWN_HOSTS).damage.kind for key in keys[:300]} for part, keys in KEYS.items()}
    assert kinds["training"] == kinds["validation"] == set(KNOWN)
    assert kinds["heldout"] == set(UNKNOWN)
    assert not set(KNOWN) & set(UNKNOWN)


def test_one_to_three_blocks_are_damaged_and_each_number_is_met() -> None:
    sites = [describe(key, UNKNOWN_HOSTS).damage.segments for key in KEYS["training"][:300]]
    counts = np.bincount([len(set(each)) for each in sites], minlength=MOST_SITES + 1)
    assert counts[0] == 0
    assert (counts[1:] > 60).all()
    assert {segment for each in sites for segment in each} == {1, 2, 3, 4, 5}


def test_parts_share_no_host_and_no_key_with_each_other_or_with_another_task() -> None:
    numbers = {part: {describe(key, UNKNOWN_HOSTS).number for key in keys[:300]} for part, keys in KEYS.items()}
    assert len(set().union(*numbers.values())) == 3 * UNKNOWN_HOSTS.count
    assert min(min(own) for own in numbers.values()) >= max(keys.stop for keys in healing.KEYS.values())
    with pytest.raises(InputError, match="is not an instance of 'heal'"):
        describe(KEYS["training"][0], VECTORS)
    with pytest.raises(InputError, match="is not an instance of 'heal-unknown'; the keys are training 1,310,720 to"):
        describe(0, UNKNOWN_HOSTS)


def test_hosts_are_plain_and_none_is_trained_on_digits() -> None:
    facts = [describe(key, UNKNOWN_HOSTS) for keys in KEYS.values() for key in keys[: UNKNOWN_HOSTS.count]]
    assert all(each.plain and each.problem.family != "digits" for each in facts)
    assert all(each.architecture.inputs == each.problem.inputs for each in facts)


def acted(engine: VectorizedEngine, op: Op, slot: int) -> np.ndarray:
    """Carry out one operation at a slot of every environment, and return what was refused."""
    view = engine.view()
    envs = len(view.masks.op)
    wanted = {**defaults(view.space), Head.BLUEPRINT: 0, Head.TEMPO: 0 if op == Op.PRUNE else 1}
    actions = complete(view.masks, np.full(envs, op), np.full(envs, slot), wanted)
    return np.asarray(engine.step(actions)[1].refused)


def test_what_a_pruned_seed_frees_can_be_planted_elsewhere_in_the_episode() -> None:
    engine, _ = engine_for(1)
    room = 0
    while acted(engine, Op.GERMINATE, room)[0] == Refusal.NONE:
        room += 1
    assert 0 < room < len(engine.view().space.slots)
    assert acted(engine, Op.GERMINATE, room)[0] == Refusal.PARAM_BUDGET
    assert acted(engine, Op.PRUNE, 0)[0] == Refusal.NONE
    assert acted(engine, Op.GERMINATE, room)[0] == Refusal.NONE
    stage = engine.view().seeds.stage[0]
    assert stage[0] == Stage.DORMANT
    assert (stage[1 : room + 1] == Stage.TRAINING).all()


def test_incubation_says_its_gain_at_every_step() -> None:
    engine, _ = engine_for(2)
    acted(engine, Op.GERMINATE, 4)
    gains = []
    for _ in range(3):
        engine.step(Actions.wait(2))
        gains.append(engine.view().measurements.gain.mean[:, 4])
    assert np.isfinite(gains).all()
    assert (np.ptp(gains, 0) > 0).all()


def test_the_compute_of_incubating_seeds_is_paid_in_j() -> None:
    def worth(price: float, client: Controller) -> tuple[np.ndarray, np.ndarray]:
        engine, config = engine_for(steps=4, reward={"compute_price": price})
        outcome = play(engine, client)
        assert outcome is not None
        assert outcome.compute is not None
        return probe_objective(outcome, config), outcome.compute.after

    free, share = worth(0.0, Uniform())
    paid, same = worth(0.5, Uniform())
    assert (share > 0).all()
    assert np.array_equal(share, same)
    np.testing.assert_allclose(free - paid, 0.5 * share)
    assert not worth(0.5, Never())[1].any()


class Stages(Observer):
    """Records the stages after every step."""

    def __init__(self) -> None:
        self.stage: list[np.ndarray] = []

    def stepped(self, step: Step) -> None:
        self.stage.append(step.outcome.seeds.stage.copy())


class Reading(Regrow):
    """Decides as the rule, by gains that are given in place of those that incubation measures."""

    def __init__(self, gain: list[float]) -> None:
        super().__init__()
        self.gain = np.array(gain)

    def _decide(self, view: View) -> Actions:
        measured = view.measurements
        mean = np.where(np.isfinite(measured.gain.mean), self.gain, np.nan)
        return super()._decide(view._replace(measurements=measured._replace(gain=measured.gain._replace(mean=mean))))


def test_the_rule_prunes_the_loser_and_plants_what_it_frees_where_the_gain_is() -> None:
    engine, _ = engine_for(4)
    stages = Stages()
    play(engine, Reading([0.1, 0.1, 1.0, 0.1, 0.2, 0.8]), stages)
    assert (stages.stage[1][:, [2, 4]] == Stage.TRAINING).all()
    assert (stages.stage[2][:, 4] == Stage.DORMANT).all()
    assert (stages.stage[-1][:, [2, 5]] == Stage.FOSSILIZED).all()


def test_the_correction_in_closed_form_has_the_cap_of_the_game() -> None:
    host = healing.heal_eora(UNKNOWN_HOSTS).instance(KEYS["training"][0]).host
    assert isinstance(host, healing.CorrectedHost)
    assert host.cap == UNKNOWN_HOSTS.settings["governor"]["param_limit"] == 0.03
