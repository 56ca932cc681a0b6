"""Train every row on the batches of a step; nothing is read from the device. E rows, S slots, n rows of a route, B examples."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.stack.body import Body
from esper.kasmina.stack.plan import Branches, Indices, Route
from esper.leyline.config.tree import Config
from esper.leyline.data.batches import Batch
from esper.leyline.data.keys import Purpose, key
from esper.leyline.data.task import Objective
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.stages import ADDED, Stage, among
from esper.leyline.lifecycle.view import Seeds
from esper.tolaria.stacked.compiling import Passes, Total
from esper.tolaria.stacked.data import SharedBatchIterator
from esper.tolaria.stacked.optimizer import (
    GradScaler,
    ScaledUpdates,
    SkippedUpdates,
    StackedOptimizer,
    StepUpdates,
    trained_groups,
)


class StepStatistics(NamedTuple):
    """The figures that the pass accumulated, on the device."""

    loss: Tensor  # (E,) mean training loss over the step's batches
    gradient_norm: Tensor  # (E,) gradient norm of the hosts, mean over the step's optimizer steps
    seed_norms: tuple[Tensor, ...]  # (n,) the same of seeds, for each entry of `seed_owners`
    seed_owners: tuple[tuple[int, Indices], ...]  # the slot and the environments (n,) that the norms belong to
    parameter_norms: tuple[tuple[tuple[str, ...], Tensor], ...] = ()
    """Names (L,) of the trained parameters and their gradient norms (n, L), mean over the step's optimizer steps: of the hosts,
    then for each entry of `seed_owners`. Empty if they were not asked for."""
    skipped: SkippedUpdates | None = None
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
) -> StepStatistics:
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
    steps = StepUpdates(groups, updates) if scaler is None else ScaledUpdates(groups, updates, scaler, rows)

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
    return StepStatistics(
        loss / config.data.batches_per_step,
        host,
        tuple(others),
        tuple(owners),
        tuple((group.names, steps.mean(group.parts, group)) for group in groups if group.parts is not None),
        steps.skipped,
    )


def total_of(
    body: Body, objective_now: Callable[[], Objective], config: Config, products: torch.dtype | None
) -> Callable[[Route, Batch, Tensor, Tensor | None, Tensor | None, Indices | None], Total]:
    """Return the function that computes the loss of a route on a batch.

    The function takes the route, x leaves (n, B, ...), y (n, B, ...), the weights (n, B) of the examples or None, the factors
    (n,) of the gradients of each row or None, and the keys (n,) of dropout or None. objective_now: returns the objective; a
    campaign of faults replaces that of a population. products: the type in which the pass multiplies; None is that of the
    parameters.
    """
    accumulate = config.optimizer.accumulation_steps

    def total(
        route: Route, x: Batch, y: Tensor, weights: Tensor | None, factors: Tensor | None, keys: Indices | None
    ) -> Total:
        objective = objective_now()
        with products_in(products, body.device):
            result = body.run(x, route, keys=keys)
        losses = _weighted(objective.loss(result.output.to(body.dtype), y), weights).mean(1)
        whole = _sum(losses, factors)
        if result.branches is not None:
            assert route.origin is not None
            branched = objective.loss(result.branches.to(body.dtype), y.index_select(0, route.origin))
            own, by = (None if each is None else each.index_select(0, route.origin) for each in (weights, factors))
            whole = whole + _sum(_weighted(branched, own).mean(1), by)
        if result.proximal is not None:
            whole = whole + config.lifecycle.proximal * _sum(result.proximal, factors)
        if not whole.requires_grad:  # nothing trains in a host that is frozen as a whole and has no seed
            return None, losses.detach()
        return (whole if accumulate == 1 else whole / accumulate), losses.detach()

    return total


def _weighted(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Return (n, B) losses times the weights of their examples, if these have any."""
    return losses if weights is None else losses * weights


def _sum(losses: Tensor, factors: Tensor | None) -> Tensor:
    """Return the sum () of numbers (n,) of the rows, each times the factor of its row, if these are given."""
    return losses.sum() if factors is None else (losses * factors).sum()


def resolve_amp(amp: str, device: torch.device, parameters: torch.dtype) -> torch.dtype | None:
    """Return the type in which the products of a training pass are computed; None leaves them in that of the parameters.

    amp: off, bf16, fp16 or auto, which takes bf16 if the device multiplies it natively. parameters: the dtype of the hosts.
    Raises InputError if the device or the hosts do not allow the type that is asked for.
    """
    native = multiplies_bfloat16(device)
    if amp == "off" or (amp == "auto" and not (native and parameters == torch.float32)):
        return None
    if parameters != torch.float32:
        raise InputError(f"amp is {amp}, which needs hosts in float32, but these are in {parameters}; set amp to off")
    if amp == "fp16":
        return torch.float16
    if not native:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
        raise InputError(f"amp is {amp}, but {name} does not multiply bfloat16 natively; set amp to off, fp16 or auto")
    return torch.bfloat16


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions that multiply bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def check_modules(products: torch.dtype | None, device: torch.device, modules: Iterable[nn.Module]) -> None:
    """Raise InputError if torch cannot run one of the modules with products of a type: an LSTM in float16 on most CPUs."""
    if products != torch.float16 or device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return
    if any(isinstance(part, nn.LSTM) for module in modules for part in module.modules()):
        raise InputError(
            "amp is fp16, but torch has no LSTM in float16 for this processor; set amp to off, or to bf16 if the processor "
            "multiplies it natively"
        )


def products_in(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass whose products are computed in `dtype`; None changes nothing.

    Parameters, their gradients and the optimizer keep their own type. `torch.autocast` chooses the operations.
    """
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
