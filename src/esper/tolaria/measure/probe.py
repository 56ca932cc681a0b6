"""Evaluate every network on a fixed split, at its real doses and at the coalitions that were asked for.

E rows, S slots, N examples, X branches. One forward pass; a coalition shares the computation in front of its first changed slot.
The pass goes over rows one by one if the population runs them so, and over pieces of the examples if these are images.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from esper.kasmina.lifecycle import doses
from esper.kasmina.stack.body import Body
from esper.kasmina.stack.layout import BEFORE, HERE, INNER, INPUT
from esper.kasmina.stack.plan import Branches, Indices, Route
from esper.leyline.config.tree import SENSOR_FAMILIES
from esper.leyline.data.batches import leaves, picked
from esper.leyline.data.task import Objective
from esper.leyline.lifecycle.slots import Kind, Stream
from esper.leyline.lifecycle.view import Estimate, Seeds
from esper.tolaria.measure.sensors import IntactStreams, Sample, TrueWidths, growth_sensors, participation_ratio
from esper.tolaria.stacked.data import RowExamples


@torch.no_grad()
def probe(
    body: Body, seeds: Seeds, examples: RowExamples, objective: Objective, branches: Branches, *, signs: bool
) -> dict[str, Tensor]:
    """Evaluate every row on its examples of a split. Returns fields of `population.Figures` by name, on the device.

    Without `signs`, participation and the vital signs are not measured, and are of shape (E, 0).
    """
    body.train(False)
    output, others, streams = passed(body, seeds, examples, branches, signs=signs)
    loss, score = objective.loss(output, examples.y), objective.score(output, examples.y)
    widths = torch.from_numpy(body.table.taps[..., HERE]).to(loss, non_blocking=True).unbind(1)
    ratios = [
        beside_itself(participation_ratio, here, width, for_positions(examples.real, here))
        for here, width in zip(streams, widths, strict=len(streams) > 0)
    ]
    participation = torch.stack(ratios, 1) if ratios else loss.new_zeros(len(loss), 0)
    metric, metric_se = paired(score, examples).unbind(1)
    vital = loss.new_zeros(len(loss), 0)
    if signs:
        vital = torch.stack([metric_se, output_spread(output, examples), body.finite()], 1)
    branch_loss = branch_metric = loss.new_zeros(0)
    rise = fall = loss.new_zeros(0, 2)
    if others is not None:
        origin = torch.from_numpy(branches.env).to(body.device, non_blocking=True)
        there = examples.targets(origin)
        losses, scores = objective.loss(others, there.y), objective.score(others, there.y)
        branch_loss, branch_metric = mean(losses, there), mean(scores, there)
        rise = paired(losses - loss.index_select(0, origin), there)
        fall = paired(score.index_select(0, origin) - scores, there)
    return {
        "loss": mean(loss, examples),
        "metric": metric,
        "branch_loss": branch_loss,
        "branch_metric": branch_metric,
        "loss_rise": rise,
        "metric_fall": fall,
        "participation": participation,
        "signs": vital,
    }


IMAGES = 256
"""Largest number of images of a row in one pass; it bounds the memory for maps, for splits of any size."""


SEQUENCES = 16
"""Largest number of sequences of a row in one pass; it bounds the memory for the outputs at every position."""


def pieces(examples: RowExamples, streams: Sequence[type[Stream]]) -> list[slice]:
    """Return the runs of examples that passes go over in turn; all examples at once if an example is a vector."""
    count = examples.y.shape[1]
    size = max(count, 1)
    if any(stream.kind == Kind.SEQUENCE for stream in streams):
        size = SEQUENCES
    elif any(leaf.dim() == 5 for leaf in leaves(examples.x)):
        size = IMAGES
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def passed(
    body: Body, seeds: Seeds, examples: RowExamples, branches: Branches, *, signs: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return outputs (E, N, ...) and those of the branches (X, N, ...); with `signs`, the streams (E, N, D) of all slots."""
    inside = [branches.within(part) for part in body.parts]
    dose = doses(seeds)
    routes = [body.route(dose, seeds, own, part=part) for part, (own, _) in zip(body.parts, inside, strict=True)]
    outputs, others, kinds = [], [], body.layout.streams if signs else ()
    for piece in pieces(examples, body.layout.streams):
        x = examples.read(piece)
        found = [body.run(picked(x, route.part), route, streams="here" if signs else "none") for route in routes]
        seen = [[kind.positions(slot.here) for kind, slot in zip(kinds, each.streams, strict=True)] for each in found]
        outputs.append(_joined([(each.output, streams) for each, streams in zip(found, seen, strict=True)], 0))
        others.append([each.branches for each in found if each.branches is not None])
    output, whole = _joined(outputs, 1)
    if not len(branches.env):
        return output, None, whole
    branched = _joined([_joined(found, 0) for found in others], 1)
    if len(routes) > 1:
        back = np.argsort(np.concatenate([places for _, places in inside]))
        branched = branched.index_select(0, torch.from_numpy(back).to(body.device, non_blocking=True))
    return output, branched, whole


