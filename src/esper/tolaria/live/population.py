"""Measure and edit one network in a training loop of a person's own, with the seeds grafted into it. S slots, X branches.

The loop trains the host and the seeds that act on it. What is left to do here: births and removals, the training of seeds that
incubate, the measuring, and the way back to an earlier moment.
"""

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.kasmina.blueprints import Blueprint, count, drawn_with
from esper.kasmina.blueprints.functions import RELU, Pointwise
from esper.kasmina.graft.copies import (
    IN_BLOCK,
    Units,
    add_block,
    copy_of_block,
    find_blocks,
    find_units,
    join_units,
    moved_site,
    narrow_copy,
    own_parameters,
    seed_of,
    stack_of,
)
from esper.kasmina.graft.folding import fold, functions_between, is_layer
from esper.kasmina.graft.grafted import bank_at, holders, plant, planted_at, survey, undisturbed, uproot
from esper.kasmina.graft.grown import CHILD, POINT, class_of, prefix_behind, root_of, sites_of, stream_of
from esper.kasmina.graft.planted import Bank, Mode, Planted, Recipe, Seat
from esper.kasmina.graft.sharding import fill, gather, is_sharded, placed, reshard, shard_like
from esper.kasmina.graft.units import resized
from esper.kasmina.lifecycle import Edits, dormant, doses, uprooted
from esper.kasmina.stack.layout import HostTable
from esper.leyline.config.tree import GrowthConfig
from esper.leyline.data.keys import Purpose, scalar
from esper.leyline.lifecycle.slots import Site, Stream
from esper.leyline.lifecycle.view import MISSING, Bools, Seeds, choose
from esper.leyline.lifecycle.vocabulary import ADDED, LIVE, Blend, Stage
from esper.tolaria.live.copies import Average, SeedlessCopy
from esper.tolaria.live.groups import Groups, Named, placed_moments
from esper.tolaria.live.incubation import Incubation
from esper.tolaria.live.missing import missing, read_sites
from esper.tolaria.live.probe import Probe, examples_in
from esper.tolaria.live.ranks import Ranks
from esper.tolaria.live.resize import follow
from esper.tolaria.measure.sensors import participation_ratio
from esper.tolaria.population import Figures, Indices, Keeper, ProbeRequest, TrainedFigures, space_of
from esper.tolaria.runtime import read_packet
from esper.tolaria.stacked.compiling import Compilations

GrowthMode = Literal["live", "reserve"]
"""How seeds get into a network: as submodules of their own, or into seats that are there from the start."""


LOOK = 128
"""Fewest losses from which it is judged whether more are needed: their standard error is then known to a sixteenth of itself."""

BEYOND = 3.0
"""Standard errors, beyond those of the gates, by which a difference must be clear of its limits before all is measured."""


