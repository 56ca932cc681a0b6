"""Test trainings of two rounds: what they write, what they read, how they end, and what they refuse."""

import hashlib
import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import esper
from esper.leyline.config.tree import build_config
from esper.leyline.data.keys import Purpose, scalar
from esper.leyline.data.task import Split
from esper.leyline.messages import InputError, LearningError
from esper.leyline.progress import Progress
from esper.nissa.events import decode
from esper.nissa.rows import (
    KINDS,
    AnomalyRow,
    CheckpointRow,
    DecisionRow,
    EnvironmentRow,
    EpisodeRow,
    EvaluationRow,
    GradientsRow,
    LifecycleRow,
    PlayedRow,
    RollbackRow,
    RoundRow,
    RunRow,
    SizeRow,
    StepRow,
    WideningRow,
)
from esper.runs.configuration import PRESETS, TRAINING, training_configs
from esper.runs.folder.interrupt import Interrupt
from esper.runs.folder.resume import Opening, cohort_configs
from esper.runs.train import Trainer, cohorts_of, sample_instances, settings_of_policy, train
from esper.simic.rewards import get_reward
from esper.tamiyo.catalog import find_controller, get_controller
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import FACTS, WEIGHTS, Language, Policy, load_policy
from esper.tasks.catalog import get_task
from populations import blobs

SHORT = {
    "envs": 8,
    "steps": 6,
    "data": {"batch_size": 12, "batches_per_step": 2},
    "reward": {"group_size": 4},
    "ppo": {"rounds": 2, "imitation_rounds": 1, "update_epochs": 2, "validate_envs": 4, "validate_every": 1},
}
TIMES = ("env_steps_per_second", "controller_share", "seconds")
"""Figures that a clock has a part in."""


class Watching(Progress):
    """Keeps the figures, and calls something after every round."""

    def __init__(self, then=lambda number: None):
        self.figures, self.notes, self.then = {}, [], then

    def round(self, number, rounds, figures):
        self.figures[number] = dict(figures)
        self.then(number)

    def note(self, text):
        self.notes.append(text)


def configs(tasks, *layers):
    names = [task.name for task in tasks]
    return [
        build_config(task.defaults, TRAINING, SHORT, *layers, {"task": task.name, "tasks": names, "controller": "ppo"})
        for task in tasks
    ]


def run(tasks, folder=None, watch=None, *layers):
    return train(tasks, configs(tasks, *layers), folder, watch)


