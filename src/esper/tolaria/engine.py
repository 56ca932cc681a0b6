"""Edit, train and measure a whole population step by step: the engine, a vector environment, its state, and episodes of it.

`Engine` steps any population; `VectorizedEngine` trains stacked networks. In `play` a controller decides, the engine steps, and
observers follow. E environments, S slots.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from esper.kasmina.lifecycle import apply, copied, dormant, edits, emptied, legal, tick, transitions
from esper.kasmina.stack.snapshot import picked_body
from esper.kasmina.stack.wider_rows import HiddenWidening
from esper.leyline.config.tree import Config, EarlyStoppingConfig
from esper.leyline.data.keys import Purpose, scalar
from esper.leyline.data.objective import objective_of, selection_score
from esper.leyline.data.task import AnyTask, Split, with_steps
from esper.leyline.lifecycle.gates import judge
from esper.leyline.lifecycle.masks import barred, without_blueprints
from esper.leyline.lifecycle.view import (
    CoalitionValues,
    ComputeShares,
    Estimate,
    Floats,
    Masks,
    Measurements,
    Outcome,
    Scores,
    Seeds,
    Space,
    Transitions,
    View,
    map_arrays,
    read_only,
    take,
)
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Actions, Op, Refusal, Stage, Vital, checked_actions
from esper.leyline.messages import InputError
from esper.leyline.protocols import Controller, Judgement, Proposed, as_controller
from esper.leyline.records import as_tree, brief, from_tree
from esper.tolaria.early_stopping import EarlyStopping
from esper.tolaria.governor import Governor, Verdicts
from esper.tolaria.measure.certifying import Certifier
from esper.tolaria.measure.measuring import StepMeasurements, measure, unmeasured, without
from esper.tolaria.population import Indices, ParameterNorms, Population, TaskPopulation
from esper.tolaria.runtime import PhaseTimer
from esper.tolaria.seed_history import SeedHistory
from esper.tolaria.stacked.population import StackedPopulation

P = TypeVar("P", bound=Population)
D = TypeVar("D", bound=TaskPopulation)

Further = Callable[[View, NDArray[np.int8]], tuple[Actions, Sequence[str | None] | None] | None]
"""From a view and the `Refusal`s (E,) of the last decisions to further decisions of the step with their reasons, or None."""


@brief
class Compute(NamedTuple):
    """Counts the compute of an episode beyond that of the hosts: the units that every row has taken since its episode began.

    One unit is one training step of the host of a row. A seed of a parameters beside a host of h takes a / h units a step from
    its planting on, whether it incubates, blends or is kept: on a stream of one width the multiplications of forward and backward
    pass are proportional to the parameters. A copy of a row in which a candidate is tried takes 1 unit a step and that of its
    seeds. Measurements are not counted.
    """

    seeds: Floats  # (R,) of the seeds of the row
    forks: Floats  # (R,) of copies of the row

    @classmethod
    def none(cls, rows: int) -> "Compute":
        return cls(np.zeros(rows), np.zeros(rows))

    def after(self, added: NDArray[np.int64], host: NDArray[np.int64], forks: Floats | None) -> "Compute":
        """Return the compute after a further step with seeds of `added` (R,) parameters in hosts of `host` (R,), and copies."""
        return Compute(self.seeds + added / host, self.forks if forks is None else self.forks + forks)

    def share(self, steps: int) -> Floats:
        return (self.seeds + self.forks) / steps

    def price(self, config: Config) -> Floats:
        """Return what the compute takes from J (`reward.compute_price`) for environments (E,), or (2E,) with their twins' 0."""
        return config.reward.compute_price * self.share(config.steps)[: config.envs * (2 if config.twin else 1)]


@brief
class PendingStep(NamedTuple):
    """Holds the decisions of a step that has begun, and the state before them."""

    actions: Actions  # (E,) the decisions
    refused: NDArray[np.int8]  # (E,) a `Refusal` for each
    before: Scores  # (rows,) the scores after the step before
    decided: Seeds  # (rows, S) the seeds before the decisions were carried out


