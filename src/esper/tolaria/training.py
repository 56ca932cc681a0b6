"""The training pass of a step: K stacked batches of every row, nothing read from the device. E rows, S slots, B examples."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.body import Body
from esper.kasmina.plan import Branches, Indices
from esper.leyline.config import Config
from esper.leyline.keys import Purpose, key
from esper.leyline.stages import ADDED, Stage, among
from esper.leyline.view import Seeds
from esper.tolaria.compiling import Passes
from esper.tolaria.data import SharedBatchIterator
from esper.tolaria.optimizer import StackedOptimizer
from esper.tolaria.scaling import GradScaler
from esper.tolaria.updating import ScaledUpdating, Skipped, Updating, trained_groups


class Trained(NamedTuple):
    """The figures that the pass accumulated, on the device."""

    loss: Tensor  # (E,) mean training loss over the step's batches
    gradient_norm: Tensor  # (E,) gradient norm of the hosts, mean over the step's optimizer steps
    seed_norms: tuple[Tensor, ...]  # (n,) the same of seeds, for each entry of `seed_owners`
    seed_owners: tuple[tuple[int, Indices], ...]  # the slot and the environments (n,) that the norms belong to
    parameter_norms: tuple[tuple[tuple[str, ...], Tensor], ...] = ()
    """Names (L,) of the trained parameters and their gradient norms (n, L), mean over the step's optimizer steps: of the hosts,
    then for each entry of `seed_owners`. Empty if they were not asked for."""
    skipped: Skipped | None = None
    """The updates that were skipped; means of norms are over the others: nan if there is none, inf if the row is lost."""


def shadows(seeds: Seeds) -> Branches:
    """Return one branch for each incubating seed: the network with this one seed at dose 1, every other at its own dose."""
    env, slot = np.nonzero(seeds.stage == Stage.TRAINING)
    dose = doses(seeds)[env]
    dose[np.arange(len(env)), slot] = 1
    return Branches.at(env, slot, dose)[0]


def doses(seeds: Seeds) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return (E, S) the dose at which every slot acts on its network now."""
    return np.where(among(seeds.stage, ADDED), seeds.alpha, np.float32(0))


def train(
    body: Body,
    seeds: Seeds,
    feed: SharedBatchIterator,
    optimizer: StackedOptimizer,
    passes: Passes,
    config: Config,
    dropout: tuple[Indices, int],
    parameter_norms: bool = False,
    scaler: GradScaler | None = None,
) -> Trained:
    """Train every row on the step's batches.

    `dropout` is (instance (E,), episode). Together with the seed and the batch number it is the key of dropout. The
    optimizer moves exactly the trainable rows: hosts, and seeds in TRAINING, BLENDING (not doomed), HOLDING or
    FOSSILIZED. `passes` computes the gradients.
    `parameter_norms` asks for the gradient norm of each parameter too. `scaler` scales the losses, if there is one.
    """
    shadow = config.lifecycle.incubation == "shadow"
    branches = shadows(seeds)
    routes = [
        body.route(
            doses(seeds),
            seeds,
            branches.within(part)[0] if shadow else None,
            part=part,
            train=True,
            straight=not shadow,
        )
        for part in body.parts
    ]
    accumulate = config.optimizer.accumulation_steps
    updates = config.data.batches_per_step // accumulate
    rows = len(seeds.stage)
    groups, owners = trained_groups(body, seeds, optimizer, parameter_norms)
    steps = Updating(groups, updates) if scaler is None else ScaledUpdating(groups, updates, scaler, rows)

    body.train(True)
    loss = torch.zeros(rows, dtype=body.dtype, device=body.device)
    sums, draws = [loss[route.part] for route in routes], body.draws
    last = config.steps * config.data.batches_per_step
    for _ in range(updates):
        for _ in range(accumulate):
            keys = key(config.seed, Purpose.DROPOUT, dropout[0], dropout[1], feed.batch) if draws else None
            feed.advance()
            for route, total in zip(routes, sums, strict=True):
                own = None if keys is None else keys[route.part]
                batch = *feed.of(route.part), feed.weights_of(route.part), steps.factors(route.part)
                total += passes.backward(route, *batch, own, last - feed.batch)
        steps.update()
    host, *others = (steps.mean(group.norm, group) for group in groups)
    return Trained(
        loss / config.data.batches_per_step,
        host,
        tuple(others),
        tuple(owners),
        tuple((group.names, steps.mean(group.parts, group)) for group in groups if group.parts is not None),
        steps.skipped,
    )
