"""Test Esper as an environment of Gymnasium and of Stable-Baselines3."""

import itertools
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from faults.poison import poisoned
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3.common.vec_env import VecMonitor

from esper.gym import EsperEnv, EsperVectorEnv, sb3
from esper.leyline.lifecycle.masks import allowed, allowed_of, every_decision
from esper.leyline.lifecycle.view import take
from esper.leyline.lifecycle.vocabulary import RELEVANT, Actions, Head, Op
from esper.leyline.messages import InputError
from esper.tasks.repair import repair
from populations import blobs, small_config
from thinning import crossed

PAGE = Path(__file__).parents[1] / "docs" / "gym.md"
FEW = {"tempos": (0, 2), "targets": (0.5, 1.0)}
LIFE = [
    (Op.GERMINATE, 0, 1, 2, 1, 1),
    (),
    (Op.ADVANCE, 0),
    (),
    (),
    (Op.SET_ALPHA, 0, 0, 0, 1, 0),
    (Op.PRUNE, 0, 0, 0, 1),
]
"""Decisions of one environment that lead through every stage but FOSSILIZED."""


def padded(decision):
    return [*decision, *[0] * (len(Head) - len(decision))]


def drawn(generator, masks, decisions):
    """Draw a row of decisions: mostly valid ones, and now and then one that is not even a choice."""
    found = [decisions[generator.choice(np.flatnonzero(row))] for row in allowed_of(masks, decisions)]
    astray = generator.random(len(found)) < 0.2
    return np.where(astray[:, None], generator.integers(-1, 9, (len(found), len(Head))), np.array(found))


def begun(env):
    env.reset(seed=0)
    return env


