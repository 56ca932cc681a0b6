"""Test a grown network in a folder, and in a fresh copy of the model that it grew from."""

import json
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import esper
from esper.kasmina.blueprints import drawn_with
from esper.kasmina.graft.grafted import graft, is_grafted
from esper.kasmina.network.saving import NETWORK, NETWORK_WEIGHTS
from esper.leyline.lifecycle.slots import Site, Vector
from esper.leyline.lifecycle.vocabulary import Op
from esper.leyline.messages import GrowthWarning, InputError
from esper.runs.live.growth import Growth
from esper.store.disk import SUMS
from loops import equal, stages
from populations import Script

WIDTH, EVERY = 6, 2
LIFE = {  # at 'wide' a seed that folds, at 'inner' one that does not, at 'last' one that is still on trial
    (0, 0): (Op.GERMINATE, 0, 0, 0, 1, 3),
    (1, 0): (Op.GERMINATE, 1, 1, 1, 1, 2),
    (2, 0): (Op.ADVANCE, 0),
    (3, 0): (Op.ADVANCE, 1),
    (4, 0): (Op.FOSSILIZE, 0),
    (5, 0): (Op.FOSSILIZE, 1),
    (6, 0): (Op.GERMINATE, 2, 1, 2, 2, 1),
    (8, 0): (Op.ADVANCE, 2),
}


class Host(nn.Module):
    """Holds running statistics, a tied weight and a layer that is used under two names."""

    def __init__(self, width=WIDTH, dtype=torch.float32):
        super().__init__()
        with drawn_with(0):
            self.wide, self.norm = nn.Linear(4, width, dtype=dtype), nn.BatchNorm1d(width, dtype=dtype)
            self.inner, self.last = nn.Linear(width, width, dtype=dtype), nn.Linear(width, width, dtype=dtype)
            self.head, self.tied = nn.Linear(width, 3, dtype=dtype), nn.Linear(width, 3, dtype=dtype)
        self.tied.weight, self.again = self.head.weight, self.inner

    def forward(self, x):
        h = torch.relu(self.norm(self.wide(x)))
        h = self.last(torch.relu(self.again(h)))
        return self.head(h) + self.tied(h)


SITES = {
    "wide": Site("wide", "wide", "wide", Vector(WIDTH)),
    "inner": Site("inner", "inner", "norm", Vector(WIDTH)),
    "last": Site("last", "last", "last", Vector(WIDTH)),
}


def data(key, examples=12):
    with drawn_with(key):
        x = torch.randn(examples, 4)
        return x, (x.sum(1) > 0).long()


