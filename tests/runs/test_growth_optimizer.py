"""The optimizer of a loop of one's own while a network grows: its groups, its hooks, its direction and its steps."""

import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.grafted import graft, planted_at
from esper.leyline.actions import Op
from esper.leyline.sites import Site
from esper.leyline.streams import Vector
from esper.runs.growth import Growth
from loops import SETTINGS
from populations import Script

WIDTH = 6
INCUBATE = {(0, 0): (Op.GERMINATE, 0, 0, 0, 1, 3)}


class Normalised(nn.Module):
    """Embeds tokens, whose table is not decayed, and has its only site behind a norm."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.head(self.norm(self.tokens(ids).mean(1)))


def host():
    with drawn_with(0):
        return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def data(key, examples=12):
    with drawn_with(key):
        x = torch.randn(examples, 4)
        return x, (x.sum(1) > 0).long() + (x[:, 0] > 0.5).long()


def grow(optimizer, model, script=None, **options):
    """Growth of a host at its first layer, by a script that has a seed incubate where none is given."""
    settings = {**SETTINGS, "blueprints": ["bypass-mlp-small"]}
    usual = {"probe": [data(1), data(2)], "loss": F.cross_entropy, "every": 2, "budget": 9.0, "settings": settings}
    return Growth(model, optimizer, controller=Script(INCUBATE if script is None else script), **{**usual, **options})


def grafted():
    return graft(host(), {"0": Site("0", "0", "0", Vector(WIDTH))})


def test_the_matrices_of_a_seed_are_decayed_as_matrices_and_its_biases_as_biases():
    model = graft(Normalised(), {"norm": Site("norm", "norm", "norm", Vector(WIDTH))})
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [*vectors, model.tokens.weight], "weight_decay": 0.0}, {"params": [model.head.weight]}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.3)
    with drawn_with(0):
        ids = torch.randint(0, 5, (8, 4))
    growth = grow(optimizer, model, probe=[(ids, ids[:, 0] % 3), (ids, ids[:, 1] % 3)])
    seed = dict(planted_at(model, "norm").named_parameters())
    of_site = [group for group in optimizer.param_groups if group.get("esper") == "norm"]
    decay = {id(p): group["weight_decay"] for group in of_site for p in group["params"]}
    assert {name: decay[id(parameter)] for name, parameter in seed.items()} == {
        name: 0.0 if name.endswith("bias") else 0.3 for name in seed
    }
    assert growth.finish() is model
    assert len(optimizer.param_groups) == 2
