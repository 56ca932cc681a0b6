"""Train a controller: rounds that grow whole populations, with an update after each; the best policy is kept. E
environments.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from esper.leyline.config import Config, RewardConfig
from esper.leyline.errors import InputError, describe_error
from esper.leyline.progress import Progress, Silent
from esper.leyline.protocols import Reward
from esper.leyline.task import AnyTask
from esper.leyline.text import counted
from esper.nissa.outputs import Output
from esper.nissa.rows import RoundRow, RunRow
from esper.runs.environment import describe_environment
from esper.runs.failure import Failure, RolledBack, failed_row
from esper.runs.figures import Summary
from esper.runs.interrupt import Interrupt
from esper.runs.resume import NEW, PAID, Opening, fitting, with_cohorts
from esper.runs.run_folder import RunFolder
from esper.runs.school import Cohort, Keeper, School, Stop, cohort_of, settings_of_policy
from esper.simic.rewards import get_reward
from esper.tamiyo.catalog import FOLDER
from esper.tamiyo.controller import Language, Policy, save_policy

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
) -> Summary:
    """Train a controller on tasks, with one config each; the settings of the learner are read from the first config.

    `reward` makes a reward object for every task, because a reward may have state. Controllers are validated by J,
    whatever the reward is.

    Writes the run folder, and its `controller/` whenever a better policy is found: one with a higher mean J of greedy
    growth on the validation split of validation instances. Raises InputError on bad input, before anything is written,
    and LearningError if an update cannot be trusted; the best controller so far then stays. SIGINT or SIGTERM ends the
    training after the current step.

    If the `opening` says resume, the run of the folder continues from its last checkpoint, or starts again if it has
    none. The tasks, configs and rewards must be those that the run began with. With a change, `configs` are the changed
    ones, and a finished run can continue too. `outputs` get every row of the events.
    """
    watch, config, started = watch or Silent(), configs[0], time.perf_counter()
    kept = with_cohorts(configs, PAID if reward is get_reward else f"{PAID}, paid by {_name(reward)}")
    sealed = [task.sealed() for task in tasks]
    with Interrupt() as interrupt, RunFolder(folder, kept, watch.note, interrupt, opening, sealed, outputs) as run:
        cohorts = [cohort_of(task, each) for task, each in zip(sealed, configs, strict=True)]
        policy = Policy.fresh(
            Language.of([cohort.engine.space for cohort in cohorts]), config.seed, settings_of_policy(config)
        )
        school = School(cohorts, policy, config, reward, run.hub)
        started -= _taken_up(school, run)
        run.begin(lambda: _environment(cohorts), _run_row(cohorts[0], "running"))
        keeper = Keeper(run.store, school, run.hub, started)
        failure = Failure(run, partial(_run_row, cohorts[0]), partial(_summary, school, started, "failed"))
        try:
            with failure.recorded(), cohorts[0].engine.timer.memory("between steps", users=False):
                status = _rounds(school, config, run, interrupt, watch, keeper)
        except KeyboardInterrupt:
            run.end(_run_row(cohorts[0], "interrupted"), _summary(school, started, "interrupted"), at_once=True)
            raise
        whole = _summary(school, started, status)
        if status == "failed":
            whole["error"] = describe_error(RolledBack(school.summary()["rollbacks"]))
        run.end(failed_row(_run_row(cohorts[0], status), whole), whole)
    return whole


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
    config, cohorts = school.config, school.cohorts
    return {
        "status": status,
        "tasks": [cohort.task.name for cohort in cohorts],
        "seed": config.seed,
        "envs": config.envs,
        "device": str(cohorts[0].engine.device),
        "rounds": config.ppo.rounds,
        "rounds_done": school.learner.round,
        **school.summary(),
        "policy_inputs": {name: round(value, 4) for name, value in school.policy.input_weights().items()},
        "seconds": round(time.perf_counter() - started, 3),
    }


def _environment(cohorts: Sequence[Cohort]) -> dict[str, Any]:
    """Return environment.json of a training, which holds the config of every cohort."""
    each = {cohort.task.name: cohort.config.model_dump(mode="json") for cohort in cohorts}
    return {**describe_environment(cohorts[0].engine.device), "cohorts": each}


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


def _name(made_by: Callable[..., Any]) -> str:
    """Return the name of a factory given from Python."""
    return str(getattr(made_by, "__name__", type(made_by).__name__))


def _run_row(cohort: Cohort, status: Any) -> RunRow:
    config, engine = cohort.config, cohort.engine
    return RunRow(
        status=status,
        task=config.task,
        controller="ppo",
        envs=config.envs,
        steps=config.steps,
        seed=config.seed,
        device=str(engine.device),
        slots=engine.space.slots,
        blueprints=[blueprint.name for blueprint in engine.space.blueprints],
        host_param_counts=[],  # every round has other hosts
    )
