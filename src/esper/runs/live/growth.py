"""Grow one network in a training loop of a person's own."""

import inspect
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from esper.kasmina.blueprints import BLUEPRINTS, LIVE_BLUEPRINTS, Blueprint, drawn_with, get_blueprint
from esper.kasmina.graft.copies import blocks_of_one_class, deeper, shifted, stack_of
from esper.kasmina.graft.folding import is_layer, matrix, widened
from esper.kasmina.graft.grafted import bank_at, graft, plant, planted_at, trim, ungraft
from esper.kasmina.graft.grown import Freeze, Frozen, check_tensors, is_grafted, sites_of
from esper.kasmina.graft.sharding import check_sharding, fill, gather_on_cpu, in_parts, is_sharded, reshard
from esper.kasmina.graft.units import resized
from esper.kasmina.network.saving import adapter_files, count_in_configs, folder_of, replace_folder, save_grown
from esper.leyline.config.arguments import check_integer, is_number, known_as
from esper.leyline.config.tree import Config, GrowthConfig, build_growth_config, merge_settings
from esper.leyline.data.duplicates import Overlap
from esper.leyline.data.objective import objective
from esper.leyline.lifecycle.slots import Kind, Site
from esper.leyline.lifecycle.view import MISSING, Space, View, sensor
from esper.leyline.lifecycle.vocabulary import ADDED, SETTLED, Op, Refusal, Stage, among
from esper.leyline.messages import GrowthWarning, InputError, counted, kind_of, typed_line, warn
from esper.leyline.protocols import Controller
from esper.runs.live import growth_state
from esper.runs.live.anytime import AnytimeGrowth
from esper.runs.verdict import Attempts, explanations, few_examples, nothing_left, unfinished, verdict_of_loop
from esper.tamiyo.catalog import find_controller, with_sensors
from esper.tolaria.engine import Engine, decide
from esper.tolaria.live.copies import Average
from esper.tolaria.live.groups import Groups, unwrapped
from esper.tolaria.live.population import GrowthMode, LivePopulation
from esper.tolaria.live.probe import Batches, Loss, Probe, examples_in
from esper.tolaria.live.ranks import Ranks, processes
from esper.tolaria.live.resize import check_learning

LISTED = 500
"""Seeds that a summary lists as planted, kept or removed: a training without an end would make its saved state ever larger."""

MENU: Mapping[Kind, tuple[str, ...]] = {
    Kind.VECTOR: ("bypass-linear", "bypass-mlp", "mlp-small"),
    Kind.MAP: ("bypass-conv-1x1", "bypass-conv-3x3", "conv-light"),
    Kind.SEQUENCE: ("bypass-linear", "bypass-mlp", "mlp-small"),
    Kind.VOLUME: ("bypass-conv-1x1x1", "bypass-conv-3x3x3", "conv-light"),
}
"""Blueprints that may be planted at sites of each kind, if the settings name none."""
MOST_SITES = 62
"""Largest number of sites: a coalition of seeds is a bit mask in one integer."""
ENDLESS = 10**6
"""Number of decisions of a training whose length is not given."""

LEAST = 50
"""Length that a run counts as at least where `steps` is not given. First seeds incubate when the loop has taken few steps, and
to hold them back until it had taken more gained nothing [decisions]"""

M = TypeVar("M", bound=nn.Module)

_IDLE = 20
"""Calls of `Growth.step` without a step of the optimizer that are worth a word: more than a few skipped batches."""

TREND = 8
"""Decisions over which it is said how far the loss on the probe fell before growth stopped."""

A_MINUTE = 6.0
"""Seconds of the loop in these decisions from which it is said how far the loss falls in a minute, and not in a second."""

NOTEWORTHY = 0.001
"""Share of the loss that a place must be expected to add in that time to be named."""

LOOKED_AT, ONE_IN = 64, 16
"""Batches of the loop that are compared with the probe: the first so many, then one in so many."""

_SOME_STEPS = "a whole number of optimizer steps from 1 on"
_AS_A_WHOLE = "Growth plants seeds; give plan='anytime' to widen the network as a whole, as esper.AnytimeGrowth does"

_UNFINISHED: weakref.WeakSet["Growth"] = weakref.WeakSet()
"""Growths whose seeds are in a model and an optimizer."""


