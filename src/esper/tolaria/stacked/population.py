"""Train and measure networks as stacked tensors on one device: the population that most engines grow. R rows, S slots."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, drawn_with, get_blueprint
from esper.kasmina.host import SegmentedHost, calling, dtype_of
from esper.kasmina.lifecycle import Edits, dormant, exported
from esper.kasmina.network.export import grown_network
from esper.kasmina.stack.body import Body, runs_by_row
from esper.kasmina.stack.layout import BEFORE, HERE
from esper.kasmina.stack.snapshot import Snapshot
from esper.leyline.config.tree import SENSOR_FAMILIES, Config
from esper.leyline.data.batches import Batch, leaves, map_leaves, picked, shape_leaves
from esper.leyline.data.keys import Purpose, scalar
from esper.leyline.data.task import SENSED, AnyTask, Instance, Objective, Split, Task
from esper.leyline.errors import DataFault, InputError
from esper.leyline.lifecycle.sites import Taps
from esper.leyline.lifecycle.slots import Tap
from esper.leyline.lifecycle.stages import ADDED, Stage
from esper.leyline.lifecycle.view import BlueprintInfo, Floats, Seeds, Space
from esper.leyline.text import counted
from esper.tolaria.measure.certifying import compared
from esper.tolaria.measure.coalitions import coalitions
from esper.tolaria.measure.probe import ProbeTensors, passed, probe, samples, sense
from esper.tolaria.measure.sensors import SENSORS, IntactStreams
from esper.tolaria.population import Figures, Indices, ParameterNorms, ProbeRequest, TrainedFigures, row_environments
from esper.tolaria.runtime import hold_freed_memory, read_packet, resolve_device, use_deterministic_kernels
from esper.tolaria.stacked.compiling import Passes, check_divisible
from esper.tolaria.stacked.data import RowExamples
from esper.tolaria.stacked.optimizer import GradScaler, StackedOptimizer, forget_skipped
from esper.tolaria.stacked.resident import ResidentData
from esper.tolaria.stacked.training import StepStatistics, check_modules, doses, resolve_amp, total_of, train


class StackedPopulation:
    """R hosts and their seeds in training; implements `tolaria.population.Population`.

    body: parameters, buffers and moments of every host and seed. data: the data that they are trained and measured on.
    feed, passes, optimizer: the batches, the forward and backward passes and the update rule of a training step.
    skipped (R,): updates of this episode that rows have skipped, because their gradients overflowed in float16.
    """

    def __init__(self, task: AnyTask, config: Config, instance: Indices) -> None:
        """`instance` (E,) names the instance of each environment.

        Raises InputError if the task, the config and the device do not fit together.
        """
        self.task, self.config = task, config
        self.device = resolve_device(config.device)
        if config.deterministic:
            use_deterministic_kernels(self.device)
        self.environment = row_environments(config, ghost=needs_ghost(task, config))
        instance = instance[self.environment]
        rows = len(instance)
        seen = config.envs * (2 if config.twin else 1)
        self.label = f"{counted(seen, 'network')} at data.batch_size {config.data.batch_size}"
        self.optimizer = StackedOptimizer(config.optimizer)
        self.objective = task.objective
        self._episode = -1
        self._trained: StepStatistics | None = None  # of the last step
        self._taught: Sequence[IntactStreams] | None = None  # of the present instances
        with drawn_with(0):
            self._dtype = dtype_of(task.largest())
        self._load(instance)
        menu = menu_of(task, config)
        if any(len(shape) > 1 for shape in shape_leaves(task.inputs)):
            hold_freed_memory()
        self.body = body = Body(
            task.largest,
            menu,
            rows,
            map_leaves(
                lambda leaf, shape: leaf.new_zeros(2, *shape), self.data.few(self.data.problems[0]), task.inputs
            ),
            mapping=config.mapping,
            isolated=config.lifecycle.isolation == "isolated",
            moments=self.optimizer.rule.moments,
            device=self.device,
            recomputed=config.activation_checkpointing,
            compiled=config.compile != "off",
        )
        products = resolve_amp(config.amp, self.device, body.dtype)
        check_modules(products, self.device, [body.host.template, *body.layout.forms.values()])
        check_divisible(body, config.data)
        self.scaler = GradScaler(body.host) if products == torch.float16 else None
        self.skipped = np.zeros(rows, np.int64)
        self.passes = Passes(body, total_of(body, lambda: self.objective, config, products), config, products)
        self.host_params = body.table.host_params
        self.space = _space(body, menu, config, self.environment, instance, self.data.bounds)

    def begin(self, instance: Indices, episode: int) -> None:
        if not np.array_equal(instance, self.data.instance):
            self._load(instance)
        body, self._episode, self._trained = self.body, episode, None
        body.clear()
        self.feed.reset(episode)
        keys, which = np.unique(instance, return_inverse=True)
        for index, name in enumerate(keys.tolist()):
            problem = self.data.problems[self.data.problem_of[index]]
            with drawn_with(scalar(self.config.seed, Purpose.HOST, name, episode)):
                host = problem.host()
            body.plant_host(np.flatnonzero(which == index).tolist(), host, self.data.few(problem), problem.outputs)
        body.mask_outputs()
        self.skipped[:] = 0
        if self.scaler is not None:
            self.scaler.begin()
        self._survey()

    def edit(self, changes: Edits, seeds: Seeds, step: int) -> None:
        def birth_key(row: int, slot: int) -> int:
            instance = int(self.data.instance[row])
            return scalar(self.config.seed, Purpose.BIRTH, instance, self._episode, step, slot)

        self.body.edit(changes, seeds, birth_key)
        _choose_rows(self.body, changes, seeds, self.data.fit, self.objective)

    def train(self, seeds: Seeds, *, parameter_norms: bool = False) -> None:
        self._trained = train(
            self.body,
            seeds,
            self.feed,
            self.optimizer,
            self.passes,
            self.config,
            (self.data.instance, self._episode),
            parameter_norms,
            self.scaler,
        )

    def probe(self, seeds: Seeds, asked: ProbeRequest) -> Figures:
        body, objective = self.body, self.objective
        probed = probe(body, seeds, self.data.probe, objective, asked.coalitions, signs=True)
        sensors = []
        if asked.sensors:
            families = self.config.probe.sensors or SENSOR_FAMILIES
            if self._taught is None and "drift" in families:  # computed once for the instances of the rows
                self._taught = taught_streams(self.data, body)
            taught = (self._taught or ()) if "drift" in families else ()
            sensors = [sense(body, seeds, self.data.fit, self.data.probe, objective, taught, families)]
        trained = self._trained if asked.trained else None
        training: list[Tensor] = []
        if trained is not None:
            training = [trained.loss, trained.gradient_norm, *trained.seed_norms]
            training += [norms for _, norms in trained.parameter_norms]
            training += [trained.skipped.updates] if trained.skipped is not None else []
        data = [self.feed.finite()] if asked.finite else []
        validation: list[Tensor] = []
        if asked.validation:
            assert self.data.validation is not None, "a validation split is read only with early stopping"
            scored = self._final(seeds, self.data.validation)
            validation = [scored.metric, scored.loss]
        grown = []
        if asked.look is not None:
            assert self.data.fresh is not None, "fresh examples are set aside for `gates.certify`"
            grown = [compared(body, seeds, asked.look, self.data.fresh, objective, self.config.gates)]
        packet = iter(read_packet([*probed, *sensors, *data, *validation, *grown, *training]))
        figures = Figures._make(
            [
                *itertools.islice(packet, len(probed)),
                next(packet) if sensors else None,
                next(packet) > 0 if data else None,
                (next(packet), next(packet)) if validation else None,
                next(packet) if grown else None,
                _read(trained, packet, self.space.slots) if trained is not None else None,
            ]
        )
        if trained is not None and figures.trained is not None and figures.trained.skipped is not None:
            forget_skipped(body, figures.trained.skipped, trained.seed_owners)
            self.skipped += figures.trained.skipped
        return figures

    @property
    def fresh(self) -> Sequence[Indices]:
        return self.data.set_aside

    def tainted(self, rows: Indices, step: int) -> list[int]:
        """Return which of some rows (n,) had batches in this step that are not finite.

        Raises DataFault if `data.nonfinite` is 'stop': the data were finite when they were loaded.
        """
        found = self.feed.nonfinite(rows, self.config.data.batches_per_step)
        if found and self.config.data.nonfinite == "stop":
            row, examples = found[0]
            raise DataFault(
                f"the train split of instance {self.data.instance[row]} of {self.task.name} was finite when it was loaded and "
                f"holds NaN or infinite values now, in example{'s' * (len(examples) > 1)} "
                f"{', '.join(map(str, examples[:5].tolist()))} of what environment {self.environment[row]} trained on in step "
                f"{step}; look for what writes into it, or go on without such steps: "
                "--set data.nonfinite=skip, or {'data': {'nonfinite': 'skip'}} in the config"
            )
        return [row for row, _ in found]

    def added_params(self, seeds: Seeds, stages: frozenset[Stage] = ADDED) -> Indices:
        return self.body.table.added_params(seeds, stages)

    def price(self, rows: Indices, slot: Indices, blueprint: Indices, blend: NDArray[np.integer[Any]]) -> Indices:
        return self.body.table.price(rows, slot, blueprint, blend)

    def growth(self, slot: Indices, blueprint: Indices) -> int:
        return self.body.growth(slot, blueprint)

    def keeper(self, seeds: Seeds) -> Snapshot:
        return Snapshot(self.body, seeds)

    def snapshot(self) -> dict[str, Any]:
        skipped = {} if self.scaler is None else {"skipped": self.skipped}
        return {"body": self.body.state(), "batch": self.feed.batch, **skipped}

    def load(self, tree: Mapping[str, Any], instance: Indices, episode: int) -> None:
        """Restore what `snapshot` returned. Raises ValueError if it came from another population.

        Modules are built first and then filled. The orders of the data are hashes of the instance, the episode and the
        epoch, so they are not part of a snapshot.
        """
        if not np.array_equal(instance, self.data.instance):
            self._load(instance)
        self.body.load_state(tree["body"])
        self._episode, self._trained = episode, None
        self.feed.reset(episode)
        self.feed.batch = tree["batch"]
        self.skipped = tree.get("skipped", self.skipped)
        self._survey()

    @property
    def compiled(self) -> dict[str, float] | None:
        """What was compiled and how often it ran, for the summary; None with `compile=off`."""
        if self.config.compile == "off":
            return None
        counts = asdict(self.passes.counts)
        return {**counts, "seconds": round(self.passes.counts.seconds, 3), "recompiled": self.passes.recompiled}

    # Evaluation and export at the end of an episode.

    def evaluate(self, seeds: Seeds, split: Split | Sequence[Split]) -> tuple[Floats, Floats]:
        """Return metric and loss on a split of the networks as exported now, each (R,).

        split: one split that all environments share, or one for each environment. Raises InputError if a split is
        longer than the rows of a mixture can hold.
        """
        probed = self._final(seeds, self._held(split))
        metric, loss = read_packet((probed.metric, probed.loss))
        return metric, loss

    @torch.no_grad()
    def outputs(self, seeds: Seeds, split: Split) -> Floats:
        self.body.train(False)
        nothing = coalitions(dormant(*seeds.stage.shape), None, terminal=False)
        output, _, _ = passed(self.body, exported(seeds), self._held(split), nothing.branches, signs=False)
        (packed,) = read_packet((output,))
        return packed

    def export(self, seeds: Seeds, env: int) -> tuple[nn.Module, dict[str, Any]]:
        problem = self.task.instance(int(self.data.instance[env]))
        return grown_network(problem.host, self.body, seeds, env, problem.interface)

    # Private methods.

    def _held(self, split: Split | Sequence[Split]) -> RowExamples:
        """Return the examples of one split for all environments, or of one for each, without those that are not finite."""
        splits, row = (
            ([split], np.zeros_like(self.environment)) if isinstance(split, Split) else (split, self.environment)
        )
        return self.data.stacked(self.data.sound(splits), row, "held")

    def _final(self, seeds: Seeds, examples: RowExamples) -> ProbeTensors:
        """Return metric and loss of the networks as exported, on the device."""
        nothing = coalitions(dormant(*seeds.stage.shape), None, terminal=False)
        return probe(self.body, exported(seeds), examples, self.objective, nothing, signs=False)

    def _load(self, instance: Indices) -> None:
        self._taught = None
        self.data = ResidentData(self.task, self.config, instance, self.device, self._dtype)
        self.feed = self.data.feed

    def _survey(self) -> None:
        """Copy the costs and widths of the hosts into the space, and which of them are frozen."""
        self.space = self.space._replace(
            cost=self.body.table.cost.copy(),
            width=self.body.table.taps[..., HERE].copy(),
            instance=self.data.instance,
            floor=self.data.bounds[:, 0],
            ceiling=self.data.bounds[:, 1],
            frozen=self.body.host.frozen(),
        )


def _space(
    body: Body, menu: Sequence[Blueprint], config: Config, environment: Indices, instance: Indices, bounds: Floats
) -> Space:
    """What can be decided in each row, of an environment (R,); bounds (R, 2) are the floor and the ceiling of the metric."""
    return Space(
        slots=tuple(slot.name for slot in body.slots),
        blueprints=tuple(BlueprintInfo(entry.name, entry.tap.value) for entry in menu),
        tempos=config.lifecycle.tempos,
        targets=config.lifecycle.targets,
        cost=np.zeros((len(instance), *body.layout.fits.shape), np.int64),  # set when the hosts are built
        fits=body.layout.fits & selected([slot.name for slot in body.slots], config)[:, None],
        width=np.zeros((len(instance), len(body.slots)), np.int64),  # set when the hosts are built
        sensors=tuple(sensor.name for sensor in SENSORS),
        max_seeds=config.lifecycle.max_seeds,
        seed=config.seed,
        number=config.first_instance + environment,
        instance=instance,
        floor=bounds[:, 0],
        ceiling=bounds[:, 1],
        objective=config.reward.objective,
        rent=config.reward.rent,
        rent_size=config.reward.rent_size,
        frozen=np.zeros(len(instance), bool),  # set when the hosts are built
        heads=sum(slot.head for slot in body.slots),
    )


def _read(trained: StepStatistics, packet: Iterator[Floats], slots: Sequence[str]) -> TrainedFigures:
    """Unpack the figures of a step's training from the rest of the packet that was read."""
    loss, norm = next(packet), next(packet)
    seed_norms = list(itertools.islice(packet, len(trained.seed_norms)))
    norms = None
    if trained.parameter_norms:
        host, *seeds = (zip(names, next(packet).T, strict=True) for names, _ in trained.parameter_norms)
        found: dict[str, Floats] = {}
        for (slot, rows), parts in zip(trained.seed_owners, seeds, strict=True):
            for name, values in parts:  # seeds of several forms share names, but no row has two of them in one slot
                found.setdefault(f"{slots[slot]}/{name}", np.full(len(loss), np.nan))[rows] = values
        norms = ParameterNorms(dict(host), found)
    skipped = next(packet).astype(np.int64) if trained.skipped is not None else None
    return TrainedFigures(loss, norm, seed_norms, trained.seed_owners, norms, skipped)


