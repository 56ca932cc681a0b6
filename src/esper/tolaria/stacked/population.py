"""Train and measure networks as stacked tensors on one device: the population that most engines grow. R rows, S slots."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, drawn_with, get_blueprint
from esper.kasmina.host import SegmentedHost, check_host, drawn_host, dtype_of, segment_outputs
from esper.kasmina.lifecycle import Edits, doses, exported
from esper.kasmina.network.export import grown_network
from esper.kasmina.stack.body import Body, runs_by_row
from esper.kasmina.stack.fused import layers_of
from esper.kasmina.stack.layout import BEFORE, HERE
from esper.kasmina.stack.plan import Branches, Indices, Route
from esper.kasmina.stack.rows import stacks_directly
from esper.kasmina.stack.snapshot import Snapshot
from esper.kasmina.stack.wider_rows import BodyWidening, HiddenWidening, plan_widenings, wider_hosts
from esper.leyline.config.tree import SENSOR_FAMILIES, Config
from esper.leyline.data.batches import Batch, leaves, map_leaves, named_leaves, on_cpu, picked
from esper.leyline.data.duplicates import example_digests
from esper.leyline.data.keys import Purpose, key, scalar
from esper.leyline.data.task import (
    SENSED,
    AnyTask,
    Differentiated,
    Instance,
    Mixture,
    Objective,
    Split,
    Task,
    finite,
    nonfinite,
)
from esper.leyline.lifecycle.slots import Tap
from esper.leyline.lifecycle.view import Floats, Seeds
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import DataFault, InputError, counted
from esper.tolaria.measure.bounds import bounds
from esper.tolaria.measure.certifying import compared, set_aside
from esper.tolaria.measure.probe import passed, probe, samples, sense
from esper.tolaria.measure.sensors import IntactStreams
from esper.tolaria.population import Figures, ProbeRequest, TrainedFigures, row_environments, space_of
from esper.tolaria.runtime import (
    Waits,
    available_memory,
    check_modules,
    hold_freed_memory,
    products_in,
    read_packet,
    resolve_amp,
    resolve_device,
    same_products,
    use_deterministic_kernels,
)
from esper.tolaria.stacked.compiling import PassBatch, Passes, PassLoss, check_divisible
from esper.tolaria.stacked.data import Format, RowExamples, SharedBatchIterator, distinct_splits, stack_splits
from esper.tolaria.stacked.optimizer import MOMENTS, GradScaler, StepUpdates, Updates, forget_skipped


class ResidentData:
    """Holds the problems of R rows, on the device: train splits, and the examples that rows are measured on.

    A problem that several instances share is held once. instance (R,): key of the instance of each row. row (R,): place of its
    problem in `problems`. feed: batches of the train splits. fit: examples for the sensors. fresh: examples for certified keeps.
    set_aside: for each row, digests (N,) of its fresh examples. bounds (R, 2): metric on the probe split of the best constant
    prediction, and of the perfect prediction.
    """

    def __init__(
        self, task: AnyTask, config: Config, instance: Indices, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raise InputError if a split is not finite, or a host does not run on it."""
        self.task, self.config, self.device, self.dtype = task, config, device, dtype
        self.instance = instance
        keys, which = np.unique(instance, return_inverse=True)
        # One problem has the same host, examples and labels, as objects; here by these, with the first key of each.
        problems: dict[tuple[int, ...], tuple[int, Instance]] = {}
        objects = []
        for name in keys.tolist():
            problem = task.instance(name)
            tensors = (part for split in (problem.train, problem.probe, problem.validation) for part in split)
            objects.append((id(problem.host), *map(id, tensors)))
            problems.setdefault(objects[-1], (name, problem))
        row = self.row = np.array([list(problems).index(each) for each in objects])[which]
        self.problems = [self._checked(name, problem) for name, problem in problems.values()]
        # the source is what training examples are read from by batch
        first, source = self.problems[0], self.problems[0].source
        read = {(each.pixels, id(each.scaling), id(each.source)) for each in self.problems}
        assert len(read) == 1, "all instances must read bytes in the same way, and share their scaling and their source"
        if source is not None and config.data.nonfinite == "skip":
            raise InputError(
                f"data.nonfinite is skip, but {task.name} reads its training examples batch by batch, so those to skip are "
                "not known; leave them out of the Dataset, for example by torch.utils.data.Subset"
            )
        trains = [problem.train for problem in self.problems]
        weights = [each.weights for each in self.problems if each.weights is not None]
        assert len(weights) in (0, len(trains)), "either all instances have weights or none"
        self.format = Format(task.inputs, device, dtype, first.pixels, first.scaling)
        self.feed = SharedBatchIterator(
            trains,
            row,
            instance,
            config.seed,
            config.data.batch_size,
            self.format,
            weights or None,
            source,
            read_ahead=config.data.read_ahead,
            batches=config.steps * config.data.batches_per_step,
        )
        self.fresh, self.set_aside = None, [np.zeros(0, np.int64)] * len(row)
        if config.gates.certify is not None:
            parts = [set_aside(each.probe, config.gates.certify_share, config.seed) for each in self.problems]
            self.problems = [replace(each, probe=probe) for each, (probe, _) in zip(self.problems, parts, strict=True)]
            digests = [example_digests(*fresh).cpu().numpy() for _, fresh in parts]
            self.set_aside = [digests[index] for index in row]
            self.fresh = self.stacked([fresh for _, fresh in parts], row, "probe")
        self.bounds = np.array([bounds(task.objective, each.probe, each.target_scaling) for each in self.problems])[row]
        sensed = slice(SENSED)
        self.fit = self.stacked([Split(picked(each.x, sensed), each.y[sensed]) for each in trains], row, "sensed")
        self.probe = self.stacked([each.probe for each in self.problems], row, "probe")
        self.validation = None
        if config.early_stopping.enabled:
            self.validation = self.stacked([each.validation for each in self.problems], row, "held")

    def few(self, problem: Instance) -> Batch:
        """Return a few training examples as the hosts of a problem read them."""
        return problem.read(picked(problem.train.x, slice(2)), self.dtype)

    def stacked(self, splits: Sequence[Split], row: Indices, part: str) -> RowExamples:
        """Move splits to the device; row (R,) names the split of each. In a mixture they are padded to the length of `part`."""
        lengths, length = self.task.lengths, None
        if lengths is not None:
            length = {"sensed": SENSED, "probe": lengths.probe, "held": lengths.held}[part]
        return stack_splits(splits, row, self.format, length)

    def _checked(self, name: int, problem: Instance) -> Instance:
        """Return a problem whose splits are finite and whose host runs on them. Raises InputError if it is not such a problem."""
        of = f"instance {name} of {self.task.name}" if isinstance(self.task, Mixture) else f"task {self.task.name}"
        train, probe, validation = (
            finite(getattr(problem, part), f"the {part} split of {of}", self.config.data.nonfinite)
            for part in ("train", "probe", "validation")
        )
        with drawn_with(0):
            few = self.few(replace(problem, train=train))
            check_host(problem.host(), few, problem.outputs, objective=self.task.objective, y=train.y[:2])
        weights = problem.weights
        if weights is not None and len(train.y) < len(weights):
            weights = weights[~nonfinite(problem.train)]
        return replace(problem, train=train, probe=probe, validation=validation, weights=weights)


