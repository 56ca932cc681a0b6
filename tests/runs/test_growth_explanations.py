"""Check that growth in a loop of one's own says why nothing was planted, and why a seed was not kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.leyline.messages import GrowthWarning
from esper.runs.live.growth import Growth


def grown(steps=24, told=None, state=None, probe=None, **options):
    with drawn_with(0):
        x, other = torch.randn(2, 32, 8)
        model = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(8, 8), nn.ReLU())], nn.Linear(8, 2))
    y = (x.sum(1) > 0).long()
    probe = [(other, (other.sum(1) > 0).long())] if probe is None else probe(x, y)
    optimizer = torch.optim.AdamW(model.parameters())
    growth = Growth(model, optimizer, probe=probe, loss=F.cross_entropy, every=2, steps=told, **options)
    if state is not None:
        growth.load_state_dict(state)
    for _ in range(steps):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        growth.step(x, y)
    return growth


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"budget": 9.0, "told": 6}, "the run has 3 steps of one decision each, which are too few"),
        ({"budget": 9.0, "controller": "never"}, "the controller (Never) chose another operation at every decision"),
        ({"budget": 9.0, "settings": {"lifecycle": {"max_seeds": 0}}}, "lifecycle.max_seeds is 0"),
    ],
    ids=["late", "never", "no-seeds"],
)
def test_the_summary_says_why_nothing_was_planted(options, cause):
    summary = grown(**options).summary()
    assert summary["plantings"] == []
    assert summary["verdict"] == "Not resolved whether growth pays: no seed is kept yet."
    (sentence,) = summary["explanations"]
    assert sentence.startswith("nothing was planted: ")
    assert cause in sentence


def test_the_cause_is_known_after_a_resume():
    options = {"budget": 9.0, "controller": "never"}
    straight = grown(8, **options)
    resumed = grown(0, **options, state=grown(8, **options).state_dict())
    assert resumed.summary()["explanations"] == straight.summary()["explanations"] != []


def test_a_blueprint_that_is_larger_than_the_budget_gives_way_to_a_smaller_one():
    large, small = (grown(2, budget=budget).summary()["plantings"] for budget in (9.0, 0.7))
    assert [each["blueprint"] for each in large] == ["bypass-mlp"]  # 280 parameters of 234
    assert [each["blueprint"] for each in small] == ["bypass-linear"]  # 72


def test_the_summary_says_why_a_seed_was_removed_at_the_end():
    growth = grown(2, budget=9.0)
    assert growth.summary()["explanations"] == []
    growth.finish()
    (sentence,) = growth.summary()["explanations"]
    assert sentence.startswith("1 seed was not kept at the end: it failed the gate to ADVANCE (min_training_steps in 1")


def test_a_probe_that_is_trained_on_is_one_warning_with_the_number_of_its_examples():
    def probe(x, y):
        return [(torch.cat([x[:10], -x]), torch.cat([y[:10], 1 - y]))]

    with pytest.warns(GrowthWarning) as told:
        growth = grown(8, probe=probe, budget=9.0)
    (sentence,) = [str(warning.message) for warning in told]
    assert sentence.startswith(
        "10 of the 42 examples of the probe are also among those that growth.step(x, y) was given"
    )
    assert sentence in growth.summary()["explanations"]


def test_a_probe_of_two_examples_is_a_sentence():
    growth = grown(0, probe=lambda x, y: [(-x[:2], 1 - y[:2])], budget=9.0)
    assert (
        "the probe has 2 examples, so a single example moves figures by up to 50%"
        in growth.summary()["explanations"][0]
    )
