"""Test a policy as a controller: its memory, what it knows, and the files that it is kept in."""

import copy
import hashlib
import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from crashes import at_every_call
from esper.leyline.lifecycle.view import take
from esper.leyline.lifecycle.vocabulary import Head, Op
from esper.leyline.messages import InputError
from esper.simic.client import SimicClient
from esper.simic.ppo import PPO
from esper.simic.rewards import Delta
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import (
    FACTS,
    WEIGHTS,
    Language,
    Policy,
    load_policy,
    read_facts,
    save_policy,
)
from esper.tamiyo.policy.observation import History, observe
from esper.tolaria.engine import VectorizedEngine
from populations import MENU, Script, blobs, small_config

ENVS, STEPS = 4, 4
SOME = dict.fromkeys(Head, 0.2)


def engine_of(slots=2, menu=MENU, **top):
    config = small_config(
        {"data": {"batches_per_step": 2}, "probe": {"sensors_every": 2}}, envs=ENVS, steps=STEPS, **top
    )
    return VectorizedEngine(blobs(hidden=tuple(range(3, 3 + slots)), menu=menu), config)


class Mind(Learned):
    """Samples with some exploration in every head."""

    greedy, exploration = False, SOME

    def think(self, view):
        """Decide, and return what the policy thought."""
        self.act(view)
        return self.output


def play(engine, mind, steps=STEPS):
    """Return the thoughts of some steps of an episode, and the view and the outcomes behind them."""
    view, thoughts, outcomes = engine.reset(), [], []
    for _ in range(steps):
        thoughts.append(mind.think(view))
        view, outcome = engine.step(thoughts[-1].decision.actions)
        mind.store(outcome)
        outcomes.append(outcome)
    return thoughts, view, outcomes


@pytest.fixture(scope="module")
def trained():
    """Train a policy for a round on three slots, and return it."""
    engine = engine_of(3)
    policy = Policy.fresh(Language.of([engine.space]), 0, {"gates": {"gain_z": 0.5}})
    config = small_config().ppo
    engine.run(SimicClient(PPO(policy, config, 0), Delta(small_config().reward)))
    policy.origin = {"rounds": 1, "task": "blobs"}
    return policy


@pytest.fixture
def saved(trained, tmp_path):
    save_policy(trained, tmp_path)
    return tmp_path


