"""Measure and edit one network in a training loop of a person's own, with the seeds grafted into it. S slots, X branches.

The loop trains the host and the seeds that act on it. What is left to do here: births and removals, the training of seeds that
incubate, the measuring, and the way back to an earlier moment.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.blueprints import Blueprint
from esper.kasmina.graft.beside import find_units, join_units
from esper.kasmina.graft.folding import fold, functions_between, is_layer
from esper.kasmina.graft.grafted import holders, planted_at, survey, undisturbed
from esper.kasmina.graft.grown import CHILD, POINT, class_of, prefix_behind, root_of, sites_of, stream_of
from esper.kasmina.graft.planted import Mode, Planted
from esper.kasmina.graft.recording import call
from esper.kasmina.graft.sharding import fill, gather, is_sharded, placed, reshard
from esper.kasmina.graft.stacks import add_block, find_blocks, moved_site, stack_of
from esper.kasmina.graft.widening import resized
from esper.kasmina.lifecycle import Edits, dormant, doses
from esper.leyline.config.tree import GrowthConfig
from esper.leyline.data.keys import Purpose, scalar
from esper.leyline.lifecycle.actions import Blend
from esper.leyline.lifecycle.slots import Site
from esper.leyline.lifecycle.stages import ADDED, LIVE, Stage, among
from esper.leyline.lifecycle.streams import Stream
from esper.leyline.lifecycle.view import MISSING, Bools, Seeds, choose
from esper.tolaria.live.grafts import Average, Grafts
from esper.tolaria.live.groups import Groups, placed_moments
from esper.tolaria.live.incubation import Incubation
from esper.tolaria.live.missing import missing, read_sites
from esper.tolaria.live.probe import Probe, examples_in
from esper.tolaria.live.ranks import Ranks, SharedGradients
from esper.tolaria.live.widening import follow
from esper.tolaria.measure.sensors import participation_ratio
from esper.tolaria.population import Figures, Indices, Keeper, ProbeRequest, TrainedFigures, space_of
from esper.tolaria.runtime import read_packet

LOOK = 128
"""Fewest losses from which it is judged whether more are needed: their standard error is then known to a sixteenth of itself."""

BEYOND = 3.0
"""Standard errors, beyond those of the gates, by which a difference must be clear of its limits before all is measured."""


class Twin:
    """Copies the parameters and buffers that a network has beside one seed, and takes the steps of the loop on the copies.

    Calling it runs the network on the copies, without that seed. Removing a seed from a network that was trained with it
    overstates the worth of the seed, because the rest has come to rely on it.

    site: of the seed that is left out. tensors: the copies by name. Clipping of gradients and a GradScaler are not repeated.
    """

    def __init__(self, network: nn.Module, groups: Groups, site: str, prefix: str) -> None:
        """prefix: with which the names of the seed begin."""
        self.network, self.site = network, site
        held = {id(parameter) for group in groups.optimizer.param_groups for parameter in group["params"]}
        memo: dict[int, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad and id(tensor) in held
            if not name.startswith(prefix) and (trained or not isinstance(tensor, nn.Parameter)):
                own = self.tensors[name] = tensor.detach().clone().requires_grad_(trained)
                memo[id(tensor)] = own
        copies = {id(tensor) for tensor in self.tensors.values()}
        self.optimizer: torch.optim.Optimizer = copy.deepcopy(groups.optimizer, memo)
        self._groups = list(zip(self.optimizer.param_groups, groups.optimizer.param_groups, strict=True))
        for mine, _ in self._groups:
            mine.pop("param_names", None)
            mine["params"] = [parameter for parameter in mine["params"] if id(parameter) in copies]
        for parameter in [each for each in self.optimizer.state if id(each) not in copies]:
            del self.optimizer.state[parameter]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the network on the copies, without the seed."""
        planted = planted_at(self.network, self.site)
        assert planted is not None, "a twin lives as long as its seed is on trial"
        mode, planted.mode = planted.mode, Mode.OFF
        try:
            return functional_call(self.network, self.tensors, args, kwargs)
        finally:
            planted.mode = mode

    def train(self, batch: tuple[Any, Any], probe: Probe) -> None:
        """Take the step of the loop on its batch."""
        for mine, theirs in self._groups:  # a scheduler may have changed the rates
            mine.update({key: value for key, value in theirs.items() if key not in ("params", "param_names")})
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if not trained:  # beside the seed everything is frozen
            return
        devices = sorted({parameter.device.index for parameter in trained if parameter.is_cuda})
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"), torch.enable_grad():
            loss = probe.mean(call(self, batch[0]), batch[1])
            if not loss.requires_grad:
                return
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        maximizes = any(group.get("maximize", False) for group in self.optimizer.param_groups)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = -gradient if maximizes and gradient is not None else gradient
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forget(self, prefix: str) -> None:
        """Leave out another seed too, which was removed."""
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(prefix)}

    def state(self) -> dict[str, Any]:
        """Return the copies and what the optimizer remembers of them, by name."""
        moments = self.optimizer.state
        return {
            "tensors": {name: tensor.detach().clone() for name, tensor in self.tensors.items()},
            "moments": {name: copy.deepcopy(moments[own]) for name, own in self.tensors.items() if own in moments},
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if name in state["tensors"]}
        for name, own in self.tensors.items():
            own.copy_(state["tensors"][name])
            self.optimizer.state.pop(own, None)
            if name in state["moments"]:
                self.optimizer.state[own] = placed_moments(state["moments"][name], own)


