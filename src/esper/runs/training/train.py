"""Train a controller: rounds that grow whole populations, with an update after each; the best policy is kept. E
environments.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from esper.leyline.config.tree import Config, RewardConfig
from esper.leyline.data.task import AnyTask
from esper.leyline.errors import InputError, RolledBack, describe_error
from esper.leyline.progress import Progress, Silent
from esper.leyline.protocols import Reward
from esper.leyline.reference import PAID_BY
from esper.leyline.text import counted
from esper.nissa.hub import Level
from esper.nissa.outputs import Output
from esper.nissa.rows import RoundRow
from esper.runs.figures import Summary
from esper.runs.folder.environment import describe_environment
from esper.runs.folder.interrupt import Interrupt
from esper.runs.folder.resume import NEW, PAID, Opening, fitting, with_cohorts
from esper.runs.folder.run_folder import RunFolder, run_row
from esper.runs.training.cohort import cohorts_of, settings_of_policy
from esper.runs.training.trainer import Trainer, TrainingCheckpoints
from esper.runs.training.work_items import TrainingPlayer
from esper.runs.workers.transports import serve_rank
from esper.runs.workers.workers import ALONE, SentTask, Stop, WorkerOptions, shared_facts, start_workers, with_shards
from esper.simic.rewards import get_reward, name_of_reward
from esper.tamiyo.catalog import FOLDER
from esper.tamiyo.policy.controller import Language, Policy, save_policy
from esper.tolaria.runtime import PhaseTimer, resolve_device
from esper.tolaria.stacked.population import check_place

Status = Literal["finished", "interrupted", "failed"]
"""The status of a training that has ended."""


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
    whatever the reward is.

    Writes the run folder, and its `controller/` whenever a better policy is found: one with a higher mean J of greedy
    growth on the validation split of validation instances. Raises InputError on bad input, before anything is written,
    and LearningError if an update cannot be trusted; the best controller so far then stays. SIGINT or SIGTERM ends the
    training after the current step; with actors, which play whole rounds, after the last whole round.

    If the `opening` says resume, the run of the folder continues from its last checkpoint, or starts again if it has
    none. The tasks, configs and rewards must be those that the run began with. With a change, `configs` are the changed
    ones, and a finished run can continue too. `outputs` get every row of the events. `asked` are the actors that play; in a rank
    of torchrun above 0, this process is one of them until the training ends.
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
        if run.found is not None:
            with fitting(run.found):
                trainer.load_state(run.found.state["trainer"])
                started -= float(run.found.state["seconds"])
            if trainer.number > ppo.rounds:
                raise InputError(
                    f"ppo.rounds is {ppo.rounds}, but the training has done {counted(trainer.number, 'round')}; give "
                    f"{trainer.number} or more"
                )
        row = partial(run_row, config, PAID, spaces[0], ())
        cohorts = {each.task: each.model_dump(mode="json") for each in configs}
        device = resolve_device(config.device)
        run.begin(lambda: {**describe_environment(device), "cohorts": cohorts}, row("running"))
        keeper = TrainingCheckpoints(run.store, trainer, run.hub, started)
        # The timer says, where memory runs out, what is in memory.
        timer = (
            trainer.cohorts[0].engine.timer
            if actors is None
            else PhaseTimer(torch.device("cpu"), f"the rollouts of {counted(actors.size, 'actor')}")
        )
        failed = run.recorded(row, partial(_summary, trainer, started, "failed"))
        try:
            with failed, timer.memory("between steps", users=False):
                status = _rounds(trainer, config, run, interrupt, watch, keeper)
        except KeyboardInterrupt:
            run.end(row("interrupted"), _summary(trainer, started, "interrupted"), at_once=True)
            raise
        whole = _summary(trainer, started, status)
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


def _summary(trainer: Trainer, started: float, status: Status) -> Summary:
    """Return the summary of a training whose clock, without interruptions, began at `started` [seconds]."""
    config = trainer.config
    return {
        "status": status,
        "tasks": list(config.tasks),
        "seed": config.seed,
        "envs": config.envs,
        "device": str(resolve_device(config.device)),
        "rounds": config.ppo.rounds,
        "rounds_done": trainer.learner.round,
        **trainer.summary(),
        "policy_inputs": {name: round(value, 4) for name, value in trainer.policy.input_weights().items()},
        **({} if trainer.actors is None else {"actors": trainer.actors.summary()}),
        "seconds": round(time.perf_counter() - started, 3),
    }


def _rounds(
    trainer: Trainer, config: Config, run: RunFolder, interrupt: Interrupt, watch: Progress, keeper: TrainingCheckpoints
) -> Status:
    """Run imitation, then learning, until all rounds are done or an interrupt; the status is failed if nothing was trained."""
    for number in range(trainer.number, config.ppo.rounds):
        begin = time.perf_counter()
        teach = trainer.imitate if number < 0 else trainer.learn
        try:
            figures = teach(number, interrupt, keeper)
        except Stop:
            interrupt.answered()
            watch.note("interrupted; the best controller so far is kept")
            return "interrupted"
        failed = trainer.all_rolled_back()
        due = number + 1 == config.ppo.rounds or (number + 1) % config.ppo.validate_every == 0
        better = due and not failed and number >= -1 and trainer.validate(number, figures)
        if better and run.path is not None:
            save_policy(trainer.best_policy(), run.path / FOLDER, run.retry)
        seconds = time.perf_counter() - begin
        known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        run.hub.emit(RoundRow(round=number, seconds=seconds, figures=known))
        watch.round(number, config.ppo.rounds, figures)
        keeper.now(best=better)
        if failed:
            return "failed"
    return "finished"
