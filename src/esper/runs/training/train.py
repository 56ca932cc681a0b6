"""Train a controller: rounds that grow whole populations, with an update after each; the best policy is kept. E
environments.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from esper.leyline.config.tree import Config, PPOConfig, RewardConfig
from esper.leyline.data.task import AnyTask
from esper.leyline.errors import InputError, RolledBack, describe_error
from esper.leyline.lifecycle.view import View
from esper.leyline.progress import Progress, Silent
from esper.leyline.protocols import Reward
from esper.leyline.reference import PAID_BY
from esper.leyline.text import counted
from esper.nissa.events import decode
from esper.nissa.hub import Hub, Level
from esper.nissa.outputs import Output
from esper.nissa.rows import RoundRow
from esper.runs.figures import Status, Summary
from esper.runs.folder.environment import describe_environment
from esper.runs.folder.interrupt import Interrupt
from esper.runs.folder.resume import NEW, PAID, Opening, fitting, with_cohorts
from esper.runs.folder.run_folder import RunFolder, run_row, save_checkpoint
from esper.runs.training.cohort import (
    LED,
    Cohort,
    EpisodeStatistics,
    Player,
    TrainingPlayer,
    WorkItem,
    by_task,
    cohorts_of,
    learner_of,
    settings_of_policy,
    with_shards,
)
from esper.runs.workers.transports import serve_rank
from esper.runs.workers.workers import ALONE, SentTask, Stop, WorkerOptions, Workers, shared_facts, start_workers
from esper.simic.anomalies import MENDS, learning_anomalies
from esper.simic.rewards import get_reward, name_of_reward
from esper.simic.rollout import Rollout
from esper.store.checkpoint import Checkpoints
from esper.tamiyo.catalog import FOLDER
from esper.tamiyo.policy.controller import Language, Policy, save_policy
from esper.tolaria.governor import GovernorRecord
from esper.tolaria.play import Observer, Step
from esper.tolaria.runtime import PhaseTimer, resolve_device
from esper.tolaria.stacked.population import check_place

LAST = 10
"""Number of rounds of learning whose mean is the summary's `last_rounds`."""

SHOWN = ("return", "explained_variance", "entropy", "wait", "decisions", "kept", "kept_share", "env_steps_per_second")
"""The figures of `last_rounds`."""


def train(
    tasks: Sequence[AnyTask],
    configs: Sequence[Config],
    folder: Path | None = None,
    watch: Progress | None = None,
    opening: Opening = NEW,
    *,
    reward: Callable[[RewardConfig], Reward] = get_reward,
    outputs: Sequence[Output] = (),
    asked: WorkerOptions = ALONE,
) -> Summary:
    """Train a controller on tasks, with one config each; the settings of the learner are read from the first config.

    `reward` makes a reward object for every task, because a reward may have state. Controllers are validated by J,
    whatever the reward is. The run folder gets a `controller/` whenever a better policy is found: one with a higher
    mean J of greedy growth on the validation split of validation instances. Bad input raises InputError before anything
    is written, and an update that cannot be trusted LearningError; the best controller so far then stays. SIGINT or
    SIGTERM ends the training after the current step; with actors, which play whole rounds, after the last whole round.

    `opening` and `outputs` are as in `grow`. `asked` are the actors that play; in a rank of torchrun above 0, this
    process is one of them until the training ends.
    """
    watch, started = watch or Silent(), time.perf_counter()
    configs = with_shards(configs, asked, resumed=opening.resume)
    config = configs[0]
    if asked.is_rank:
        return serve_rank(
            training_work(asked, tasks, configs, reward, config.telemetry.level), asked.devices or (None,)
        )
    for task, own in zip(tasks, configs, strict=True):
        check_place(task, own)
    kept = with_cohorts(configs, PAID if reward is get_reward else f"{PAID_BY}{name_of_reward(reward)}")
    sealed = [task.sealed() for task in tasks]
    opened = partial(RunFolder, folder, kept, watch.note)
    with Interrupt(watch.note) as interrupt, opened(interrupt, opening, sealed, outputs) as run, ExitStack() as stack:
        shards = [cohorts_of(task, each, 1 if asked.any else None) for task, each in zip(sealed, configs, strict=True)]
        spaces = [each[0].engine.space for each in shards]
        ppo, language = config.ppo, Language.of(spaces, config.ppo.packages)
        settings = settings_of_policy(config)
        policy = Policy.fresh(language, config.seed, settings, ppo.decisions_per_step, ppo.undo_bias)
        actors = None
        if asked.any:
            for each in shards:
                each[0].release()
            work = training_work(asked, sealed, configs, reward, "off" if not run.hub.outputs else run.hub.asked)
            started_workers = start_workers(asked, work, watch.note, shared_facts(sealed), stop=lambda: interrupt.asked)
            actors = stack.enter_context(closing(started_workers))
        trainer = Trainer([cohort for each in shards for cohort in each], policy, config, reward, run.hub, actors)
        trainer.started = started
        if run.found is not None:
            with fitting(run.found):
                trainer.load_state(run.found.state["trainer"])
                trainer.started -= float(run.found.state["seconds"])
            if trainer.number > ppo.rounds:
                raise InputError(
                    f"ppo.rounds is {ppo.rounds}, but the training has done {counted(trainer.number, 'round')}; give "
                    f"{trainer.number} or more"
                )
        row = partial(run_row, config, PAID, spaces[0], ())
        cohorts = {each.task: each.model_dump(mode="json") for each in configs}
        device = resolve_device(config.device)
        run.begin(lambda: {**describe_environment(device, config), "cohorts": cohorts}, row("running"))
        trainer.store = run.store
        # The timer says, where memory runs out, what is in memory.
        timer = (
            trainer.cohorts[0].engine.timer
            if actors is None
            else PhaseTimer(torch.device("cpu"), f"the rollouts of {counted(actors.size, 'actor')}")
        )
        failed = run.recorded(row, lambda: trainer.summary("failed"))
        try:
            with failed, timer.memory("between steps", users=False):
                status = _rounds(trainer, run, interrupt, watch)
        except KeyboardInterrupt:
            run.end(row("interrupted"), trainer.summary("interrupted"), at_once=True)
            raise
        whole = trainer.summary(status)
        if status == "failed":
            whole = {**whole, "error": describe_error(RolledBack(whole["rollbacks"]))}
        run.end(row(status), whole)
    return whole