class Growth:
    """Grows a network while a loop trains it: plants seeds at its sites, tries them, and keeps those that pay.

        growth = esper.Growth(model, optimizer, probe=probe, loss=loss)
        for x, y in loader:
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            growth.step()
        model = growth.finish()

    Call `step` after every step of the optimizer; no seed learns without one. Once in `every` calls it measures the network on
    the probe, asks the controller, and plants, blends, keeps or removes seeds. The constructor makes the first decision, whose
    seed learns from the next one on. Until a seed blends, the host's outputs,
    gradients and buffers are bit for bit what they are without it.

    Once no seed is under way and none can be planted any more, as the budget is spent, nothing is measured or decided any more;
    `summary()["stopped"]` says so. Every `every` steps, parameters that are not finite are still restored.

    Where growing has taken its share of the passes or seconds of the run (`budget_passes`, `budget_seconds`), nothing is planted
    and nothing incubates until the share has fallen again, and once no seed is on trial, nothing is measured.
    `summary()["explanations"]` says so.

    step() trains an incubating seed by the gradients of the loop's own backward passes. step(x, y), with the batch of this step,
    trains it in a forward and backward pass of its own, in evaluation mode, on the loss of the network with the seed at dose 1.
    If such batches contain examples of the probe, a GrowthWarning says how many.

    Args:
        model: the module that grows, or a DistributedDataParallel of it, whose processes then grow alike. Where `esper.graft` has
            given it no sites, it gets those that are found on the first input of the probe. A compiled module stands for the one
            inside, which has its sites already.
        optimizer: any torch optimizer with parameter groups, of which no other growth makes use. The matrices of a seed get a
            group like that of the nearest matrix, its biases and norms one like that of the nearest bias or norm.
        scheduler: its learning rate scheduler, or a list of them.
        ema: a moving average of the model, as torch.optim.swa_utils.AveragedModel, made after the model was grafted. It gets
            every seed that the model gets.
        plan: None plants seeds; with 'anytime' none are planted, and the call returns an `esper.AnytimeGrowth`, with the
            arguments of that class: `esper.Growth(model, optimizer, plan="anytime", example=x)`
        controller: name of a controller, path of a schedule, folder of a trained one, or an object with `act`, `store`, `update`.
        budget: most parameters of all seeds / parameters of the model.
        budget_passes: most forward and backward passes of incubation, probe and copies without a seed / all passes of the run
            (`passes`). The run is `steps` long, and without them as long as it is so far, or 50 decisions. Passes are counted and
            not timed, so that a run can be repeated to the bit. None for no limit; where only seeds train, there is none either.
        budget_seconds: most seconds of growing / all seconds of the run, as `seconds` has them, beside `budget_passes`. Two runs
            with such a limit are equal only as long as it is not reached. None for no limit.
        probe: a list of (input, target) pairs that are not trained on, or a function that returns one, always the same. An
            input that is a tuple or a mapping is the arguments of the model.
        loss: loss(output, target) of a batch: one number, or one for each example. Less is better, also where the optimizer
            maximizes.
        freeze: what does not train until `finish`. 'none' leaves `requires_grad` as it is; 'host' freezes the whole model bit for
            bit, so that only seeds are trained; a list of names freezes those submodules and parameters, with wildcards, as
            ['layers.*', 'head.bias']. Frozen layers with running statistics, such as BatchNorm, stay in evaluation mode.
        mode: 'live' adds a submodule for each seed, so that torch.compile compiles the model anew when one is planted, acts
            otherwise, or is removed. 'reserve' adds a seat for every blueprint to every site at once, and all seats run in every
            pass, so that the graph stays the same; torch.compile and DistributedDataParallel come after it.
        every: steps of the optimizer between two decisions.
        steps: steps of the optimizer of the whole training, so that no seed is planted too late; None where it has no end.
        scaler: the torch.amp.GradScaler that scales the loss, if there is one.
        seed: seed of every random number that is drawn here. torch's own generators are not used.
        settings: a config whose keys override the defaults, such as {"blueprints": ["bypass-mlp"]} (`esper docs config`).
        shared: whether the processes of torch.distributed train copies of this network, where `model` does not show it: it is a
            submodule of what DistributedDataParallel wraps, or the loop averages gradients by other means.

    Raises:
        InputError: in one sentence, where one of these cannot be
    """

    @known_as("esper.Growth", elsewhere=dict.fromkeys(inspect.signature(AnytimeGrowth).parameters, _AS_A_WHOLE))
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        ema: nn.Module | None = None,
        *,
        plan: Literal["anytime"] | None = None,
        controller: str | Controller = "heuristic",
        budget: float = 0.1,
        budget_passes: float | None = 0.25,
        budget_seconds: float | None = None,
        probe: Batches,
        loss: Loss,
        freeze: Freeze = "none",
        mode: GrowthMode = "live",
        every: int = 100,
        steps: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
        shared: bool = False,
    ) -> None:
        self._made, self._whole, self._setup = time.perf_counter(), math.nan, 0.0
        if plan is not None:
            raise InputError(
                f"plan is {plan!r}, which esper.Growth itself takes alone; {type(self).__name__} plants seeds"
            )
        check_learning("esper.Growth")
        network, wrapper = _unwrapped_model(model)
        _check_owner(network, unwrapped(optimizer))
        sharded = is_sharded(network)
        if mode not in get_args(GrowthMode):
            raise InputError(f"mode is {mode!r}; give 'live' or 'reserve'")
        if mode == "reserve" and (sharded or wrapper is not None):
            raise InputError(
                "mode='reserve' adds parameters that DistributedDataParallel or fully_shard would not know; give Growth the "
                "module itself, and wrap it afterwards"
            )
        check_integer(every, "every", mend=_SOME_STEPS)
        self.every, self.calls, self.finished = every, 0, False
        self.model, self.mode = network, mode
        self.folded: list[str] = []  # sites whose seeds became part of layers
        # the blueprint of each kept seed that `finish` could not make part of layers, by site, and why it could not
        self.beside: dict[str, str] = {}
        self.why_beside: dict[str, str] = {}
        self.widened: dict[str, tuple[int, int]] = {}  # layers that got units by that: their widths before and after
        # stacks that got blocks in `finish`: their number before and after
        self.deepened: dict[str, tuple[int, int]] = {}
        self._added_blocks: dict[str, list[int]] = {}  # their places in these stacks
        self._tried: set[int] = set()  # slots of kept seeds that are not units of layers
        self._first_shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
        device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
        measured = Probe(probe, loss, device)
        if not is_number(budget) or not 0 < budget < math.inf:
            raise InputError(
                f"budget is {budget!r}; give a number above 0, the largest share of parameters that seeds may add, as 0.1"
            )
        if budget_passes is not None and not (is_number(budget_passes) and 0 < budget_passes < 1):
            raise InputError(
                f"budget_passes is {budget_passes!r}; give a number above 0 and below 1, the largest share of the forward and "
                "backward passes of the run that growing may take, as 0.25, or None for no limit"
            )
        if budget_seconds is not None and not (is_number(budget_seconds) and 0 < budget_seconds <= 1):
            raise InputError(
                f"budget_seconds is {budget_seconds!r}; give a number above 0 and at most 1, the largest share of the seconds of "
                "the run that growing may take, as 0.25, or None for no limit"
            )
        share = float(budget)
        groups = Groups(optimizer, scheduler, network)
        with ExitStack() as undo:  # a model that is refused is as it was
            if not is_grafted(network):
                narrow = "narrow-copy" in ((settings or {}).get("blueprints") or ())
                graft(network, "parts" if narrow else "auto", example=measured.first)
                undo.callback(ungraft, network)
            sites = sites_of(network)
            config = _growth_config(sites, share, self.every, steps, seed, settings or {})
            self.controller = find_controller(controller).make(config)
            config = _with_sensors(config, self.controller)
            averages = [] if ema is None else [Average(ema, network)]
            if config.lifecycle.absorb and any(entry.copies == "behind" for entry in growth_menu(sites, config)):
                raise InputError(
                    "settings sets lifecycle.absorb, by which layers of a block become wider, and the blueprint 'block', whose "
                    "seeds are copies of it as it was; leave one of them out"
                )
            several = shared or sharded or wrapper is not None or (mode == "reserve" and processes() > 1)
            ranks = Ranks(several, sharded=sharded, wrapper=wrapper)
            batches = ranks.from_each(len(measured.batches())) if ranks.together else []
            if len(set(batches)) > 1:  # processes that measure together would wait for each other
                raise InputError(
                    f"probe has {', '.join(map(str, batches))} batches in the processes, which run the model together; give each "
                    "as many"
                )
            menu = growth_menu(sites, config)
            population = LivePopulation(network, averages, groups, measured, menu, config, ranks)
            population.space = _within_budget(population, budget)
            if mode == "reserve":
                if twice := next((entry.name for entry in menu if entry.again or entry.copies), None):
                    raise InputError(
                        f"mode='reserve' runs all that can be planted in every pass, and {twice!r} would run each block twice; "
                        "leave it out of blueprints, or give mode='live'"
                    )
                population.reserve(population.space.fits)
            if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
                raise InputError(f"scaler is {kind_of(scaler)}; give the torch.amp.GradScaler of the loop, or None")
            population.incubation.scale = None if scaler is None else scaler.scale
            if wrapper is not None and freeze != "none" and not wrapper.find_unused_parameters:
                raise InputError(
                    f"freeze={freeze!r} takes gradients away for which DistributedDataParallel waits; make it with "
                    "find_unused_parameters=True"
                )
            self.frozen = Frozen(network, freeze)
            undo.callback(self.frozen.release)
            self._budgets, self._steps = {"budget_passes": budget_passes, "budget_seconds": budget_seconds}, steps
            self._loop_passes = 0
            # Decisions at which growing had taken its share, by the limit.
            self._overspent_at = dict.fromkeys(self._budgets, 0)
            # What is taken from this object's own steps, seconds of growing and seconds of the rest to get those of the run;
            # below 0 by what the run had taken before its state was loaded.
            self._outside = 0, 0.0, 0.0
            arguments = {
                "budget": share,
                **self._budgets,
                "freeze": freeze,
                "every": self.every,
                "steps": steps,
                "seed": seed,
                "mode": mode,
            }
            self._made_with = ranks.from_first(
                growth_state.made_with(population, (controller, self.controller), config, arguments)
            )
            self.engine = Engine(population, config)
            self.engine.reset()
            self.engine.seed_history.most = LISTED
            self.attempts = Attempts.none(1)
            self._scaler, self._scale, self._first_loss = scaler, _scale_of(scaler), math.nan
            self.overlap: Overlap | None = Overlap(measured.batches())  # of the probe with what the loop trains on
            self._stopped: tuple[int, str] | None = None  # since which step nothing can happen any more, and why
            # On the probe at the last decisions, each with the step behind which it was measured.
            self._losses = [(0, float(self.engine.state.scores.loss[0]))]
            self._findings: dict[
                str, str
            ] = {}  # what is amiss in the loop as of the last decision: sentences by subject
            self._decide(self.engine.view())
            undo.pop_all()
        self._setup = time.perf_counter() - self._made - sum(self.engine.timer.seconds.values())
        _UNFINISHED.add(self)

    def __new__(cls, *args: Any, plan: str | None = None, **settings: Any) -> Any:
        if plan not in (None, "anytime"):
            raise InputError(f"plan is {plan!r}; give None, which plants seeds, or 'anytime'")
        return AnytimeGrowth(*args, **settings) if cls is Growth and plan else super().__new__(cls)

    @property
    def population(self) -> LivePopulation:
        """The network with its seeds, as the engine grows it."""
        return self.engine.population

    def step(self, *batch: Any) -> bool:
        """Take note of a step of the optimizer; returns whether a decision was made.

        batch: nothing, or the input and the target of the step. InputError if it is anything else, if the model or the loss
        fails on it, or after `finish`.
        """
        if self.finished:
            raise InputError("the network is finished; make another esper.Growth to grow it further")
        if len(batch) not in (0, 2):
            raise InputError(
                f"growth.step was given {counted(len(batch), 'argument')}; give none, or the input and the target of the step"
            )
        check_learning("growth.step()")
        self.calls += 1
        # Forward, and backward to the activations and to the weights.
        self._loop_passes += 3 * (examples_in(batch[1], batch[0]) if batch else self.population.probe_batches.batch)
        if self._stopped is None:
            # First, as it refuses a batch that the model cannot take.
            with self.engine.timer.timed("incubation"):
                self.population.incubate((batch[0], batch[1]) if batch else None)
            if batch and self.overlap is not None and (self.calls <= LOOKED_AT or self.calls % ONE_IN == 0):
                with self.engine.timer.timed("overlap"):
                    self.overlap.show(batch)
        state = self.engine.state
        if self.calls % self.every or state.pending is None:
            return False
        # Until the share of growing has fallen, seeds on trial alone are judged, as the network trains with them.
        calm = state.pending.actions.op[0] == Op.WAIT and among(state.seeds.stage, SETTLED | {Stage.TRAINING}).all()
        waits = self.population.resting and bool(calm)
        self.frozen.check()
        if (self._stopped is not None or waits) and self._guarded():
            if waits:  # the time of a decision passes without one
                overspent = self._overspent()
                state.step = min(state.step + 1, self.engine.config.steps - 1)
                self._rest(bool(overspent))
            return False
        view, outcome = self.engine.finish_step()
        self._losses = [*self._losses, (self.calls, float(self.engine.state.scores.loss[0]))][-TREND - 1 :]
        with self.engine.timer.timed("fold"):
            absorbed = self._absorb()
        if absorbed:
            view = self.engine.view()
        self.frozen.note()
        self._look_at_the_loop()
        if self.population.ranks.first:
            self.controller.store(outcome)
        if not self.engine.over:
            self._decide(view)
        return True

    def finish(self) -> nn.Module:
        """Return the network with the seeds that were kept, and no others. It goes on training under the same optimizer.

        A kept seed whose change is linear becomes part of the Linear or convolution that it is behind. One with a hidden layer
        around two of these has the function between them and becomes further units of them, which get larger parameters
        (`widened`), as far as this was not done when it was kept; the config of a model of transformers follows.
        Both are done in the model and in its moving average, if the outputs of both on the probe stay the same, to rounding.
        A seed of the blueprint 'block' becomes a member of its stack (`deepened`), on the same condition.
        Every other seed is a child named `esper` of its submodule, whose class runs it. Submodules that neither run a seed nor
        are read by one have their own classes again.
        """
        if self.finished:
            return self.model
        self.engine.abandon()
        reshard(self.model)
        population, seeds = self.population, self.engine.state.seeds
        for slot, site in enumerate(population.sites):
            if planted_at(self.model, site.name) is not None and seeds.stage[0, slot] != Stage.FOSSILIZED:
                population.free(site.name)
        with self.engine.timer.timed("fold"):
            self._fold_kept()
        unbuilt = self._note_widths()
        population.settle()
        self.frozen.release()
        population.groups.disown()
        population.incubation.close()
        _UNFINISHED.discard(self)
        for network in population.networks:
            trim(network)
        self.finished, self._whole = True, time.perf_counter() - self._made
        if unbuilt:
            warn(
                f"from_pretrained cannot build the widths that grew ({self.architecture}), because no value of the config counts "
                "them; save the model by growth.save(folder), or make the other blocks as wide by esper.widen(model, "
                "{layer: width}, example=x) and set the value of the config",
                GrowthWarning,
            )
        return self.model

    def gather(self, model: M | None = None) -> M | None:
        """Return the network that `finish` returned as one process holds it, where several have parts of it or copies.

            growth.finish()
            network = growth.gather(build() if rank == 0 else None)

        Every process calls this. `model` is another copy of the model, as it was before `esper.graft`. It gets the seeds that
        were kept and every weight, one tensor at a time, in place, and is returned. A process that gives None gets None.

        InputError before `finish`, or in every process if a model is not such a copy.
        """
        if not self.finished:
            raise InputError("the network is not finished; call finish before gather")
        problem, whole_model = "", {}
        try:
            if model is not None:
                grown = {name: value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}
                with deeper(model, self._added_blocks), resized(model, self._resized(), grown, self._counts()):
                    self._plant_kept(model)
                    whole_model = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
                    target = "the model that gather was given"
                    check_tensors(grown, whole_model, "the grown network", target, "build the same model", dtypes=False)
        except InputError as error:  # the others wait for this process
            problem = str(error)
        problem = next(filter(None, self.population.ranks.from_each(problem)), "")
        if problem:
            raise InputError(problem)
        reshard(self.model)
        others = {}
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                if not isinstance(value, Tensor):
                    others[name] = value
                    continue
                gathered = gather_on_cpu(value, model is not None)
                if model is not None and gathered is not None:
                    whole_model[name].copy_(gathered)
        if model is not None and others:
            model.load_state_dict(others, strict=False)
        return model

    def save_adapter(self, folder: Path | str) -> None:
        """Write the seeds that were kept to a folder, for `esper.attach` on another copy of the host.

        The host is not written, but a digest of its weights, with which alone `esper.attach` takes the seeds: where the host was
        trained too, save it as well, or everything by `save`. Of several processes, each calls this and the first writes.
        InputError if a seed became part of the host.
        """
        if self.folded:
            raise InputError(
                f"the seeds at {', '.join(map(repr, self.folded))} became part of the model, so that no adapter can hold them; "
                "call growth.save(folder), which writes the whole model, or save_adapter before finish, without lifecycle.absorb"
            )
        population, folder = self.population, folder_of(folder)
        reshard(self.model)
        kept = population.kept(self.engine.state.seeds)
        files = adapter_files(self.model, kept, [site.after for site in population.sites])
        if population.ranks.first:
            replace_folder(folder, files)

    def save(self, folder: Path | str) -> None:
        """Write the network as it computes now to a folder, for `esper.load_grown` on a fresh copy of the model.

        The folder holds every weight and buffer, and the seeds that act: before `finish` also those on trial, at their present
        dose. It replaces an earlier one. Of several processes, each calls this and the first writes.
        """
        folder = folder_of(folder)
        reshard(self.model)
        to = folder if self.population.ranks.first else None
        save_grown(self.model, self._resized(), to, blocks=self._added_blocks, counts=self._counts())

    def summary(self) -> dict[str, Any]:
        """Return what became of the seeds, as plain values: lists of those planted, kept and removed, each with its reason.

        `verdict` says in one line what is known of whether growth paid; `stopped`, `outlook`, `architecture` and `seconds`, which
        differ between two runs that are equal otherwise, are those of this object. `loss` is that on the probe at the last
        decision, and `objective` is J (`esper.leyline.data.objective`): minus the loss, less rent for `added_params`, the
        parameters of the seeds that act. `trained_params` require a gradient, free seats left out. `widened` maps the layers that
        got units of seeds to their widths before and after, `deepened` the stacks that got blocks to their numbers of blocks, and
        `beside` the sites whose seeds are part of no layer after `finish` to their blueprints. Each list has its last 500
        entries, and `unlisted` counts the earlier ones.
        """
        state, population = self.engine.state, self.population
        host = int(population.host_params[0])
        called = {"slot": "site", "blueprint": "blueprint", "step": "decision", "reason": "reason"}
        lists = {
            name: [{mine: each[own] for own, mine in called.items()} for each in entries]
            for name, entries in self.engine.seed_history.lists.items()
        }
        fossils = int((state.seeds.stage == Stage.FOSSILIZED).sum()) + population.absorbed_seeds
        kept = frozenset({Stage.FOSSILIZED})
        added, kept_params = (
            int(population.table.added_params(state.seeds, each)[0])
            for each in (kept if self.finished else ADDED, kept)
        )
        loss, rent = float(state.scores.loss[0]), self.engine.config.reward
        # What is amiss in the loop, why nothing was planted, and after `finish` why seeds were neither kept nor pruned.
        view, examples = self.engine.view(), 0 if self.overlap is None else self.overlap.examples
        sentences = [*self._findings.values(), *(few_examples({"the probe": examples}) if examples else ())]
        sentences += explanations(self.attempts, view.space, self.controller, type(self.controller).__name__)
        for name, what in (("budget_passes", "forward and backward passes"), ("budget_seconds", "seconds of the run")):
            if times := self._overspent_at[name]:
                sentences.append(
                    f"growing had taken its share of the {what} ({name}={self._budgets[name]:g}) at {times} of "
                    f"{counted(state.step, 'decision')}, so nothing was planted or incubated until the share had fallen; raise "
                    f"{name} or every, or give a smaller probe"
                )
        for blueprint, reasons in self.population.why_no_copy.items():
            name, why = next(iter(reasons.items()))
            sentences.append(f"the blueprint {blueprint!r} can be planted at no site; at {name!r}, for one: {why}")
        if self.finished:
            sentences += unfinished(view, self.engine.config.gates, self.attempts.allowed_last)
        return {
            "verdict": verdict_of_loop(fossils, kept_params, host, finished=self.finished, outlook=self.outlook),
            "status": "finished" if self.finished else "growing",
            "steps": self.calls,
            "decisions": state.step,
            "stopped": self.stopped,
            "outlook": self.outlook,
            "loss": loss,
            "objective": float(
                objective(-loss, added, host, rent.rent, rent.rent_size) - state.compute.price(self.engine.config)[0]
            ),
            "host_params": host,
            "added_params": added,
            "trained_params": population.trained_params(),
            "seconds": self.seconds,
            "architecture": self.architecture,
            "beside": dict(self.beside),
            "widened": {name: list(widths) for name, widths in self.widened.items()},
            "deepened": {path: list(blocks) for path, blocks in self.deepened.items()},
            "rollbacks": self.engine.governor.record.counts()["rollbacks"],
            **lists,
            "unlisted": dict(self.engine.seed_history.unlisted),
            "explanations": sentences,
        }

    @property
    def architecture(self) -> str:
        """How the network differs from the one that was given, in one line: the layers that have other widths, and after
        `finish` the stacks that have more blocks and the seeds that stay beside their layers, each with the reason
        (`why_beside`). Empty while nothing differs.

            0: 64 -> 4 became 64 -> 20; 2: 4 -> 32 became 20 -> 32
            blocks 4 -> 6
            bypass-mlp at '3' stays beside: a LayerNorm runs between '0' and '3'

        Widths are the features that a layer reads and those that it writes.
        """
        changes = []
        for name, shape in self._resized().items():
            path, _, entry = name.rpartition(".")
            if entry == "weight" and is_layer(layer := self.model.get_submodule(path)):
                was, now = (matrix(layer, torch.empty(own, device="meta")).shape for own in (shape, layer.weight.shape))
                changes.append(f"{path}: {was[1]} -> {was[0]} became {now[1]} -> {now[0]}")
        for path, own in self.population.counts.items():
            changes += [f"{path}.{name} {was} became {now}".lstrip(".") for name, (was, now) in own.items()]
        for stack, (before, after) in self.deepened.items():
            name = "blocks" if stack in ("", "blocks") else f"{stack}: blocks"
            changes.append(f"{name} {before} -> {after}")
        for site, blueprint in self.beside.items():
            changes.append(f"{blueprint} at {site!r} stays beside: {self.why_beside[site]}")
        return "; ".join(changes)

    @property
    def stopped(self) -> str | None:
        """Since which step nothing is measured, and why no seed can be planted any more; None while something can happen."""
        if self._stopped is None:
            return None
        since, why = self._stopped
        hint = f"; {self.outlook}" if self.outlook else ""
        return f"growth stopped measuring at step {since:,}, as {why}{hint}"

    @property
    def outlook(self) -> str:
        """What training on and another seed promise; empty before the first decision behind a step.

            train on: the loss on the probe still falls by 0.9% a minute (1.3% in steps 200 to 1,000), and no place would add 0.1%

        A minute is one of the loop's own time (`seconds["rest"]`), and a second where the last decisions took less than 6. What a
        place would add follows to first order from the share m of the gradient's energy that its layers cannot follow and a seed
        can: the loss would fall 1 / (1 - m) times as fast. It begins with "train on" where no more is planted, or where no place
        would add 0.1 %.
        """
        if len(self._losses) < 2:
            return ""
        (since, first), (until, last) = self._losses[0], self._losses[-1]
        steps, falls = until - since, (first - last) / abs(first) if first else 0.0
        view = self.engine.view()
        free = view.space.fits.any(1) & (view.seeds.stage[0] == Stage.DORMANT)
        missing = np.where(free, sensor(view, MISSING)[0], np.nan)
        measured = not np.isnan(missing).all()
        slot = int(np.nanargmax(missing)) if measured else 0
        lacks = f"its layers cannot follow {missing[slot]:.1%} of the gradient"
        if not falls > 0:  # also where it is not finite
            said = f"the loss on the probe did not fall in steps {since:,} to {until:,}"
            if measured and missing[slot] < NOTEWORTHY:
                return f"{said}, and nothing is missing at any free place"
            return f"{said}; of the free places {view.space.slots[slot]!r} lacks most: {lacks}" if measured else said
        calls, _, rest = self._spent()
        taken = max(rest / max(calls, 1) * steps, 1e-9)
        unit, length = ("minute", 60.0) if taken >= A_MINUTE else ("second", 1.0)
        pace = 1 - max(1 - falls, 0.0) ** (length / taken)  # as if it went on falling by the same share
        said = f"the loss on the probe still falls by {pace:.1%} a {unit} ({falls:.1%} in steps {since:,} to {until:,})"
        adds = pace * missing[slot] / max(1 - missing[slot], 1e-3) if measured else math.nan
        if adds < NOTEWORTHY:
            return f"train on: {said}, and no place would add {NOTEWORTHY:.1%}"
        lead = "train on: " * (self._stopped is not None or self.finished)
        if not measured:
            return f"{lead}{said}"
        return f"{lead}{said}, and {view.space.slots[slot]!r} would add most, about {adds:.1%}, as {lacks}"

    @property
    def seconds(self) -> dict[str, float]:
        """What growing costs in seconds, of the device on CUDA, since this object was made and until `finish`.

        `setup` is until the loop begins, `incubation` are the steps of seeds that incubate and of the copies that train without a
        seed, `probe` the measurements, `folds` are kept seeds that become part of layers, `decisions` is all else of a decision,
        `rest` the loop's own time, with what seeds add to its passes and its optimizer.
        """
        phases = dict(self.engine.timer.seconds)
        whole = self._whole if self.finished else time.perf_counter() - self._made
        parts = {"setup": self._setup, **{name: phases.pop(name, 0.0) for name in ("incubation", "probe")}}
        parts["folds"] = phases.pop("fold", 0.0)
        parts["decisions"] = sum(phases.values())
        return {**parts, "rest": whole - sum(parts.values())}

    def _spent(self) -> tuple[int, float, float]:
        """Return the steps of the loop in which seconds are counted, those of growing and those of the rest: since the run began,
        or since it got a limit to them.
        """
        *growing, rest = self.seconds.values()
        calls, growing_outside, rest_outside = self._outside
        return self.calls - calls, sum(growing) - growing_outside, rest - rest_outside

    @property
    def passes(self) -> dict[str, int]:
        """Passes of examples through the network since this object was made: of the `loop`, and what `growth` took beside it.

        A step of the loop is three passes of its batch: forward, backward to the activations, and backward to the weights. A seed
        that incubates by step(x, y) takes two, as the weights of the host get no gradient, and a copy without a seed
        (`gates.twins`) three. A measurement takes a forward pass of the probe for the network and each such copy, one of as many
        of its batches as decide for each seed, and two where it is measured what is missing. A step without a batch counts as one
        of as many examples as the first batch of the probe. The first process counts.
        """
        return {"loop": self._loop_passes, "growth": self.population.passes}

    @property
    def compilations(self) -> dict[str, int]:
        """What growing costs torch.compile in this process.

        `graphs` were compiled since this object was made, of this network and of any other function; `changes` is how often
        growing changed the graph of the network, 0 in mode 'reserve'; `emptied` is how often the caches of torch.compile were
        emptied, so that it would not give up.
        """
        found = self.population.compilations
        return {name: getattr(found, name) for name in ("graphs", "changes", "emptied")}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training, for torch.save: the model, its seeds, the optimizer, the schedulers, the average and
        the decisions. It is taken between two steps.

        Under `fully_shard` every process calls this. The first gets whole tensors, in the memory of the CPU; the others get an
        empty state.
        """
        if self.finished:
            raise InputError("the network is finished; save it itself, as torch.save(model.state_dict(), path)")
        population = self.population
        tree = {
            "made_with": self._made_with,
            "calls": self.calls,
            "stopped": None if self._stopped is None else self._stopped[0],
            "trend": list(self._losses),
            "passes": {**self.passes, "overspent": dict(self._overspent_at), "resting": self.population.resting},
            "spent": None if self._budgets["budget_seconds"] is None else list(self._spent()),
            "seeds": population.planted(),
            "absorbed": {
                "seeds": population.absorbed_seeds,
                "params": int(population.table.absorbed[0]),
                "sites": list(self.folded),
                "tried": sorted(self._tried),
                "shapes": {name: list(shape) for name, shape in self._resized().items()},
                "counts": {
                    path: {name: list(own) for name, own in each.items()} for path, each in population.counts.items()
                },
            },
            "tensors": {name: tensor.detach().clone() for name, tensor in population.tensors().items()},
            "averages": [each.state() for each in population.averages],
            "groups": population.groups.state(population.names()),
            "engine": self.engine.snapshot(),
            "attempts": dict(vars(self.attempts)),
            "controller": self.controller.state(),
        }
        first = population.ranks.first or not population.ranks.together
        saved: dict[str, Any] = growth_state.saved_tree(tree, first)
        return growth_state.signed(saved) if first else {}

    def load_state_dict(self, state: Mapping[str, Any], *, changed: Sequence[str] = ()) -> None:
        """Go on from what `state_dict` gave, with a model, an optimizer, schedulers and arguments made as they were then.

        changed: names of arguments, as 'budget', and of settings, as 'reward.rent', that may be others than then; the
        training goes on with those of this object. A controller of another class begins without a memory.

        InputError if the state is damaged, or if anything else differs; nothing is changed then.
        """
        if self.finished:
            raise InputError("the network is finished; make another esper.Growth to load a saved state into")
        growth_state.check_whole(state)
        saved = state["made_with"]
        growth_state.check_made_with(saved, self._made_with, changed)
        tree: dict[str, Any] = growth_state.loaded_tree(state)
        population, controller = self.population, self.controller
        averages = population.averages
        for average, kept in zip(averages, tree["averages"], strict=True):
            average.check(kept)
        absorbed: Any = tree["absorbed"]
        counts = {path: {name: tuple(own) for name, own in each.items()} for path, each in absorbed["counts"].items()}
        now = {path: {name: own[1] for name, own in each.items()} for path, each in counts.items()}
        with population.widths_of(absorbed["shapes"], tree["tensors"], now):
            mine = population.tensors_with(tree["seeds"])
            check_tensors(tree["tensors"], mine, "the saved state", "the model", "build the same model")
            population.groups.check(tree["groups"], population.names(), population.holds)
            same = saved["controller"].partition("(")[0] == self._made_with["controller"].partition("(")[0]
            if tree["controller"] is not None and same and (before := controller.state()) is not None:
                try:
                    controller.load_state(tree["controller"])
                except Exception as error:  # the controller may be the user's
                    controller.load_state(before)
                    raise InputError(
                        f"the controller cannot load the saved state: {typed_line(error)}; give the controller that saved it"
                    ) from error
        population.absorbed_seeds, population.table.absorbed[0] = absorbed["seeds"], absorbed["params"]
        population.counts = counts
        self.folded, self._tried = list(absorbed["sites"]), set(absorbed["tried"])
        self._note_widths()
        population.rebuild(tree["seeds"])
        for name, tensor in population.tensors().items():
            fill(tensor, tree["tensors"][name])
        for average, kept in zip(averages, tree["averages"], strict=True):
            average.load_state(kept)
        population.groups.load_state(tree["groups"], population.names())
        self.frozen.note()
        self.calls, self._losses = tree["calls"], list(tree["trend"])
        measured, own = tree["engine"]["measurements"], self.engine.state.measurements.sensors
        if measured["sensors"].shape != own.shape:  # another controller reads other sensors, which are measured again
            measured = {**measured, "sensors": np.full_like(own, np.nan)}
        self.engine.restore({**tree["engine"], "measurements": measured})
        self.attempts = Attempts(**tree["attempts"])
        spent: Any = tree["passes"]
        self._loop_passes = spent["loop"]
        self._overspent_at = dict(spent["overspent"])
        population.passes, population.resting = spent["growth"], spent["resting"]
        had: Any = tree["spent"] or (0, 0.0, 0.0)  # a run without a limit to its seconds counts them from here on
        *growing, rest = self.seconds.values()
        self._outside = self.calls - had[0], sum(growing) - had[1], rest - had[2]
        population.follow(self.engine.state.seeds)
        since: Any = tree["stopped"]
        why = "" if since is None else self._nothing_left(self.engine.view())  # the budget may be another one
        self._stopped = (since, why) if why else None

    def __repr__(self) -> str:
        name, state = type(self.model).__name__, self.engine.state
        stopped = "" if self._stopped is None else f", stopped={self._stopped[0]}"
        changed = f": {self.architecture}" if self.architecture else ""
        sites = len(self.population.sites)
        return f"Growth({name}, sites={sites}, steps={self.calls}, decisions={state.step}{stopped}){changed}"

    def _resized(self) -> dict[str, torch.Size]:
        """Return the parameters of the host that have other shapes than when growth began, by name: their shapes then."""
        now = dict(self.model.named_parameters())
        return {name: shape for name, shape in self._first_shapes.items() if name in now and now[name].shape != shape}

    def _decide(self, view: View) -> None:
        """Ask the controller, and carry out what it decides. Stop where it changed nothing, and nothing can happen any more."""
        ranks, overspent = self.population.ranks, self._overspent()
        self.engine.planting = not overspent
        if overspent:
            view = self.engine.view()
        try:
            with self.engine.timer.timed("decide"):
                decision = ranks.from_first(decide(self.controller, view) if ranks.first else None)
            refused = self.engine.begin_step(decision.actions, decision.reasons)
        finally:
            self.engine.planting = True
        self.attempts.count(view, (decision.actions, refused))
        changed = (decision.actions.op[0] != Op.WAIT) and refused[0] == Refusal.NONE  # listed when it was measured
        why = "" if changed else self._nothing_left(view)
        self._stopped = (self.calls, why) if why else None
        self._rest(bool(overspent) and not why)

    def _overspent(self) -> str:
        """Return which limit growing has reached, 'budget_passes' or 'budget_seconds', the same in every process; '' for none.

        Counts the decisions at which one was.
        """
        population, passes, seconds = self.population, *self._budgets.values()
        if not self.calls or population.space.frozen[0]:
            return ""
        run, reached = max(self.calls, LEAST * self.every if self._steps is None else self._steps), ""
        if passes is not None and population.passes > passes * (
            self._loop_passes / self.calls * run + population.passes
        ):
            reached = "budget_passes"
        elif seconds is not None:
            calls, growing, rest = self._spent()
            if calls and growing > seconds * (rest / calls * run + growing):
                reached = "budget_seconds"
        if reached := population.ranks.from_first(reached):
            self._overspent_at[reached] += 1
        return reached

    def _rest(self, resting: bool) -> None:
        """Let seeds that incubate rest, or go on."""
        if resting != self.population.resting:
            self.population.resting = resting
            self.population.follow(self.engine.state.seeds)

    def _nothing_left(self, view: View) -> str:
        """Return the condition by which nothing can happen any more, the same in every process; empty while something can."""
        if not among(view.seeds.stage, SETTLED).all():
            return ""
        controller, config, ranks = self.controller, self.engine.config, self.population.ranks
        why = nothing_left(view, controller.plants(view), config, type(controller).__name__) if ranks.first else None
        return ranks.from_first(why)

    def _guarded(self) -> bool:
        """Return whether all parameters are finite; keep the network then as the one that a rollback restores."""
        engine, population = self.engine, self.population
        if not engine.config.governor.enabled:
            return True
        with engine.timer.timed("govern"):
            sound = population.sound()
            if sound:
                engine.governor.keeper.take(engine.state.seeds, np.ones(1, bool), engine.state.step)
        return sound

    def _absorb(self) -> bool:
        """Make the seeds that were just kept further units of their layers, where they can be; return whether any became that."""
        engine, population = self.engine, self.population
        if not engine.config.lifecycle.absorb or self.mode == "reserve":
            return False
        kept = np.flatnonzero(engine.state.seeds.stage[0] == Stage.FOSSILIZED).tolist()
        absorbed = [slot for slot in kept if slot not in self._tried and population.absorb(slot)]
        self._tried |= set(kept) - set(absorbed)
        if absorbed:
            engine.vacate(0, absorbed)
            self.folded += [population.sites[slot].name for slot in absorbed]
            self._note_widths()
        return bool(absorbed)

    def _fold_kept(self) -> None:
        """Make the seeds that were kept parts of layers and stacks, as far as they can be; note the others with the reason."""
        population = self.population
        at = {site.name: site.after for site in population.sites if planted_at(self.model, site.name) is not None}
        blocks = [name for name in at if (seed := planted_at(self.model, name)) is not None and seed.copies == "behind"]
        reasons: dict[str, str] = {}
        for name in [each for each in at if each not in blocks]:
            if (why_not := population.fold(name)) is None:
                self.folded.append(name)
                population.free(name)
            else:
                reasons[name] = why_not
        for name in sorted(blocks, key=lambda name: stack_of(at[name]), reverse=True):  # a block moves those behind it
            if (why_not := self._add_block(name)) is None:
                self.folded.append(name)
            else:
                reasons[name] = why_not
        for site in population.sites:
            seed = planted_at(self.model, site.name)
            if seed is not None and seed.recipe is not None:
                # by its place in the finished network
                known = site.after if site.name == at[site.name] else site.name
                self.beside[known], self.why_beside[known] = seed.recipe.blueprint, reasons[site.name]

    def _add_block(self, name: str) -> str | None:
        """Make a kept seed a member of its stack; returns why not, or None.

        What is known by the names of parameters follows those that have another place then.
        """
        population = self.population
        stack, place = stack_of(sites_of(self.model)[name].after)
        container: Any = self.model.get_submodule(stack)
        count = blocks_of_one_class(container, place)
        if (why_not := population.add_block(name)) is not None:
            return why_not
        first, _ = self.deepened.get(stack, (count, count))
        self.deepened[stack] = first, count + 1
        behind = [each + (each > place) for each in self._added_blocks.get(stack, [])]
        self._added_blocks[stack] = [place + 1, *behind]
        moved = partial(shifted, stack=stack, place=place + 1)
        own, new = (f"{stack}.{at}.".lstrip(".") for at in (place, place + 1))
        copies = {
            new + name.removeprefix(own): shape for name, shape in self._first_shapes.items() if name.startswith(own)
        }
        self._first_shapes = {moved(name): shape for name, shape in self._first_shapes.items()} | copies
        return None

    def _note_widths(self) -> list[str]:
        """Record the layers that have more units than when growth began, also in the configs of models that save themselves.

        Returns the names of the parts whose config has no value for them.
        """
        self.widened |= widened(self.model, self._resized())
        return [path for network in self.population.networks for path in count_in_configs(network, self.widened)]

    def _counts(self) -> dict[str, dict[str, int]]:
        """Return the attributes that count units which were added, as they are now, by the path of their module."""
        return {path: {name: now for name, (_, now) in own.items()} for path, own in self.population.counts.items()}

    def _plant_kept(self, network: nn.Module) -> None:
        """Plant the seeds that were kept in another copy of the model; their weights are still to be filled in."""
        if is_grafted(network) or any(map(in_parts, network.parameters())):
            raise InputError(
                "gather was given a model that is grafted or sharded; give one as it was before esper.graft"
            )
        if any(tensor.is_meta for tensor in network.state_dict().values() if isinstance(tensor, Tensor)):
            raise InputError("gather was given a model on the meta device; give one with weights")
        population = self.population
        kept = population.kept(self.engine.state.seeds)
        slots = {slot: own for slot, site in enumerate(population.sites) if (own := kept.get(site.after)) is not None}
        if not slots:
            return
        graft(network, {population.sites[slot].name: population.sites[slot] for slot in slots})
        like = next(network.parameters())
        for slot, own in slots.items():
            assert own.recipe is not None, "growth knows what it planted"
            entry = get_blueprint(own.recipe.blueprint, own.kind, live=True)
            made = population.made(slot, entry, own.blend, 0).to(like.device)
            made.mode, made.attached = own.mode, own.attached
            plant(network, population.sites[slot].name, made.train(network.training))
        trim(network)

    def _look_at_the_loop(self) -> None:
        """Warn, once until it is mended, where the optimizer does not step, `step` is called between its steps, or it goes the
        other way than the loss.
        """
        groups, incubation = self.population.groups, self.population.incubation
        idle, calls, empty = incubation.idle, incubation.calls, incubation.idle_calls
        optimizer, findings = type(groups.optimizer).__name__, {}
        loss, scale, before = float(self.engine.state.scores.loss[0]), _scale_of(self._scaler), self._scale
        if idle >= min(self.every, _IDLE) and scale >= before:  # a GradScaler lowers its scale when it skips steps
            findings["steps"] = (
                f"the {optimizer} that Growth was given has taken no step in the last {idle} calls of growth.step(), so no seed "
                "learns; call growth.step() after each step of this optimizer, or, where the loop has made another one, call "
                "growth.finish() and make another esper.Growth with it"
            )
        elif calls >= _IDLE and 2 * empty >= calls and scale >= before:  # a loop skips fewer batches than that
            findings["calls"] = (
                f"{empty} of the last {calls} calls of growth.step() came with no step of the {optimizer} since the call before, "
                "so decisions come sooner than every= says; call growth.step() once after each step of the optimizer"
            )
        elif calls < _IDLE and "calls" in self._findings:  # until enough calls are counted anew
            findings["calls"] = self._findings["calls"]
        if calls >= _IDLE or "steps" in findings or scale < before:
            incubation.calls = incubation.idle_calls = 0
        if loss > self._first_loss and any(group.get("maximize", False) for group in groups.optimizer.param_groups):
            findings["direction"] = (
                f"the {optimizer} maximizes, and the loss on the probe has risen from {self._first_loss:.4g} to {loss:.4g}; if "
                "loss= is what the loop maximizes, give minus that, because Growth takes a smaller loss as the better one"
            )
        if self.overlap is not None and (shown := self.overlap.count()):
            are, whole = "is" if shown == 1 else "are", counted(self.overlap.examples, "example")
            findings["duplicates"] = (
                f"{shown} of the {whole} of the probe {are} also among those that growth.step(x, y) was given, equal in input "
                "and target, so what the network learns by heart counts as gain; give a probe that is not trained on"
            )
        for subject, sentence in findings.items():
            if subject not in self._findings:
                warn(sentence, GrowthWarning)
        self._findings, self._scale = findings, scale
        self._first_loss = loss if math.isnan(self._first_loss) else self._first_loss


update_wrapper(Growth.__new__, Growth.__init__, assigned=())  # inspect.signature and help show its arguments


def _check_owner(network: nn.Module, optimizer: Any) -> None:
    """Raise InputError if a network or an optimizer has seeds of another growth, or may get some."""
    parts = set(network.modules())
    for other in _UNFINISHED:
        if other.model in parts or network in set(other.model.modules()):
            raise InputError(
                f"the {type(network).__name__} is grown by another esper.Growth, which is not finished; call finish() of that "
                "one first"
            )
        if other.population.groups.optimizer is optimizer:
            raise InputError(
                f"the {type(optimizer).__name__} is used by another esper.Growth, which is not finished; give each model that "
                "grows an optimizer of its own, or call finish() of that growth first"
            )
    if is_grafted(network) and any(planted_at(network, name) or bank_at(network, name) for name in sites_of(network)):
        raise InputError(
            f"the {type(network).__name__} has seeds of an esper.Growth that was not finished; call esper.ungraft(model), and "
            "make the optimizer anew"
        )


def _scale_of(scaler: torch.amp.GradScaler | None) -> float:
    """Return the number by which a loop's scaler multiplies the loss now; reads the device. 1 without a scaler."""
    return 1.0 if scaler is None else float(scaler.get_scale())