def grown(mode="live", script=LIFE, model=None, decisions=10, **options):
    """Return a growth that has taken its decisions; the loop goes on from there."""
    model = graft(Host(), SITES) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    settings = {
        "gates": {"permissive": True, "min_training_steps": 1, "min_holding_steps": 0},
        "lifecycle": {"max_training_seeds": 3},
        "blueprints": ["bypass-linear", "bypass-mlp"],
    }
    usual = {"probe": [data(1), data(2)], "loss": F.cross_entropy, "every": EVERY, "budget": 9.0, "settings": settings}
    growth = Growth(model, optimizer, controller=Script(script), mode=mode, **(usual | options))
    for step in range(EVERY * decisions):
        x, y = data(100 + step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step()
    return growth


def outputs(model, training=False):
    return model.train(training)(data(7)[0])


@pytest.mark.parametrize("mode", ["live", "reserve"])
def test_a_saved_network_computes_the_same_bits_in_a_fresh_copy_before_and_after_the_end(mode, tmp_path):
    growth = grown(mode)
    assert stages(growth)[:2] == ["FOSSILIZED", "FOSSILIZED"]
    assert stages(growth)[2] in ("BLENDING", "HOLDING")
    growth.save(tmp_path / "before")
    loaded = esper.load_grown(tmp_path / "before", Host())
    assert torch.equal(outputs(loaded), outputs(growth.model))
    network = growth.finish()
    growth.save(tmp_path / "after")
    again = esper.load_grown(tmp_path / "after", Host())
    assert torch.equal(outputs(again), outputs(network))
    assert growth.folded == ["wide"]
    assert type(again.wide) is nn.Linear
    assert not torch.equal(outputs(again), outputs(loaded))  # the seed on trial is gone
    assert equal(again.state_dict(), network.state_dict())
    assert again.tied.weight is again.head.weight
    assert {path.name for path in (tmp_path / "after").iterdir()} == {NETWORK_WEIGHTS, NETWORK, SUMS}
    assert torch.equal(outputs(again, training=True), outputs(network, training=True))


def test_the_state_dict_of_a_finished_network_goes_into_one_that_was_loaded(tmp_path):
    growth = grown()
    network = growth.finish()
    growth.save(tmp_path / "grown")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    F.cross_entropy(outputs(network, training=True), data(7)[1]).backward()
    optimizer.step()
    torch.save(network.state_dict(), tmp_path / "later.pt")
    loaded = esper.load_grown(tmp_path / "grown", Host())
    loaded.load_state_dict(torch.load(tmp_path / "later.pt"))
    assert torch.equal(outputs(loaded), outputs(network))
    assert torch.equal(outputs(pickle.loads(pickle.dumps(loaded))), outputs(network))


def test_a_network_whose_seeds_all_folded_is_an_ordinary_state_dict_of_its_class(tmp_path):
    growth = grown(script={key: value for key, value in LIFE.items() if value[1] == 0})
    network = growth.finish()
    assert growth.folded == ["wide"]
    plain = Host()
    plain.load_state_dict(network.state_dict())
    assert torch.equal(outputs(plain), outputs(network))
    assert type(network) is Host
    growth.save(tmp_path / "grown")
    assert torch.equal(outputs(esper.load_grown(tmp_path / "grown", Host())), outputs(network))
    assert json.loads((tmp_path / "grown" / NETWORK).read_text())["seeds"] == []


def test_a_network_that_was_loaded_grows_further_and_is_saved_with_its_earlier_seeds(tmp_path):
    first = grown()
    first.finish()
    first.save(tmp_path / "first")
    model = esper.load_grown(tmp_path / "first", Host())
    further = {key: (op, 0, *rest) for key, (op, slot, *rest) in LIFE.items() if slot == 1}
    second = grown(model=graft(model, {"last": SITES["last"]}), script=further)
    network = second.finish()
    second.save(tmp_path / "second")
    loaded = esper.load_grown(tmp_path / "second", Host())
    assert torch.equal(outputs(loaded), outputs(network))
    assert loaded.last.esper
    assert loaded.inner.esper
    second.save_adapter(tmp_path / "adapter")
    with pytest.raises(InputError, match="digest"):
        esper.attach(Host(), tmp_path / "adapter")


def test_a_seed_is_saved_under_the_names_of_the_network_that_holds_it(tmp_path):
    growth = grown(model=graft(nn.ModuleDict({"net": Host()})["net"], SITES))
    inner = growth.finish()
    whole = nn.Sequential(OrderedDict(net=inner, out=nn.Linear(3, 3)))
    growth = Growth(
        graft(whole, {"out": Site("out", "out", "out", Vector(3))}),
        torch.optim.SGD(whole.parameters()),
        probe=[data(1), data(2)],
        loss=F.cross_entropy,
        budget=9.0,
    )
    growth.save(tmp_path / "grown")
    fresh = nn.Sequential(OrderedDict(net=Host(), out=nn.Linear(3, 3)))
    assert torch.equal(outputs(esper.load_grown(tmp_path / "grown", fresh)), outputs(whole))


def test_an_adapter_is_refused_after_seeds_were_folded_and_names_what_saves_the_whole(tmp_path):
    growth = grown()
    growth.save_adapter(tmp_path / "adapter")
    growth.finish()
    with pytest.raises(
        InputError, match=r"seeds at 'wide' became part of the model, .*; call growth\.save\(folder\), which writes"
    ):
        growth.save_adapter(tmp_path / "adapter")


def test_a_folder_without_a_name_is_refused(tmp_path):
    growth = grown(decisions=0)
    for call in (growth.save, growth.save_adapter, lambda name: esper.load_grown(name, Host())):
        for name in (None, 3, ""):
            with pytest.raises(InputError, match=f"the folder is {name!r}; give its name, as a text or a pathlib.Path"):
                call(name)


@pytest.mark.parametrize("script", [LIFE, {}])
def test_the_moving_average_goes_into_a_network_that_was_loaded(script, tmp_path):
    model = graft(Host(), SITES)
    ema = AveragedModel(model)
    growth = grown(model=model, script=script, ema=ema)
    growth.finish()
    growth.save(tmp_path / "grown")
    loaded = esper.load_grown(tmp_path / "grown", Host())
    loaded.load_state_dict(ema.module.state_dict())
    assert torch.equal(outputs(loaded), outputs(ema.module))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    growth = grown()
    growth.finish()
    growth.save(tmp_path_factory.mktemp("saved") / "grown")
    return tmp_path_factory.getbasetemp() / "saved0" / "grown"


def described(folder, **changes):
    tree = json.loads((folder / NETWORK).read_text()) | changes
    (folder / SUMS).unlink()
    (folder / NETWORK).write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("damage", "build", "said"),
    [
        (
            lambda folder: (folder / NETWORK_WEIGHTS).unlink(),
            Host,
            f"has no file {NETWORK_WEIGHTS}; give a folder that growth.save wrote",
        ),
        (
            lambda folder: (folder / NETWORK_WEIGHTS).write_bytes(b"x"),
            Host,
            "is damaged: its sha256 .*; save the network again",
        ),
        (lambda folder: described(folder, format=9), Host, "has format 9, but this version of Esper reads format 1"),
        (lambda folder: described(folder, seeds=None), Host, "is damaged at 'seeds'"),
        (lambda folder: described(folder, shared={"a": "b"}), Host, "is damaged: it lacks 'b'"),
        (lambda folder: None, lambda: Host(5), r"0?.*has shape \[6, 4\]|has shape \[6, 6\], and this one has \[5"),
        (lambda folder: None, lambda: Host(dtype=torch.float64), "as torch.float32, where the model has torch.float64"),
        (
            lambda folder: None,
            lambda: nn.Sequential(nn.Linear(4, 3)),
            "the model has no .*, which the saved network has; give a model that is built",
        ),
        (lambda folder: None, lambda: graft(Host(), SITES), "is grafted; give one as it was before esper.graft"),
        (lambda folder: None, lambda: Host().to("meta"), "is on the meta device; give a model with weights"),
        (lambda folder: None, lambda: "host", "the model is a str; give an nn.Module"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_the_model_stays_as_it_was(saved, tmp_path, damage, build, said):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage(folder)
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()} if isinstance(model, nn.Module) else {}
    grafted = bool(before) and is_grafted(model)
    with pytest.raises(InputError, match=said):
        esper.load_grown(folder, model)
    if before and not next(iter(before.values())).is_meta:
        assert equal(model.state_dict(), before)
        assert is_grafted(model) == grafted


def entries(tree):
    """Iterate over every place of a tree: the container, and the key of an entry."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from entries(tree[key])


@pytest.mark.parametrize("kind", ["adapter", "grown"])
def test_a_description_without_an_entry_or_with_another_one_is_refused_or_computes_the_same(kind, tmp_path):
    growth = grown(freeze="host")
    growth.finish()
    (growth.save if kind == "grown" else growth.save_adapter)(tmp_path)
    path = tmp_path / f"{kind}.json"
    (tmp_path / SUMS).unlink()
    load = (
        (lambda host: esper.load_grown(tmp_path, host))
        if kind == "grown"
        else lambda host: esper.attach(host, tmp_path)
    )
    tree, refused = json.loads(path.read_text()), 0
    assert torch.equal(outputs(load(Host())), outputs(growth.model))
    seed = json.loads(json.dumps(tree["seeds"][0]))
    for container, key in list(entries(tree)):
        held = container[key]
        for change in (KeyError, "x", -1, [], [seed, seed]):
            if change is not KeyError:
                container[key] = change
            elif isinstance(container, dict):
                del container[key]
            path.write_text(json.dumps(tree))
            try:
                found = load(Host())
            except InputError:
                refused += 1
            else:
                assert torch.equal(outputs(found), outputs(growth.model)), (key, change)
        container[key] = held
    assert refused > 50


def test_what_a_folder_without_pickle_cannot_hold_is_refused(tmp_path):
    class Counting(Host):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    growth = grown(model=graft(Counting(), SITES), decisions=0)
    with pytest.raises(
        InputError, match="holds '_extra_state', a dict, and the folder holds tensors alone; save the network"
    ):
        growth.save(tmp_path / "grown")


class Published(Host):
    """Writes itself to a folder and is made from it, as networks of Hugging Face are."""

    def save_pretrained(self, save_directory, is_main_process=True, push_to_hub=False, **kwargs):
        save_directory.mkdir(exist_ok=True)
        torch.save([type(self).__name__, self.state_dict()], save_directory / "model.pt")

    @classmethod
    def from_pretrained(cls, folder):
        name, state = torch.load(folder / "model.pt")
        assert name == cls.__name__
        model = cls()
        model.load_state_dict(state, strict=False)
        return model


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Published()

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("build", [Published, Holder])
@pytest.mark.parametrize("end", [False, True])
def test_save_pretrained_writes_the_seeds_beside_the_host_and_says_so(build, end, tmp_path):
    inside = "" if build is Published else "net."
    sites = {name: Site(name, inside + site.after, inside + site.around, site.stream) for name, site in SITES.items()}
    growth = grown(model=graft(build(), sites))
    model = growth.finish() if end else growth.model
    network = model if build is Published else model.net
    with pytest.warns(
        GrowthWarning, match=r"load both by esper\.attach\(Published\.from_pretrained\(folder\), folder \+ '/esp"
    ):
        network.save_pretrained(tmp_path / "hub")
    host = Published.from_pretrained(tmp_path / "hub")
    assert not torch.equal(outputs(host), outputs(model))
    assert torch.equal(outputs(esper.attach(host, tmp_path / "hub" / "esper")), outputs(model))
    with pytest.raises(InputError, match=r"would upload the host without its seeds; call model\.push_to"):
        network.save_pretrained(tmp_path / "hub", push_to_hub=True)


@pytest.mark.filterwarnings("error")
def test_save_pretrained_of_a_network_whose_seeds_all_folded_is_its_own(tmp_path):
    (tmp_path / "esper").mkdir()
    growth = grown(model=graft(Published(), SITES), script={k: value for k, value in LIFE.items() if value[1] == 0})
    network = growth.finish()
    assert type(network) is Published
    network.save_pretrained(tmp_path)
    assert torch.equal(outputs(Published.from_pretrained(tmp_path)), outputs(network))
