"""Check that a run says why it planted nothing, which planned operations it left out, and why each seed was removed."""

import json

import pytest
import torch
from torch import nn

import esper
from esper.leyline.lifecycle.vocabulary import Op
from esper.nissa.events import read_events
from esper.nissa.rows import LifecycleRow
from esper.runs.grow import grow
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.rules.schedule import Schedule, ScheduleEntry
from populations import GROW, Script, blobs, small_config


def grown(controller, *layers, task=None, folder=None, **top):
    config = small_config({"models": "none"}, *layers, top)
    client = get_controller(controller, config) if isinstance(controller, str) else controller
    return grow(task or blobs(examples=400), config, client, folder)


def explained(*arguments, **options):
    return grown(*arguments, **options)["explanations"]


class Last(nn.Module):
    """Returns the last state of a GRU over a sequence (B, T, 2) -> (B, 4)."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 4, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0][:, -1]


def sequences(menu):
    x, y = torch.randn(240, 3, 2, generator=torch.Generator().manual_seed(1)), torch.arange(240) % 2

    def host():
        return esper.SegmentedHost([Last(), nn.Linear(4, 2)], [esper.SlotSpec("state", 0, 4)])

    return esper.task("sequences", x, y, host=host, menu=menu)


@pytest.mark.parametrize("controller", ["heuristic", "random-valid"])
def test_that_nothing_of_the_menu_fits_is_said_with_the_keys_that_change_it(controller):
    (sentence,) = explained(controller, task=sequences(["bypass-mlp"]))
    assert "nothing was planted in 3 of 3 environments" in sentence
    assert "no blueprint of the menu (bypass-mlp) fits" in sentence
    assert "state" in sentence
    assert "`menu`" in sentence
    assert "`blueprints`" in sentence


def test_that_no_seed_is_allowed_is_said_with_its_key():
    (sentence,) = explained("random-valid", lifecycle={"max_seeds": 0})
    assert "lifecycle.max_seeds is 0" in sentence


def test_that_what_was_tried_was_refused_is_said_with_the_key():
    plants = Script({(step, env): (Op.GERMINATE, 0, 1, 0, 2, 3) for step in range(8) for env in range(3)})
    (sentence,) = explained(plants, governor={"param_limit": 0.0})
    assert "3 of 3" in sentence
    assert "governor.param_limit" in sentence


@pytest.mark.parametrize("controller", ["never", Script({})])
def test_of_a_controller_that_waits_it_is_said_that_it_might_have_planted(controller):
    (sentence,) = explained(controller)
    assert "3 of 3" in sentence
    assert "at every decision at which GERMINATE was allowed" in sentence


def test_environments_in_which_something_was_planted_need_no_explanation():
    (sentence,) = explained(Script(GROW))  # GROW plants in environments 1 and 2, and leaves nothing unfinished
    assert "1 of 3" in sentence


def test_the_heuristic_says_which_of_its_conditions_stood_against_planting():
    (sentence,) = explained("heuristic", heuristic={"plant_below": -9.0, "weak_below": -9.0})
    assert "heuristic.plant_below" in sentence
    (sentence,) = explained("heuristic", steps=2)
    assert "raise steps" in sentence


def plan(*entries):
    return Schedule([ScheduleEntry(**entry) for entry in entries], "plan")


def planting(slot, at=0, **more):
    return {"at": at, "op": "germinate", "slot": slot, "blueprint": "bypass-mlp", **more}


@pytest.mark.parametrize(
    ("entries", "settings", "said"),
    [
        ([planting("block0"), planting("block1")], {"lifecycle": {"max_seeds": 1}}, "lifecycle.max_seeds"),
        ([planting("block0"), planting("block1", 99)], {"steps": 4}, "`at` is 99, and the last decision of 4 steps is 3"),
        ([planting("block0"), planting("block0", 1)], {}, "slot block0 held a seed"),
        (
            [planting("block0"), planting("block1")],
            {"lifecycle": {"max_training_seeds": 1}, "steps": 4},
            "lifecycle.max_training_seeds",
        ),
        ([planting("block0"), {"at": 1, "op": "fossilize", "slot": "block1"}], {}, "slot block1 held no seed"),
        (
            [planting("block0", keep=True)],
            {"gates": {"permissive": False, "gain_z": 99.0}},
            "gates.gain_z",
        ),
        ([planting("block0"), planting("block1", 3)], {"steps": 4, "governor": {"param_limit": 0.0}}, "engine refused"),
    ],
)  # fmt: skip
def test_of_an_entry_of_a_schedule_that_never_ran_the_cause_and_the_key_are_said(entries, settings, said):
    sentences = explained(plan(*entries), settings)
    assert any(said in sentence for sentence in sentences), sentences
    assert any("entry" in sentence and "3 of 3 environments" in sentence for sentence in sentences)


def test_a_schedule_that_was_carried_out_needs_no_explanation():
    assert explained(plan(planting("block0", keep=True)), steps=10) == []


def test_a_gate_that_opens_behind_the_last_decision_is_explained_alike_by_the_schedule_and_the_run():
    gates = {"gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1}}
    lengths = range(4, 10)
    told = {steps: explained(plan(planting("block0", keep=True)), gates, steps=steps) for steps in lengths}
    late = [sentences for sentences in told.values() if any("after the last decision" in each for each in sentences)]
    assert late, told
    for entry, seeds in late:
        assert "FOSSILIZE of entry 1 of plan was not carried out in 3 of 3 environments: the gate of the seed" in entry
        assert "refused it until the last decision" in entry
        assert seeds == (
            "3 seeds were not kept at the end: they passed the gate to FOSSILIZE in the last step, after the last decision; "
            "raise steps"
        )
    assert not any("which the controller did not choose" in each for sentences in told.values() for each in sentences)


class Keeping(Script):
    """Plants at the first slot, advances as soon as it may, and never prunes."""

    def __init__(self, *ops):
        super().__init__({})
        self.ops = ops

    def act(self, view):
        actions = esper.Actions.wait(len(view.host_params))
        for op in (Op.GERMINATE, *self.ops):
            able = view.masks.op[:, op]
            actions.op[able], actions.slot[able] = op, view.masks.slot[able, op].argmax(1)
        actions.tempo[:] = view.space.tempos.index(2)
        return actions


@pytest.mark.parametrize(
    ("ops", "settings", "said"),
    [
        (
            (Op.ADVANCE, Op.FOSSILIZE),
            {"gates": {"permissive": False, "contribution_z": 99.0}},
            "failed the gate to FOSSILIZE (contribution in",
        ),
        ((Op.ADVANCE,), {"gates": {"min_holding_steps": 0}}, "could FOSSILIZE, which the controller did not choose"),
        (
            (Op.ADVANCE,),
            {"gates": {"permissive": False, "gain_z": 99.0}},
            "failed the gate to ADVANCE (incubation gain in",
        ),
        ((Op.ADVANCE,), {"steps": 3}, "had not been blended in; raise steps"),
    ],
)
def test_why_seeds_were_not_kept_at_the_end_is_said(ops, settings, said):
    sentences = explained(Keeping(*ops), settings, lifecycle={"max_seeds": 1})
    assert any(said in sentence for sentence in sentences), sentences


def rows_of(folder):
    return [row for row in read_events(folder / "events.jsonl") if isinstance(row, LifecycleRow)]


def test_every_removal_is_listed_with_its_reason_and_stands_in_the_events(tmp_path):
    summary = grown("random-valid", envs=6, steps=16, folder=tmp_path / "run")
    prunes = summary["prunes"]
    assert len(prunes) == summary["seeds"]["pruned"] > 0
    rows = rows_of(tmp_path / "run")
    removed = [row for row in rows if row.to_stage == "PRUNED"]
    assert [(row.env, row.slot, row.blueprint, row.step, row.why) for row in removed] == [
        (prune["env"], prune["slot"], prune["blueprint"], prune["step"], prune["reason"]) for prune in prunes
    ]
    held = [row for row in removed if "HOLDING" in row.why]
    assert held
    for row in held:
        assert f"{row.contribution_mean:+.4f} ± {row.contribution_se:.4f}" in row.why
        assert row.gate_checks in row.why
    assert {row.why for row in rows if row.to_stage not in ("GERMINATED", "PRUNED", "FOSSILIZED")} == {None}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["prunes"] == prunes


def test_a_slow_removal_is_listed_once_and_a_seed_that_is_kept_has_a_reason_too(tmp_path):
    summary = grown(Script(GROW), folder=tmp_path / "run")
    (prune,) = [prune for prune in summary["prunes"] if prune["env"] == 2]
    assert (prune["slot"], prune["blueprint"]) == ("block1", "mlp-small")
    assert "the controller chose PRUNE" in prune["reason"]
    rows = rows_of(tmp_path / "run")
    (kept,) = [row for row in rows if row.to_stage == "FOSSILIZED"]
    assert "the controller chose FOSSILIZE" in kept.why
    assert kept.contribution_mean is not None


def test_every_seed_that_was_planted_or_kept_is_listed_with_its_reason(tmp_path):
    summary = grown(plan(planting("block0", keep=True), planting("block1", 2)), steps=12, folder=tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    for name, stage in (("plantings", "GERMINATED"), ("keeps", "FOSSILIZED")):
        changes = [(row.env, row.slot, row.blueprint, row.step) for row in rows if row.to_stage == stage]
        assert [tuple(entry[key] for key in ("env", "slot", "blueprint", "step")) for entry in summary[name]] == changes
        assert [row.why for row in rows if row.to_stage == stage] == [entry["reason"] for entry in summary[name]]
        assert len(changes) >= 3
    assert {entry["reason"] for entry in summary["plantings"]} == {"entry 1 of plan", "entry 2 of plan"}
    assert all(entry["reason"].startswith("entry 1 of plan; after ") for entry in summary["keeps"])
    assert len(summary["keeps"]) == summary["seeds"]["fossilized"]
    assert len(summary["plantings"]) == summary["seeds"]["germinated"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["keeps"] == summary["keeps"]


def test_a_controller_that_says_nothing_has_planted_by_its_choice():
    plantings = grown(Script(GROW))["plantings"]
    assert {entry["reason"] for entry in plantings} == {"the controller chose GERMINATE"}


def test_the_heuristic_gives_its_own_reason():
    reasons = [prune["reason"] for prune in grown("heuristic", heuristic={"keep_above": 99.0}, steps=16)["prunes"]]
    assert reasons
    assert all("heuristic.keep_above" in reason for reason in reasons)


def test_the_reason_of_every_seed_that_the_heuristic_plants_stands_in_the_events(tmp_path):
    summary = grown("heuristic", heuristic={"plant_below": 1.1, "weak_below": 1.1}, folder=tmp_path / "run")
    planted = [row for row in rows_of(tmp_path / "run") if row.to_stage == "GERMINATED"]
    assert len(planted) == summary["seeds"]["germinated"] > 0
    for row in planted:
        assert f"{row.blueprint} is the first of heuristic." in row.why
        assert row.slot in row.why
        assert row.contribution_mean is None


def test_a_seed_that_a_rollback_takes_is_listed_with_that_reason():
    plants = Script({(step, env): (Op.GERMINATE, 0, 1, 0, 2, 3) for step in range(4) for env in range(3)})
    summary = grown(plants, optimizer={"lr": 1e9}, lifecycle={"embargo": 0}, steps=4)
    assert summary["prunes"]
    assert len(summary["prunes"]) == summary["seeds"]["pruned"]
    assert all("rolled back by the governor" in prune["reason"] for prune in summary["prunes"])


def test_telemetry_does_not_change_what_is_listed():
    on, off = (grown("random-valid", steps=12, telemetry={"level": level}) for level in ("step", "off"))
    for name in ("plantings", "keeps", "prunes"):
        assert on[name] == off[name]
    assert on["prunes"] != []


def test_figures_that_rest_on_few_examples_or_on_one_class_are_a_sentence_each():
    x, y = blobs(examples=400).train
    many = {
        name: (x[part], y[part]) for name, part in zip(("train", "validation"), torch.arange(240).chunk(2), strict=True)
    }
    few = {"probe": (-x[:40], y[:40]), "test": (-x[40:160][y[40:160] == 1][:20], torch.ones(20, dtype=torch.int64))}
    task = esper.task("few", splits=many | few, host=blobs().host, classes=3)
    assert explained("never", task=task, steps=1)[-2:] == [
        "the test split has 20 examples, so a single example moves figures by up to 5%; bring 30 or more",
        "every label of the test split is 1: its figures say nothing about other classes",
    ]