def _unwrapped_model(model: Any) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the module that grows, and the DistributedDataParallel around it, if there is one. InputError if none can grow."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {kind_of(model)}; give an nn.Module")
    network, wrapper = model, None
    while True:
        if isinstance(network, DistributedDataParallel):
            wrapper, network = network, network.module
        elif isinstance(compiled := getattr(network, "_orig_mod", None), nn.Module):
            network = compiled
        else:
            break
    if isinstance(network, nn.DataParallel):
        raise InputError(
            "the model is wrapped in DataParallel, whose copies would not see what the seeds gather; use DistributedDataParallel"
        )
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in network.modules()):
        raise InputError(
            "the model is wrapped in FullyShardedDataParallel, which flattens the parameters; use "
            "torch.distributed.fsdp.fully_shard or DistributedDataParallel"
        )
    reshard(network)
    check_sharding(network, processes())
    if is_sharded(network) and not is_grafted(network):
        raise InputError(
            "the model is sharded and has no sites, which are found on a whole model; call esper.graft(model, example=x) "
            "before fully_shard"
        )
    return network, wrapper


def _growth_config(
    sites: Mapping[str, Site], budget: float, every: int, steps: Any, seed: int, settings: Mapping[str, Any]
) -> Config:
    """Return the settings of one network in the user's own loop, as those of a run of it alone."""
    if len(sites) > MOST_SITES:
        raise InputError(f"the model has {len(sites)} sites, and at most {MOST_SITES} can grow; graft fewer of them")
    if steps is not None:
        check_integer(steps, "steps", mend=_SOME_STEPS)
    usual = {
        "seed": seed,
        "steps": ENDLESS if steps is None else max(steps // every, 1),
        "lifecycle": {"max_seeds": len(sites)},
        "reward": {"objective": "log_loss"},
        # The loss on the probe stands in for the training loss. It has no upper bound, and rises when a network overfits, which
        # is not a failure.
        "governor": {"param_limit": budget, "min_metric_drop": 1e9, "loss_rise_z": 1e9},
    }
    for name, value in merge_settings(settings).items():
        if name in Config.model_fields and name not in GrowthConfig.model_fields:
            key = f"{name}.{next(iter(value))}" if isinstance(value, Mapping) and value else name
            raise InputError(
                f"settings sets {key}, which a network in your own training loop does not have; leave it out"
            )
    return Config(envs=1, baselines=(), **dict(build_growth_config(usual, settings)))


def _with_sensors(config: Config, client: Controller) -> Config:
    """Return the config with the decisions between measurements of what is missing, if they are null: 0 where nobody reads that.

    A controller that does not read it knows neither seeds that act at once nor slots that become empty again; a GrowthWarning
    names the settings that it leaves out.
    """
    if any(MISSING in names for names in client.sensors_read.values()):
        return with_sensors(config, client)
    asked = {
        "lifecycle.direct": config.lifecycle.direct,
        "lifecycle.absorb": config.lifecycle.absorb,
        "gates.twins": config.gates.twins,
    }
    if left_out := [name for name, value in asked.items() if value]:
        warn(
            f"settings sets {', '.join(left_out)}, which {type(client).__name__} does not know, so it is left out; give the "
            "controller 'heuristic' for it",
            GrowthWarning,
        )
    lifecycle = config.lifecycle.model_copy(update={"direct": False, "absorb": False})
    gates = config.gates.model_copy(update={"twins": False})
    probe = config.probe.model_copy(update={"sensors_every": config.probe.sensors_every or 0})
    return config.model_copy(update={"lifecycle": lifecycle, "gates": gates, "probe": probe})


def growth_menu(sites: Mapping[str, Site], config: GrowthConfig) -> list[Blueprint]:
    """Return the blueprints that may be planted: the named blueprints of every kind that a site has."""
    kinds = dict.fromkeys(site.stream.kind for site in sites.values())
    if config.blueprints is None:
        return [BLUEPRINTS[kind, name] for kind in kinds for name in MENU[kind] if (kind, name) in BLUEPRINTS]
    known = {**BLUEPRINTS, **LIVE_BLUEPRINTS}
    named = [(kind, name) for name in config.blueprints for kind in kinds if (kind, name) in known]
    for name in config.blueprints:
        if not any(name == other for _, other in named):
            get_blueprint(name, next(iter(kinds)), live=True)  # raises InputError, with the known names
    menu = [known[each] for each in named]
    for entry in menu:
        with drawn_with(0):
            chooses = not entry.copies and callable(getattr(entry.build(8, 8), "choose", None))
        if chooses:
            raise InputError(
                f"blueprint {entry.name!r} chooses its rows from the training examples of a task, which a network in your own "
                "training loop does not have; leave it out of blueprints"
            )
    return menu


def _within_budget(population: LivePopulation, budget: float) -> Space:
    """Return the space of a population without the seeds that exceed the whole budget. Raises InputError if nothing fits."""
    space, host = population.space, int(population.host_params[0])
    if not space.fits.any():
        reasons = [each for why in population.why_no_copy.values() for each in why.items()]
        why = [f"; at {name!r}, for one, {reason}" for name, reason in reasons[:1]]
        raise InputError(
            f"no blueprint of the menu fits a site: the menu is {', '.join(entry.name for entry in space.blueprints)}; name "
            "others, as settings={'blueprints': [...]}" + "".join(why)
        )
    costs = np.where(space.fits, space.cost[0], np.iinfo(np.int64).max)
    slot, cheapest = divmod(int(costs.argmin()), costs.shape[1])
    least = int(costs[slot, cheapest])
    if least > budget * host:
        raise InputError(
            f"budget {budget:g} of a model of {host:,} parameters allows {int(budget * host):,}, and the smallest seed has "
            f"{least:,}, {space.blueprints[cheapest].name} at {population.sites[slot].name!r}; give at least {least / host:.3g}"
        )
    return space._replace(fits=space.fits & (space.cost[0] <= budget * host))