def check_memory(task: AnyTask, config: Config, available: int) -> None:
    """Raise InputError if a population and its data alone would take more memory than is available.

    The estimate is a lower bound: value, gradient and moments of every host's parameters, the snapshots of the governor
    and of early stopping, one batch of inputs, and a copy of the examples in memory. The problems of a mixture are not known
    yet, and are left out.
    """
    rows = config.envs * (1 + config.twin) + needs_ghost(task, config)
    moments = len(StackedOptimizer(config.optimizer).rule.moments)
    with drawn_with(0):
        host = sum(parameter.nbytes for parameter in task.largest().parameters())
    numbers = sum(math.prod(shape) for shape in shape_leaves(task.inputs))
    inputs = config.data.batch_size * numbers * torch.get_default_dtype().itemsize
    snapshots = config.governor.enabled + config.early_stopping.enabled
    copies = 2 + moments + snapshots * (1 + moments)
    data = 0
    if isinstance(task, Task):
        splits = [task.train, task.probe, *([task.validation] if config.early_stopping.enabled else [])]
        parts = [part for split in splits for part in (*leaves(split.x), split.y)]
        wide = dtype_of(task.largest()).itemsize
        data = sum(part.numel() * (wide if part.is_floating_point() else part.element_size()) for part in parts)
    needed = rows * (host * copies + inputs) + data
    if needed > available:
        whose = f"whose {counted(rows, 'network')} take" if data < needed / 2 else "and the data take"
        mend = "lower envs" if data < needed / 2 else "give fewer examples, or a Dataset with stream=True"
        raise InputError(
            f"envs is {config.envs:,}, {whose} at least {needed / 2**30:,.1f} GiB, but "
            f"{available / 2**30:,.1f} GiB of memory are available; {mend}"
        )