class LivePopulation:
    """Treats a grafted network as a population of one row; implements `tolaria.population.Population`.

    network: the grafted network. grafts: the seeds in it, and in its moving averages.
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
        shared: SharedGradients,
    ) -> None:
        """Raise InputError if a site cannot be one, or where the loss gives no standard error."""
        self.network, self.groups, self.probe_batches, self.config = network, groups, probe, config
        self.device = probe.device
        self.environment = np.zeros(1, np.int64)
        self.label = f"one {type(network).__name__}"
        self.menu = tuple(menu)
        self.sites: tuple[Site, ...] = tuple(sites_of(network).values())
        readings = list(survey(network, lambda: probe.first_output(network)).values())
        functions = functions_between(network, lambda: probe.first_output(network))
        with undisturbed(network):
            probe.settle(network)
        reshard(network)
        self.host_params = np.array([sum(parameter.numel() for parameter in network.parameters())])
        self.fresh = [np.zeros(0, np.int64)]  # the loop's data are its own
        self.absorbed_seeds = self.absorbed_params = 0  # seeds that are units of layers by now, and what they added
        # Attributes of a person's modules that count units which narrow copies added to, before and now, by path and name.
        self.counts: dict[str, dict[str, tuple[int, int]]] = {}
        self.grafts = Grafts(network, averages, groups, self.menu, readings, functions, ranks)
        # By the name of a blueprint that copies the submodule of a site: why it can be planted at no site, by site.
        self.why_no_copy: dict[str, dict[str, str]] = {}
        for entry in {entry.name: entry for entry in self.menu if entry.copies}.values():
            found: Mapping[str, Any] = {}
            if is_sharded(network):
                why = {site.name: f"{entry.name!r} is planted in no sharded network" for site in self.sites}
            elif entry.copies == "behind":
                found, why = find_blocks(network, self.sites, probe.first)
                self.grafts.blocks = found
            else:
                found, why = find_units(network, self.sites, probe.first)
                self.grafts.units = found
            if not found:
                self.why_no_copy[entry.name] = why
        self.incubation = Incubation(network, groups, probe, config.lifecycle.proximal, ranks)
        self.ranks, self.shared = ranks, shared
        # By site of each seed on trial; None where the loop gives no batches, or layers became wider since.
        self.twins: dict[str, Twin | None] = {}
        self.passes = 0  # passes of examples that growing took, in this process: see `Growth.passes`
        self.resting = False  # whether seeds that incubate do not learn at present
        self._episode = 0
        self._seeds = dormant(1, len(self.sites))  # that the network follows
        fits, cost = self.grafts.offers()
        self.space = space_of(
            config,
            self.menu,
            (MISSING,) if config.probe.sensors_every else (),
            slots=tuple(site.name for site in self.sites),
            cost=cost[None],
            fits=fits,
            width=np.array([[site.stream.width for site in self.sites]]),
            number=np.zeros(1, np.int64),
            instance=np.zeros(1, np.int64),
            floor=np.full(1, np.nan),
            ceiling=np.full(1, np.nan),
            frozen=np.zeros(1, bool),  # set when growth begins
            stacks=tuple(stack_of(site.after) for site in self.sites) if self.grafts.blocks else (),
        )

    def begin(self, instance: Indices, episode: int) -> None:
        """Begin with the network as it is, which has no seeds yet."""
        assert not self.grafts.planted(), "an episode begins without seeds"
        self.space = self.space._replace(frozen=np.array([self.grafts.trained_params() == 0]))
        self._episode = episode

    def edit(self, changes: Edits, seeds: Seeds, step: int) -> None:
        """Draw and free seeds as the edits say, after `step` steps, and let every seed act as its stage says."""
        for _, slot in changes.freed.tolist():
            self.free(self.sites[slot].name)
        for _, slot in changes.born.tolist():
            key = scalar(self.config.seed, Purpose.BIRTH, 0, self._episode, step, slot)
            self.grafts.add(slot, int(seeds.blueprint[0, slot]), Blend(int(seeds.blend[0, slot])), key)
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
                2 * len(self.incubation.names) + 3 * sum(twin is not None for twin in self.twins.values())
            )
        for site, twin in self.twins.items():
            if batch is None:
                self.twins[site] = None
            elif twin is not None:
                twin.train(batch, self.probe_batches)

    def probe(self, seeds: Seeds, asked: ProbeRequest) -> Figures:
        trained = self.incubation.norms() if asked.trained else None
        figures: Figures | None = None
        if self.ranks.first or self.ranks.together:
            with undisturbed(self.network), self.grafts.restored():
                figures = measure_live(self, seeds, asked, trained)
            reshard(self.network)
        return self.ranks.from_first(figures)

    def sense(self) -> Tensor:
        """Measure (1, S, 1) what is missing at each site where a seed may be planted; nan elsewhere, and in a sharded network."""
        free = [site.name for slot, site in enumerate(self.sites) if self.space.fits[slot].any()]
        names = [] if is_sharded(self.network) else [name for name in free if self.grafts.at(name) is None]
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

    def added_params(self, seeds: Seeds, stages: frozenset[Stage] = ADDED) -> Indices:
        """Return (1,) the parameters of the seeds in the given stages, each counted whole, the gate where it is used."""
        rows, slots = np.nonzero(among(seeds.stage, stages))
        price = self.price(rows, slots, seeds.blueprint[rows, slots].astype(np.int64), seeds.blend[rows, slots])
        return np.array([self.absorbed_params + int(price.sum())])

    def price(self, rows: Indices, slot: Indices, blueprint: Indices, blend: NDArray[np.integer[Any]]) -> Indices:
        return np.array(
            [
                self.grafts.cost(s, k, Blend(b))
                for s, k, b in zip(slot.tolist(), blueprint.tolist(), blend.tolist(), strict=True)
            ],
            np.int64,
        )

    def limits(self, seeds: Seeds, slots: Indices) -> tuple[float, float] | None:
        """Return between what the rise of the loss is undecided where the one seed in `slots` acts otherwise: its gate, its rent.

        None where several seeds, or none, do, as in a coalition, whose value is compared with those of others.
        """
        if len(slots) != 1:
            return None
        slot, host = int(slots[0]), int(self.host_params[0])
        own = self.grafts.cost(slot, int(seeds.blueprint[0, slot]), Blend(int(seeds.blend[0, slot])))
        added = int(self.added_params(seeds)[0]) + (0 if seeds.stage[0, slot] in ADDED else own)
        whole, rent = max(host, self.space.rent_size) + added, self.space.rent
        price = rent * float(np.log(whole / max(whole - own, 1)))
        # The loss falls with a seed that incubates, and rises without one that acts.
        if seeds.stage[0, slot] == Stage.TRAINING:
            return -price, 0.0
        least = self.config.gates.min_contribution
        return min(least, price), max(least, price)

    def growth(self, rows: Indices, slot: Indices, blueprint: Indices) -> int:
        """Return the bytes that further seeds (n,) take with their gradients and two moments."""
        size = next((parameter.element_size() for parameter in self.grafts.host), 4)
        return 4 * size * int(self.price(slot, slot, blueprint, np.full(len(slot), Blend.ADD)).sum())

    def keeper(self, seeds: Seeds) -> Keeper:
        return _Kept(self, seeds)

    def snapshot(self) -> dict[str, Any]:
        """Return which seeds there are, and what the incubation has gathered."""
        twins = {name: None if twin is None else twin.state() for name, twin in self.twins.items()}
        return {"live": {"seeds": self.grafts.planted(), "incubation": self.incubation.state(), "twins": twins}}

    def load(self, tree: Mapping[str, Any], instance: Indices, episode: int) -> None:
        """Go on from what `snapshot` gave, once `rebuild` has planted the seeds."""
        self._episode = episode
        self.incubation.load_state(tree["live"]["incubation"])
        self.twins = {}
        for name, state in tree["live"].get("twins", {}).items():
            twin = self.twins[name] = None if state is None else self._twin(name)
            if twin is not None:
                twin.load_state(state)

    # Seeds.

    def free(self, name: str) -> None:
        """Remove a seed and all that was remembered of it."""
        self.incubation.forget(name)
        self.twins.pop(name, None)
        for twin in filter(None, self.twins.values()):
            twin.forget(self._prefix(name))
        self.grafts.free(name)

    def fold(self, name: str) -> str | None:
        """Fold a seed into its layers, in the network and its averages, if their outputs on the probe allow it.

        Returns None if it was folded, otherwise why it was not.
        Layers become wider in one process alone: DistributedDataParallel and `fully_shard` know the sizes of parameters.
        """
        passes = self.probe_batches.passes() if self.ranks.first or self.ranks.together else []
        before, networks = dict(self.network.named_parameters()), (self.network, *self.grafts.copies)
        planted = self.grafts.at(name)
        if planted is None or planted.copies != "beside":
            why_not = fold(networks, name, passes, self.ranks.agreed, pairs=self._alone)
        elif not self._alone:
            why_not = "units are added in one process alone"
        elif (units := self.grafts.units.get(name)) is None:
            why_not = "its submodule has no units any more that can be added to"
        elif (why_not := join_units(networks, name, units, passes)) is None:
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
        networks = (self.network, *self.grafts.copies)
        passes = self.probe_batches.passes() if self.ranks.first else []
        if (why_not := add_block(networks, name, passes, self.ranks.from_first)) is not None:
            return why_not
        self.grafts.join(name)
        stack, place = stack_of(sites_of(self.network)[name].after)
        moved = {each.name: moved_site(each, stack, place + 1) for each in self.sites}
        for network in networks:
            root_of(network).sites = {site: moved[site] for site in sites_of(network)}
            for seed in holders(network).values():
                if isinstance(seed, Planted) and seed.recipe is not None:
                    seed.recipe = seed.recipe._replace(site=moved_site(seed.recipe.site, stack, place + 1))
        self.sites = self.grafts.sites = tuple(moved.values())
        return None

    def absorb(self, slot: int) -> bool:
        """Make a kept seed further units of the two layers that its site spans, if the outputs on the probe stay; return whether.

        The site is free then, and its streams and prices are those of the wider layers. Not for networks of several processes.
        """
        site, planted = self.sites[slot], self.grafts.at(self.sites[slot].name)
        beside = planted is not None and planted.copies == "beside"
        if (site.around == site.after and not beside) or not self._alone:
            return False
        before = sum(parameter.numel() for parameter in self.network.parameters())
        seed = sum(
            parameter.numel() for parameter in self.network.get_submodule(site.after).get_submodule(CHILD).parameters()
        )
        if self.fold(site.name) is not None:
            return False
        self.free(site.name)
        self.twins = dict.fromkeys(self.twins)
        self.absorbed_seeds += 1
        self.absorbed_params += sum(parameter.numel() for parameter in self.network.parameters()) - before + seed
        self.resurvey()
        return True

    def resurvey(self) -> None:
        """Measure the sites anew, behind a change of the host's layers."""
        with self.grafts.restored():
            self.grafts.doses(np.zeros(len(self.sites), np.float32))
            readings = survey(self.network, lambda: self.probe_batches.first_output(self.network), wider=True)
        for network in self.grafts.copies:
            root_of(network).sites = sites_of(self.network)
        self.sites = tuple(sites_of(self.network).values())
        self.grafts.sites, self.grafts.readings = self.sites, list(readings.values())
        self.grafts.host = [p for name, p in self.network.named_parameters() if not self.grafts.holds(name)]
        if self.grafts.units:
            self.grafts.units, _ = find_units(self.network, self.sites, self.probe_batches.first)
        fits, cost = self.grafts.offers()
        affordable = cost <= (self.config.governor.param_limit or np.inf) * self.host_params[0]
        width = np.array([[site.stream.width for site in self.sites]])
        self.space = self.space._replace(fits=fits & affordable, cost=cost[None], width=width)

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
        networks, optimizer = (self.network, *self.grafts.copies), self.groups.optimizer
        before, moments = dict(self.network.named_parameters()), dict(optimizer.state)
        sites, after = sites_of(self.network), before
        try:
            with ExitStack() as wider:
                for index, network in enumerate(networks):
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
            for network in networks:
                root_of(network).sites = sites
            self.resurvey()
            raise

    def rebuild(self, seeds: Mapping[str, Sequence[Any]]) -> None:
        """Make these the only seeds, in this order; the caller fills in their weights."""
        reshard(self.network)
        for name in self.grafts.planted():
            self.incubation.forget(name)
        self.grafts.rebuild(seeds)

    def follow(self, seeds: Seeds) -> None:
        """Let every seed act as its stage says."""
        self._seeds = seeds
        isolated = self.config.lifecycle.isolation == "isolated"
        twins = self.config.gates.twins and self._alone and not self.grafts.reserved  # of seeds on trial
        incubating: list[str] = []
        acting: list[nn.Parameter] = []
        for slot, site in enumerate(self.sites):
            planted = self.grafts.at(site.name)
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
                self.grafts.edited()
            for each in self.grafts.everywhere(site.name):
                each.mode, each.attached = mode, attached
                each.alpha.fill_(alpha if acts else 0.0)
            planted.learn(not frozen)
            if stage not in LIVE or frozen:
                self.twins.pop(site.name, None)
            elif site.name not in self.twins and acts and twins:
                self.twins[site.name] = self._twin(site.name)
            if learns:
                incubating.append(site.name)
            elif acts and not frozen:
                acting += planted.trained()
        self.incubation.follow(incubating)
        if not self.grafts.reserved:  # seats are parameters that DistributedDataParallel knows
            self.shared.follow([*acting, *self.incubation.alone])

    @property
    def _alone(self) -> bool:
        """Whether one process has the whole network, and no wrapper knows its parameters."""
        return self.ranks.size == 1 and self.shared.wrapper is None and not is_sharded(self.network)

    def _prefix(self, name: str) -> str:
        return prefix_behind(sites_of(self.network)[name].after)

    def _twin(self, name: str) -> Twin:
        return Twin(self.network, self.groups, name, self._prefix(name))


