import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from esper.leyline.config.tree import Config, build_config, dump_config, parse_setting, reference
from esper.leyline.messages import InputError
from esper.runs.configuration import load_config_file


def test_a_config_written_as_yaml_is_read_back_equal(tmp_path):
    config = build_config(
        {
            "task": "spirals",
            "envs": 3,
            "slots": ["a", "b"],
            "optimizer": {"max_grad_norm": 0.5},
            "lifecycle": {"tempos": [0, 3]},
        }
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert build_config(load_config_file(str(tmp_path / "config.yaml"))) == config


def test_the_defaults_written_as_yaml_are_the_defaults():
    assert build_config(yaml.safe_load(dump_config(Config()))) == Config()


def test_off_needs_no_quotes_in_yaml(tmp_path):
    (tmp_path / "config.yaml").write_text("telemetry: {level: off}\n")
    for layer in (parse_setting("telemetry.level=off"), load_config_file(str(tmp_path / "config.yaml"))):
        assert build_config(layer).telemetry.level == "off"


def test_a_later_layer_overrides_an_earlier_one_key_by_key():
    config = build_config({"data": {"batch_size": 8, "batches_per_step": 2}}, {"data": {"batch_size": 16}})
    assert (config.data.batch_size, config.data.batches_per_step) == (16, 2)


def test_layers_are_left_as_they_were():
    first = {"data": {"batch_size": 8}}
    build_config(first, {"data": {"batch_size": 16}})
    assert first == {"data": {"batch_size": 8}}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"nope": 1}, "'nope'"),
        ({"data": {"nope": 1}}, "'data.nope'"),
        ({"envs": 0}, "envs"),
        ({"steps": 0}, "steps"),
        ({"seed": -1}, "seed"),
        ({"data": {"batch_size": "many"}}, "data.batch_size"),
        ({"device": "tpu"}, "device"),
        ({"models": "some"}, "models"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr"),
        ({"optimizer": {"accumulation_steps": 5}}, "optimizer.accumulation_steps"),
        ({"lifecycle": {"tempos": [1, 2]}}, "lifecycle.tempos"),
        ({"lifecycle": {"tempos": [0]}}, "lifecycle.tempos"),
        ({"lifecycle": {"targets": [0.5, 1.5]}}, "lifecycle.targets"),
        ({"data": 5}, "data"),
    ],
)
def test_bad_input_is_one_sentence_that_names_the_key(settings, names):
    with pytest.raises(InputError) as caught:
        build_config(settings)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Config().envs = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("envs=4", {"envs": 4}),
        ("data.batch_size=32", {"data": {"batch_size": 32}}),
        ("twin=false", {"twin": False}),
        ("slots=[a, b]", {"slots": ["a", "b"]}),
        ("optimizer.max_grad_norm=null", {"optimizer": {"max_grad_norm": None}}),
        ("controller=a=b.yaml", {"controller": "a=b.yaml"}),
    ],
)
def test_a_setting_is_a_nested_mapping_with_a_yaml_value(text, expected):
    assert parse_setting(text) == expected


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ([], ("twin", "same-size", "plain", "skips")),
        ([{"baselines": "none"}], ()),
        ([{"baselines": None}], ()),
        ([{"baselines": []}], ()),
        ([{"baselines": "skips, twin"}], ("twin", "skips")),
        ([{"baselines": ["plain"]}], ("plain",)),
        ([{"twin": False}], ("same-size", "plain", "skips")),
        ([{"baselines": "none"}, {"twin": True}], ("twin",)),
        ([{"twin": False}, {"baselines": "twin,plain"}], ("twin", "plain")),
        ([{"baselines": "twin,plain"}, {"twin": False}], ("plain",)),
        ([{"baselines": "twin,plain", "twin": True}], ("twin", "plain")),
    ],
)
def test_baselines_are_a_list_or_a_text_of_names_and_twin_adds_or_removes_the_first(layers, names):
    config = build_config(*layers)
    assert config.baselines == names
    assert config.twin == ("twin" in names)
    assert build_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"baselines": "twin,best"},
            "baselines is 'twin,best'; give names out of twin, same-size, plain, skips, or none",
        ),
        ({"baselines": 5}, "; give names out of"),
        ({"baselines": "best", "twin": True}, "; give names out of"),
        ({"baselines": "plain", "twin": True}, "twin is true, but baselines is plain; leave twin out"),
        ({"baselines": "none", "twin": True}, "twin is true, but baselines is none"),
        ({"twin": 3}, "twin is 3; give true or false"),
    ],
)
def test_baselines_that_are_not_known_or_disagree_with_twin_are_refused(settings, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)) as refused:
        build_config(settings)
    assert "\n" not in str(refused.value)


def test_a_small_number_in_scientific_notation_is_a_number():
    assert build_config(parse_setting("optimizer.lr=1e-4")).optimizer.lr == 1e-4


@pytest.mark.parametrize("text", ["envs", "=4", " =4", "envs=[1"])
def test_a_setting_of_another_form_is_refused(text):
    with pytest.raises(InputError, match="--set"):
        parse_setting(text)


@pytest.mark.parametrize("content", ["- a\n- b\n", "just text", "{a: [", "\xff"])
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, content):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"bad\.yaml"):
        load_config_file(str(path))


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"absent\.yaml"):
        load_config_file(str(tmp_path / "absent.yaml"))


def test_an_empty_file_sets_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config_file(str(tmp_path / "empty.yaml")) == {}


def flat(tree: dict, prefix: str = "") -> dict:
    items = ((prefix + key, value) for key, value in tree.items())
    return {
        k: v
        for key, value in items
        for k, v in (flat(value, f"{key}.") if isinstance(value, dict) and value else {key: value}).items()
    }


def test_the_reference_holds_every_key_with_its_default_and_a_meaning():
    rows = {key: (kind, default, meaning) for key, kind, default, meaning in reference()}
    defaults = flat(Config().model_dump(mode="json"))
    assert list(rows) == list(defaults)
    for key, (kind, default, meaning) in rows.items():
        assert kind, key
        assert meaning, key
        assert "\n" not in meaning, key
        # YAML reads off as false, which the keys that take off accept as that word.
        assert default == defaults[key] == "off" or yaml.safe_load(default) == defaults[key], key


def test_types_in_the_reference_are_for_people():
    for key, kind, _, _ in reference():
        assert not re.search(r"typing|Literal|Annotated|FieldInfo|class", kind), (key, kind)


@given(st.sampled_from([row[0] for row in reference()]))
def test_every_key_of_the_reference_can_be_set_to_its_default(key):
    default = {row[0]: row[2] for row in reference()}[key]
    assert build_config(parse_setting(f"{key}={default}")) == Config()
