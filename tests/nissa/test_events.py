import json
import math
from typing import Any

import numpy as np
import pytest

from esper.leyline.lifecycle.view import BlueprintInfo, Scores, Seeds, Space, Transitions, View
from esper.leyline.lifecycle.vocabulary import Stage
from esper.nissa.events import decode, encode
from esper.nissa.rows import EpisodeRow, LifecycleRow, MeasurementRow, RollbackRow, RunRow, StepRow
from esper.tolaria.journal import episode_rows, lifecycle_rows

ENVS, SLOTS = 2, 3


def space() -> Space:
    menu = (BlueprintInfo("bypass", "before"), BlueprintInfo("mlp", "here"))
    shape = (SLOTS, len(menu))
    return Space(
        slots=("a", "b", "c"),
        blueprints=menu,
        tempos=(0, 2),
        targets=(1.0,),
        cost=np.ones(shape, np.int64),
        fits=np.ones(shape, bool),
        width=np.full((ENVS, SLOTS), 4),
        sensors=(),
        max_seeds=2,
        seed=0,
        number=np.arange(ENVS),
        instance=np.arange(ENVS),
        floor=np.zeros(ENVS),
        ceiling=np.ones(ENVS),
        objective="metric",
        rent=0.0,
        rent_size=0,
        frozen=np.zeros(ENVS, bool),
    )


def seeds(stage: list[list[Stage]], blueprint: list[list[int]]) -> Seeds:
    shape = (ENVS, SLOTS)
    return Seeds(
        stage=np.array(stage, np.int8),
        age=np.zeros(shape, np.int32),
        life=np.zeros(shape, np.int32),
        blueprint=np.array(blueprint, np.int16),
        blend=np.zeros(shape, np.int8),
        alpha=np.full(shape, 0.5, np.float32),
        ramp=np.zeros((*shape, 3), np.float32),
        doomed=np.zeros(shape, bool),
    )


D, G, T, B, H, F, P, E = Stage
NO_ROLLBACKS = np.zeros(ENVS, np.int64)
NONE_LEFT_OUT = np.zeros((ENVS, SLOTS), bool)
EMPTY = seeds([[D] * SLOTS] * ENVS, [[-1] * SLOTS] * ENVS)


def scores(metric: float) -> Scores:
    return Scores(np.full(ENVS, metric), np.full(ENVS, np.nan), np.array([7, 0]))


def view(after: Seeds) -> View:
    """Make what `episode_rows` reads of a view, after five steps of episode 1."""
    unread: Any = None
    return View(
        space=space(),
        episode=1,
        step=5,
        steps=5,
        seeds=after,
        masks=unread,
        measurements=unread,
        coalitions=None,
        host_params=np.array([10, 10]),
        added_params=np.array([7, 0]),
    )


def changes(before: Seeds, after: Seeds) -> Transitions:
    env, slot = np.nonzero(before.stage != after.stage)
    return Transitions(env, slot, before.stage[env, slot], after.stage[env, slot])


def rows_between(before: Seeds, after: Seeds) -> list[LifecycleRow]:
    return list(lifecycle_rows({"episode": 2, "step": 3}, space(), changes(before, after), before, after, {}))


def test_one_row_per_change_of_stage():
    rows = rows_between(EMPTY, seeds([[D, G, D], [D, D, T]], [[-1, 1, -1], [-1, -1, 0]]))
    assert [(row.env, row.slot, row.from_stage, row.to_stage, row.blueprint) for row in rows] == [
        (0, "b", "DORMANT", "GERMINATED", "mlp"),
        (1, "c", "DORMANT", "TRAINING", "bypass"),
    ]


def test_equal_seeds_give_no_rows():
    assert rows_between(EMPTY, EMPTY) == []


def test_a_seed_that_is_gone_is_named_by_what_it_was_in_every_row_of_its_end():
    before = seeds([[B, D, D], [D, D, D]], [[1, -1, -1], [-1, -1, -1]])
    after = seeds([[E, D, D], [D, D, D]], [[-1, -1, -1], [-1, -1, -1]])
    path = Transitions(np.array([0, 0]), np.array([0, 0]), np.array([B, P], np.int8), np.array([P, E], np.int8))
    rows = list(lifecycle_rows({"episode": 0, "step": 3}, space(), path, before, after, {}))
    assert [(row.from_stage, row.to_stage, row.blueprint) for row in rows] == [
        ("BLENDING", "PRUNED", "mlp"),
        ("PRUNED", "EMBARGOED", "mlp"),
    ]


def test_a_slot_that_rested_has_no_blueprint():
    before = seeds([[E, D, D], [D, D, D]], [[-1] * 3] * 2)
    (row,) = rows_between(before, EMPTY)
    assert row.blueprint is None


def test_a_lifecycle_row_names_its_ends_from_and_to():
    (row,) = rows_between(EMPTY, seeds([[G, D, D], [D, D, D]], [[0, -1, -1], [-1, -1, -1]]))
    written = json.loads(encode(row))
    assert written["kind"] == "lifecycle"
    assert (written["from"], written["to"]) == ("DORMANT", "GERMINATED")
    assert (written["episode"], written["step"], written["env"]) == (2, 3, 0)