def _largest(task: AnyTask) -> SegmentedHost:
    with drawn_with(0):
        host = task.largest()
    assert isinstance(host, SegmentedHost)
    return host


def needs_ghost(task: AnyTask, config: Config) -> bool:
    """Return whether a row alone must run beside a copy of itself to have the bits that it has in a larger population.

    A product of one row can be rounded differently from one of several rows. Where each row runs by itself, on a CPU, there is
    no product of several rows.
    """
    if config.envs * (1 + config.twin) > 1:
        return False
    device = resolve_device(config.device)
    host = _largest(task)
    loop = device.type == "cpu" and config.mapping == "loop"
    return not loop and not runs_by_row(host, device, config.mapping, compiled=config.compile != "off")


def instance_keys(task: AnyTask, config: Config) -> NDArray[np.int64]:
    """Return (E,) the instances that the config names."""
    keys = task.keys(config.instances)
    first, last = config.first_instance, config.first_instance + config.envs - 1
    if last >= len(keys):
        raise InputError(
            f"first_instance {first} with {counted(config.envs, 'environment')} asks for instance {last} of the "
            f"{config.instances} instances of {task.name}, which has {len(keys)}; lower one of them"
        )
    return keys.start + first + np.arange(config.envs)


def menu_of(task: AnyTask, config: Config) -> tuple[Blueprint, ...]:
    """Return the blueprints that the menu names, each of the kinds that the host's slots have."""
    names = config.blueprints if config.blueprints is not None else task.menu
    if not names:
        raise InputError(f"the menu of task {task.name!r} is empty; name at least one blueprint")
    host = _largest(task)
    kinds = list(dict.fromkeys(slot.kind for slot in host.slots))
    if len(kinds) == 1:
        return tuple(get_blueprint(name, kinds[0]) for name in names)
    known = [[kind for kind in kinds if (kind, name) in BLUEPRINTS] for name in names]
    return tuple(
        get_blueprint(name, kind) for name, found in zip(names, known, strict=True) for kind in found or kinds[:1]
    )


