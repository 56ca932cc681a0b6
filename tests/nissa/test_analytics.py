"""Check that the table of blueprints is what the rows of a run say."""

import math

import numpy as np
import pytest

import esper
from esper.karn.run_model import BlueprintAnalytics
from esper.leyline.lifecycle.vocabulary import Stage
from esper.nissa.hub import Hub
from esper.nissa.rows import DecisionRow, EpisodeRow, LifecycleRow, RollbackRow
from esper.tamiyo.rules.base import RandomValid
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.journal import Journal
from populations import Memory, blobs, small_config


def moved(step, to, env=0, contribution=None, blueprint="mlp"):
    return LifecycleRow(
        episode=0,
        step=step,
        env=env,
        slot="a",
        from_stage="DORMANT",
        to_stage=to,
        blueprint=blueprint,
        alpha=0.0,
        contribution_mean=contribution,
    )


def rollback(step, *pruned, twin=False):
    return RollbackRow(
        episode=0, step=step, env=0, twin=twin, reason="loss", metric=0.5, loss=1.0, pruned=pruned, slot_stages=[0]
    )


def test_a_seed_that_is_kept_is_counted_with_its_contribution_and_its_steps():
    rows = [moved(1, "GERMINATED"), moved(7, "FOSSILIZED", contribution=0.25)]
    (tally,) = BlueprintAnalytics.of(rows).tallies()
    assert tally[:6] == ("mlp", "a", 1, 1, 0, 0.25)
    assert (math.isnan(tally.error), tally.params_bought, tally.steps_to_keep) == (True, None, 6.0)


def test_the_mean_has_the_standard_error_over_seeds():
    rows = []
    for env, contribution in enumerate((0.1, 0.3, None)):
        rows += [moved(0, "GERMINATED", env), moved(4, "PRUNED", env, contribution)]
    (tally,) = BlueprintAnalytics.of(rows).tallies()
    assert (tally.tried, tally.kept, tally.pruned) == (3, 0, 3)
    assert tally.contribution == pytest.approx(0.2)
    assert tally.error == pytest.approx(0.1)
    assert math.isnan(tally.steps_to_keep)


def test_seeds_are_forgotten_at_the_end_of_their_episode():
    analytics = BlueprintAnalytics.of([moved(0, "GERMINATED"), moved(0, "GERMINATED", env=1), moved(3, "FOSSILIZED")])
    assert len(analytics._seeds) == 2
    ends = {"episode": 0, "step": 4, "metric": 0.5, "loss": 1.0, "host_params": 9, "added_params": 0, "rollbacks": 0}
    before = analytics.tallies()
    analytics.write(EpisodeRow(env=0, fossilized=1, grown={"a": "mlp"}, unfinished=[], **ends))
    analytics.write(EpisodeRow(env=1, fossilized=0, grown={}, unfinished=["a"], **ends))
    assert analytics._seeds == {}
    assert str(analytics.tallies()) == str(before)


def test_a_rollback_removes_seeds_and_takes_back_what_was_kept_in_the_step():
    rows = [moved(0, "GERMINATED"), rollback(1, "a"), moved(4, "GERMINATED"), moved(6, "FOSSILIZED"), rollback(6, "a")]
    (tally,) = BlueprintAnalytics.of(rows).tallies()
    assert (tally.tried, tally.kept, tally.pruned) == (2, 0, 2)
    assert math.isnan(tally.steps_to_keep)


def test_a_rollback_of_a_twin_or_of_an_empty_slot_counts_nothing():
    rows = [rollback(0, "a"), moved(1, "GERMINATED"), rollback(2, "a", twin=True)]
    (tally,) = BlueprintAnalytics.of(rows).tallies()
    assert (tally.tried, tally.pruned) == (1, 0)


def test_the_table_of_a_run_adds_up_to_what_the_engine_did():
    engine, memory = VectorizedEngine(blobs(), small_config(envs=8, steps=30)), Memory()
    table, other = BlueprintAnalytics(), BlueprintAnalytics()
    engine.run(RandomValid(), Journal(engine, Hub([memory, table])))
    tallies, seeds = table.tallies(), engine.view().seeds
    planted = [row for row in memory.rows if isinstance(row, DecisionRow) and row.op == "GERMINATE" and row.carried_out]
    ends = [row for row in memory.rows if isinstance(row, EpisodeRow)]
    assert sum(tally.tried for tally in tallies) == len(planted)
    assert sum(tally.kept for tally in tallies) == int((seeds.stage == Stage.FOSSILIZED).sum()) > 0
    assert sum(tally.params_bought for tally in tallies) == sum(row.added_params for row in ends) > 0
    left = sum(tally.tried - tally.kept - tally.pruned for tally in tallies)
    assert left == sum(len(row.unfinished) for row in ends)
    assert any(np.isfinite(tally.contribution) for tally in tallies)
    assert other.tallies() == []


def test_a_run_without_decision_rows_has_no_price():
    engine, memory = VectorizedEngine(blobs(), small_config(envs=4, steps=20)), Memory()
    engine.run(RandomValid(), Journal(engine, Hub([memory])))
    old = BlueprintAnalytics.of(row for row in memory.rows if not isinstance(row, DecisionRow)).tallies()
    assert old
    assert {tally.params_bought for tally in old} == {None}


def test_a_training_keeps_its_rounds_apart(tmp_path):
    settings = {"envs": 4, "steps": 4, "reward": {"group_size": 2}, "data": {"batch_size": 12, "batches_per_step": 1}}
    settings["ppo"] = {"rounds": 2, "imitation_rounds": 0, "validate_envs": 2, "update_epochs": 1}
    table = BlueprintAnalytics()
    esper.train("iris", settings, run=tmp_path / "r", outputs=[table], progress=False)
    assert repr(table.tallies()) == repr(esper.open_run(tmp_path / "r").blueprints)
    assert sum(tally.tried for tally in table.tallies()) > 0
