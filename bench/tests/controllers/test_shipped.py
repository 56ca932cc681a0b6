"""Test the shipped controller: its files, its versions, what it decides on hosts of any kind, and where it is the default."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import esper
from esper.cli import main
from esper.leyline.config.tree import build_config
from esper.leyline.messages import InputError
from esper.runs.evaluation.contenders import named
from esper.runs.folder.resume import read_config
from esper.tolaria.engine import VectorizedEngine
from esper_bench.controllers import shipped as module
from esper_bench.controllers.handover import HANDED
from esper_bench.controllers.plans import BYPASS, HERE, HIDDEN, LINEAR, NONE, PLACED, RANKS, SEVERAL, SKIP, UNIFORM
from esper_bench.controllers.shipped import (
    FOLDER,
    LARGE,
    SMALL,
    Option,
    Shipped,
    card_of,
    choose,
    facts_of,
    options,
    versions,
)
from esper_bench.healing.bridged import BridgedMLP

LATEST = versions()[-1]
SHORT: Mapping[str, Any] = {
    "envs": 2,
    "steps": 3,
    "baselines": [],
    "models": "none",
    "data": {"batch_size": 16, "batches_per_step": 1},
}
VECTORS = {"blueprints": [*RANKS, "low-rank"], "lifecycle": {"max_seeds": 8, "max_training_seeds": 8}}


def frozen(width: int = 12, blocks: int = 3) -> esper.Task:
    host = BridgedMLP(4, width, (width,) * blocks, 2, (False,) * blocks, frozen=True, entry=True)
    return _task(host, torch.randn(96, 4, generator=torch.Generator().manual_seed(0)))


def _task(host: Any, x: torch.Tensor) -> esper.Task:
    task = esper.task("mine", x, torch.arange(len(x)) % 2, host=host)
    assert isinstance(task, esper.Task)
    return task


@pytest.mark.parametrize("version", versions())
def test_the_arrays_are_small_numbers_and_those_that_the_facts_name(version: str) -> None:
    path = FOLDER / f"{version}.safetensors"
    assert path.stat().st_size < 400_000
    assert hashlib.sha256(path.read_bytes()).hexdigest() == facts_of(version)["digest"]
    assert {array.dtype.kind for array in load_file(path).values()} <= set("iuf")


def test_the_page_of_the_documentation_is_the_card_of_the_latest_version() -> None:
    page = (Path(__file__).parents[2] / "docs" / "shipped.md").read_text(encoding="utf-8")
    linked = r"\]\([^)]*\)"  # links of the card are those of a page of its own
    assert re.sub(linked, "]", page) == re.sub(linked, "]", card_of(LATEST))


def test_it_is_the_default_where_it_gains_with_families_left_out_and_such_hosts_can_be_recognised() -> None:
    facts = facts_of(LATEST)
    for kind in facts["kinds"]:
        over = kind["rivals"][kind["rule"]]
        assert kind["wins"] == all(over[axis]["low"] > 0 for axis in ("data", "damage"))
        assert f"{100 * over['damage']['gain']:+.1f} [" in card_of(LATEST)


def test_the_searches_of_opponents_have_as_many_networks_as_the_choice_of_the_version() -> None:
    assert named("shipped-1").episodes == 480 * 15 + 480 * 9
    assert named("shipped").episodes == 480 * 15 + 480 * 3  # three waits before the skip


def test_what_confirms_a_version_was_grown_for_no_version_before_and_is_no_training_key() -> None:
    used: list[tuple[int, int]] = []
    for version in versions():
        facts = facts_of(version)
        used += [(a, b) for kind in facts["kinds"] for a, b, _ in kind["training"].values()]
        for first, last, _ in (each["keys"] for each in facts["confirmed"]):
            assert all(last < a or b < first for a, b in used)
        for first, last, _ in (each["keys"] for each in facts.get("full_menu", [])):
            assert all(last < a or b < first for a, b in used)
        used += [tuple(each["keys"][:2]) for each in (*facts["confirmed"], *facts.get("full_menu", []))]


@pytest.mark.parametrize(("width", "blocks"), [(5, 1), (12, 3), (30, 7)])
def test_it_decides_on_frozen_hosts_of_any_width_and_depth(width: int, blocks: int) -> None:
    summary = esper.grow(frozen(width, blocks), {**SHORT, **VECTORS}, controller="shipped")
    assert (summary["controller"], summary["controller_digest"]) == (LATEST, facts_of(LATEST)["digest"])
    assert summary["status"] == "finished"


@pytest.mark.parametrize("menu", [["bypass-linear", "bypass-mlp", "skip-mlp"], ["bypass-linear", "bypass-mlp"]])
@pytest.mark.parametrize("version", versions())
def test_every_version_grows_hosts_that_train(version: str, menu: list[str]) -> None:
    host = esper.mlp(inputs=4, width=8, classes=2)
    task = _task(host, torch.randn(96, 4, generator=torch.Generator().manual_seed(0)))
    summary = esper.grow(task, {**SHORT, "blueprints": menu}, controller=version)
    assert (summary["status"], summary["controller"]) == ("finished", version)
    if "skip-mlp" in menu and version == "shipped-1":
        assert summary["seeds"]["germinated"] == 2


def test_on_frozen_hosts_with_one_damaged_block_or_none_all_versions_plant_the_same() -> None:
    view = VectorizedEngine(
        frozen(), build_config(frozen().defaults, SHORT, VECTORS, {"probe": {"sensors_every": 1}})
    ).reset()
    picks = [Shipped(version).pick(view) for version in versions()]
    assert len({(tuple(each.plans), tuple(each.slot.ravel()), tuple(each.reasons)) for each in picks}) == 1


def picked(version: str, task: esper.Task, menu: list[str], **probe: Any) -> tuple[list[Any], ...]:
    ours = {**VECTORS, "blueprints": menu, "probe": {"sensors_every": 1, **probe}}
    picks = Shipped(version).pick(VectorizedEngine(task, build_config(task.defaults, SHORT, ours)).reset())
    return list(picks.plans), picks.slot.tolist(), list(picks.reasons)


def test_larger_seeds_in_the_menu_change_nothing_on_a_frozen_host_from_version_2_on() -> None:
    small, large = VECTORS["blueprints"], ["bypass-linear", "bypass-mlp", "skip-mlp"]
    plans, *_ = picked("shipped-2", frozen(), small)
    assert set(plans) <= {UNIFORM, *PLACED, SEVERAL}
    assert picked("shipped-2", frozen(), [*large, *small]) == picked("shipped-2", frozen(), small)
    assert picked("shipped-1", frozen(), [*small, *large])[0] == [SKIP, SKIP]
    without_dead = picked("shipped-2", frozen(), [*small, *large], sensors=["participation"])
    assert without_dead[0] == [HANDED, HANDED], "the rule reads the shares of dead units"


def test_on_a_host_that_trains_larger_seeds_in_the_menu_lead_to_the_rule() -> None:
    host = BridgedMLP(4, 12, (12,) * 3, 2, (False,) * 3, entry=True)
    task = _task(host, torch.randn(96, 4, generator=torch.Generator().manual_seed(0)))
    assert picked("shipped-2", task, [*VECTORS["blueprints"], "bypass-linear"])[0] == [HANDED, HANDED]
    assert picked("shipped-2", task, VECTORS["blueprints"]) == picked("shipped-2", frozen(), VECTORS["blueprints"])


@pytest.mark.parametrize("kind", ["map", "sequence"])
def test_on_maps_and_sequences_it_decides_and_says_what_it_did_not_plant(kind: str) -> None:
    if kind == "map":
        task = _task(esper.cnn(inputs=(1, 8, 8), width=4, classes=2), torch.randn(96, 1, 8, 8))
    else:
        tokens = torch.randint(0, 8, (96, 6), generator=torch.Generator().manual_seed(0))
        host = esper.transformer(8, 8, 1, heads=2, length=6)
        task = esper.task("mine", tokens, tokens, host=host, kind="classification")
    summary = esper.grow(task, SHORT, controller="shipped")
    assert summary["status"] == "finished"
    assert summary["seeds"]["germinated"] > 0 or summary["explanations"]


def test_without_a_config_the_name_is_enough() -> None:
    client = esper.get_controller("shipped")
    assert isinstance(client, Shipped)
    assert client.version == LATEST


def test_the_trees_replace_the_rule_by_a_margin_alone_and_never_by_bypasses_everywhere() -> None:
    found = options(SMALL, 2)
    uniform, at_0, at_1 = (found.index(option) for option in (Option(UNIFORM), Option(BYPASS, 0), Option(BYPASS, 1)))
    gains = np.full((3, len(found)), -1.0)
    gains[:, at_0] = 0.1
    gains[0, at_1], gains[1, at_1], gains[2, uniform] = 0.11, 0.13, 0.5
    assert choose(found, gains, [Option(BYPASS, 0)] * 3)[1].tolist() == [at_0, at_1, at_0]


@pytest.mark.parametrize("fact", module.CASES)
def test_stored_results_of_a_version_that_decides_otherwise_are_not_reused(
    fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, facts = named("shipped").content, dict(facts_of(versions()[-1]))
    assert before != named("shipped-1").content
    del facts[fact]
    monkeypatch.setattr(module, "facts_of", lambda version: facts)
    assert named("shipped").content != before


def test_the_options_of_a_host_name_slots_that_it_has() -> None:
    assert options(SMALL, 1)[:2] == [Option(UNIFORM), Option(NONE)]
    assert options(SMALL, 1)[-1] == Option(HERE, 0)
    assert [option.slot for option in options(LARGE, 3) if option.plan in (LINEAR, HIDDEN)] == [0, 1, 2] * 2


def test_a_version_that_is_not_there_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["grow", "iris", "--controller", "shipped-99"])
    err = capsys.readouterr().err
    assert leaving.value.code == 2
    assert err.count("\n") == 1
    assert "unknown controller 'shipped-99'" in err
    assert all(version in err for version in versions())


def test_a_resumed_run_keeps_its_version_and_refuses_other_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    config = {**SHORT, **VECTORS, "checkpoint": {"every_steps": 1}}
    esper.grow(frozen(), config, controller="shipped", run=folder)
    assert read_config(folder).controller == LATEST
    summary = esper.resume(folder, task=frozen(), settings=["steps=4"])
    assert (summary["controller"], summary["steps_done"]) == (LATEST, 4)
    monkeypatch.setattr(Shipped, "state", lambda self: {"digest": "0"})
    with pytest.raises(InputError, match="decided by other arrays"):
        Shipped(LATEST).load_state({"digest": "0"})


def test_a_run_of_hosts_that_train_is_resumed_with_what_the_rule_remembers(tmp_path: Path) -> None:
    config = {**SHORT, "steps": 10, "blueprints": ["bypass-linear", "skip-mlp"], "checkpoint": {"every_steps": 1}}
    host = esper.mlp(inputs=4, width=8, classes=2)
    task = _task(host, torch.randn(96, 4, generator=torch.Generator().manual_seed(0)))
    summary = esper.grow(task, config, controller="shipped", run=tmp_path / "run")
    resumed = esper.resume(tmp_path / "run", task=task, settings=["steps=12"])
    assert resumed["steps_done"] == 12
    assert resumed["seeds"]["germinated"] >= summary["seeds"]["germinated"] > 0


def test_an_evaluation_names_the_version_and_tells_its_arrays_apart() -> None:
    assert named("shipped").name == LATEST
    assert named("shipped").content == named(LATEST).content != named("heuristic").content


def test_the_command_prints_the_card_and_lists_the_controllers(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, line in ((["controller", "shipped"], "# The shipped controller"), (["controller"], "heuristic ")):
        with pytest.raises(SystemExit) as leaving:
            main(arguments)
        assert leaving.value.code == 0
        assert line in capsys.readouterr().out