def rows(folder):
    return [decode(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def without_times(figures):
    return {name: value for name, value in figures.items() if name not in TIMES}


def strict(path):
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def digest(folder):
    return hashlib.sha256((folder / "controller" / WEIGHTS).read_bytes()).hexdigest()


def weights_equal(one, other):
    a, b = (load_file(folder / "controller" / WEIGHTS) for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def pair():
    """Return two tasks, of three slots and of two."""
    tasks = [get_task("digits-narrow"), get_task("iris")]
    assert [len(task.largest().slots) for task in tasks] == [3, 2]
    return tasks


@pytest.fixture(scope="module")
def trained(pair, tmp_path_factory):
    """Train on both; returns the folder, the summary and what was told of it."""
    folder, watch = tmp_path_factory.mktemp("train") / "run", Watching()
    return folder, run(pair, folder, watch), watch


@pytest.fixture(scope="module")
def again(pair, tmp_path_factory):
    """Train in the same way once more."""
    folder, watch = tmp_path_factory.mktemp("again") / "run", Watching()
    return folder, run(pair, folder, watch), watch


def test_a_training_leaves_config_environment_events_controller_and_summary(trained):
    folder, _, _ = trained
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert [name for name in found if not name.startswith("checkpoints/")] == [
        "config.yaml",
        f"controller/{FACTS}",
        f"controller/{WEIGHTS}",
        "environment.json",
        "events.jsonl",
        "summary.json",
    ]


def test_the_events_have_no_gap_and_a_row_for_every_round(trained):
    found = rows(trained[0])
    assert [row.seq for row in found] == list(range(len(found)))
    rounds = [row for row in found if isinstance(row, RoundRow)]
    assert [row.round for row in rounds] == [-1, 0, 1]
    assert {"return", "explained_variance", "entropy", "kept", "validation_objective"} <= set(rounds[-1].figures)


def test_every_network_of_a_training_has_a_row_in_its_round(trained):
    found = [row for row in rows(trained[0]) if isinstance(row, EpisodeRow)]
    expected = [
        (cohort, task, number, env)
        for number in (-1, 0, 1)
        for cohort, envs in (("training", SHORT["envs"]), ("validation", SHORT["ppo"]["validate_envs"]))
        for task in ("digits-narrow", "iris")
        for env in range(envs)
    ]
    assert [(row.cohort, row.task, row.round, row.env) for row in found] == expected


def test_the_rows_of_a_training_tell_how_many_seeds_it_planted_and_kept(trained):
    folder, _, watch = trained
    for number, figures in watch.figures.items():
        mine = [row for row in rows(folder) if isinstance(row, PlayedRow) and row.round == number]
        changes = [row for row in mine if isinstance(row, LifecycleRow) and row.cohort == "training"]
        planted = sum(row.to_stage == "GERMINATED" for row in changes)
        ended = [row for row in mine if isinstance(row, EpisodeRow) and row.cohort == "training"]
        kept = sum(row.fossilized for row in ended)
        assert figures["kept"] == kept / len(ended)
        assert figures["kept_share"] == (kept / planted if planted else pytest.approx(np.nan, nan_ok=True))
        assert planted > 0 or number < 0  # the heuristic, which leads at first, plants nothing in so few steps
        assert all(row.why for row in changes if row.to_stage == "GERMINATED")


@pytest.mark.parametrize(
    ("level", "kinds"),
    [
        (
            "run",
            {RunRow, EnvironmentRow, RoundRow, DecisionRow, LifecycleRow, EpisodeRow, EvaluationRow, CheckpointRow},
        ),
        ("step", {*KINDS.values()} - {RollbackRow, AnomalyRow, GradientsRow, WideningRow, SizeRow}),
    ],
)
def test_a_training_writes_the_rows_that_the_config_asks_for(tmp_path, level, kinds):
    run([get_task("iris")], tmp_path / "run", None, {"telemetry": {"level": level}, "ppo": {"rounds": 1}})
    found = rows(tmp_path / "run")
    assert {type(row) for row in found} == kinds
    steps = [row for row in found if isinstance(row, StepRow)]
    assert {row.cohort for row in steps} == ({"training", "validation"} if steps else set())
    assert len(steps) in (0, 2 * 2 * SHORT["steps"])


def test_the_events_begin_and_end_with_the_run(trained):
    found = rows(trained[0])
    assert isinstance(found[0], RunRow)
    assert isinstance(found[-1], RunRow)
    assert (found[0].status, found[-1].status) == ("running", "finished")


def test_the_rows_hold_the_figures_that_were_told(trained):
    folder, _, watch = trained
    for row in rows(folder):
        if isinstance(row, RoundRow):
            told = {name: value if np.isfinite(value) else None for name, value in watch.figures[row.round].items()}
            assert row.figures == told


def test_the_page_on_training_lists_every_figure_of_a_round(trained):
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    table = page.split("## The figures of a round")[1].split("## ")[0]
    listed = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert sorted(listed) == sorted({name for figures in trained[2].figures.values() for name in figures})


def test_the_summary_is_strict_json_and_what_is_returned(trained):
    folder, summary, _ = trained
    assert strict(folder / "summary.json") == summary
    assert (summary["status"], summary["tasks"], summary["rounds_done"]) == ("finished", ["digits-narrow", "iris"], 2)


def test_the_config_reads_back_and_the_environment_has_that_of_every_cohort(pair, trained):
    folder, asked = trained[0], configs(pair)
    assert cohort_configs(build_config(yaml.safe_load((folder / "config.yaml").read_text()))) == asked
    cohorts = strict(folder / "environment.json")["cohorts"]
    assert {name: build_config(config) for name, config in cohorts.items()} == dict(
        zip(("digits-narrow", "iris"), asked, strict=True)
    )


def test_the_controller_is_that_of_the_best_round(trained):
    folder, summary, watch = trained
    scores = {number: figures["validation_objective"] for number, figures in watch.figures.items()}
    best = max(scores, key=lambda number: (scores[number], -number))
    assert (summary["best_round"], summary["best_validation_objective"]) == (best, scores[best])
    origin = load_policy(folder / "controller").origin
    assert (origin["round"], origin["validation_objective"]) == (best, scores[best])
    assert origin["tasks"] == ["digits-narrow", "iris"]


def test_the_score_of_the_best_controller_is_what_it_grows_on_the_validation_instances(pair, trained):
    folder, summary, _ = trained
    scores = []
    for task, config in zip(pair, configs(pair), strict=True):
        grown = esper.grow(
            task,
            {
                **SHORT,
                "envs": config.ppo.validate_envs,
                "seed": scalar(config.seed, Purpose.VALIDATION),
                "instances": "validation",
                "baselines": [],
                "models": "none",
            },
            controller=str(folder),
        )
        scores.append(np.mean(grown["validation_objective"]["grown"]))
    assert summary["best_validation_objective"] == pytest.approx(np.mean(scores), abs=1e-12)


def test_two_trainings_of_one_seed_have_bitwise_equal_controllers(trained, again):
    assert weights_equal(trained[0], again[0])
    assert (trained[0] / "controller" / FACTS).read_bytes() == (again[0] / "controller" / FACTS).read_bytes()


def test_two_trainings_of_one_seed_have_equal_figures_but_for_times(trained, again):
    for number, figures in trained[2].figures.items():
        np.testing.assert_equal(without_times(figures), without_times(again[2].figures[number]))
    (one, last), (other, also) = ((without_times(s), s["last_rounds"]) for s in (trained[1], again[1]))
    assert without_times(last) == without_times(also)
    assert one | {"last_rounds": None} == other | {"last_rounds": None}


def test_another_seed_makes_another_controller(tmp_path):
    for seed in range(2):
        run([blobs()], tmp_path / str(seed), None, {"seed": seed, "ppo": {"rounds": 1, "imitation_rounds": 0}})
    assert not weights_equal(tmp_path / "0", tmp_path / "1")


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = run([blobs()], None, None, {"ppo": {"rounds": 1, "imitation_rounds": 0}})
    assert summary["status"] == "finished"
    assert list(tmp_path.iterdir()) == []


def test_a_training_never_reads_a_test_split():
    def unread(key: int) -> Split:
        raise AssertionError(f"the test split of instance {key} was read")

    mixture = replace(get_task("repair"), test=unread)
    assert run([mixture, blobs().sealed()], None, None, {"ppo": {"rounds": 1}})["status"] == "finished"


def test_the_validation_split_picks_the_controller_and_trains_nothing(tmp_path):
    task = blobs()
    other = replace(task, validation=Split(task.validation.x, (task.validation.y + 1) % 3))
    found = [
        run([each], tmp_path / name, None, {"ppo": {"validate_every": 2, "imitation_rounds": 0}})
        for name, each in (("one", task), ("other", other))
    ]
    assert weights_equal(tmp_path / "one", tmp_path / "other")
    assert found[0]["best_validation_objective"] != found[1]["best_validation_objective"]


@pytest.fixture(scope="module")
def mixture():
    """Return a cohort of `repair`."""
    task = get_task("repair")
    return cohorts_of(task.sealed(), *configs([task]))[0]


def a_trainer(*cohorts):
    config = cohorts[0].config
    policy = Policy.fresh(
        Language.of([cohort.engine.space for cohort in cohorts]), config.seed, settings_of_policy(config)
    )
    return Trainer(cohorts, policy, config)


def test_a_group_shares_an_instance_and_the_instances_of_a_round_are_training_instances(mixture):
    trainer = a_trainer(mixture)
    trainer.learn(0, Interrupt())
    grown = mixture.engine.space.instance
    assert grown.tolist() == sample_instances(mixture, 0, 4).tolist()
    assert len(set(grown[:4].tolist())) == len(set(grown[4:].tolist())) == 1
    assert grown[0] != grown[4]
    assert set(grown.tolist()) <= set(mixture.task.keys("training"))


def test_every_round_draws_other_training_instances(mixture):
    drawn = np.stack([sample_instances(mixture, number, 4)[::4] for number in range(-20, 500)])
    assert np.isin(drawn, np.array(mixture.task.keys("training"))).all()
    assert len(np.unique(drawn)) > 0.9 * drawn.size


def test_a_validation_grows_validation_instances(mixture):
    instances = mixture.validation.space.instance
    assert instances.tolist() == list(mixture.task.keys("validation")[: len(instances)])


def test_what_is_validated_does_not_depend_on_how_often_it_was(mixture):
    trainer = a_trainer(mixture)
    found = [{}, {}]
    assert [trainer.validate(number, figures) for number, figures in enumerate(found)] == [True, False]
    assert found[0] == found[1]
    assert trainer.best == (found[0]["validation_objective"], 0)


@pytest.mark.parametrize(("bar", "better"), [(-np.inf, True), (np.inf, False)])
def test_only_a_better_controller_is_the_best(mixture, bar, better):
    trainer, figures = a_trainer(mixture), {}
    trainer.best = bar, 3
    assert trainer.validate(7, figures) is better
    assert trainer.best == ((figures["validation_objective"], 7) if better else (bar, 3))


def test_a_validation_that_is_not_finite_is_never_the_best(mixture):
    watched = mixture.watched.model_copy(update={"reward": mixture.watched.reward.model_copy(update={"rent": np.nan})})
    trainer = a_trainer(replace(mixture, watched=watched))
    assert not trainer.validate(0, {})
    assert trainer.best is None


def test_a_worse_controller_does_not_replace_the_best(tmp_path):
    kept = []
    watch = Watching(lambda number: kept.append(digest(tmp_path / "run")))
    run([blobs()], tmp_path / "run", watch, {"ppo": {"rounds": 5}})
    scores = [figures["validation_objective"] for figures in watch.figures.values()]
    bests = [scores.index(max(scores[: last + 1])) for last in range(len(scores))]
    assert kept == [kept[best] for best in bests]
    assert bests != list(range(len(scores)))


def test_sigint_ends_the_training_with_the_best_controller_so_far(tmp_path):
    folder = tmp_path / "run"
    watch = Watching(lambda number: signal.raise_signal(signal.SIGINT) if number == 0 else None)
    summary = run([blobs()], folder, watch, {"ppo": {"rounds": 5}})
    assert (summary["status"], summary["rounds_done"]) == ("interrupted", 1)
    assert strict(folder / "summary.json") == summary
    assert rows(folder)[-1].status == "interrupted"
    assert load_policy(folder / "controller").origin["round"] == summary["best_round"]
    assert any("interrupted" in note for note in watch.notes)


def test_a_training_that_is_interrupted_before_it_learns_anything_has_a_summary_all_the_same(tmp_path):
    watch = Watching(lambda number: signal.raise_signal(signal.SIGINT))
    summary = run([blobs()], tmp_path / "run", watch, {"ppo": {"imitation_rounds": 3, "rounds": 3}})
    assert (summary["status"], summary["rounds_done"], summary["best_round"]) == ("interrupted", 0, None)
    assert not (tmp_path / "run" / "controller").exists()


def test_an_update_that_cannot_be_trusted_names_its_cause_and_leaves_the_best_controller(tmp_path):
    kept = []

    def look(number: int) -> None:
        if number == 0:
            kept.append(digest(tmp_path / "run"))

    def broken(config):
        whole = get_reward(config)
        infinite = 1e300  # in the float32 of a rollout
        return lambda outcome: {name: value + infinite * bool(kept) for name, value in whole(outcome).items()}

    with pytest.raises(LearningError, match="advantage of environment"), np.errstate(all="ignore"):
        train([blobs()], configs([blobs()]), tmp_path / "run", Watching(look), reward=broken)
    assert kept == [digest(tmp_path / "run")]
    assert all(torch.isfinite(w).all() for w in load_policy(tmp_path / "run" / "controller").network.parameters())


def test_a_trained_controller_brings_the_settings_that_it_was_trained_under(trained):
    settings = find_controller(str(trained[0])).settings
    assert settings == find_controller(str(trained[0] / "controller")).settings
    assert settings["gates"]["permissive"] is True
    assert settings["probe"]["sensors_every"] == TRAINING["probe"]["sensors_every"]
    assert isinstance(get_controller(str(trained[0]), build_config()), Learned)
    assert find_controller("heuristic").settings == {}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_config(name):
    assert build_config(TRAINING, PRESETS[name]).ppo.imitation_rounds > 0


def without_slots():
    """Make a task whose host is one segment."""

    def host():
        return esper.SegmentedHost([nn.Linear(6, 3)], [])

    return replace(blobs(), host=host)


BAD = {
    "a group that does not divide the environments": (blobs, {"envs": 6}, "reward.group_size is 4.*divisor"),
    "a group without its baseline": (
        blobs,
        {"envs": 6, "reward": {"relative_to": "none"}},
        "reward.group_size is 4.*divisor",
    ),
    "a twin baseline without twins": (blobs, {"reward": {"relative_to": "twin"}}, "--twin"),
    "a validation that does not fit": (
        blobs,
        {"ppo": {"validate_envs": 10**7}},
        "takes ppo.validate_envs as envs.*lower",
    ),
    "nothing that may be planted": (blobs, {"lifecycle": {"max_seeds": 0}}, "max_seeds"),
    "a host without slots": (without_slots, {}, "slot"),
    "a slot that there is not": (blobs, {"slots": ["nowhere"]}, "'nowhere'"),
    "a blueprint that there is not": (blobs, {"blueprints": ["nothing"]}, "'nothing'"),
}


@pytest.mark.parametrize(("make", "over", "sentence"), BAD.values(), ids=BAD)
def test_what_nothing_can_be_learnt_from_is_refused_before_anything_is_written(tmp_path, make, over, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        run([make()], tmp_path / "run", None, over)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_tasks_of_other_choices_do_not_share_a_controller(tmp_path):
    tasks = [blobs(), replace(blobs(), name="others", defaults={"lifecycle": {"tempos": [0, 3]}})]
    with pytest.raises(InputError, match="tempos"):
        run(tasks, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_replaced_only_when_asked(tmp_path):
    task, quick = [blobs()], {"ppo": {"rounds": 1, "imitation_rounds": 0}}
    run(task, tmp_path / "run", None, quick)
    before = digest(tmp_path / "run")
    with pytest.raises(InputError, match="--overwrite"):
        run(task, tmp_path / "run", None, quick, {"seed": 1})
    assert digest(tmp_path / "run") == before
    train(task, configs(task, quick, {"seed": 1}), tmp_path / "run", opening=Opening(overwrite=True))
    assert digest(tmp_path / "run") != before


def test_an_untrained_policy_keeps_at_least_one_seed_an_episode_at_the_defaults():
    (config,) = training_configs([get_task("repair")], "quick", {"envs": 16, "ppo": {"update_epochs": 1}})
    cohorts = cohorts_of(get_task("repair").sealed(), config)
    language, asked = Language.of([cohorts[0].engine.space]), config.ppo
    policy = Policy.fresh(language, config.seed, settings_of_policy(config), asked.decisions_per_step, asked.undo_bias)
    # The episodes of a round come before its update, so those of the first one are of the untrained policy.
    assert Trainer(cohorts, policy, config).learn(0, Interrupt())["kept"] >= 1