def rewrite(folder, **change):
    """Change fields of the JSON of a controller, as someone who knows of the checksum."""
    facts = json.loads((folder / FACTS).read_text()) | change
    rest = {name: value for name, value in facts.items() if name != "checksum"}
    facts["checksum"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    (folder / FACTS).write_text(json.dumps(facts))


def refused(folder, *words):
    """Check that a controller is refused in one sentence that names its file and says these words."""
    with pytest.raises(InputError) as caught:
        load_policy(folder)
    sentence = str(caught.value)
    assert str(folder) in sentence
    assert "\n" not in sentence
    for word in words:
        assert word in sentence


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_a_controller_trained_on_three_slots_runs_on_any_number(trained, allowed, slots):
    engine, controller = engine_of(slots), Learned(trained)
    view = engine.reset()
    while view.step < view.steps:
        actions = controller.act(view)
        assert allowed(view.masks, actions)
        view, outcome = engine.step(actions)
        assert outcome.accepted.all()
        controller.store(outcome)


def test_a_controller_runs_on_a_part_of_the_menu_it_was_trained_on(trained):
    engine = engine_of(2, menu=("mlp-small", "bypass-linear"))
    engine.run(Learned(trained))
    assert engine.state.step == engine.config.steps


def test_a_smaller_menu_is_read_by_its_names(trained):
    view = engine_of(3, menu=("mlp-small", "bypass-linear")).reset()
    seen = observe(view, History.empty(ENVS))._replace(blueprint=np.array([[-1, 0, 1]]))
    batch = trained.batch(seen, ("mlp-small", "bypass-linear"))
    assert batch.menu.tolist() == [2, 0]
    assert batch.blueprint.tolist() == [[3, 2, 0]]


def test_a_greedy_controller_decides_as_its_mind_does(trained):
    engine = engine_of()
    view = engine.reset()
    controller, other = Learned(trained), view._replace(space=view.space._replace(seed=1))
    actions = np.stack(controller.act(view))
    np.testing.assert_array_equal(actions, np.stack(controller.output.decision.actions))
    np.testing.assert_array_equal(actions, np.stack(Learned(trained).act(other)))  # it draws nothing


def test_two_minds_that_see_the_same_decide_the_same(trained):
    first, second = (play(engine_of(), Mind(trained))[0] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.stack(one.decision.actions), np.stack(other.decision.actions))
        assert torch.equal(one.decision.log_prob, other.decision.log_prob)
        assert torch.equal(one.value, other.value)


@pytest.mark.parametrize("change", ["episode", "step", "seed"])
def test_a_draw_has_a_key_of_its_own_episode_step_and_run(trained, change):
    view = engine_of().reset()
    other = view._replace(space=view.space._replace(seed=1)) if change == "seed" else view._replace(**{change: 1})
    drawn = [np.stack(Mind(trained).think(v).decision.actions) for v in (view, other)]
    assert not np.array_equal(*drawn)


def test_what_an_environment_decides_does_not_depend_on_the_others(trained):
    view = engine_of().reset()
    two, space = slice(0, 2), view.space
    fewer = view._replace(
        space=space._replace(
            cost=space.cost[two], width=space.width[two], instance=space.instance[two], number=space.number[two]
        ),
        seeds=take(view.seeds, two),
        masks=take(view.masks, two),
        measurements=take(view.measurements, two),
        host_params=view.host_params[two],
        added_params=view.added_params[two],
    )
    all_, some = (Mind(trained).think(v) for v in (view, fewer))
    np.testing.assert_array_equal(np.stack(some.decision.actions), np.stack(all_.decision.actions)[:, :2])
    torch.testing.assert_close(some.value, all_.value[:2], rtol=0, atol=1e-6)


def test_a_mind_remembers_within_an_episode(trained):
    mind = Mind(trained)
    thoughts, _, _ = play(engine_of(), mind, 3)
    assert thoughts[0].starts.all()
    assert not thoughts[1].starts.any()
    assert mind.hidden[0].any()
    assert np.isfinite(mind.history.trend[:, :3, 0]).all()


def test_a_mind_begins_anew_with_an_episode(trained):
    engine, mind = engine_of(), Mind(trained)
    play(engine, mind)
    second, _, _ = play(engine, mind)
    fresh = Mind(trained)
    other = engine_of()
    other.reset()
    expected, _, _ = play(other, fresh)
    assert second[0].starts.all()
    for one, same in zip(second, expected, strict=True):
        assert torch.equal(one.value, same.value)
        assert torch.equal(one.decision.log_prob, same.decision.log_prob)


def test_forgetting_empties_the_memory_of_its_rows_exactly_and_of_no_other(trained):
    rows = np.array([False, True, False, True])
    forgetful, keen, fresh = (Mind(trained) for _ in range(3))
    _, view, _ = play(engine_of(), forgetful, 3)
    play(engine_of(), keen, 3)
    forgetful.reset(rows)
    after, whole, new = (mind.think(view) for mind in (forgetful, keen, fresh))
    assert after.starts.tolist() == rows.tolist()
    for part in (after.value, after.decision.log_prob, *forgetful.hidden):
        assert part.isfinite().all()
    for mine, kept, empty in (
        (after.value, whole.value, new.value),
        (after.decision.log_prob, whole.decision.log_prob, new.decision.log_prob),
        *zip(forgetful.hidden, keen.hidden, fresh.hidden, strict=True),
    ):
        assert torch.equal(mine[rows], empty[rows])
        assert torch.equal(mine[~rows], kept[~rows])
        assert not torch.equal(mine[rows], kept[rows])
    for mine, kept, empty in zip(after.observation, whole.observation, new.observation, strict=True):
        np.testing.assert_array_equal(mine[rows], empty[rows])
        np.testing.assert_array_equal(mine[~rows], kept[~rows])


def test_a_mind_that_forgot_begins_its_sequences_once(trained):
    mind, rows = Mind(trained), np.array([True, False, False, False])
    _, view, _ = play(engine_of(), mind, 2)
    mind.reset(rows)
    assert [mind.think(view).starts.tolist() for _ in range(2)] == [rows.tolist(), [False] * 4]


def test_rows_that_were_forgotten_one_after_the_other_all_begin_a_sequence(trained):
    mind = Mind(trained)
    _, view, _ = play(engine_of(), mind, 2)
    mind.reset(np.array([True, False, False, False]))
    mind.reset(np.array([False, False, True, False]))
    assert mind.think(view).starts.tolist() == [True, False, True, False]


def test_an_outcome_is_seen_at_the_next_decision(trained):
    mind = Mind(trained)
    engine = engine_of()
    view = engine.reset()
    mind.think(view)
    script = Script({(0, 0): (Op.GERMINATE, 0, 0, 0, 2, 3), (0, 1): (Op.PRUNE, 0)})  # there is nothing to prune
    view, outcome = engine.step(script.act(view))
    mind.store(outcome)
    flags = mind.think(view).observation.env_flags
    assert flags[0].tolist() == [0, 1, 0, 0, 0, 0, 1, 0]
    assert flags[1].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


def test_a_fresh_policy_is_drawn_by_its_seed_alone(trained):
    torch.manual_seed(1)
    first = Policy.fresh(trained.language, 7)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    second, other = Policy.fresh(trained.language, 7), Policy.fresh(trained.language, 8)
    assert all(torch.equal(a, b) for a, b in zip(first.network.parameters(), second.network.parameters(), strict=True))
    assert not torch.equal(first.network.op_head[0].weight, other.network.op_head[0].weight)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)


