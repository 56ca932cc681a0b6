"""Check that the state of a growth goes on in one that is made alike, and that every other is refused before anything changes."""

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft
from esper.leyline.lifecycle.slots import Sequence, Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import InputError
from esper.runs.live.growth import Growth
from esper.runs.live.growth_state import describe
from loops import equal, repeatable, stages
from populations import Script

WIDTH, EVERY = 4, 2
LIFE = {  # one seed is kept, one blends and one incubates
    (0, 0): (Op.GERMINATE, 0, 1, 0, 1, 3),
    (2, 0): (Op.ADVANCE, 0),
    (4, 0): (Op.FOSSILIZE, 0),
    (5, 0): (Op.GERMINATE, 1, 2, 1, 2, 3),
    (7, 0): (Op.ADVANCE, 1),
    (8, 0): (Op.GERMINATE, 2, 0, 1, 2, 3),
}
SETTINGS = {
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "lifecycle": {"max_training_seeds": 2},
}


def data(key, examples=8):
    with drawn_with(key):
        x = torch.randn(examples, 3)
        return x, (x.sum(1) > 0).long()


def growth(width=WIDTH, groups=1, optimizer=torch.optim.AdamW, averaged=True, settings=None, **options):
    """Make a growth, its network with three sites, and the rest of its loop."""
    with drawn_with(0):
        model = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, width))
    graft(model, {name: Site(name, name, name, Vector(width)) for name in ("0", "2", "3")})
    ema = AveragedModel(model) if averaged else None
    parts = [model.parameters()] if groups == 1 else [{"params": part.parameters()} for part in (model[0], model[2:])]
    stepped = optimizer(itertools.chain(*parts) if groups == 1 else parts, lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepped, 0.99)
    usual = {"probe": [data(1), data(2)], "loss": F.cross_entropy, "every": EVERY, "budget": 9.0, "budget_passes": None}
    usual |= {"controller": Script(LIFE), "settings": {**SETTINGS, **(settings or {})}, **options}
    return Growth(model, stepped, scheduler, ema, **usual), ema


def train(grown, steps):
    growing, ema = grown
    for step in range(steps):
        x, y = data(100 + growing.calls + step)
        F.cross_entropy(growing.model(x), y).backward()
        growing.population.groups.optimizer.step()
        growing.population.groups.optimizer.zero_grad()
        growing.population.groups.schedulers[0].step()
        ema.update_parameters(growing.model)
        growing.step()


@pytest.fixture(scope="module")
def saved():
    """Return the state of a growth with a seed in each stage."""
    grown = growth()
    train(grown, EVERY * 10)
    assert stages(grown[0]) == ["FOSSILIZED", "HOLDING", "TRAINING"]
    return grown[0].state_dict()


def scaled(factor):
    return lambda output, target: factor * F.cross_entropy(output, target)


class Patient(Script):
    """Plays a script as a controller with a setting and a memory."""

    def __init__(self, patience=3):
        super().__init__(LIFE)
        self.patience = patience

    def state(self):
        return {"seen": len(self.views)}

    def load_state(self, state):
        self.seen = state["seen"]