class _Kept:
    """Keeps the host and its fossils of an earlier moment; implements `tolaria.population.Keeper`."""

    def __init__(self, live: LivePopulation, seeds: Seeds) -> None:
        self.live, self.seeds = live, seeds
        self.step = np.full(1, -1, np.int64)
        self.tensors: dict[str, Tensor] = {}
        self.moments: dict[str, dict[str, Any]] = {}
        self.averages: list[dict[str, Any]] = []

    def take(self, seeds: Seeds, rows: Bools, step: int) -> None:
        if not rows[0]:
            return
        self.seeds, self.step[0] = seeds, step
        unfinished: set[int] = set()  # the tensors of all seeds that are not part of the network for good
        for slot, site in enumerate(self.live.sites):
            for planted in self.live.grafts.everywhere(site.name) if seeds.stage[0, slot] != Stage.FOSSILIZED else ():
                unfinished |= {id(tensor) for tensor in (*planted.parameters(), *planted.buffers())}
        self.tensors = {
            name: tensor.detach().clone()
            for name, tensor in self.live.grafts.tensors().items()
            if id(tensor) not in unfinished
        }
        names = {p: name for p, name in self.live.grafts.names().items() if id(p) not in unfinished}
        self.moments = self.live.groups.moments(names)
        self.averages = [each.state() for each in self.live.grafts.averages]

    def put_back(self, seeds: Seeds, rows: Bools, kept: Seeds) -> Seeds:
        """Make the network what it was. Seeds that are not in `kept` are gone; the schedule goes on from where it is."""
        if not rows[0]:
            return seeds
        for slot, site in enumerate(self.live.sites):
            if kept.stage[0, slot] != Stage.FOSSILIZED and self.live.grafts.at(site.name) is not None:
                self.live.free(site.name)
        for name, tensor in self.live.grafts.tensors().items():
            fill(tensor, self.tensors[name])
        self.live.groups.set_moments(self.live.grafts.names(), self.moments)
        for average, state in zip(self.live.grafts.averages, self.averages, strict=True):
            average.load_state(state)
        self.live.follow(kept)
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
        own, names = self.live.grafts.tensors(), self.live.grafts.names()
        self.tensors = {name: placed(tensor, own[name]) for name, tensor in state["tensors"].items()}
        self.moments = {
            name: placed_moments(state["moments"][name], parameter)
            for parameter, name in names.items()
            if name in state["moments"]
        }
        self.averages = list(state["averages"])