class LivePopulation:
    """Treats a grafted network as a population of one row; implements `tolaria.population.Population`.

    In mode 'live' a seed becomes a submodule when it is planted, which changes the graph of a compiled network. In mode 'reserve'
    a seat for each blueprint is at each site from the start (`kasmina.graft.planted`), and a seed that is planted gives its
    weights to the seat. Either way its parameters are in the optimizer from its birth to its removal alone.

    networks: the grafted network, and the modules `copies` of its moving averages, which get every seed that it gets.
    compilations: of the process, and changes of the graph by growing.
    """

    waits = None  # the loop reads its own batches

    def __init__(
        self,
        network: nn.Module,
        averages: Sequence[Average],
        groups: Groups,
        probe: Probe,
        menu: Sequence[Blueprint],
        config: GrowthConfig,
        ranks: Ranks,
    ) -> None:
        """Raise InputError if a site cannot be one, or where the loss gives no standard error."""
        self.network, self.groups, self.probe_batches, self.config = network, groups, probe, config
        self.averages, self.copies = tuple(averages), tuple(each.module for each in averages)
        self.networks = network, *self.copies
        self.device = probe.device
        self.environment = np.zeros(1, np.int64)
        self.label = f"one {type(network).__name__}"
        self.menu = tuple(menu)
        self.sites: tuple[Site, ...] = tuple(sites_of(network).values())
        self.readings = list(survey(network, lambda: probe.first_output(network)).values())
        self.functions = functions_between(network, lambda: probe.first_output(network))
        with undisturbed(network):
            probe.settle(network)
        reshard(network)
        self.host_params = np.array([count(network)])
        self.set_aside = [np.zeros(0, np.int64)]  # the loop's data are its own
        self.absorbed_seeds = 0  # seeds that are units of layers by now; `table` has what they added
        # Attributes of a person's modules that count units which narrow copies added to, before and now, by path and name.
        self.counts: dict[str, dict[str, tuple[int, int]]] = {}
        self.host = list(network.parameters())
        self._prefixes = tuple(prefix_behind(site.after) for site in self.sites)
        self.compilations = Compilations(network)
        self.reserved = False
        # by site where a further block can be added: parameters of a copy of the site's block that are 0 at birth
        self.blocks: Mapping[str, tuple[str, ...]] = {}
        self.units: Mapping[str, Units] = {}  # by site where a narrow copy of the site's submodule can be added
        self._handles: list[RemovableHandle] = []
        self._seats: list[Seat] = []  # of the network, while there are any
        self._due = False  # whether the gradients of seats of this backward pass are to be dropped at its end
        # By the name of a blueprint that copies the submodule of a site: why it can be planted at no site, by site.
        self.why_no_copy: dict[str, dict[str, str]] = {}
        for entry in {entry.name: entry for entry in self.menu if entry.copies}.values():
            found: Mapping[str, Any] = {}
            if is_sharded(network):
                why = {site.name: f"{entry.name!r} is planted in no sharded network" for site in self.sites}
            elif entry.copies == "behind":
                found, why = find_blocks(network, self.sites, probe.first)
                self.blocks = found
            else:
                found, why = find_units(network, self.sites, probe.first)
                self.units = found
            if not found:
                self.why_no_copy[entry.name] = why
        self.incubation = Incubation(network, groups, probe, config.lifecycle.proximal, ranks)
        self.ranks = ranks
        # By site of each seed on trial; None where the loop gives no batches, or layers became wider since.
        self.seedless: dict[str, SeedlessCopy | None] = {}
        self.passes = 0  # passes of examples that growing took, in this process: see `Growth.passes`
        self.resting = False  # whether seeds that incubate do not learn at present
        self._episode = 0
        self._seeds = dormant(1, len(self.sites))  # that the network follows
        self.table = HostTable(1, len(self.sites), self.menu)
        fits = self.offers()
        self.space = space_of(
            config,
            self.menu,
            (MISSING,) if config.probe.sensors_every else (),
            slots=tuple(site.name for site in self.sites),
            cost=np.where(fits, self.table.cost, 0),
            fits=fits,
            width=np.array([[site.stream.width for site in self.sites]]),
            number=np.zeros(1, np.int64),
            instance=np.zeros(1, np.int64),
            floor=np.full(1, np.nan),
            ceiling=np.full(1, np.nan),
            frozen=np.zeros(1, bool),  # set when growth begins
            stacks=tuple(stack_of(site.after) for site in self.sites) if self.blocks else (),
        )

    def begin(self, instance: Indices, episode: int) -> None:
        """Begin with the network as it is, which has no seeds yet."""
        assert not self.planted(), "an episode begins without seeds"
        self.space = self.space._replace(frozen=np.array([self.trained_params() == 0]))
        self._episode = episode

    def edit(self, changes: Edits, seeds: Seeds, step: int) -> None:
        """Draw and free seeds as the edits say, after `step` steps, and let every seed act as its stage says."""
        for _, slot in changes.freed.tolist():
            self.free(self.sites[slot].name)
        for _, slot in changes.born.tolist():
            key = scalar(self.config.seed, Purpose.BIRTH, 0, self._episode, step, slot)
            self.add(slot, int(seeds.blueprint[0, slot]), Blend(int(seeds.blend[0, slot])), key)
        self.follow(seeds)

    def train(self, seeds: Seeds, *, parameter_norms: bool = False) -> None:
        """Do nothing: the loop that owns the network trains it."""

    def incubate(self, batch: tuple[Any, Any] | None) -> None:
        """Take one step of the seeds that incubate, behind each step of the loop's optimizer.

        Without a batch they learn straight through the host's own passes, from the next one on where they did not so far; with
        the (input, target) of the step, in a pass of their own.
        """
        reshard(self.network)  # the loop may have run the network since its backward pass
        if self.incubation.straight != (batch is None):
            self.incubation.straight = batch is None
            self.follow(self._seeds)
        if not self.incubation.train(batch):
            return
        if batch is not None:  # the weights of the host get no gradient in the pass of a seed that incubates
            each = examples_in(batch[1], batch[0])
            self.passes += each * (
                2 * len(self.incubation.names) + 3 * sum(each is not None for each in self.seedless.values())
            )
        for site, seedless in self.seedless.items():
            if batch is None:
                self.seedless[site] = None
            elif seedless is not None:
                seedless.train(batch, self.probe_batches)

    def probe(self, seeds: Seeds, asked: ProbeRequest) -> Figures:
        trained = self.incubation.norms() if asked.trained else None
        figures: Figures | None = None
        if self.ranks.first or self.ranks.together:
            with undisturbed(self.network), self.restored():
                figures = measure_network(self, seeds, asked, trained)
            reshard(self.network)
        return self.ranks.from_first(figures)

    def sense(self) -> Tensor:
        """Measure (1, S, 1) what is missing at each site where a seed may be planted; nan elsewhere, and in a sharded network."""
        free = [site.name for slot, site in enumerate(self.sites) if self.space.fits[slot].any()]
        names = [] if is_sharded(self.network) else [name for name in free if self.at(name) is None]
        read = read_sites(self.network, names, self._sensed(), self.probe_batches.mean) if names else {}
        absent = torch.full((), torch.nan, device=self.device)
        return torch.stack([missing(read[site.name]) if site.name in read else absent for site in self.sites])[
            None, :, None
        ]

    def _sensed(self) -> Iterator[tuple[Any, Any]]:
        """Yield the batches of the probe, each of which is counted when it is read."""
        for x, y in self.probe_batches.batches():
            self.passes += 2 * examples_in(y, x)
            yield x, y

    def sound(self) -> bool:
        """Return whether every parameter is finite; one read of the device."""
        reshard(self.network)
        return self.ranks.agreed(bool(total(self.network).isfinite()))

    def tainted(self, rows: Indices, step: int) -> list[int]:
        """Return no row: the loop's data are its own."""
        return []

    def limits(self, seeds: Seeds, slots: Indices) -> tuple[float, float] | None:
        """Return between what the rise of the loss is undecided where the one seed in `slots` acts otherwise: its gate, its rent.

        None where several seeds, or none, do, as in a coalition, whose value is compared with those of others.
        """
        if len(slots) != 1:
            return None
        slot, host = int(slots[0]), int(self.host_params[0])
        one = [each[0, slots] for each in (seeds.blueprint, seeds.blend)]
        own = int(self.table.price(np.zeros_like(slots), slots, *one)[0])
        added = int(self.table.added_params(seeds)[0]) + (0 if seeds.stage[0, slot] in ADDED else own)
        whole, rent = max(host, self.space.rent_size) + added, self.space.rent
        price = rent * float(np.log(whole / max(whole - own, 1)))
        # The loss falls with a seed that incubates, and rises without one that acts.
        if seeds.stage[0, slot] == Stage.TRAINING:
            return -price, 0.0
        least = self.config.gates.min_contribution
        return min(least, price), max(least, price)

    def growth(self, rows: Indices, slot: Indices, blueprint: Indices) -> int:
        """Return the bytes that further seeds (n,) take with their gradients and two moments."""
        size = next((parameter.element_size() for parameter in self.host), 4)
        return 4 * size * int(self.table.cost[rows, slot, blueprint].sum())

    def keeper(self, seeds: Seeds) -> Keeper:
        return _KeptNetwork(self, seeds)

    def snapshot(self) -> dict[str, Any]:
        """Return what the incubation has gathered, and the copies that train without a seed."""
        copies = {name: None if own is None else own.state() for name, own in self.seedless.items()}
        return {"live": {"incubation": self.incubation.state(), "twins": copies}}

    def load(self, tree: Mapping[str, Any], instance: Indices, episode: int) -> None:
        """Go on from what `snapshot` gave, once `rebuild` has planted the seeds."""
        self._episode = episode
        self.incubation.load_state(tree["live"]["incubation"])
        self.seedless = {}
        for name, state in tree["live"]["twins"].items():
            seedless = self.seedless[name] = None if state is None else SeedlessCopy(self.network, self.groups, name)
            if seedless is not None:
                seedless.load_state(state)

    # Seeds.

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
            for network, own in zip(self.networks, (bank, *copies), strict=True):
                plant(network, site.name, own)

    def offers(self) -> Bools:
        """Return (S, K) which blueprints can be planted at which sites, and note in the table what they read and add there."""
        fits = np.zeros((len(self.sites), len(self.menu)), bool)
        for slot, (site, reading) in enumerate(zip(self.sites, self.readings, strict=True)):
            block = self.network.get_submodule(site.after)
            for k, entry in enumerate(self.menu):
                copied: Mapping[str, Any] = self.blocks if entry.copies == "behind" else self.units
                possible = (reading.again or not entry.again) and (site.name in copied or not entry.copies)
                reads = reading.widths[entry.tap]
                if not (possible and reads > 0 and entry.fits(site.stream.kind, causal=site.causal)):
                    continue
                if entry.copies == "beside":
                    cost = self.units[site.name].cost(block)
                elif entry.copies:
                    cost = sum(parameter.numel() for parameter in own_parameters(block).values())
                else:
                    cost = entry.parameters(reads, site.stream.width)
                fits[slot, k], self.table.reads[0, slot, k], self.table.cost[0, slot, k] = True, reads, cost
        return fits

    def planted(self) -> dict[str, list[Any]]:
        """Return by site, in the order of the optimizer's groups, the blueprint, blend, function and units of the seed."""
        found, places = {}, {(entry.name, entry.kind): place for place, entry in enumerate(self.menu)}
        for name in self.groups.names():
            seed = self.at(name)
            assert seed is not None, "every group of a seed is that of one in the network"
            assert seed.recipe is not None, "it was made from one"
            blueprint = places[seed.recipe.blueprint, seed.kind]
            found[name] = [blueprint, int(seed.blend), list(seed.recipe.function), seed.units]
        return found

    def at(self, name: str) -> Planted | None:
        """Return the seed at a site of the network; None where there is none."""
        return planted_at(self.network, name)

    def everywhere(self, name: str) -> list[Planted]:
        """Return the seed at a site of the network, and then of its copies."""
        found = [planted_at(network, name) for network in self.networks]
        return [each for each in found if each is not None]

    def add(
        self, slot: int, blueprint: int, blend: Blend, key: int, function: Pointwise | None = None, units: int = 0
    ) -> None:
        """Plant a seed that acts on nothing yet, drawn by a key.

        function, units: others than those of `made`, where they are given.
        """
        site, entry = self.sites[slot], self.menu[blueprint]
        made = self.made(slot, entry, blend, key, function, units)
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
        trained = {id(parameter) for parameter in planted.trained()}
        named = [(path, parameter) for path, parameter in planted.named_parameters() if id(parameter) in trained]
        block = own_parameters(self.network.get_submodule(site.after)) if entry.copies else {}
        like = {f"{IN_BLOCK}{name}": parameter for name, parameter in block.items()}
        self.groups.add(site.name, named, self._nearest(site.after), like)
        self.edited()

    def made(
        self,
        slot: int,
        entry: Blueprint,
        blend: Blend,
        key: int,
        function: Pointwise | None = None,
        number: int = 0,
    ) -> Planted:
        """Return a seed that is in no network, drawn by a key, on the device of the host and in its dtype.

        A bypass with one hidden layer around two layers has the function that runs between these, so that it is further units.
        """
        site = self.sites[slot]
        after, block = self.network.get_submodule(site.after), None
        counts: Mapping[str, Mapping[str, int]] = {}
        if entry.copies == "beside":
            units = self.units[site.name]
            number = number or units.number  # its submodule may have had fewer when it was planted
            block, counts = narrow_copy(after, units._replace(number=number), key), units.counted(number)
        elif entry.copies:
            block = copy_of_block(after, self.blocks[site.name])
        elif function is None:
            function = self.functions.get(site.name)
        recipe = Recipe(site, entry.name, self.readings[slot].widths[entry.tap], function or RELU, counts)
        with drawn_with(key):
            made = seed_of(entry, recipe, blend, block)
        if block is not None:
            made.units = number
        elif (like := next((p for p in (*after.parameters(), *self.host) if p.is_floating_point()), None)) is not None:
            made.to(like.device, like.dtype)
        return made.train(after.training)

    def settle(self) -> None:
        """Replace the seats of every site by the seed that is planted in one of them, if there is one."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seats.clear()
        for network in self.networks if self.reserved else ():
            for site in self.sites:
                seat = planted_at(network, site.name)
                if bank_at(network, site.name) is not None:
                    uproot(network, site.name)
                if isinstance(seat, Seat):
                    plant(network, site.name, seat.planted())

    def act_at(self, dose: NDArray[np.float32]) -> None:
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
            for site, (blueprint, blend, _, units) in seeds.items():
                entry, bank = self.menu[blueprint], bank_at(network, site)
                seed: nn.Module = (
                    self.made(slots[site], entry, Blend(blend), 0, None, units)
                    if bank is None
                    else bank.seat(entry.name)
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

    def free(self, name: str) -> None:
        """Remove a seed and all that was remembered of it."""
        self.incubation.forget(name)
        self.seedless.pop(name, None)
        for seedless in filter(None, self.seedless.values()):
            seedless.forget(name)
        self.groups.remove(name)
        for network in self.networks:
            planted = planted_at(network, name)
            if isinstance(planted, Seat):
                planted.free()
            else:
                uproot(network, name)
        self.edited()

    def fold(self, name: str) -> str | None:
        """Fold a seed into its layers, in the network and its averages, if their outputs on the probe allow it.

        Returns None if it was folded, otherwise why it was not.
        Layers become wider in one process alone: DistributedDataParallel and `fully_shard` know the sizes of parameters.
        """
        passes = self.probe_batches.passes() if self.ranks.first or self.ranks.together else []
        before, planted = dict(self.network.named_parameters()), self.at(name)
        if planted is None or planted.copies != "beside":
            why_not = fold(self.networks, name, passes, self.ranks.agreed, pairs=self._alone)
        elif not self._alone:
            why_not = "units are added in one process alone"
        elif (units := self.units.get(name)) is None:
            why_not = "its submodule has no units any more that can be added to"
        elif (why_not := join_units(self.networks, name, units, passes)) is None:
            for path, own in units.counts.items():
                where = f"{sites_of(self.network)[name].after}.{path}".strip(".")
                part = self.network.get_submodule(where)
                # A layer's counts follow from its weights.
                if own and not is_layer(part) and not class_of(part).__module__.startswith("torch."):
                    first = self.counts.get(where, {})
                    now = {each: (first.get(each, (value,))[0], vars(part)[each]) for each, value in own.items()}
                    self.counts[where] = first | now
        follow([self.groups.optimizer], before, dict(self.network.named_parameters()))
        return why_not

    def add_block(self, name: str) -> str | None:
        """Make a seed that is a block a member of its stack, in the network and its averages, if the outputs on the probe stay.

        Returns None if it is one, otherwise why not. The sites and seeds behind it then have other places.
        """
        passes = self.probe_batches.passes() if self.ranks.first else []
        if (why_not := add_block(self.networks, name, passes, self.ranks.from_first)) is not None:
            return why_not
        self.groups.join(name)  # its parameters stay in the optimizer
        for network in self.networks:
            uproot(network, name)
        self.edited()
        stack, place = stack_of(sites_of(self.network)[name].after)
        moved = {each.name: moved_site(each, stack, place + 1) for each in self.sites}
        for network in self.networks:
            root_of(network).sites = {site: moved[site] for site in sites_of(network)}
            for seed in holders(network).values():
                if isinstance(seed, Planted) and seed.recipe is not None:
                    seed.recipe = seed.recipe._replace(site=moved_site(seed.recipe.site, stack, place + 1))
        self.sites = tuple(moved.values())
        return None

    def absorb(self, slot: int) -> bool:
        """Make a kept seed further units of the two layers that its site spans, if the outputs on the probe stay; return whether.

        The site is free then, and its streams and prices are those of the wider layers. Not for networks of several processes.
        """
        site, planted = self.sites[slot], self.at(self.sites[slot].name)
        is_copy = planted is not None and planted.copies == "beside"
        if (site.around == site.after and not is_copy) or not self._alone:
            return False
        before, seed = count(self.network), count(self.network.get_submodule(site.after).get_submodule(CHILD))
        if self.fold(site.name) is not None:
            return False
        self.free(site.name)
        self.seedless = dict.fromkeys(self.seedless)
        self.absorbed_seeds += 1
        self.table.absorbed += count(self.network) - before + seed
        self.resurvey()
        return True

    def resurvey(self) -> None:
        """Measure the sites anew, behind a change of the host's layers."""
        with self.restored():
            self.act_at(np.zeros(len(self.sites), np.float32))
            readings = survey(self.network, lambda: self.probe_batches.first_output(self.network), wider=True)
        for network in self.copies:
            root_of(network).sites = sites_of(self.network)
        self.sites = tuple(sites_of(self.network).values())
        self.readings = list(readings.values())
        self.host = [p for name, p in self.network.named_parameters() if not self.holds(name)]
        if any(entry.copies == "beside" for entry in self.menu):
            self.units, _ = find_units(self.network, self.sites, self.probe_batches.first)
        fits, cost = self.offers(), self.table.cost
        affordable = cost[0] <= (self.config.governor.param_limit or np.inf) * self.host_params[0]
        width = np.array([[site.stream.width for site in self.sites]])
        self.space = self.space._replace(fits=fits & affordable, cost=np.where(fits, cost, 0), width=width)

    @contextmanager
    def widths_of(
        self,
        shapes: Mapping[str, Sequence[int]],
        tensors: Mapping[str, Tensor],
        counts: Mapping[str, Mapping[str, int]],
    ) -> Iterator[None]:
        """Give the layers of the network and of its averages the widths of saved tensors, unless the block fails.

        shapes: of each parameter that had become larger, before. counts: as for `resized`.
        """
        if not shapes:
            yield
            return
        optimizer = self.groups.optimizer
        before, moments = dict(self.network.named_parameters()), dict(optimizer.state)
        sites, after = sites_of(self.network), before
        try:
            with ExitStack() as wider:
                for index, network in enumerate(self.networks):
                    first = f"copy.{index}." if index else ""
                    own = {name.removeprefix(first): each for name, each in tensors.items() if name.startswith(first)}
                    wider.enter_context(resized(network, shapes, own, counts))
                after = dict(self.network.named_parameters())
                follow([optimizer], before, after)
                self.resurvey()
                yield
        except BaseException:
            follow([optimizer], after, before)
            optimizer.state.update(moments)
            for network in self.networks:
                root_of(network).sites = sites
            self.resurvey()
            raise

    def rebuild(self, seeds: Mapping[str, Sequence[Any]]) -> None:
        """Make these the only seeds, as `planted` returned them, in this order; the caller fills in their weights."""
        reshard(self.network)
        for name in list(self.planted()):
            self.free(name)
        slots = {site.name: slot for slot, site in enumerate(self.sites)}
        for name, (blueprint, blend, function, units) in seeds.items():
            self.add(slots[name], blueprint, Blend(blend), 0, tuple(function), units)

    def follow(self, seeds: Seeds) -> None:
        """Let every seed act as its stage says."""
        self._seeds = seeds
        isolated = self.config.lifecycle.isolation == "isolated"
        compares = self.config.gates.twins and self._alone and not self.reserved  # seeds on trial
        incubating: list[str] = []
        acting: list[nn.Parameter] = []
        for slot, site in enumerate(self.sites):
            planted = self.at(site.name)
            if planted is None:
                continue
            stage, alpha = Stage(int(seeds.stage[0, slot])), float(seeds.alpha[0, slot])
            acts = stage in ADDED and alpha > 0
            learns = stage == Stage.TRAINING and not self.resting
            straight = learns and self.incubation.straight
            attached = not isolated or stage == Stage.FOSSILIZED
            mode = Mode.ON if acts else Mode.STRAIGHT if straight else Mode.OFF
            frozen = bool(seeds.doomed[0, slot])
            if (planted.mode, planted.attached, planted.learns) != (mode, attached, not frozen):
                self.edited()
            for each in self.everywhere(site.name):
                each.mode, each.attached = mode, attached
                each.alpha.fill_(alpha if acts else 0.0)
            planted.learn(not frozen)
            if stage not in LIVE or frozen:
                self.seedless.pop(site.name, None)
            elif site.name not in self.seedless and acts and compares:
                self.seedless[site.name] = SeedlessCopy(self.network, self.groups, site.name)
            if learns:
                incubating.append(site.name)
            elif acts and not frozen:
                acting += planted.trained()
        self.incubation.follow(incubating)
        if not self.reserved:  # seats are parameters that DistributedDataParallel knows
            self.ranks.share_gradients([*acting, *self.incubation.alone])

    # Inside.

    def _named(self) -> Iterator[tuple[str, nn.Module, list[tuple[str, Tensor]]]]:
        """Yield the network and its copies: how the names of its tensors begin, and its parameters and buffers by name."""
        for index, network in enumerate(self.networks):
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

    def _nearest(self, path: str) -> list[Named]:
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

    @property
    def _alone(self) -> bool:
        """Whether one process has the whole network, and no wrapper knows its parameters."""
        return self.ranks.size == 1 and self.ranks.wrapper is None and not is_sharded(self.network)