def sound_splits(splits: Sequence[Split], task: AnyTask, config: Config) -> list[Split]:
    """Return splits to evaluate on, treated as `data.nonfinite` says; what several environments share stays one split."""
    distinct, places = distinct_splits(splits)
    found = [finite(split, f"a held-out split of {task.name}", config.data.nonfinite) for split in distinct]
    return [found[place] for place in places.tolist()]


@torch.no_grad()
def differentiated(objective: Objective, output: Tensor, target: Tensor) -> Differentiated:
    """Return losses (n, B), and a function from their gradient to that of the output, by autograd if an objective has none."""
    own = getattr(objective, "differentiated", None)
    if own is not None and (known := own(output, target)) is not None:
        return known
    leaf = output.detach().requires_grad_()
    with torch.enable_grad():
        losses = objective.loss(leaf, target)
    return losses.detach(), lambda gradient: torch.autograd.grad(losses, leaf, gradient)[0]


class StackedPopulation:
    """Trains R hosts and their seeds; implements `tolaria.population.TaskPopulation`."""

    def __init__(self, task: AnyTask, config: Config, instance: Indices | None = None) -> None:
        """`instance` (E,) names the instances; by default the config names them.

        Raises InputError if the task, the config and the device do not fit together.
        """
        self.task, self.config = task, config
        self.widenings = widenings_of(task, config)
        self.device = resolve_device(config.device)
        check_memory(task, config, available_memory(self.device), self.widenings)  # before any row is allocated
        if config.deterministic:
            use_deterministic_kernels(self.device)
        self.environment = row_environments(config, ghost=needs_ghost(task, config))
        keys = instance_keys(task, config) if instance is None else np.asarray(instance, np.int64)
        instance = keys[self.environment]
        rows = len(instance)
        self.label = label_of(config)
        self.first_env = 0  # number of the first environment in the run, where others are in other processes
        self.optimizer = partial(Updates, config=config.optimizer)
        self.objective = task.objective
        self._episode = -1
        self._trained: TrainedFigures | None = None  # of the last step, on the device
        self._taught: Sequence[IntactStreams] | None = None  # of the present instances
        self._dtype = dtype_of(drawn_host(task.largest))
        # the gradient of the loss of a pass in an update that sums several
        self._one = torch.ones((), dtype=self._dtype, device=self.device) / config.optimizer.accumulation_steps
        self._load(instance)
        if any(len(shape) > 1 for shape in named_leaves(task.inputs).values()):
            hold_freed_memory()
        self._products = resolve_amp(config.amp, self.device, self._dtype)
        self._keepers: list[Snapshot] = []
        self._set_widths(0)
        check_modules(self._products, self.device, [self.body.host.template, *self.body.layout.forms.values()])
        check_divisible(self.body, config.data)
        self.skipped = np.zeros(rows, np.int64)  # (R,) updates of this episode that overflowed in float16
        self._survey()

    def begin(self, instance: Indices, episode: int) -> None:
        if not np.array_equal(instance, self.data.instance):
            self._load(instance)
        if self.widened:
            self._begin_with(0)
        body, self._episode, self._trained = self.body, episode, None
        body.clear()
        self.feed.reset(episode)
        for name in np.unique(instance).tolist():
            rows = np.flatnonzero(instance == name).tolist()
            problem = self.data.problems[self.data.row[rows[0]]]
            host = drawn_host(problem.host, scalar(self.config.seed, Purpose.HOST, name, episode))
            body.plant_host(rows, host, self.data.few(problem), problem.outputs)
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

    def widen(self, seeds: Seeds, step: int) -> None:
        old, passes, widened, instance = self.body, self.passes, self.widened, self.data.instance

        def host(row: int) -> SegmentedHost:
            return drawn_host(wider_hosts(self.task.instance(int(instance[row])).host, self.widenings[:widened]))

        def key(row: int) -> int:
            return scalar(self.config.seed, Purpose.WIDENING, int(instance[row]), self._episode, step)

        self._set_widths(widened + 1)
        self.passes.follow(passes)
        body, problem = self.body, self.data.problems[0]
        wider = drawn_host(wider_hosts(problem.host, self.widenings[: widened + 1]))
        body.plant_host(range(len(instance)), wider, self.data.few(problem), problem.outputs)
        body.mask_outputs()
        widening = BodyWidening(old, body, self.widenings[widened], host, key)
        widening.move(seeds)
        for keeper in self._keepers:
            keeper.widen(widening)
        self._taught = None
        self._survey()

    def train(self, seeds: Seeds, parameter_norms: bool = False) -> None:
        body, feed, config = self.body, self.feed, self.config
        shadow = config.lifecycle.incubation == "shadow"
        branches, dose, rows = shadows(seeds), doses(seeds), len(seeds.stage)
        routes = [
            body.route(
                dose, seeds, branches.within(part)[0] if shadow else None, part=part, train=True, straight=not shadow
            )
            for part in body.parts
        ]
        accumulate = config.optimizer.accumulation_steps
        updates = config.data.batches_per_step // accumulate
        steps = StepUpdates(body, seeds, self.optimizer, updates, self.scaler, parameter_norms)

        body.train(True)
        loss = torch.zeros(rows, dtype=body.dtype, device=body.device)
        sums, draws = [loss[route.part] for route in routes], body.draws
        last = config.steps * config.data.batches_per_step
        with same_products(self._products, self.device):
            for _ in range(steps.updates):
                for _ in range(accumulate):
                    keys = None
                    if draws:
                        keys = key(config.seed, Purpose.DROPOUT, self.data.instance, self._episode, feed.batch)
                    feed.advance()
                    for route, total in zip(routes, sums, strict=True):
                        part = route.part
                        factors = None if self.scaler is None else self.scaler.scale[part]
                        own = None if keys is None else keys[part]
                        batch = PassBatch(*feed.of(part), feed.weights_of(part), factors, own)
                        total += self.passes.forward_backward(route, batch, last - feed.batch)
                steps.update()
        self._trained = steps.figures(loss / config.data.batches_per_step)

    def _loss(self, route: Route, batch: PassBatch) -> tuple[PassLoss, Tensor]:
        """Compute the loss of a route on a batch: what it is differentiated by, and the losses (n,) of its rows."""
        body, config = self.body, self.config
        x, y, weights, factors, keys = batch
        with products_in(self._products, body.device):
            tape = body.tape()
            with nullcontext() if tape is None else torch.no_grad():
                result = body.run(x, route, keys=keys, tape=tape)
        outputs = [(result.output, y, weights, factors)]
        if result.branches is not None:
            assert route.origin is not None
            of_examples, of_rows = (
                None if each is None else each.index_select(0, route.origin) for each in (weights, factors)
            )
            outputs.append((result.branches, y.index_select(0, route.origin), of_examples, of_rows))

        def trains(result: Tensor) -> bool:
            return result.requires_grad or (tape is not None and tape.wants(result))

        one = self._one
        means, gradients = [], []
        for output, target, of_examples, of_rows in outputs:
            output = output.to(body.dtype)
            losses, back = differentiated(self.objective, output, target)  # losses (n, B) of the examples
            means.append((losses if of_examples is None else losses * of_examples).mean(1))
            if trains(output):
                of_mean = one if of_rows is None else one * of_rows[:, None]
                own = (of_mean / losses.shape[1]).expand_as(losses)
                gradients.append((output, back(own if of_examples is None else own * of_examples)))
        if (pull := result.proximal) is not None and trains(pull):
            of_pull = one * config.lifecycle.proximal
            gradients.append((pull, of_pull.expand_as(pull) if factors is None else of_pull * factors))
        return PassLoss(tape, gradients), means[0]

    def probe(self, seeds: Seeds, asked: ProbeRequest) -> Figures:
        body, objective = self.body, self.objective
        probed = probe(body, seeds, self.data.probe, objective, asked.branches, signs=True)
        sensors = validation = looked = None
        if asked.sensors:
            families = self.config.probe.sensors or SENSOR_FAMILIES
            if self._taught is None and "drift" in families:  # computed once for the instances of the rows
                self._taught = taught_streams(self.data, body)
            taught = (self._taught or ()) if "drift" in families else ()
            sensors = sense(body, seeds, self.data.fit, self.data.probe, objective, taught, families)
        if asked.validation:
            assert self.data.validation is not None, "a validation split is read only with early stopping"
            validation = self._final(seeds, self.data.validation)
        if asked.look is not None:
            assert self.data.fresh is not None, "fresh examples are set aside for `gates.certify`"
            looked = compared(body, seeds, asked.look, self.data.fresh, objective, self.config.gates)
        finite = self.feed.finite() if asked.finite else None
        further = {"sensors": sensors, "finite": finite, "validation": validation, "compared": looked}
        found = read_packet({**probed, **further, "trained": self._trained if asked.trained else None})
        if found["finite"] is not None:
            found["finite"] = found["finite"] > 0
        if (trained := found["trained"]) is not None and trained.skipped is not None:
            skipped = trained.skipped.astype(np.int64)
            forget_skipped(body, skipped, trained.seed_trained)
            self.skipped += skipped
            found["trained"] = trained._replace(skipped=skipped)
        return Figures(**found)

    def tainted(self, rows: Indices, step: int) -> list[int]:
        found = self.feed.nonfinite(rows, self.config.data.batches_per_step)
        if found and self.config.data.nonfinite == "stop":
            row, examples = found[0]
            env = self.first_env + self.environment[row]
            raise DataFault(
                f"the train split of instance {self.data.instance[row]} of {self.task.name} was finite when it was loaded and "
                f"holds NaN or infinite values now, in example{'s' * (len(examples) > 1)} "
                f"{', '.join(map(str, examples[:5].tolist()))} of what environment {env} trained on in step "
                f"{step}; look for what writes into it, or go on without such steps: "
                "--set data.nonfinite=skip, or {'data': {'nonfinite': 'skip'}} in the config"
            )
        return [row for row, _ in found]

    def growth(self, rows: Indices, slot: Indices, blueprint: Indices) -> int:
        return self.body.growth(slot, blueprint)

    def keeper(self, seeds: Seeds) -> Snapshot:
        self._keepers.append(Snapshot(self.body, seeds, self.config.lifecycle.embargo))
        return self._keepers[-1]

    def snapshot(self) -> dict[str, Any]:
        return {
            "body": self.body.state(),
            "batch": self.feed.batch,
            "widened": self.widened,
            "skipped": self.skipped,
        }

    def load(self, tree: Mapping[str, Any], instance: Indices, episode: int) -> None:
        # The orders of the data are hashes of the instance, the episode and the epoch, so they are not part of a snapshot.
        if not np.array_equal(instance, self.data.instance):
            self._load(instance)
        if tree["widened"] != self.widened:
            self._begin_with(tree["widened"])
        self.body.load_state(tree["body"])
        self.body.arrange(Seeds(**tree["seeds"]))  # what came from several processes is in their order
        self._episode, self._trained = episode, None
        self.feed.reset(episode)
        self.feed.batch = tree["batch"]
        self.skipped = np.array(tree["skipped"])
        self._survey()

    @property
    def compiled(self) -> dict[str, float] | None:
        if self.config.compile == "off":
            return None
        counts = asdict(self.passes.counts)
        return {**counts, "seconds": round(self.passes.counts.seconds, 3), "recompiled": self.passes.recompiled}

    @property
    def overflowed(self) -> Indices | None:
        return None if self.scaler is None else self.skipped

    @property
    def waits(self) -> Waits | None:
        return None if self.feed.reader is None else self.feed.reader.waits

    def close(self) -> None:
        self.feed.close()

    # Evaluation and export at the end of an episode.

    def validation_splits(self) -> list[Split]:
        return [self.data.problems[at].validation for at in self.data.row[: self.config.envs].tolist()]

    def evaluate(self, seeds: Seeds, split: Split | Sequence[Split]) -> tuple[Floats, Floats]:
        metric, loss = read_packet(self._final(seeds, self._held(split)))
        return metric, loss

    @torch.no_grad()
    def outputs(self, seeds: Seeds, split: Split) -> Floats:
        self.body.train(False)
        none = Branches.none(seeds.stage.shape[1])
        output, _, _ = passed(self.body, exported(seeds), self._held(split), none, signs=False)
        return read_packet(output)

    def export(self, seeds: Seeds, env: int) -> tuple[nn.Module, dict[str, Any]]:
        problem = self.task.instance(int(self.data.instance[env]))
        return grown_network(problem.host, self.body, seeds, env, problem.interface, self.widenings[: self.widened])

    # Private methods.

    def _held(self, split: Split | Sequence[Split]) -> RowExamples:
        """Return the examples of one split for all environments, or of one for each, without those that are not finite."""
        splits, row = (
            ([split], np.zeros_like(self.environment)) if isinstance(split, Split) else (split, self.environment)
        )
        return self.data.stacked(sound_splits(splits, self.task, self.config), row, "held")

    def _final(self, seeds: Seeds, examples: RowExamples) -> tuple[Tensor, Tensor]:
        """Return metric and loss of the networks as exported, on the device."""
        none = Branches.none(seeds.stage.shape[1])
        probed = probe(self.body, exported(seeds), examples, self.objective, none, signs=False)
        return probed["metric"], probed["loss"]

    def _load(self, instance: Indices) -> None:
        self._taught = None
        self.data = ResidentData(self.task, self.config, instance, self.device, self._dtype)
        self.feed, self.set_aside = self.data.feed, self.data.set_aside

    def _set_widths(self, widened: int) -> None:
        """Make an empty body for hosts that were widened so many times."""
        rows, few, widenings = len(self.environment), self.data.few(self.data.problems[0]), self.widenings[:widened]
        self.widened = widened
        self.body = body_of(self.task, self.config, rows, few, self.device, widenings)
        self.scaler = GradScaler(self.body.host) if self._products == torch.float16 else None
        self.passes = Passes(self.body, self._loss, self.config, self._products)
        self.table = self.body.table
        self.host_params = self.table.host_params

    def _begin_with(self, widened: int) -> None:
        """Take a body for hosts that were widened so many times; what is held of the rows is dropped."""
        self._set_widths(widened)
        for keeper in self._keepers:
            keeper.begin(self.body)

    def _survey(self) -> None:
        """Describe what can be decided in each row, with the costs and widths of the hosts, 0 until they are built."""
        body, config, bounds = self.body, self.config, self.data.bounds
        slots = tuple(slot.name for slot in body.slots)
        self.space = space_of(
            config,
            body.layout.menu,
            slots=slots,
            cost=self.table.cost.copy(),
            fits=body.layout.fits & selected(slots, config)[:, None],
            width=self.table.taps[..., HERE].copy(),
            number=config.first_instance + self.environment,
            instance=self.data.instance,
            floor=bounds[:, 0],
            ceiling=bounds[:, 1],
            frozen=body.host.frozen(),
            heads=sum(slot.head for slot in body.slots),
        )