def training_work(
    asked: WorkerOptions,
    tasks: Sequence[AnyTask],
    configs: Sequence[Config],
    reward: Callable[[RewardConfig], Reward],
    level: Level,
) -> Callable[[str | None], TrainingPlayer]:
    """Return what makes the player of an actor, from its device. Raises InputError if a task cannot be sent to actors."""
    engines = math.ceil(sum(config.shards for config in configs) / asked.size)
    sent = [SentTask.of(task, asked.find) for task in tasks]
    return partial(TrainingPlayer, sent, list(configs), reward, level, engines)


def _rounds(trainer: "Trainer", run: RunFolder, interrupt: Interrupt, watch: Progress) -> Status:
    """Run imitation, then learning, until all rounds are done or an interrupt; the status is failed if nothing was trained."""
    settings = trainer.config.ppo
    for number in range(trainer.number, settings.rounds):
        begin = time.perf_counter()
        teach = trainer.imitate if number < 0 else trainer.learn
        try:
            figures = teach(number, interrupt)
        except Stop:
            interrupt.answered()
            watch.note("interrupted; the best controller so far is kept")
            return "interrupted"
        failed = trainer.all_rolled_back()
        due = number + 1 == settings.rounds or (number + 1) % settings.validate_every == 0
        better = due and not failed and number >= -1 and trainer.validate(number, figures)
        if better and run.path is not None:
            save_policy(trainer.best_policy(), run.path / FOLDER, run.retry)
        seconds = time.perf_counter() - begin
        known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        run.hub.emit(RoundRow(round=number, seconds=seconds, figures=known, anomalies=trainer.wrong))
        watch.round(number, settings.rounds, figures)
        for name, sentence in trainer.wrong.items():
            if trainer.history.anomalies[name]["first_round"] == number:
                watch.note(f"{sentence}; {MENDS[name]}")
        trainer.save(best=better)
        if failed:
            return "failed"
    return "finished"


