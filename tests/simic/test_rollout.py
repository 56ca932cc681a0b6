"""Test the memory of a round: what was written is what is read, in whole sequences, and a full or an empty one says so."""

import numpy as np
import pytest
import torch

from esper.leyline.lifecycle.vocabulary import Actions, Head
from esper.simic.rollout import Rollout, TamiyoRolloutBuffer
from esper.tamiyo.policy.actor import ActorOutput
from esper.tamiyo.policy.network import SampledDecision
from esper.tamiyo.policy.observation import Observation

T, E, S, K = 3, 4, 2, 3
CHOICES = (6, S, K, 3, 5, 4)


def a_step(seed):
    """Draw every number of a step."""
    rng = np.random.default_rng(seed)

    def some(*shape):
        return rng.random(shape, np.float32)

    return ActorOutput(
        observation=Observation(
            env=some(E, 5),
            env_flags=some(E, 2),
            slot=some(E, S, 7),
            slot_flags=some(E, S, 3),
            blueprint=rng.integers(-1, K, size=(E, S)),
            cost=some(E, S, K),
            prospects=some(E, S, K, 3),
        ),
        decision=SampledDecision(
            actions=Actions(*(rng.integers(n, size=E) for n in CHOICES)),
            valid=tuple(rng.random((E, n)) < 0.5 for n in CHOICES),
            log_prob=torch.from_numpy(some(E)),
            probability=torch.zeros(E, len(Head)),
            entropy=torch.zeros(E, len(Head)),
        ),
        value=torch.from_numpy(some(E)),
        starts=rng.random(E) < 0.5,
        exploration=torch.from_numpy(rng.random((E, len(Head)))),
        idle=np.zeros(E, bool),
    )


def an_end(seed):
    rng = np.random.default_rng(100 + seed)
    return rng.random(E), np.arange(E) == seed % E


def filled(steps=T):
    buffer = TamiyoRolloutBuffer()
    for seed in range(steps):
        buffer.add(a_step(seed), T)
        buffer.close(*an_end(seed))
    return buffer


def same(one, other):
    flat = [[*r.observation, *r.actions, *r.valid, *r[3:]] for r in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def copied(rollout):
    return Rollout(*([x.clone() for x in f] if isinstance(f, list) else f.clone() for f in rollout))


@pytest.mark.parametrize("steps", [1, T])
def test_what_was_written_is_what_is_read(steps):
    rollout = filled(steps).rollout()
    for t in range(steps):
        step, (reward, end) = a_step(t), an_end(t)
        for field, row in (
            *zip(rollout.observation, step.observation, strict=True),
            *zip(rollout.actions, step.decision.actions, strict=True),
            *zip(rollout.valid, step.decision.valid, strict=True),
            (rollout.log_prob, step.decision.log_prob.numpy()),
            (rollout.value, step.value.numpy()),
            (rollout.starts, step.starts),
            (rollout.reward, reward.astype(np.float32)),
            (rollout.end, end),
        ):
            assert field.shape == (steps, *row.shape)
            np.testing.assert_array_equal(field[t].numpy(), row)


def test_observations_are_those_that_were_written():
    observations = filled().rollout().observations()
    for t in range(T):
        for field, row in zip(observations, a_step(t).observation, strict=True):
            assert field.dtype == row.dtype
            np.testing.assert_array_equal(field[t], row)


def test_a_rollout_keeps_nothing_of_what_is_written_after_it():
    buffer = filled(2)
    before = buffer.rollout()
    buffer.close(*an_end(2))
    buffer.add(a_step(2), T + 1)
    assert same(before, filled(2).rollout())


def test_a_step_keeps_nothing_of_arrays_that_change_after_it():
    step, buffer = a_step(0), TamiyoRolloutBuffer()
    buffer.add(step, T)
    buffer.close(*an_end(0))
    for field in (*step.observation, *step.decision.actions, *step.decision.valid, step.value, step.starts, step.idle):
        field[:] = 1
    assert same(buffer.rollout(), filled(1).rollout())


def test_a_buffer_that_is_read_back_goes_on_and_leaves_the_state_as_it_was():
    state = filled(2).state()
    kept, buffer = copied(Rollout(**state)), TamiyoRolloutBuffer()
    buffer.load_state(state)
    buffer.add(a_step(2), T)
    buffer.close(*an_end(2))
    assert same(buffer.rollout(), filled().rollout())
    buffer.close(*an_end(1))
    assert same(Rollout(**state), kept)


def test_a_full_buffer_takes_no_more():
    with pytest.raises(AssertionError, match="full"):
        filled().add(a_step(9), T)


@pytest.mark.parametrize("call", ["rollout", "close"])
def test_an_empty_buffer_has_nothing_to_give(call):
    arguments = {"rollout": (), "close": an_end(0)}[call]
    with pytest.raises(AssertionError, match=r"nothing|before"):
        getattr(TamiyoRolloutBuffer(), call)(*arguments)
