"""The engine: a vector environment whose step edits, trains and measures a whole population. E environments, S slots.

`VectorizedEngine` adds a population of networks to `Engine`, and copies of its rows, so both stand here, in over 450 lines.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from esper.kasmina.lifecycle import apply, copied, dormant, edits, legal, tick, transitions
from esper.leyline.actions import Actions, Op, checked_actions
from esper.leyline.config import Config
from esper.leyline.gates import judge
from esper.leyline.keys import Purpose, scalar
from esper.leyline.length import with_steps
from esper.leyline.masks import barred
from esper.leyline.objective import selection_score
from esper.leyline.protocols import PolicyClient, Proposed
from esper.leyline.stages import IN_BUDGET, Stage
from esper.leyline.task import AnyTask, Split
from esper.leyline.trees import as_tree, from_tree
from esper.leyline.verdicts import Refusal, Vital
from esper.leyline.view import (
    CoalitionValues,
    ComputeShares,
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
from esper.tolaria.certifying import Certifier
from esper.tolaria.coalitions import Sampling
from esper.tolaria.compute import Compute
from esper.tolaria.early_stopping import EarlyStopping
from esper.tolaria.fates import Fates
from esper.tolaria.fitting import check_memory, instance_keys
from esper.tolaria.forks import become, config_of_copies, tried
from esper.tolaria.governor import Governor, Verdicts, preflight
from esper.tolaria.journal import Changes, Trace
from esper.tolaria.measuring import Measured, measure, unmeasured, without
from esper.tolaria.play import Observer, play
from esper.tolaria.population import Indices, Population
from esper.tolaria.runtime import PhaseTimer, available_memory, resolve_device
from esper.tolaria.stacked import StackedPopulation
from esper.tolaria.state import Contributions, Opened, ParallelEnvState

P = TypeVar("P", bound=Population)

Further = Callable[[View, Verdicts], tuple[Actions, Sequence[str | None] | None] | None]
"""From a view and the verdicts on the last decisions to further decisions of the step with their reasons, or None."""


class Engine(Generic[P]):
    """Plays episodes of E environments over any population.

    A step reads the device once, for any E, S and telemetry settings, and a second time if a row is rolled back. Setting
    `parameter_norms` to true before a step adds the gradient norm of each parameter to the trace of this one step.
    """

    trial: Callable[[Proposed], Floats] | None = (
        None  # tries candidates in copies of the rows, where rows can be copied
    )

    sensing = True  # whether growth sensors are measured where they are due; a controller may need none any more

    def __init__(self, population: P, config: Config) -> None:
        self.population, self.config = population, config
        self.rows = config.envs * (2 if config.twin else 1)
        self.device = population.device
        self.timer = PhaseTimer(self.device, population.label)
        self._env = population.environment
        space = population.space
        self.space = _of_environments(self.population.space, self.config.envs)
        shape = len(self._env), len(space.slots)
        seeds, measurements = dormant(*shape), unmeasured(*shape, len(space.sensors))
        self.state = ParallelEnvState(
            seeds=seeds,
            instance=space.instance,
            measurements=measurements,
            coalitions=None,
            scores=Scores(measurements.metric, measurements.loss, np.zeros(shape[0], np.int64)),
            masks=self._legal(seeds, measurements),
            episode=-1,
            step=0,
            compute=Compute.none(shape[0]),
            contributions=Contributions.none(*shape),
        )
        self.governor = Governor(population.keeper(seeds), self.rows, config)
        early = config.early_stopping.enabled
        self.stopping = EarlyStopping(population.keeper(seeds), self.rows, self._env, config) if early else None
        self.certifier = Certifier(population, config) if config.gates.certify is not None else None
        self.fates = Fates()
        self.trace: Trace | None = None  # of the last step
        self.parameter_norms = False

    def reset(
        self,
        instance: NDArray[np.int64] | None = None,
        episode: int | None = None,
        planted: Seeds | None = None,
    ) -> View:
        """Begin an episode with newly initialised hosts, empty slots and a first probe.

        instance (E,) names the instances of a mixture from now on; without it they do not change. `episode` repeats an
        episode: the same number gives the same hosts and data orders; without it the next episode begins, with other
        hosts and orders. `planted` (E, S) are seeds that are in the slots from the start, newly initialised; without it
        the slots are empty.
        """
        state, population = self.state, self.population
        if instance is not None:
            state.instance = np.asarray(instance[self._env], np.int64)
        state.episode = state.episode + 1 if episode is None else episode
        state.step, state.coalitions, state.opened = 0, None, None
        self.sensing = True
        state.compute, state.trial = Compute.none(len(self._env)), None
        self.fates = Fates()
        state.seeds = dormant(*state.seeds.stage.shape)
        state.contributions = Contributions.none(*state.seeds.stage.shape)
        state.measurements = unmeasured(*state.measurements.sensors.shape)
        population.begin(state.instance, state.episode)
        self.space = _of_environments(self.population.space, self.config.envs)
        if planted is not None:
            self._plant(planted)
        with self.timer.phase("probe"):
            measured = self._measure()
        with self.timer.phase("govern"):
            self.governor.begin(state.seeds, measured.signs)
            if self.stopping is not None:
                self.stopping.begin(state.seeds, _validation_score(self, measured))
        self._accept(measured)
        return self.view()

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the next step depends on, as a tree of arrays (store/checkpoint.py) that share memory."""
        state = self.state
        return {
            "episode": state.episode,
            "step": state.step,
            "instance": state.instance,
            "seeds": state.seeds._asdict(),
            "measurements": as_tree(state.measurements),
            "coalitions": None if state.coalitions is None else state.coalitions._asdict(),
            "scores": state.scores._asdict(),
            "compute": state.compute._asdict(),
            "contributions": as_tree(state.contributions),
            **self.population.snapshot(),
            "governor": self.governor.state(state.step),
            "early_stopping": None if self.stopping is None else self.stopping.state(state.step),
            "certificates": None if self.certifier is None else self.certifier.snapshot(),
            "fates": self.fates.state(),
            **({} if state.opened is None else {"opened": as_tree(state.opened)}),
        }

    def restore(self, tree: Mapping[str, Any]) -> View:
        """Restore a snapshot of an engine of the same task and config. Raises ValueError if it came from another one.

        The masks are computed from the rest.
        """
        state = self.state
        seeds = from_tree(state.seeds, tree["seeds"], "seeds")
        measurements = from_tree(state.measurements, tree["measurements"], "measurements")
        scores = from_tree(state.scores, tree["scores"], "scores")
        instance = from_tree(state.instance, tree["instance"], "instance")
        state.episode, state.step, state.instance = tree["episode"], tree["step"], instance
        self.population.load(tree, instance, state.episode)
        self.space = _of_environments(self.population.space, self.config.envs)
        state.seeds, state.measurements, state.scores = seeds, measurements, scores
        spent = tree.get("compute")  # absent in a checkpoint from before it was counted
        state.compute = Compute.none(len(instance)) if spent is None else Compute(**spent)
        worth, none = tree.get("contributions"), Contributions.none(*seeds.stage.shape)  # absent in an older one too
        state.contributions = none if worth is None else from_tree(none, worth, "contributions")
        state.opened = state.trial = None
        if (opened := tree.get("opened")) is not None:
            actions, decided = Actions(**opened["actions"]), from_tree(seeds, opened["decided"], "opened.decided")
            state.opened = Opened(
                actions, opened["refused"], from_tree(scores, opened["before"], "opened.before"), decided
            )
        state.coalitions = None if tree["coalitions"] is None else CoalitionValues(**tree["coalitions"])
        state.masks = self._legal(seeds, measurements)
        self.governor.load_state(tree["governor"], seeds)
        if self.stopping is not None:
            self.stopping.load_state(tree["early_stopping"], seeds)
        if self.certifier is not None:
            self.certifier.restore(tree["certificates"])
        self.fates.load_state(tree["fates"])
        return self.view()

    def decide(self, actions: Actions) -> Verdicts:
        """Carry out one decision per environment without a training step; return which were refused, (E,) a `Refusal`.

        `step` begins with this. A study can call it by itself to make several decisions in one step; the masks are then
        those of the new state.
        """
        state, config = self.state, self.config
        with self.timer.phase("apply"):
            rest = np.zeros(len(self._env) - config.envs, np.int64)  # the other rows get WAIT
            every = Actions(*(np.concatenate([head, rest]) for head in checked_actions(actions, config.envs)))
            if (every.op == Op.WAIT).all():  # always legal, and nothing changes
                return np.full(config.envs, Refusal.NONE, np.int8)
            refused = preflight(
                self.population, state.seeds, every, state.masks, config.lifecycle.max_seeds, config.governor
            )
            self.governor.count(refused)
            masks = barred(state.masks, Op.GERMINATE, refused != Refusal.NONE)
            after, changes, _ = apply(state.seeds, every, masks, self.population.space, config.lifecycle)
            self.population.edit(changes, after, state.step)
            state.seeds = after
            state.masks = self._legal(after, state.measurements)
        return refused[: config.envs]

    def step(
        self, actions: Actions, reasons: Sequence[str | None] | None = None, further: Further | None = None
    ) -> tuple[View, Outcome]:
        """apply -> train -> tick -> probe -> govern -> close, for one decision per environment (E,).

        `reasons` (E,) say why a decision was made, for the events and the lists of the summary. `further` is asked for
        more decisions of this step until it returns None. Returns the view for the next decision, and the outcome of
        this step, measured after it acted; its actions are the first ones. Raises InputError if a field of the
        decision is not an array of E whole numbers.
        """
        refused = self.apply(actions, reasons)
        while further is not None and (more := further(self.view(), refused)) is not None:
            refused = self._carry_out(*more)
        with self.timer.phase("train"):
            self.population.train(self.state.seeds, parameter_norms=self.parameter_norms)
        self.parameter_norms = False
        return self.close()

    def apply(self, actions: Actions, reasons: Sequence[str | None] | None = None) -> Verdicts:
        """Carry out the decisions: the first half of a step, for a population that is trained from outside before `close`.

        Returns (E,) int8: a `Refusal` for each environment, NONE where the decision was carried out.
        """
        config, state = self.config, self.state
        assert state.episode >= 0, "call reset() to begin an episode"
        assert state.step < config.steps, "the episode is over; call reset() to begin the next"
        assert state.opened is None, "call close() to end the step that apply() began"
        actions = checked_actions(actions, config.envs)
        before, decided = state.scores, state.seeds
        refused = self._carry_out(actions, reasons)
        state.opened = Opened(actions, refused, before, decided)
        return refused

    def _carry_out(self, actions: Actions, reasons: Sequence[str | None] | None) -> Verdicts:
        """Carry out decisions and record their bases. Returns what `apply` returns."""
        before, measured = self.state.seeds, self.state.measurements
        refused = self.decide(actions)
        accepted = refused == Refusal.NONE
        self.fates.note(actions.op, actions.slot, accepted, before, measured, self.config.gates, reasons)
        return refused

    def abandon(self) -> None:
        """End a step that `apply` began and that will not be closed: list what its decisions have done already."""
        state = self.state
        if state.opened is not None:
            before, state.opened = state.opened.decided, None
            self.fates.transit(transitions(before, state.seeds), before, state.seeds, self.space, state.step)

    def close(self) -> tuple[View, Outcome]:
        """Measure and govern, once the population is trained: tick -> probe -> govern -> close. Returns the same as `step`."""
        config, state = self.config, self.state
        assert state.opened is not None, "call apply() to begin a step"
        actions, refused, before, decided = state.opened
        applied, state.opened = state.seeds, None
        spent, hosts = state.compute, self.population.host_params
        state.compute = spent.after(self.population.added_params(applied, IN_BUDGET), hosts, state.trial)
        state.trial = None
        with self.timer.phase("tick"):
            gates = judge(applied, state.measurements, config.gates)
            state.seeds = ticked = tick(applied, gates, config.lifecycle)
            self.population.edit(edits(applied, ticked), ticked, state.step)
            state.step += 1
        terminal = state.step == config.steps
        with self.timer.phase("probe"):
            measured = self._measure(trained=True, terminal=terminal)
        with self.timer.phase("govern"):
            governed, found = self._govern(decided, measured)
        with self.timer.phase("close"):
            self._accept(governed)
            state.contributions = state.contributions.after(state.seeds.stage, state.measurements)
            envs, twins = slice(0, config.envs), slice(config.envs, self.rows)
            view = self.view()
            worth: Contributions = take(state.contributions, envs)
            outcome = Outcome(
                episode=state.episode,
                step=state.step - 1,
                actions=actions,
                refused=refused,
                vital=found[envs],
                before=take(before, envs),
                after=take(state.scores, envs),
                host_params=view.host_params,
                terminal=terminal,
                exported=take(governed.exported, envs) if governed.exported is not None else None,
                seeds=view.seeds,
                contribution=worth.metric,
                contribution_loss=worth.loss,
                twin=(take(before, twins), take(state.scores, twins)) if config.twin else None,
                compute=ComputeShares(spent.share(config.steps)[envs], state.compute.share(config.steps)[envs]),
                contribution_age=worth.age,
            )
            self.trace = self._traced((decided, applied, ticked), measured, found)
        return view, outcome

    def view(self) -> View:
        """Return what the next decision may be based on."""
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
                host_params=self.population.host_params[envs].copy(),
                added_params=state.scores.added_params[envs],
            )
        )
        return view

    @property
    def over(self) -> bool:
        """Whether the episode has ended: its last step is done, or every row was stopped by its validation split."""
        stopped = self.stopping is not None and self.stopping.over
        return stopped or self.state.step >= self.config.steps

    def finish(self) -> Scores | None:
        """With early stopping, restore every row to its best state on its validation split and end the episode.

        Returns the scores (rows,) on the probe split of the networks that would be exported, read from the device.
        Returns None, and changes nothing, if `early_stopping.enabled` is false.
        """
        if self.stopping is None:
            return None
        state = self.state
        state.seeds = self.stopping.restore(state.seeds)
        measured = measure(self.population, state.seeds, state.measurements, state.step)
        self._accept(measured)
        scores: Scores = take(state.scores, slice(0, self.rows))
        return scores

    def run(self, client: PolicyClient, *observers: Observer, rounds: int = 1) -> None:
        """Play whole episodes, one a round, with observers, and let the client learn after each."""
        for _ in range(rounds):
            self.reset()
            play(self, client, *observers)
            client.update()

    # The parts of a step.

    def _plant(self, planted: Seeds) -> None:
        """Plant newly initialised seeds (E, S) in the empty slots of the environments; the slots of other rows stay empty."""
        state, after = self.state, copied(self.state.seeds)
        for name in Seeds._fields:
            getattr(after, name)[: self.config.envs] = getattr(planted, name)
        self.population.edit(edits(state.seeds, after), after, state.step)
        state.seeds = after

    def _measure(self, *, trained: bool = False, terminal: bool = False) -> Measured:
        """Measure every row of the population as it is now. This is the one device read of a step."""
        probe, state = self.config.probe, self.state
        sampling = None
        if terminal or state.step % probe.coalitions_every == 0:
            attribution = scalar(self.config.seed, Purpose.ATTRIBUTION, state.episode, state.step)
            sampling = Sampling(probe.shapley_samples, attribution)
        every = probe.sensors_every or 0
        return measure(
            self.population,
            state.seeds,
            state.measurements,
            state.step,
            sampling=sampling,
            terminal=terminal,
            trained=trained,
            sensors=self.sensing and every > 0 and state.step % every == 0,
            validation=self.stopping is not None,
            certifier=self.certifier,
        )

    def _govern(self, before: Seeds, measured: Measured) -> tuple[Measured, Verdicts]:
        """Roll back the rows that failed in this step, and save snapshots of the others.

        Returns the measurements, repeated for rows that were rolled back, and the verdict on every row, (rows,) a
        `Vital`.
        """
        state, governor = self.state, self.governor
        found = governor.inspect(before, state.seeds, measured.signs)
        rows = found != Vital.GOOD
        if rows.any():
            state.seeds = governor.put_back(state.seeds, rows)
            sensors = bool(self.config.probe.sensors_every)
            again = measure(self.population, state.seeds, state.measurements, state.step, sensors=sensors, finite=True)
            measured = measured.replaced(again, rows)
            assert again.data is not None, "finiteness was asked for"
            if not again.data[rows].all():
                found = found.copy()
                broken = np.flatnonzero(rows & ~again.data)
                found[self.population.tainted(broken, state.step - 1)] = Vital.BATCH
            if state.coalitions is not None:
                state.coalitions = without(state.coalitions, rows)
            governor.resume(found, measured.signs)
        governor.keep(state.seeds, found, state.step)
        if self.stopping is not None:
            score, healthy = _validation_score(self, measured), found == Vital.GOOD
            self.stopping.observe(state.seeds, score, healthy, state.step)
        return measured, found

    def _accept(self, measured: Measured) -> None:
        """Make measurements part of the state."""
        state = self.state
        state.measurements, state.scores = measured.measurements, measured.scores
        if measured.coalitions is not None:
            state.coalitions = measured.coalitions
        state.masks = self._legal(state.seeds, state.measurements)

    def _legal(self, seeds: Seeds, measurements: Measurements) -> Masks:
        return legal(seeds, judge(seeds, measurements, self.config.gates), self.population.space, self.config.lifecycle)

    def _traced(self, path: Sequence[Seeds], measured: Measured, found: Verdicts) -> Trace:
        """Return what happened in the last step; `path` has the seeds before it, after the decisions and after the tick."""
        envs, step, governed = slice(0, self.config.envs), self.state.step - 1, self.state.seeds
        changes = []
        for before, after in itertools.pairwise(path):
            moved = transitions(take(before, envs), take(after, envs))
            changes.append(Changes(moved, before, after, self.fates.transit(moved, before, after, self.space, step)))
        self.fates.roll_back(found[envs], path[-1], governed, self.space, step)
        twins = self.state.scores.metric[self.config.envs : self.rows] if self.config.twin else None
        reads = 1 + bool((found != Vital.GOOD).any())
        norms = measured.parameter_norms
        return Trace(tuple(changes), measured.scores, found[: self.rows], path[-1], governed, twins, reads, norms)