@torch.no_grad()
def measure_live(
    live: "LivePopulation", seeds: Seeds, asked: ProbeRequest, norms: Mapping[str, Tensor] | None
) -> Figures:
    """Return every figure that was asked for, in one read of the device, and one for each early look (`risen_by`).

    The network is in evaluation mode. The metric is minus the loss. `norms` are those of the seeds that incubate, by site; None
    leaves the training out.
    """
    assert not asked.validation, "a live network has no validation split"
    live.grafts.doses(doses(seeds)[0])
    with _listening(live.network, live.sites) as heard:
        batches = live.probe_batches.batches()
        own, output_spread = live.probe_batches.see(live.network, batches)
    examples = sum(examples_in(y, x) for x, y in batches)
    live.passes += examples * (1 + sum(twin is not None for twin in live.twins.values()))
    means, pairs = [own.mean()], []
    for dose in asked.branches.dose:
        limits = live.limits(seeds, np.flatnonzero(dose != doses(seeds)[0]))
        live.grafts.doses(dose)
        differences = risen_by(live, own, batches, limits)
        means.append(means[0] + differences.mean())
        pairs.append(_paired(differences))
    rise = torch.stack(pairs) if pairs else own.new_zeros(0, 2)
    live.grafts.doses(doses(seeds)[0])
    beside = own.new_full((len(live.sites), 2), torch.nan)
    for slot, site in enumerate(live.sites):
        if (twin := live.twins.get(site.name)) is not None:
            beside[slot] = _paired(live.probe_batches.see(twin, batches)[0] - own)
    signs = torch.stack([_paired(own)[1], output_spread.to(own), total(live.network).to(own)])
    trained = norms or {}
    participation_ratios = [  # nan where nothing flowed
        participation_ratio(torch.cat(each, 1))[0].to(own) if each else own.new_full((), torch.nan) for each in heard
    ]
    sensors = None
    if asked.sensors:
        sensors = live.sense()
    read = [torch.stack(means), rise, beside, torch.stack(participation_ratios), signs, sensors, *trained.values()]
    loss, risen, beside, participation, sign, sensors, *norms_read = read_packet(read)
    slot_of = {site.name: slot for slot, site in enumerate(live.sites)}
    figures = TrainedFigures(
        loss=loss[:1],
        gradient_norm=None,
        seed_norms=[norm.reshape(1) for norm in norms_read],
        seed_owners=tuple((slot_of[name], np.zeros(1, np.int64)) for name in trained),
    )
    return Figures(
        loss=loss[:1],
        metric=-loss[:1],
        branch_loss=loss[1:],
        branch_metric=-loss[1:],
        loss_rise=risen,
        metric_fall=risen,
        twin_rise=beside[None],
        participation=participation[None],
        signs=sign[None],
        sensors=sensors,
        finite=np.ones(1, bool) if asked.finite else None,
        trained=None if norms is None else figures,
    )


def risen_by(
    live: "LivePopulation", own: Tensor, batches: Sequence[tuple[Any, Any]], limits: tuple[float, float] | None
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
    probe = live.probe_batches
    counts = [1 if probe.way == "whole" else examples_in(y, x) for x, y in batches]
    each = own.split(counts)
    z = BEYOND + max(live.config.gates.gain_z, live.config.gates.contribution_z)
    looks = [range(0, len(batches), 4), range(2, len(batches), 4), range(1, len(batches), 2)]
    known: dict[int, Tensor] = {}
    for look in looks if limits is not None and len(batches) > 2 and live.ranks.size == 1 else [range(len(batches))]:
        chosen = [batches[index] for index in look]
        losses, _ = probe.see(live.network, chosen)
        live.passes += sum(examples_in(y, x) for x, y in chosen)
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