def _arrived(population: "weakref.ref[LivePopulation]", seat: Seat, parameter: Tensor) -> None:
    """Drop a gradient that is of no use as soon as it is there."""
    if seat.drops(parameter):
        parameter.grad = None
    if (own := population()) is not None:
        own._drop_later()


def _seats(network: nn.Module) -> list[Seat]:
    """Return the seats of a network, free or taken."""
    return [part for part in network.modules() if isinstance(part, Seat)]


class _KeptNetwork:
    """Keeps the host and its fossils of an earlier moment; implements `tolaria.population.Keeper`."""

    def __init__(self, population: LivePopulation, seeds: Seeds) -> None:
        self.population, self.seeds = population, seeds
        self.step = np.full(1, -1, np.int64)
        self.tensors: dict[str, Tensor] = {}
        self.moments: dict[str, dict[str, Any]] = {}
        self.averages: list[dict[str, Any]] = []

    def take(self, seeds: Seeds, rows: Bools, step: int) -> None:
        if not rows[0]:
            return
        self.seeds, self.step[0] = seeds, step
        unfinished: set[int] = set()  # the tensors of all seeds that are not part of the network for good
        for slot, site in enumerate(self.population.sites):
            for planted in self.population.everywhere(site.name) if seeds.stage[0, slot] != Stage.FOSSILIZED else ():
                unfinished |= {id(tensor) for tensor in (*planted.parameters(), *planted.buffers())}
        self.tensors = {
            name: tensor.detach().clone()
            for name, tensor in self.population.tensors().items()
            if id(tensor) not in unfinished
        }
        names = {p: name for p, name in self.population.names().items() if id(p) not in unfinished}
        self.moments = self.population.groups.moments(names)
        self.averages = [each.state() for each in self.population.averages]

    def put_back(self, seeds: Seeds, rows: Bools) -> Seeds:
        """Make the network what it was; the schedule goes on from where it is."""
        if not rows[0]:
            return seeds
        kept = uprooted(self.seeds, rows, self.population.config.lifecycle.embargo)
        for slot, site in enumerate(self.population.sites):
            if kept.stage[0, slot] != Stage.FOSSILIZED and self.population.at(site.name) is not None:
                self.population.free(site.name)
        for name, tensor in self.population.tensors().items():
            fill(tensor, self.tensors[name])
        self.population.groups.set_moments(self.population.names(), self.moments)
        for average, state in zip(self.population.averages, self.averages, strict=True):
            average.load_state(state)
        self.population.follow(kept)
        return choose(rows, kept, seeds)

    def state(self, now: int) -> dict[str, Any]:
        return {
            "seeds": self.seeds._asdict(),
            "step": self.step,
            "tensors": dict(self.tensors),
            "moments": self.moments,
            "averages": self.averages,
        }

    def load_state(self, state: Mapping[str, Any], seeds: Seeds) -> None:
        self.seeds, self.step = Seeds(**state["seeds"]), np.array(state["step"])
        own, names = self.population.tensors(), self.population.names()
        self.tensors = {name: placed(tensor, own[name]) for name, tensor in state["tensors"].items()}
        self.moments = {
            name: placed_moments(state["moments"][name], parameter)
            for parameter, name in names.items()
            if name in state["moments"]
        }
        self.averages = list(state["averages"])


