"""Check that a report says what the events say, for runs in any state, and that nothing in it can run or be fetched."""

import copy
import json
import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.cli import main
from esper.karn.reader import read_model
from esper.karn.report.frame import render
from esper.karn.report.page import content_of
from esper.karn.run_model import NO_SEED, DecisionLog, RunModel
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError, RunWarning
from esper.nissa.events import read_events
from esper.nissa.rows import (
    DecisionRow,
    EvaluationRow,
    LifecycleRow,
    MeasurementRow,
    RollbackRow,
    SensorsRow,
    StepRow,
)
from iris import grow_iris
from pages import EVIL, Page


def page(model, name):
    return render(content_of(model, name))


def changed(model, **files):
    """Copy a model, with other files."""
    other = copy.copy(model)
    vars(other).update(files)
    return other


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return grow_iris(tmp_path_factory.mktemp("runs") / "iris", steps=12)


def test_every_run_has_a_page_at_its_end_that_is_whole_and_makes_no_request(run):
    text = (run / "report.html").read_text(encoding="utf-8")
    parsed = Page(text)
    assert "script" in parsed.tags
    assert "link" not in parsed.tags
    assert "img" not in parsed.tags
    assert {name for name, _ in parsed.attributes} & {"src", "srcset", "action", "onclick", "onload"} == set()
    assert [value for name, value in parsed.attributes if name == "href" and not value.startswith("#")] == []
    assert "default-src 'none'" in text
    assert "http" not in re.sub(r"http-equiv", "", text)


def test_the_page_says_what_was_asked_what_came_out_and_how_it_compares(run):
    said, summary = Page((run / "report.html").read_text()).said, json.loads((run / "summary.json").read_text())
    assert "The controller random-valid was asked to grow 3 networks on the task iris, for 12 steps" in said
    assert re.search(r"(than|and|equal) twin, the host alone", said)
    assert f"What came out {summary['verdict']}" in said
    assert f"seeds: {summary['seeds']['germinated']} germinated" in said
    for planting in summary["keeps"] + summary["prunes"]:
        assert planting["reason"].split(";")[0] in said


def test_the_sections_stand_in_the_order_of_their_table_in_the_docs(run, trained):
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    table = page.split("| section | what it answers |")[1].split("\n\n")[0].splitlines()[2:]
    listed = [name for line in table for name in line.split(" | ")[0].removeprefix("| ").split(", Health of ")]
    listed = ["Health of " + name if name == "the learner" else name for name in listed]
    for folder in (run, trained):
        shown = [section.name for section in content_of(read_model(esper.open_run(folder)), "x").sections]
        assert shown == [name for name in listed if name in shown]


def test_the_price_of_twice_the_size_counts_a_small_host_as_rent_size_parameters(run):
    model = read_model(esper.open_run(run))
    host = model.summary["host_params"]

    def said(**reward):
        return Page(page(changed(model, config=model.config | {"reward": reward}), "x")).said

    small = said(rent=0.1, rent_size=2000)
    assert host < 2000
    assert "reward.rent * ln(1 + added / max(host parameters, 2,000)); reward.rent is 0.1" in small
    paid = 0.1 * np.log1p(host / 2000)
    assert f"so a host of {host:,} parameters that grows to twice its size pays {paid:.3g}." in small
    assert f"ln(1 + added / host parameters); reward.rent is 0.1, so a host of {host:,}" in said(rent=0.1, rent_size=0)
    assert "twice its size pays 0.0693." in said(rent=0.1, rent_size=0)


def test_a_difference_whose_interval_holds_0_is_not_resolved_by_so_many_environments(run):
    model = read_model(esper.open_run(run))
    grown = model.summary["test_accuracy"]["grown"]

    def said(*differences):
        values = [value - each for value, each in zip(grown, differences, strict=True)]
        twin = model.summary["baselines"]["twin"] | {"test_accuracy": values}
        summary = {**model.summary, "baselines": {"twin": twin}}
        return Page(page(changed(model, summary=summary), "x")).said

    between = "The difference between the grown networks and twin, the host alone, is not resolved by 3 environments"
    assert f"{between}: +0.200 [-0.297, +0.697]." in said(0.0, 0.2, 0.4)
    assert "The grown networks are better than twin, the host alone: +0.200 [" in said(0.19, 0.2, 0.21)
    assert "The grown networks equal twin, the host alone, in all 3 environments." in said(0.0, 0.0, 0.0)


