"""Test the opponents that an evaluation adds, on short runs of `heal`."""

from dataclasses import replace

import numpy as np
import pytest

from esper.leyline.config.tree import build_config
from esper.leyline.messages import InputError
from esper.runs.evaluation.contenders import Contender, named, trainings
from esper.runs.evaluation.evaluation import Design, Runner, run_evaluation
from esper.runs.evaluation.statistics import interval, mean, mean_difference
from esper.store.files import to_json
from esper.tamiyo.rules.base import Never
from esper.tasks.catalog import get_task
from esper.tasks.repair import repair
from esper_bench.controllers.plans import UNIFORM, choices_of
from esper_bench.evaluation import rivals
from esper_bench.evaluation.declared import FITTED, ORACLE, SEARCHED, Opponents, Reference, opponents_of
from esper_bench.evaluation.opponents import check_opponents, enter, fitted_tree, search_budget
from esper_bench.evaluation.plan_menu import space_of
from esper_bench.evaluation.plan_search import EPISODES
from esper_bench.evaluation.rivals import Opposition, best_by_others, share_of_headroom
from populations import blobs

SHORT = {
    "steps": 5,
    "data": {"batch_size": 12, "batches_per_step": 1},
    "blueprints": ["bypass-rank-1", "bypass-linear"],
}


@pytest.fixture(scope="module")
def task():
    """Make `repair` with two rules, an oracle, and a reference on the same instances without noise of its own."""
    base = replace(repair(), menu=("bypass-rank-1", "bypass-linear"))
    return replace(base, name="repair-small")


def compare(task, folder, **over):
    again = replace(task, name="repair-again")
    declared = Opponents(
        ("uniform", "participation"), {"again": Reference(lambda: again), "plan": Reference(lambda: again, SEARCHED)}
    )
    rivals = Opposition(None, 9, {task.name: declared})
    asked = {"instances": 3, "seeds": 2, "rivals": rivals, "settings": [SHORT], "baselines": (), "folder": folder}
    group = [Contender(f"mine: {n}", {}, lambda config: Never(), str(n), group="mine", episodes=n) for n in (5, 9)]
    return run_evaluation(group, [task], **(asked | over))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grown")


@pytest.fixture(scope="module")
def record(task, folder):
    return compare(task, folder)


def test_the_opponents_are_in_the_record_with_their_search_budgets(record):
    (task,) = record["tasks"]
    rows = {row["name"]: row for row in task["controllers"]}
    assert task["opponents"] == ["uniform", "participation", "again", "plan", ORACLE]
    budgets = {name: row["episodes"] for name, row in rows.items()}
    assert (budgets[SEARCHED], budgets["plan"], budgets["uniform"], budgets["mine"]) == (9, 9, 0, 9)
    assert record["search_budget"] == {"episodes": 9, "reason": "as asked for"}
    assert {row["rule"] for row in task["comparisons"] if row["controller"] == "mine"} == set(rows) - {"mine"}
    assert task["runs"]["again"]["objective"] == task["runs"]["never"]["objective"]


def test_trainings_of_one_controller_are_one_row(record):
    (task,) = record["tasks"]
    assert task["groups"] == {"mine": ["mine: 5", "mine: 9"]}
    (row,) = (row for row in task["controllers"] if row["name"].startswith("mine"))
    assert (row["name"], row["trainings"]) == ("mine", 2)
    both = [task["runs"][name]["objective"] for name in task["groups"]["mine"]]
    assert row["objective"]["value"] == pytest.approx(np.mean(both))


def test_what_opponents_grew_is_reused(record, task, folder, monkeypatch):
    monkeypatch.setattr("esper.runs.evaluation.evaluation.grow_contender", None)
    monkeypatch.setattr("esper_bench.evaluation.plan_search.grow_contender", None)
    assert compare(task, folder)["tasks"][0]["runs"] == record["tasks"][0]["runs"]
    assert to_json(record)


def test_the_oracle_chooses_among_its_plans_and_the_best_fixed_one(record, task, folder, monkeypatch):
    of, chosen = rivals.oracle, []

    def watched(task, plans, runs):
        chosen.extend(runs[plan] for plan in plans)
        return of(task, plans, runs)

    monkeypatch.setattr(rivals, "oracle", watched)
    compare(task, folder)
    figures = record["tasks"][0]["runs"]
    best = np.array(figures[SEARCHED]["objective"])
    np.testing.assert_array_equal(chosen[-1]["objective"], best)
    scores = np.stack([runs["objective"] for runs in chosen])
    taken = np.take_along_axis(scores, best_by_others(scores)[None], 0)[0]
    np.testing.assert_array_equal(figures[ORACLE]["objective"], taken)


