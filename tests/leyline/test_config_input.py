"""Check that what a person gives for a config is taken as it is meant, or refused in one sentence."""

import pytest

from esper.leyline.config.input import SYNONYMS
from esper.leyline.config.tree import Config, build_config, reference
from esper.leyline.messages import InputError


def sentence(settings):
    with pytest.raises(InputError) as refused:
        build_config(settings)
    return str(refused.value)


def test_a_dotted_key_is_the_key_of_a_section():
    dotted = build_config({"optimizer.lr": 0.01, "reward.fees.prune": 0.5, "steps": 5})
    assert dotted == build_config({"optimizer": {"lr": 0.01}, "reward": {"fees": {"prune": 0.5}}, "steps": 5})


def test_a_dotted_key_stands_beside_its_section():
    assert build_config({"optimizer.lr": 0.01, "optimizer": {"max_grad_norm": 1.0}}).optimizer.max_grad_norm == 1.0
    assert build_config({"optimizer": {"max_grad_norm": 1.0}, "optimizer.lr": 0.01}).optimizer.lr == 0.01


def test_a_dotted_key_of_a_later_layer_goes_over_an_earlier_one():
    assert build_config({"optimizer": {"lr": 0.01, "max_grad_norm": 1.0}}, {"optimizer.lr": 0.02}).optimizer.lr == 0.02


def test_a_name_with_a_dot_in_the_cohorts_stays_one_name():
    assert build_config({"cohorts": {"mine.py:task": {"steps": 3}}}).cohorts == {"mine.py:task": {"steps": 3}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer.lr": 1, "optimizer": {"lr": 2}}, "the config key 'optimizer.lr' is given twice in one mapping"),
        ({"seed": 1.5}, "seed is 1.5; give a whole number of at least 0"),
        ({"seed": "x"}, "seed is 'x'; give a whole number of at least 0"),
        ({"seed": True}, "seed is True; give a number"),
        ({"envs": 0}, "envs is 0; give a whole number of at least 1"),
        ({"envs": 10**400}, "envs is 1000000000"),
        ({"envs": 16**5000}, "envs is a whole number too long to write; give a whole number up to 1,000,000,000"),
        ({"device": "gpu"}, "device is 'gpu'; give auto, cpu, cuda or cuda:i, such as cuda:0"),
        ({"device": 5}, "device is 5; give auto, cpu, cuda or cuda:i, such as cuda:0"),
        ({"device": "cuda:٣"}, "device is 'cuda:٣'; give auto, cpu, cuda or cuda:i"),
        ({"slots": "block0"}, "slots is 'block0'; give a list of names or null"),
        ({"slots": [1]}, "slots holds 1; give a list of names or null"),
        ({"slots": []}, "slots is []; give a list of at least one name, each once, or null for all"),
        ({"lifecycle": {"tempos": 5}}, "lifecycle.tempos is 5; give a list of whole numbers, at least 1"),
        ({"lifecycle.tempos": [1]}, "lifecycle.tempos is [1]; give distinct lengths: 0, at least one above 0"),
        ({"optimizer": 5}, "optimizer is 5; give a mapping of its keys to values, such as {'name': 'adamw'}"),
        ({"optimizer": {"lr": -1}}, "optimizer.lr is -1; give a finite number above 0"),
        ({"optimizer.lr": True}, "optimizer.lr is True; give a number"),
        ({"widen.at": [3, True]}, "widen.at is [3, True]; give a list of whole numbers"),
        ({"optimizer": {"max_grad_norm": 0}}, "optimizer.max_grad_norm is 0; give a finite number above 0 or null"),
        ({"optimizer": {"name": "adam"}}, "optimizer.name is 'adam'; give adamw or sgd"),
        ({"telemetry": {"level": "all"}}, "telemetry.level is 'all'; give off, run, step or debug"),
        ({"twin": "maybe"}, "twin is 'maybe'; give true or false"),
        ({"reward": {"rent": float("nan")}}, "reward.rent is nan; give a finite number of at least 0"),
        ({"reward": {"fees": 5}}, "reward.fees is 5; give a mapping of names to numbers"),
        (
            {"governor.min_output_spread": 1},
            "governor.min_output_spread is 1; give a finite number of at least 0 and below 1",
        ),
        ({"probe.coalitions_every": 0}, "probe.coalitions_every is 0; give a whole number of at least 1"),
        ({"task": "a" * 5000}, None),
        ({"device": "a" * 5000}, "device is 'aaa"),
        ({"steps": "\x1b[2J\n"}, r"steps is '\x1b[2J\n'; give a whole number of at least 1"),
        ({5: 1}, "the config key 5 is not a text; give keys such as 'steps'"),
        ({"optimizer": {5: 1}}, "the config key 5 is not a text; give keys such as 'name'"),
    ],
)
def test_a_bad_value_is_one_sentence_with_its_key_itself_and_what_is_accepted(settings, words):
    if words is None:
        assert build_config(settings).task == "a" * 5000
        return
    said = sentence(settings)
    assert said.startswith(words)
    assert len(said) < 250
    assert "\n" not in said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stepss": 4}, "unknown config key 'stepss'; did you mean 'steps'?"),
        ({"optimizer.lrr": 0.1}, "unknown config key 'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ({"optimiser": {"lr": 1}}, "unknown config key 'optimiser'; did you mean 'optimizer'?"),
        ({"lr": 0.1}, "unknown config key 'lr'; did you mean 'optimizer.lr' or 'ppo.lr'?"),
        (
            {"optimizer.learning_rate": 0.1},
            "unknown config key 'optimizer.learning_rate'; did you mean 'optimizer.lr'?",
        ),
        ({"ppo": {"learning-rate": 0.1}}, "unknown config key 'ppo.learning-rate'; did you mean 'ppo.lr'?"),
        ({"learning_rate": 1}, "unknown config key 'learning_rate'; did you mean 'optimizer.lr' or 'ppo.lr'?"),
        ({"minibatch": 1}, "unknown config key 'minibatch'; did you mean 'data.batch_size'?"),
        ({"n_epochs": 1}, "unknown config key 'n_epochs'; did you mean 'epochs'?"),
        ({"random_state": 1}, "unknown config key 'random_state'; did you mean 'seed'?"),
        ({"zzz": 1}, "unknown config key 'zzz'; `esper config` lists the keys"),
        ({"\x1b[2J": 1}, r"unknown config key '\x1b[2J'; `esper config` lists the keys"),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest_one(settings, words):
    assert sentence(settings) == words


def test_every_synonym_stands_for_a_key_that_there_is_and_is_none_itself():
    parts = {key.rpartition(".")[2] for key, *_ in reference()}
    assert set(SYNONYMS.values()) <= parts
    assert not set(SYNONYMS) & parts


@pytest.mark.parametrize("value", [object(), {"x": object()}, [object()]], ids=["object", "mapping", "list"])
@pytest.mark.parametrize("key", [key for key in Config.model_fields if key != "cohorts"])
def test_no_sentence_is_in_the_words_of_pydantic(key, value):
    said = sentence({key: value})
    assert said.startswith((f"{key} ", f"unknown config key '{key}."))
    assert "Input should" not in said


def test_keys_of_one_last_name_mean_the_same():
    """Check that what is listed here means the same in each of its sections; any other last name stands once."""
    alike = {"name", "enabled", "lr", "max_grad_norm", "device"}
    last = [key.rpartition(".")[2] for key, *_ in reference()]
    assert {name for name in last if last.count(name) > 1} == alike
