"""Train a controller: rounds that grow whole populations, with an update after each; the best policy is kept. E
environments.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from esper.leyline.config import Config, RewardConfig
from esper.leyline.errors import InputError, describe_error
from esper.leyline.progress import Progress, Silent
from esper.leyline.protocols import Reward
from esper.leyline.resuming import PAID_BY
from esper.leyline.task import AnyTask
from esper.leyline.text import counted
from esper.leyline.view import Space
from esper.nissa.hub import Hub, Level
from esper.nissa.outputs import Output
from esper.nissa.rows import RoundRow, RunRow
from esper.runs.actor_work import SentTask, TrainingWork, check_facts, facts_of
from esper.runs.actors import Actors, Stop
from esper.runs.cohort import cohorts_of, settings_of_policy
from esper.runs.crews import ALONE, Asked, hire, with_shards
from esper.runs.environment import describe_environment
from esper.runs.failure import Failure, RolledBack, failed_row
from esper.runs.figures import Summary
from esper.runs.interrupt import Interrupt
from esper.runs.origin import fingerprint
from esper.runs.ranks_crew import serve_rank
from esper.runs.resume import NEW, PAID, Opening, fitting, with_cohorts
from esper.runs.run_folder import RunFolder
from esper.runs.school import Keeper, School
from esper.simic.rewards import get_reward, name_of_reward
from esper.tamiyo.catalog import FOLDER
from esper.tamiyo.controller import Language, Policy, save_policy
from esper.tolaria.runtime import PhaseTimer, resolve_device

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
    asked: Asked = ALONE,
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
        work = training_work(asked, tasks, configs, reward, config.telemetry.level)
        return serve_rank(work, asked.devices or (None,))
    kept = with_cohorts(configs, PAID if reward is get_reward else f"{PAID_BY}{name_of_reward(reward)}")
    sealed = [task.sealed() for task in tasks]
    opened = partial(RunFolder, folder, kept, watch.note)
    with Interrupt(watch.note) as interrupt, opened(interrupt, opening, sealed, outputs) as run, ExitStack() as stack:
        shards = [cohorts_of(task, each, 1 if asked.any else None) for task, each in zip(sealed, configs, strict=True)]
        spaces = [each[0].engine.space for each in shards]
        policy = _fresh_policy(config, spaces)
        actors = None
        if asked.any:
            for each in shards:
                each[0].engines.release()
            actors = stack.enter_context(closing(_hired(asked, sealed, configs, reward, run.hub, watch, interrupt)))
        school = School([cohort for each in shards for cohort in each], policy, config, reward, run.hub, actors)
        started -= _taken_up(school, run)
        row = partial(_run_row, config, spaces[0])
        run.begin(lambda: _environment(configs), row("running"))
        keeper = Keeper(run.store, school, run.hub, started)
        failure = Failure(run, row, partial(_summary, school, started, "failed"))
        try:
            with failure.recorded(), _timer(school).memory("between steps", users=False):
                status = _rounds(school, config, run, interrupt, watch, keeper)
        except KeyboardInterrupt:
            run.end(row("interrupted"), _summary(school, started, "interrupted"), at_once=True)
            raise
        whole = {**_summary(school, started, status), **_error(school, status)}
        run.end(failed_row(row(status), whole), whole)
    return whole


def _fresh_policy(config: Config, spaces: Sequence[Space]) -> Policy:
    """The policy that a training begins with."""
    ppo, language = config.ppo, Language.of(spaces, config.ppo.packages)
    return Policy.fresh(language, config.seed, settings_of_policy(config), ppo.decisions_per_step, ppo.undo_bias)


def _hired(
    asked: Asked,
    tasks: Sequence[AnyTask],
    configs: Sequence[Config],
    reward: Callable[[RewardConfig], Reward],
    hub: Hub,
    watch: Progress,
    interrupt: Interrupt,
) -> Actors:
    """Start the actors of a training. Raises InputError if one cannot start."""
    work = training_work(asked, tasks, configs, reward, "off" if not hub.outputs else hub.asked)
    facts = facts_of({task.name: fingerprint(task) for task in tasks})
    return hire(asked, work, watch.note, facts, check_facts, stop=lambda: interrupt.asked)


def training_work(
    asked: Asked,
    tasks: Sequence[AnyTask],
    configs: Sequence[Config],
    reward: Callable[[RewardConfig], Reward],
    level: Level,
) -> TrainingWork:
    """Return the specification of the actors of a training. Raises InputError if a task cannot be sent to them."""
    engines = math.ceil(sum(config.shards for config in configs) / asked.size)
    return TrainingWork([SentTask.of(task, asked.find) for task in tasks], list(configs), reward, level, engines)


def _timer(school: School) -> PhaseTimer:
    """Return a timer that says, where memory runs out, what is in memory."""
    if school.actors is None:
        return school.cohorts[0].engine.timer
    return PhaseTimer(torch.device("cpu"), f"the rollouts of {counted(school.actors.size, 'actor')}")


def _taken_up(school: School, run: RunFolder) -> float:
    """Load the checkpoint from which a run continues; return the seconds that the run had taken until then."""
    if run.found is None:
        return 0.0
    rounds = school.config.ppo.rounds
    with fitting(run.found):
        school.load_state(run.found.state["school"])
        before = float(run.found.state["seconds"])
    if school.number > rounds:
        raise InputError(
            f"ppo.rounds is {rounds}, but the training has done {counted(school.number, 'round')}; give {school.number} or more"
        )
    return before


def _summary(school: School, started: float, status: Status) -> Summary:
    """Return the summary of a training whose clock, without interruptions, began at `started` [seconds]."""
    config = school.config
    return {
        "status": status,
        "tasks": list(config.tasks),
        "seed": config.seed,
        "envs": config.envs,
        "device": str(resolve_device(config.device)),
        "rounds": config.ppo.rounds,
        "rounds_done": school.learner.round,
        **school.summary(),
        "policy_inputs": {name: round(value, 4) for name, value in school.policy.input_weights().items()},
        **({} if school.actors is None else {"actors": school.actors.summary()}),
        "seconds": round(time.perf_counter() - started, 3),
    }


def _error(school: School, status: Status) -> Summary:
    """Return the entry `error` of the summary of a training in which nothing could be trained, else none."""
    return {"error": describe_error(RolledBack(school.summary()["rollbacks"]))} if status == "failed" else {}


def _environment(configs: Sequence[Config]) -> dict[str, Any]:
    """Return environment.json of a training, which holds the config of every task."""
    each = {config.task: config.model_dump(mode="json") for config in configs}
    return {**describe_environment(resolve_device(configs[0].device)), "cohorts": each}


def _rounds(
    school: "School",
    config: Config,
    run: RunFolder,
    interrupt: Interrupt,
    watch: Progress,
    keeper: Keeper,
) -> Status:
    """Run imitation, then learning, until all rounds are done or an interrupt; the status is failed if nothing was trained."""
    for number in range(school.number, config.ppo.rounds):
        begin = time.perf_counter()
        teach = school.imitate if number < 0 else school.learn
        try:
            figures = teach(number, interrupt, keeper)
        except Stop:
            interrupt.answered()
            watch.note("interrupted; the best controller so far is kept")
            return "interrupted"
        failed = school.all_rolled_back()
        due = number + 1 == config.ppo.rounds or (number + 1) % config.ppo.validate_every == 0
        better = due and not failed and number >= -1 and school.validate(number, figures)
        if better and run.path is not None:
            save_policy(school.best_policy(), run.path / FOLDER, run.retry)
        seconds = time.perf_counter() - begin
        known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        run.hub.emit(RoundRow(round=number, seconds=seconds, figures=known))
        watch.round(number, config.ppo.rounds, figures)
        keeper.now(best=better)
        if failed:
            return "failed"
    return "finished"


def _run_row(config: Config, space: Space, status: Any) -> RunRow:
    return RunRow(
        status=status,
        task=config.task,
        controller="ppo",
        envs=config.envs,
        steps=config.steps,
        seed=config.seed,
        device=str(resolve_device(config.device)),
        slots=space.slots,
        blueprints=[blueprint.name for blueprint in space.blueprints],
        host_param_counts=[],  # every round has other hosts
    )