CHANGES = {
    "budget": ({"budget": 2.0}, "9.0, where this one has 2.0"),
    "budget_passes": ({"budget_passes": 0.5}, "None, where this one has 0.5"),
    "freeze": ({"freeze": ["0"]}, r"'none', where this one has \['0'\]"),
    "every": ({"every": 5}, "2, where this one has 5"),
    "steps": ({"steps": 400}, "None, where this one has 400"),
    "seed": ({"seed": 7}, "0, where this one has 7"),
    "probe": ({"probe": [data(1), data(3)]}, "'[0-9a-f]{16}', where this one has '[0-9a-f]{16}'"),
    "loss": ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "'cross_entropy', where .*label_smoothing=0.1.*"),
    "controller": ({"controller": "heuristic"}, "'Script.*', where this one has 'heuristic'"),
    "reward.rent": ({"settings": {"reward": {"rent": 0.5}}}, "[0-9.]+, where this one has 0.5"),
    "gates.gain_z": ({"settings": {"gates": {**SETTINGS["gates"], "gain_z": 3.0}}}, "[0-9.]+, where this one has 3.0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_is_refused_where_an_argument_differs_unless_that_is_named(saved, name):
    options, said = CHANGES[name]
    grown, _ = growth(**options)
    before = grown.state_dict()
    with pytest.raises(InputError, match=f"the saved state has {name} {said}; make Growth as .*changed="):
        grown.load_state_dict(saved)
    with pytest.raises(InputError, match=f"the saved state has {name}"):
        grown.load_state_dict(saved, changed=["lifecycle.embargo"])
    assert equal(grown.state_dict(), before)
    grown.load_state_dict(saved, changed=[name])
    assert equal(grown.state_dict()["tensors"], saved["tensors"])
    grown.step()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "reserve"}, "has mode 'live', where this one has 'reserve'"),
        ({"settings": {"blueprints": ["bypass-mlp"]}}, r"has menu \['vector bypass-linear', .*\['vector bypass-mlp'\]"),
        ({"optimizer": torch.optim.SGD}, "has optimizer 'AdamW', where this one has 'SGD'"),
        ({"averaged": False}, "the saved state has ema 'given', where this one has None; make Growth as it was then"),
        ({"settings": {"governor": {"loss_window": 3}}}, "has governor.loss_window [0-9]+, where this one has 3"),
        ({"width": 5}, "has sites .*width=4.*, where this one has .*width=5"),
        ({"groups": 2}, "has no group of 2 parameters that begins with '0.bias'; make the optimizer with the same"),
    ],
)
def test_what_the_state_consists_of_cannot_change(saved, options, said):
    grown, _ = growth(**options)
    before = grown.state_dict()
    with pytest.raises(InputError, match=said):
        grown.load_state_dict(saved)
    assert equal(grown.state_dict(), before)


def test_a_state_from_before_the_heuristic_read_what_is_missing_names_the_setting_with_which_it_goes_on():
    blind = {"controller": "heuristic", "settings": {**SETTINGS, "probe": {"sensors_every": 0}}}
    older, _ = growth(**blind)
    older.step()
    state = older.state_dict()
    grown, _ = growth(controller="heuristic")
    with pytest.raises(
        InputError, match=r"every 0, where .* 4; .*, with settings=\{'probe': \{'sensors_every': 0\}\}$"
    ):
        grown.load_state_dict(state)
    again, _ = growth(**blind)
    again.load_state_dict(state)
    assert equal(again.state_dict(), state)


def test_a_stream_in_the_usual_order_is_saved_as_before_streams_had_an_order(saved):
    assert "stream=Vector(width=4)," in saved["made_with"]["sites"]["0"]
    assert repr(Sequence(8, "BCL")) == "Sequence(width=8, order='BCL')"


def test_names_of_changes_that_cannot_be_are_refused(saved):
    grown, _ = growth()
    with pytest.raises(
        InputError, match="changed names 'rent', which is no argument or setting; give any of budget, bud"
    ):
        grown.load_state_dict(saved, changed=["rent"])
    with pytest.raises(InputError, match="changed names 'menu', which decides what the state consists of"):
        grown.load_state_dict(saved, changed=["menu"])
    with pytest.raises(InputError, match=r"changed is 'budget'; give a list of names, as changed=\['budget'\]"):
        grown.load_state_dict(saved, changed="budget")


def test_a_loss_is_compared_by_its_name_and_what_it_was_made_with():
    same = [
        (F.mse_loss, F.mse_loss),
        (scaled(2.0), scaled(2.0)),
        (nn.CrossEntropyLoss(torch.ones(4)), nn.CrossEntropyLoss(torch.ones(4))),
        (
            functools.partial(F.cross_entropy, label_smoothing=0.1),
            functools.partial(F.cross_entropy, label_smoothing=0.1),
        ),
    ]
    others = [
        (F.mse_loss, F.l1_loss),
        (scaled(2.0), scaled(3.0)),
        (lambda output, target: F.cross_entropy(output, target), lambda output, target: F.nll_loss(output, target)),
        (nn.CrossEntropyLoss(torch.ones(4)), nn.CrossEntropyLoss(2 * torch.ones(4))),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), F.cross_entropy),
    ]
    assert all(describe(one) == describe(other) for one, other in same)
    assert all(describe(one) != describe(other) for one, other in others)


def test_a_controller_goes_on_with_its_memory_and_one_with_other_settings_is_refused():
    grown, _ = growth(controller=Patient())
    state = grown.state_dict()
    with pytest.raises(
        InputError, match=r"controller 'Patient\(patience=3\).*, where this one has 'Patient\(patience=9"
    ):
        growth(controller=Patient(9))[0].load_state_dict(state)
    again, other = Patient(), Script(LIFE)
    growth(controller=again)[0].load_state_dict(state)
    assert again.seen == 1
    growth(controller=other)[0].load_state_dict(state, changed=["controller"])


