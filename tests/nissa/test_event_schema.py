"""Check that a field of events has one type over all kinds of rows, and that a page lists all fields."""

import json
import os
import runpy
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from esper.api import grow
from esper.leyline.messages import InputError
from esper.nissa.events import encode, read_events
from esper.nissa.rows import KINDS, AnomalyRow, RewardRow, RollbackRow, RoundRow, Row, RunRow, SizeRow
from esper.tasks.catalog import get_task
from populations import small_config

ROOT = Path(__file__).parents[2]
PAGE = runpy.run_path(str(ROOT / "scripts" / "write_events_page.py"))
ROLLBACK = RollbackRow(
    episode=0, step=1, env=1, twin=True, reason="loss", metric=0.5, loss=float("nan"), pruned=[], slot_stages=[0, 7]
)
ANOMALY = AnomalyRow(
    episode=0, step=1, reason="loss", failed_envs=[1], failed_twins=[0], raised_level="debug", raised_steps=3
)
REWARD = RewardRow(episode=0, step=1, rewards=[0.5], components={"governor": [0.5]})
ROUND = RoundRow(round=-1, seconds=0.25, figures={"kl": None, "loss": 0.5})
SIZE = SizeRow(step=3, seen=96, params=40, loss=0.5, widths={"0": [4, 8]}, seconds=0.25, why="enough was seen")
OPTIONAL = {
    row.__struct_config__.tag: {
        field.encode_name for field in msgspec.structs.fields(row) if not field.required and field.name != "schema"
    }
    for row in KINDS.values()
}
"""The fields of each kind of row that a line may lack."""


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """Return the events.jsonl of a run in which seeds grow."""
    folder = tmp_path_factory.mktemp("run") / "r"
    config = small_config(
        task="iris",
        envs=2,
        steps=8,
        models="none",
        data={"batch_size": 16},
        probe={"sensors_every": 4},
        telemetry={"level": "debug"},
        widen={"at": [3]},
    )
    grow(get_task("iris"), config, controller="random-valid", run=folder)
    return folder / "events.jsonl"


def json_type(value):
    """Name the type of a value as the page does; None where nothing in it says."""
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return f"list of {_common(value)}" if _common(value) else None
        case dict():
            return f"map of string to {_common(value.values())}" if _common(value.values()) else None
    return None


def _common(values):
    """Find the one type of values, where whole numbers stand beside others; None where nothing in them says."""
    inner = {found for each in values if (found := json_type(each)) is not None}
    inner -= {found.replace("number", "integer") for found in inner if "number" in found}
    assert len(inner) <= 1, values
    return inner.pop() if inner else None


def test_a_field_has_one_type_over_all_kinds_of_rows():
    types = defaultdict(set)
    for row in (Row, *KINDS.values()):
        for name, (kind, _, _) in PAGE["fields"](row).items():
            types[name].add(kind)
    assert {name: found for name, found in types.items() if len(found) > 1} == {}


def test_every_field_of_every_row_that_is_written_has_the_type_of_the_page(events):
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    lines += [json.loads(encode(row)) for row in (ROLLBACK, ROUND, ANOMALY, REWARD, SIZE)]
    kinds = dict(KINDS)
    assert {line["kind"] for line in lines} == set(kinds)
    for line in lines:
        known = {"kind": ("string", False, "")} | PAGE["fields"](Row) | PAGE["fields"](kinds[line["kind"]])
        assert set(line) <= set(known)
        assert {"seq", "time", *known} - OPTIONAL[line["kind"]] <= set(line)
        for name, value in line.items():
            kind, null, _ = known[name]
            assert value is not None or null, (line["kind"], name)
            whole = kind.replace("number", "integer")  # a number without a fraction has no point
            assert json_type(value) in (None, kind, whole), (line["kind"], name, value)


def test_the_page_of_the_events_is_what_its_script_writes():
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    assert page == PAGE["page"](), "run python scripts/write_events_page.py"


def test_the_first_row_names_the_version_of_the_rows(events):
    first, *_, last = read_events(events)
    assert isinstance(first, RunRow)
    assert isinstance(last, RunRow)
    assert (first.schema, first.seq) == (4, 0)
    assert json.loads(events.read_text().splitlines()[0])["schema"] == 4


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ({"kind": "run", "seq": 0, "task": "iris", "host_params": [5]}, "holds rows of version 1, this Esper reads"),
        (
            {"kind": "run", "seq": 0, "task": "iris", "schema": 3},
            "holds rows of version 3, this Esper reads version 4; read them",
        ),
        ({"kind": "step", "seq": 0, "metric": [5]}, "line 1 of "),
        ([1], "line 1 of "),
    ],
)
def test_a_file_of_another_version_is_refused_by_its_version(tmp_path, first, words):
    (tmp_path / "events.jsonl").write_text(json.dumps(first) + "\n")
    with pytest.raises(InputError, match=words):
        list(read_events(tmp_path / "events.jsonl"))


def test_rows_are_read_up_to_one_that_is_still_being_written(events, tmp_path):
    whole = events.read_bytes()
    (tmp_path / "events.jsonl").write_bytes(whole[:-5])
    assert len(list(read_events(tmp_path / "events.jsonl"))) == whole.count(b"\n") - 1


def test_a_damaged_row_is_named_by_its_line(events, tmp_path):
    lines = events.read_bytes().splitlines(keepends=True)
    for damage in (b"\xff\n", b"[" * 3000 + b"\n", b"\n", lines[2].replace(b'"step"', b'"stop"')):
        (tmp_path / "events.jsonl").write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
        with pytest.raises(InputError, match=r"line 3 of .*events\.jsonl: not a row of version 4"):
            list(read_events(tmp_path / "events.jsonl"))


def test_events_that_are_a_pipe_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(InputError, match="is not a regular file"):
        next(read_events(tmp_path / "events.jsonl"))
