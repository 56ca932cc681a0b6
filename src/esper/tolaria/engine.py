"""The engine: a vector environment whose step trains, probes and edits a whole population. E environments, S slots."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, drawn_with, get_blueprint
from esper.kasmina.body import Body
from esper.kasmina.export import grown_network
from esper.kasmina.gates import judge
from esper.kasmina.host import SegmentedHost, check_host
from esper.kasmina.lifecycle import apply, dormant, edits, legal, tick, transitions
from esper.leyline.actions import Actions
from esper.leyline.config import Config
from esper.leyline.errors import InputError
from esper.leyline.keys import Purpose, scalar
from esper.leyline.protocols import PolicyClient
from esper.leyline.stages import Stage
from esper.leyline.task import AnyTask, Instance, Split
from esper.leyline.view import (
    BlueprintInfo,
    CoalitionValues,
    Estimate,
    Floats,
    Masks,
    Measurements,
    Outcome,
    Scores,
    Seeds,
    Space,
    View,
    read_only,
    take,
)
from esper.nissa.events import StepRow, episode_rows, lifecycle_rows, step_row
from esper.nissa.hub import Hub
from esper.tolaria.coalitions import Coalitions, Sampling, coalitions, masks
from esper.tolaria.data import SharedBatchIterator, stack_splits
from esper.tolaria.optimizer import StackedOptimizer
from esper.tolaria.probe import negated, probe, sense, spread
from esper.tolaria.runtime import PhaseTimer, available_memory, hold_freed_memory, read_packet, resolve_device
from esper.tolaria.sensors import SENSORS
from esper.tolaria.training import Trained, train

SENSED = 256
"""Training examples that the growth sensors are measured on, the first of each split [examples]."""


@dataclass
class ParallelEnvState:
    """All state of a population between two steps, but for the position of the feed.

    Rows are the environments, then their twins, then, where there would be one row alone, a ghost that nobody sees.
    """

    body: Body  # parameters, buffers and moments of every host and seed
    seeds: Seeds  # (rows, S)
    instance: NDArray[np.int64]  # (rows,) which host, data order and births a row has
    measurements: Measurements  # of the last step
    coalitions: CoalitionValues | None  # of the last step at which they were due
    scores: Scores  # (rows,) of the last step
    masks: Masks  # (rows, ...) of the next decision
    episode: int
    step: int  # steps taken in the episode


class _Figures(NamedTuple):
    """`Probed`, read: the same fields as arrays."""

    loss: Floats
    metric: Floats
    branch_loss: Floats
    branch_metric: Floats
    loss_rise: Floats
    metric_fall: Floats
    participation: Floats


class VectorizedEngine:
    """Trains E environments as one object.

        engine = VectorizedEngine(task, config)
        engine.run(client)                       # or view = engine.reset(); view, outcome = engine.step(actions)

    A step reads the device once, whatever E, S and the telemetry are. The test split of the task is dropped at once.
    """

    def __init__(self, task: AnyTask, config: Config, hub: Hub | None = None) -> None:
        """Raises InputError where the task, the config and the device do not fit together."""
        task = task.sealed()
        self.config = config
        self.device = resolve_device(config.device)
        self.hub = hub or Hub()
        self.timer = PhaseTimer(self.device)
        self.rows = config.envs * (2 if config.twin else 1)
        stacked = max(self.rows, 2)
        self._optimizer = StackedOptimizer(config.optimizer)
        check_memory(task, config, stacked, len(self._optimizer.rule.moments), available_memory(self.device))
        first = instance_keys(task, config)
        self._task = task
        self._objective = task.objective
        self._load(self._spread(first))
        menu = _menu(task, config)
        if len(task.inputs) > 1:
            hold_freed_memory()
        body = Body(
            task.largest,
            menu,
            stacked,
            self._problems[0].read(self._problems[0].train.x[:2]).new_zeros(2, *task.inputs),
            mapping=config.mapping,
            isolated=config.lifecycle.isolation == "isolated",
            moments=self._optimizer.rule.moments,
            device=self.device,
        )
        self._space = Space(
            slots=tuple(slot.name for slot in body.slots),
            blueprints=tuple(BlueprintInfo(entry.name, entry.tap.value) for entry in menu),
            tempos=config.lifecycle.tempos,
            targets=config.lifecycle.targets,
            cost=np.zeros((stacked, *body.fits.shape), np.int64),  # known when the hosts are planted
            fits=body.fits & _selected(body, config)[:, None],
            width=np.zeros((stacked, len(body.slots)), np.int64),  # likewise
            sensors=tuple(sensor.name for sensor in SENSORS),
            max_seeds=config.lifecycle.max_seeds,
            seed=config.seed,
            instance=self._spread(first),
        )
        self.space = self._visible()
        seeds = dormant(stacked, len(body.slots))
        measurements = _unmeasured(stacked, len(body.slots))
        self.state = ParallelEnvState(
            body=body,
            seeds=seeds,
            instance=self._spread(first),
            measurements=measurements,
            coalitions=None,
            scores=Scores(measurements.metric, measurements.loss, np.zeros(stacked, np.int64)),
            masks=self._legal(seeds, measurements),
            episode=-1,
            step=0,
        )

    def reset(self, instance: NDArray[np.int64] | None = None, episode: int | None = None) -> View:
        """Begin an episode: fresh hosts, empty slots, and a first probe. The next episode has other hosts and orders.

        instance (E,) names the instances of a mixture from now on; without it they stay what they are. `episode` is for
        playing one again: the same number brings the same hosts and orders; without it the next one begins.
        """
        state, body = self.state, self.state.body
        if instance is not None and not np.array_equal(self._spread(instance), state.instance):
            state.instance = self._spread(instance)
            self._load(state.instance)
        state.episode = state.episode + 1 if episode is None else episode
        state.step, state.coalitions = 0, None
        body.clear()
        state.seeds = dormant(*state.seeds.stage.shape)
        state.measurements = _unmeasured(*state.seeds.stage.shape)
        self._feed.reset(state.episode)
        keys, which = np.unique(state.instance, return_inverse=True)
        for index, name in enumerate(keys.tolist()):
            problem = self._problems[self._split_of[index]]
            with drawn_with(scalar(self.config.seed, Purpose.HOST, name, state.episode)):
                host = problem.host()
            example = problem.read(problem.train.x[:2])
            body.plant_host(np.flatnonzero(which == index).tolist(), host, example, problem.outputs)
        body.mask_outputs()
        self._survey()
        with self.timer.phase("probe"):
            self._measure(None)
        return self.view()

    def snapshot(self) -> dict[str, Any]:
        """All that the next step depends on, as a tree of arrays (tolaria/checkpoint.py); tensors share memory."""
        state = self.state
        return {
            "episode": state.episode,
            "step": state.step,
            "batch": self._feed.batch,
            "instance": state.instance,
            "seeds": state.seeds._asdict(),
            "measurements": _as_tree(state.measurements),
            "coalitions": None if state.coalitions is None else state.coalitions._asdict(),
            "scores": state.scores._asdict(),
            "body": state.body.state(),
        }

    def restore(self, tree: Mapping[str, Any]) -> View:
        """Go on from a snapshot of an engine of the same task and config. ValueError where it was another's.

        Modules are built first and then filled; masks, and the orders of the data, follow from what they are hashes of.
        """
        state = self.state
        seeds = _like(state.seeds, tree["seeds"], "seeds")
        measurements = _like(state.measurements, tree["measurements"], "measurements")
        scores = _like(state.scores, tree["scores"], "scores")
        instance = _like(state.instance, tree["instance"], "instance")
        if not np.array_equal(instance, state.instance):
            self._load(instance)
        state.body.load_state(tree["body"])
        state.episode, state.step, state.instance = tree["episode"], tree["step"], instance
        self._feed.reset(state.episode)
        self._feed.batch = tree["batch"]
        state.seeds, state.measurements, state.scores = seeds, measurements, scores
        state.coalitions = None if tree["coalitions"] is None else CoalitionValues(**tree["coalitions"])
        self._survey()
        state.masks = self._legal(seeds, measurements)
        return self.view()

    def decide(self, actions: Actions) -> NDArray[np.bool_]:
        """Carry out one decision per environment and let no time pass; returns which were accepted, (E,).

        `step` begins with it. On its own it lets a study make several decisions in one step; masks are those of the new state.
        """
        state = self.state
        with self.timer.phase("apply"):
            after, changes, accepted = apply(
                state.seeds, self._everywhere(actions), state.masks, self._space, self.config.lifecycle
            )
            state.body.edit(changes, after, self._birth_key)
            state.seeds = after
            state.masks = self._legal(after, state.measurements)
        return accepted[: self.config.envs]

    def step(self, actions: Actions) -> tuple[View, Outcome]:
        """apply -> train -> tick -> probe -> close, for one decision per environment (E,).

        Returns what the next decision may be based on, and the outcome of this one, measured after it acted.
        """
        config, state = self.config, self.state
        assert state.episode >= 0, "reset() begins an episode"
        assert state.step < config.steps, "the episode is over; reset() begins the next"
        before, decided = state.scores, state.seeds
        accepted = self.decide(actions)
        applied = state.seeds
        with self.timer.phase("train"):
            trained = train(
                state.body,
                applied,
                self._feed,
                self._optimizer,
                self._objective,
                config,
                (state.instance, state.episode),
            )
        with self.timer.phase("tick"):
            gates = judge(applied, state.measurements, config.gates)
            state.seeds = tick(applied, gates, config.lifecycle)
            state.body.edit(edits(applied, state.seeds), state.seeds, self._birth_key)
            state.step += 1
        terminal = state.step == config.steps
        with self.timer.phase("probe"):
            exported = self._measure(trained, terminal=terminal)
        with self.timer.phase("close"):
            envs, twins = slice(0, config.envs), slice(config.envs, self.rows)
            view = self.view()
            outcome = Outcome(
                episode=state.episode,
                step=state.step - 1,
                actions=actions,
                accepted=accepted,
                before=take(before, envs),
                after=take(state.scores, envs),
                host_params=view.host_params,
                terminal=terminal,
                exported=take(exported, envs) if exported is not None else None,
                seeds=view.seeds,
                contribution=view.measurements.contribution,
                contribution_loss=view.measurements.contribution_loss,
                twin=(take(before, twins), take(state.scores, twins)) if config.twin else None,
            )
            self._report(view, outcome, (decided, applied, state.seeds))
        return view, outcome

    def view(self) -> View:
        """What the next decision may be based on."""
        state, envs = self.state, slice(0, self.config.envs)
        view: View = read_only(
            View(
                space=self.space,
                episode=state.episode,
                step=state.step,
                steps=self.config.steps,
                seeds=take(state.seeds, envs),
                masks=take(state.masks, envs),
                measurements=take(state.measurements, envs),
                coalitions=state.coalitions,
                host_params=state.body.host_params[envs].copy(),
                added_params=state.scores.added_params[envs],
            )
        )
        return view

    def run(self, client: PolicyClient, rounds: int = 1) -> None:
        """Play whole episodes, one a round, and let the client learn after each."""
        for _ in range(rounds):
            view = self.reset()
            while view.step < self.config.steps:
                view, outcome = self.step(client.act(view))
                client.store(outcome)
            client.update()

    def evaluate(self, split: Split | Sequence[Split]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Metric and loss on a split of the networks that would be exported now, each (rows,): environments, then twins.

        One split that all environments share, or one for each environment. InputError where one is longer than a mixture's
        rows have room for.
        """
        state = self.state
        final = state.seeds._replace(
            stage=np.where(state.seeds.stage == Stage.FOSSILIZED, state.seeds.stage, np.int8(Stage.DORMANT))
        )
        splits, row = (
            ([split], np.zeros(len(state.instance), np.int64)) if isinstance(split, Split) else (split, self._env)
        )
        inputs, lengths, pixels = self._task.inputs, self._task.lengths, self._problems[0].pixels
        here = stack_splits(splits, row, inputs, self.device, pixels, lengths.held if lengths is not None else None)
        nothing = coalitions(dormant(*final.stage.shape), None, terminal=False)
        probed = probe(state.body, final, here, self._objective, nothing, rank=False)
        metric, loss = read_packet((probed.metric, probed.loss))
        return metric[: self.rows], loss[: self.rows]

    def exported_params(self) -> NDArray[np.int64]:
        """(rows,) parameters of the networks that would be exported now."""
        added = self.state.body.added_params(self.state.seeds, frozenset({Stage.FOSSILIZED}))
        exported: NDArray[np.int64] = (self.state.body.host_params + added)[: self.rows]
        return exported

    def validation_splits(self) -> list[Split]:
        """The validation split of every environment's instance."""
        which = np.unique(self.state.instance, return_inverse=True)[1]
        return [self._problems[self._split_of[index]].validation for index in which[: self.config.envs]]

    def export(self, env: int) -> tuple[nn.Module, dict[str, Any]]:
        """The network of an environment as a plain module on the CPU, and its topology; unfinished seeds are left out."""
        assert 0 <= env < self.config.envs
        problem = self._task.instance(int(self.state.instance[env]))
        example = problem.read(problem.train.x[:2])
        return grown_network(problem.host, self.state.body, self.state.seeds, env, example)

    # The parts of a step.

    def _measure(self, trained: Trained | None, *, terminal: bool = False) -> Scores | None:
        """Probe every row, read the one packet of the step, and set measurements, scores and masks.

        Returns the scores of the exported networks at the end of an episode.
        """
        state, config = self.state, self.config
        sampling = self._sampling(terminal)
        asked = coalitions(state.seeds, sampling, terminal=terminal)
        probed = probe(state.body, state.seeds, self._probe, self._objective, asked, rank=True)
        every = config.probe.sensors_every
        sensed = every > 0 and state.step % every == 0
        sensors = [sense(state.body, state.seeds, self._fit, self._probe, self._objective)] if sensed else []
        training = [trained.loss, trained.gradient_norm, *trained.seed_norms] if trained is not None else []
        packet = iter(read_packet([*probed, *sensors, *training]))
        figures = _Figures._make(itertools.islice(packet, len(probed)))
        found = next(packet) if sensed else None
        state.measurements = _unpack(state, asked, figures, found, trained, list(packet))
        added = state.body.added_params(state.seeds)
        state.scores = Scores(state.measurements.metric, state.measurements.loss, added)
        if sampling is not None:
            state.coalitions = _values(state.step, sampling.draw, asked, figures)
        state.masks = self._legal(state.seeds, state.measurements)
        if not terminal:
            return None
        branch, env = asked.exported()
        metric, loss = state.scores.metric.copy(), state.scores.loss.copy()
        metric[env], loss[env] = figures.branch_metric[branch], figures.branch_loss[branch]
        return Scores(metric, loss, state.body.added_params(state.seeds, frozenset({Stage.FOSSILIZED})))

    def _spread(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """(E,) instances of the environments -> those of every row: twins share them, and a ghost is environment 0."""
        return np.asarray(keys[self._env], np.int64)

    @property
    def _env(self) -> NDArray[np.int64]:
        """The environment that each row belongs to."""
        rows = np.arange(max(self.rows, 2)) % self.config.envs
        return rows if self.rows > 1 else np.zeros(2, np.int64)

    def _visible(self) -> Space:
        """The space of the environments alone."""
        envs = slice(0, self.config.envs)
        space = self._space
        return space._replace(cost=space.cost[envs], width=space.width[envs], instance=space.instance[envs])

    def _survey(self) -> None:
        """Take what the hosts cost and how wide they are into the space."""
        body = self.state.body
        self._space = self._space._replace(
            cost=body.cost.copy(), width=body.taps[..., 0].copy(), instance=self.state.instance
        )
        self.space = self._visible()

    def _load(self, instance: NDArray[np.int64]) -> None:
        """Bring the data of the instances to the device; a problem that several keys share is held once."""
        keys, which = np.unique(instance, return_inverse=True)
        self._problems: list[Instance] = []
        self._split_of: list[int] = []
        for name in keys.tolist():
            problem = self._task.instance(name)
            same = next((i for i, known in enumerate(self._problems) if _is(known, problem)), None)
            if same is None:
                with drawn_with(0):
                    check_host(problem.host(), problem.read(problem.train.x[:2]), problem.outputs)
                same = len(self._problems)
                self._problems.append(problem)
            self._split_of.append(same)
        row = np.array(self._split_of)[which]
        inputs, batch = self._task.inputs, self.config.data.batch
        trains, pixels = [problem.train for problem in self._problems], self._problems[0].pixels
        assert all(problem.pixels == pixels for problem in self._problems), "instances read bytes in one way"
        self._feed = SharedBatchIterator(trains, row, instance, self.config.seed, batch, inputs, self.device, pixels)
        sampled = [Split(train.x[:SENSED], train.y[:SENSED]) for train in trains]
        probes, lengths = [problem.probe for problem in self._problems], self._task.lengths
        sensed, probed = (SENSED, lengths.probe) if lengths is not None else (None, None)
        self._fit = stack_splits(sampled, row, inputs, self.device, pixels, sensed)
        self._probe = stack_splits(probes, row, inputs, self.device, pixels, probed)

    def _sampling(self, terminal: bool) -> Sampling | None:
        """How this step's attribution is sampled; None where it is not due."""
        state, config = self.state, self.config
        if not terminal and state.step % config.probe.coalitions_every:
            return None
        return Sampling(
            config.probe.shapley_samples, scalar(config.seed, Purpose.ATTRIBUTION, state.episode, state.step)
        )

    def _legal(self, seeds: Seeds, measurements: Measurements) -> Masks:
        return legal(seeds, judge(seeds, measurements, self.config.gates), self._space, self.config.lifecycle)

    def _everywhere(self, actions: Actions) -> Actions:
        """The environments' decisions, and WAIT for every other row."""
        rows, envs = len(self.state.instance), self.config.envs
        if not isinstance(actions, Actions) or any(np.shape(head) != (envs,) for head in actions):
            raise InputError(f"a client's decision must be Actions of shape ({envs},) in every head")
        return Actions(
            *(np.concatenate([np.asarray(head, np.int64), np.zeros(rows - envs, np.int64)]) for head in actions)
        )

    def _birth_key(self, env: int, slot: int) -> int:
        state = self.state
        instance = int(state.instance[env])
        return scalar(self.config.seed, Purpose.BIRTH, instance, state.episode, state.step, slot)

    def _report(self, view: View, outcome: Outcome, path: Sequence[Seeds]) -> None:
        """Events of a step: changes of stage, the step itself, and the episode where it ends."""
        envs = slice(0, self.config.envs)
        for before, after in itertools.pairwise(path):
            changes = transitions(take(before, envs), take(after, envs))
            self.hub.extend(lifecycle_rows(outcome.episode, outcome.step, self.space, changes, before, after))
        twins = self.state.scores.metric[self.config.envs : self.rows] if self.config.twin else None
        if self.hub.wants(StepRow):
            self.hub.emit(step_row(view, outcome, twin_metric=twins))
        if outcome.terminal:
            self.hub.extend(episode_rows(outcome, self.space, view.seeds))


def _is(known: Instance, other: Instance) -> bool:
    """Whether two instances are one problem: the very same host, examples and labels."""
    splits = zip(
        (known.train, known.probe, known.validation), (other.train, other.probe, other.validation), strict=True
    )
    return known.host is other.host and all(a.x is b.x and a.y is b.y for a, b in splits)


def check_memory(task: AnyTask, config: Config, rows: int, moments: int, available: int) -> None:
    """InputError where a population alone would take more memory than there is.

    Counted is what is sure: value, gradient and moments of every host's parameters, and one batch of inputs.
    """
    with drawn_with(0):
        host = sum(parameter.nbytes for parameter in task.largest().parameters())
    inputs = config.data.batch * math.prod(task.inputs) * torch.get_default_dtype().itemsize
    needed = rows * (host * (2 + moments) + inputs)
    if needed > available:
        raise InputError(
            f"envs is {config.envs:,}, whose {rows:,} networks take at least {needed / 2**30:,.1f} GiB, but "
            f"{available / 2**30:,.1f} GiB of memory are available; lower envs"
        )


def instance_keys(task: AnyTask, config: Config) -> NDArray[np.int64]:
    """(E,) the instances that the config names."""
    keys = task.keys(config.instances)
    first, last = config.first_instance, config.first_instance + config.envs - 1
    if last >= len(keys):
        raise InputError(
            f"first_instance {first} with {config.envs} environments asks for instance {last} of the {config.instances} "
            f"instances of {task.name}, which has {len(keys)}; lower one of them"
        )
    return keys.start + first + np.arange(config.envs)


def _menu(task: AnyTask, config: Config) -> tuple[Blueprint, ...]:
    """The blueprints that the menu names, each of the kinds that the host's slots have."""
    names = config.blueprints if config.blueprints is not None else task.menu
    if not names:
        raise InputError(f"the menu of task {task.name!r} is empty; name at least one blueprint")
    with drawn_with(0):
        host = task.largest()
    assert isinstance(host, SegmentedHost)
    kinds = list(dict.fromkeys(slot.kind for slot in host.slots))
    if len(kinds) == 1:
        return tuple(get_blueprint(name, kinds[0]) for name in names)
    known = [[kind for kind in kinds if (kind, name) in BLUEPRINTS] for name in names]
    return tuple(
        get_blueprint(name, kind) for name, found in zip(names, known, strict=True) for kind in found or kinds[:1]
    )


def _selected(body: Body, config: Config) -> NDArray[np.bool_]:
    """(S,) the slots that may be used."""
    names = [slot.name for slot in body.slots]
    if config.slots is None:
        return np.ones(len(names), bool)
    for name in config.slots:
        if name not in names:
            raise InputError(f"the host has no slot {name!r}; it has {', '.join(names) or 'none'}")
    return np.array([name in config.slots for name in names], bool)


def _as_tree(record: Any) -> Any:
    """A record of arrays, nested or not, as a tree."""
    if not isinstance(record, tuple):
        return record
    return {name: _as_tree(field) for name, field in zip(type(record)._fields, record, strict=True)}  # type: ignore[attr-defined]


def _like(known: Any, tree: Any, name: str) -> Any:
    """The record that `_as_tree` took apart, of the kind and the shapes of a known one. ValueError where it is not."""
    if isinstance(known, tuple):
        fields = zip(type(known)._fields, known, strict=True)  # type: ignore[attr-defined]
        return type(known)(*(_like(field, tree[key], f"{name}.{key}") for key, field in fields))
    if isinstance(known, np.ndarray) and (tree.shape, tree.dtype) != (known.shape, known.dtype):
        raise ValueError(f"{name} is {tree.shape} {tree.dtype}, where {known.shape} {known.dtype} was expected")
    return tree


def _unmeasured(rows: int, slots: int) -> Measurements:
    nothing, shape = np.full(rows, np.nan), (rows, slots)
    return Measurements(
        metric=nothing,
        loss=nothing,
        train_loss=nothing,
        gradient_norm=nothing,
        contribution=Estimate.absent(*shape),
        contribution_loss=Estimate.absent(*shape),
        gain=Estimate.absent(*shape),
        gain_metric=Estimate.absent(*shape),
        seed_gradient_norm=np.full(shape, np.nan),
        seed_gradient_finite=np.zeros(shape, bool),
        participation=np.full(shape, np.nan),
        sensors=np.full((*shape, len(SENSORS)), np.nan),
        sensor_age=0,
    )


def _values(step: int, draw: int, asked: Coalitions, figures: _Figures) -> CoalitionValues:
    """The coalitions of a step, the full one of every environment with live seeds included."""
    full = np.flatnonzero(asked.live.any(1))
    env, mask = np.concatenate([asked.env, full]), np.concatenate([asked.mask, masks(asked.live)[full]])
    order = np.lexsort((mask, env))
    metric = np.concatenate([figures.branch_metric[asked.branch], figures.metric[full]])
    loss = np.concatenate([figures.branch_loss[asked.branch], figures.loss[full]])
    return CoalitionValues(step, draw, asked.live, env[order], mask[order], metric[order], loss[order])


def _unpack(
    state: ParallelEnvState,
    asked: Coalitions,
    figures: _Figures,
    found: Floats | None,
    trained: Trained | None,
    training: list[NDArray[np.float64]],
) -> Measurements:
    """The packet of a step as measurements over (rows, S)."""
    shape = state.seeds.stage.shape
    fresh = _unmeasured(*shape)
    seed_norm = fresh.seed_gradient_norm
    if trained is not None:
        for (at, owners), norm in zip(trained.seed_owners, training[2:], strict=True):
            seed_norm[owners, at] = norm
    sensors, sensor_age = found, 0
    if sensors is None:
        sensors, sensor_age = state.measurements.sensors, state.measurements.sensor_age + 1
    return fresh._replace(
        metric=figures.metric,
        loss=figures.loss,
        train_loss=training[0] if trained is not None else fresh.train_loss,
        gradient_norm=training[1] if trained is not None else fresh.gradient_norm,
        contribution=spread(figures.metric_fall, asked.without(), shape),
        contribution_loss=spread(figures.loss_rise, asked.without(), shape),
        gain=negated(spread(figures.loss_rise, asked.alone, shape)),
        gain_metric=negated(spread(figures.metric_fall, asked.alone, shape)),
        seed_gradient_finite=np.isfinite(seed_norm),
        participation=figures.participation,
        sensors=sensors,
        sensor_age=sensor_age,
    )
