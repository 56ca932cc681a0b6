"""Train a controller: each round grows whole populations, then updates the policy; the best is kept. E environments.

All workers do the same: each plays its own shards, and they exchange gradients and figures, so that all hold the same policy. The
first worker, which is the process that was started, also writes the run folder.
"""

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from esper.leyline.config.tree import Config, PPOConfig, RewardConfig
from esper.leyline.data.keys import Purpose, key, scalar
from esper.leyline.data.task import AnyTask
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError, LearningError, RolledBack, amended, counted, describe_error
from esper.leyline.progress import Progress
from esper.leyline.protocols import Controller, Reward
from esper.leyline.reference import PAID_BY, is_own_controller
from esper.nissa.events import decode, encode
from esper.nissa.hub import Hub, Level, Output
from esper.nissa.rows import EvaluationRow, RoundRow, Row
from esper.runs.figures import Status, Summary, exported_objective
from esper.runs.folder.environment import describe_environment
from esper.runs.folder.interrupt import Interrupt
from esper.runs.folder.resume import NEW, PAID, Opening, fitting, with_cohorts
from esper.runs.folder.run_folder import RunFolder
from esper.runs.workers.transports import Sign, serve_rank, store_of
from esper.runs.workers.workers import ALONE, Peers, Stop, WorkerOptions, sent, shared_facts, start_workers
from esper.simic.client import Apprentice, SimicClient
from esper.simic.exchange import Exchange, ExchangeError, divide
from esper.simic.ppo import MENDS, PPO, learning_anomalies
from esper.simic.rewards import get_reward, make_reward, name_of_reward
from esper.simic.rollout import Rollout, ShardedRollout
from esper.store.tensors import Tree
from esper.tamiyo.catalog import FOLDER, get_controller
from esper.tamiyo.policy.actor import Learned
from esper.tamiyo.policy.controller import Language, Policy, save_policy
from esper.tolaria.engine import Observer, Step, Until, VectorizedEngine, planted, play
from esper.tolaria.governor import GovernorRecord
from esper.tolaria.journal import Journal
from esper.tolaria.runtime import resolve_device
from esper.tolaria.stacked.population import check_place, instance_keys

ENVS_OF_SHARD = 32
"""Number of environments of a shard, where `--workers` is given and `shards` is not."""
LED = (1.0, 0.75, 0.5, 0.25)
"""Share of environments that the teacher leads in the first rounds of imitation; further rounds take the last value."""

LAST = 10
"""Number of rounds of learning whose mean is the summary's `last_rounds`."""

SHOWN = ("return", "explained_variance", "entropy", "wait", "decisions", "kept", "kept_share", "env_steps_per_second")
"""The figures of `last_rounds`."""


# The populations, and what they and their workers need.


@dataclass(eq=False)
class Cohort:
    """Holds the populations of a task, or of one shard of its environments."""

    task: AnyTask  # the task without its test split
    config: Config  # config of the population
    whole: Config  # config of the task's training, with the environments of all its shards
    watched: Config  # config of the population of validation instances, which may have no environment

    @cached_property
    def engine(self) -> VectorizedEngine:
        """The population of training instances."""
        return VectorizedEngine(self.task, self.config)

    @cached_property
    def validation(self) -> VectorizedEngine:
        """The population of validation instances."""
        return VectorizedEngine(self.task, self.watched)

    def source(self, name: Literal["training", "validation"], number: int) -> dict[str, Any]:
        """Return the population to which the rows of a round belong, with its first environment where there are shards."""
        source = {"cohort": name, "task": self.task.name, "round": number}
        if self.whole.shards > 1:
            begin = self.config.first_instance - self.whole.first_instance
            source["first_env"] = begin if name == "training" else self.watched.first_instance
        return source

    def release(self) -> None:
        """Free the engines; they are made again when they are used again."""
        for name in ("engine", "validation"):
            vars(self).pop(name, None)


