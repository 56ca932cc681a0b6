"""The parts of a round: episodes of one cohort each, which an actor plays. What a part gives depends on the part and the policy
alone, so any actor can play it, and play it again. E environments.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from esper.leyline.config import Config, RewardConfig
from esper.leyline.errors import InputError
from esper.leyline.protocols import Reward, Senses, Tries
from esper.leyline.resuming import TRIALS, is_own_controller
from esper.leyline.stages import Stage
from esper.nissa.hub import Hub
from esper.nissa.rows import EvaluationRow
from esper.runs.cohort import Cohort, sample_instances
from esper.simic.client import SimicClient
from esper.simic.imitation import Apprentice
from esper.simic.ppo import PPO
from esper.simic.rewards import make_reward, objective
from esper.tamiyo.catalog import get_controller
from esper.tamiyo.controller import Learned, Policy
from esper.tolaria.governor import Record
from esper.tolaria.journal import Journal, Source
from esper.tolaria.play import Observer, Step, planted, play

LED = (1.0, 0.75, 0.5, 0.25)
"""Share of environments that the teacher leads in the first rounds of imitation; further rounds take the last value."""


class Part(NamedTuple):
    """One episode of one cohort.

    Attributes:
        kind (text): 'training', 'imitation' or 'validation'
        cohort (int): index of the cohort
        number (int): number of the round
        episode (int): number of the episode, from 0, from which its hosts and data orders follow
        led (float): share of the environments that the teacher leads, in imitation
    """

    kind: Literal["training", "imitation", "validation"]
    cohort: int
    number: int
    episode: int = 0
    led: float = 0.0


class Played(NamedTuple):
    """The statistics of a finished episode of one cohort.

    Attributes:
        seconds (float): duration of the episode
        deciding (float): duration of `act` and `store` [s]
        germinated (int): seeds that were planted
        kept (int): fossilized seeds at the end
        rollbacks (int): rollbacks of environments
        envs (int): number of environments
        found (sequence): rollbacks by `Vital`, twins included
        refused (sequence): refused decisions by `Refusal`
    """

    seconds: float
    deciding: float
    germinated: int
    kept: int
    rollbacks: int
    envs: int
    found: Sequence[int]
    refused: Sequence[int]


class Validated(NamedTuple):
    """The results of a validation of one cohort.

    Attributes:
        objective ((E,) array): J of the networks as exported, on the validation split
        kept ((E,) array): kept seeds
    """

    objective: NDArray[np.float64]
    kept: NDArray[np.int64]


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

    def client(self, part: Part) -> SimicClient:
        """Return the client that plays a part and has its rollout."""
        return self.apprentices[part.cohort] if part.kind == "imitation" else self.clients[part.cohort]

    def open(self, part: Part) -> Episode:
        """Begin a part of training or imitation."""
        begin, cohort = time.perf_counter(), self.cohorts[part.cohort]
        engine, group = cohort.engine, 1 if part.kind == "imitation" else cohort.config.reward.group_size
        engine.governor.record = Record.empty(len(engine.governor.record.rollbacks))
        engine.reset(sample_instances(cohort, part.number, group), part.episode)
        self.hub.raised = 0  # a part's rows do not depend on the part that was played before it
        return Episode(time.perf_counter() - begin)

    def close(self, part: Part, episode: Episode, *observers: Observer) -> Played:
        """Play the rest of a part that was begun. The statistics are of what was played, if an observer ended it."""
        cohort = self.cohorts[part.cohort]
        engine = cohort.engine
        client = self.client(part)
        if isinstance(client, Apprentice):
            client.led = part.led  # not in `open`, which is not called again for a part that is resumed
        journal = Journal(engine, self.hub, _source(cohort, "training", part.number), lambda: client.paid)
        play(engine, client, *observers, journal, episode)
        record, envs = engine.governor.record, cohort.config.envs
        return Played(
            seconds=episode.seconds,
            deciding=episode.deciding,
            germinated=episode.germinated,
            kept=int((engine.view().seeds.stage == Stage.FOSSILIZED).sum()),
            rollbacks=int(record.rollbacks[:envs].sum()),
            envs=envs,
            found=record.found.tolist(),
            refused=record.refused.tolist(),
        )

    def validate(self, part: Part, *observers: Observer) -> Validated:
        """Grow validation instances greedily. Every call plays episode 0."""
        cohort = self.cohorts[part.cohort]
        engine, reward = cohort.validation, cohort.config.reward
        engine.reset(episode=0)
        self.hub.raised = 0
        source = _source(cohort, "validation", part.number)
        play(engine, Learned(self.learner.policy), *observers, Journal(engine, self.hub, source))
        view = engine.view()
        metric, loss = engine.evaluate(engine.population.data.validation_splits())
        value = metric if reward.objective == "metric" else -loss
        added = engine.exported_params() - view.host_params
        kept: NDArray[np.int64] = (view.seeds.stage == Stage.FOSSILIZED).sum(1)
        worth = objective(value, added, view.host_params, reward.rent, reward.rent_size) - engine.state.compute.price(
            engine.config
        )
        self.hub.emit(
            EvaluationRow(**source._asdict(), split="validation", metrics=metric, losses=loss, objectives=worth)
        )
        return Validated(worth, kept)

    def state(self) -> list[dict[str, Any]]:
        """Return the state of the clients of every cohort, as trees of arrays that share memory."""
        return [
            {"client": client.state(), "apprentice": apprentice.state()}
            for client, apprentice in zip(self.clients, self.apprentices, strict=True)
        ]

    def load_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore a `state`."""
        for client, apprentice, own in zip(self.clients, self.apprentices, state, strict=True):
            client.load_state(own["client"])
            apprentice.load_state(own["apprentice"])


def _source(cohort: Cohort, name: Literal["training", "validation"], number: int) -> Source:
    """Return the population to which the rows of a cohort belong."""
    first = cohort.first_env if name == "training" else cohort.first_watched
    return Source(name, cohort.task.name, number, msgspec.UNSET if first is None else first)


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
    if config.ppo.imitation_rounds and isinstance(teacher, Tries):
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, which tries candidates in copies of the networks, and a training makes no "
            f"copies; give {config.ppo.teacher.removeprefix(TRIALS)}"
        )
    if config.ppo.imitation_rounds and isinstance(teacher, Senses) and config.probe.sensors_every == 0:
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, which reads growth sensors, but probe.sensors_every is 0; set it to 1 or more"
        )
    return Apprentice(learner, reward, teacher, LED[0], cohort.config.governor.penalty)


def learner_of(policy: Policy, config: Config) -> PPO:
    """Return the learner of a training."""
    return PPO(
        policy, config.ppo, config.seed, config.reward.group_size if config.reward.relative_to == "group" else None
    )