def widenings_of(task: AnyTask, config: Config) -> tuple[HiddenWidening, ...]:
    """Return the widenings of the hosts of a task, in order. InputError if they cannot be wider."""
    if not config.widen.at:
        return ()
    if isinstance(task, Mixture):
        raise InputError(
            f"widen.at is set, but the hosts of {task.name} differ from instance to instance, and only hosts of one task "
            "become wider together; leave widen out"
        )
    dtype = dtype_of(drawn_host(task.largest))
    few = on_cpu(task.read(picked(task.train.x, slice(2))), dtype)
    rows, copies = _rows_and_copies(task, config)
    most = available_memory(resolve_device(config.device)) / (rows * copies)
    widen = config.widen
    return plan_widenings(task.host, menu_of(task, config), few, dtype, widen.factor, len(widen.at), most)


def _rows_and_copies(task: AnyTask, config: Config) -> tuple[int, int]:
    """Return how many rows there are, and how many numbers are kept for each parameter: value, gradient, moments, snapshots."""
    rows = config.envs * (1 + config.twin) + needs_ghost(task, config)
    moments = len(MOMENTS[config.optimizer.name])
    snapshots = config.governor.enabled + config.early_stopping.enabled
    return rows, 2 + moments + snapshots * (1 + moments)


def body_of(
    task: AnyTask,
    config: Config,
    rows: int,
    few: Batch,
    device: torch.device,
    widenings: Sequence[HiddenWidening] = (),
) -> Body:
    """Return a body with room for the hosts of a task, widened. few: examples as one of these hosts reads them."""
    return Body(
        wider_hosts(task.largest, widenings),
        menu_of(task, config),
        rows,
        map_leaves(lambda leaf, shape: leaf.new_zeros(2, *shape), few, task.inputs),
        mapping=config.mapping,
        isolated=config.lifecycle.isolation == "isolated",
        moments=MOMENTS[config.optimizer.name],
        device=device,
        recomputed=config.activation_checkpointing,
        compiled=config.compile != "off",
    )