@brief
class Contributions(NamedTuple):
    """Holds the last measured contribution of each seed that acts. That of a kept seed, measured no more, is of its trial."""

    metric: Estimate  # (E, S) `Measurements.contribution` when it was measured last
    loss: Estimate  # (E, S) `Measurements.contribution_loss` at that time
    age: NDArray[np.int32]  # (E, S) steps since then; -1 where none was measured, or the seed is gone

    @classmethod
    def none(cls, rows: int, slots: int) -> "Contributions":
        return cls(Estimate.absent(rows, slots), Estimate.absent(rows, slots), np.full((rows, slots), -1, np.int32))

    def after(self, stage: NDArray[np.int8], measured: Measurements) -> "Contributions":
        """Return the contributions after a further step, from its measurements and the stages (E, S) of the seeds after it."""
        fresh = measured.contribution.measured
        last = (stage == Stage.FOSSILIZED) & ~fresh & (self.age >= 0)
        now = np.where(fresh, 0, -1).astype(np.int32)
        measurement = Contributions(measured.contribution, measured.contribution_loss, now)
        older = self._replace(age=self.age + 1)
        kept: Contributions = map_arrays(lambda old, new: np.where(last, old, new), older, measurement)
        return kept


@brief
@dataclass
class ParallelEnvState:
    """Holds the state of an engine between two steps, without the networks and their data, which the population holds.

    Rows are the environments, then their twins. A row that would be alone gets a ghost beside it, whose results are ignored.
    """

    seeds: Seeds  # (rows, S)
    instance: NDArray[np.int64]  # (rows,) key of a row's host, data order and initial weights
    measurements: Measurements  # of the last step
    coalitions: CoalitionValues | None  # of the last step at which attribution was due
    scores: Scores  # (rows,) of the last step
    episode: int
    step: int  # steps taken in the episode
    compute: Compute  # (rows,) beyond that of the hosts in the steps of the episode
    contributions: Contributions  # (rows, S) the last of every seed that acts
    forks: Floats | None = None  # (rows,) compute of the copies that were tried since the last step
    pending: PendingStep | None = None  # the step between `begin_step` and `finish_step`


class Changes(NamedTuple):
    """Holds changes of stage between two states of the seeds, and the bases of the decisions behind them."""

    transitions: Transitions
    before: Seeds
    after: Seeds
    bases: dict[tuple[int, int], dict[str, Any]]  # by environment and slot: fields of `LifecycleRow`


class Trace(NamedTuple):
    """Holds the events within a step, beside its outcome. Rows are environments, then twins."""

    changes: list[Changes]  # those of the decisions, then those of the tick
    scores: Scores  # (rows,) before the rollback
    found: Verdicts  # (rows,) a `Vital`
    parameter_norms: ParameterNorms | None  # of all rows and the ghost, before the rollback; None if not asked for
    widening: HiddenWidening | None = None  # of all hosts, after the training of the step


class Decision(NamedTuple):
    """Holds the decisions of a controller, and its reasons."""

    actions: Actions  # (E,)
    reasons: Sequence[str | None] | None  # (E,), if the controller gives reasons
    judgement: Judgement | None = None  # if the controller is a policy
    sensors: Mapping[Op, Sequence[str]] | None = None  # names of those that the controller looked at


class Step(NamedTuple):
    """Holds one step that was played."""

    view: View  # the view that the decision was based on
    outcome: Outcome
    after: View  # the view for the next decision
    seconds: float  # of the controller and the engine, without observers
    deciding: float  # of the controller alone
    decision: Decision  # the decision whose result is `outcome`
    # further decisions of the step (E,), and a `Refusal` for each
    further: Sequence[tuple[Actions, NDArray[np.int8]]] = ()


class Observer:
    """Follows an episode. Each method does nothing unless a subclass overrides it."""

    def going(self, view: View) -> bool:
        """Return whether the episode goes on, before each decision of an unfinished one; after False no other is asked."""
        return True

    def stepped(self, step: Step) -> None:
        """Follow a step, once the controller has stored its outcome."""

    def failed(self, view: View) -> None:
        """Follow an error of the controller, which is raised again, instead of a decision. The engine is unchanged."""

    def broken(self) -> None:
        """Follow an error of a step of the engine, of which a part may have been done. The error is raised again."""