def check_place(task: AnyTask, config: Config) -> None:
    """Raise InputError if the machine has no device as the config names it, or the host no such slots."""
    resolve_device(config.device)
    if config.slots is not None:
        host = _largest(task)
        selected([slot.name for slot in host.slots], config)


def selected(names: Sequence[str], config: Config) -> NDArray[np.bool_]:
    """Return (S,) bool: which of the slots of a host may be used. InputError if the config names others."""
    if config.slots is None:
        return np.ones(len(names), bool)
    for name in config.slots:
        if name not in names:
            raise InputError(f"the host has no slot {name!r}; it has {', '.join(names) or 'none'}")
    return np.array([name in config.slots for name in names], bool)


@torch.no_grad()
def taught_streams(data: ResidentData, body: Body) -> list[IntactStreams]:
    """Run the intact network of every row on the examples that the sensors are fitted on; one entry per slot.

    A stream of several positions is read at those that the sensors read, as one example each. Empty where no instance has an
    intact network.
    """
    if all(problem.intact is None for problem in data.problems):
        return []
    _, which = np.unique(data.instance, return_inverse=True)
    streams = [_streams(problem, data, body) for problem in data.problems]
    row, most = np.array(data.problem_of)[which].tolist(), data.fit.y.shape[1]
    found = []
    for slot in range(len(body.slots)):
        widths = (int(body.layout.widest.taps[slot, tap]) for tap in (HERE, BEFORE))
        pair = [
            _padded([None if each is None else each[slot][part] for each in streams], most, width)
            for part, width in enumerate(widths)
        ]
        found.append(
            IntactStreams(*(torch.stack([part[index] for index in row]).to(data.device, data.dtype) for part in pair))
        )
    return found