def label_of(config: Config) -> str:
    """Describe a population in words, for messages."""
    return f"{counted(config.envs * (1 + config.twin), 'network')} at data.batch_size {config.data.batch_size}"


def check_memory(task: AnyTask, config: Config, available: int, widenings: tuple[HiddenWidening, ...] = ()) -> None:
    """Raise InputError if a population and its data alone would take more memory than is available.

    The estimate is a lower bound: value, gradient and moments of every host's parameters, the snapshots of the governor
    and of early stopping, one batch of inputs, and a copy of the examples in memory. The problems of a mixture are not known
    yet, and are left out.
    """
    rows, copies = _rows_and_copies(task, config)
    host = sum(parameter.nbytes for parameter in drawn_host(wider_hosts(task.largest, widenings)).parameters())
    numbers = sum(map(math.prod, named_leaves(task.inputs).values()))
    inputs = config.data.batch_size * numbers * torch.get_default_dtype().itemsize
    data = 0
    if isinstance(task, Task):
        splits = [task.train, task.probe, *([task.validation] if config.early_stopping.enabled else [])]
        parts = [part for split in splits for part in (*leaves(split.x), split.y)]
        wide = dtype_of(drawn_host(task.largest)).itemsize
        data = sum(part.numel() * (wide if part.is_floating_point() else part.element_size()) for part in parts)
    needed = rows * (host * copies + inputs) + data
    if needed > available:
        whose = f"whose {counted(rows, 'network')} take" if data < needed / 2 else "and the data take"
        mend = "lower envs" if data < needed / 2 else "give fewer examples, or a Dataset with stream=True"
        raise InputError(
            f"envs is {config.envs:,}, {whose} at least {needed / 2**30:,.1f} GiB, but "
            f"{available / 2**30:,.1f} GiB of memory are available; {mend}"
        )