def _joined(trees: Sequence[Any], dimension: int) -> Any:
    """Concatenate trees of tensors leaf by leaf; a leaf that is None stays so."""
    if len(trees) == 1:
        return trees[0]
    return pytree.tree_map(lambda *leaf: None if leaf[0] is None else torch.cat(leaf, dimension), *trees)


def mean(values: Tensor, examples: RowExamples) -> Tensor:
    """Average (n, N) over the real examples of each row -> (n,)."""
    if examples.real is None:
        return values.mean(1)
    return values.masked_fill(~examples.real, 0).sum(1) / examples.size[:, 0]


def paired(difference: Tensor, examples: RowExamples) -> Tensor:
    """Return (n, 2): mean of (n, N) over real examples, and its standard error, sd / sqrt(N) with N - 1 degrees of freedom."""
    if examples.real is None:
        # In float64, torch takes another kernel for the standard deviation of all numbers that there are.
        rows = difference if len(difference) != 1 else difference.expand(2, -1)
        spread = rows.std(1)[: len(difference)]
        return torch.stack([difference.mean(1), spread / difference.shape[1] ** 0.5], 1)
    centre = mean(difference, examples)
    squares = (difference - centre[:, None]).square().masked_fill(~examples.real, 0).sum(1)
    n = examples.size[:, 0]
    return torch.stack([centre, (squares / (n - 1) / n).sqrt()], 1)


def output_spread(output: Tensor, examples: RowExamples) -> Tensor:
    """Return (E,), the standard deviation of outputs (E, N, ...) over each row's real examples, root mean square over outputs.

    It is 0 if every example gets the same output. An output that a row does not have is -inf everywhere, and counts as constant.
    """
    output = output if output.dim() == 3 else output.flatten(2) if output.dim() > 3 else output[..., None]
    size = examples.size[:, :, None]
    if examples.real is None:
        # A tenth of the time of filling by a mask.
        z = torch.nan_to_num(output, nan=torch.nan, posinf=torch.inf, neginf=0)
        gap = z - z.sum(1, keepdim=True) / size
    else:
        z = output.masked_fill((output == -torch.inf).logical_or_(~examples.real[..., None]), 0)
        gap = torch.addcmul(z, z.sum(1, keepdim=True) / size, examples.real[..., None].to(z.dtype), value=-1)
    return (gap.square().sum(1) / size[:, 0]).mean(1).sqrt()


def sense(
    body: Body,
    seeds: Seeds,
    fit: RowExamples,
    held: RowExamples,
    objective: Objective,
    taught: Sequence[IntactStreams] = (),
    families: Collection[str] = SENSOR_FAMILIES,
) -> Tensor:
    """Compute the growth sensors of every slot, (E, S, F), fitted on some training examples and tested on others.

    taught: the streams of the intact networks for `fit`, one entry per slot; none where the task has no intact network.
    families: those that are computed; the sensors of others are nan.
    """
    body.train(False)
    routes = [body.route(doses(seeds), seeds, part=part, frozen=True) for part in body.parts]
    measured = samples(body, routes, fit, objective, families)
    other = samples(body, routes, held, objective, families) if "explained" in families else []
    true = torch.from_numpy(body.table.taps.astype(np.float64)).to(body.device, body.dtype, non_blocking=True)
    widths = [TrueWidths(*true[:, s].unbind(1)) for s in range(len(body.slots))]
    return beside_itself(growth_sensors, measured, other, widths, taught, families)


