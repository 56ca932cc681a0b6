"""Hold the seeds in one network that a person's own loop trains, and in its moving averages. S slots."""

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.blueprints import Blueprint, drawn_with
from esper.kasmina.blueprints.functions import RELU, Pointwise
from esper.kasmina.graft.beside import Units, narrow_copy
from esper.kasmina.graft.grafted import Reading, bank_at, holders, plant, planted_at, uproot
from esper.kasmina.graft.grown import is_grafted, prefix_behind, sites_of
from esper.kasmina.graft.planted import Bank, Mode, Planted, Recipe, Seat
from esper.kasmina.graft.sharding import is_sharded, placed, reshard, shard_like
from esper.kasmina.graft.stacks import IN_BLOCK, copy_of_block, own_parameters, seed_of
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.actions import Blend
from esper.leyline.lifecycle.slots import Site
from esper.leyline.lifecycle.stages import Stage
from esper.leyline.lifecycle.view import Bools, Seeds
from esper.tolaria.live.groups import Groups, Named
from esper.tolaria.live.ranks import Ranks
from esper.tolaria.stacked.compiling import Compilations

GrowthMode = Literal["live", "reserve"]
"""How seeds get into a network: as submodules of their own, or into seats that are there from the start."""


_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has


class Average:
    """Handles a moving average, as torch.optim.swa_utils.AveragedModel or a class of a person's own.

    module: the grafted module with the averaged weights.
    """

    def __init__(self, holder: Any, network: nn.Module) -> None:
        """holder: what the loop updates, with the average as its attribute `module`, or the average itself.

        Raises InputError if it is no average of this grafted network.
        """
        module = getattr(holder, "module", holder)
        if (
            not isinstance(module, nn.Module)
            or not is_grafted(module)
            or dict(sites_of(module)) != dict(sites_of(network))
        ):
            raise InputError(
                "ema has no sites of its own; make it after esper.graft(model), so that it can get the seeds as well"
            )
        if is_sharded(module) != is_sharded(network):
            names = ("the model", "ema") if is_sharded(module) else ("ema", "the model")
            raise InputError(
                f"{names[0]} is whole where {names[1]} is sharded; make ema before fully_shard, and call fully_shard on "
                "ema.module as on the model"
            )
        self.module = module
        self._holder = holder

    def state(self) -> dict[str, Any]:
        """Return copies of the tensors and numbers that are not the module's, by name, such as the number of updates."""
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, _, _, value in self._attributes()
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise InputError if a state is that of another kind of average."""
        own = {name for name, _, _, _ in self._attributes()}
        for name in sorted(own ^ set(state)):
            have = ("has", "lacks") if name in own else ("lacks", "has")
            raise InputError(
                f"ema {have[0]} {name!r}, which the moving average of the saved state {have[1]}; make ema as it was made then"
            )

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, part, attribute, value in list(self._attributes()):
            saved = state[name]
            if isinstance(value, Tensor) and isinstance(saved, Tensor) and value.shape == saved.shape:
                value.copy_(placed(saved, value))
            else:
                setattr(part, attribute, copy.deepcopy(saved))

    def _attributes(self) -> Iterator[tuple[str, Any, str, Any]]:
        """Yield name, owner, attribute and value of each tensor and number around the module; None is a value not set yet."""
        inside = set(self.module.modules())
        parts = self._holder.named_modules() if isinstance(self._holder, nn.Module) else [("", self._holder)]
        for path, part in parts:
            if part in inside:
                continue
            attributes = {name: value for name, value in vars(part).items() if name not in _OF_MODULES}
            if isinstance(part, nn.Module):
                attributes |= part._parameters | part._buffers
            for name, value in attributes.items():
                if value is None or isinstance(value, Tensor | bool | int | float):
                    yield f"{path}.{name}" if path else name, part, name, value


class Grafts:
    """Plants seeds, gives their parameters to the optimizer, and takes both away again.

    In mode 'live' a seed becomes a submodule when it is planted, which changes the graph of a compiled network. In mode 'reserve'
    a seat for each blueprint is at each site from the start (`kasmina.graft.planted`), and a seed that is planted gives its
    weights to the seat. Either way its parameters are in the optimizer from its birth to its removal alone.

    network: the grafted network. averages: its moving averages; their modules `copies` get every seed that it gets.
    compilations: of the process, and changes of the graph by growing.
    """

    def __init__(
        self,
        network: nn.Module,
        averages: Sequence[Average],
        groups: Groups,
        menu: Sequence[Blueprint],
        readings: Sequence[Reading],
        functions: Mapping[str, Pointwise],
        ranks: Ranks,
    ) -> None:
        """`readings` are of the sites, in their order. `functions` are those between the layers that sites span, by site."""
        self.network, self.groups, self.menu = network, groups, tuple(menu)
        self.averages, self.copies = tuple(averages), tuple(each.module for each in averages)
        self.readings, self.ranks, self.reserved = readings, ranks, False
        self.functions = functions
        self.sites: tuple[Site, ...] = tuple(sites_of(network).values())
        self.host = list(network.parameters())
        self._prefixes = tuple(prefix_behind(site.after) for site in self.sites)
        self.compilations = Compilations(network)
        # by site where a further block can be added: parameters of a copy of the site's block that are 0 at birth
        self.blocks: Mapping[str, tuple[str, ...]] = {}
        self.units: Mapping[str, Units] = {}  # by site where a narrow copy of the site's submodule can be added
        self._blueprint_of: dict[str, int] = {}  # by site, of the seeds that are there
        self._handles: list[RemovableHandle] = []
        self._seats: list[Seat] = []  # of the network, while there are any
        self._due = False  # whether the gradients of seats of this backward pass are to be dropped at its end

    def reserve(self, fits: Bools) -> None:
        """Put a seat at each site for each blueprint of the menu that can be planted there, (S, blueprints).

        A seat that no seed has taken computes too, because the graph of the network never changes; its gradients are dropped.
        """
        self.reserved = True
        for slot in np.flatnonzero(fits.any(1)).tolist():
            site, seats = self.sites[slot], {}
            for entry in (self.menu[blueprint] for blueprint in np.flatnonzero(fits[slot]).tolist()):
                made = self.made(slot, entry, Blend.GATE, 0)
                seats[entry.name] = Seat(made.seed, entry.tap, site.stream.kind, site.stream.permutation).train(
                    made.training
                )
                seats[entry.name].recipe = made.recipe
            bank = Bank(seats)
            copies = [copy.deepcopy(bank).requires_grad_(False) for _ in self.copies]
            self._seats += bank.all()
            arrived = partial(_arrived, weakref.ref(self))  # a network that goes on alone keeps no copies of it
            for seat in bank.all():
                for parameter in seat.parameters():
                    self._handles.append(parameter.register_post_accumulate_grad_hook(partial(arrived, seat)))
            for network, own in zip((self.network, *self.copies), (bank, *copies), strict=True):
                plant(network, site.name, own)

    def fits(self, slot: int, entry: Blueprint) -> bool:
        """Return whether a blueprint can be planted at a site."""
        site, reading = self.sites[slot], self.readings[slot]
        copied: Mapping[str, Any] = self.blocks if entry.copies == "behind" else self.units
        if (entry.again and not reading.again) or (entry.copies and site.name not in copied):
            return False
        return reading.widths[entry.tap] > 0 and entry.fits(site.stream.kind, causal=site.causal)

    def cost(self, slot: int, blueprint: int, blend: Blend = Blend.ADD) -> int:
        """Return the parameters of a seed."""
        reads = self.readings[slot].widths[self.menu[blueprint].tap]
        gate = reads + 1 if blend == Blend.GATE else 0
        if copies := self.menu[blueprint].copies:
            site = self.sites[slot]
            block = self.network.get_submodule(site.after)
            if copies == "beside":
                return self.units[site.name].cost(block) + gate
            return sum(parameter.numel() for parameter in own_parameters(block).values()) + gate
        return self.menu[blueprint].parameters(reads, self.sites[slot].stream.width) + gate

    def offers(self) -> tuple[Bools, NDArray[np.int64]]:
        """Return (S, K) which blueprints can be planted at which sites, and their parameters, 0 where they cannot."""
        slots = range(len(self.sites))
        fits = np.array([[self.fits(slot, entry) for entry in self.menu] for slot in slots])
        cost = [[self.cost(slot, k) if fits[slot, k] else 0 for k in range(len(self.menu))] for slot in slots]
        return fits, np.array(cost, np.int64)

    def planted(self) -> dict[str, list[Any]]:
        """Return by site, in the order of the optimizer's groups, the blueprint, the blend and the function of the seed."""
        found = {}
        for name in self.groups.names():
            seed = self.at(name)
            assert seed is not None, "every group of a seed is that of one in the network"
            function = RELU if seed.recipe is None else seed.recipe.function
            found[name] = [self._blueprint_of[name], int(seed.blend), list(function)]
        return found

    def at(self, name: str) -> Planted | None:
        """Return the seed at a site of the network; None where there is none."""
        return planted_at(self.network, name)

    def everywhere(self, name: str) -> list[Planted]:
        """Return the seed at a site of the network, and then of its copies."""
        found = [planted_at(network, name) for network in (self.network, *self.copies)]
        return [each for each in found if each is not None]

    def add(self, slot: int, blueprint: int, blend: Blend, key: int, function: Pointwise | None = None) -> None:
        """Plant a seed that acts on nothing yet, drawn by a key; with another function than that of `made` if one is given."""
        site, entry = self.sites[slot], self.menu[blueprint]
        made = self.made(slot, entry, blend, key, function)
        self.ranks.spread(made.parameters())
        for network in (*self.copies, self.network):
            bank = bank_at(network, site.name)
            if bank is not None:
                bank.seat(entry.name).take(made)
                continue
            own = made if network is self.network else copy.deepcopy(made).requires_grad_(False)
            if is_sharded(network):
                shard_like(own, network)
            plant(network, site.name, own)
        planted = self.at(site.name)
        assert planted is not None, "it was planted"
        self._blueprint_of[site.name] = blueprint
        trained = {id(parameter) for parameter in planted.trained()}
        named = [(path, parameter) for path, parameter in planted.named_parameters() if id(parameter) in trained]
        block = own_parameters(self.network.get_submodule(site.after)) if entry.copies else {}
        like = {f"{IN_BLOCK}{name}": parameter for name, parameter in block.items()}
        self.groups.add(site.name, named, self._beside(site.after), like)
        self.edited()

    def made(self, slot: int, entry: Blueprint, blend: Blend, key: int, function: Pointwise | None = None) -> Planted:
        """Return a seed that is in no network, drawn by a key, on the device of the host and in its dtype.

        A bypass with one hidden layer around two layers has the function that runs between these, so that it is further units.
        """
        site = self.sites[slot]
        reads, function = self.readings[slot].widths[entry.tap], function or self.functions.get(site.name, RELU)
        after = self.network.get_submodule(site.after)
        like = next((p for p in (*after.parameters(), *self.host) if p.is_floating_point()), None)
        if entry.copies:
            counts: Mapping[str, Mapping[str, int]] = {}
            if entry.copies == "beside":
                units = self.units[site.name]
                block, counts = narrow_copy(after, units, key), units.counted(units.number)
            else:
                block = copy_of_block(after, self.blocks[site.name])
            recipe = Recipe(site, entry.name, reads, counts=counts)
            return seed_of(entry, recipe, blend, block).train(after.training)
        with drawn_with(key):
            made = seed_of(entry, Recipe(site, entry.name, reads, function), blend)
        return (made if like is None else made.to(like.device, like.dtype)).train(after.training)

    def free(self, name: str) -> None:
        """Remove a seed and all that the optimizer remembers of it."""
        self.groups.remove(name)
        for network in (self.network, *self.copies):
            planted = planted_at(network, name)
            if isinstance(planted, Seat):
                planted.free()
            else:
                uproot(network, name)
        del self._blueprint_of[name]
        self.edited()

    def join(self, name: str) -> None:
        """Take a seed, whose block is a member of its stack by now, off its site; its parameters stay in the optimizer."""
        self.groups.join(name)
        for network in (self.network, *self.copies):
            uproot(network, name)
        del self._blueprint_of[name]
        self.edited()

    def rebuild(self, seeds: Mapping[str, Sequence[Any]]) -> None:
        """Make these the only seeds, as `planted` returned them, in this order; the caller fills in their weights.

        A state of an earlier version names no function: every seed had the ReLU.
        """
        for name in list(self.planted()):
            self.free(name)
        slots = {site.name: slot for slot, site in enumerate(self.sites)}
        for name, (blueprint, blend, *functions) in seeds.items():
            self.add(slots[name], blueprint, Blend(blend), 0, tuple(functions[0]) if functions else RELU)

    def settle(self) -> None:
        """Replace the seats of every site by the seed that is planted in one of them, if there is one."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seats.clear()
        for network in (self.network, *self.copies) if self.reserved else ():
            for site in self.sites:
                seat = planted_at(network, site.name)
                if bank_at(network, site.name) is not None:
                    uproot(network, site.name)
                if isinstance(seat, Seat):
                    plant(network, site.name, seat.planted())

    def doses(self, dose: NDArray[np.float32]) -> None:
        """Let the seeds act at these doses (S,), for a measurement."""
        for slot, site in enumerate(self.sites):
            planted = self.at(site.name)
            if planted is not None:
                planted.mode = Mode.ON if dose[slot] > 0 else Mode.OFF
                planted.alpha.fill_(float(dose[slot]))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore what the seeds do after a measurement that changes it."""
        found = [self.at(site.name) for site in self.sites]
        before = [(each, each.mode, each.alpha.clone()) for each in found if each is not None]
        try:
            yield
        finally:
            for each, mode, alpha in before:
                each.mode = mode
                each.alpha.copy_(alpha)

    def kept(self, seeds: Seeds) -> dict[str, Planted]:
        """Return by submodule each seed that is part of the network for good, also behind `trim`, but no folded one."""
        held, found = holders(self.network), dict[str, Planted]()
        for slot, site in enumerate(self.sites):
            here = held.get(site.after)
            seed = here.taken() if isinstance(here, Bank) else here
            if seeds.stage[0, slot] == Stage.FOSSILIZED and seed is not None:
                found[site.after] = seed
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the network and its copies, by name, without free seats; they share memory."""
        found: dict[str, Tensor] = {}
        for first, network, named in self._named():
            seats = [seat for seat in _seats(network) if not seat.taken]
            free = {id(tensor) for seat in seats for tensor in (*seat.parameters(), *seat.buffers())}
            found |= {first + name: tensor for name, tensor in named if id(tensor) not in free}
        return found

    def tensors_with(self, seeds: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        """Return what `tensors` would return behind `rebuild`; tensors of seeds that are not there have any values."""
        slots = {site.name: slot for slot, site in enumerate(self.sites)}
        found: dict[str, Tensor] = {}
        for first, network, named in self._named():
            found |= {first + name: tensor for name, tensor in named if not self.holds(name)}
            for site, (blueprint, blend, *_) in seeds.items():
                entry, bank = self.menu[blueprint], bank_at(network, site)
                seed: nn.Module = (
                    self.made(slots[site], entry, Blend(blend), 0) if bank is None else bank.seat(entry.name)
                )
                here = prefix_behind(self.sites[slots[site]].after) + ("" if bank is None else f"seats.{entry.name}.")
                for name, tensor in (*seed.named_parameters(), *seed.named_buffers()):
                    found[first + here + name] = tensor
        return found

    def holds(self, name: str) -> bool:
        """Return whether a parameter or buffer of this name in the network is that of a seed at a site."""
        return name.startswith(self._prefixes)

    def names(self) -> dict[Tensor, str]:
        """Return the name of every parameter that the optimizer holds; one that is not the network's is named by its group."""
        reshard(self.network)
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.network.named_parameters()}
        for index, group in enumerate(self.groups.optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                names.setdefault(parameter, f"group {index}, parameter {place}")
        return names

    def trained_params(self) -> int:
        """Count the parameters that require a gradient, of the host and of the seeds that are there."""
        seats = _seats(self.network)
        learning = {id(parameter) for seat in seats if seat.learns for parameter in seat.trained()}
        idle = {id(parameter) for seat in seats for parameter in seat.parameters()} - learning
        return sum(
            parameter.numel()
            for parameter in self.network.parameters()
            if parameter.requires_grad and id(parameter) not in idle
        )

    def edited(self) -> None:
        """Note that what a network without seats computes is another thing now."""
        if not self.reserved:
            self.compilations.changed()

    # Inside.

    def _named(self) -> Iterator[tuple[str, nn.Module, list[tuple[str, Tensor]]]]:
        """Yield the network and its copies: how the names of its tensors begin, and its parameters and buffers by name."""
        for index, network in enumerate((self.network, *self.copies)):
            reshard(network)
            named = [*network.named_parameters(), *network.named_buffers()]
            yield f"copy.{index}." if index else "", network, named

    def _drop_later(self) -> None:
        if self.ranks.size > 1 and not self._due:
            self._due = True
            # DistributedDataParallel fills in gradients in a callback of its own, which is queued when the first of these
            # callbacks runs: the second drops them behind it.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._drop))

    def _drop(self) -> None:
        self._due = False
        for seat in self._seats:
            for parameter in seat.parameters():
                if seat.mode != Mode.ON or seat.drops(parameter):
                    parameter.grad = None

    def _beside(self, path: str) -> list[Named]:
        """Return the parameters of the host, from those of a submodule outwards through the modules around it.

        Embedding tables come last: a seed multiplies by its matrices as a Linear does, and recipes that decay matrices often
        leave tables out.
        """
        host = {id(parameter) for parameter in self.host}
        tables = {
            id(part.weight) for part in self.network.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        }
        parts = path.split(".") if path else []
        modules = [self.network.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
        found = [named for module in modules for named in module.named_parameters() if id(named[1]) in host]
        return sorted(found, key=lambda named: id(named[1]) in tables)


def _arrived(grafts: "weakref.ref[Grafts]", seat: Seat, parameter: Tensor) -> None:
    """Drop a gradient that is of no use as soon as it is there."""
    if seat.drops(parameter):
        parameter.grad = None
    if (own := grafts()) is not None:
        own._drop_later()


def _seats(network: nn.Module) -> list[Seat]:
    """Return the seats of a network, free or taken."""
    return [part for part in network.modules() if isinstance(part, Seat)]