@torch.no_grad()
def measure_network(
    population: "LivePopulation", seeds: Seeds, asked: ProbeRequest, norms: Mapping[str, Tensor] | None
) -> Figures:
    """Return every figure that was asked for, in one read of the device, and one for each early look (`risen_by`).

    The network is in evaluation mode. The metric is minus the loss. `norms` are those of the seeds that incubate, by site; None
    leaves the training out.
    """
    assert not asked.validation, "a network in a loop has no validation split"
    population.act_at(doses(seeds)[0])
    with _listening(population.network, population.sites) as heard:
        batches = population.probe_batches.batches()
        own, output_spread = population.probe_batches.see(population.network, batches)
    examples = sum(examples_in(y, x) for x, y in batches)
    population.passes += examples * (1 + sum(each is not None for each in population.seedless.values()))
    means, pairs = [own.mean()], []
    for dose in asked.branches.dose:
        limits = population.limits(seeds, np.flatnonzero(dose != doses(seeds)[0]))
        population.act_at(dose)
        differences = risen_by(population, own, batches, limits)
        means.append(means[0] + differences.mean())
        pairs.append(_paired(differences))
    rise = torch.stack(pairs) if pairs else own.new_zeros(0, 2)
    population.act_at(doses(seeds)[0])
    seedless_rise = own.new_full((len(population.sites), 2), torch.nan)
    for slot, site in enumerate(population.sites):
        if (seedless := population.seedless.get(site.name)) is not None:
            seedless_rise[slot] = _paired(population.probe_batches.see(seedless, batches)[0] - own)
    loss: Any = torch.stack(means)
    ratios = [  # nan where nothing flowed
        participation_ratio(torch.cat(each, 1))[0].to(own) if each else own.new_full((), torch.nan) for each in heard
    ]
    trained = None
    if norms is not None:
        absent = own.new_full((), torch.nan)
        of_seeds: Any = torch.stack([norms.get(site.name, absent).to(own) for site in population.sites])[None]
        known = np.array([[site.name in norms for site in population.sites]])
        trained = TrainedFigures(loss[:1], None, of_seeds, known)
    figures: dict[str, Any] = {
        "loss": loss[:1],
        "metric": -loss[:1],
        "branch_loss": loss[1:],
        "branch_metric": -loss[1:],
        "loss_rise": rise,
        "metric_fall": rise,
        "seedless_rise": seedless_rise[None],
        "participation": torch.stack(ratios)[None],
        "signs": torch.stack([_paired(own)[1], output_spread.to(own), total(population.network).to(own)])[None],
        "sensors": population.sense() if asked.sensors else None,
    }
    return read_packet(Figures(**figures, trained=trained, finite=np.ones(1, bool) if asked.finite else None))


