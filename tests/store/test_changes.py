"""Check what identifies a run after its config was changed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.messages import InputError
from esper.store.changes import read_trail, record_change
from esper.store.disk import sha256_of

steps = st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=8)


def begin(folder, config="a"):
    folder.mkdir(exist_ok=True)
    (folder / "changes.json").unlink(missing_ok=True)
    (folder / "config.yaml").write_text(config)
    return folder


def change(folder, config, number=0):
    record_change(folder, config, [f"key={config}"], number)
    (folder / "config.yaml").write_text(config)


@settings(max_examples=20, deadline=None)
@given(steps)
def test_a_run_is_known_by_its_first_config_whatever_was_changed_and_wherever_a_crash_came(tmp_path_factory, steps):
    folder = begin(tmp_path_factory.getbasetemp() / "run")
    for number, (config, crashes) in enumerate(steps):
        if crashes:
            record_change(folder, config, [], number)  # and the config is never written
        else:
            change(folder, config, number)
        assert read_trail(folder).run == sha256_of(b"a")


def test_the_trail_holds_the_changes_in_effect_in_their_order(tmp_path):
    folder = begin(tmp_path)
    change(folder, "b", 3)
    record_change(folder, "c", ["key=c"], 4)  # a crash comes
    change(folder, "d", 5)
    assert [(entry.steps, entry.settings) for entry in read_trail(folder).entries] == [(3, ("key=b",)), (5, ("key=d",))]


def test_what_is_recorded_is_plain(tmp_path):
    folder = begin(tmp_path)
    change(folder, "b", 3)
    (entry,) = json.loads((folder / "changes.json").read_text())
    assert entry.pop("time") > 0
    assert entry == {"steps": 3, "set": ["key=b"], "from": sha256_of(b"a"), "to": sha256_of(b"b")}


def test_the_same_change_tried_again_is_one_entry(tmp_path):
    folder = begin(tmp_path)
    for _ in range(2):
        record_change(folder, "b", ["key=b"], 3)
    assert len(json.loads((folder / "changes.json").read_text())) == 1


def test_a_config_that_was_edited_by_hand_is_another_run(tmp_path):
    folder = begin(tmp_path)
    change(folder, "b")
    (folder / "config.yaml").write_text("e")
    assert read_trail(folder).run == sha256_of(b"e")


@pytest.mark.parametrize(
    "content",
    ["", "{", "1", "[1]", "[{}]", "null", '[{"time": 1, "steps": 1, "set": ["a"], "from": "a", "to": "b"}]', "\xff"],
)
def test_changes_that_cannot_be_read_are_named(tmp_path, content):
    begin(tmp_path)
    (tmp_path / "changes.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"changes\.json (does not hold|is not valid JSON)"):
        read_trail(tmp_path)
