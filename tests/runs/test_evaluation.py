"""Test evaluations of small populations; a mixture is `repair` in short steps."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from esper.leyline.config.tree import build_config
from esper.leyline.data.task import Split
from esper.leyline.messages import InputError
from esper.runs.evaluation.contenders import RULES, Contender, named
from esper.runs.evaluation.evaluation import Design, Entry, Runner, compared, run_evaluation
from esper.runs.evaluation.record import Evaluation, RecordedFigures
from esper.runs.grow import grow
from esper.runs.train import settings_of_policy
from esper.store.files import to_json
from esper.tamiyo.policy.controller import Language, Policy, save_policy
from esper.tamiyo.rules.base import Never
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from esper.tasks.catalog import get_task
from esper.tasks.repair import repair
from populations import blobs, small_config

SHORT = {
    "steps": 8,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "heuristic": {"weak_below": 0.9},
}
PLAN = [ScheduleEntry(at=0, op="germinate", slot="block0", blueprint="bypass-mlp", keep=True)]
PLANNED = Contender("plan", {}, lambda config: Schedule(PLAN))
HEURISTIC, NEVER = named("heuristic"), named("never")
STATIC = ("same-size", "plain", "skips")
FEW = {"steps": 5, "slots": ["block0"], "blueprints": ["bypass-mlp"]}
"""Little to search among."""


@pytest.fixture(scope="module")
def mixture():
    return repair()


@pytest.fixture(scope="module")
def slim():
    """Make a data set whose host loses everything but one number in its first block."""
    return blobs(hidden=(1, 6))


def assert_equal(ours: RecordedFigures, theirs: RecordedFigures) -> None:
    for name, a, b in zip(RecordedFigures._fields, ours, theirs, strict=True):
        if name != "seconds":
            np.testing.assert_array_equal(a, b, err_msg=name)


def evaluate(task, contenders, instances, seeds, settings, static=(), sized_by=None, folder=None, **over) -> Evaluation:
    """Compare contenders without any rules, on one task."""
    asked = {"part": "heldout", "first": 0, **over}
    design = Design(task, settings, seeds, instances=instances, **asked)
    for contender in contenders:
        design.check(contender)
    return compared(design, Runner(folder), contenders, len(contenders), Entry(), static, sized_by)


def run(task, contenders, instances=3, seeds=2, **over) -> Evaluation:
    return evaluate(task, contenders, instances=instances, seeds=seeds, settings=[SHORT], **over)


def test_never_against_itself_differs_by_nothing(mixture):
    figures = run(mixture, [NEVER, NEVER._replace(name="again")]).figures
    assert_equal(RecordedFigures(*(field[0] for field in figures)), RecordedFigures(*(field[1] for field in figures)))
    assert not figures.added_params.any()


def test_two_evaluations_are_equal(mixture):
    contenders = [named("random-valid"), HEURISTIC]
    assert_equal(run(mixture, contenders, seeds=1).figures, run(mixture, contenders, seeds=1).figures)


def test_what_becomes_of_an_environment_does_not_depend_on_how_many_are_grown_at_once(mixture):
    contenders = [HEURISTIC, PLANNED]
    whole = run(mixture, contenders, instances=5, seeds=1)
    assert whole.figures.kept.any()
    assert_equal(whole.figures, run(mixture, contenders, instances=5, seeds=1, rows=2).figures)


def test_an_instance_is_the_same_whichever_comes_before_it(mixture):
    whole, last = run(mixture, [PLANNED]), run(mixture, [PLANNED], instances=1, first=2)
    assert whole.instances[2] == last.instances[0] == mixture.keys("heldout")[2]
    assert_equal(RecordedFigures(*(field[:, 2:] for field in whole.figures)), last.figures)


@pytest.mark.parametrize("measure", ["metric", "log_loss"])
def test_the_figures_are_those_of_a_run(slim, measure):
    reward = {"reward": {"objective": measure, "rent": 0.2}}
    found = evaluate(slim, [PLANNED], instances=3, seeds=1, settings=[SHORT, reward]).figures
    config = build_config(slim.defaults, SHORT, reward, {"envs": 3, "baselines": [], "models": "none"})
    summary = grow(slim, config, Schedule(PLAN))
    assert found.objective[0, :, 0].tolist() == summary["test_objective"]["grown"]
    assert found.metric[0, :, 0].tolist() == summary["test_accuracy"]["grown"]
    assert (found.added_params[0, :, 0] + summary["host_params"]).tolist() == summary["grown_params"]
    assert found.kept.sum() == summary["seeds"]["fossilized"] > 0


def test_seeds_count_up_from_that_of_the_config(mixture):
    both = run(mixture, [PLANNED])
    second = evaluate(mixture, [PLANNED], instances=3, seeds=1, settings=[SHORT, {"seed": 1}])
    assert (both.seeds, second.seeds) == ((0, 1), (1,))
    assert_equal(RecordedFigures(*(field[..., 1:] for field in both.figures)), second.figures)


def test_a_test_split_is_read_when_the_last_decision_is_made(mixture):
    read = []

    def watched(key: int) -> Split:
        read.append(key)
        return mixture.test(key)

    class Watchful(Never):
        def act(self, view):
            assert not read
            return super().act(view)

    run(replace(mixture, test=watched), [Contender("watchful", {}, lambda config: Watchful())], seeds=1)
    assert read == list(mixture.keys("heldout")[:3])


def test_a_task_without_a_test_split_is_refused(slim):
    with pytest.raises(InputError, match="no test split"):
        run(slim.sealed(), [NEVER])


def test_starts_on_one_data_set_are_runs_of_one_problem_and_instances_of_a_mixture_are_problems(mixture, slim):
    shapes = [found.problems(found.figures.metric[0]).shape for found in (run(slim, [NEVER]), run(mixture, [NEVER]))]
    assert shapes == [(1, 6), (3, 2)]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reward": {"rent": 0.0}}, "never sets reward.rent, which a controller may not set"),
        ({"optimizer": {"lr": 0.1}}, "sets optimizer.lr"),
        ({"lifecycle": {"max_seeds": 1}}, "sets lifecycle.max_seeds"),
        ({"lifecycle": {"incubation": "ste"}}, "sets lifecycle.incubation"),
        ({"controller": "x", "blueprints": ["skip-mlp"]}, "sets blueprints"),
        ({"slots": ["block0"]}, "sets slots"),
        ({"governor": {"enabled": False}}, "sets governor.enabled"),
        ({"governor": {"param_limit": 1.0}}, "sets governor.param_limit"),
        ({"seed": 3}, "sets seed"),
    ],
)
def test_a_contender_that_plays_another_game_is_refused(mixture, settings, sentence):
    with pytest.raises(InputError, match=sentence):
        run(mixture, [NEVER._replace(settings=settings)])


def test_a_contender_may_bring_all_that_a_trained_controller_brings(mixture):
    trained = NEVER._replace(name="trained", settings=settings_of_policy(small_config()))
    found = run(mixture, [NEVER, trained], instances=2, seeds=1)
    assert found.contenders == ("never", "trained")
    assert_equal(
        RecordedFigures(*(field[0] for field in found.figures)), RecordedFigures(*(field[1] for field in found.figures))
    )


def test_a_contender_may_bring_gates_of_its_own(mixture):
    strict = PLANNED._replace(name="strict", settings={"gates": {"permissive": False, "gain_z": 100.0}})
    kept = run(mixture, [PLANNED, strict]).figures.kept
    assert kept[0].any()
    assert not kept[1].any()


def test_a_setting_that_an_evaluation_makes_by_itself_is_refused(mixture):
    with pytest.raises(InputError, match="instances is among the settings"):
        evaluate(mixture, [NEVER], instances=1, seeds=1, settings=[SHORT, {"instances": "training"}])


@pytest.mark.parametrize(("instances", "seeds"), [(0, 1), (1, 0)])
def test_less_than_one_instance_or_seed_is_refused(mixture, instances, seeds):
    with pytest.raises(InputError, match="needs 1 or more"):
        run(mixture, [NEVER], instances, seeds)


def test_more_instances_than_there_are_are_refused_in_one_sentence(mixture):
    with pytest.raises(InputError, match="of the heldout instances"):
        run(mixture, [NEVER], instances=10**6)


class Counted:
    """Notes the populations that a contender is made for, but for the one environment that it is checked on."""

    def __init__(self, content=""):
        self.made = []
        self.contender = Contender("counted", {}, self.make, content)

    def make(self, config):
        if config.envs > 1:
            self.made.append((config.seed, config.first_instance))
        return Schedule(PLAN)


def test_what_is_kept_is_not_grown_again(mixture, tmp_path):
    first, second, third = Counted(), Counted(), Counted()
    whole = run(mixture, [first.contender], instances=4, rows=2, folder=tmp_path)
    assert first.made == list(product((0, 1), (0, 2)))
    assert_equal(whole.figures, run(mixture, [second.contender], instances=4, rows=2, folder=tmp_path).figures)
    assert second.made == []
    sorted(tmp_path.iterdir())[-1].unlink()
    assert_equal(whole.figures, run(mixture, [third.contender], instances=4, rows=2, folder=tmp_path).figures)
    assert len(third.made) == 1


def test_what_is_kept_of_another_content_or_config_is_grown_again(mixture, tmp_path):
    run(mixture, [Counted().contender], seeds=1, folder=tmp_path)
    other, dearer = Counted("other"), Counted()
    run(mixture, [other.contender], seeds=1, folder=tmp_path)
    evaluate(
        mixture, [dearer.contender], instances=3, seeds=1, settings=[SHORT, {"reward": {"rent": 1}}], folder=tmp_path
    )
    assert len(other.made) == len(dearer.made) == 1


def test_a_damaged_file_is_refused_by_name(mixture, tmp_path):
    run(mixture, [NEVER], seeds=1, folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=path.name):
        run(mixture, [NEVER], seeds=1, folder=tmp_path)


@pytest.fixture(scope="module")
def told():
    """Return a list for the lines of the evaluation of `record`."""
    return []


@pytest.fixture(scope="module")
def record(mixture, told):
    settings = [SHORT, FEW]
    contenders = [PLANNED, HEURISTIC]
    return run_evaluation(
        contenders,
        [mixture],
        instances=2,
        seeds=2,
        settings=settings,
        watch=told.append,
    )


def test_an_evaluation_says_first_how_much_it_grows_and_after_a_population_how_long_that_takes(record, told):
    assert told[0] == "28 networks to grow on 1 task, with static networks"
    (line,) = [line for line in told if " networks took " in line]
    assert " of 28 networks took " in line
    assert line.endswith(" for the others")


def test_a_record_is_strict_json_and_has_the_rules_beside_the_controllers(record):
    assert json.loads(to_json(record)) == record
    (task,) = record["tasks"]
    assert [row["name"] for row in task["controllers"]] == [*RULES, "plan", *STATIC]
    assert [row["rule"] for row in task["controllers"]] == [True] * 3 + [False] * 4
    assert [row["static"] for row in task["controllers"]] == [False] * 4 + [True] * 3
    assert {(row["controller"], row["rule"]) for row in task["comparisons"]} == {
        (a, b) for a in (*RULES, "plan", *STATIC) for b in (*RULES, *STATIC) if a != b
    }
    assert (record["baselines"], record["sized_by"], task["absent"]) == (list(STATIC), "plan", {})


def test_static_networks_are_sized_by_what_a_contender_grew(mixture):
    settings = [SHORT, {"lifecycle": {"tempos": [0, 1]}}]
    asked = {"instances": 2, "seeds": 1, "settings": settings}
    found = evaluate(mixture, [NEVER, PLANNED], static=STATIC, sized_by="plan", **asked)
    added, kept = (dict(zip(found.contenders, figure[..., 0].tolist(), strict=True)) for figure in found.figures[2:4])
    assert min(kept["plan"]) > 0, "or this shows nothing"
    assert (added["same-size"], kept["same-size"]) == (added["plan"], kept["plan"])
    assert all(plain >= grown for plain, grown in zip(added["plain"], added["plan"], strict=True))
    assert added["skips"] == added["never"] == [0.0, 0.0]
    assert found.figures.objective[-1].tolist() == found.figures.metric[-1].tolist(), "without more parameters no rent"
    assert (found.static, found.absent, found.sized_by) == (STATIC, {}, "plan")


def test_a_static_network_of_an_evaluation_is_that_of_a_run(record, mixture):
    settings = build_config(mixture.defaults, SHORT, FEW, {"envs": 2, "instances": "heldout", "models": "none"})
    beside = grow(mixture, settings, Schedule(PLAN))["baselines"]
    runs = record["tasks"][0]["runs"]
    for name in STATIC:
        assert [row[0] for row in runs[name]["metric"]] == beside[name].get("test_accuracy"), beside[name]


def test_what_is_kept_of_static_networks_is_not_trained_again(mixture, tmp_path):
    asked = {"instances": 2, "seeds": 1, "static": ["plain"], "sized_by": "plan", "folder": tmp_path}
    first, second = (evaluate(mixture, [PLANNED], settings=[SHORT, FEW], **asked) for _ in range(2))
    assert first.contenders == second.contenders == ("plan", "plain")
    np.testing.assert_array_equal(first.figures.seconds, second.figures.seconds)


def test_a_static_network_that_a_host_does_not_have_is_absent_with_its_reason():
    task = get_task("iris")
    asked = {"instances": 2, "seeds": 1, "static": STATIC, "sized_by": "never"}
    found = evaluate(task, [NEVER], settings=[{"steps": 1, "data": {"batches_per_step": 1}}], **asked)
    assert found.contenders == ("never", "same-size", "plain")
    assert "has a path around its weights already" in found.absent["skips"]


def test_a_record_holds_every_run_that_its_estimates_are_of(record):
    (task,) = record["tasks"]
    for row in task["controllers"]:
        runs = np.array(task["runs"][row["name"]]["objective"])
        assert runs.shape == (2, 2)
        assert row["objective"]["value"] == pytest.approx(runs.mean())
    difference = np.subtract(*(task["runs"][name]["objective"] for name in ("plan", "never"))).mean()
    (row,) = (row for row in task["comparisons"] if (row["controller"], row["rule"]) == ("plan", "never"))
    assert row["difference"]["value"] == pytest.approx(difference)


def test_several_tasks_are_summed_up_where_their_metric_is_one(slim, mixture):
    settings = [SHORT, FEW]
    record = run_evaluation([], [slim, mixture], instances=2, seeds=1, settings=settings, baselines=())
    never = [task["controllers"][0]["metric"]["value"] for task in record["tasks"]]
    assert record["together"]["controllers"][0]["metric"]["value"] == pytest.approx(np.mean(never))


@pytest.mark.parametrize(
    ("controllers", "sentence"),
    [
        ([PLANNED, PLANNED], "give each a name of its own"),
        ([PLANNED._replace(name="heuristic")], "give each a name of its own"),
        ([PLANNED._replace(name="plain")], "give each a name of its own"),
    ],
)
def test_bad_controllers_are_refused_before_anything_is_grown(slim, controllers, sentence):
    lines = []
    with pytest.raises(InputError, match=sentence):
        run_evaluation(controllers, [slim], instances=2, seeds=1, settings=[SHORT], watch=lines.append)
    assert lines == []


def test_a_schedule_that_does_not_fit_a_task_is_refused_before_anything_is_grown(slim, tmp_path):
    path, lines = tmp_path / "plan.yaml", []
    path.write_text("- {at: 0, op: germinate, slot: nope, blueprint: bypass-mlp}\n")
    with pytest.raises(InputError, match="nope"):
        run_evaluation([named(str(path))], [slim], instances=2, seeds=1, settings=[SHORT], watch=lines.append)
    assert lines == []


@pytest.mark.parametrize("times", [0, 2])
def test_a_task_is_named_once(slim, times):
    with pytest.raises(InputError, match="one or more, each once"):
        run_evaluation([], [slim] * times, instances=2, seeds=1, settings=[SHORT])


def test_the_content_of_a_schedule_is_part_of_who_a_contender_is(tmp_path):
    path, contents = tmp_path / "plan.yaml", []
    for text in ("[]", "- {at: 0, op: wait}", "[]"):
        path.write_text(text)
        contents.append(named(str(path)).content)
    assert contents[0] == contents[2] != contents[1]


def test_what_was_trained_is_who_a_contender_is_and_not_what_else_its_run_holds(tmp_path):
    language = Language((), ("mlp-small",), (0, 2), (1.0,))
    (tmp_path / "controller").mkdir()
    contents = []
    for seed, file in ((0, "a"), (0, "b"), (1, "c")):
        save_policy(Policy.fresh(language, seed), tmp_path / "controller")
        (tmp_path / file).write_text(file)
        contents.append(named(str(tmp_path)).content)
    assert contents[0] == contents[1] != contents[2]


def test_a_metric_that_is_not_finite_is_null_in_the_record(slim):
    diverging = {"optimizer": {"lr": 1e30}, "governor": {"enabled": False}}
    settings = [SHORT, FEW, diverging, {"reward": {"objective": "log_loss"}}]
    record = run_evaluation([], [slim], instances=2, seeds=1, settings=settings, baselines=())
    never = record["tasks"][0]["controllers"][0]
    assert never["objective"] == never["objective_iqm"] == {"value": None, "low": None, "high": None}
    to_json(record)
