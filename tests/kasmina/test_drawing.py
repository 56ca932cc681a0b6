"""Test descriptions and drawings of grown networks: every part is there, and the parameters add up."""

import copy
import json
import re
from xml.etree import ElementTree

import pytest
import torch
from sklearn.datasets import load_iris
from torch import nn

import esper
from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.graft.grafted import plant
from esper.kasmina.graft.planted import Planted
from esper.kasmina.network.drawing import describe, parts_of
from esper.kasmina.slot import Seed
from esper.leyline.lifecycle.slots import Kind, Tap
from esper.leyline.lifecycle.vocabulary import Blend
from esper.leyline.messages import InputError
from pages import EVIL

SVG = "{http://www.w3.org/2000/svg}"
KEEP = [
    {"at": 1, "op": "germinate", "slot": "block0", "blueprint": "skip-mlp", "keep": True},
    {"at": 1, "op": "germinate", "slot": "block1", "blueprint": "bypass-mlp", "keep": True},
]
SETTINGS = {
    "envs": 1,
    "steps": 12,
    "baselines": [],
    "blueprints": ["skip-mlp", "bypass-mlp"],
    "gates": {"permissive": True},
    "lifecycle": {"max_seeds": 2, "max_training_seeds": 2},
}


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    (folder / "schedule.yaml").write_text(json.dumps(KEEP))
    esper.grow("iris", SETTINGS, controller=str(folder / "schedule.yaml"), run=folder / "run", progress=False)
    return esper.load(folder / "run" / "models" / "env-000")


def test_a_description_has_every_segment_and_every_seed_with_what_it_reads(network):
    lines = network.describe().splitlines()
    assert sum(line.lstrip().startswith("segment ") for line in lines) == len(network.segments)
    assert [line.split()[1:3] for line in lines if line.lstrip().startswith("+")] == [
        ["block0", "skip-mlp;"],
        ["block1", "bypass-mlp;"],
    ]
    assert "block0" in next(line for line in lines if "reads the input of the network" in line)
    assert "block1" in next(line for line in lines if "reads what entered the part before it" in line)


def test_the_parameters_of_the_parts_are_those_of_the_network(network):
    whole = sum(parameter.numel() for parameter in network.parameters())
    assert sum(part.params or 0 for part in parts_of(network)) == whole
    assert f"GrownNetwork: {whole:,} parameters" in network.describe()


def test_a_drawing_is_sound_xml_with_a_box_for_every_part_and_two_arrows_for_every_seed(network, tmp_path):
    image = esper.draw(network, tmp_path / "network.svg")
    assert (tmp_path / "network.svg").read_text(encoding="utf-8") == image
    root = ElementTree.fromstring(image)
    boxes = root.findall(f".//{SVG}rect")
    assert len(boxes) == len(parts_of(network))
    assert sum(box.get("class") == "seed" for box in boxes) == 2
    hosts = len(boxes) - 2
    assert len(root.findall(f"{SVG}path")) == hosts - 1 + 2 * 2
    bottom = float(root.get("viewBox").split()[3])
    assert all(float(box.get("y")) + float(box.get("height")) <= bottom for box in boxes)


def test_a_network_that_was_grown_twice_shows_the_seeds_of_both_times(network, tmp_path):
    (tmp_path / "again.yaml").write_text(json.dumps([KEEP[1] | {"slot": network.slots[-1].name}]))
    x, y = load_iris(return_X_y=True)
    task = esper.task("more", x, y, host=lambda: copy.deepcopy(network), menu=["skip-mlp", "bypass-mlp"])
    esper.grow(task, SETTINGS, controller=str(tmp_path / "again.yaml"), run=tmp_path / "run", progress=False)
    again = esper.load(tmp_path / "run" / "models" / "env-000", host=lambda: copy.deepcopy(network))
    parts = parts_of(again)
    assert sum(part.kind == "seed" for part in parts) == 2 + len(again.grafts)
    assert sum(part.params or 0 for part in parts) == sum(parameter.numel() for parameter in again.parameters())


def test_a_network_with_seeds_at_sites_of_its_own_shows_them_behind_their_submodule():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 3))
    before = describe(model)
    esper.graft(model, ["1.1"], example=torch.zeros(2, 4))
    assert describe(model) == before
    planted = Planted(Seed(get_blueprint("mlp-small").build(8, 8), 8), Tap.HERE, Blend.ADD, Kind.VECTOR)
    plant(model, "1.1", planted)
    seed = [part for part in parts_of(model) if part.kind == "seed"]
    assert [(part.name, part.reads) for part in seed] == [("1.1", Tap.HERE)]
    assert sum(part.params for part in parts_of(model)) == sum(each.numel() for each in model.parameters())
    assert describe(model).splitlines()[3].startswith("  + 1.1")


def test_names_that_a_user_gave_can_neither_run_nor_turn_the_text():
    model = nn.Sequential()
    model.add_module(EVIL.replace(".", ""), nn.Linear(2, 2))
    image = esper.draw(model)
    assert [element.tag for element in ElementTree.fromstring(image).iter() if "script" in element.tag] == []
    assert not re.search("[\u202e\x1b]", image + describe(model))


def test_what_is_no_network_is_refused():
    with pytest.raises(InputError, match=r"esper\.draw was given a str; give a network, as esper\.load returns it"):
        esper.draw("runs/demo")