class RoundHistory:
    """The figures of the last rounds of learning, what was wrong in all of them, and the mean of `controller_share`."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.first_entropy = math.nan  # of the first round of learning [nats]
        self.anomalies: dict[
            str, dict[str, Any]
        ] = {}  # by name: the first round, the number of rounds, and the last sentence
        self._last: list[dict[str, float]] = []
        self._share, self._rounds = 0.0, 0  # sum of controller_share, and number of rounds in it

    def add(self, number: int, figures: Mapping[str, float]) -> dict[str, str]:
        """Add the figures of a round, and return what is wrong with the learner (`learning_anomalies`).

        Rounds of imitation, which have no `kl`, do not enter `last_rounds`.
        """
        wrong: dict[str, str] = {}
        if "kl" in figures:
            if not self._last:
                self.first_entropy = figures["entropy"]
            self._last = [*self._last, dict(figures)][-LAST:]
            wrong = learning_anomalies(self._last, self.first_entropy, self.config)
        for name, sentence in wrong.items():
            known = self.anomalies.get(name, {"first_round": number, "rounds": 0})
            self.anomalies[name] = {**known, "rounds": known["rounds"] + 1, "sentence": sentence, "mend": MENDS[name]}
        share = figures.get("controller_share", math.nan)
        if math.isfinite(share):
            self._share, self._rounds = self._share + share, self._rounds + 1
        return wrong

    def summary(self) -> dict[str, Any]:
        """Return means over the last rounds of learning, and the share of the total time spent on deciding and learning."""
        last: dict[str, float | None] = {}
        for name in SHOWN:
            finite = [each[name] for each in self._last if math.isfinite(each.get(name, math.nan))]
            last[name] = float(np.mean(finite)) if finite else None
        share = self._share / self._rounds if self._rounds else None
        return {"last_rounds": last, "anomalies": self.anomalies, "controller_share": share}

    def state(self) -> dict[str, Any]:
        """Return the statistics, for a checkpoint."""
        known = {"first_entropy": self.first_entropy, "anomalies": self.anomalies}
        return {"last": self._last, "controller_share": self._share, "rounds": self._rounds, **known}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._last = [dict(figures) for figures in state["last"]]
        self._share, self._rounds = state["controller_share"], state["rounds"]
        self.first_entropy, self.anomalies = state["first_entropy"], dict(state["anomalies"])


class Pause(Observer):
    """Counts the steps of a training, writes checkpoints that are due or end it, and stops it on an interrupt."""

    def __init__(self, trainer: "Trainer", interrupt: Interrupt) -> None:
        self.trainer, self.interrupt, self.asked = trainer, interrupt, False

    def going(self, view: View) -> bool:
        self.asked, store = self.interrupt.asked, self.trainer.store
        if store is not None and (store.due(self.trainer.steps) or self.asked):
            self.trainer.save()
        return not self.asked

    def stepped(self, step: Step) -> None:
        self.trainer.steps += 1


class Trainer:
    """A learner with its cohorts, and the best round so far. The parts of a round are played here, or by actors."""

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        policy: Policy,
        config: Config,
        reward: Callable[[RewardConfig], Reward] = get_reward,
        hub: Hub | None = None,
        actors: Workers | None = None,
    ) -> None:
        self.cohorts, self.policy, self.config, self.actors = cohorts, policy, config, actors
        self.hub = hub or Hub()
        self.store: Checkpoints | None = None  # without it no checkpoint is written
        self.started = time.perf_counter()  # start of the run, as if it had never been interrupted [seconds]
        self.learner = learner_of(policy, config)
        self.player = Player(cohorts, self.learner, reward, self.hub)
        self.shown: list[tuple[Rollout, tuple[str, ...]]] = []  # the rollouts of the teacher so far, each with its menu
        self.best: tuple[float, int] | None = None  # J on validation instances, and the round
        self.history = RoundHistory(config.ppo)
        self.wrong: dict[str, str] = {}  # with the learner after the last round
        self.number = -config.ppo.imitation_rounds  # number of the present round, or of the next
        self.steps = 0  # steps taken in all rounds by all cohorts
        self.record = GovernorRecord.empty(0)  # of all finished parts
        self.played: list[EpisodeStatistics] = []  # of the cohorts whose episode of the round is over
        self.episode: EpisodeStatistics | None = None  # the episode of the next cohort, if it has begun
        self.waited = 0.0  # for full queues of outputs, up to the end of the last round [seconds]

    def learn(self, number: int, interrupt: Interrupt) -> dict[str, float]:
        """Run one round: every cohort grows a population, and the policy is updated. Raises Stop on an interrupt."""
        self.shown.clear()
        rollouts, menus, seconds = self._play("training", number, 0.0, interrupt)
        begin = time.perf_counter()
        return self._close(self.learner.update(rollouts, menus), seconds, begin)

    def imitate(self, number: int, interrupt: Interrupt) -> dict[str, float]:
        """Run one round of imitation of the teacher. The numbers of these rounds end with -1."""
        passed = max(number + self.config.ppo.imitation_rounds, 0)  # a resumed run may have fewer rounds
        fresh, menus, seconds = self._play("imitation", number, LED[min(passed, len(LED) - 1)], interrupt)
        begin = time.perf_counter()
        self.shown += [(rollout.copied(), menu) for rollout, menu in zip(fresh, menus, strict=True)]
        rollouts, shown_menus = zip(*self.shown, strict=True)
        passes = self.config.ppo.imitation_passes if number == -1 else None
        figures = self.learner.imitate(rollouts, shown_menus, len(fresh), passes)
        return self._close(figures, seconds, begin)

    def validate(self, number: int, figures: dict[str, float]) -> bool:
        """Grow the validation instances greedily and add J to the figures. Returns whether J is the best so far."""
        parts = [
            WorkItem("validation", place, number) for place, each in enumerate(self.cohorts) if each.watched is not None
        ]
        if self.actors is None:
            found = [self.player.validate(part) for part in parts]
        else:
            results = self.actors.play(self._weights(), [part._asdict() for part in parts])
            found = [result["validated"] for result in results]
            self._write_rows(results)
        of_cohort = {part.cohort: each for part, each in zip(parts, found, strict=True)}
        of_task = [[of_cohort[place] for place in places if place in of_cohort] for places in by_task(self.cohorts)]
        scores = [np.concatenate([each["objective"] for each in shards]) for shards in of_task]
        worth = float(np.mean([score.mean() for score in scores]))
        figures["validation_objective"] = worth
        figures["validation_kept"] = float(np.mean(np.concatenate([each["kept"] for each in found])))
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
        worth, number = self.best
        settings, rounds = self.config.ppo, number + 1
        validations = -(-rounds // settings.validate_every) + bool(settings.imitation_rounds)
        watched = sum(cohort.watched.envs for cohort in self.cohorts if cohort.watched is not None)
        envs = sum(cohort.config.envs for cohort in self.cohorts)
        self.policy.origin = {
            "tasks": [self.cohorts[places[0]].task.name for places in by_task(self.cohorts)],
            "seed": self.config.seed,
            "round": number,
            "validation_objective": worth,
            # those of all cohorts until the end of the round, imitation and validation included
            "episodes": (rounds + settings.imitation_rounds) * envs + validations * watched,
        }
        return self.policy

    def save(self, best: bool = False) -> None:
        """Write a checkpoint, unless no step was taken since the last. best: whether its validation score is the best so far."""

        def state() -> dict[str, Any]:
            return {"seconds": time.perf_counter() - self.started, "trainer": self.state()}

        save_checkpoint(self.hub, self.store, self.steps, state, best)

    def summary(self, status: Status) -> Summary:
        """Return the settings, the best round, the figures of the last rounds, and the numbers of rollbacks and refusals."""
        config, (worth, number) = self.config, self.best or (None, None)
        return {
            "status": status,
            "tasks": list(config.tasks),
            "seed": config.seed,
            "envs": config.envs,
            "device": str(resolve_device(config.device)),
            "rounds": config.ppo.rounds,
            "rounds_done": self.learner.round,
            "best_round": number,
            "best_validation_objective": worth,
            **self.history.summary(),
            **self._counted().counts(),
            "policy_inputs": {name: round(value, 4) for name, value in self.policy.input_weights().items()},
            **({} if self.actors is None else {"actors": self.actors.summary()}),
            **({} if (waits := self.hub.waits()) is None else {"outputs": waits}),
            "seconds": round(time.perf_counter() - self.started, 3),
        }

    def _counted(self) -> GovernorRecord:
        """Return the rollbacks and refusals of all rounds, with those of the parts of the present round so far."""
        found: list[Any] = [self.record.found, *(played.found for played in self.played)]
        refused: list[Any] = [self.record.refused, *(played.refused for played in self.played)]
        if self.episode is not None:
            begun = self.cohorts[len(self.played)].engine.governor.record
            found, refused = [*found, begun.found], [*refused, begun.refused]
        return GovernorRecord(self.record.rollbacks, np.sum(found, axis=0), np.sum(refused, axis=0))

    def state(self) -> dict[str, Any]:
        """Return the state of the training as a tree of arrays. The tensors share memory."""
        begun = len(self.played) if self.episode is not None else None  # the cohort whose episode is unfinished
        return {
            "number": self.number,
            "steps": self.steps,
            "played": [asdict(played) for played in self.played],
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
        self.played = [EpisodeStatistics(**played) for played in state["played"]]
        self.episode = None if state["episode"] is None else EpisodeStatistics(**state["episode"])
        self.record = GovernorRecord(**state["record"])
        self.policy.load_state(state["policy"])
        self.learner.load_state(state["learner"])
        self.shown = [(Rollout.of_tree(entry["rollout"]), tuple(entry["menu"])) for entry in state["shown"]]
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self.history.load_state(state["history"])
        self.player.load_state(state["cohorts"])
        if self.episode is not None:
            self.cohorts[len(self.played)].engine.restore(state["engine"])

    def _play(
        self, kind: Literal["training", "imitation"], number: int, led: float, interrupt: Interrupt
    ) -> tuple[list[Rollout], list[tuple[str, ...]], float]:
        """Play the episodes of the round that are not finished; return every task's rollout and menu, and the duration
        [s].

        Workers play whole rounds. A round that a checkpoint was written in is finished in this process.
        """
        self.number, begin = number, time.perf_counter()
        episode = self.learner.updates  # every update follows one episode of every cohort
        parts = [WorkItem(kind, place, number, episode, led) for place in range(len(self.cohorts))]
        if self.actors is not None and not self.played and self.episode is None:
            # After an interrupt, which raises Stop here, the whole round is played again when the training is resumed.
            results = self.actors.play(self._weights(), [part._asdict() for part in parts], lambda: interrupt.asked)
            self._write_rows(results)
            self.steps += sum(cohort.config.steps for cohort in self.cohorts)
            self.played = [EpisodeStatistics(**result["played"]) for result in results]
            rollouts = [Rollout.of_tree(result["rollout"]) for result in results]
            menus = [tuple(result["menu"]) for result in results]
            seconds = time.perf_counter() - begin
        else:
            for part in parts[len(self.played) :]:
                if self.episode is None:
                    self.episode = self.player.open(part)
                pause = Pause(self, interrupt)
                self.player.close(part, self.episode, pause)
                if pause.asked:  # a checkpoint has been written
                    raise Stop
                self.played.append(self.episode)
                self.episode = None
            if self.actors is not None:
                for cohort in self.cohorts:
                    cohort.release()
            clients = [self.player.client(part) for part in parts]
            rollouts, menus = [client.rollout() for client in clients], [client.menu for client in clients]
            seconds = sum(played.seconds for played in self.played)
        places = by_task(self.cohorts)
        joined = [Rollout.joined([rollouts[place] for place in each]) for each in places]
        return joined, [menus[each[0]] for each in places], seconds

    def _weights(self) -> dict[str, Any]:
        """Return what a part depends on beside itself: the policy, and the round of learning, which exploration follows."""
        return {"policy": self.policy.state(), "round": self.learner.round, "begun": self.learner.begun}

    def _write_rows(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of parts, in the order of the parts."""
        for result in results:
            self.hub.take([decode(line) for line in result["rows"].tobytes().splitlines()])

    def _close(self, figures: dict[str, float], seconds: float, begin: float) -> dict[str, float]:
        """Add the figures of a round that was played in `seconds` and whose update began at `begin`, and end the round."""
        updating, played = time.perf_counter() - begin, self.played
        for client in (*self.player.clients, *self.player.apprentices):
            client.clear()
        deciding, growing = sum(p.deciding for p in played), sum(p.seconds for p in played)
        steps = sum(p.envs * cohort.config.steps for p, cohort in zip(played, self.cohorts, strict=True))
        germinated, kept = sum(p.germinated for p in played), sum(p.kept for p in played)
        figures |= {
            "kept": kept / sum(p.envs for p in played),
            "kept_share": kept / germinated if germinated else math.nan,
            "rollbacks": float(sum(p.rollbacks for p in played)),
            "env_steps_per_second": steps / (seconds + updating),
            "controller_share": (deciding + updating) / (growing + updating),
        }
        if self.actors is not None:
            figures["waiting_seconds"] = self.actors.waited(seconds + updating, growing)
        if (waits := self.hub.waits()) is not None:
            figures["output_wait_seconds"] = waits["waiting_seconds"] - self.waited
            self.waited = waits["waiting_seconds"]
        self.record = self._counted()
        self.wrong = self.history.add(self.number, figures)
        self.number, self.played = self.number + 1, []
        return figures
