"""Newly planted seeds that choose, by the gradient of the loss, which rows of a map they train. R rows of a population."""

import numpy as np
import torch
from torch import nn

from esper.kasmina.lifecycle import Edits
from esper.kasmina.stack.body import Body
from esper.kasmina.stack.layout import BEFORE, HERE
from esper.leyline.data.task import Objective
from esper.leyline.lifecycle.slots import Tap
from esper.leyline.lifecycle.view import Seeds
from esper.tolaria.measure.probe import samples
from esper.tolaria.stacked.data import RowExamples
from esper.tolaria.stacked.training import doses


def chooses(delta: nn.Module) -> bool:
    """Whether the module of a seed has a method `choose(u, gradient)`, which fixes its rows when the seed is planted."""
    return callable(getattr(delta, "choose", None))


def choose_rows(body: Body, edits: Edits, seeds: Seeds, fit: RowExamples, objective: Objective) -> None:
    """Let the seeds that an edit has planted choose their rows, from the training examples that the sensors are fitted on.

    A seed sees what it reads, (N, r), and the gradient of the loss for the stream of its slot, (N, w), with the population at its
    present doses and the seed itself without effect. Nothing is computed where no such seed was planted.
    """
    born = [
        (env, slot)
        for env, slot in edits.born.tolist()
        if chooses(body.layout.forms[slot, int(body.layout.form_of[slot, seeds.blueprint[env, slot]])].delta)
    ]
    if not born:
        return
    body.train(False)
    routes = [body.route(doses(seeds), seeds, part=part, frozen=True) for part in body.parts]
    seen = samples(body, routes, fit, objective, ("gradient",))
    for env, slot in born:
        sample, blueprint = seen[slot], int(seeds.blueprint[env, slot])
        at = slot, int(body.layout.form_of[slot, blueprint])
        row = int(np.flatnonzero(body.envs[at] == env)[0])
        seed = body.seed_module(seeds, env, slot)
        u = sample.before if body.layout.menu[blueprint].tap == Tap.BEFORE else sample.stream
        reads, writes = (
            body.table.taps[env, slot, BEFORE if u is sample.before else HERE],
            body.table.taps[env, slot, HERE],
        )
        real = slice(None) if sample.real is None else sample.real[env]
        assert sample.gradient is not None, "it was asked for"
        with torch.no_grad():
            seed.delta.choose(u[env][real, :reads], sample.gradient[env][real, :writes])  # type: ignore[operator]
        body.stacks[at].write(row, seed)