def test_the_stays_of_the_timeline_make_up_the_stages_of_the_step_rows(run):
    model = read_model(esper.open_run(run))
    rows = [row for row in read_events(run / "events.jsonl") if isinstance(row, StepRow)]
    drawn = np.full((12, 3, 2), int(Stage.DORMANT))
    for stay in model.stays:
        assert (drawn[stay.start : stay.stop, stay.env, stay.slot] == Stage.DORMANT).all(), "two stays overlap"
        drawn[stay.start : stay.stop, stay.env, stay.slot] = stay.stage
    assert drawn.tolist() == [row.stages for row in rows]
    assert {stay.blueprint is None for stay in model.stays if stay.stage in (Stage.TRAINING, Stage.HOLDING)} == {False}
    assert ((model.population.seed == NO_SEED) | (model.population.stage != Stage.DORMANT)).all()


def test_every_planting_and_every_prune_has_a_mark_beside_the_stages(run):
    model = read_model(esper.open_run(run))
    rows = [row for row in read_events(run / "events.jsonl") if isinstance(row, LifecycleRow)]
    marks = [stay for stay in model.stays if stay.start == stay.stop]
    shown = {(mark.env, model.head.slots[mark.slot], mark.start, mark.stage == Stage.GERMINATED) for mark in marks}
    assert shown == {
        (row.env, row.slot, row.step, row.to_stage == "GERMINATED")
        for row in rows
        if row.to_stage in ("GERMINATED", "PRUNED")
    }
    assert Page(page(model, "x")).tags.count("polygon") >= len(shown) > 0


def test_a_seed_that_a_rollback_took_is_marked_where_it_went(run):
    fed = RunModel()
    for row in read_events(run / "events.jsonl"):
        fed.write(row)
    opened = esper.open_run(run)
    planted = next(stay for stay in fed.complete(opened).stays if stay.stage == Stage.GERMINATED)
    slot = fed.complete(opened).head.slots[planted.slot]
    lost = {"metric": None, "loss": None, "pruned": [slot], "slot_stages": [0, 0]}
    for twin in (False, True):
        fed.write(RollbackRow(episode=0, step=planted.start + 1, env=planted.env, twin=twin, reason="rise", **lost))
    lost = [stay for stay in fed.complete(opened).stays if stay.why and "rollback" in stay.why]
    assert [(stay.env, stay.slot, stay.start, stay.stop, stay.stage) for stay in lost] == [
        (planted.env, planted.slot, planted.start + 1, planted.start + 1, Stage.PRUNED)
    ]
    tables = [table for each in content_of(fed.complete(opened), "x").sections for table in each.tables]
    restored = next(table for table in tables if table.caption == "Environments restored to a snapshot")
    assert restored.rows[0][-1] == f"{planted.blueprint} at {slot}"


def test_a_limit_that_closed_planting_is_told_from_one_that_was_never_met(tmp_path):
    for limit, sentence in ((1, "it closed planting at "), (3, "it was never what stood against planting")):
        settings = {"envs": 3, "steps": 10, "models": "none", "baselines": [], "lifecycle": {"max_seeds": limit}}
        esper.grow("iris", settings, controller="random-valid", run=tmp_path / str(limit), progress=False)
        said = Page((tmp_path / str(limit) / "report.html").read_text()).said
        assert f"(lifecycle.max_seeds): {sentence}" in said
    opened = esper.open_run(tmp_path / "1")
    stages = opened.steps["stages"][:-1]  # before every decision but the first
    free = (stages == Stage.DORMANT).any(2)
    full = ((stages >= Stage.GERMINATED) & (stages <= Stage.FOSSILIZED)).any(2)
    said = Page((tmp_path / "1" / "report.html").read_text()).said
    assert f"closed planting at {(free & full).sum()} of {free.sum()} decisions with an empty slot" in said


def test_results_are_listed_by_environment_with_every_static_network(run):
    summary = json.loads((run / "summary.json").read_text())
    model = read_model(esper.open_run(run))
    result = next(section for section in content_of(model, "x").sections if section.key == "results")
    table = next(table for table in result.tables if table.caption == "Results by environment")
    for env, row in enumerate(table.rows):
        grown, twin = summary["test_accuracy"]["grown"][env], summary["baselines"]["twin"]["test_accuracy"][env]
        assert row[:3] == (str(env), f"{grown:.4f}", f"{twin:.4f}")
        assert row[3] == f"{summary['grown_params'][env] - summary['host_params']:,}"