def with_shards(configs: Sequence[Config], asked: WorkerOptions, *, resumed: bool) -> list[Config]:
    """Return the configs of a training with the shards that its workers play, of which each worker must have one."""
    chosen = list(configs)
    for config in configs:  # every baseline asks for environments that are drawn by the group
        size = config.reward.group_size
        for name, count in (("envs", config.envs), ("first_instance", config.first_instance)):
            if count % size:
                raise InputError(
                    f"reward.group_size is {size}, which does not divide {name}, {count}; choose a divisor"
                )
    if not asked.any:
        return chosen
    if not resumed:  # a new run has the shards by default, and the device of the first worker
        device = {"device": asked.devices[0]} if asked.devices else {}
        for at, config in enumerate(configs):
            # whatever the number of workers: one for ENVS_OF_SHARD environments, and at least 2 where the groups allow it
            shards = min(max(config.envs // ENVS_OF_SHARD, 2), config.envs // config.reward.group_size)
            usual = {} if "shards" in config.model_fields_set else {"shards": shards}
            chosen[at] = config.model_copy(update=usual | device)
    shards, envs = sum(config.shards for config in chosen), sum(config.envs for config in chosen)
    if asked.size > shards:
        mend = f"give {shards} or fewer, or divide the environments further with --set shards=N"
        if resumed:
            mend = "the shards of a run cannot change, so give fewer workers"
        raise InputError(
            f"workers is {asked.size}, but {counted(envs, 'environment')} in {counted(shards, 'shard')} give work to "
            f"{counted(shards, 'worker')}; {mend}"
        )
    return chosen


def cohorts_of(task: AnyTask, config: Config, made: int | None = None) -> list[Cohort]:
    """Make the cohorts of a task, one for each shard, and the engines of the first `made` of them; None makes all."""
    reward, size = config.reward, config.reward.group_size
    groups = config.envs // size
    if config.shards > groups:
        raise InputError(
            f"shards is {config.shards}, but {counted(config.envs, 'environment')} in groups of {size} "
            f"(reward.group_size) can be divided into {groups} at most; lower shards, or raise envs"
        )
    if reward.relative_to == "twin" and not config.twin:
        raise InputError(
            "reward.relative_to is twin, but no twins are trained; give --twin (the key twin), or set "
            "reward.relative_to to none or group"
        )
    if not config.ppo.rounds and not config.ppo.imitation_rounds:
        raise InputError(
            "ppo.rounds and ppo.imitation_rounds are 0, so nothing would be learnt; set one of them to 1 or more"
        )
    if config.early_stopping.enabled:
        raise InputError("early_stopping.enabled is true, but a controller learns from whole episodes; leave it out")
    if config.gates.certify is not None:
        raise InputError(
            "gates.certify is set, but a training plays many episodes on the same fresh examples; leave it out, and set it where "
            "the trained controller grows"
        )
    instance_keys(task, config)
    cohorts = []
    # Another run seed, so that on a data set the starts of the validation differ from those of an evaluation.
    seed = scalar(config.seed, Purpose.VALIDATION)
    of_validation = {"instances": "validation", "baselines": (), "seed": seed}
    parts = (np.array_split(range(count), config.shards) for count in (groups, config.ppo.validate_envs))
    for trained, watched in zip(*parts, strict=True):
        begin = config.first_instance + size * int(trained[0])
        own = config.model_copy(update={"envs": size * len(trained), "first_instance": begin})
        first = int(watched[0]) if len(watched) else 0
        validated = {**of_validation, "first_instance": first, "envs": len(watched)}
        cohorts.append(Cohort(task, own, config, config.model_copy(update=validated)))
    for cohort in cohorts[:made]:
        space = cohort.engine.space
        if not space.slots or not space.fits.any() or not config.lifecycle.max_seeds:
            raise InputError(
                f"task {task.name} has no slot in which a blueprint of its menu can be planted, so nothing can be learnt; give "
                "it slots, blueprints that fit them, and a lifecycle.max_seeds of 1 or more"
            )
        with amended("in the validation, which takes ppo.validate_envs as envs: "):
            assert not cohort.watched.envs or cohort.validation
    return cohorts


def sample_instances(cohort: Cohort, number: int, group: int) -> NDArray[np.int64]:
    """Return the keys (E,) of the training instances of a round, of which each `group` consecutive environments share one."""
    config, keys = cohort.config, cohort.task.keys("training")
    numbers = config.first_instance + np.arange(config.envs)
    drawn = key(config.seed, Purpose.SAMPLE, number, numbers // group) & ((1 << 62) - 1)
    return keys.start + drawn % len(keys)


def settings_of_policy(config: Config) -> dict[str, Any]:
    """Return the settings that a trained controller requires of every run."""
    probe, families = config.probe, config.probe.sensors
    measured = {} if families is None else {"sensors": list(families)}
    return {
        "gates": config.gates.model_dump(mode="json"),
        "probe": {"sensors_every": probe.sensors_every, "coalitions_every": probe.coalitions_every, **measured},
        "lifecycle": {"tempos": list(config.lifecycle.tempos), "targets": list(config.lifecycle.targets)},
    }


def by_task(cohorts: Sequence[Cohort]) -> list[list[int]]:
    """Return the indices of the cohorts of each task; the shards of a task follow each other."""
    of_task = itertools.groupby(range(len(cohorts)), lambda place: cohorts[place].task.name)
    return [list(places) for _, places in of_task]


def _teacher(config: Config) -> Controller:
    """Return the controller that a training imitates. Raises InputError if it cannot be imitated."""
    if is_own_controller(config.ppo.teacher):  # a key of the config, which `esper resume` reads from a folder
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, but code of your own cannot be a teacher; give a name of `esper controller`, "
            "a schedule file, or the run folder of a trained controller"
        )
    with amended("ppo.teacher: "):
        teacher = get_controller(config.ppo.teacher, config)
    if config.ppo.imitation_rounds and type(teacher).proposals is not Controller.proposals:
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, which tries candidates in copies of the networks, and a training makes no "
            "copies; give another controller"
        )
    if config.ppo.imitation_rounds and teacher.sensors_every and config.probe.sensors_every == 0:
        raise InputError(
            f"ppo.teacher is {config.ppo.teacher}, which reads growth sensors, but probe.sensors_every is 0; set it to 1 or more"
        )
    return teacher


def policy_device(config: Config, devices: Sequence[str] = ()) -> torch.device:
    """Return the device of the policy. devices: those that the workers were given.

    Raises InputError if the device does not exist, or is a GPU other than that of a worker.
    """
    name = config.ppo.device
    if name == "same":
        return resolve_device(config.device)
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", name):
        raise InputError(f"ppo.device is {name[:60]!r}; give cpu, cuda, cuda:i, or same, the device of the networks")
    try:
        device = resolve_device(name)
    except InputError:
        there = torch.cuda.device_count()
        raise InputError(
            f"ppo.device is {name}, but torch sees {counted(there, 'CUDA device')}; give cpu, or same, the device of the networks"
        ) from None
    others = {other for other in map(resolve_device, devices) if other.type == "cuda"}
    if device.type == "cuda" and any((other.index or 0) != (device.index or 0) for other in others):
        raise InputError(
            f"ppo.device is {name}, but the devices of the workers are {','.join(devices)}; give same, the device of each "
            "worker, or cpu"
        )
    return device


def check_exchange(config: Config, place: torch.device, asked: WorkerOptions) -> None:
    """Raise InputError if the gradients of workers cannot go through the backend of `ppo.exchange`. place: of the policy."""
    if config.ppo.exchange == "gloo" or asked.size == 1:
        return
    if not dist.is_nccl_available():
        raise InputError("ppo.exchange is nccl, but this build of torch has no NCCL; give gloo")
    own = place.type == "cuda" and config.ppo.device == "same"
    known = {resolve_device(name).index or 0 for name in asked.devices}
    given = asked.cluster not in (None, "torchrun") and not known  # Ray gives each worker its own
    if not own or not (given or len(known) == asked.size):
        raise InputError(
            f"ppo.exchange is nccl, which needs a GPU for each of {asked.size} workers; give them in devices, with "
            "ppo.device=same, or give ppo.exchange=gloo"
        )


def name_of_place(device: torch.device) -> str:
    """Return 'cpu', or the model of a GPU. Policies on two of them do not stay equal bit for bit."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# The run.


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
    """Train a controller as `esper.train` says, with one config for each task; the first has the settings of the learner.

    `reward` makes a reward object for every task, because a reward may have state. Controllers are validated by J, whatever the
    reward is. The run folder gets a `controller/` whenever a better policy is found: one with a higher mean J of greedy growth on
    the validation split of validation instances. After an update that cannot be trusted it stays. SIGINT or SIGTERM ends the
    training after the current step; with several workers, which play whole rounds, after the last whole round.

    `opening` is as in `grow`. Of the workers that are `asked` for, this process is one: the first, or in a rank of torchrun above
    0 another, until the training ends.
    """
    watch, started = watch or Progress(), time.perf_counter()
    configs = with_shards(configs, asked, resumed=opening.resume)
    config = configs[0]

    def work(level: Level) -> Callable[[str | None], TrainingWorker]:
        """Return what makes a worker, from its device. Raises InputError if a task cannot be sent to workers."""
        return partial(TrainingWorker, [sent(task, asked.maker(task.name)) for task in tasks], configs, reward, level)

    if asked.is_rank:
        return serve_rank(work(config.telemetry.level), asked.devices or (None,))
    if asked.size == 1 and asked.cluster not in (None, "torchrun"):
        raise InputError(
            f"cluster is {asked.cluster}, but one worker is this process itself; give workers, a number of 2 or more"
        )
    for task, own in zip(tasks, configs, strict=True):
        check_place(task, own)
        if own.widen.at:
            raise InputError("widen.at is set, but networks become wider in `esper grow` alone; leave widen out")
    placed = {"device": asked.devices[0]} if asked.devices else {}
    place = policy_device(config.model_copy(update=placed), asked.devices)
    check_exchange(config, place, asked)
    kept = with_cohorts(configs, PAID if reward is get_reward else f"{PAID_BY}{name_of_reward(reward)}")
    sealed = [task.sealed() for task in tasks]
    opened = partial(RunFolder, folder, kept, watch.note)
    with Interrupt(watch.note) as interrupt, opened(interrupt, opening, sealed, outputs) as run, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if asked.any:
            torch.set_num_threads(1)  # as in the other workers
        shards = [
            cohorts_of(task, each.model_copy(update=placed), 1 if asked.any else None)
            for task, each in zip(sealed, configs, strict=True)
        ]
        trainer, ppo, peers = fresh_trainer(shards, config, place, reward, run.hub), config.ppo, None
        if asked.size > 1:
            facts, made = {**shared_facts(sealed), "policy": name_of_place(place)}, work(run.hub.asked)
            others = start_workers(Peers, asked, made, watch.note, facts, stop=lambda: interrupt.asked)
            peers = stack.enter_context(closing(others))
            peers.patience = config.faults.worker_seconds
        stack.callback(lambda: trainer.exchange.close())
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
        cohorts = {each.task: each.model_dump(mode="json") for each in configs}
        device = resolve_device(config.device)
        run.begin(lambda: {**describe_environment(device, config), "cohorts": cohorts}, trainer.cohorts[0].engine.space)
        trainer.run = run
        # The timer says, where memory runs out, what is in memory.
        timer = trainer.cohorts[0].engine.timer

        def summary(status: Status) -> Summary:
            shown = {} if (waits := watch.waits()) is None else {"progress": waits}
            return {**trainer.summary(status), **({} if peers is None else {"workers": peers.summary()}), **shown}

        try:
            with run.recorded(lambda: summary("failed")), timer.memory("between steps", users=False):
                status = _rounds(trainer, peers, run, interrupt, watch)
        except KeyboardInterrupt:
            run.save_kept(watch.note)
            run.end(summary("interrupted"), at_once=True)
            raise
        whole = summary(status)
        if status == "failed":
            whole = {**whole, "error": describe_error(RolledBack(whole["rollbacks"]))}
        run.end(whole)
    return whole


def fresh_trainer(
    shards: Sequence[Sequence[Cohort]],
    config: Config,
    place: torch.device,
    reward: Callable[[RewardConfig], Reward],
    hub: Hub,
) -> "Trainer":
    """Return a trainer of a new policy on a device. shards: the cohorts of each task, of which the first has its engine."""
    language = Language.of([each[0].engine.space for each in shards], config.ppo.packages)
    settings, ppo = settings_of_policy(config), config.ppo
    policy = Policy.fresh(language, config.seed, settings, ppo.decisions_per_step, ppo.undo_bias).to(place)
    return Trainer([*itertools.chain(*shards)], policy, config, reward, hub)


def _rounds(trainer: "Trainer", peers: Peers | None, run: RunFolder, interrupt: Interrupt, watch: Progress) -> Status:
    """Run imitation, then learning, until all rounds are done or an interrupt; the status is failed if nothing was trained.

    A round that was begun by a worker that was alone is finished by this one alone, before the others join.
    """
    settings, alone = trainer.config.ppo, Exchange()
    while True:
        try:
            if peers is not None and not trainer.begun:
                state, shards = trainer.state(), [len(places) for places in by_task(trainer.cohorts)]
                state["shown"] = [{**shown, "rollouts": []} for shown in state["shown"]]  # no worker sends a rollout
                trainer.use(peers.join({"state": state}, divide(shards, peers.size), trainer.carrier()))
            foreign = sum(not trainer.exchange.owns(place) for place in range(len(trainer.cohorts)))
            lacked = len(trainer.shown) * foreign if trainer.number < 0 else 0  # by the others, which begin with none
            if again := len(trainer.lacking()) + lacked:
                watch.note(
                    f"playing {counted(again, 'episode')} of imitation again, whose rollouts another worker had; the "
                    "results stay the same"
                )
            for number, figures, better, failed in trainer.rounds(interrupt):
                if better and run.path is not None:
                    save_policy(trainer.best_policy(), run.path / FOLDER, run.retry)
                seconds = time.perf_counter() - trainer.round_begun
                known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
                run.hub.emit(RoundRow(round=number, seconds=seconds, figures=known, anomalies=trainer.wrong))
                watch.round(number, settings.rounds, figures)
                for name, sentence in trainer.wrong.items():
                    if trainer.history.anomalies[name]["first_round"] == number:
                        watch.note(f"{sentence}; {MENDS[name]}")
                trainer.save(best=better)
                if failed:
                    return "failed"
                if peers is not None:
                    peers.finished(figures.get("waiting_seconds", 0.0))
                    if trainer.exchange.size == 1:
                        break
            else:
                return "finished"
        except Stop:
            interrupt.answered()
            watch.note("interrupted; the best controller so far is kept")
            return "interrupted"
        except ExchangeError:
            assert peers is not None, "a worker that is alone exchanges nothing"
            trainer.use(alone)  # ends the connections to the workers that are left
            peers.restart()
        except Exception:  # of a Dataset, whose code can raise any error, in a step, a new episode or a validation
            run.save_kept()
            raise


# The rounds.


@dataclass
class RoundHistory:
    """Keeps what a checkpoint holds of the rounds: figures of the last ones of learning, and what was wrong in all of them."""

    last: list[dict[str, float]] = field(default_factory=list)
    controller_share: float = 0.0  # the sum over rounds
    rounds: int = 0  # number of those that are in the sum
    first_entropy: float = math.nan  # of the first round of learning [nats]
    # by name: the first round, the number of rounds, and the last sentence
    anomalies: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, number: int, figures: Mapping[str, float], config: PPOConfig) -> dict[str, str]:
        """Add the figures of a round, and return what is wrong with the learner (`learning_anomalies`).

        Rounds of imitation, which have no `kl`, do not enter `last_rounds`.
        """
        wrong: dict[str, str] = {}
        if "kl" in figures:
            if not self.last:
                self.first_entropy = figures["entropy"]
            self.last = [*self.last, dict(figures)][-LAST:]
            wrong = learning_anomalies(self.last, self.first_entropy, config)
        for name, sentence in wrong.items():
            known = self.anomalies.get(name, {"first_round": number, "rounds": 0})
            self.anomalies[name] = {**known, "rounds": known["rounds"] + 1, "sentence": sentence, "mend": MENDS[name]}
        share = figures.get("controller_share", math.nan)
        if math.isfinite(share):
            self.controller_share, self.rounds = self.controller_share + share, self.rounds + 1
        return wrong

    def summary(self) -> dict[str, Any]:
        """Return means over the last rounds of learning, and the share of the total time spent on deciding and learning."""
        last: dict[str, float | None] = {}
        for name in SHOWN:
            finite = [each[name] for each in self.last if math.isfinite(each.get(name, math.nan))]
            last[name] = float(np.mean(finite)) if finite else None
        share = self.controller_share / self.rounds if self.rounds else None
        return {"last_rounds": last, "anomalies": self.anomalies, "controller_share": share}


class _KeptRows(list[bytes]):
    """Keeps rows as lines of JSON, as an output."""

    def write(self, row: Row) -> None:
        self.append(encode(row))

    def close(self) -> None:
        """Do nothing: the rows are kept."""


class WorkItem(NamedTuple):
    """Names one episode of one cohort."""

    kind: Literal["training", "imitation"]
    cohort: int  # index of the cohort
    number: int  # number of the round
    episode: int = 0  # number of the episode, from 0, from which its hosts and data orders follow
    led: float = 0.0  # share of the environments that the teacher leads, in imitation


@dataclass
class EpisodeStatistics(Observer):
    """Counts the statistics of an episode of one cohort; `Trainer.finish` sets those without a meaning before its end."""

    seconds: float  # duration of the episode
    deciding: float = 0.0  # duration of `act` and `store` [s]
    germinated: int = 0  # seeds that were planted
    kept: int = 0  # fossilized seeds at the end
    rollbacks: int = 0  # rollbacks of environments
    envs: int = 0  # number of environments
    found: Sequence[int] = ()  # rollbacks by `Vital`, twins included
    refused: Sequence[int] = ()  # refused decisions by `Refusal`

    def stepped(self, step: Step) -> None:
        self.seconds += step.seconds
        self.deciding += step.deciding
        self.germinated += planted(step)


class ShownRound(NamedTuple):
    """Holds what a teacher has shown in a round of imitation, and all that its episodes depend on."""

    part: WorkItem  # of the first cohort
    policy: dict[str, Any]  # state of the policy at the begin of the round
    rollouts: dict[int, Rollout]  # those of this worker, by cohort


class Trainer(Observer):
    """Trains a learner on its cohorts, and keeps the best round so far. Each worker has one, and all have the same state.

    It follows the episodes of rounds, of which it counts the steps.
    """

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
        self.run: RunFolder | None = None  # without it no checkpoint is written
        self.started = time.perf_counter()  # start of the run, as if it had never been interrupted [seconds]
        self.round_begun = self.started  # [seconds]
        group = config.reward.group_size if config.reward.relative_to == "group" else None
        self.learner = PPO(policy, config.ppo, config.seed, group)
        self.exchange = self.learner.exchange
        self.sink = self.hub  # gets the rows of what is played
        configs, learner = [cohort.config for cohort in cohorts], self.learner
        self.clients: dict[str, Sequence[SimicClient]] = {  # of each cohort, by the kind of what they play
            "training": [
                SimicClient(learner, make_reward(reward, own.reward), own.governor.penalty) for own in configs
            ],
            "imitation": [
                Apprentice(learner, make_reward(reward, own.reward), _teacher(own), LED[0], own.governor.penalty)
                for own in configs
            ],
        }
        self.shown: list[ShownRound] = []  # by the teacher so far, of each round
        self.best: tuple[float, int] | None = None  # J on validation instances, and the round
        self.history = RoundHistory()
        self.wrong: dict[str, str] = {}  # with the learner after the last round
        self.number = -config.ppo.imitation_rounds  # number of the present round, or of the next
        self.figures: dict[str, float] | None = None  # of a round that is to be validated
        self.steps = 0  # steps taken in all rounds by all cohorts
        self.record = GovernorRecord.empty(0)  # of all finished parts
        self.played: dict[int, EpisodeStatistics] = {}  # of the cohorts whose episode of the round is over
        self.episode: EpisodeStatistics | None = None  # the episode of the next cohort, if it has begun
        self.waited = 0.0  # for full queues of outputs, up to the end of the last round [seconds]
        # Where there are several workers: the rows of the part that is played, and the rows of a round by cohort.
        self._rows, self._lines = _KeptRows(), dict[int, bytes]()

    @property
    def begun(self) -> bool:
        """Whether the policy was not yet updated from a round of which steps were taken."""
        return bool(self.played) or self.episode is not None

    def carrier(self) -> torch.device | None:
        """Return the GPU on which gradients are summed by NCCL; None is the CPU (`ppo.exchange`)."""
        device = self.learner.policy.device
        return torch.device("cuda", device.index or 0) if self.config.ppo.exchange == "nccl" else None

    def use(self, exchange: Exchange) -> None:
        """Go on with other workers than before. Rows of events are then kept until those of all shards are known."""
        self.exchange.close()
        self.exchange = self.learner.exchange = exchange
        raised = self.config.telemetry.raise_steps
        self.sink = self.hub if exchange.size == 1 else Hub([self._rows], self.hub.asked, raise_steps=raised)
        for place, cohort in enumerate(self.cohorts):
            if not exchange.owns(place):
                cohort.release()

    def rounds(self, interrupt: Interrupt) -> Iterator[tuple[int, dict[str, float], bool, bool]]:
        """Run the rounds that are left. Yields the number of each, its figures, whether its validation is the best so far, and
        whether nothing was trained in all of them, which ends the training. Raises Stop on an interrupt.
        """
        settings = self.config.ppo
        while self.number < settings.rounds or self.figures is not None:
            if self.figures is None:
                self.round_begun, before = time.perf_counter(), self.steps
                teach = self.imitate if self.number < 0 else self.learn
                try:
                    self.figures = teach(self.number, interrupt)
                except (Stop, ExchangeError):
                    if self.exchange.size > 1:  # the whole round is played again
                        self.steps, self.played, self.episode = before, {}, None
                        self._clear()
                    raise
                except LearningError:
                    self._write_rows()
                    raise
            number, figures = self.number - 1, self.figures
            configs = [cohort.config for cohort in self.cohorts]
            played = self.steps // sum(config.steps for config in configs)  # rounds
            rows = sum(config.steps * config.envs * (2 if config.twin else 1) for config in configs)
            failed = int(self.record.found.sum()) == played * rows  # every row was rolled back in every step so far
            due = number + 1 == settings.rounds or (number + 1) % settings.validate_every == 0
            better = due and not failed and number >= -1 and self.validate(number, figures)
            self.figures = None
            yield number, figures, better, failed
            if failed:
                return

    def learn(self, number: int, interrupt: Interrupt) -> dict[str, float]:
        """Run one round: every cohort grows a population, and the policy is updated. Raises Stop on an interrupt."""
        self.shown.clear()
        rollouts, seconds = self._play(WorkItem("training", 0, number, self.learner.updates), interrupt)
        begin = time.perf_counter()
        return self._close(self.learner.update(self._divided(rollouts)), seconds, begin)

    def imitate(self, number: int, interrupt: Interrupt) -> dict[str, float]:
        """Run one round of imitation of the teacher. The numbers of these rounds end with -1."""
        passed = max(number + self.config.ppo.imitation_rounds, 0)  # a resumed run may have fewer rounds
        part = WorkItem("imitation", 0, number, self.learner.updates, LED[min(passed, len(LED) - 1)])
        self._show_again(interrupt)
        policy = deepcopy(self.policy.state())
        own, seconds = self._play(part, interrupt)
        begin = time.perf_counter()
        fresh = ShownRound(part, policy, own)
        played = [each for shown in (*self.shown, fresh) for each in self._divided(shown.rollouts)]
        passes = self.config.ppo.imitation_passes if number == -1 else None
        figures = self.learner.imitate(played, len(by_task(self.cohorts)), passes)
        self.shown.append(fresh)
        return self._close(figures, seconds, begin)

    def lacking(self) -> list[tuple[ShownRound, int]]:
        """Return the episodes of imitation, each with its cohort, of which this worker should have the rollout and does not.

        Another worker has played them, or this one before it was started again. No worker sends a rollout, or a training with
        many of them would wait for one that gets all.
        """
        own = [place for place in range(len(self.cohorts)) if self.exchange.owns(place)]
        needed = self.shown if self.number < 0 else ()  # learning needs none of them
        return [(shown, place) for shown in needed for place in own if place not in shown.rollouts]

    def _show_again(self, interrupt: Interrupt) -> None:
        """Play the episodes that are `lacking` again, with the policy that played them and to the same bits. Writes no rows."""
        lacking = self.lacking()
        if not lacking:
            return
        assert not self.begun, "the engines of a round that was begun are in use"
        present, sink, self.sink = deepcopy(self.policy.state()), self.sink, Hub()
        try:
            for shown, place in lacking:
                self.policy.load_state(shown.policy)
                part = shown.part._replace(cohort=place)
                self.finish(part, self.begin(part), asked=lambda: interrupt.asked)
                client = self.client(part)
                shown.rollouts[place] = client.rollout()
                client.clear()
        finally:
            self.policy.load_state(present)
            self.sink = sink

    def validate(self, number: int, figures: dict[str, float]) -> bool:
        """Grow validation instances greedily, as episode 0, and add J to the figures. Returns whether J is the best so far."""
        found = dict[int, Any]()
        for place, cohort in enumerate(self.cohorts):
            if not cohort.watched.envs or not self.exchange.owns(place):
                continue
            engine, source = cohort.validation, cohort.source("validation", number)
            engine.reset(episode=0)
            self.sink.raised = 0
            play(engine, Learned(self.policy), Until(self.exchange.at_work), Journal(engine, self.sink, source))
            metric, loss = engine.evaluate(engine.population.validation_splits())
            worths = exported_objective(engine, metric, loss)
            self.sink.emit(EvaluationRow(**source, split="validation", metrics=metric, losses=loss, objectives=worths))
            kept = (engine.view().seeds.stage == Stage.FOSSILIZED).sum(1)
            found[place] = {"objective": worths, "kept": kept}
            self._keep_rows(place)
        self.exchange.meet()
        found = self._exchanged(found)
        self._write_rows()
        of_task = [[found[place] for place in places if place in found] for places in by_task(self.cohorts)]
        scores = [np.concatenate([each["objective"] for each in shards]) for shards in of_task]
        worth = float(np.mean([score.mean() for score in scores]))
        figures["validation_objective"] = worth
        figures["validation_kept"] = float(np.mean(np.concatenate([found[place]["kept"] for place in sorted(found)])))
        better = math.isfinite(worth) and (self.best is None or worth > self.best[0])
        if better:
            self.best = worth, number
        return better

    def best_policy(self) -> Policy:
        """Return the current policy, with its `origin` set."""
        assert self.best is not None
        worth, number = self.best
        settings, rounds = self.config.ppo, number + 1
        validations = -(-rounds // settings.validate_every) + bool(settings.imitation_rounds)
        watched = sum(cohort.watched.envs for cohort in self.cohorts)
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
        if self.run is not None:
            self.run.save(self.steps, self.whole_state, best)

    def whole_state(self) -> dict[str, Any]:
        """Return the state of the run, without that of its hub; the tensors share memory."""
        return {"seconds": time.perf_counter() - self.started, "trainer": self.state()}

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
            **({} if (waits := self.hub.waits()) is None else {"outputs": waits}),
            "seconds": round(time.perf_counter() - self.started, 3),
        }

    def _counted(self) -> GovernorRecord:
        """Return the rollbacks and refusals of all rounds, with those of the parts of the present round so far."""
        parts: list[Any] = [self.record, *self.played.values()]
        if self.episode is not None:
            parts.append(self.cohorts[self._unfinished].engine.governor.record)
        sums = (np.sum([getattr(part, name) for part in parts], axis=0) for name in ("found", "refused"))
        return GovernorRecord(self.record.rollbacks, *sums)

    @property
    def _unfinished(self) -> int:
        """The cohort of the episode that has begun: the first of this worker's that was not played."""
        return next(
            place for place in range(len(self.cohorts)) if self.exchange.owns(place) and place not in self.played
        )

    def state(self) -> dict[str, Any]:
        """Return the state of the training as a tree of arrays. The tensors share memory."""
        engine = None if self.episode is None else self.cohorts[self._unfinished].engine
        return {
            "number": self.number,
            "figures": self.figures,
            "steps": self.steps,
            "played": [asdict(played) for played in self.played.values()],
            "episode": None if self.episode is None else asdict(self.episode),
            "record": self.record._asdict(),
            "policy": self.policy.state(),
            "learner": self.learner.state(),
            "shown": [
                {
                    "part": list(shown.part),
                    "policy": shown.policy,
                    "rollouts": [[place, rollout._asdict()] for place, rollout in shown.rollouts.items()],
                }
                for shown in self.shown
            ],
            "best": self.best,
            "history": dict(vars(self.history)),
            "cohorts": [
                {"client": client.state(), "apprentice": apprentice.state()}
                for client, apprentice in zip(*self.clients.values(), strict=True)
            ]
            if self.begun
            else None,  # they forget everything between rounds
            "engine": None if engine is None else engine.snapshot(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. Raises ValueError if it belongs to other cohorts or another config."""
        self.number, self.steps, self.figures = state["number"], state["steps"], state["figures"]
        self.played = {place: EpisodeStatistics(**played) for place, played in enumerate(state["played"])}
        self.episode = None if state["episode"] is None else EpisodeStatistics(**state["episode"])
        self.record = GovernorRecord(**state["record"])
        self.policy.load_state(state["policy"])
        self.learner.load_state(state["learner"])
        self.shown = [
            ShownRound(
                WorkItem(*entry["part"]),
                entry["policy"],
                {place: Rollout(**tree) for place, tree in entry["rollouts"]},
            )
            for entry in state["shown"]
        ]
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self.history = RoundHistory(**deepcopy(state["history"]))
        if state["cohorts"] is not None:
            for client, apprentice, own in zip(*self.clients.values(), state["cohorts"], strict=True):
                client.load_state(own["client"])
                apprentice.load_state(own["apprentice"])
        if self.episode is not None:
            self.cohorts[self._unfinished].engine.restore(state["engine"])

    def _play(self, first: WorkItem, interrupt: Interrupt) -> tuple[dict[int, Rollout], float]:
        """Play this worker's episodes of the round that are not finished, and exchange the statistics of all.

        first: the part of the first cohort. Its episode is the number of updates, since every update follows one episode of
        every cohort. Returns the rollouts of this worker's cohorts, and the duration [s].
        """
        self.number, begin, before = first.number, time.perf_counter(), self.steps
        rollouts = dict[int, Rollout]()
        for place in filter(self.exchange.owns, range(len(self.cohorts))):
            part = first._replace(cohort=place)
            if place not in self.played:
                if self.episode is None:
                    self.episode = self.begin(part)
                self.finish(part, self.episode, self, asked=lambda: self._saved(interrupt))
                self.played[place] = self.episode
                self.episode = None
                self._keep_rows(place)
            rollouts[place] = self.client(part).rollout()
        if not self.exchange.meet(lambda: interrupt.asked):
            raise Stop
        played = self._exchanged({place: asdict(played) for place, played in self.played.items()})
        self.played = {place: EpisodeStatistics(**played[place]) for place in sorted(played)}
        seconds = sum(each.seconds for each in self.played.values())
        if self.exchange.size > 1:
            self.steps = before + sum(cohort.config.steps for cohort in self.cohorts)
            seconds = time.perf_counter() - begin
        return rollouts, seconds

    def client(self, part: WorkItem) -> SimicClient:
        """Return the client that plays an episode and has its rollout."""
        return self.clients[part.kind][part.cohort]

    def begin(self, part: WorkItem) -> EpisodeStatistics:
        """Begin an episode. What it gives depends on its work item and the policy alone, so any worker can play it, and again."""
        begin, cohort = time.perf_counter(), self.cohorts[part.cohort]
        engine, group = cohort.engine, 1 if part.kind == "imitation" else cohort.config.reward.group_size
        engine.governor.record = GovernorRecord.empty(len(engine.governor.record.rollbacks))
        engine.reset(sample_instances(cohort, part.number, group), part.episode)
        self.sink.raised = 0  # an episode's rows do not depend on the one that was played before it
        return EpisodeStatistics(time.perf_counter() - begin)

    def finish(
        self,
        part: WorkItem,
        episode: EpisodeStatistics,
        *observers: Observer,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        """Play the rest of an episode that was begun. Raises Stop once `asked`; the statistics are then of what was played."""
        cohort, client, until = self.cohorts[part.cohort], self.client(part), Until(asked)
        engine = cohort.engine
        if isinstance(client, Apprentice):
            client.led = part.led  # not in `begin`, which is not called again for an episode that is resumed
        journal = Journal(engine, self.sink, cohort.source("training", part.number), lambda: client.paid)
        play(engine, client, until, Until(self.exchange.at_work), *observers, journal, episode)
        record, episode.envs = engine.governor.record, cohort.config.envs
        episode.kept = int((engine.view().seeds.stage == Stage.FOSSILIZED).sum())
        episode.rollbacks = int(record.rollbacks[: episode.envs].sum())
        episode.found, episode.refused = record.found.tolist(), record.refused.tolist()
        if until.stopped:
            raise Stop

    def stepped(self, step: Step) -> None:
        self.steps += 1

    def _saved(self, interrupt: Interrupt) -> bool:
        """Write the checkpoint that is due before a step or ends the training; return whether an interrupt ends it.

        Several workers stop only between rounds, and write no checkpoint within a round. One that is alone and reads examples by
        batch also copies its state before each step.
        """
        asked, run = interrupt.asked, self.run
        if run is not None and run.store is not None and self.exchange.size == 1:
            if run.store.due(self.steps) or asked:
                self.save()
            if self.cohorts[self._unfinished].engine.population.waits is not None:
                run.keep(self.steps, self.whole_state())
        return asked

    def _exchanged(self, results: Mapping[int, Any]) -> dict[int, Any]:
        """Return the results of all workers by cohort. The first worker, which alone writes events, keeps the rows of all."""
        rows = [(place, np.frombuffer(lines, np.uint8)) for place, lines in self._lines.items()]
        every = self.exchange.gather({"results": [*results.items()], "rows": rows})
        kept = every if self.exchange.rank == 0 else ()
        self._lines = {place: lines.tobytes() for each in kept for place, lines in each["rows"]}
        return dict(pair for each in every for pair in each["results"])

    def _write_rows(self) -> None:
        """Write the rows of all workers, in the order of the cohorts, now that their part cannot be played again."""
        for place in sorted(self._lines):
            self.hub.take([decode(line) for line in self._lines[place].splitlines()])
        self._lines = {}

    def _keep_rows(self, place: int) -> None:
        """Keep the rows of the cohort that was played last, until those of all shards are known."""
        self._lines[place] = b"".join(self._rows)  # empty in a worker that is alone, which writes them at once
        self._rows.clear()

    def _divided(self, rollouts: Mapping[int, Rollout]) -> list[ShardedRollout]:
        """Return the rollouts of each task, of which this worker has those of its own cohorts."""
        divided = []
        for places in by_task(self.cohorts):
            own = [place for place in places if self.exchange.owns(place)]
            envs = {place: self.cohorts[place].config.envs for place in places}
            menu = tuple(info.name for info in self.cohorts[own[0]].engine.space.blueprints) if own else ()
            divided.append(ShardedRollout(menu, envs, {place: rollouts[place] for place in own}))
        return divided

    def _clear(self) -> None:
        """Forget the rollouts and the rows of a round."""
        self._rows.clear()
        self._lines = {}
        for client in itertools.chain(*self.clients.values()):
            client.clear()

    def _close(self, figures: dict[str, float], seconds: float, begin: float) -> dict[str, float]:
        """Add the figures of a round that was played in `seconds` and whose update began at `begin`, and end the round."""
        updating, played, size = time.perf_counter() - begin, list(self.played.values()), self.exchange.size
        self._write_rows()
        self._clear()
        deciding, growing = sum(p.deciding for p in played), sum(p.seconds for p in played)
        steps = sum(p.envs * cohort.config.steps for p, cohort in zip(played, self.cohorts, strict=True))
        germinated, kept = sum(p.germinated for p in played), sum(p.kept for p in played)
        figures |= {
            "kept": kept / sum(p.envs for p in played),
            "kept_share": kept / germinated if germinated else math.nan,
            "rollbacks": float(sum(p.rollbacks for p in played)),
            "env_steps_per_second": steps / (seconds + updating),
            "controller_share": (deciding + size * updating) / (growing + size * updating),
        }
        if size > 1:
            whole = size * (seconds + updating)
            figures["playing_share"], figures["gradients_share"] = growing / whole, self.learner.computing / whole
            figures["waiting_seconds"] = max(whole - growing - self.learner.computing, 0.0)
        if (waits := self.hub.waits()) is not None:
            figures["output_wait_seconds"] = waits["waiting_seconds"] - self.waited
            self.waited = waits["waiting_seconds"]
        self.record = self._counted()
        self.wrong = self.history.add(self.number, figures, self.config.ppo)
        self.number, self.played = self.number + 1, {}
        return figures


class TrainingWorker:
    """Trains in a process beside the first worker, and writes nothing."""

    def __init__(
        self,
        tasks: Sequence[Callable[[], AnyTask]],
        configs: Sequence[Config],
        reward: Callable[[RewardConfig], Reward],
        level: Level,
        device: str | None,
    ) -> None:
        """device: None is that of the configs. level: of the rows that the first worker writes."""
        made = [make() for make in tasks]
        configs = [each if device is None else each.model_copy(update={"device": device}) for each in configs]
        shards = [cohorts_of(task, config, made=0) for task, config in zip(made, configs, strict=True)]
        place = policy_device(configs[0])
        self.facts = {**shared_facts(made), "policy": name_of_place(place)}
        self.trainer = fresh_trainer(shards, configs[0], place, reward, Hub([_KeptRows()], level))

    def play(self, part: Tree, sign: Sign) -> Tree:
        """Take part in the rounds that are left after a state of the first worker, which has all results."""
        trainer = self.trainer
        trainer.load_state(part["state"])
        owners, rank, size, interface = part["owners"], part["rank"], part["size"], part["meeting"]["interface"]
        store = store_of(part["meeting"], size)
        exchange = Exchange.joined(store, owners, rank, size, interface, trainer.carrier())
        exchange.at_work = sign
        trainer.use(exchange)
        try:
            for _ in trainer.rounds(Interrupt()):
                pass
        finally:
            trainer.use(Exchange())
        return {}
