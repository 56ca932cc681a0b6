"""Training of a controller: rounds in which every cohort grows a population, with an update after each. E environments."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import numpy as np

from esper.leyline.config import Config, RewardConfig
from esper.leyline.protocols import Reward
from esper.leyline.view import View
from esper.nissa.events import decode
from esper.nissa.hub import Hub
from esper.runs.actors import Actors, Stop
from esper.runs.cohort import Cohort, by_task
from esper.runs.figures import Summary
from esper.runs.history import History
from esper.runs.interrupt import Interrupt
from esper.runs.parts import LED, Episode, Part, Played, Player, Validated, learner_of
from esper.runs.run_folder import emit_checkpoints
from esper.simic.rewards import get_reward
from esper.simic.rollout import Rollout
from esper.store.checkpoint import Checkpoints
from esper.tamiyo.controller import Policy
from esper.tolaria.governor import Record
from esper.tolaria.play import Observer, Step


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
    """A learner with its cohorts, and the best round so far. The parts of a round are played here, or by actors."""

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        policy: Policy,
        config: Config,
        reward: Callable[[RewardConfig], Reward] = get_reward,
        hub: Hub | None = None,
        actors: Actors | None = None,
    ) -> None:
        self.cohorts, self.policy, self.config, self.actors = cohorts, policy, config, actors
        self.hub = hub or Hub()
        self.learner = learner_of(policy, config)
        self.player = Player(cohorts, self.learner, reward, self.hub)
        self.shown: list[tuple[Rollout, tuple[str, ...]]] = []  # the rollouts of the teacher so far, each with its menu
        self.best: tuple[float, int] | None = None  # J on validation instances, and the round
        self.history = History()
        self.number = -config.ppo.imitation_rounds  # number of the present round, or of the next
        self.steps = 0  # steps taken in all rounds by all cohorts
        self.record = Record.empty(0)  # of all finished parts
        self.played: list[Played] = []  # statistics of the cohorts whose episode of the round is over
        self.episode: Episode | None = None  # the episode of the next cohort, if it has begun

    def learn(self, number: int, interrupt: Interrupt, keeper: "Keeper | None" = None) -> dict[str, float]:
        """Run one round: every cohort grows a population, and the policy is updated. Raises Stop on an interrupt."""
        self.shown.clear()
        grown = self._play("training", number, 0.0, interrupt, keeper)
        begin = time.perf_counter()
        figures = self.learner.update(grown.rollouts, grown.menus)
        return self._close(figures, grown, time.perf_counter() - begin)

    def imitate(self, number: int, interrupt: Interrupt, keeper: "Keeper | None" = None) -> dict[str, float]:
        """Run one round of imitation of the teacher. The numbers of these rounds end with -1."""
        passed = max(number + self.config.ppo.imitation_rounds, 0)  # a resumed run may have fewer rounds
        grown = self._play("imitation", number, LED[min(passed, len(LED) - 1)], interrupt, keeper)
        begin = time.perf_counter()
        self.shown += [(rollout.copied(), menu) for rollout, menu in zip(grown.rollouts, grown.menus, strict=True)]
        rollouts, menus = zip(*self.shown, strict=True)
        passes = self.config.ppo.imitation_passes if number == -1 else None
        figures = self.learner.imitate(rollouts, menus, len(grown.rollouts), passes)
        return self._close(figures, grown, time.perf_counter() - begin)

    def validate(self, number: int, figures: dict[str, float]) -> bool:
        """Grow the validation instances greedily and add J to the figures. Returns whether J is the best so far."""
        parts = [
            Part("validation", place, number) for place, each in enumerate(self.cohorts) if each.watched is not None
        ]
        if self.actors is None:
            found = [self.player.validate(part) for part in parts]
        else:
            results = self.actors.play(self._weights(), [part._asdict() for part in parts])
            found = [Validated(**result["validated"]) for result in results]
            self._write_rows(results)
        of_cohort = {part.cohort: each for part, each in zip(parts, found, strict=True)}
        of_task = [[of_cohort[place] for place in places if place in of_cohort] for places in by_task(self.cohorts)]
        scores = [np.concatenate([each.objective for each in shards]) for shards in of_task]
        worth = float(np.mean([score.mean() for score in scores]))
        figures["validation_objective"] = worth
        figures["validation_kept"] = float(np.mean(np.concatenate([each.kept for each in found])))
        better = math.isfinite(worth) and (self.best is None or worth > self.best[0])
        if better:
            self.best = worth, number
        return better

    def all_rolled_back(self) -> bool:
        """Whether every row was rolled back in every step so far. Called between rounds."""
        configs = [cohort.config for cohort in self.cohorts]
        rounds = self.steps // sum(config.steps for config in configs)
        rows = sum(config.steps * config.envs * (2 if config.twin else 1) for config in configs)
        return int(self.record.found.sum()) == rounds * rows

    def best_policy(self) -> Policy:
        """Return the current policy, with its `origin` set."""
        assert self.best is not None
        self.policy.origin = {
            "tasks": [self.cohorts[places[0]].task.name for places in by_task(self.cohorts)],
            "seed": self.config.seed,
            "round": self.best[1],
            "validation_objective": self.best[0],
            "episodes": self.episodes(self.best[1]),
        }
        return self.policy

    def episodes(self, number: int) -> int:
        """Return the number of episodes that all cohorts played until the end of a round, imitation and validation included."""
        settings, rounds = self.config.ppo, number + 1
        validations = -(-rounds // settings.validate_every) + bool(settings.imitation_rounds)
        watched = sum(cohort.watched.envs for cohort in self.cohorts if cohort.watched is not None)
        envs = sum(cohort.config.envs for cohort in self.cohorts)
        return (rounds + settings.imitation_rounds) * envs + validations * watched

    def summary(self) -> Summary:
        """Return the best round, the figures of the last rounds, and the numbers of rollbacks and refusals."""
        return {
            "best_round": None if self.best is None else self.best[1],
            "best_validation_objective": None if self.best is None else self.best[0],
            **self.history.summary(),
            **self._counted().counts(),
        }

    def _counted(self) -> Record:
        """Return the rollbacks and refusals of all rounds, with those of the parts of the present round so far."""
        found: list[Any] = [self.record.found, *(played.found for played in self.played)]
        refused: list[Any] = [self.record.refused, *(played.refused for played in self.played)]
        if self.episode is not None:
            begun = self.cohorts[len(self.played)].engine.governor.record
            found, refused = [*found, begun.found], [*refused, begun.refused]
        return Record(self.record.rollbacks, np.sum(found, axis=0), np.sum(refused, axis=0))

    def state(self) -> dict[str, Any]:
        """Return the state of the training as a tree of arrays. The tensors share memory."""
        begun = len(self.played) if self.episode is not None else None  # the cohort whose episode is unfinished
        return {
            "number": self.number,
            "steps": self.steps,
            "played": [played._asdict() for played in self.played],
            "episode": None if self.episode is None else asdict(self.episode),
            "record": self.record._asdict(),
            "policy": self.policy.state(),
            "learner": self.learner.state(),
            "shown": [{"rollout": rollout.tree(), "menu": menu} for rollout, menu in self.shown],
            "best": self.best,
            "history": self.history.state(),
            "cohorts": self.player.state(),
            "engine": None if begun is None else self.cohorts[begun].engine.snapshot(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. Raises ValueError if it belongs to other cohorts or another config."""
        self.number, self.steps = state["number"], state["steps"]
        self.played = [Played(**played) for played in state["played"]]
        self.episode = None if state["episode"] is None else Episode(**state["episode"])
        self.record = Record(**state["record"])
        self.policy.load_state(state["policy"])
        self.learner.load_state(state["learner"])
        self.shown = [(Rollout.of_tree(entry["rollout"]), tuple(entry["menu"])) for entry in state["shown"]]
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self.history.load_state(state["history"])
        self.player.load_state(state["cohorts"])
        if self.episode is not None:
            self.cohorts[len(self.played)].engine.restore(state["engine"])

    def _play(
        self,
        kind: Literal["training", "imitation"],
        number: int,
        led: float,
        interrupt: Interrupt,
        keeper: "Keeper | None",
    ) -> "Grown":
        """Play the episodes of the round that are not finished, one for each cohort.

        Actors play whole rounds. A round that a checkpoint was written in is finished in this process.
        """
        self.number, begin = number, time.perf_counter()
        episode = self.learner.updates  # every update follows one episode of every cohort
        parts = [Part(kind, place, number, episode, led) for place in range(len(self.cohorts))]
        if self.actors is not None and not self.played and self.episode is None:
            found = self._act(self.actors, parts, interrupt)
            return self._joined(*found, time.perf_counter() - begin)
        for part in parts[len(self.played) :]:
            self.played.append(self._grow(part, interrupt, keeper))
            self.episode = None
        if self.actors is not None:
            for cohort in self.cohorts:
                cohort.engines.release()
        clients = [self.player.client(part) for part in parts]
        rollouts, menus = [client.rollout() for client in clients], [client.menu for client in clients]
        return self._joined(self.played, rollouts, menus, sum(played.seconds for played in self.played))

    def _grow(self, part: Part, interrupt: Interrupt, keeper: "Keeper | None") -> Played:
        """Play a part, or the rest of it. On an interrupt, raises Stop after a checkpoint."""
        if self.episode is None:
            self.episode = self.player.open(part)
        pause = Pause(self, interrupt, keeper)
        played = self.player.close(part, self.episode, pause)
        if pause.asked:
            raise Stop
        return played

    def _act(
        self, actors: Actors, parts: Sequence[Part], interrupt: Interrupt
    ) -> tuple[list[Played], list[Rollout], list[tuple[str, ...]]]:
        """Let actors play a round. On an interrupt, raises Stop; the round is played again when the training is resumed."""
        results = actors.play(self._weights(), [part._asdict() for part in parts], lambda: interrupt.asked)
        self._write_rows(results)
        self.steps += sum(cohort.config.steps for cohort in self.cohorts)
        self.played = [Played(**result["played"]) for result in results]
        rollouts = [Rollout.of_tree(result["rollout"]) for result in results]
        return self.played, rollouts, [tuple(result["menu"]) for result in results]

    def _weights(self) -> dict[str, Any]:
        """Return what a part depends on beside itself: the policy, and the round of learning, which exploration follows."""
        return {"policy": self.policy.state(), "round": self.learner.round}

    def _write_rows(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of parts, in the order of the parts."""
        for result in results:
            self.hub.take([decode(line) for line in result["rows"].tobytes().splitlines()])

    def _joined(
        self, played: Sequence[Played], rollouts: Sequence[Rollout], menus: Sequence[tuple[str, ...]], seconds: float
    ) -> "Grown":
        """Return a round with one rollout for each task."""
        places = by_task(self.cohorts)
        return Grown(
            played,
            [Rollout.joined([rollouts[place] for place in each]) for each in places],
            [menus[each[0]] for each in places],
            seconds,
        )

    def _close(self, figures: dict[str, float], grown: "Grown", updating: float) -> dict[str, float]:
        for client in (*self.player.clients, *self.player.apprentices):
            client.clear()
        played = grown.played
        deciding, growing = sum(p.deciding for p in played), sum(p.seconds for p in played)
        steps = sum(p.envs * cohort.config.steps for p, cohort in zip(played, self.cohorts, strict=True))
        germinated, kept = sum(p.germinated for p in played), sum(p.kept for p in played)
        figures |= {
            "kept": kept / sum(p.envs for p in played),
            "kept_share": kept / germinated if germinated else math.nan,
            "rollbacks": float(sum(p.rollbacks for p in played)),
            "env_steps_per_second": steps / (grown.seconds + updating),
            "controller_share": (deciding + updating) / (growing + updating),
        }
        if self.actors is not None:
            figures["waiting_seconds"] = self.actors.waited(grown.seconds + updating, growing)
        self.record = self._counted()
        self.history.add(figures)
        self.number, self.played = self.number + 1, []
        return figures


class Grown(NamedTuple):
    """A round that was played.

    Attributes:
        played (sequence): the statistics of every cohort
        rollouts (sequence): the rollout of every task
        menus (sequence): names of the blueprints of every task
        seconds (float): duration of the round, as a clock on the wall shows it [s]
    """

    played: Sequence[Played]
    rollouts: Sequence[Rollout]
    menus: Sequence[tuple[str, ...]]
    seconds: float