def beside_itself(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return function(*arguments), (n, ...), of trees of tensors (n, ...). A row alone is computed beside a copy of itself.

    The products of these functions are batched, and one of a single row may be rounded differently from one of several.
    """
    if len(next(leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))) > 1:
        return function(*arguments)
    return function(*pytree.tree_map_only(Tensor, lambda t: torch.cat([t, t]), arguments))[:1]


def samples(
    body: Body,
    routes: Sequence[Route],
    examples: RowExamples,
    objective: Objective,
    families: Collection[str] = SENSOR_FAMILIES,
) -> list[Sample]:
    """Return one `Sample` a slot, with the gradient for `gradient` and `explained`, and inner features for `inner` and `dead`."""
    backward = not {"gradient", "explained"}.isdisjoint(families)
    inner = not {"inner", "dead"}.isdisjoint(families)
    found = []
    for piece in pieces(examples, body.layout.streams):
        whole, parts = examples.read(piece), list[list[Sample]]()
        for route in routes:
            x = picked(whole, route.part)
            with torch.set_grad_enabled(backward):
                result = body.run(x, route, streams="all" if backward or inner else "here")
                gradients: Sequence[Tensor | None] = [None] * len(result.streams)
                if backward:
                    loss = objective.loss(result.output, examples.y[route.part, piece])
                    real = None if examples.real is None else examples.real[route.part, piece]
                    total = (loss if real is None else loss.masked_fill(~real, 0)).sum()
                    gradients = torch.autograd.grad(total, [seen.here for seen in result.streams])
            parts.append([])
            for slot, (streams, gradient) in enumerate(zip(result.streams, gradients, strict=True)):
                kind, there, here = body.layout.streams[slot], body.layout.widest.taps[slot] > 0, streams.here.detach()
                # A tap that no seed at the slot can read, because it is of another kind than the stream, becomes one
                # feature of 0 with true width 0. The energy that it explains is nan.
                before = given = torch.zeros_like(kind.positions(here)[:, :, :1])
                if there[BEFORE]:
                    before = kind.positions(kind.fitted(streams.before.detach(), here))
                if isinstance(x, Tensor) and there[INPUT]:
                    given = kind.positions(kind.fitted(x, here))
                units = kind.positions(streams.inner, here) if streams.inner is not None and there[INNER] else None
                slope = None if gradient is None else kind.positions(gradient)
                parts[-1].append(Sample(kind.positions(here), before, given, units, slope, None))
        found.append(_joined(parts, 0))
    return [sample._replace(real=for_positions(examples.real, sample.stream)) for sample in _joined(found, 1)]


def for_positions(real: Tensor | None, features: Tensor) -> Tensor | None:
    """Repeat (n, N) bool, which examples are real, for each of their positions, to match features (n, N P, D)."""
    if real is None or real.shape[1] == features.shape[1]:
        return real
    return real.repeat_interleave(features.shape[1] // real.shape[1], 1)


def spread(
    mean_se: NDArray[np.float64], where: tuple[Indices, Indices, Indices], shape: tuple[int, ...], sign: int = 1
) -> Estimate:
    """Write (X, 2) means, times a sign, and standard errors of branches into an estimate (E, S), which is absent elsewhere."""
    branch, env, slot = where
    estimate = Estimate.absent(*shape)
    estimate.mean[env, slot] = sign * mean_se[branch, 0]
    estimate.se[env, slot] = mean_se[branch, 1]
    estimate.measured[env, slot] = True
    return estimate
