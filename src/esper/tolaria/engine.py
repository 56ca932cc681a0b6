"""The engine: a vector environment whose step trains, probes and edits a whole population. E environments, S slots."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from esper.kasmina.blueprints import drawn_with
from esper.kasmina.body import Body
from esper.kasmina.export import grown_network
from esper.kasmina.gates import judge
from esper.kasmina.host import check_host
from esper.kasmina.lifecycle import apply, copied, dormant, edits, exported, legal, tick, transitions
from esper.leyline.actions import Actions, checked
from esper.leyline.brief import brief
from esper.leyline.config import Config
from esper.leyline.errors import DataFault
from esper.leyline.keys import Purpose, scalar
from esper.leyline.length import with_steps
from esper.leyline.objective import selection_score
from esper.leyline.protocols import PolicyClient
from esper.leyline.stages import Stage, among
from esper.leyline.task import AnyTask, Instance, Mixture, Split, finite, nonfinite
from esper.leyline.text import counted
from esper.leyline.verdicts import Refusal, Vital
from esper.leyline.view import (
    BlueprintInfo,
    Bools,
    CoalitionValues,
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
from esper.nissa.events import StepRow, episode_rows, lifecycle_rows, rollback_rows, step_row
from esper.nissa.hub import Hub
from esper.tolaria.bounds import bounds
from esper.tolaria.coalitions import Sampling, coalitions
from esper.tolaria.data import SharedBatchIterator, stack_splits
from esper.tolaria.early_stopping import UNDER_WAY, EarlyStopping
from esper.tolaria.fates import Fates
from esper.tolaria.fitting import check_memory, instance_keys, menu_of, selected
from esper.tolaria.governor import Governor, Verdicts, barred, preflight
from esper.tolaria.measuring import Asked, Measured, measure, unmeasured, without
from esper.tolaria.optimizer import StackedOptimizer
from esper.tolaria.probe import probe
from esper.tolaria.runtime import (
    PhaseTimer,
    available_memory,
    hold_freed_memory,
    read_packet,
    resolve_device,
    use_deterministic_kernels,
)
from esper.tolaria.sensors import SENSORS
from esper.tolaria.training import Trained, train

SENSED = 256
"""Training examples that the growth sensors are measured on, the first of each split [examples]."""


@brief
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


class VectorizedEngine:
    """Trains E environments as one object.

        engine = VectorizedEngine(task, config)
        engine.run(client)                       # or view = engine.reset(); view, outcome = engine.step(actions)

    A step reads the device once, whatever E, S and the telemetry are, and a second time where a row is rolled back. The test
    split of the task is dropped at once.
    """

    def __init__(
        self, task: AnyTask, config: Config, hub: Hub | None = None, instance: NDArray[np.int64] | None = None
    ) -> None:
        """instance (E,) names the instances of the environments; without it the config does.

        Raises InputError where the task, the config and the device do not fit together.
        """
        task, config = task.sealed(), with_steps(config, task)
        self.config = config
        self.device = resolve_device(config.device)
        if config.deterministic:
            use_deterministic_kernels(self.device)
        self.hub = hub or Hub()
        self.rows = config.envs * (2 if config.twin else 1)
        self.timer = PhaseTimer(self.device, f"{counted(self.rows, 'network')} at data.batch {config.data.batch}")
        stacked = max(self.rows, 2)
        self._optimizer = StackedOptimizer(config.optimizer)
        check_memory(task, config, stacked, len(self._optimizer.rule.moments), available_memory(self.device))
        first = instance_keys(task, config) if instance is None else instance
        self._task = task
        self._objective = task.objective
        self._load(self._spread(first))
        menu = menu_of(task, config)
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
            fits=body.fits & selected(body, config)[:, None],
            width=np.zeros((stacked, len(body.slots)), np.int64),  # likewise
            sensors=tuple(sensor.name for sensor in SENSORS),
            max_seeds=config.lifecycle.max_seeds,
            seed=config.seed,
            instance=self._spread(first),
            floor=self._bounds[:, 0],
            ceiling=self._bounds[:, 1],
            objective=config.reward.objective,
            rent=config.reward.rent,
            rent_size=config.reward.rent_size,
        )
        self.space = self._visible()
        seeds = dormant(stacked, len(body.slots))
        measurements = unmeasured(stacked, len(body.slots))
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
        self.governor = Governor(body, seeds, self.rows, config)
        self.stopping = EarlyStopping(body, seeds, self.rows, config) if config.early_stopping.enabled else None
        self.fates = Fates()

    def __repr__(self) -> str:
        name, config = self._task.name, self.config
        return f"VectorizedEngine(task={name!r}, envs={config.envs}, steps={config.steps}, device='{self.device}')"

    def reset(
        self,
        instance: NDArray[np.int64] | None = None,
        episode: int | None = None,
        planted: Seeds | None = None,
    ) -> View:
        """Begin an episode: fresh hosts, empty slots, and a first probe. The next episode has other hosts and orders.

        instance (E,) names the instances of a mixture from now on; without it they stay what they are. `episode` is for
        playing one again: the same number brings the same hosts and orders; without it the next one begins. `planted` (E, S)
        are seeds that stand in the slots from the start, their modules freshly drawn; without it the slots are empty.
        """
        state, body = self.state, self.state.body
        if instance is not None and not np.array_equal(self._spread(instance), state.instance):
            state.instance = self._spread(instance)
            self._load(state.instance)
        state.episode = state.episode + 1 if episode is None else episode
        state.step, state.coalitions = 0, None
        self.fates = Fates()
        body.clear()
        state.seeds = dormant(*state.seeds.stage.shape)
        state.measurements = unmeasured(*state.seeds.stage.shape)
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
        if planted is not None:
            self._plant(planted)
        with self.timer.phase("probe"):
            measured = self._measure(None)
        with self.timer.phase("govern"):
            self.governor.begin(body, state.seeds, measured.signs)
            if self.stopping is not None:
                self.stopping.begin(body, state.seeds, self._validation_score(measured))
        self._accept(measured)
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
            "governor": self.governor.state(state.step),
            "early_stopping": None if self.stopping is None else self.stopping.state(state.step),
            "fates": self.fates.state(),
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
        self.governor.load_state(tree["governor"], state.body, seeds)
        if self.stopping is not None:
            self.stopping.load_state(tree["early_stopping"], state.body, seeds)
        self.fates.load_state(tree["fates"])
        return self.view()

    def decide(self, actions: Actions) -> Verdicts:
        """Carry out one decision per environment and let no time pass; returns which were refused, (E,) a `Refusal`.

        `step` begins with it. On its own it lets a study make several decisions in one step; masks are those of the new state.
        """
        state, config = self.state, self.config
        with self.timer.phase("apply"):
            every = self._everywhere(actions)
            refused = preflight(
                state.body, state.seeds, every, state.masks, config.lifecycle.max_seeds, config.governor
            )
            self.governor.count(refused)
            masks = barred(state.masks, refused)
            after, changes, _ = apply(state.seeds, every, masks, self._space, config.lifecycle)
            state.body.edit(changes, after, self._birth_key)
            state.seeds = after
            state.masks = self._legal(after, state.measurements)
        return refused[: config.envs]

    def step(self, actions: Actions, reasons: Sequence[str | None] | None = None) -> tuple[View, Outcome]:
        """apply -> train -> tick -> probe -> govern -> close, for one decision per environment (E,).

        `reasons` (E,) say why a decision was made, for the events and the lists of the summary. Returns what the
        next decision may be based on, and the outcome of this one, measured after it acted. InputError where a field of the
        decision is no array of E whole numbers.
        """
        config, state = self.config, self.state
        assert state.episode >= 0, "reset() begins an episode"
        assert state.step < config.steps, "the episode is over; reset() begins the next"
        actions = checked(actions, config.envs)
        before, decided = state.scores, state.seeds
        measured_before = state.measurements
        refused = self.decide(actions)
        accepted = refused == Refusal.NONE
        self.fates.note(actions.op, actions.slot, accepted, decided, measured_before, config.gates, reasons)
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
            state.seeds = ticked = tick(applied, gates, config.lifecycle)
            state.body.edit(edits(applied, ticked), ticked, self._birth_key)
            state.step += 1
        terminal = state.step == config.steps
        with self.timer.phase("probe"):
            measured = self._measure(trained, terminal=terminal)
        with self.timer.phase("govern"):
            governed, found = self._govern(decided, measured)
        with self.timer.phase("close"):
            self._accept(governed)
            envs, twins = slice(0, config.envs), slice(config.envs, self.rows)
            view = self.view()
            outcome = Outcome(
                episode=state.episode,
                step=state.step - 1,
                actions=actions,
                refused=refused,
                found=found[envs],
                before=take(before, envs),
                after=take(state.scores, envs),
                host_params=view.host_params,
                terminal=terminal,
                exported=take(governed.exported, envs) if governed.exported is not None else None,
                seeds=view.seeds,
                contribution=view.measurements.contribution,
                contribution_loss=view.measurements.contribution_loss,
                twin=(take(before, twins), take(state.scores, twins)) if config.twin else None,
            )
            self._report(view, outcome, (decided, applied, ticked), measured, found)
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

    @property
    def over(self) -> bool:
        """Whether the episode is: its last step is taken, or every row has stopped by its validation split."""
        stopped = self.stopping is not None and self.stopping.over
        return stopped or self.state.step >= self.config.steps

    def finish(self) -> Scores | None:
        """With early stopping, make every row what it was at its best on its validation split; the episode is then over.

        Returns the scores (rows,) on the probe split of the networks that would be exported, read from the device; None where
        `early_stopping.enabled` is false, which leaves every row as it is.
        """
        if self.stopping is None:
            return None
        state = self.state
        unfinished = among(state.seeds.stage, UNDER_WAY)
        state.seeds = self.stopping.restore(state.body, state.seeds)
        measured = measure(
            state.body,
            state.seeds,
            self._objective,
            Asked(self._probe, None, None, False, state.step),
            state.measurements,
            None,
        )
        self._accept(measured)
        scores: Scores = take(state.scores, slice(0, self.rows))
        self.hub.extend(episode_rows(self.view(), scores, state.step, unfinished, self.governor.record.rollbacks))
        return scores

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
        final = exported(state.seeds)
        splits, row = (
            ([split], np.zeros(len(state.instance), np.int64)) if isinstance(split, Split) else (split, self._env)
        )
        splits = self.sound(splits)
        inputs, lengths, first = self._task.inputs, self._task.lengths, self._problems[0]
        held = lengths.held if lengths is not None else None
        here = stack_splits(splits, row, inputs, self.device, first.pixels, held, first.scaling)
        nothing = coalitions(dormant(*final.stage.shape), None, terminal=False)
        probed = probe(state.body, final, here, self._objective, nothing, signs=False)
        metric, loss = read_packet((probed.metric, probed.loss))
        return metric[: self.rows], loss[: self.rows]

    def sound(self, splits: Sequence[Split]) -> list[Split]:
        """Splits to evaluate on, as data.nonfinite says; what several environments share stays one. InputError at 'stop'."""
        name = f"a held-out split of {self._task.name}"
        distinct = {(id(split.x), id(split.y)): split for split in splits}
        found = {place: finite(split, name, self.config.data.nonfinite) for place, split in distinct.items()}
        return [found[id(split.x), id(split.y)] for split in splits]

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
        return grown_network(problem.host, self.state.body, self.state.seeds, env, problem.interface)

    # The parts of a step.

    def _plant(self, planted: Seeds) -> None:
        """Put freshly drawn seeds (E, S) into the empty slots of the environments; every other row stays empty."""
        state, after = self.state, copied(self.state.seeds)
        for name in Seeds._fields:
            getattr(after, name)[: self.config.envs] = getattr(planted, name)
        state.body.edit(edits(state.seeds, after), after, self._birth_key)
        state.seeds = after

    def _measure(self, trained: Trained | None, *, terminal: bool = False) -> Measured:
        """Probe every row of the population as it is now: the one read of a step."""
        every, state = self.config.probe.sensors_every, self.state
        fit = self._fit if every and state.step % every == 0 else None
        sampling = self._sampling(terminal)
        asked = Asked(self._probe, fit, sampling, terminal, state.step, validation=self._validation)
        return measure(state.body, state.seeds, self._objective, asked, state.measurements, trained)

    def _govern(self, before: Seeds, measured: Measured) -> tuple[Measured, Verdicts]:
        """Roll back the rows that the step left broken, and keep the others as they are.

        Returns what was measured, of rolled back rows once more, and what was found of every row, (rows,) a `Vital`.
        """
        state, governor = self.state, self.governor
        found = governor.inspect(before, state.seeds, measured.signs)
        rows = found != Vital.GOOD
        if rows.any():
            state.seeds = governor.put_back(state.body, state.seeds, rows)
            fit = self._fit if self.config.probe.sensors_every else None
            asked = Asked(self._probe, fit, None, False, state.step, self._feed.finite())
            again = measure(state.body, state.seeds, self._objective, asked, state.measurements, None)
            measured = measured.replaced(again, rows)
            assert again.data is not None, "it was asked for"
            if not again.data[rows].all():
                found = self._blame_data(found, rows & ~again.data)
            if state.coalitions is not None:
                state.coalitions = without(state.coalitions, rows)
            governor.resume(found, measured.signs)
        governor.keep(state.body, state.seeds, found, state.step)
        if self.stopping is not None:
            score, healthy = self._validation_score(measured), found == Vital.GOOD
            self.stopping.observe(state.body, state.seeds, score, healthy, state.step)
        return measured, found

    def _validation_score(self, measured: Measured) -> Floats:
        """(rows,) what early stopping compares, on the validation split: the metric, or J, of what would be exported."""
        assert measured.validation is not None, "it is asked for wherever early stopping is on"
        return selection_score(measured.validation, self.state.body.host_params, self.config)

    def _blame_data(self, found: Verdicts, rows: Bools) -> Verdicts:
        """The verdicts, of those of some rows, (rows,) bool, that trained on examples that are not finite: that.

        DataFault where `data.nonfinite` says stop: they were finite when they were loaded.
        """
        tainted = self._feed.nonfinite(np.flatnonzero(rows), self.config.data.batches_per_step)
        if tainted and self.config.data.nonfinite == "stop":
            row, examples = tainted[0]
            raise DataFault(
                f"the train split of instance {self.state.instance[row]} of {self._task.name} was finite when it was loaded and "
                f"holds NaN or infinite values now, in {'example' if len(examples) == 1 else 'examples'} "
                f"{', '.join(map(str, examples[:5].tolist()))} of what environment {row % self.config.envs} trained on in step "
                f"{self.state.step - 1}; look for what writes into it, or go on without such steps by --set data.nonfinite=skip"
            )
        blamed = found.copy()
        blamed[[row for row, _ in tainted]] = Vital.BATCH
        return blamed

    def _accept(self, measured: Measured) -> None:
        """Go on from what was measured."""
        state = self.state
        state.measurements, state.scores = measured.measurements, measured.scores
        if measured.coalitions is not None:
            state.coalitions = measured.coalitions
        state.masks = self._legal(state.seeds, state.measurements)

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
        of_envs = ("cost", "width", "instance", "floor", "ceiling")
        return space._replace(**{name: getattr(space, name)[envs] for name in of_envs})

    def _survey(self) -> None:
        """Take what the hosts cost and how wide they are into the space."""
        body = self.state.body
        self._space = self._space._replace(
            cost=body.cost.copy(),
            width=body.taps[..., 0].copy(),
            instance=self.state.instance,
            floor=self._bounds[:, 0],
            ceiling=self._bounds[:, 1],
        )
        self.space = self._visible()

    def _load(self, instance: NDArray[np.int64]) -> None:
        """Bring the data of the instances to the device; a problem that several keys share is held once."""
        keys, which = np.unique(instance, return_inverse=True)
        problems: dict[int, Instance] = {}  # by the first key of each
        self._split_of: list[int] = []
        for name in keys.tolist():
            problem = self._task.instance(name)
            same = next((i for i, known in enumerate(problems.values()) if _is(known, problem)), None)
            if same is None:
                same, problems[name] = len(problems), problem
            self._split_of.append(same)
        self._problems = [self._sound(name, problem) for name, problem in problems.items()]
        row = np.array(self._split_of)[which]
        inputs, batch = self._task.inputs, self.config.data.batch
        trains = [problem.train for problem in self._problems]
        pixels, scaling = self._problems[0].pixels, self._problems[0].scaling
        assert all(each.pixels == pixels for each in self._problems), "instances read bytes in one way"
        assert all(each.scaling is scaling for each in self._problems), "instances are scaled in one way"
        weighed = [each.weights for each in self._problems if each.weights is not None]
        assert len(weighed) in (0, len(trains)), "all instances have weights or none"
        weights = weighed or None
        self._feed = SharedBatchIterator(
            trains, row, instance, self.config.seed, batch, inputs, self.device, pixels, scaling, weights
        )
        sampled = [Split(train.x[:SENSED], train.y[:SENSED]) for train in trains]
        probes, lengths = [problem.probe for problem in self._problems], self._task.lengths
        between = [bounds(self._objective, each.probe, each.target_scaling) for each in self._problems]
        self._bounds = np.array(between)[row]  # (rows, 2) floor, ceiling
        sensed, probed = (SENSED, lengths.probe) if lengths is not None else (None, None)
        self._fit = stack_splits(sampled, row, inputs, self.device, pixels, sensed, scaling)
        self._probe = stack_splits(probes, row, inputs, self.device, pixels, probed, scaling)
        self._validation = None
        if self.config.early_stopping.enabled:
            validation, held = [each.validation for each in self._problems], None if lengths is None else lengths.held
            self._validation = stack_splits(validation, row, inputs, self.device, pixels, held, scaling)

    def _sound(self, name: int, problem: Instance) -> Instance:
        """A problem whose splits are finite and whose host runs on them. InputError where it cannot be had."""
        of = f"instance {name} of {self._task.name}" if isinstance(self._task, Mixture) else f"task {self._task.name}"
        train, probe, validation = (
            finite(getattr(problem, part), f"the {part} split of {of}", self.config.data.nonfinite)
            for part in ("train", "probe", "validation")
        )
        with drawn_with(0):
            check_host(problem.host(), problem.read(train.x[:2]), problem.outputs)
        weights = problem.weights
        if weights is not None and len(train.y) < len(weights):
            weights = weights[~nonfinite(problem.train)]
        return problem._replace(train=train, probe=probe, validation=validation, weights=weights)

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
        rest = np.zeros(len(self.state.instance) - self.config.envs, np.int64)
        return Actions(*(np.concatenate([head, rest]) for head in checked(actions, self.config.envs)))

    def _birth_key(self, env: int, slot: int) -> int:
        state = self.state
        instance = int(state.instance[env])
        return scalar(self.config.seed, Purpose.BIRTH, instance, state.episode, state.step, slot)

    def _report(self, view: View, outcome: Outcome, path: Sequence[Seeds], measured: Measured, found: Verdicts) -> None:
        """Events of a step: changes of stage, rollbacks, the step itself, and the episode where it ends."""
        envs = slice(0, self.config.envs)
        for before, after in itertools.pairwise(path):
            changes = transitions(take(before, envs), take(after, envs))
            bases = self.fates.transit(changes, before, after, self.space, outcome.step)
            self.hub.extend(lifecycle_rows(outcome.episode, outcome.step, self.space, changes, before, after, bases))
        self.fates.roll_back(found[envs], path[-1], self.state.seeds, self.space, outcome.step)
        self.hub.extend(
            rollback_rows(outcome, self.space, found[: self.rows], measured.scores, path[-1], self.state.seeds)
        )
        twins = self.state.scores.metric[self.config.envs : self.rows] if self.config.twin else None
        if self.hub.wants(StepRow):
            self.hub.emit(step_row(view, outcome, twin_metrics=twins))
        if outcome.terminal and self.stopping is None:  # else `finish` says what would be exported
            assert outcome.exported is not None, "it is measured at the end of an episode"
            unfinished = among(view.seeds.stage, UNDER_WAY)
            rollbacks = self.governor.record.rollbacks
            self.hub.extend(episode_rows(view, outcome.exported, outcome.step + 1, unfinished, rollbacks))


def _is(known: Instance, other: Instance) -> bool:
    """Whether two instances are one problem: the very same host, examples and labels."""
    splits = zip(
        (known.train, known.probe, known.validation), (other.train, other.probe, other.validation), strict=True
    )
    return known.host is other.host and all(a.x is b.x and a.y is b.y for a, b in splits)


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