class Until(Observer):
    """Ends the playing when a function asks for it; `stopped` says whether it did."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked
        self.stopped = False

    def going(self, view: View) -> bool:
        self.stopped = self._asked()
        return not self.stopped


class Engine(Generic[P]):
    """Plays episodes of E environments over any population.

    A step reads the device once, for any E, S and telemetry settings, and a second time if a row is rolled back. Setting
    `parameter_norms` to true before a step adds the gradient norm of each parameter to the trace of this one step.
    """

    trial: Callable[[Proposed], Floats] | None = None  # tries candidates in copies of rows, if they can be copied
    sensing = True  # whether growth sensors are measured where they are due; a controller may need none any more
    planting = True  # whether seeds may be planted

    def __init__(self, population: P, config: Config) -> None:
        self.population, self.config = population, config
        self.rows = config.envs * (2 if config.twin else 1)
        self.device = population.device
        self.timer = PhaseTimer(self.device, population.label)
        self._env = population.environment
        self.state = self._fresh(population.space.instance, -1)
        seeds = self.state.seeds
        self.governor = Governor(population.keeper(seeds), self.rows, config)
        early = config.early_stopping.enabled
        self.stopping = EarlyStopping(population.keeper(seeds), self._env, config) if early else None
        self.certifier = Certifier(population, config) if config.gates.certify is not None else None
        self.seed_history = SeedHistory()
        self.trace: Trace | None = None  # of the last step
        # decisions of that step behind its first, and a `Refusal` for each
        self.further: list[tuple[Actions, Verdicts]] = []
        self.parameter_norms = False

    @property
    def space(self) -> Space:
        """The space of the environments alone, which come before their twins."""
        of_rows = ("cost", "width", "number", "instance", "floor", "ceiling", "frozen")
        space = self.population.space
        return space._replace(**{name: getattr(space, name)[: self.config.envs] for name in of_rows})

    @property
    def masks(self) -> Masks:
        """What is legal in every row now, (rows, ...)."""
        state, config, space = self.state, self.config, self.population.space
        gates = judge(state.seeds, state.measurements, config.gates, space)
        masks = legal(state.seeds, gates, space, config.lifecycle)
        return masks if self.planting else without_blueprints(masks, np.ones_like(masks.blueprint))

    def reset(
        self, instance: NDArray[np.int64] | None = None, episode: int | None = None, planted: Seeds | None = None
    ) -> View:
        """Begin an episode with newly initialised hosts, empty slots and a first measurement.

        instance (E,) names the instances of a mixture from now on; without it they do not change. `episode` repeats an episode:
        the same number gives the same hosts and data orders; without it the next episode begins, with other hosts and orders.
        `planted` (E, S) are seeds that are in the slots from the start, newly initialised; without it the slots are empty.
        """
        last, population = self.state, self.population
        instance = last.instance if instance is None else np.asarray(instance[self._env], np.int64)
        state = self.state = self._fresh(instance, last.episode + 1 if episode is None else episode)
        self.sensing = True
        self.seed_history = SeedHistory()
        population.begin(state.instance, state.episode)
        if planted is not None:
            after = copied(state.seeds)  # the slots of twins and of a ghost stay empty
            for name in Seeds._fields:
                getattr(after, name)[: self.config.envs] = getattr(planted, name)
            population.edit(edits(state.seeds, after), after, state.step)
            state.seeds = after
        with self.timer.phase("probe"):
            measured = self._measure()
        with self.timer.phase("govern"):
            self.governor.begin(state.seeds, measured.signs)
            if self.stopping is not None:
                self.stopping.begin(state.seeds, _validation_score(self, measured))
        self._accept(measured)
        return self.view()

    def _fresh(self, instance: NDArray[np.int64], episode: int) -> ParallelEnvState:
        """Return the state of an episode that begins, before anything is measured."""
        space, rows = self.population.space, len(self._env)
        shape = rows, len(space.slots)
        seeds, measurements = dormant(*shape), unmeasured(*shape, len(space.sensors))
        return ParallelEnvState(
            seeds=seeds,
            instance=instance,
            measurements=measurements,
            coalitions=None,
            scores=Scores(measurements.metric, measurements.loss, np.zeros(rows, np.int64)),
            episode=episode,
            step=0,
            compute=Compute.none(rows),
            contributions=Contributions.none(*shape),
        )

    def snapshot(self) -> dict[str, Any]:
        """Return everything that the next step depends on, as a tree of arrays (store/checkpoint.py) that share memory."""
        state = self.state
        return {
            **{name: as_tree(value) for name, value in vars(state).items() if name != "forks"},
            **self.population.snapshot(),
            "governor": self.governor.state(state.step),
            "early_stopping": None if self.stopping is None else self.stopping.state(state.step),
            "certificates": None if self.certifier is None else self.certifier.snapshot(),
            "seed_history": self.seed_history.state(),
        }

    def restore(self, tree: Mapping[str, Any]) -> View:
        """Restore a snapshot of an engine of the same task and config. Raises ValueError if it came from another one."""
        state = self.state
        names = ("seeds", "measurements", "scores", "instance", "contributions")
        read = {name: from_tree(getattr(state, name), tree[name], name) for name in names}  # all, before any is taken
        for name, value in read.items():
            setattr(state, name, value)
        state.episode, state.step, state.compute = tree["episode"], tree["step"], Compute(**tree["compute"])
        self.population.load(tree, state.instance, state.episode)
        state.pending = state.forks = None
        if tree["pending"] is not None:
            waiting, none = Actions.wait(self.config.envs), np.zeros(self.config.envs, np.int8)
            known = PendingStep(waiting, none, state.scores, state.seeds)
            state.pending = from_tree(known, tree["pending"], "pending")
        state.coalitions = None if tree["coalitions"] is None else CoalitionValues(**tree["coalitions"])
        self.governor.load_state(tree["governor"], state.seeds)
        if self.stopping is not None:
            self.stopping.load_state(tree["early_stopping"], state.seeds)
        if self.certifier is not None:
            self.certifier.restore(tree["certificates"])
        self.seed_history.load_state(tree["seed_history"])
        return self.view()

    def carry_out(self, actions: Actions, reasons: Sequence[str | None] | None = None) -> Verdicts:
        """Carry out one decision per environment without a training step; return which were refused, (E,) a `Refusal`.

        `step` begins with this. A study can call it by itself to make several decisions in one step; the masks are then
        those of the new state. reasons: as in `step`.
        """
        state, config = self.state, self.config
        before = state.seeds
        with self.timer.phase("apply"):
            actions = checked_actions(actions, config.envs)
            rest = np.zeros(len(self._env) - config.envs, np.int64)  # the other rows get WAIT
            every = Actions(*(np.concatenate([head, rest]) for head in actions))
            if (every.op == Op.WAIT).all():  # always legal, and nothing changes
                return np.full(config.envs, Refusal.NONE, np.int8)
            masks = self.masks
            refused = self.governor.preflight(self.population, state.seeds, every, masks)
            masks = barred(masks, Op.GERMINATE, refused != Refusal.NONE)
            after, changes, _ = apply(state.seeds, every, masks, self.population.space, config.lifecycle)
            self.population.edit(changes, after, state.step)
            state.seeds = after
        refused = refused[: config.envs]
        self.seed_history.note(actions, refused == Refusal.NONE, before, state.measurements, config.gates, reasons)
        return refused

    def step(
        self, actions: Actions, reasons: Sequence[str | None] | None = None, further: Further | None = None
    ) -> tuple[View, Outcome]:
        """Take a step: apply -> train -> tick -> probe -> govern -> close, for one decision per environment (E,).

        `reasons` (E,) say why a decision was made, for the events and the lists of the summary. `further` is asked for
        more decisions of this step until it returns None. Returns the view for the next decision, and the outcome of
        this step, measured after it acted; its actions are the first ones. Raises InputError if a field of the
        decision is not an array of E whole numbers.
        """
        refused, self.further = self.begin_step(actions, reasons), []
        while further is not None and (more := further(self.view(), refused)) is not None:
            again = checked_actions(more[0], self.config.envs)
            refused = self.carry_out(again, more[1])
            self.further.append((again, refused))
        waits = self.population.waits
        waited = 0.0 if waits is None else waits.seconds
        with self.timer.phase("train"):
            self.population.train(self.state.seeds, parameter_norms=self.parameter_norms)
        if waits is not None:
            self.timer.move(waits.seconds - waited, "train", "reading")
        self.parameter_norms = False
        return self.finish_step()

    def begin_step(self, actions: Actions, reasons: Sequence[str | None] | None = None) -> Verdicts:
        """Carry out the decisions: the first half of a step, for a population that is trained from outside before `finish_step`.

        Returns (E,) int8: a `Refusal` for each environment, NONE where the decision was carried out.
        """
        config, state = self.config, self.state
        assert state.episode >= 0, "call reset() to begin an episode"
        assert state.step < config.steps, "the episode is over; call reset() to begin the next"
        assert state.pending is None, "call finish_step() to end the step that begin_step() began"
        actions = checked_actions(actions, config.envs)
        before, decided = state.scores, state.seeds
        refused = self.carry_out(actions, reasons)
        state.pending = PendingStep(actions, refused, before, decided)
        return refused

    def abandon(self) -> None:
        """End a step that will not be finished: list what its decisions have done already."""
        state = self.state
        if state.pending is not None:
            before, state.pending = state.pending.decided, None
            self.seed_history.transit(transitions(before, state.seeds), before, state.seeds, self.space, state.step)

    def finish_step(self) -> tuple[View, Outcome]:
        """Measure and govern, once the population is trained: tick -> probe -> govern -> close. Returns the same as `step`."""
        config, state = self.config, self.state
        assert state.pending is not None, "call begin_step() to begin a step"
        actions, refused, before, decided = state.pending
        applied, state.pending = state.seeds, None
        spent, hosts = state.compute, self.population.host_params
        state.compute = spent.after(self.population.table.added_params(applied, IN_BUDGET), hosts, state.forks)
        state.forks = None
        with self.timer.phase("tick"):
            gates = judge(applied, state.measurements, config.gates, self.population.space)
            state.seeds = ticked = tick(applied, gates, config.lifecycle)
            self.population.edit(edits(applied, ticked), ticked, state.step)
            state.step += 1
            widening = self._widen() if state.step in config.widen.at else None
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
            changes, step, history = [], state.step - 1, self.seed_history
            for old, new in itertools.pairwise((decided, applied, ticked)):
                moved = transitions(take(old, envs), take(new, envs))
                changes.append(Changes(moved, old, new, history.transit(moved, old, new, self.space, step)))
            history.roll_back(found[envs], ticked, state.seeds, self.space, step)
            self.trace = Trace(changes, measured.scores, found[: self.rows], measured.parameter_norms, widening)
        return view, outcome

    def vacate(self, row: int, slots: Sequence[int]) -> None:
        """Empty slots whose seeds have become part of the host, and keep the network as it is now to roll back to."""
        state, population = self.state, self.population
        gone = np.zeros(state.seeds.stage.shape, bool)
        gone[row, list(slots)] = True
        state.seeds = emptied(state.seeds, gone)
        population.edit(edits(state.seeds, state.seeds), state.seeds, state.step)
        state.scores = state.scores._replace(added_params=population.table.added_params(state.seeds))
        if self.config.governor.enabled:
            self.governor.keeper.take(state.seeds, np.arange(len(state.seeds.stage)) == row, state.step)

    def view(self) -> View:
        """Return what the next decision may be based on."""
        state, envs = self.state, slice(0, self.config.envs)
        return read_only(
            View(
                space=self.space,
                episode=state.episode,
                step=state.step,
                steps=self.config.steps,
                seeds=take(state.seeds, envs),
                masks=take(self.masks, envs),
                measurements=take(state.measurements, envs),
                coalitions=state.coalitions,
                host_params=self.population.host_params[envs].copy(),
                added_params=state.scores.added_params[envs],
            )
        )

    @property
    def over(self) -> bool:
        """Whether the episode has ended: its last step is done, or every row was stopped by its validation split."""
        stopped = self.stopping is not None and self.stopping.over
        return stopped or self.state.step >= self.config.steps

    def finish(self) -> Scores | None:
        """Restore every row to its best state on its validation split, with early stopping, and end the episode.

        Returns the scores (rows,) on the probe split of the networks that would be exported, read from the device.
        Returns None, and changes nothing, if `early_stopping.enabled` is false.
        """
        if self.stopping is None:
            return None
        state = self.state
        state.seeds = self.stopping.restore(state.seeds)
        measured = measure(self.population, state.seeds, state.measurements, state.step)
        self._accept(measured)
        return take(state.scores, slice(0, self.rows))

    def run(self, client: Controller, *observers: Observer, rounds: int = 1) -> None:
        """Play whole episodes, one a round, with observers, and let the client learn after each."""
        client = as_controller(client)
        for _ in range(rounds):
            self.reset()
            play(self, client, *observers)
            client.update()

    # The parts of a step.

    def _widen(self) -> HiddenWidening | None:
        """Make all networks wider, where the population can."""
        return None

    def _measure(self, *, trained: bool = False, terminal: bool = False) -> StepMeasurements:
        """Measure every row of the population as it is now. This is the one device read of a step."""
        probe, state = self.config.probe, self.state
        sampling = None
        if terminal or state.step % probe.coalitions_every == 0:
            attribution = scalar(self.config.seed, Purpose.ATTRIBUTION, state.episode, state.step)
            sampling = probe.shapley_samples, attribution
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

    def _govern(self, before: Seeds, measured: StepMeasurements) -> tuple[StepMeasurements, Verdicts]:
        """Roll back the rows that failed, and save the others. Returns the new measurements, and a `Vital` for every row."""
        state, governor = self.state, self.governor
        found = governor.inspect(before, state.seeds, measured.signs)
        rows = found != Vital.GOOD
        if rows.any():
            state.seeds = governor.keeper.put_back(state.seeds, rows)
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

    def _accept(self, measured: StepMeasurements) -> None:
        state = self.state
        state.measurements, state.scores = measured.measurements, measured.scores
        if measured.coalitions is not None:
            state.coalitions = measured.coalitions


def _validation_score(engine: Engine[P], measured: StepMeasurements) -> Floats:
    """Return (rows,) the validation scores that early stopping compares: the metric, or J, of the networks as exported."""
    assert measured.validation is not None, "early stopping asks for validation scores"
    return selection_score(measured.validation, engine.population.host_params, engine.config)


class TaskEngine(Engine[D]):
    """Evaluates and exports the networks of a population that holds the data of a task, and grows them as any engine."""

    @property
    def reads(self) -> bool:
        """Whether examples are read by batch, so that a step can fail before it is whole."""
        return self.population.waits is not None

    def remembering(self) -> AbstractContextManager[None]:
        """Return a context in which `snapshot` leaves out what other processes hold of the rows, and these keep a copy of it."""
        return nullcontext()

    def remembered(self, snapshot: dict[str, Any]) -> None:
        """Put what other processes kept of the rows into a snapshot that was made within `remembering`."""

    def _widen(self) -> HiddenWidening:
        population, state = self.population, self.state
        population.widen(state.seeds, state.step)
        return population.widenings[population.widened - 1]

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
        added = self.population.table.added_params(self.state.seeds, frozenset({Stage.FOSSILIZED}))
        return (self.population.host_params + added)[: self.rows]

    def export(self, env: int) -> tuple[nn.Module, dict[str, Any]]:
        """Return the network of an environment as a plain module on the CPU, and its topology; unfinished seeds are left out."""
        assert 0 <= env < self.config.envs
        return self.population.export(self.state.seeds, env)

    def __repr__(self) -> str:
        kind, name, config = type(self).__name__, self.population.task.name, self.config
        return f"{kind}(task={name!r}, envs={config.envs}, steps={config.steps}, device='{self.device}')"


class VectorizedEngine(TaskEngine[StackedPopulation]):
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
        super().__init__(StackedPopulation(task, config, instance), config)

    def copies(self, env: Indices) -> "VectorizedEngine":
        """Return an engine whose environments are copies of some of this engine, env (n,), as they are between two steps.

        A copy has the weights, buffers, optimizer state and seeds of its row, the row's instance, and therefore its order of data
        and the initial weights of its next seeds: under the same decisions it becomes, bit for bit, what its row becomes. Copies
        have no twins and no early stopping. Raises InputError with `gates.certify`, because copies would read the fresh examples
        that the certificates are about.
        """
        origin, certify = self.state, self.config.gates.certify
        if certify is not None:
            raise InputError(
                f"gates.certify is {certify:g}, but a trial would use up fresh examples of its rows; set it to null, "
                "or take the rule without trials"
            )
        config = self.config.model_copy(
            update={"envs": len(env), "baselines": (), "early_stopping": EarlyStoppingConfig()}
        )
        made = VectorizedEngine(self.population.task, config, instance=origin.instance[env])
        population, state = made.population, made.state
        rows = env[population.environment]
        tree = self.population.snapshot()
        of_rows = {"body": picked_body(tree["body"], rows), "seeds": take(origin.seeds, rows)._asdict()}
        population.load({**tree, **of_rows}, origin.instance[rows], origin.episode)
        population.skipped = np.zeros(len(rows), np.int64)  # those of the snapshot are of other rows
        state.episode, state.step, state.compute = origin.episode, origin.step, Compute.none(len(rows))
        for name in ("seeds", "measurements", "scores", "contributions"):
            setattr(state, name, take(getattr(origin, name), rows))
        if self.config.governor.enabled:
            made.governor.history = take(self.governor.history, rows)
            made.governor.keeper.take(state.seeds, np.ones(len(rows), bool), origin.step)
        return made

    def trial(self, proposed: Proposed) -> Floats:
        """Try candidates in copies of the environments, which then end; the environments themselves do not change.

        Returns (n,) J on the probe split of the copies, as they compute after the steps of the trial. Their compute is counted in
        the next step. Raises InputError with `gates.certify`.
        """
        copies = self.copies(proposed.env)
        state, envs = copies.state, slice(0, copies.config.envs)
        begin, before = state.step, state.compute.seeds[envs].copy()
        play(copies, proposed.client, Until(lambda: state.step - begin >= proposed.steps))
        compute = state.step - begin + state.compute.seeds[envs] - before
        self.state.forks = np.bincount(proposed.env, compute, len(self._env)).astype(np.float64)
        copies.population.close()
        return objective_of(take(state.scores, envs), copies.population.host_params[envs], self.config.reward)


def planted(step: Step) -> int:
    """Return the number of seeds that a step planted, over all environments."""
    decided = [(step.outcome.actions, step.outcome.refused), *step.further]
    return sum(int(np.sum((refused == Refusal.NONE) & (actions.op == Op.GERMINATE))) for actions, refused in decided)


def decide(client: Controller, view: View, trial: Callable[[Proposed], NDArray[np.float64]] | None = None) -> Decision:
    """Ask a controller, after the trials that it wants. InputError if its answer is malformed, or if no trials can be made."""
    if (proposed := client.proposals(view)) is not None:
        if trial is None:
            raise InputError(
                "a trial needs copies of the network, which are not made here; take the rule without trials"
            )
        client.tried(trial(proposed))
    actions = checked_actions(client.act(view), len(view.host_params))
    sensors = dict(client.sensors_read)  # a plain dict can be sent to other processes
    return Decision(actions, client.reasons(), client.judgement(), sensors)


def play(
    engine: Engine[Any], client: Controller, *observers: Observer, first: Decision | None = None
) -> Outcome | None:
    """Play from the present state of the engine to the end of its episode, or until an observer ends the playing.

    `first` is the first decision, if it was made already. Returns the last outcome, or None if no step was taken. The
    controller's `update` is not called.
    """

    def further(view: View, refused: NDArray[np.int8]) -> tuple[Actions, Sequence[str | None] | None] | None:
        more = client.further(view, refused)
        return None if more is None else (more, client.reasons())

    view, outcome = engine.view(), None
    while not engine.over and all(observer.going(view) for observer in observers):
        begin = time.perf_counter()
        decision, first = first, None
        if decision is None:
            try:
                decision = decide(client, view, engine.trial)
            except Exception:  # a controller's code can raise any error, which is raised again below
                for observer in observers:
                    observer.failed(view)
                raise
        engine.sensing = client.sensing()
        decided = time.perf_counter()
        try:
            after, outcome = engine.step(decision.actions, decision.reasons, further)
        except Exception:  # of the data, the loss or the metric of the user, which is raised again below
            for observer in observers:
                observer.broken()
            raise
        told = time.perf_counter()
        client.store(outcome)
        end = time.perf_counter()
        step = Step(view, outcome, after, end - begin, decided - begin + end - told, decision, engine.further)
        for observer in observers:
            observer.stepped(step)
        view = after
    return outcome