def test_a_language_of_several_tasks_has_the_blueprints_of_all():
    spaces = [engine_of(2, menu=menu).space for menu in (MENU[:2], MENU[1:])]
    assert Language.of(spaces).blueprints == MENU


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sensors": ("one",)}, ("growth sensors", "'one'", "; train a controller")),
        ({"tempos": (0, 3)}, ("tempos", "[0, 3]", "; set lifecycle.tempos")),
        ({"targets": (1.0,)}, ("targets", "[1.0]", "; set lifecycle.targets")),
    ],
)
def test_tasks_that_speak_of_other_things_do_not_fit_together(change, words):
    space = engine_of().space
    with pytest.raises(InputError) as caught:
        Language.of([space, space._replace(**change)])
    assert all(word in str(caught.value) for word in words)


def test_a_controller_plants_a_blueprint_that_it_has_not_met(trained):
    engine = engine_of(2, menu=("mlp-large",))
    policy = copy.deepcopy(trained)
    policy.network.bias_ops({Op.GERMINATE: 50.0})
    engine.step(Learned(policy).act(engine.reset()))
    assert (engine.state.seeds.blueprint >= 0).any(1).all()


def test_a_policy_is_read_back_bit_for_bit(trained, saved):
    found = load_policy(saved)
    mine, theirs = trained.network.state_dict(), found.network.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for part, same in zip(trained.normaliser, found.normaliser, strict=True):
        for one, other in zip(part, same, strict=True):
            np.testing.assert_array_equal(other, one)
    assert (found.language, found.settings, found.origin) == (trained.language, trained.settings, trained.origin)


def test_a_policy_that_was_read_back_decides_the_same(trained, saved):
    first, second = (play(engine_of(), Mind(policy))[0] for policy in (trained, load_policy(saved)))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.decision.log_prob, other.decision.log_prob)
        assert torch.equal(one.value, other.value)


def test_a_folder_holds_the_two_files_and_nothing_else(saved):
    assert sorted(path.name for path in saved.iterdir()) == [FACTS, WEIGHTS]
    assert read_facts(saved)["settings"] == {"gates": {"gain_z": 0.5}}