def test_shapley_values_and_interactions_are_the_last_that_were_measured_in_each_environment(run):
    fed, nothing = RunModel(), [[None, None]] * 3
    for row in read_events(run / "events.jsonl"):
        if not isinstance(row, MeasurementRow | SensorsRow):
            fed.write(row)
    measured = {
        4: (
            [[0.5, None], [0.1, 0.3], [None, None]],
            [[[None, None]] * 2, [[None, 0.2], [0.2, None]], [[None, None]] * 2],
        ),
        5: ([[0.7, None], [None, None], [None, None]], [[[None, None]] * 2] * 3),
    }
    for step, (shapley, interactions) in measured.items():
        figures = dict.fromkeys(("contribution_means", "contribution_ses", "gain_means", "gain_ses"), nothing)
        worth = {"shapley_means": shapley, "shapley_ses": nothing, "interactions": interactions}
        fed.write(MeasurementRow(episode=0, step=step, participations=nothing, **figures, **worth))
        readings = [[[1.0], [None]], [[2.0], [None]], [[6.0], [None]]]
        fed.write(SensorsRow(episode=0, step=step, sensors=["participation"], readings=readings))
    model = fed.complete(esper.open_run(run))
    nan = np.nan
    assert np.array_equal(model.coalitions["shapley"], [[0.7, nan], [0.1, 0.3], [nan, nan]], equal_nan=True)
    assert np.array_equal(model.coalitions["interaction"][1], [[nan, 0.2], [0.2, nan]], equal_nan=True)
    assert np.array_equal([medians for _, _, medians in model.sensed], [[[2.0], [nan]]] * 2, equal_nan=True)
    said = Page(page(model, "x")).said
    first, second = model.head.slots
    assert "Interactions of pairs of seeds: means over environments ± standard error" in said
    assert f"slots interaction environments {first} with {second} +0.2000 1" in said
    assert f"{first}, 2 environments: +0.4000" in said


def test_the_table_of_blueprints_counts_what_the_lifecycle_rows_say(run):
    model = read_model(esper.open_run(run))
    rows = [row for row in read_events(run / "events.jsonl") if isinstance(row, LifecycleRow)]
    assert model.tallies
    for tally in model.tallies:
        own = [row for row in rows if (row.blueprint, row.slot) == (tally.blueprint, tally.slot)]
        counts = [sum(row.to_stage == stage for row in own) for stage in ("GERMINATED", "FOSSILIZED", "PRUNED")]
        assert [tally.tried, tally.kept, tally.pruned] == counts
    assert sum(tally.tried for tally in model.tallies) == sum(row.to_stage == "GERMINATED" for row in rows)


def test_the_reader_has_the_same_table_of_blueprints(run):
    opened = esper.open_run(run)
    assert repr(opened.blueprints) == repr(read_model(opened).tallies)  # nan is not equal to itself


def test_what_was_not_measured_is_said_to_be_and_is_no_0(run):
    model = read_model(esper.open_run(run))
    never = [tally for tally in model.tallies if np.isnan(tally.contribution)]
    assert never, "every seed had its contribution measured"
    assert Page(page(model, "x")).said.count("not measured") >= len(never)


@pytest.mark.parametrize("kept", [0, 1, 5, 20])
def test_a_killed_run_has_a_page_of_what_there_is(run, tmp_path, kept):
    folder = tmp_path / "killed"
    shutil.copytree(run, folder)
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events.jsonl").write_bytes(b"".join(lines[:kept]))
    (folder / "summary.json").unlink()
    said = Page(esper.report(folder, tmp_path / "page.html").read_text()).said
    assert "was killed before it ended" in said


def test_a_run_of_level_run_or_off_has_a_page_without_the_curves(tmp_path):
    for level in ("run", "off"):
        settings = {"envs": 2, "steps": 3, "models": "none", "telemetry": {"level": level}}
        esper.grow("iris", settings, controller="random-valid", run=tmp_path / level, progress=False)
        said = Page((tmp_path / level / "report.html").read_text()).said
        assert "Grown networks beside static ones" in said
        assert "What grew, where and when" not in said


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "t"
    settings = {
        "envs": 8,
        "steps": 3,
        "ppo": {"rounds": 2, "imitation_rounds": 1, "validate_envs": 2, "validate_every": 1},
    }
    esper.train("iris", settings, run=folder, progress=False)
    return folder


def test_a_training_has_a_page_with_its_learning_curves(trained):
    parsed = Page((trained / "report.html").read_text())
    assert "The best controller reached a validation J of" in parsed.said
    rounds = [row for row in read_events(trained / "events.jsonl") if type(row).__name__ == "RoundRow"]
    drawn = {name for row in rounds for name, value in row.figures.items() if value is not None}
    assert all(name.replace("_", " ") in parsed.said for name in drawn)
    assert "trained in 1 round of imitation and then 2 rounds by growing, in every round, 8 networks" in parsed.said
    assert "What the policy looks at" in parsed.said
    assert (
        "round step environment slot blueprint decision reason" in parsed.said or "No seed was planted" in parsed.said
    )


