"""Test networks that are compiled and grow: how often they are compiled, and that they compute what they do without."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import config as dynamo
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, planted_at
from esper.kasmina.graft.planted import Bank
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import GrowthWarning, InputError
from esper.runs.live.growth import Growth
from esper.tolaria.stacked.compiling import graphs
from loops import LIFE as KEPT_AND_REMOVED
from loops import repeatable
from populations import Script

WIDTH, EVERY, DECISIONS = 6, 2, 24
PATHS = {"stem": ("0", "0"), "one": ("2", "0"), "two": ("5", "5")}
LIFE = (
    KEPT_AND_REMOVED
    | {  # every blueprint and blend; one is removed at once, one is kept at a site that is free again
        (13, 0): (Op.GERMINATE, 2, 0, 2, 2, 1),
        (15, 0): (Op.ADVANCE, 2),
        (16, 0): (Op.GERMINATE, 1, 0, 0, 1, 3),
        (18, 0): (Op.ADVANCE, 1),
        (20, 0): (Op.FOSSILIZE, 1),
    }
)
SETTINGS = {
    "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 1},
    "lifecycle": {"embargo": 2, "max_training_seeds": 2},
}


@pytest.fixture(autouse=True)
def no_graphs_of_before():
    torch.compiler.reset()


def host():
    with drawn_with(0):
        return nn.Sequential(
            nn.Linear(4, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2),
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3),
        ).double()  # fmt: skip


def data(key):
    with drawn_with(key):
        x = torch.randn(12, 4).double()
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


class Run:
    """Grows a network by a script, and notes what was measured and how often it was compiled."""

    def __init__(
        self, mode, backend=None, *, script=None, shadow=False, averaged=False, every=EVERY, before=False, **lifecycle
    ):
        self.model = graft(host(), {name: Site(name, *paths, Vector(WIDTH)) for name, paths in PATHS.items()})
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if averaged else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1)
        self.shadow, self.losses, self.graphs, self.doses = shadow, [], [], []
        self.call = torch.compile(self.model, backend=backend, fullgraph=True) if backend else self.model
        if before:  # there is a graph before there is an object that grows it
            with drawn_with(0):
                self.call(data(0)[0])
        settings = SETTINGS | {"lifecycle": SETTINGS["lifecycle"] | lifecycle}
        self.growth = Growth(
            self.model, self.optimizer, None, self.ema, probe=[data(1), data(2)], loss=F.cross_entropy, every=every,
            controller=Script(LIFE if script is None else script), budget=20.0, budget_passes=None, mode=mode,
            settings=settings,
        )  # fmt: skip

    def train(self, first, last):
        for step in range(first, last):
            self.model.train()
            x, y = data(100 + step)
            with drawn_with(1000 + step):
                F.cross_entropy(self.call(x), y).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.ema is not None:
                self.ema.update_parameters(self.model)
            if self.growth.step(*((x, y) if self.shadow else ())):
                self.losses.append(float(self.growth.engine.state.scores.loss[0]))
            self.graphs.append(graphs())
        return self

    def whole(self):
        return self.train(0, EVERY * DECISIONS)


def assert_same(one, other, *, exact=False):
    tolerance = 0.0 if exact else 1e-11
    mine, theirs = one.growth.summary(), other.growth.summary()
    for name in ("plantings", "keeps", "prunes"):
        places = [[(e["site"], e["blueprint"], e["decision"]) for e in each[name]] for each in (mine, theirs)]
        assert places[0] == places[1]
    assert mine["added_params"] == theirs["added_params"]
    assert mine["trained_params"] == theirs["trained_params"]
    assert one.losses == pytest.approx(other.losses, rel=tolerance, abs=tolerance)
    stages = [each.growth.engine.state.seeds.stage.tolist() for each in (one, other)]
    assert stages[0] == stages[1]


@pytest.mark.parametrize("shadow", [False, True], ids=["straight-through", "shadow"])
def test_seats_that_are_there_from_the_start_decide_and_learn_as_seeds_that_are_added(shadow):
    live, reserve = (Run(mode, shadow=shadow, averaged=True).whole() for mode in ("live", "reserve"))
    assert_same(live, reserve)
    summary = reserve.growth.summary()
    assert [len(summary[name]) for name in ("plantings", "keeps", "prunes")] == [4, 2, 1]
    groups = [
        [(group.get("esper"), len(group["params"])) for group in each.optimizer.param_groups]
        for each in (live, reserve)
    ]
    assert groups[0] == groups[1]
    assert len(live.optimizer.state) == len(reserve.optimizer.state), "an idle seat is not moved, nor decayed"
    x, _ = data(7)
    acting = reserve.model.eval()(x)
    for each in (live, reserve):
        each.growth.finish()
        assert not any(isinstance(part, Bank) for part in each.model.modules())
    for one, other in ((live.model, reserve.model), (live.ema.module, reserve.ema.module)):
        assert one.state_dict().keys() == other.state_dict().keys()
        for name, value in one.state_dict().items():
            assert torch.allclose(value, other.state_dict()[name], rtol=1e-9, atol=1e-11), name
        assert [type(part).__name__ for part in one] == [type(part).__name__ for part in other]
    assert acting.shape == reserve.model(x).shape
    again = copy.deepcopy(reserve.model)
    assert torch.equal(again(x), reserve.model(x))


def test_idle_seats_leave_host_and_optimizer_bit_for_bit_as_they_are():
    plain, seats = (Run(mode, script={}) for mode in ("live", "reserve"))
    for each in (plain, seats):
        each.train(0, 8)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, seats.model.state_dict()[name])
    idle = {name: value for name, value in seats.model.state_dict().items() if ".esper." in name}
    before = {name: value for name, value in Run("reserve", script={}).model.state_dict().items() if name in idle}
    assert idle
    assert all(torch.equal(value, before[name]) for name, value in idle.items())
    assert len(seats.optimizer.param_groups) == 1


@pytest.mark.campaign
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_reserve_is_compiled_once_however_it_grows(backend):
    eager, compiled = Run("reserve").whole(), Run("reserve", backend).whole()
    assert len(set(compiled.graphs)) == 1
    assert compiled.growth.compilations == {"graphs": 1, "changes": 0, "emptied": 0}
    assert_same(eager, compiled)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("backend", "before"), [("eager", True), pytest.param("aot_eager", False, marks=pytest.mark.slow)]
)
def test_a_live_network_is_compiled_anew_when_its_seeds_change_and_computes_what_it_does_without(backend, before):
    eager, compiled = Run("live", before=before).whole(), Run("live", backend, before=before).whole()
    assert_same(eager, compiled, exact=True)
    found = compiled.growth.compilations
    assert found["graphs"] == compiled.graphs[-1] - compiled.graphs[0] + 1
    assert 10 < found["graphs"] <= found["changes"] + 2 + 3 * found["emptied"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_reserve_is_compiled_once_by_inductor():
    with drawn_with(0):
        model = graft(
            nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)), {"a": Site("a", "0", "0", Vector(WIDTH))}
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    script = {(0, 0): (Op.GERMINATE, 0, 0, 1, 1, 3), (2, 0): (Op.ADVANCE, 0), (4, 0): (Op.PRUNE, 0)}
    x, y = data(3)
    x = x.float()
    growth = Growth(
        model, optimizer, probe=[(x, y)], loss=F.cross_entropy, every=1, controller=Script(script), budget=20.0,
        mode="reserve", settings=SETTINGS | {"blueprints": ["low-rank"]},
    )  # fmt: skip
    call, seen = torch.compile(model, fullgraph=True), []
    for _ in range(7):
        output = call(x)
        assert torch.allclose(output, model(x), rtol=1e-5, atol=1e-6)
        F.cross_entropy(output, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
        seen.append(graphs())
    assert len(set(seen)) == 1
    assert [len(growth.summary()[name]) for name in ("plantings", "prunes")] == [1, 1]


def test_a_dose_that_grows_compiles_nothing():
    script = {(0, 0): (Op.GERMINATE, 0, 1, 0, 2, 3), (2, 0): (Op.ADVANCE, 0)}
    run = Run("live", "eager", script=script, every=1, tempos=[0, 1, 6]).train(0, 3)
    doses = []
    for step in range(3, 8):
        run.train(step, step + 1)
        doses.append(float(planted_at(run.model, "stem").alpha))
    assert len(set(doses)) >= 4
    assert len(set(run.graphs[3:])) == 1


@pytest.mark.slow
def test_every_one_of_many_growths_is_compiled_and_never_given_up():
    script = {}
    for life in range(6):
        script |= {
            (4 * life, 0): (Op.GERMINATE, 0, life % 3, life % 3, 1, 3),
            (4 * life + 2, 0): (Op.ADVANCE, 0),
            (4 * life + 3, 0): (Op.PRUNE, 0),
        }
    run = Run("live", "eager", script=script, every=1, embargo=0)
    for step in range(24):
        run.train(step, step + 1)
        run.call.eval()
        before = graphs()
        with torch.no_grad():
            assert torch.equal(run.call(data(step)[0]), run.model(data(step)[0]))
        assert before <= graphs() <= before + 1
    assert len(run.growth.summary()["prunes"]) == 6
    assert run.growth.compilations["emptied"] > 1


@pytest.mark.campaign
def test_networks_of_other_classes_do_not_share_the_limit_of_graphs():
    first = graphs()
    for number in range(10):
        made = type(f"Body{number}", (nn.Sequential,), {})(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2))
        graft(made, {"a": Site("a", "0", "0", Vector(WIDTH))})
        torch.compile(made, backend="eager", fullgraph=True)(torch.zeros(2, 4))
    assert graphs() - first == 10


@pytest.mark.campaign
def test_a_network_that_is_compiled_too_often_between_two_growths_is_named():
    run = Run("live", "eager", script={(1, 0): (Op.GERMINATE, 0, 1, 0, 1, 3)}, every=10)
    modes = [(training, grad) for training in (True, False) for grad in (True, False)]
    run.call = torch.compile(run.model, backend="eager")
    with dynamo.patch(recompile_limit=3):
        for training, grad in modes[:3]:
            run.model.train(training)
            with torch.set_grad_enabled(grad):
                run.call(data(1)[0])
        with pytest.warns(
            GrowthWarning, match="reached its limit of 3 graphs for the forward pass of the GrownSequential"
        ):
            run.train(0, 21)


@pytest.mark.campaign
def test_a_resumed_reserve_is_the_one_that_was_never_stopped():
    for stop in (3, 29):
        straight, resumed = Run("reserve", averaged=True).train(0, stop), Run("reserve", averaged=True)
        resumed.growth.load_state_dict(copy.deepcopy(straight.growth.state_dict()))
        for each in (straight, resumed):
            each.train(stop, EVERY * DECISIONS)
        for network in ("model", "ema"):
            mine, theirs = getattr(straight, network).state_dict(), getattr(resumed, network).state_dict()
            taken = [name for name in mine if torch.equal(mine[name], theirs[name])]
            idle = [name for name in mine if name not in taken]
            assert all(".seats." in name for name in idle), (
                "a seat that is free may hold the weights of a seed that is gone"
            )
        assert repeatable(straight.growth) == repeatable(resumed.growth)
        for one, other in zip(
            straight.growth.finish().state_dict().values(), resumed.growth.finish().state_dict().values(), strict=True
        ):
            assert torch.equal(one, other)


def test_an_adapter_of_a_reserve_is_that_of_a_live_network(tmp_path):
    from esper.kasmina.network.saving import attach

    x, _ = data(7)
    found = []
    for mode in ("live", "reserve"):
        run = Run(mode).whole()
        run.growth.save_adapter(tmp_path / mode)
        found.append(attach(host(), tmp_path / mode, other_host=True).eval()(x))
    assert torch.allclose(*found, rtol=1e-9, atol=1e-11)


def test_what_a_reserve_cannot_do_is_refused(tmp_path):
    model = graft(host(), {"stem": Site("stem", "0", "0", Vector(WIDTH))})
    usual = {"probe": [data(1)], "loss": F.cross_entropy, "budget": 20.0}
    with pytest.raises(InputError, match="mode is 'arena'; give 'live' or 'reserve'"):
        Growth(model, torch.optim.SGD(model.parameters()), mode="arena", **usual)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(InputError, match="give Growth the module itself, and wrap"):
            Growth(wrapped, torch.optim.SGD(model.parameters()), mode="reserve", **usual)
    finally:
        torch.distributed.destroy_process_group()
    state = Run("live", script={}).growth.state_dict()
    with pytest.raises(InputError, match="saved state has mode 'live', where this one has 'reserve'"):
        Run("reserve", script={}).growth.load_state_dict(state)