def test_the_oracle_is_at_least_as_good_as_the_plans_where_their_runs_agree():
    scores = np.repeat(np.random.default_rng(0).normal(size=(4, 5, 1)), 2, 2)
    chosen = best_by_others(scores)
    np.testing.assert_array_equal(np.take_along_axis(scores, chosen[None], 0)[0], scores.max(0))


def test_the_choice_of_the_oracle_is_that_of_a_loop_over_runs():
    scores = np.random.default_rng(1).normal(size=(4, 5, 3))
    for problem in range(5):
        for run in range(3):
            others = [other for other in range(3) if other != run]
            means = [scores[plan, problem, others].mean() for plan in range(4)]
            assert best_by_others(scores)[problem, run] == int(np.argmax(means))


@pytest.mark.parametrize("problems", [6, 1])
def test_the_joint_bootstrap_is_that_of_a_loop_over_draws(problems):
    trainings_, runs, draws = 3, 4, 40
    ours = np.random.default_rng(2).normal(size=(problems, trainings_, runs))
    theirs = np.random.default_rng(3).normal(size=(problems, runs))
    random, means, count = np.random.default_rng(7), [], problems if problems > 1 else runs
    chosen = random.integers(count, size=(draws, count))
    which = random.integers(trainings_, size=(draws, trainings_))
    for units, some in zip(chosen, which, strict=True):
        parts = [ours[:, t][units] - theirs[units] if problems > 1 else (ours[:, t] - theirs)[:, units] for t in some]
        means.append(np.mean(parts))
    found = interval(
        mean_difference,
        [ours.reshape(problems, -1)],
        [np.tile(theirs, (1, trainings_))],
        draws=draws,
        seed=7,
        trainings=trainings_,
    )
    assert found == pytest.approx((ours.mean() - theirs.mean(), *np.quantile(means, [0.025, 0.975])))


def test_trainings_that_differ_widen_the_interval():
    problem = np.random.default_rng(0).normal(size=(40, 1))
    alike = np.tile(problem, (1, 4))
    apart = alike + np.array([-1.0, -0.5, 0.5, 1.0])
    one, other = (interval(mean, [scores], trainings=4) for scores in (alike, apart))
    assert other.high - other.low > 1.3 * (one.high - one.low)


def test_the_share_of_the_headroom_is_0_at_the_base_and_1_at_the_ceiling():
    base, top = np.zeros((4, 2)), np.ones((4, 2))
    assert [float(share_of_headroom([own], [base], [top])) for own in (base, top, top / 4)] == [0, 1, 0.25]
    assert np.isnan(share_of_headroom([top], [top], [base]))


def test_trees_are_fitted_where_a_budget_is_given_and_large_enough():
    heal = get_task("heal")
    budgets = [search_budget([], None), search_budget([], 40), search_budget([], 15 * 32)]
    entered = [enter(heal, opponents_of("heal"), [FITTED], [], 1, budget) for budget in budgets]
    assert [each.fitted for each in entered] == [False, False, True]
    assert "a search budget is given" in entered[0].absent[FITTED]
    assert "fitting needs 32" in entered[1].absent[FITTED]


def test_trees_are_fitted_on_as_many_instances_as_the_budget_has_for_every_plan_and_what_they_grew_is_reused(
    tmp_path, monkeypatch
):
    task, short = blobs(menu=("bypass-rank-1",)), [{"steps": 1}]
    plans = choices_of(space_of(task, short))
    design, runner = Design(task, short, 1, "heldout", 0, 1), Runner(tmp_path)
    budget = search_budget([], 32 * len(plans) + 1)
    fitted = fitted_tree(design, runner, budget, taught=False)
    assert fitted.episodes == 32 * len(plans)
    client = fitted.make(build_config(task.defaults))
    assert set(client.forests.models) == {placed.plan.name for placed in plans} - {UNIFORM.name}
    monkeypatch.setattr("esper_bench.evaluation.plan_search.grow_contender", None)
    assert fitted_tree(design, runner, budget, taught=False).content == fitted.content