def _validation_score(engine: Engine[P], measured: Measured) -> Floats:
    """Return (rows,) the validation scores that early stopping compares: the metric, or J, of the networks as exported."""
    assert measured.validation is not None, "early stopping asks for validation scores"
    return selection_score(measured.validation, engine.population.host_params, engine.config)


def _of_environments(space: Space, envs: int) -> Space:
    """Return the space of the environments alone, which come before their twins."""
    of_rows = ("cost", "width", "number", "instance", "floor", "ceiling", "frozen")
    return space._replace(**{name: getattr(space, name)[:envs] for name in of_rows})


class VectorizedEngine(Engine[StackedPopulation]):
    """Trains E environments of a task as one object.

        engine = VectorizedEngine(task, config)
        engine.run(client)                       # or view = engine.reset(); view, outcome = engine.step(actions)

    The engine drops the test split of the task when it is made.
    """

    def __init__(self, task: AnyTask, config: Config, *, instance: NDArray[np.int64] | None = None) -> None:
        """instance (E,) names the instances of the environments; by default the config names them.

        Raises InputError if the task, the config and the device do not fit together.
        """
        task, config = task.sealed(), with_steps(config, task)
        check_memory(task, config, available_memory(resolve_device(config.device)))  # before any row is allocated
        keys = instance_keys(task, config) if instance is None else np.asarray(instance, np.int64)
        super().__init__(StackedPopulation(task, config, keys), config)

    def trial(self, proposed: Proposed) -> Floats:
        """Try candidates in copies of the environments, which then end; the environments themselves do not change.

        Returns (n,) J on the probe split of the copies after the steps of the trial. Their compute is counted in the next
        step. Raises InputError with `gates.certify`.
        """
        config = config_of_copies(self.config, len(proposed.env))
        copies = VectorizedEngine(self.population.task, config, instance=self.state.instance[proposed.env])
        become(copies, self, proposed.env)
        worth, compute = tried(copies, proposed)
        self.state.trial = np.bincount(proposed.env, compute, len(self._env)).astype(np.float64)
        return worth

    def resume_at(self, origin: ParallelEnvState, rows: Indices) -> None:
        """Go on from a step of an episode of other networks, `rows` of which this population has already."""
        state, self.space = self.state, _of_environments(self.population.space, self.config.envs)
        state.episode, state.step, state.compute = origin.episode, origin.step, Compute.none(len(self._env))
        for name in ("seeds", "measurements", "scores", "contributions"):
            setattr(state, name, take(getattr(origin, name), rows))
        state.masks = self._legal(state.seeds, state.measurements)

    def __repr__(self) -> str:
        name, config = self.population.task.name, self.config
        return f"VectorizedEngine(task={name!r}, envs={config.envs}, steps={config.steps}, device='{self.device}')"

    def evaluate(self, split: Split | Sequence[Split]) -> tuple[Floats, Floats]:
        """Return metric and loss on a split of the networks as exported now, each (rows,): environments, then twins.

        split: one split that all environments share, or one for each environment. Raises InputError if a split is
        longer than the rows of a mixture can hold.
        """
        metric, loss = self.population.evaluate(self.state.seeds, split)
        return metric[: self.rows], loss[: self.rows]

    def outputs(self, split: Split) -> Floats:
        """Return the outputs (rows, N, ...) of the networks as exported now for a split: environments, then twins.

        N are the finite examples of the split.
        """
        return self.population.outputs(self.state.seeds, split)[: self.rows]

    def exported_params(self) -> Indices:
        """Return (rows,) the parameters of the networks as exported now."""
        added = self.population.added_params(self.state.seeds, frozenset({Stage.FOSSILIZED}))
        exported: Indices = (self.population.host_params + added)[: self.rows]
        return exported

    def export(self, env: int) -> tuple[nn.Module, dict[str, Any]]:
        """Return the network of an environment as a plain module on the CPU, and its topology; unfinished seeds are
        left out.
        """
        assert 0 <= env < self.config.envs
        return self.population.export(self.state.seeds, env)