def risen_by(
    population: "LivePopulation", own: Tensor, batches: Sequence[tuple[Any, Any]], limits: tuple[float, float] | None
) -> Tensor:
    """Return (n,) the losses of the network as it acts now less those of `own` (N,), on as many batches as decide, n <= N.

    limits: least and largest number with which the mean difference is going to be compared; None where all batches are
    measured. Behind a quarter and behind a half of the batches, evenly apart, no more are measured if the mean is below the
    least or above the largest limit by more than `BEYOND` + z standard errors, z being the larger of `gates.gain_z` and
    `gates.contribution_z`, and if at least `LOOK` losses are known. Looking early lets more differences that are at a limit pass
    by chance. With a bound that far out (Haybittle, British Journal of Radiology 1971; Peto et al., British Journal of Cancer
    1976) these are .0013 at each of the two early looks if z is 0, and .00003 if it is 1, as by default, beside the .16 that a
    gate of one standard error lets pass anyhow.
    """
    probe = population.probe_batches
    counts = [1 if probe.way == "whole" else examples_in(y, x) for x, y in batches]
    each = own.split(counts)
    z = BEYOND + max(population.config.gates.gain_z, population.config.gates.contribution_z)
    looks = [range(0, len(batches), 4), range(2, len(batches), 4), range(1, len(batches), 2)]
    known: dict[int, Tensor] = {}
    early = limits is not None and len(batches) > 2 and population.ranks.size == 1
    for look in looks if early else [range(len(batches))]:
        chosen = [batches[index] for index in look]
        losses, _ = probe.see(population.network, chosen)
        population.passes += sum(examples_in(y, x) for x, y in chosen)
        for index, part in zip(look, losses.split([counts[index] for index in look]), strict=True):
            known[index] = part - each[index]
        differences = torch.cat([known[index] for index in sorted(known)])
        if limits is not None and len(known) < len(batches) and len(differences) >= LOOK:
            mean, error = _paired(differences).tolist()
            if mean - z * error > limits[1] or mean + z * error < limits[0]:
                break
    return differences


