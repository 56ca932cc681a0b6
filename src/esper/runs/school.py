"""Training of a controller: rounds in which every cohort grows a population, with an update after each. E environments."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from esper.leyline.config import Config, RewardConfig
from esper.leyline.errors import InputError
from esper.leyline.keys import Purpose, key, scalar
from esper.leyline.protocols import Reward
from esper.leyline.stages import Stage
from esper.leyline.task import AnyTask
from esper.leyline.view import View
from esper.nissa.hub import Hub
from esper.nissa.rows import EvaluationRow
from esper.runs.figures import Summary
from esper.runs.history import History
from esper.runs.interrupt import Interrupt
from esper.runs.run_folder import emit_checkpoints
from esper.simic.client import SimicClient
from esper.simic.imitation import Apprentice
from esper.simic.ppo import PPO
from esper.simic.rewards import get_reward, objective
from esper.simic.rollout import Rollout
from esper.store.checkpoint import Checkpoints
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.controller import Learned, Policy
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.governor import total
from esper.tolaria.journal import Journal, Source
from esper.tolaria.play import Observer, Step, planted, play

LED = (1.0, 0.75, 0.5, 0.25)
"""Share of environments that the teacher leads in the first rounds of imitation; further rounds take the last value."""


class Cohort(NamedTuple):
    """The populations of one task.

    Attributes:
        task (task): the task without its test split
        config (Config): config of the population
        engine (VectorizedEngine): the population of training instances
        validation (VectorizedEngine): the population of validation instances
    """

    task: AnyTask
    config: Config
    engine: VectorizedEngine
    validation: VectorizedEngine


class Played(NamedTuple):
    """The statistics of a finished episode of one cohort.

    Attributes:
        seconds (float): duration of the episode
        deciding (float): duration of `act` and `store` [s]
        germinated (int): seeds that were planted
        kept (int): fossilized seeds at the end
        rollbacks (int): rollbacks of environments
        envs (int): number of environments
    """

    seconds: float
    deciding: float
    germinated: int
    kept: int
    rollbacks: int
    envs: int


@dataclass
class Episode(Observer):
    """The statistics of an unfinished episode of one cohort."""

    seconds: float = 0.0
    deciding: float = 0.0  # duration of act and store [seconds]
    germinated: int = 0

    def stepped(self, step: Step) -> None:
        """Count a step."""
        self.seconds += step.seconds
        self.deciding += step.deciding
        self.germinated += planted(step.outcome)


class Pause(Observer):
    """Counts the steps of a training, writes checkpoints that are due, and stops the training on an interrupt."""

    def __init__(self, school: "School", interrupt: Interrupt, keeper: "Keeper | None") -> None:
        self.school, self.interrupt, self.keeper = school, interrupt, keeper
        self.asked = False

    def going(self, view: View) -> bool:
        """Whether the training continues: false after an interrupt."""
        self.asked = self.interrupt.asked
        if self.keeper is not None:
            self.keeper.when_due(self.asked)
        return not self.asked

    def stepped(self, step: Step) -> None:
        """Count a step."""
        self.school.steps += 1


class Stop(Exception):
    """An interrupt ended a round early."""


class Keeper(NamedTuple):
    """Writes the checkpoints of a training. Without a store it writes none."""

    store: Checkpoints | None
    school: "School"
    hub: Hub
    started: float  # start of the run, as if it had never been interrupted [seconds]

    def when_due(self, asked: bool) -> None:
        """Write a checkpoint where the config's intervals or an interrupt (`asked`) require one."""
        if self.store is not None and (self.store.due(self.school.steps) or asked):
            self.now()

    def now(self, best: bool = False) -> None:
        """Write a checkpoint, unless no step was taken since the last. best: whether its validation score is the best so far."""
        if self.store is None or self.school.steps == self.store.last:
            return
        self.store.join()
        emit_checkpoints(self.hub, self.store)
        self.hub.flush()
        seconds = time.perf_counter() - self.started
        state = {**self.hub.state(), "seconds": seconds, "school": self.school.state()}
        self.store.begin(self.school.steps, state, best)