def test_every_planting_is_listed_with_its_reason_and_every_blueprint_with_its_parameters(run):
    model = read_model(esper.open_run(run))
    content = content_of(model, "iris")
    tables = {table.caption: table for section in content.sections for table in section.tables}
    rows = list(read_events(run / "events.jsonl"))
    planted = [row for row in rows if isinstance(row, LifecycleRow) and row.to_stage == "GERMINATED"]
    assert [row[:4] for row in tables["Plantings with their reasons"].rows] == [
        (f"{row.step}", f"{row.env}", row.slot, row.blueprint) for row in planted
    ]
    assert planted
    assert all(row[4] for row in tables["Plantings with their reasons"].rows)
    became = next(table for caption, table in tables.items() if caption.startswith("What became of the seeds"))
    host = np.mean(model.head.host_param_counts)
    for blueprint, slot, params, rent, *_ in became.rows:
        prices = [
            row.price
            for row in rows
            if isinstance(row, DecisionRow)
            and (row.op, row.blueprint, row.slot, row.carried_out) == ("GERMINATE", blueprint, slot, True)
        ]
        assert params == f"{np.mean(prices):,.0f}"
        assert rent == f"{0.1 * np.log(1 + np.mean(prices) / host):.4f}"


def test_the_lowest_environment_is_named_beside_the_twin(run):
    summary = json.loads((run / "summary.json").read_text())
    scores = summary["test_accuracy"]["grown"]
    env = int(np.argmin(scores))
    twin = summary["baselines"]["twin"]["test_accuracy"][env]
    said = Page(page(read_model(esper.open_run(run)), "iris")).said
    assert f"The lowest test accuracy is {min(scores):.4f}, in environment {env}, beside {twin:.4f} of twin." in said


def test_seeds_without_any_effect_are_counted_and_those_with_a_gain_are_not():
    def removed(gain, error):
        return LifecycleRow(
            seq=0,
            time=0.0,
            episode=0,
            step=3,
            env=0,
            slot="block0",
            from_stage="TRAINING",
            to_stage="PRUNED",
            blueprint="mlp-small",
            alpha=0.0,
            why="no gain",
            gain_mean=gain,
            gain_se=error,
        )

    log = DecisionLog()
    for gain, error in ((-0.0, 0.0), (0.0, 0.1), (0.2, 0.0), (None, None)):
        log.write(removed(gain, error))
    assert (log.total, log.idle) == (4, 1)


def test_a_refused_wish_is_named_with_its_environment_its_steps_and_the_reason(run):
    opened, fed = esper.open_run(run), RunModel()
    for row in read_events(run / "events.jsonl"):
        if not isinstance(row, DecisionRow):
            fed.write(row)
    for step, env, blueprint in ((1, 2, "mlp-small"), (3, 0, "bypass-mlp"), (4, 2, "mlp-small")):
        fed.write(
            DecisionRow(
                seq=0,
                time=0.0,
                episode=0,
                step=step,
                env=env,
                op="GERMINATE",
                slot="block0",
                blueprint=blueprint,
                price=400,
                carried_out=False,
                refusal="param_budget",
                choice_counts=[2, 2, 3, 3, 4, 4],
            )
        )
    tables = [table for each in content_of(fed.complete(opened), "x").sections for table in each.tables]
    refused = next(table for table in tables if table.caption == "Decisions that were refused, 3 in all")
    assert [row[:6] for row in refused.rows] == [
        ("2", "GERMINATE", "block0", "mlp-small", "2", "1 to 4"),
        ("0", "GERMINATE", "block0", "bypass-mlp", "1", "3"),
    ]
    assert {row[6] for row in refused.rows} == {"the seed's parameters would exceed governor.param_limit"}


def test_a_command_is_shown_as_it_is_typed_and_a_program_of_python_is_not(run):
    model = read_model(esper.open_run(run))
    typed = ["/usr/bin/esper", "grow", "iris", "--run", "my run"]
    said = Page(page(changed(model, environment={**model.environment, "command": typed}), "iris")).said
    assert "The command was: esper grow iris --run 'my run'" in said
    assert "To repeat the run, give it with another folder" in said
    for other in (["study.py"], ["/usr/bin/esper", "resume", "r"], []):
        said = Page(page(changed(model, environment={**model.environment, "command": other}), "iris")).said
        assert "The command was" not in said