def needs_ghost(task: AnyTask, config: Config) -> bool:
    """Return whether a row alone must run beside a copy of itself to have the bits that it has in a larger population.

    On a CPU it need not where each row runs by itself, and where segments are called once for all rows, neither compiled nor in
    another type (`Stack.__call__`). Other ways may take another kernel for one row than for several.
    """
    if config.envs * (1 + config.twin) > 1:
        return False
    device, compiled = resolve_device(config.device), config.compile != "off"
    if device.type != "cpu":
        return True
    host = drawn_host(task.largest)
    direct = all(stacks_directly(host, segment, layers_of(segment)) for segment in host.segments)
    alike = direct and resolve_amp(config.amp, device, dtype_of(host)) is None
    return not (
        config.mapping == "loop"
        or runs_by_row(host, device, config.mapping, compiled=compiled)
        or (alike and config.mapping == "auto" and not compiled)
    )


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
    kinds = list(dict.fromkeys(slot.kind for slot in drawn_host(task.largest).slots))
    having = {name: [kind for kind in kinds if (kind, name) in BLUEPRINTS] or kinds[:1] for name in names}
    return tuple(get_blueprint(name, kind) for name in names for kind in having[name])


def check_place(task: AnyTask, config: Config) -> None:
    """Raise InputError if the machine has no device as the config names it, or the host no such slots."""
    resolve_device(config.device)
    if config.slots is not None:
        selected([slot.name for slot in drawn_host(task.largest).slots], config)


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
    streams = [None if each.intact is None else _streams(*each.intact(), each, data, body) for each in data.problems]
    known = next((each for each in streams if each is not None), None)
    if known is None:
        return []
    absent = pytree.tree_map(lambda features: torch.full_like(features, torch.nan), known)
    of_rows = [streams[index] or absent for index in data.row.tolist()]
    return pytree.tree_map(lambda *rows: torch.stack(rows).to(data.device, data.dtype), *of_rows)


