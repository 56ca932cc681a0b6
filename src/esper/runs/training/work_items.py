"""Play the parts of a training round: episodes of one cohort each, in this process or in a worker. E environments.

What a part gives depends on the part and the policy alone, so any worker can play it, and play it again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from esper.leyline.config.tree import Config, RewardConfig
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.stages import Stage
from esper.leyline.protocols import Controller, Reward
from esper.leyline.reference import is_own_controller
from esper.nissa.events import encode
from esper.nissa.hub import Hub, Level
from esper.nissa.rows import EvaluationRow, Row
from esper.runs.figures import exported_objective
from esper.runs.training.cohort import Cohort, cohorts_of, sample_instances
from esper.runs.workers.workers import SentTask, shared_facts
from esper.simic.client import SimicClient
from esper.simic.imitation import Apprentice
from esper.simic.ppo import PPO
from esper.simic.rewards import make_reward
from esper.store.tensors import Tree
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.policy.controller import Language, Learned, Policy
from esper.tolaria.governor import GovernorRecord
from esper.tolaria.journal import Journal, RowSource
from esper.tolaria.play import Observer, Step, planted, play

LED = (1.0, 0.75, 0.5, 0.25)
"""Share of environments that the teacher leads in the first rounds of imitation; further rounds take the last value."""


class WorkItem(NamedTuple):
    """One episode of one cohort."""

    kind: Literal["training", "imitation", "validation"]  # 'training', 'imitation' or 'validation'
    cohort: int  # index of the cohort
    number: int  # number of the round
    episode: int = 0  # number of the episode, from 0, from which its hosts and data orders follow
    led: float = 0.0  # share of the environments that the teacher leads, in imitation


class EpisodeResult(NamedTuple):
    """The statistics of a finished episode of one cohort."""

    seconds: float  # duration of the episode
    deciding: float  # duration of `act` and `store` [s]
    germinated: int  # seeds that were planted
    kept: int  # fossilized seeds at the end
    rollbacks: int  # rollbacks of environments
    envs: int  # number of environments
    found: Sequence[int]  # rollbacks by `Vital`, twins included
    refused: Sequence[int]  # refused decisions by `Refusal`


@dataclass
class EpisodeStatistics(Observer):
    """The statistics of an unfinished episode of one cohort."""

    seconds: float = 0.0
    deciding: float = 0.0  # duration of act and store [seconds]
    germinated: int = 0

    def stepped(self, step: Step) -> None:
        self.seconds += step.seconds
        self.deciding += step.deciding
        self.germinated += planted(step)


class Player:
    """Plays the parts of rounds in this process. Every cohort has a client that learns and one that imitates."""

    def __init__(
        self, cohorts: Sequence[Cohort], learner: PPO, reward: Callable[[RewardConfig], Reward], hub: Hub
    ) -> None:
        self.cohorts, self.learner, self.hub = cohorts, learner, hub
        self.clients = [
            SimicClient(learner, make_reward(reward, cohort.config.reward), cohort.config.governor.penalty)
            for cohort in cohorts
        ]
        self.apprentices = [
            _apprentice(learner, cohort, make_reward(reward, cohort.config.reward)) for cohort in cohorts
        ]

    def client(self, part: WorkItem) -> SimicClient:
        """Return the client that plays a part and has its rollout."""
        return self.apprentices[part.cohort] if part.kind == "imitation" else self.clients[part.cohort]

    def open(self, part: WorkItem) -> EpisodeStatistics:
        """Begin a part of training or imitation."""
        begin, cohort = time.perf_counter(), self.cohorts[part.cohort]
        engine, group = cohort.engine, 1 if part.kind == "imitation" else cohort.config.reward.group_size
        engine.governor.record = GovernorRecord.empty(len(engine.governor.record.rollbacks))
        engine.reset(sample_instances(cohort, part.number, group), part.episode)
        self.hub.raised = 0  # a part's rows do not depend on the part that was played before it
        return EpisodeStatistics(time.perf_counter() - begin)

    def close(self, part: WorkItem, episode: EpisodeStatistics, *observers: Observer) -> EpisodeResult:
        """Play the rest of a part that was begun. The statistics are of what was played, if an observer ended it."""
        cohort = self.cohorts[part.cohort]
        engine = cohort.engine
        client = self.client(part)
        if isinstance(client, Apprentice):
            client.led = part.led  # not in `open`, which is not called again for a part that is resumed
        journal = Journal(engine, self.hub, _source(cohort, "training", part.number), lambda: client.paid)
        play(engine, client, *observers, journal, episode)
        record, envs = engine.governor.record, cohort.config.envs
        return EpisodeResult(
            seconds=episode.seconds,
            deciding=episode.deciding,
            germinated=episode.germinated,
            kept=int((engine.view().seeds.stage == Stage.FOSSILIZED).sum()),
            rollbacks=int(record.rollbacks[:envs].sum()),
            envs=envs,
            found=record.found.tolist(),
            refused=record.refused.tolist(),
        )

    def validate(self, part: WorkItem, *observers: Observer) -> dict[str, NDArray[Any]]:
        """Grow validation instances greedily. Every call plays episode 0.

        Returns `objective` (E,), J of the networks as exported on the validation split, and `kept` (E,), the kept seeds.
        """
        cohort = self.cohorts[part.cohort]
        engine = cohort.validation
        engine.reset(episode=0)
        self.hub.raised = 0
        source = _source(cohort, "validation", part.number)
        play(engine, Learned(self.learner.policy), *observers, Journal(engine, self.hub, source))
        metric, loss = engine.evaluate(engine.population.data.validation_splits())
        worth = exported_objective(engine, metric, loss)
        self.hub.emit(
            EvaluationRow(**source._asdict(), split="validation", metrics=metric, losses=loss, objectives=worth)
        )
        return {"objective": worth, "kept": (engine.view().seeds.stage == Stage.FOSSILIZED).sum(1)}

    def state(self) -> list[dict[str, Any]]:
        """Return the state of the clients of every cohort, as trees of arrays that share memory."""
        pairs = zip(self.clients, self.apprentices, strict=True)
        return [{"client": client.state(), "apprentice": apprentice.state()} for client, apprentice in pairs]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        for client, apprentice, own in zip(self.clients, self.apprentices, state, strict=True):
            client.load_state(own["client"])
            apprentice.load_state(own["apprentice"])


def _source(cohort: Cohort, name: Literal["training", "validation"], number: int) -> RowSource:
    """Return the population to which the rows of a cohort belong, with its first environment where there are shards."""
    first: int | msgspec.UnsetType = msgspec.UNSET
    if cohort.whole.shards > 1 and name == "training":
        first = cohort.config.first_instance - cohort.whole.first_instance
    elif cohort.whole.shards > 1 and cohort.watched is not None:
        first = cohort.watched.first_instance
    return RowSource(name, cohort.task.name, number, first)


def _apprentice(learner: PPO, cohort: Cohort, reward: Reward) -> Apprentice:
    config = cohort.config
    if is_own_controller(config.ppo.teacher):  # a key of the config, which `esper resume` reads from a folder
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, but code of your own cannot be a teacher; give a name of `esper controller`, "
            "a schedule file, or the run folder of a trained controller"
        )
    try:
        teacher = get_controller(config.ppo.teacher, config)
    except InputError as error:
        raise InputError(f"ppo.teacher: {error}") from None
    if config.ppo.imitation_rounds and type(teacher).proposals is not Controller.proposals:
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, which tries candidates in copies of the networks, and a training makes no "
            "copies; give another controller"
        )
    if config.ppo.imitation_rounds and teacher.sensors_every and config.probe.sensors_every == 0:
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, which reads growth sensors, but probe.sensors_every is 0; set it to 1 or more"
        )
    return Apprentice(learner, reward, teacher, LED[0], cohort.config.governor.penalty)


def learner_of(policy: Policy, config: Config) -> PPO:
    """Return the learner of a training."""
    return PPO(
        policy, config.ppo, config.seed, config.reward.group_size if config.reward.relative_to == "group" else None
    )


class _KeptRows(list[bytes]):
    """An output that keeps rows as lines of JSON."""

    def write(self, row: Row) -> None:
        self.append(encode(row))

    def close(self) -> None:
        """No row follows."""


class TrainingPlayer:
    """Plays the parts of a training in an actor."""

    def __init__(
        self,
        tasks: Sequence[SentTask],
        configs: Sequence[Config],
        reward: Callable[[RewardConfig], Reward],
        level: Level,
        engines: int,
        device: str | None,
    ) -> None:
        """Make the cohorts of all tasks in this process, with the config of each, on a device; None is that of the configs.

        reward: as of `train`. level: of the events. engines: number of cohorts whose populations are kept in memory.
        """
        made = [sent.task() for sent in tasks]
        configs = [each if device is None else each.model_copy(update={"device": device}) for each in configs]
        cohorts = [
            each for task, config in zip(made, configs, strict=True) for each in cohorts_of(task, config, made=0)
        ]
        first = [next(each for each in cohorts if each.task is task) for task in made]
        language = Language.of([cohort.engine.space for cohort in first], configs[0].ppo.packages)
        policy = Policy.fresh(language, configs[0].seed, decisions_per_step=configs[0].ppo.decisions_per_step)
        for cohort in first:
            cohort.release()
        self._facts = shared_facts(made)
        self._rows, self._most, self._recent = _KeptRows(), engines, list[int]()
        hub = Hub([self._rows], level, raise_steps=configs[0].telemetry.raise_steps)
        self.player = Player(cohorts, learner_of(policy, configs[0]), reward, hub)

    def facts(self) -> Tree:
        return self._facts

    def load(self, weights: Tree) -> None:
        """Take the policy, and the round of learning."""
        learner = self.player.learner
        learner.policy.load_state(weights["policy"])
        learner.round = weights["round"]

    def play(self, part: Tree, *observers: Observer) -> Tree:
        """Play a `WorkItem`. Returns its statistics, its rollout or its validation, and its rows."""
        played, player = WorkItem(**part), self.player
        # Populations that were not used for the longest time are freed, so that there is room for those of this cohort.
        recent = [played.cohort, *(each for each in self._recent if each != played.cohort)]
        for each in recent[self._most :]:
            player.cohorts[each].release()
        self._recent = recent[: self._most]
        self._rows.clear()
        if played.kind == "validation":
            result: Tree = {"validated": player.validate(played, *observers)}
        else:
            statistics, client = player.close(played, player.open(played), *observers), player.client(played)
            result = {"played": statistics._asdict(), "rollout": client.rollout().tree(), "menu": client.menu}
            client.clear()
        return {**result, "rows": np.frombuffer(b"".join(self._rows), np.uint8)}