class School:
    """A learner with its cohorts, and the best round so far."""

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        policy: Policy,
        config: Config,
        reward: Callable[[RewardConfig], Reward] = get_reward,
        hub: Hub | None = None,
    ) -> None:
        self.cohorts, self.policy, self.config = cohorts, policy, config
        self.hub = hub or Hub()
        group = config.reward.group_size if config.reward.relative_to == "group" else None
        self.learner = PPO(policy, config.ppo, config.seed, group)
        self.clients = [
            SimicClient(self.learner, reward(cohort.config.reward), cohort.config.governor.penalty)
            for cohort in cohorts
        ]
        self.apprentices = [_apprentice(self.learner, cohort, reward(cohort.config.reward)) for cohort in cohorts]
        self.shown: list[tuple[Rollout, tuple[str, ...]]] = []  # the rollouts of the teacher so far, each with its menu
        self.best: tuple[float, int] | None = None  # J on validation instances, and the round
        self.history = History()
        self.number = -config.ppo.imitation_rounds  # number of the present round, or of the next
        self.steps = 0  # steps taken in all rounds by all cohorts
        self.played: list[Played] = []  # statistics of the cohorts whose episode of the round is over
        self.episode: Episode | None = None  # the episode of the next cohort, if it has begun

    def learn(self, number: int, interrupt: Interrupt, keeper: "Keeper | None" = None) -> dict[str, float]:
        """Run one round: every cohort grows a population, and the policy is updated. Raises Stop on an interrupt."""
        self.shown.clear()
        played = self._play(number, self.clients, self.config.reward.group_size, interrupt, keeper)
        begin = time.perf_counter()
        figures = self.learner.update([c.rollout() for c in self.clients], [c.menu for c in self.clients])
        return self._close(figures, self.clients, played, time.perf_counter() - begin)

    def imitate(self, number: int, interrupt: Interrupt, keeper: "Keeper | None" = None) -> dict[str, float]:
        """Run one round of imitation of the heuristic. The numbers of these rounds end with -1."""
        passed = max(number + self.config.ppo.imitation_rounds, 0)  # a resumed run may have fewer rounds
        led = LED[min(passed, len(LED) - 1)]
        for apprentice in self.apprentices:
            apprentice.led = led
        played = self._play(number, self.apprentices, 1, interrupt, keeper)
        begin = time.perf_counter()
        self.shown += [(c.rollout().copied(), c.menu) for c in self.apprentices]
        rollouts, menus = zip(*self.shown, strict=True)
        figures = self.learner.imitate(rollouts, menus, fresh=len(self.apprentices))
        return self._close(figures, self.apprentices, played, time.perf_counter() - begin)

    def validate(self, number: int, figures: dict[str, float]) -> bool:
        """Grow the validation instances greedily and add J to the figures. Returns whether J is the best so far."""
        scores, kept = zip(*(self._validated(cohort, number) for cohort in self.cohorts), strict=True)
        worth = float(np.mean([score.mean() for score in scores]))
        figures["validation_objective"], figures["validation_kept"] = worth, float(np.mean(np.concatenate(kept)))
        better = math.isfinite(worth) and (self.best is None or worth > self.best[0])
        if better:
            self.best = worth, number
        return better

    def all_rolled_back(self) -> bool:
        """Whether every row was rolled back in every step so far. Called between rounds."""
        engines = [cohort.engine for cohort in self.cohorts]
        rounds = self.steps // sum(engine.config.steps for engine in engines)
        failed = sum(int(engine.governor.record.found.sum()) for engine in engines)
        return failed == rounds * sum(engine.config.steps * engine.rows for engine in engines)

    def best_policy(self) -> Policy:
        """Return the current policy, with its `origin` set."""
        assert self.best is not None
        self.policy.origin = {
            "tasks": [cohort.task.name for cohort in self.cohorts],
            "seed": self.config.seed,
            "round": self.best[1],
            "validation_objective": self.best[0],
        }
        return self.policy

    def summary(self) -> Summary:
        """Return the best round, the figures of the last rounds, and the numbers of rollbacks and refusals."""
        return {
            "best_round": None if self.best is None else self.best[1],
            "best_validation_objective": None if self.best is None else self.best[0],
            **self.history.summary(),
            **total(cohort.engine.governor.record.counts() for cohort in self.cohorts),
        }

    def state(self) -> dict[str, Any]:
        """Return the state of the training as a tree of arrays. The tensors share memory."""
        return {
            "number": self.number,
            "steps": self.steps,
            "played": [played._asdict() for played in self.played],
            "episode": None if self.episode is None else asdict(self.episode),
            "policy": self.policy.state(),
            "learner": self.learner.state(),
            "shown": [{"rollout": rollout.tree(), "menu": menu} for rollout, menu in self.shown],
            "best": self.best,
            "history": self.history.state(),
            "cohorts": [
                {"engine": cohort.engine.snapshot(), "client": client.state(), "apprentice": apprentice.state()}
                for cohort, client, apprentice in zip(self.cohorts, self.clients, self.apprentices, strict=True)
            ],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. Raises ValueError if it belongs to other cohorts or another config."""
        self.number, self.steps = state["number"], state["steps"]
        self.played = [Played(**played) for played in state["played"]]
        self.episode = None if state["episode"] is None else Episode(**state["episode"])
        self.policy.load_state(state["policy"])
        self.learner.load_state(state["learner"])
        self.shown = [(Rollout.of_tree(entry["rollout"]), tuple(entry["menu"])) for entry in state["shown"]]
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self.history.load_state(state["history"])
        every = zip(self.cohorts, self.clients, self.apprentices, state["cohorts"], strict=True)
        for cohort, client, apprentice, own in every:
            cohort.engine.restore(own["engine"])
            client.load_state(own["client"])
            apprentice.load_state(own["apprentice"])

    def _play(
        self,
        number: int,
        clients: Sequence[SimicClient],
        group: int,
        interrupt: Interrupt,
        keeper: "Keeper | None",
    ) -> list[Played]:
        """Play the episodes of the round that are not finished, one per cohort."""
        self.number = number
        for cohort, client in list(zip(self.cohorts, clients, strict=True))[len(self.played) :]:
            self.played.append(self._grow(cohort, client, group, interrupt, keeper))
            self.episode = None
        return self.played

    def _grow(
        self, cohort: Cohort, client: SimicClient, group: int, interrupt: Interrupt, keeper: "Keeper | None"
    ) -> Played:
        """Play an episode of a cohort, or the rest of it. On an interrupt, raises Stop after a checkpoint."""
        begin = time.perf_counter()
        if self.episode is None:
            cohort.engine.reset(sample_instances(cohort, self.number, group))
            self.episode = Episode(time.perf_counter() - begin)
        episode, pause = self.episode, Pause(self, interrupt, keeper)
        journal = Journal(
            cohort.engine, self.hub, Source("training", cohort.task.name, self.number), lambda: client.paid
        )
        play(cohort.engine, client, pause, journal, episode)
        if pause.asked:
            raise Stop
        view = cohort.engine.view()
        kept = int((view.seeds.stage == Stage.FOSSILIZED).sum())
        rollbacks = int(cohort.engine.governor.record.rollbacks[: cohort.config.envs].sum())
        return Played(episode.seconds, episode.deciding, episode.germinated, kept, rollbacks, cohort.config.envs)

    def _validated(self, cohort: Cohort, number: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return J of the networks as exported on the validation split, and kept seeds, (E,) each. Every call plays
        episode 0.
        """
        engine, reward = cohort.validation, cohort.config.reward
        engine.reset(episode=0)
        source = Source("validation", cohort.task.name, number)
        play(engine, Learned(self.policy), Journal(engine, self.hub, source))
        view = engine.view()
        metric, loss = engine.evaluate(engine.population.data.validation_splits())
        value = metric if reward.objective == "metric" else -loss
        added = engine.exported_params() - view.host_params
        kept: NDArray[np.int64] = (view.seeds.stage == Stage.FOSSILIZED).sum(1)
        worth = objective(value, added, view.host_params, reward.rent, reward.rent_size)
        self.hub.emit(
            EvaluationRow(**source._asdict(), split="validation", metrics=metric, losses=loss, objectives=worth)
        )
        return worth, kept

    def _close(
        self, figures: dict[str, float], clients: Sequence[SimicClient], played: Sequence[Played], updating: float
    ) -> dict[str, float]:
        for client in clients:
            client.clear()
        growing, deciding = sum(p.seconds for p in played), sum(p.deciding for p in played)
        steps = sum(p.envs * cohort.config.steps for p, cohort in zip(played, self.cohorts, strict=True))
        germinated, kept = sum(p.germinated for p in played), sum(p.kept for p in played)
        figures |= {
            "kept": kept / sum(p.envs for p in played),
            "kept_share": kept / germinated if germinated else math.nan,
            "rollbacks": float(sum(p.rollbacks for p in played)),
            "env_steps_per_second": steps / (growing + updating),
            "controller_share": (deciding + updating) / (growing + updating),
        }
        self.history.add(figures)
        self.number, self.played = self.number + 1, []
        return figures


def sample_instances(cohort: Cohort, number: int, group: int) -> NDArray[np.int64]:
    """Return the keys (E,) of the training instances of a round.

    Each `group` environments with consecutive numbers share an instance.
    """
    config = cohort.config
    keys = cohort.task.keys("training")
    drawn = key(config.seed, Purpose.SAMPLE, number, cohort.engine.space.number // group) & ((1 << 62) - 1)
    return keys.start + drawn % len(keys)


def cohort_of(task: AnyTask, config: Config) -> Cohort:
    """Make the populations of a task. Raises InputError if a controller cannot learn from the task and the config."""
    reward = config.reward
    for name, count in (("envs", config.envs), ("first_instance", config.first_instance)):
        if count % reward.group_size:  # for any baseline, because instances are drawn by the group
            raise InputError(
                f"reward.group_size is {reward.group_size}, which does not divide {name}, {count}; choose a divisor"
            )
    if reward.relative_to == "twin" and not config.twin:
        raise InputError(
            "reward.relative_to is twin, but no twins are trained; give --twin (the key twin), or set "
            "reward.relative_to to none or group"
        )
    if config.early_stopping.enabled:
        raise InputError("early_stopping.enabled is true, but a controller learns from whole episodes; leave it out")
    if config.gates.certify is not None:
        raise InputError(
            "gates.certify is set, but a training plays many episodes on the same fresh examples; leave it out, and set it where "
            "the trained controller grows"
        )
    engine = VectorizedEngine(task, config)
    if not engine.space.slots or not engine.space.fits.any() or not config.lifecycle.max_seeds:
        raise InputError(
            f"task {task.name} has no slot in which a blueprint of its menu can be planted, so nothing can be learnt; give it "
            "slots, blueprints that fit them, and a lifecycle.max_seeds of 1 or more"
        )
    # Another run seed, so that on a data set the starts of the validation differ from those of an evaluation.
    watched = config.model_copy(
        update={
            "instances": "validation",
            "first_instance": 0,
            "envs": config.ppo.validate_envs,
            "baselines": (),
            "seed": scalar(config.seed, Purpose.VALIDATION),
        }
    )
    try:
        validation = VectorizedEngine(task, watched)
    except InputError as error:
        raise InputError(f"in the validation, which takes ppo.validate_envs as envs: {error}") from None
    return Cohort(task, config, engine, validation)


def _apprentice(learner: PPO, cohort: Cohort, reward: Reward) -> Apprentice:
    teacher = get_controller("heuristic", cohort.config)
    return Apprentice(learner, reward, teacher, LED[0], cohort.config.governor.penalty)


def settings_of_policy(config: Config) -> dict[str, Any]:
    """Return the settings that a trained controller requires of every run."""
    return {
        "gates": config.gates.model_dump(mode="json"),
        "probe": {"sensors_every": config.probe.sensors_every, "coalitions_every": config.probe.coalitions_every},
        "lifecycle": {"tempos": list(config.lifecycle.tempos), "targets": list(config.lifecycle.targets)},
    }