def _streams(host: nn.Module, x: Batch, problem: Instance, data: ResidentData, body: Body) -> list[IntactStreams]:
    """Return the streams of an intact network on examples x, without the axis of the rows, as wide and as many as of any row."""
    assert isinstance(host, SegmentedHost), type(host)
    host.eval()
    streams = segment_outputs(host.segments, picked(problem.read(x, data.dtype), slice(SENSED)))
    most, found = data.fit.y.shape[1], []
    for slot, kind, widest in zip(host.slots, body.layout.streams, body.layout.widest.taps.tolist(), strict=True):
        before, here = streams[slot.start], streams[slot.after + 1]
        assert isinstance(here, Tensor), "a segment must return one tensor"
        stream = kind.positions(here[None])[0]
        read = torch.full_like(stream[:, :1], torch.nan)
        if widest[BEFORE]:
            assert isinstance(before, Tensor), "what has a width is one tensor"
            read = kind.positions(kind.fitted(before, here)[None])[0]
        missing = (most - len(here)) * len(stream) // len(here)  # positions of further examples, which come last
        padded = (
            F.pad(each, (0, max(widest[tap], 1) - each.shape[1], 0, missing))
            for each, tap in ((stream, HERE), (read, BEFORE))
        )
        found.append(IntactStreams(*padded))
    return found