@torch.no_grad()
def total(network: nn.Module) -> Tensor:
    """Sum the largest values of all parameters; the sum () is finite if each parameter is."""
    parameters: list[Tensor] = [own for own in network.parameters() if own.is_floating_point() or own.is_complex()]
    if is_sharded(network):
        return torch.stack([gather(own.sum(dtype=torch.float32)).double() for own in parameters]).sum()
    return torch.stack([largest.double() for largest in torch._foreach_norm(parameters, torch.inf)]).sum()


@contextmanager
def _listening(network: nn.Module, sites: tuple[Site, ...]) -> Iterator[list[list[Tensor]]]:
    """Record the features of the stream at each site, in front of any seed, at positions of every example of every batch."""
    points = [network.get_submodule(site.after).__dict__[POINT] for site in sites]
    heard = [list[Tensor]() for _ in sites]

    def keep(stream: Stream, features: list[Tensor], given: Any, version: Any, output: Any) -> None:
        h = stream.arranged(stream_of(output).detach())
        features.append(stream.positions(h[None].float()).clone())  # a module behind it may work in place

    for point, site, features in zip(points, sites, heard, strict=True):
        point.tape = partial(keep, site.stream, features)
    try:
        yield heard
    finally:
        for point in points:
            point.tape = None


def _paired(differences: Tensor) -> Tensor:
    """Return (N,) -> (2,) mean and its standard error."""
    return torch.stack([differences.mean(), differences.std() / len(differences) ** 0.5])
