"""Repair one damaged network whose weights stay frozen: the opponents of seeds, on instances of `heal` and its kin."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from esper.kasmina.host import SegmentedHost
from esper.leyline.data.task import Mixture
from esper.leyline.lifecycle.slots import Site
from esper.runs.healing.heal import further, ranked
from esper.runs.healing.training import (
    Case,
    HealingExamples,
    HealingParts,
    TrainedNetwork,
    adapters,
    bias_and_scale,
    distilled,
    head,
    probe_loss,
    refit,
    regrown,
    settled,
    usual_loss,
)
from esper.tasks.objectives import Classification

RATES = (3e-3, 1e-2, 3e-2)
"""Learning rates that are tried; the loss on the probe chooses."""
BEST, BEST_TAUGHT = "the best of these on the probe", "the best of all on the probe (taught)"


class Repair(NamedTuple):
    """Holds the metric on the test split, and the parameters that a repair trains or adds, as a share of those of the host."""

    metric: float
    added: float


def sites_of(host: SegmentedHost) -> dict[str, Site]:
    """Return the slots of a host as sites of the segments in front of them, by name."""
    found = {}
    for slot in host.slots:
        segment = f"segments.{slot.after}"
        found[slot.name] = Site(slot.name, segment, segment, slot.stream)
    return found


def repaired(task: Mixture, key: int, cap: float, seed: int) -> dict[str, Repair]:
    """Repair the network of a key in every way, each with the examples and updates that its seeds would have.

    A repair that changes nothing has the figures of the damaged network. The best on the probe is chosen among that network and
    the repairs within the cap, without those that are told the intact network and with them.

    Args:
        task: a mixture whose instances have the intact network.
        key: of the instance.
        cap: most parameters of a repair, as a share of those of the host. Where LoRA of rank 1 at each layer, or the biases and
            scales, have more, that repair is above the cap.
        seed: seed of the batches and of what is drawn.
    """
    instance, test = task.instance(key), task.test_split(key)
    assert instance.intact is not None
    assert test is not None
    host, data = instance.host().eval(), task.defaults["data"]
    assert isinstance(host, SegmentedHost)
    intact = instance.intact()[0].eval()
    parts = HealingParts(*(HealingExamples(*split) for split in (instance.train, instance.probe, test)))
    steps, batch = task.defaults["steps"] * data["batches_per_step"], data["batch_size"]
    case = settled(Case(host, {}, parts, usual_loss, steps, batch, seed))
    size, sites = sum(parameter.numel() for parameter in host.parameters()), sites_of(host)
    room, x = int(cap * size), parts.probe.x
    places, drifts = ([sites[place.site].around for place in ranked(host, sites, x, known)] for known in (None, intact))
    corrected, taught = refit(case, intact, room), partial(distilled, intact)
    remedies: Mapping[str, Callable[[float], TrainedNetwork | None]] = {
        "LoRA where participation falls": lambda rate: adapters(case, rate, places[:1], room),
        "units regrown where participation falls": lambda rate: regrown(case, rate, room, places),
        "LoRA at every layer": lambda rate: adapters(case, rate, [""], room),
        "bias and scale": partial(bias_and_scale, case),
        "head": lambda rate: head(case, rate, room),
        "LoRA where the stream drifts (taught)": lambda rate: adapters(case, rate, drifts[:1], room),
        "refit by ridge regression (taught)": lambda rate: corrected,
        "refit and trained (taught)": partial(further, case, corrected),
        "layer-wise distillation (taught)": lambda rate: adapters(case, rate, drifts[:1], room, taught),
    }
    nothing = TrainedNetwork(host, probe_loss(host, case), 0, 0.0, 0.0)
    networks = {
        name: min((each for rate in RATES if (each := remedy(rate))), key=lambda each: each.probe, default=nothing)
        for name, remedy in remedies.items()
    }
    able = [(name, each) for name, each in networks.items() if each.learned <= room]
    blind = [each for name, each in able if "taught" not in name]
    for name, group in ((BEST, blind), (BEST_TAUGHT, [each for _, each in able])):
        networks[name] = min((nothing, *group), key=lambda each: each.probe)

    assert isinstance(task.objective, Classification)
    objective = replace(task.objective, outputs=instance.outputs)

    @torch.no_grad()
    def measured(each: TrainedNetwork) -> Repair:
        score = objective.score(each.network(test.x)[None], test.y[None])
        return Repair(float(score.mean()), each.learned / size)

    return {name: measured(each) for name, each in networks.items()}