def _choose_rows(body: Body, edits: Edits, seeds: Seeds, fit: RowExamples, objective: Objective) -> None:
    """Let the seeds that an edit has planted choose their rows, from the training examples that the sensors are fitted on.

    A seed sees what it reads, (N, r), and the gradient of the loss for the stream of its slot, (N, w), with the population at its
    present doses and the seed itself without effect. Nothing is computed where no such seed was planted.
    """
    layout = body.layout

    def chooses(env: int, slot: int) -> bool:
        """Return whether the module of the seed has a method `choose(u, gradient)`, which fixes the rows that it trains."""
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
        reads, writes = body.table.widths_of(env, slot, blueprint)
        real = slice(None) if sample.real is None else sample.real[env]
        assert sample.gradient is not None, "it was asked for"
        with torch.no_grad():
            seed.delta.choose(u[env][real, :reads], sample.gradient[env][real, :writes])  # type: ignore[operator]
        body.stacks[at].write(row, seed)


def shadows(seeds: Seeds) -> Branches:
    """Return one branch for each incubating seed: the network with this one seed at dose 1, every other at its own dose."""
    env, slot = np.nonzero(seeds.stage == Stage.TRAINING)
    dose = doses(seeds)[env]
    dose[np.arange(len(env)), slot] = 1
    return Branches.at(env, slot, dose)[0]