def _streams(problem: Instance, data: ResidentData, body: Body) -> list[tuple[Tensor, Tensor]] | None:
    """The stream and the segment's input at every slot of an intact network, (N, P, C) each at P positions; None without one."""
    if problem.intact is None:
        return None
    host, x = problem.intact()
    assert isinstance(host, SegmentedHost), type(host)
    seen: list[tuple[Tensor, Tensor]] = []

    def visit(slot: int, taps: Taps[Batch]) -> Batch:
        kind, here = body.layout.streams[slot], taps.here
        assert isinstance(here, Tensor), "a segment must return one tensor"
        stream = kind.positions(here[None])[0]
        before = torch.full_like(stream[:, :1], torch.nan)
        if body.layout.widest.taps[slot, BEFORE]:
            assert isinstance(taps.before, Tensor), "what has a width is one tensor"
            before = kind.positions(kind.fitted(taps.before, here)[None])[0]
        seen.append((stream.unflatten(0, (len(here), -1)), before.unflatten(0, (len(here), -1))))
        return here

    host.eval()
    host.chain.run(calling(host.segments), picked(problem.read(x, data.dtype), slice(SENSED)), visit)
    return seen


def _padded(parts: Sequence[Tensor | None], most: int, width: int) -> list[Tensor]:
    """Streams (N, P, C) of several networks -> (most * P, width) each, with 0 added; nan everywhere for None."""
    positions = next(part.shape[1] for part in parts if part is not None)
    width = max(width, 1)
    return [
        torch.full((most * positions, width), torch.nan)
        if part is None
        else F.pad(part, (0, width - part.shape[2], 0, 0, 0, most - len(part))).flatten(0, 1)
        for part in parts
    ]