@pytest.mark.parametrize("names", [None, [FITTED]])
def test_trees_are_absent_with_a_reason_where_the_plan_that_they_are_compared_with_plants_nothing(names):
    entered = enter(
        get_task("heal"), opponents_of("heal"), names, [{"blueprints": ["low-rank"]}], 1, search_budget([], 10_000)
    )
    assert not entered.fitted
    assert entered.absent[FITTED] == "it plants bypass-rank-1, which the config key blueprints does not have"


def test_heal_has_rules_references_and_an_oracle_of_the_plans_that_rules_choose_from():
    entered = enter(get_task("heal"), opponents_of("heal"), None, [], 2, search_budget([], None))
    assert [rule.name for rule in entered.rules] == [
        "uniform",
        "participation",
        "collapse",
        "sites",
        "inner-use",
        "tree",
    ]
    assert list(entered.references) == [
        "drift-taught",
        "fine-tuning",
        "fine-tuning-redrawn",
        "from-scratch",
        "closed-form",
    ]
    assert len(entered.plans) == 15
    for hosts in ("heal", "heal-images", "heal-bytes"):
        same, taught = opponents_of(hosts), opponents_of(f"{hosts}-taught")
        own = [name for name in entered.references if name != "fine-tuning-redrawn" or hosts != "heal-bytes"]
        assert (same.rules, list(same.references)) == (opponents_of("heal").rules, own)
        assert taught.names == (*same.rules, "drift", FITTED, *list(same.references)[1:], ORACLE)
        for reference in same.references.values():
            assert reference.task().name.startswith(f"{hosts}-")


def test_a_rule_that_can_plant_nothing_of_the_menu_is_absent_with_its_reason():
    entered = enter(get_task("iris"), opponents_of("iris"), None, [], 1, search_budget([], None))
    assert entered.absent["uniform"] == "it plants bypass-rank-1, which the menu of iris does not have"
    assert "there is one" in entered.absent[ORACLE]


def test_the_rules_of_trained_hosts_grow_the_instances_of_repair_with_its_full_menu():
    entered = enter(get_task("repair"), opponents_of("repair"), None, [], 1, search_budget([], None))
    assert [name for name in entered.absent if name != ORACLE] == ["uniform", "participation", "inner-use"]
    ruled = {name: each for name, each in entered.references.items() if name != "full-menu"}
    assert {name: each.controller for name, each in ruled.items()} == {
        f"{rule}-full-menu": rule for rule in ("uniform", "participation", "inner-use")
    }
    for reference in entered.references.values():
        own = enter(reference.task(), opponents_of(reference.task().name), None, [], 1, search_budget([], None))
        assert {"uniform", "participation", "inner-use"} == {rule.name for rule in own.rules}
    assert not opponents_of("repair-tables").references, "the instances of repair are others"


def test_the_budget_is_that_of_the_controller_with_the_most_episodes():
    few, many, unknown = (named("never")._replace(name=str(n), episodes=n) for n in (10, 300, None))
    assert search_budget([few, many, unknown], None)[:2] == (300, "as many as 300 had")
    assert search_budget([unknown], None).episodes == EPISODES
    assert "does not say" in search_budget([unknown], None).reason
    assert search_budget([many], 7).episodes == 7


@pytest.mark.parametrize(
    ("names", "seeds", "sentence"),
    [(["nobody"], 2, "unknown opponent 'nobody'; those of heal are uniform"), ([ORACLE], 1, "give 2 seeds or more")],
)
def test_unknown_opponents_and_an_oracle_of_one_seed_are_refused(names, seeds, sentence):
    with pytest.raises(InputError, match=sentence):
        check_opponents(names, [get_task("heal")], [opponents_of("heal")], seeds)


def test_a_budget_of_no_episode_is_refused():
    with pytest.raises(InputError, match="0 episodes; give 1 or more"):
        search_budget([], 0)


def test_several_trainings_of_one_controller_are_named_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text("[]")
    assert [each.name for each in trainings("mine=*.yaml")] == ["mine: a.yaml", "mine: b.yaml"]
    assert {each.group for each in trainings("mine=a.yaml,b.yaml")} == {"mine"}
    assert trainings("never")[0].group == ""
    for bad in ("mine=", "=a.yaml", "mine=a.yaml,a.yaml", "mine=c*.yaml"):
        with pytest.raises(InputError, match="give NAME=PATH,PATH"):
            trainings(bad)