def alike(one, other):
    """Return whether two nested records hold the same bits in the same types."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list) or (isinstance(one, np.ndarray) and one.dtype == object):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    ("reward", "sensors_every"), crossed([{}, {"name": "sparse"}, {"name": "escrow", "relative_to": "twin"}], [0, 2])
)
def test_gymnasium_finds_nothing_to_say_of_one_environment(reward, sensors_every, recwarn):
    config = small_config({"probe": {"sensors_every": sensors_every}}, steps=4, reward=reward)
    check_env(EsperEnv(blobs(), config), skip_render_check=True)
    assert not [str(warning.message) for warning in recwarn if "WARN" in str(warning.message)]


@pytest.mark.parametrize(
    ("task", "reward"), [(blobs, {"name": "delta"}), (repair, {"name": "escrow", "relative_to": "twin"})]
)
def test_a_population_is_gymnasiums_own_vector_of_as_many_environments(reward, task):
    config = small_config({"probe": {"sensors_every": 3}}, steps=5, reward=reward)
    population = EsperVectorEnv(task(), config)
    singles = SyncVectorEnv(
        [lambda: EsperEnv(task(), config) for _ in range(config.envs)], autoreset_mode=AutoresetMode.SAME_STEP
    )
    assert population.observation_space == singles.observation_space
    assert population.action_space == singles.action_space
    assert population.metadata["autoreset_mode"] == singles.metadata["autoreset_mode"]
    generator, decisions = np.random.default_rng(0), every_decision(population.space)
    assert alike(population.reset(seed=7), singles.reset(seed=7))
    grown = 0
    for _ in range(3 * config.steps):
        actions = drawn(generator, population.population.view.masks, decisions)
        mine, theirs = population.step(actions), singles.step(actions)
        assert alike(mine, theirs)
        grown += (mine[0]["blueprint"] > 0).sum()
    assert grown > 10


def test_a_population_on_named_instances_is_one_environment_on_each():
    config = small_config(steps=4)
    population = EsperVectorEnv(blobs(), config)
    together = [population.reset(options={"instance": np.arange(5, 8)})[0]]
    actions = [np.array([padded(decision)] * 3) for decision in LIFE[:4]]
    rewards = [population.step(action)[1] for action in actions]
    for env in range(3):
        alone = EsperEnv(blobs(), config)
        seen, info = alone.reset(options={"instance": 5 + env})
        assert info["instance"] == 5 + env
        assert alike(seen, {name: value[env] for name, value in together[0].items()})
        assert [alone.step(action[env])[1] for action in actions] == [reward[env] for reward in rewards]


def test_a_seed_begins_the_same_episodes_again_and_others_follow():
    env = EsperEnv(blobs(), small_config(steps=2))
    first, second, again, after = env.reset(seed=3), env.reset(), env.reset(seed=3), env.reset()
    assert alike(first, again)
    assert alike(second, after)
    assert first[1]["instance"] != second[1]["instance"]


def test_without_a_seed_the_config_seeds_the_first_episode():
    fresh = EsperEnv(blobs(), small_config(seed=4)).reset()
    assert alike(fresh, EsperEnv(blobs(), small_config(seed=4)).reset(seed=4))


def test_every_observation_is_finite_and_in_its_space():
    env = EsperVectorEnv(blobs(), small_config(steps=6))
    generator, decisions = np.random.default_rng(1), every_decision(env.space)
    seen, _ = env.reset(seed=0)
    for _ in range(18):
        assert env.observation_space.contains(seen)
        assert all(np.isfinite(value).all() for value in seen.values())
        seen = env.step(drawn(generator, env.population.view.masks, decisions))[0]


def test_every_column_has_a_name():
    env = EsperEnv(blobs(), small_config())
    assert {name: len(columns) for name, columns in env.columns.items()} == {
        "env": env.observation_space["env"].shape[-1],
        "slot": env.observation_space["slot"].shape[-1],
        "cost": env.observation_space["cost"].shape[-1],
        "blueprint": env.observation_space["blueprint"].nvec[0],
    }


def test_a_reward_is_the_sum_of_its_components():
    env = EsperEnv(blobs(), small_config(steps=4, reward={"fees": {"germinate": 0.25}}))
    env.reset(seed=0)
    _, reward, *_, info = env.step(np.array(LIFE[0]))
    assert info["accepted"]
    assert info["reward"]["fees"] == -0.25
    assert reward == pytest.approx(sum(info["reward"].values()), abs=1e-12)


def test_an_episode_terminates_at_its_last_step_and_then_asks_for_a_reset():
    env = EsperEnv(blobs(), small_config(steps=3))
    with pytest.raises(ResetNeeded):
        env.step(np.array(padded(())))
    env.reset()
    assert [env.step(np.array(padded(())))[2:4] for _ in range(3)] == [(False, False), (False, False), (True, False)]
    with pytest.raises(ResetNeeded):
        env.step(np.array(padded(())))


def test_a_rollback_terminates_with_the_penalty_and_reset_goes_on_with_the_episode():
    env, population = (make(blobs(), small_config(steps=5, envs=1)) for make in (EsperEnv, EsperVectorEnv))
    wait = np.zeros(len(Head), np.int64)
    env.reset(seed=3)
    population.reset(seed=3)
    for step in range(5):
        breaks = [
            poisoned(each.population.engine, 0, "loss") if step == 2 else nullcontext() for each in (env, population)
        ]
        with breaks[0]:
            observation, reward, terminated, truncated, info = env.step(wait)
        with breaks[1]:
            several, rewards, ends, _, infos = population.step(wait[None])
        assert (reward, terminated, truncated) == (rewards[0], ends[0], False)
        assert terminated == (step in (2, 4))
        assert info["rolled_back"] == (step == 2)
        if step == 2:
            assert reward == -0.5
            assert alike(infos["final_obs"][0], observation)
            assert infos["_final_obs"].tolist() == [True]
            with pytest.raises(ResetNeeded):
                env.step(wait)
        if terminated:
            observation, info = env.reset()
        assert alike({name: value[0] for name, value in several.items()}, observation)
    assert env.population.engine.state.episode == population.population.engine.state.episode == 1


def test_a_row_that_is_rolled_back_ends_alone():
    population = EsperVectorEnv(blobs(), small_config(steps=4, envs=3))
    population.reset(seed=3)
    with poisoned(population.population.engine, 1, "loss"):
        _, rewards, ends, _, infos = population.step(np.zeros((3, len(Head)), np.int64))
    assert ends.tolist() == infos["_final_obs"].tolist() == infos["rolled_back"].tolist() == [False, True, False]
    assert rewards[1] == infos["reward"]["governor"][1] == -0.5
    assert infos["final_obs"][0] is None


def test_stable_baselines_hears_of_a_rollback():
    flat = sb3(EsperVectorEnv(blobs(), small_config(steps=4, envs=2)))
    flat.reset()
    with poisoned(flat._population.engine, 1, "loss"):
        _, rewards, ends, infos = flat.step(np.zeros(2, np.int64))
    assert ends.tolist() == [info["rolled_back"] for info in infos] == [False, True]
    assert rewards[1] == -0.5
    assert "terminal_observation" in infos[1]
    assert "terminal_observation" not in infos[0]


def test_a_refused_action_is_a_wait():
    refused, waited = (EsperEnv(blobs(), small_config()) for _ in range(2))
    refused.reset(seed=2)
    waited.reset(seed=2)
    seen, reward, *_, info = refused.step(np.array(padded((Op.FOSSILIZE, 0))))
    other, same, *_ = waited.step(np.array(padded(())))
    assert not info["accepted"]
    assert reward == same
    for name in ("slot", "blueprint", "cost"):
        assert alike(seen[name], other[name])


def test_what_is_returned_may_be_written_into():
    env = EsperVectorEnv(blobs(), small_config(steps=2))
    seen, info = env.reset(seed=0)
    info["action_mask"]["op"][:] = False
    seen["cost"][:] = 9
    assert env.step(env.action_space.sample() * 0)[4]["accepted"].all()


@pytest.mark.parametrize("prefix", range(len(LIFE) + 1))
def test_an_engine_accepts_exactly_the_decisions_that_the_flat_mask_allows(prefix):
    settings = {"lifecycle": FEW, "blueprints": ("bypass-linear", "mlp-small")}
    table = every_decision(EsperEnv(blobs(), small_config(settings)).space)
    env = sb3(EsperVectorEnv(blobs(), small_config(settings, steps=len(LIFE) + 1, envs=len(table))))
    env.set_options({"instance": 11})
    env.reset()
    for decision in LIFE[:prefix]:
        chosen = np.flatnonzero((table == padded(decision)).all(1))
        assert len(chosen) == 1
        *_, infos = env.step(np.repeat(chosen, len(table)))
        assert all(info["accepted"] for info in infos)
    masks = env.action_masks()
    assert (masks == masks[0]).all()
    *_, infos = env.step(np.arange(len(table)))
    assert [info["accepted"] for info in infos] == masks[0].tolist()


def test_the_flat_mask_is_the_lifecycles_own_decision_by_decision():
    env = EsperVectorEnv(blobs(), small_config(steps=10))
    generator, table = np.random.default_rng(2), every_decision(env.space)
    env.reset(seed=1)
    for _ in range(10):
        masks = env.population.view.masks
        flat = allowed_of(masks, table)
        for row in range(env.num_envs):
            one = [np.repeat(field, len(table), axis=0) for field in take(masks, slice(row, row + 1))]
            assert np.array_equal(flat[row], allowed(type(masks)(*one), Actions(*table.T)))
        env.step(drawn(generator, masks, table))


def test_the_table_holds_every_decision_that_differs_once():
    settings = {"lifecycle": FEW, "slots": ("block1",), "blueprints": ("bypass-linear", "mlp-small")}
    env = EsperEnv(blobs(), small_config(settings))
    everything = np.array(list(itertools.product(*(range(size) for size in env.action_space.nvec))))
    distinct = np.unique(np.where(RELEVANT[everything[:, Head.OP]], everything, 0), axis=0)
    slot_in_use = (distinct[:, Head.OP] == Op.WAIT) | (distinct[:, Head.SLOT] == env.space.slots.index("block1"))
    planted_at_once = (distinct[:, Head.OP] == Op.GERMINATE) & (distinct[:, Head.TEMPO] == 0)
    assert np.array_equal(every_decision(env.space), distinct[slot_in_use & ~planted_at_once])


def test_fewer_heads_make_fewer_actions():
    space = EsperEnv(blobs(), small_config()).space
    table = every_decision(space, [Head.OP, Head.SLOT, Head.BLUEPRINT])
    assert len(table) == 1 + 2 * 3 + 4 * 2
    planted = table[table[:, Head.OP] == Op.GERMINATE]
    assert {(space.tempos[t], space.targets[a]) for t, a in planted[:, [Head.TEMPO, Head.TARGET]]} == {(2, 1.0)}
    assert not planted[:, Head.BLEND].any()


def test_stable_baselines_meets_the_same_population():
    config = small_config(steps=4)
    flat, population = sb3(EsperVectorEnv(blobs(), config)), EsperVectorEnv(blobs(), config)
    assert is_masking_supported(VecMonitor(flat))
    assert flat.seed(6) == [6, 7, 8]
    assert alike(flat.reset(), population.reset(seed=6)[0])
    generator = np.random.default_rng(3)
    for _ in range(2 * config.steps):
        masks = get_action_masks(flat)
        assert masks.shape == (config.envs, flat.action_space.n)
        chosen = np.array([generator.choice(np.flatnonzero(mask)) for mask in masks])
        seen, reward, done, infos = flat.step(chosen)
        other, paid, ended, _, info = population.step(flat.decisions[chosen])
        assert alike(seen, other)
        assert np.array_equal(reward, paid.astype(np.float32))
        assert np.array_equal(done, ended)
        assert all(found["accepted"] for found in infos)
        if done.any():
            assert alike(np.array([found["terminal_observation"] for found in infos]), info["final_obs"])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: begun(EsperVectorEnv(blobs(), small_config())).step(np.zeros(6)), "give 3 of 6 heads each"),
        (lambda: EsperEnv("digits"), "make one with esper.get_task"),
        (lambda: EsperVectorEnv(blobs(), small_config(first_instance=3)), r"reset\(seed="),
        (lambda: EsperEnv(blobs(), small_config(reward={"relative_to": "group"})), "choose none or twin"),
        (lambda: EsperEnv(blobs(), small_config()).reset(options={"task": 1}), "unknown option 'task'"),
        (lambda: EsperEnv(blobs(), small_config()).reset(options={"instance": -1}), "none of the training instances"),
        (lambda: EsperEnv(blobs(), small_config()).reset(options={"instance": [1, 2]}), "give one key, or 1"),
        (lambda: EsperEnv(blobs(), small_config()).reset(options={"instance": 0.5}), "give one key"),
        (lambda: sb3(EsperEnv(blobs(), small_config())), "takes an EsperVectorEnv, but EsperEnv was given"),
        (lambda: sb3(EsperVectorEnv(blobs(), small_config()), ["op", "tempo"]), "heads are op, tempo; give op, slot"),
        (lambda: sb3(EsperVectorEnv(blobs(), small_config()), "op"), "heads are op; give op, slot"),
        (lambda: sb3(EsperVectorEnv(blobs(), small_config())).action_masks(), r"before the first reset\(\)"),
    ],
)
def test_bad_input_gets_one_sentence(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("missing", "module", "mend"),
    [
        ("gymnasium", "esper.gym", "pip install 'esper-grow[gym]'"),
        ("lightning", "esper.callbacks; esper.callbacks.LightningGrowth", "pip install 'esper-grow[lightning]'"),
        ("transformers", "esper.callbacks; esper.callbacks.HuggingFaceGrowth", "pip install 'esper-grow[hf]'"),
        ("stable_baselines3", "esper.gym.stable_baselines", "pip install stable-baselines3 sb3-contrib"),
    ],
)
def test_a_missing_extra_is_named_with_its_mend(missing, module, mend):
    code = f"import sys; sys.modules[{missing!r}] = None\nimport {module}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"{mend}" in ended.stderr.splitlines()[-1]
    assert ended.stderr.splitlines()[-1].startswith("esper.leyline.messages.InputError")


def blocks():
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_python_of_the_page_runs_up_to_the_learner():
    namespace = {}
    for index, block in enumerate(block for block in blocks() if "sb3" not in block):
        exec(compile(block, f"gym.md, block {index}", "exec"), namespace)


@pytest.mark.slow
def test_the_learner_of_the_page_learns():
    (example,) = [block for block in blocks() if "MaskablePPO" in block]
    namespace = {}
    exec(compile(example, "gym.md, the learner", "exec"), namespace)
    assert namespace["learnt"] > namespace["waiting"]