def _choose_rows(body: Body, edits: Edits, seeds: Seeds, fit: RowExamples, objective: Objective) -> None:
    """Let the seeds that an edit has planted choose their rows, from the training examples that the sensors are fitted on.

    A seed sees what it reads, (N, r), and the gradient of the loss for the stream of its slot, (N, w), with the population at its
    present doses and the seed itself without effect. Nothing is computed where no such seed was planted.
    """
    layout = body.layout

    def chooses(env: int, slot: int) -> bool:
        """Whether the module of the seed has a method `choose(u, gradient)`, which fixes the rows that it trains."""
        form = layout.forms[slot, int(layout.form_of[slot, seeds.blueprint[env, slot]])]
        return callable(getattr(form.delta, "choose", None))

    born = [(env, slot) for env, slot in edits.born.tolist() if chooses(env, slot)]
    if not born:
        return
    body.train(False)
    routes = [body.route(doses(seeds), seeds, part=part, frozen=True) for part in body.parts]
    seen = samples(body, routes, fit, objective, ("gradient",))
    for env, slot in born:
        sample, blueprint = seen[slot], int(seeds.blueprint[env, slot])
        at = slot, int(layout.form_of[slot, blueprint])
        row = int(np.flatnonzero(body.envs[at] == env)[0])
        seed = body.seed_module(seeds, env, slot)
        u = sample.before if layout.menu[blueprint].tap == Tap.BEFORE else sample.stream
        reads, writes = (
            body.table.taps[env, slot, BEFORE if u is sample.before else HERE],
            body.table.taps[env, slot, HERE],
        )
        real = slice(None) if sample.real is None else sample.real[env]
        assert sample.gradient is not None, "it was asked for"
        with torch.no_grad():
            seed.delta.choose(u[env][real, :reads], sample.gradient[env][real, :writes])  # type: ignore[operator]
        body.stacks[at].write(row, seed)