def test_a_controller_that_cannot_load_its_memory_leaves_the_growth_as_it_was():
    class Picky(Patient):
        def load_state(self, state):
            self.seen = state["seen"]
            if state["seen"] > 1:
                raise KeyError("seen")

    grown = growth(controller=Picky())
    train(grown, EVERY)
    state, fresh = grown[0].state_dict(), growth(controller=Picky())[0]
    before = fresh.state_dict()
    with pytest.raises(
        InputError, match=r"the controller cannot load the saved state: KeyError.*; give the controller that"
    ):
        fresh.load_state_dict(state)
    assert equal(fresh.state_dict(), before)


def test_a_state_stays_as_large_as_it_is_however_many_seeds_come_and_go(monkeypatch):
    monkeypatch.setattr("esper.runs.live.growth.LISTED", 4)
    script = {(step, 0): (Op.GERMINATE, 0, 0, 0, 1, 3) for step in range(0, 60, 4)}
    script |= {(step + 1, 0): (Op.PRUNE, 0, 0, 0, 0, 0) for step, _ in script}
    settings = {"lifecycle": {"embargo": 1}}
    grown = growth(controller=Script(script), settings=settings)
    sizes = []
    for _ in range(2):
        train(grown, EVERY * 24)
        sizes.append(sum(1 for _ in entries(grown[0].state_dict())))
    summary = repeatable(grown[0])
    assert sizes[0] == sizes[1]
    assert (len(summary["plantings"]), len(summary["prunes"]), len(summary["keeps"])) == (4, 4, 0)
    again, _ = growth(controller=Script(script), settings=settings)
    again.load_state_dict(grown[0].state_dict())
    assert repeatable(again) == summary
    assert summary["unlisted"] == {"plantings": 8, "keeps": 0, "prunes": 8}


# Damage.


def entries(tree):
    """Iterate over every place of a tree: the container, and the key of an entry."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from entries(tree[key])


def unlike(value, turn):
    """Return another value than a state holds there: a tensor cut short, or something of another type."""
    if isinstance(value, torch.Tensor) and value.dim() and len(value) and turn % 2:
        return value[1:]
    return next(each for each in ([], {}, "x", -1.5, None)[turn % 5 :] + ([],) if type(each) is not type(value))


def test_a_state_without_an_entry_or_with_another_one_is_refused_and_the_growth_stays_as_it_was(saved):
    state, (grown, _) = copy.deepcopy(saved), growth()
    before, places = grown.state_dict(), list(entries(state))
    assert len(places) > 300
    for turn, (container, key) in enumerate(places):
        held = container[key]
        damages = [unlike(held, turn)] + ([] if isinstance(container, list) else [KeyError])
        for damage in damages:
            if damage is KeyError:
                del container[key]
            else:
                container[key] = damage
            with pytest.raises(InputError, match=r"the saved state|the model has"):
                grown.load_state_dict(state)
            container[key] = held
    assert equal(grown.state_dict(), before)
    grown.load_state_dict(state)
    assert equal(grown.state_dict(), saved)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda state: [], "the saved state is a list; give the state as growth.state_dict"),
        (lambda state: {}, "the saved state is empty"),
        (lambda state: {**state, "format": 2}, "has format 2, where esper.Growth of this Esper reads format 8"),
        (
            lambda state: {"format": 13, "settings": {}, "progress": {}},
            "the saved state is that of esper.AnytimeGrowth, which esper.Growth cannot read; give it to esper.AnytimeGrowth",
        ),
        (lambda state: {**state, "calls": 3}, "the saved state is damaged: .* by its checksum; give the state as"),
        (lambda state: {**state, "engine": None}, "the saved state is damaged"),
        (
            lambda state: {**state, "tensors": state["tensors"] | {"0.weight": torch.zeros(4, 3).double()}},
            "has '0.weight' as torch.float64, where the model has torch.float32; build the same model",
        ),
    ],
)
def test_a_damaged_state_is_refused_in_a_sentence(saved, damage, said):
    with pytest.raises(InputError, match=said):
        growth()[0].load_state_dict(damage(saved))


def test_a_finished_growth_takes_no_state(saved):
    grown, _ = growth()
    grown.finish()
    with pytest.raises(InputError, match=r"the network is finished; make another esper\.Growth to load"):
        grown.load_state_dict(saved)