def test_only_fossilized_seeds_are_grown_and_the_others_in_place_are_unfinished():
    after = seeds([[F, H, D], [T, D, P]], [[0, 1, -1], [1, -1, -1]])
    left_out = (after.blueprint >= 0) & (after.stage != F)
    first, second = episode_rows({}, view(after), scores(0.75), left_out, NO_ROLLBACKS)
    assert (first.grown, first.fossilized, first.unfinished) == ({"a": "bypass"}, 1, ["b"])
    assert (second.grown, second.fossilized, second.unfinished) == ({}, 0, ["a"])
    assert (first.step, first.env, second.env) == (5, 0, 1)


def test_an_episode_row_holds_the_scores_of_the_exported_network():
    first, _ = episode_rows({}, view(EMPTY), scores(0.25), NONE_LEFT_OUT, NO_ROLLBACKS)
    assert (first.metric, first.added_params, first.host_params) == (0.25, 7, 10)


def step_row(**over: object) -> StepRow:
    fields: dict[str, object] = {
        "episode": 0,
        "step": 0,
        "metrics": np.array([0.5, np.nan]),
        "losses": [1.0, 2.0],
        "train_losses": np.array([np.inf, 1.0]),
        "stages": np.array([[0, 1, 2], [3, 4, 5]], np.int8),
        "alphas": np.full((2, 3), 0.25, np.float32),
        "added_param_counts": np.array([0, 7]),
    }
    return StepRow(**(fields | over))  # type: ignore[arg-type]


def test_what_is_not_a_number_is_null_in_the_file():
    written = json.loads(encode(step_row()), parse_constant=pytest.fail)
    assert written["metrics"] == [0.5, None]
    assert written["train_losses"] == [None, 1.0]
    assert "twin_metrics" not in written  # a field that has its default is left out


def test_arrays_are_written_as_lists():
    written = json.loads(encode(step_row()))
    assert written["stages"] == [[0, 1, 2], [3, 4, 5]]
    assert written["alphas"] == [[0.25] * 3] * 2


def test_numpy_scalars_are_written_as_numbers():
    row = LifecycleRow(
        episode=np.int64(1),  # type: ignore[arg-type]
        step=0,
        env=0,
        slot="a",
        from_stage="DORMANT",
        to_stage="GERMINATED",
        blueprint=None,
        alpha=np.float64(0.5),
    )
    assert json.loads(encode(row))["episode"] == 1
    assert json.loads(encode(row))["alpha"] == 0.5


def test_an_unknown_type_in_a_row_is_refused():
    with pytest.raises(TypeError, match="cannot hold"):
        encode(step_row(stages=object()))


@pytest.mark.parametrize("kind", [RunRow, StepRow, LifecycleRow, RollbackRow, EpisodeRow])
def test_every_row_is_read_back_as_it_was(kind):
    rows = {
        StepRow: step_row(metrics=[0.5, None], losses=[1.0, 2.0], train_losses=[1.0, 2.0]),
        RunRow: RunRow(
            status="running",
            task="digits",
            controller="never",
            envs=2,
            steps=3,
            seed=0,
            device="cpu",
            slots=["a"],
            blueprints=["mlp"],
            host_param_counts=[5, 5],
        ),
        LifecycleRow: LifecycleRow(
            episode=0, step=1, env=1, slot="b", from_stage="TRAINING", to_stage="BLENDING", blueprint="mlp", alpha=0.5
        ),
        RollbackRow: RollbackRow(
            episode=0,
            step=1,
            env=1,
            twin=False,
            reason="loss",
            metric=0.5,
            loss=float("nan"),
            pruned=["a"],
            slot_stages=[0, 7, 0],
        ),
        EpisodeRow: next(iter(episode_rows({}, view(EMPTY), scores(0.5), NONE_LEFT_OUT, NO_ROLLBACKS))),
    }
    row = decode(encode(rows[kind]))
    assert type(row) is kind
    assert encode(row) == encode(rows[kind])


def test_a_line_is_one_line():
    assert encode(step_row()).count(b"\n") == 1


def test_a_list_of_nothing_takes_four_letters_and_is_read_at_its_length():
    nan = float("nan")
    row = MeasurementRow(
        episode=0, step=0, contribution_means=np.array([[nan, nan], [nan, 0.5]]), interactions=np.full((2, 2, 2), nan)
    )
    row.interactions[1, 0, 1] = 2.0
    written = json.loads(encode(row))
    assert written["contribution_means"] == [None, [None, 0.5]]
    assert written["interactions"] == [None, [[None, 2], None]]
    assert "gain_means" not in written
    read = decode(encode(row))
    assert read.contribution_means == [[None, None], [None, 0.5]]
    assert read.interactions == [[[None, None]] * 2, [[None, 2.0], [None, None]]]
    assert read.gain_means is None
    assert encode(read) == encode(row)


def test_a_loss_that_was_not_measured_is_null_in_an_episode_row():
    first, _ = episode_rows({}, view(EMPTY), scores(0.5), NONE_LEFT_OUT, NO_ROLLBACKS)
    assert math.isnan(first.loss)
    assert json.loads(encode(first))["loss"] is None
