"""Test the apprentice: who acts, what is remembered, and what is learnt from it."""

import copy

import numpy as np
import pytest
import torch

from esper.leyline.config.tree import build_config
from esper.leyline.lifecycle.vocabulary import Head, Op
from esper.runs.configuration import TRAINING
from esper.runs.folder.interrupt import Interrupt
from esper.runs.train import LED, Trainer, cohorts_of, settings_of_policy
from esper.runs.workers.workers import Stop
from esper.simic.client import Apprentice, led_by_teacher
from esper.simic.ppo import PPO
from esper.simic.rewards import get_reward
from esper.store.tensors import pack
from esper.tamiyo.policy.controller import Language, Policy
from esper.tamiyo.policy.observation import input_names
from esper.tamiyo.rules.heuristic import Heuristic
from esper.tolaria.engine import VectorizedEngine
from populations import blobs, small_config

ENVS, STEPS = 8, 8
EAGER = {"plant_below": 2.0, "weak_below": 2.0, "holding_patience": 1, "training_patience": 1}
"""A rule that plants as soon as it may."""


class Remembering(Heuristic):
    """Decides by the rule, and keeps all that it ever decided."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.decided = []

    def act(self, view):
        self.decided.append(super().act(view))
        return self.decided[-1]


class Lesson:
    """Runs one episode of an apprentice under a teacher that leads a share of the environments."""

    def __init__(self, led):
        config = small_config(envs=ENVS, steps=STEPS, heuristic=EAGER)
        engine = VectorizedEngine(blobs(), config)
        self.teacher = Remembering(config.heuristic, config.gates)
        learner = PPO(Policy.fresh(Language.of([engine.space]), 0), config.ppo, 0)
        self.apprentice = Apprentice(learner, get_reward(config.reward), self.teacher, led)
        self.views, self.outcomes = [engine.reset()], []
        while self.views[-1].step < STEPS:
            view, outcome = engine.step(self.apprentice.act(self.views[-1]))
            self.apprentice.store(outcome)
            self.views.append(view)
            self.outcomes.append(outcome)

    def acted(self, head):
        """Return (T, E) of what was done."""
        return np.stack([outcome.actions[head] for outcome in self.outcomes])

    def taught(self, head):
        """Return (T, E) of what the teacher would have done."""
        return np.stack([actions[head] for actions in self.teacher.decided])


@pytest.fixture(scope="module")
def lesson():
    return Lesson(0.5)


def test_every_second_environment_follows_the_teacher_and_the_rest_do_not(lesson):
    acted, taught = (np.stack([decided(head) for head in Head]) for decided in (lesson.acted, lesson.taught))
    np.testing.assert_array_equal(acted[..., 1::2], taught[..., 1::2])
    assert (acted[..., ::2] != taught[..., ::2]).any((0, 1)).all()


@pytest.mark.parametrize("head", Head, ids=lambda head: head.name)
def test_what_is_learnt_from_is_the_decision_of_the_teacher_whoever_acted(lesson, head):
    np.testing.assert_array_equal(lesson.apprentice.rollout().actions[head].numpy(), lesson.taught(head))


def test_the_teacher_of_the_lesson_plants_and_keeps(lesson):
    assert {Op.GERMINATE, Op.ADVANCE, Op.FOSSILIZE} <= set(lesson.taught(Head.OP).ravel().tolist())


def test_a_decision_of_the_teacher_is_among_the_valid_ones_that_are_kept_with_it(lesson):
    rollout = lesson.apprentice.rollout()
    for actions, valid in zip(rollout.actions, rollout.valid, strict=True):
        assert valid.gather(-1, actions.unsqueeze(-1)).all()


def test_the_apprentice_remembers_what_was_done_not_what_was_taught(lesson):
    # the observation of a step names the operation of the step before
    names = [f"last_{op.name.lower()}" for op in Op]
    columns = [input_names(lesson.apprentice.learner.policy.language.sensors)[0].index(name) for name in names]
    policy, rollout = lesson.apprentice.learner.policy, lesson.apprentice.rollout()
    seen = policy.batch(rollout.observations(), policy.language.blueprints).env[1:][..., columns].argmax(-1)
    np.testing.assert_array_equal(seen, lesson.acted(Head.OP)[:-1])


@pytest.mark.parametrize(("led", "share"), [(1.0, 8), (0.25, 2), (0.0, 0)])
def test_the_teacher_leads_its_share_of_the_environments(led, share):
    lesson = Lesson(led)
    alike = (np.stack([lesson.acted(h) == lesson.taught(h) for h in Head])).all((0, 1))
    assert alike.sum() == share
    assert np.array_equal(alike, led_by_teacher(np.arange(ENVS), led))


@pytest.mark.parametrize("share", [*LED, 0.0, 0.3, 0.9])
def test_a_teacher_leads_its_share_of_any_consecutive_environments(share):
    led = led_by_teacher(np.arange(100), share)
    for first in range(0, 40, 3):
        for count in range(1, 40):
            assert abs(led[first : first + count].sum() - share * count) < 1 + 1e-9


def test_the_reward_is_that_of_what_was_done():
    one, other = (Lesson(led).apprentice.rollout() for led in (1.0, 0.0))
    assert not torch.equal(one.reward, other.reward)


def a_trainer(**ppo):
    task = blobs()
    config = build_config(
        task.defaults,
        TRAINING,
        {"envs": ENVS, "steps": STEPS, "data": {"batch_size": 12, "batches_per_step": 2}, "heuristic": EAGER},
        {"reward": {"group_size": 4}, "ppo": {"validate_envs": 4, **ppo}},
    )
    (cohort,) = cohorts_of(task.sealed(), config)
    return Trainer([cohort], Policy.fresh(Language.of([cohort.engine.space]), 0, settings_of_policy(config)), config)


@pytest.fixture(scope="module")
def imitated():
    """Train for five rounds of imitation; return the trainer, and the share that the teacher led in each."""
    trainer, led = a_trainer(imitation_rounds=5, update_epochs=1, minibatches=1), []
    for number in range(-5, 0):
        trainer.imitate(number, Interrupt())
        led.append(trainer.clients["imitation"][0].led)
    return trainer, led


@pytest.mark.campaign
def test_rounds_of_imitation_raise_the_likelihood_of_the_decisions_of_the_teacher():
    trainer = a_trainer(imitation_rounds=6, lr=3e-3)
    first, *_, last = (trainer.imitate(number, Interrupt())["log_likelihood"] for number in range(-6, 0))
    assert last > first + 0.2


def test_the_teacher_leads_less_from_round_to_round(imitated):
    _, led = imitated
    assert led == [*LED, LED[-1]]


def test_the_last_round_of_imitation_makes_as_many_passes_as_it_is_told_to():
    trainer, counts = a_trainer(imitation_rounds=2, imitation_passes=3, update_epochs=1, minibatches=2), []
    for number in (-2, -1):
        trainer.imitate(number, Interrupt())
        counts.append(int(next(iter(trainer.learner.state()["moments"].values()))["step"]))
    rounds = counts[0], counts[1] - counts[0]
    assert rounds == (2, 12)  # minibatches of one rollout in one pass, and of two in three


class After:
    """Asks to stop after so many steps of a trainer."""

    def __init__(self, trainer, steps):
        self.trainer, self.steps = trainer, steps

    @property
    def asked(self):
        return self.trainer.steps >= self.steps


def test_a_round_in_which_the_policy_acts_too_goes_on_after_an_interrupt_as_if_there_was_none():
    whole, first, second = (a_trainer(imitation_rounds=2, update_epochs=1) for _ in range(3))
    for trainer in (whole, first):
        trainer.imitate(-2, Interrupt())
    whole.imitate(-1, Interrupt())
    with pytest.raises(Stop):
        first.imitate(-1, After(first, STEPS + STEPS // 2))
    second.load_state(copy.deepcopy(first.state()))
    second.imitate(-1, Interrupt())
    for mine, theirs in zip(
        second.shown[-1].rollouts[0].observation, whole.shown[-1].rollouts[0].observation, strict=True
    ):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_what_another_worker_was_shown_is_played_again_to_the_same_bits():
    whole, second = (a_trainer(imitation_rounds=3, update_epochs=1) for _ in range(2))
    for number in (-3, -2):
        whole.imitate(number, Interrupt())
    state = copy.deepcopy(whole.state())
    for shown in state["shown"]:
        shown["rollouts"] = []
    second.load_state(state)
    assert [(shown.part.number, place) for shown, place in second.lacking()] == [(-3, 0), (-2, 0)]
    for trainer in (whole, second):
        trainer.imitate(-1, Interrupt())
    assert second.lacking() == []
    mine, theirs = (
        pack({name: state[name] for name in ("number", "steps", "record", "policy", "learner", "shown")})
        for state in (whole.state(), second.state())
    )
    assert mine == theirs


def test_what_the_teacher_has_shown_is_kept_until_learning_begins(imitated):
    trainer, _ = imitated
    before = [shown.rollouts[0].actions[Head.OP].clone() for shown in trainer.shown]
    assert len(before) == 5
    assert not all(torch.equal(before[0], other) for other in before[1:])
    trainer.learn(0, Interrupt())
    assert trainer.shown == []
