"""Passes on a tape have the bits that autograd gives them."""

import numpy as np
import pytest
import torch

from esper.kasmina.slot import blend_change
from esper.kasmina.stack.body import Body
from esper.kasmina.stack.tape import PassTape
from esper.leyline.config.tree import build_config
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Blend, among
from esper.tamiyo.rules.base import RandomValid
from esper.tasks.catalog import get_task
from esper.tasks.objectives import MANY, Classification, Regression
from esper.tolaria.engine import VectorizedEngine, play
from thinning import thinned

FREE = {
    "gates": {"permissive": True, "min_training_steps": 0, "min_holding_steps": 0},
    "lifecycle": {"max_seeds": 4, "max_training_seeds": 4, "min_prune_age": 0},
    "baselines": [],
}
CASES = {
    "vectors": ("digits-narrow", {"envs": 3}),
    "one row": ("digits-narrow", {"envs": 1, "twin": False}),
    "straight through": ("digits-narrow", {"envs": 3, "lifecycle.incubation": "ste"}),
    "isolated": ("digits-narrow", {"envs": 3, "lifecycle.isolation": "isolated"}),
    "odd batches": ("digits-narrow", {"envs": 2, "data.batch_size": 30, "optimizer.accumulation_steps": 2}),
    "microbatches": ("digits-narrow", {"envs": 2, "data.microbatch": 24, "data.batches_per_step": 4}),
    "mixtures with fewer outputs": ("repair", {"envs": 3}),
    "sequences": ("stdlib-text", {"envs": 2, "steps": 4, "data.batches_per_step": 1}),
}


def grown(name: str, settings: dict[str, object]) -> tuple[list[torch.Tensor], int]:
    """Return the parameters and gradient norms after an episode of random decisions, and how many seeds were ever planted."""
    task = get_task(name)
    engine = VectorizedEngine(task, build_config(task.defaults, {"steps": 8, "device": "cpu"}, FREE, settings))
    engine.reset()
    planted = []

    class Counting(RandomValid):
        def act(self, view):
            planted.append(int(among(view.seeds.stage, IN_BUDGET).sum()))
            return super().act(view)

    play(engine, Counting())
    body = engine.population.body
    found = [body.host.columns["value"]]
    found += [stack.columns["value"][: len(body.envs[at])] for at, stack in body.stacks.items()]
    return [each.clone() for each in found], max(planted)


@pytest.mark.parametrize("case", thinned(CASES, 2))
def test_a_tape_gives_the_bits_of_autograd(case, monkeypatch):
    tapes = []
    make = Body.tape
    monkeypatch.setattr(Body, "tape", lambda body: tapes.append(make(body)) or tapes[-1])
    taped, planted = grown(*CASES[case])
    assert planted, "the episode must plant seeds"
    assert all(isinstance(tape, PassTape) for tape in tapes)
    monkeypatch.setattr(Body, "tape", lambda body: None)
    graphed, _ = grown(*CASES[case])
    assert len(taped) == len(graphed)
    assert all(torch.equal(one, other) for one, other in zip(taped, graphed, strict=True))


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("digits-image-narrow", {}),
        ("digits-narrow", {"amp": "bf16"}),
        ("digits-narrow", {"activation_checkpointing": True}),
    ],
)
def test_maps_other_types_and_passes_that_are_computed_again_are_left_to_autograd(task, settings, monkeypatch):
    tapes = []
    make = Body.tape
    monkeypatch.setattr(Body, "tape", lambda body: tapes.append(make(body)) or tapes[-1])
    grown(task, {"envs": 2, "steps": 1, "data.batches_per_step": 2, **settings})
    assert tapes
    assert all(tape is None for tape in tapes)


@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 5), (2, 4, 3, 3)])
def test_the_loss_of_classes_has_the_bits_and_gradients_of_autograd(shape):
    torch.manual_seed(0)
    objective = Classification(outputs=6)
    output, target = torch.randn(*shape, 6), torch.randint(6, shape)
    output[0, ..., 5] = -torch.inf  # a row with fewer outputs
    target[0].clamp_(max=4)
    leaf, seen = output.clone().requires_grad_(), torch.rand(shape[:2])
    losses = objective.loss(leaf, target)
    losses.backward(seen)
    own, back = objective.differentiated(output, target)
    assert torch.equal(own, losses)
    assert torch.equal(back(seen), leaf.grad)


def test_objectives_that_compute_another_loss_are_differentiated_by_autograd():
    class Focal(Classification):
        def losses(self, output, target):
            return super().losses(output, target).square()

    output, target = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    assert Focal(outputs=4).differentiated(output, target) is None
    assert Classification(outputs=MANY).differentiated(torch.randn(2, 3, MANY), target) is None
    assert not hasattr(Regression(outputs=1), "differentiated")


def test_a_tape_sums_the_gradients_of_a_stream_that_is_read_twice():
    tape, mask = PassTape(), torch.tensor([True, False])[:, None, None]
    x = tape.apart(lambda w: w * 1.0, w := torch.ones(2, 4, 3, requires_grad=True))
    rows = torch.tensor([1])
    y = tape.add(tape.either(mask, x, tape.constant(x)), tape.select(x, rows), rows)
    tape.backward([(y, torch.ones_like(y))])
    np.testing.assert_array_equal(w.grad[:, 0, 0], [1.0, 1.0])


@pytest.mark.parametrize("gated", [True, False])
def test_the_gradients_of_every_blend_have_the_bits_of_autograd(gated):
    torch.manual_seed(0)
    h, delta = (torch.randn(6, 8, 5, requires_grad=True) for _ in range(2))
    gate = torch.randn(6, 8, 1, requires_grad=True) if gated else None
    blends = [Blend.ADD, Blend.MULTIPLY, Blend.GATE] if gated else [Blend.ADD, Blend.MULTIPLY, Blend.MULTIPLY]
    alpha, blend = torch.rand(6, 1, 1), torch.tensor(blends).repeat(2).view(-1, 1, 1)
    dc = torch.randn(6, 8, 5)
    expected, _ = blend_change(h, delta, gate, alpha, blend)
    expected.backward(dc)
    with torch.no_grad():
        change, back = blend_change(h, delta, gate, alpha, blend)
    assert torch.equal(change, expected)
    for source, gradient in zip((h, delta, gate), back(dc), strict=True):
        assert source is None or torch.equal(source.grad, gradient)
