"""Check that what goes wrong with a learner is found from the figures of its rounds."""

import pytest

from esper.leyline.config.tree import PPOConfig
from esper.simic.ppo import MENDS, ROUNDS, learning_anomalies

HEALTHY = {
    "entropy": 2.0,
    "value_loss": 0.5,
    "clip_fraction": 0.1,
    "rewarded": 1.0,
    "epochs": 4.0,
    "explained_variance": 0.3,
    "episodes": 64.0,
    "kept": 1.0,
}


def rounds(**figures):
    """Make ten healthy rounds whose return rises, but for some figures of all of them."""
    return [{**HEALTHY, "return": 0.01 * number, **figures} for number in range(ROUNDS)]


def found(rows):
    return learning_anomalies(rows, 3.0, PPOConfig())


def test_nothing_is_wrong_with_a_healthy_learner():
    assert found(rounds()) == {}


@pytest.mark.parametrize(
    ("name", "figures", "words"),
    [
        ("entropy_collapsed", {"rewarded": 0.0, "entropy": 1.4}, "fell from 3.00 to 1.40 nats before any round"),
        ("value_loss_exploded", {"value_loss": 37.0}, "the loss of the critic is 37 times"),
        ("ratios_out_of_range", {"clip_fraction": 0.62}, "the probability of 62% of the decisions"),
        ("kl_stopped", {"epochs": 1.0}, "each of the last 10 updates ended after its first pass"),
        ("critic_blind", {"explained_variance": -0.2}, "explained none of the variance of returns in 10 rounds"),
        ("nothing_kept", {"kept": 0.0}, "no seed was kept in 10 rounds, so that no network grew"),
        ("return_unchanged", {"return": 0.25}, "the mean return was 0.25 in each of 10 rounds, 640 episodes"),
    ],
)
def test_each_anomaly_is_said_alone_and_has_a_mend(name, figures, words):
    wrong = found(rounds(**figures))
    assert list(wrong) == [name]
    assert words in wrong[name]
    assert MENDS[name]


@pytest.mark.parametrize("figures", [{"epochs": 1.0}, {"explained_variance": -0.2}, {"return": 0.25}])
def test_what_must_last_is_not_said_after_nine_rounds_or_where_one_differs(figures):
    rows = rounds(**figures)
    assert found(rows[1:]) == {}
    rows[4] = {**rows[4], "epochs": 2.0, "explained_variance": 0.1, "return": 0.3}
    assert found(rows) == {}


def test_an_entropy_that_fell_after_a_reward_is_no_anomaly():
    assert found(rounds(entropy=0.2)) == {}


def test_a_critic_that_is_left_out_is_not_blamed():
    rows = rounds(value_loss=37.0, explained_variance=-0.2)
    assert learning_anomalies(rows, 3.0, PPOConfig(value_weight=0)) == {}


def test_a_constant_return_is_said_at_the_end_of_a_training_of_few_rounds():
    rows = rounds(**{"return": 0.25})[:3]
    said = {"return_unchanged": "the mean return was 0.25 in each of 3 rounds, 192 episodes"}
    assert learning_anomalies(rows, 3.0, PPOConfig(rounds=3)) == said
    assert learning_anomalies(rows, 3.0, PPOConfig(rounds=4)) == {}
    assert learning_anomalies(rows[:1], 3.0, PPOConfig(rounds=1)) == {}
