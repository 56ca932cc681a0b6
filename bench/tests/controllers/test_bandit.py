"""Test the bandit over plans: its posterior, its exploration, what it learns, and its file."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from esper.leyline.config.tree import build_config
from esper.leyline.messages import InputError
from esper.tamiyo.catalog import find_controller, get_controller
from esper_bench.controllers.bandit import (
    NAMES,
    NOISE,
    PRIOR,
    Bandit,
    Posterior,
    contexts,
    load_bandit,
    save_bandit,
)
from esper_bench.controllers.healing_features import FEATURES, UNKNOWN
from esper_bench.controllers.plans import BYPASS, HERE, NONE, UNIFORM

D = len(FEATURES) + 1


def some(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def taught(seed: int, count: int = 40) -> Bandit:
    """Make a bandit that learnt gains of one plan, which are linear in the features."""
    bandit, truth = Bandit(), some(seed, D) * 0.05
    for x in contexts(some(seed + 1, count, len(FEATURES))):
        bandit.learn(BYPASS, x, float(x @ truth))
    return bandit


@given(st.integers(0, 2**16), st.integers(0, 12))
@settings(max_examples=20, deadline=None)
def test_the_posterior_is_that_of_all_observations_at_once(seed: int, count: int) -> None:
    x, gain = some(seed, count, 5), some(seed + 1, count)
    model = Posterior.prior(5)
    for row, value in zip(x, gain, strict=True):
        model = model.observed(row, float(value))
    covariance = np.linalg.inv(PRIOR * np.eye(5) + x.T @ x)
    np.testing.assert_allclose(model.covariance, covariance, atol=1e-9)
    at = some(seed + 2, 3, 5)
    np.testing.assert_allclose(model.mean(at), at @ covariance @ (x.T @ gain), atol=1e-8)
    slow = NOISE * np.sqrt([row @ covariance @ row for row in at])
    np.testing.assert_allclose(model.deviation(at), slow, atol=1e-9)


def test_gains_that_are_linear_in_the_features_are_learnt() -> None:
    bandit, at = taught(0, 400), contexts(some(9, 20, len(FEATURES)))
    np.testing.assert_allclose(bandit.models[BYPASS.name].mean(at), at @ (some(0, D) * 0.05), atol=0.02)


def test_a_bandit_that_explores_takes_what_it_knows_least_and_one_that_does_not_takes_uniform() -> None:
    context = contexts(some(3, 2, 6, len(FEATURES)))
    for bold, best in ((0.0, UNIFORM), (1.0, None)):
        bandit = Bandit(bold=bold)
        options, gains = bandit.gains(context)
        chosen = [options[index][0] for index in gains.argmax(1)]
        assert all((plan == best) if best else (plan != UNIFORM) for plan in chosen)


def test_none_and_low_rank_have_one_place_and_other_plans_every_slot() -> None:
    options, _ = Bandit().gains(contexts(some(3, 1, 6, len(FEATURES))))
    assert [slot for plan, slot in options if plan == BYPASS] == list(range(6))
    assert [slot for plan, slot in options if plan == HERE] == [5]
    assert [slot for plan, slot in options if plan == NONE] == [-1]


def test_what_an_episode_brought_is_learnt_by_the_plan_and_the_slot_that_were_picked() -> None:
    bandit, single = Bandit(), Bandit()
    bandit.context = contexts(some(3, 3, 6, len(FEATURES)))
    bandit.picked = [(BYPASS, 2), (UNIFORM, -1), (NONE, -1)]
    bandit.learn_all(np.array([0.2, 0.3, -0.4]))
    single.learn(BYPASS, bandit.context[0, 2], 0.2)
    single.learn(NONE, bandit.context[2, 5], -0.4)
    for name, model in single.models.items():
        np.testing.assert_array_equal(bandit.models[name].moment, model.moment)


def test_a_feature_that_was_not_measured_counts_as_zero() -> None:
    np.testing.assert_array_equal(contexts(np.array([UNKNOWN, 0.5, 9.0])), [1.0, 0.0, 0.5, 4.0])


def test_a_file_gives_the_bandit_back_bit_by_bit_under_its_name(tmp_path) -> None:
    bandit = taught(0)
    save_bandit(tmp_path / "own.bandit", bandit)
    path = f"bandit:{tmp_path / 'own.bandit'}"
    read = get_controller(path, build_config({}))
    assert isinstance(read, Bandit)
    for name, model in bandit.models.items():
        for mine, theirs in zip(model, read.models[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert read.bold == 0
    assert find_controller(path).settings == {"gates": {"permissive": True}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("bypass.moment"), "is not the file of a bandit"),
        (lambda tensors: tensors.update({NAMES: np.frombuffer(b'["other"]', np.uint8)}), "reads other features"),
        (lambda tensors: tensors.update({"bypass.moment": np.full(D, np.nan)}), "is damaged"),
        (lambda tensors: tensors.update({"bypass.moment": np.zeros(3)}), "is damaged"),
    ],
)
def test_a_file_that_is_no_bandit_is_refused(tmp_path, change, says) -> None:
    path = tmp_path / "own.bandit"
    save_bandit(path, Bandit())
    tensors = dict(load(path.read_bytes()))
    change(tensors)
    path.write_bytes(save(tensors))
    with pytest.raises(InputError, match=says):
        load_bandit(path)
