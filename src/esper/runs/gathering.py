"""A network that grew in several processes, as one process holds it."""

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.grafted import graft, plant, trim
from esper.kasmina.grown import is_grafted
from esper.kasmina.sharding import gather_on_cpu, in_parts, reshard
from esper.leyline.errors import InputError
from esper.leyline.view import Seeds
from esper.tolaria.live import LivePopulation


@torch.no_grad()
def gather_grown(live: LivePopulation, seeds: Seeds, network: nn.Module | None) -> None:
    """Put what a finished network became into a whole copy of its host, in place; every process calls this.

    seeds: as they were when the network was finished. network: the copy; None in a process that gives its parts alone.
    Raises InputError, in every process, if the copy of one of them cannot take it.
    """
    problem = ""
    try:
        if network is not None:
            _plant_kept(live, seeds, network)
            _check_tensors(live.network, network)
    except InputError as error:  # the others wait for this process
        problem = str(error)
    problem = next(filter(None, live.ranks.from_each(problem)), "")
    if problem:
        raise InputError(problem)
    reshard(live.network)
    targets = {} if network is None else network.state_dict()
    others = {}
    for name, value in live.network.state_dict().items():
        if not isinstance(value, Tensor):
            others[name] = value
            continue
        whole = gather_on_cpu(value, network is not None)
        if network is not None and whole is not None:
            targets[name].copy_(whole)
    if network is not None and others:
        network.load_state_dict(others, strict=False)


def _plant_kept(live: LivePopulation, seeds: Seeds, network: nn.Module) -> None:
    """Plant the seeds that a finished network has kept as submodules, with weights that are still to be filled in."""
    if is_grafted(network) or any(map(in_parts, network.parameters())):
        raise InputError("gather was given a model that is grafted or sharded; give one as it was before esper.graft")
    if any(tensor.is_meta for tensor in network.state_dict().values() if isinstance(tensor, Tensor)):
        raise InputError("gather was given a model on the meta device; give one with weights")
    kept = live.grafts.kept(seeds)
    slots = {slot: own for slot, site in enumerate(live.sites) if (own := kept.get(site.after)) is not None}
    if not slots:
        return
    graft(network, {live.sites[slot].name: live.sites[slot] for slot in slots})
    like = next(network.parameters())
    for slot, own in slots.items():
        assert own.recipe is not None, "growth knows what it planted"
        entry = get_blueprint(own.recipe.blueprint, own.kind)
        made = live.grafts.made(slot, entry, own.blend, 0).to(like.device)
        made.mode, made.attached = own.mode, own.attached
        plant(network, live.sites[slot].name, made.train(network.training))
    trim(network)


def _check_tensors(grown: nn.Module, network: nn.Module) -> None:
    """InputError if two networks have tensors of other names or shapes."""
    mine, theirs = (
        {name: tuple(value.shape) for name, value in each.state_dict().items() if isinstance(value, Tensor)}
        for each in (network, grown)
    )
    for name in (*theirs, *mine):
        if mine.get(name) != theirs.get(name):
            raise InputError(
                f"the grown network has {name!r} as {theirs.get(name)}, where the model that gather was given has "
                f"{mine.get(name)}; build the same model"
            )