def test_a_training_counts_its_own_episodes_and_compares_its_validations(trained):
    rows = list(read_events(trained / "events.jsonl"))
    own = [row for row in rows if isinstance(row, LifecycleRow) and row.cohort == "training"]
    model = read_model(esper.open_run(trained))
    planted = sum(row.to_stage == "GERMINATED" for row in own)
    assert sum(tally.tried for tally in model.tallies) == planted
    assert model.decided.total == sum(row.to_stage in ("FOSSILIZED", "PRUNED") and bool(row.why) for row in own)
    fed = RunModel()
    for row in rows:
        fed.write(row)
        if isinstance(row, LifecycleRow | DecisionRow):  # as if the validation had done the same
            fed.write(msgspec.structs.replace(row, cohort="validation"))
    again = fed.complete(esper.open_run(trained))
    for name in ("tallies", "decided"):
        assert repr(getattr(again, name)) == repr(getattr(model, name)), name  # nan is no equal of itself
    found = [row.objectives for row in rows if isinstance(row, EvaluationRow) and row.cohort == "validation"]
    parsed = Page((trained / "report.html").read_text())
    gaps = np.subtract(found[-1], found[0])
    assert f"from the first validation to the last: J {gaps.mean():+.4f} [" in parsed.said
    assert "cohorts.iris.envs" not in parsed.said
    assert "Its 3 rounds took" in parsed.said


def test_a_notebook_shows_the_head_of_the_report(run):
    shown = Page(esper.open_run(run)._repr_html_())
    whole = Page((run / "report.html").read_text()).said
    assert shown.said.startswith("iris")
    assert "seeds: " in shown.said
    assert "Grown networks beside static ones" not in shown.said
    assert all(text.strip() in whole for text in shown.texts)
    assert {"script", "style", "a"} & set(shown.tags) == set()


def test_names_that_a_user_gave_can_neither_run_nor_turn_the_text(tmp_path):
    def host():
        return esper.SegmentedHost([nn.Linear(4, 6), nn.Linear(6, 3)], [esper.SlotSpec(EVIL, after=0, width=6)])

    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    task = esper.task("mine", x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), host=host)
    settings = {"envs": 2, "steps": 4, "models": "none", "baselines": []}
    esper.grow(task, settings, controller="random-valid", run=tmp_path / "r", progress=False)
    shown = Page(esper.open_run(tmp_path / "r")._repr_html_())
    assert "script" not in shown.tags
    text = (tmp_path / "r" / "report.html").read_text()
    parsed = Page(text)
    assert parsed.tags.count("script") == 2  # the data and the script of the page itself
    assert "onload" not in {name for name, _ in parsed.attributes}
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "alert(1)" in parsed.said


def test_the_page_is_rewritten_only_after_the_summary_and_not_where_it_is_not_wanted(run, tmp_path):
    settings = {"envs": 2, "steps": 2, "models": "none", "baselines": [], "report": False}
    esper.grow("iris", settings, controller="never", run=tmp_path / "r", progress=False)
    assert not (tmp_path / "r" / "report.html").exists()
    before = (run / "report.html").stat().st_mtime_ns
    esper.resume(run, progress=False)
    assert (run / "report.html").stat().st_mtime_ns == before


def test_a_report_that_cannot_be_written_costs_a_warning_and_no_figures(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("esper.karn.report.frame.write_atomic", full)
    settings = {"envs": 2, "steps": 2, "models": "none", "baselines": []}
    with pytest.warns(RunWarning, match=r"no report was written: .*report\.html cannot be written: No space left"):
        summary = esper.grow("iris", settings, controller="never", run=tmp_path / "r", progress=False)
    assert summary["status"] == "finished"


def test_the_command_prints_the_path_of_the_page(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run), "--out", str(tmp_path / "page.html")])
    assert not ended.value.code
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert (tmp_path / "page.html").read_text() == (run / "report.html").read_text()
    with pytest.raises(InputError, match="is not a run folder"):
        esper.report(tmp_path)


def test_sixty_four_environments_of_twenty_four_steps_fit_into_three_megabytes(tmp_path):
    settings = {"envs": 64, "steps": 24, "models": "none", "baselines": [], "data": {"batches_per_step": 1}}
    esper.grow("iris", settings, controller="random-valid", run=tmp_path / "r", progress=False)
    assert (tmp_path / "r" / "report.html").stat().st_size < 3 * 10**6