def test_a_policy_is_written_over_an_older_one(trained, saved):
    other = Policy.fresh(trained.language, 5)
    save_policy(other, saved)
    assert torch.equal(load_policy(saved).network.op_head[0].weight, other.network.op_head[0].weight)


def test_a_crash_between_any_two_system_calls_leaves_the_old_controller_or_the_new(trained, tmp_path, monkeypatch):
    one, other = (Policy.fresh(trained.language, seed) for seed in (5, 6))
    one.origin, other.origin = {"seed": 5}, {"seed": 6}
    folder, found = tmp_path / "controller", []

    def prepare():
        save_policy(one, folder)

    for _ in at_every_call(monkeypatch, prepare, lambda: save_policy(other, folder)):
        found.append(load_policy(folder).origin["seed"])
    assert len(found) > 10, "or this test shows nothing"
    assert found == sorted(found)
    assert set(found) == {5, 6}
    assert [path.name for path in tmp_path.iterdir()] == ["controller"]


def test_weights_and_facts_of_two_controllers_do_not_go_together(trained, saved, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    save_policy(Policy.fresh(trained.language, 5), other)
    (other / WEIGHTS).rename(saved / WEIGHTS)
    refused(saved, WEIGHTS, "sha256")


def test_a_folder_without_a_controller_is_refused(tmp_path):
    refused(tmp_path, FACTS, "No such file")


def test_a_controller_without_weights_is_refused(saved):
    (saved / WEIGHTS).unlink()
    refused(saved, WEIGHTS, "No such file or directory")


def test_truncated_weights_are_refused(saved):
    (saved / WEIGHTS).write_bytes((saved / WEIGHTS).read_bytes()[:-100])
    refused(saved, WEIGHTS, "sha256")


@pytest.mark.parametrize("at", [0, 9, -1])
def test_weights_with_a_flipped_bit_are_refused(saved, at):
    data = bytearray((saved / WEIGHTS).read_bytes())
    data[at] ^= 1
    (saved / WEIGHTS).write_bytes(bytes(data))
    refused(saved, WEIGHTS, "sha256")


@pytest.mark.parametrize("name", [WEIGHTS, FACTS])
def test_a_link_in_place_of_a_file_is_refused(saved, name):
    (saved / name).rename(saved / "elsewhere")
    (saved / name).symlink_to(saved / "elsewhere")
    refused(saved, name, "is a link, which is not followed")


@pytest.mark.parametrize("told", [False, True], ids=["as it is", "with its sha256"])
def test_a_pickle_in_place_of_weights_is_refused_and_not_run(saved, told):
    data = pickle.dumps({"weight": [0.0]})
    (saved / WEIGHTS).write_bytes(data)
    if told:
        rewrite(saved, sha256=hashlib.sha256(data).hexdigest())
    refused(saved)


def test_weights_of_another_shape_are_refused(saved):
    state = load_file(saved / WEIGHTS)
    state["op.weight"] = state["op.weight"][:, :4].contiguous()
    save_file(state, saved / WEIGHTS)
    rewrite(saved, sha256=hashlib.sha256((saved / WEIGHTS).read_bytes()).hexdigest())
    refused(saved, "op.weight")


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_another_version_is_refused(saved, version):
    rewrite(saved, version=version)
    refused(saved, FACTS, f"format {version!r}", "format 2")


@pytest.mark.parametrize("name", ["environment_features", "slot_features", "operations", "blends", "stages"])
def test_a_controller_with_other_features_is_refused_and_what_differs_is_named(saved, name):
    vocabulary = json.loads((saved / FACTS).read_text())["vocabulary"]
    gone = vocabulary[name].pop(1)
    rewrite(saved, vocabulary=vocabulary | {name: [*vocabulary[name], "novel"]})
    refused(saved, FACTS, name.replace("_", " "), gone, "novel")


def test_features_in_another_order_are_refused(saved):
    vocabulary = json.loads((saved / FACTS).read_text())["vocabulary"]
    rewrite(saved, vocabulary=vocabulary | {"stages": vocabulary["stages"][::-1]})
    refused(saved, FACTS, "stages", "order")


def test_weights_that_are_not_finite_are_refused(saved):
    weights = load_file(saved / WEIGHTS)
    weights["op_head.2.bias"][1] = torch.nan
    save_file(weights, saved / WEIGHTS)
    rewrite(saved, sha256=hashlib.sha256((saved / WEIGHTS).read_bytes()).hexdigest())
    refused(saved, "op_head.2.bias", "not finite")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"controller"', "", "{", "[" * 100_000, "\udcff"])
def test_what_is_no_json_object_is_refused(saved, text):
    (saved / FACTS).write_bytes(text.encode(errors="surrogateescape"))
    refused(saved, FACTS)


@pytest.mark.parametrize("name", ["sha256", "vocabulary", "language", "normaliser", "settings", "origin"])
def test_a_missing_field_is_named(saved, name):
    facts = json.loads((saved / FACTS).read_text())
    del facts[name]
    (saved / FACTS).write_text(json.dumps(facts))
    refused(saved, FACTS, f"lacks {name}")


@pytest.mark.parametrize("name", ["sha256", "vocabulary", "language", "normaliser", "settings", "origin"])
@pytest.mark.parametrize("value", [None, 3, [1], "text"], ids=str)
def test_a_field_of_another_kind_is_refused(saved, name, value):
    rewrite(saved, **{name: value})
    refused(saved)


@pytest.mark.parametrize("value", [3, ["WAIT", 3], [["WAIT"]], {"WAIT": 0}], ids=str)
def test_a_vocabulary_of_another_kind_is_refused(saved, value):
    vocabulary = json.loads((saved / FACTS).read_text())["vocabulary"]
    rewrite(saved, vocabulary=vocabulary | {"operations": value})
    refused(saved, FACTS, "operations")


@pytest.mark.parametrize("name", ["mean", "var", "n"])
@pytest.mark.parametrize("change", ["shorter", "text", "nan", "nested", "negative"])
def test_moments_that_do_not_fit_the_features_are_refused(saved, name, change):
    normaliser = json.loads((saved / FACTS).read_text())["normaliser"]
    values = normaliser["slot"][name]
    normaliser["slot"][name] = {
        "shorter": values[:-1],
        "text": ["text", *values[1:]],
        "nan": [float("nan"), *values[1:]],
        "nested": [values],
        "negative": [-1.0, *values[1:]],
    }[change]
    rewrite(saved, normaliser=normaliser)
    if (change, name) == ("negative", "mean"):
        assert load_policy(saved).normaliser.slot.mean[0] == -1
    else:
        refused(saved)


@pytest.mark.parametrize("change", [{"sensors": []}, {"blueprints": ["mlp-small"]}, {"tempos": [0]}], ids=str)
def test_a_language_that_the_weights_do_not_fit_is_refused(saved, change):
    language = json.loads((saved / FACTS).read_text())["language"]
    rewrite(saved, language=language | change)
    refused(saved)


def test_the_weights_of_an_input_are_compared_with_those_of_its_own_layer():
    policy = Policy.fresh(Language(("participation", "dead"), MENU, (1, 2), (0.5, 1.0)), 0)
    before = policy.input_weights()
    for part in ("environment: ", "slot: "):
        shares = [share for name, share in before.items() if name.startswith(part)]
        assert np.mean(shares) == pytest.approx(1)
        assert max(shares) < 2, "an untrained policy prefers no input"
    column = [name for name in before if name.startswith("slot: ")].index("slot: gain")
    with torch.no_grad():
        policy.network.encoder[0].weight[:, column] *= 10
    after = policy.input_weights()
    assert max(after, key=after.get) == "slot: gain"
    assert all(after[name] == before[name] for name in before if name.startswith("environment: "))
