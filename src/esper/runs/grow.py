"""Grow a population under a controller, and write its run folder."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor, nn

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.export import PROGRAM, save_network
from esper.kasmina.static import Absent
from esper.leyline.batches import map_leaves
from esper.leyline.config import Config
from esper.leyline.errors import InputError, OutOfMemory, describe_error
from esper.leyline.length import epochs_of
from esper.leyline.progress import Silent, Watch
from esper.leyline.protocols import PolicyClient, Resumable
from esper.leyline.stages import Stage, among
from esper.leyline.task import AnyTask
from esper.leyline.text import counted
from esper.leyline.view import Seeds, View
from esper.nissa.outputs import Output
from esper.nissa.rows import RunRow
from esper.runs.baselines import Trained, as_record, cut_off, grown_of, train_baselines
from esper.runs.environment import describe_environment
from esper.runs.explanations import Attempts, as_tree, explanations, thin_splits, unfinished
from esper.runs.failure import Failure, RolledBack, failed_row
from esper.runs.figures import Summary, compute_figures, evaluation_rows, final_figures, pass_figures, test_splits
from esper.runs.interrupt import Interrupt, after_growth, beside
from esper.runs.resume import NEW, Opening, fitting
from esper.runs.run_folder import RunFolder, emit_checkpoints
from esper.runs.stopping import stopping_figures
from esper.runs.verdict import compared_networks, verdict
from esper.store.checkpoint import Checkpoints, flatten, unflatten
from esper.store.disk import write_folder
from esper.store.files import BEST, MODELS
from esper.tamiyo.catalog import with_sensors
from esper.tamiyo.shipped import Shipped
from esper.tolaria.early_stopping import UNDER_WAY
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.journal import Journal
from esper.tolaria.play import Decision, Observer, Step, Until, decide, planted, play
from esper.tolaria.runtime import PhaseTimer, resolve_device


def grow(
    task: AnyTask,
    config: Config,
    client: PolicyClient,
    folder: Path | None = None,
    watch: Watch | None = None,
    opening: Opening = NEW,
    outputs: Sequence[Output] = (),
    notes: Sequence[str] = (),
) -> Summary:
    """Grow a population on a task for one episode, evaluate the grown networks on the test split, and export them.

    Without a folder, nothing is written. All arguments are checked first; on bad input InputError is raised before
    anything is written. SIGINT or SIGTERM ends the growth after the current step; the networks are then evaluated and
    exported as they are. Checkpoints are written if the controller is `Resumable`.

    If the `opening` says resume, the run of the folder continues from its last checkpoint, or starts again if it has
    none. The task, the config and the controller must be those that the run began with. With a change, `config` is the
    changed config, and a finished run can continue too. `outputs` get every row of the events. `notes` are lines that are
    shown when the run begins.
    """
    started = time.perf_counter()
    watch = watch or Silent()
    if task.test is None:
        raise InputError(f"task {task.name!r} has no test split, which the final evaluation reads; give it one")
    for name in (*config.heuristic.narrow_blueprints, *config.heuristic.weak_blueprints):
        get_blueprint(name)  # the task need not have it in its menu, but it must exist
    with (
        Interrupt(watch.answer) as interrupt,
        RunFolder(folder, config, watch.note, interrupt, opening, [task], outputs) as run,
    ):
        try:
            with _setting_up(config):
                engine = VectorizedEngine(task.sealed(), with_sensors(config, client))
                growth = Growth(task, config, client, engine, Journal(engine, run.hub), run, watch, interrupt, started)
                # checked now, so that the run does not fail at its end
                engine.population.data.sound(test_splits(engine, task))
                episode = _episode(growth)
        except OutOfMemory:
            # the folder is made, so that the same run can be started by `esper resume` when there is room
            row = partial(_run_row, None, config)
            run.begin(lambda: describe_environment(resolve_device(config.device)), row("running"))
            names = {"task": config.task, "controller": config.controller, "envs": config.envs, "seed": config.seed}
            with Failure(run, row, lambda: {**names, "steps": config.steps, "steps_done": 0}).recorded():
                raise
        run.begin(lambda: describe_environment(engine.device), _run_row(engine, config, "running"))
        for note in notes:
            watch.note(note)
        failure = Failure(run, partial(_run_row, engine, config), partial(_asked, growth, episode))
        with _closing_row(run, engine, watch), failure.recorded(), engine.timer.memory("between steps", users=False):
            played = _play(growth, episode)
            if played.status == "interrupted":
                interrupt.answered()
                if beside(config):
                    interrupt.rearm()
                watch.answer(after_growth(played.steps, config))
            summary = _close(growth, episode, played)
        run.end(failed_row(_run_row(engine, config, summary["status"]), summary), summary)
    return summary


@contextmanager
def _setting_up(config: Config) -> Iterator[None]:
    """Raise OutOfMemory if memory runs out while the data and the networks are set up."""
    what = f"{counted(config.envs * (1 + config.twin), 'network')} at data.batch_size {config.data.batch_size}"
    lower = "envs, give fewer examples, or a Dataset with stream=True"
    with PhaseTimer(resolve_device(config.device), what).memory("while the data and the networks were set up", lower):
        yield


class Growth(NamedTuple):
    """The objects of a run that grows a population."""

    task: AnyTask
    config: Config  # the config of the user; that of the engine also has the sensors that the controller needs
    client: PolicyClient
    engine: VectorizedEngine
    journal: Journal
    run: RunFolder
    watch: Watch
    interrupt: Interrupt
    started: float  # time.perf_counter() at the start [seconds]


def _episode(growth: Growth) -> "Episode":
    """Return the episode of a new run with its first decision, or that of the checkpoint from which the run continues."""
    found, config = growth.run.found, growth.config
    if found is None:
        episode = Episode(growth.engine.reset())
        # a controller that does not fit the task raises here, before anything is written
        episode.decided = decide(growth.client, episode.view, growth.engine.trial)
        return episode
    with fitting(found):
        episode = _restored(growth.engine, growth.client, found.state)
    if episode.steps > config.steps:
        raise InputError(
            f"steps is {config.steps}, but the run has taken {episode.steps}; give {episode.steps} or more"
        )
    return episode


def _close(growth: Growth, episode: "Episode", played: "Played") -> Summary:
    """Evaluate and export the grown networks, and train the static networks; return the summary."""
    task, config, engine, run, watch = growth.task, growth.config, growth.engine, growth.run, growth.watch
    ended = engine.view().seeds
    exported = engine.finish()
    if exported is not None:
        growth.journal.close(exported, ended)
    figures = final_figures(engine, task, config)
    for row in evaluation_rows(figures):
        run.hub.emit(row)
    networks = [engine.export(env) for env in range(config.envs)]
    written = Written([], [])
    if run.path is not None:
        written = _write_networks(growth, run.path, networks, figures)
    seconds = episode.before + time.perf_counter() - growth.started
    static = _static(growth, played, figures)
    if cut_off(static):
        played = played._replace(status="interrupted")
        watch.answer(f"interrupted: the static networks {', '.join(cut_off(static))} are left out")
    summary = {
        **_asked(growth, episode),
        "status": played.status,
        **figures,
        "baselines": {name: as_record(trained, figures["metric"]) for name, trained in static.items()},
        "compared": compared_networks(
            figures["test_objective"]["grown"],
            static,
            engine.population.body.table.host_params[: config.envs],
            config.reward,
        ),
        **_growth(engine, [topology for _, topology in networks], ended, played.germinated),
        **stopping_figures(engine, config, played.steps),
        **written._asdict(),
        **engine.governor.record.counts(),
        **engine.fates.lists(),
        **pass_figures(engine),
        **compute_figures(engine),
        "explanations": _explanations(growth, episode, played),
        "seconds": round(seconds, 3),
        "env_steps_per_second": round(engine.rows * played.steps / played.seconds, 1) if played.steps else None,
        "phase_seconds": {
            name: round(seconds, 4)
            for name, seconds in {**engine.timer.seconds, "writing": growth.run.hub.seconds}.items()
        },
    }
    if played.status == "failed":
        summary["error"] = describe_error(RolledBack(engine.governor.record.counts()["rollbacks"]))
    return {"verdict": verdict(summary, config.reward), **summary}


@contextmanager
def _closing_row(run: RunFolder, engine: VectorizedEngine, watch: Watch) -> Iterator[None]:
    """Write the last row of the events when a further SIGINT ends the process at once.

    No summary is written then.
    """
    try:
        yield
    except KeyboardInterrupt:
        run.hub.emit(_run_row(engine, engine.config, "interrupted"))
        watch.answer("interrupted again: the run ends at once, without a summary")
        raise


@dataclass
class Episode(Observer):
    """The progress of an episode."""

    view: View  # the view for the next decision
    decided: Decision | None = None  # the next decision, if it was made already
    steps: int = 0
    germinated: int = 0  # seeds planted, over all environments
    seconds: float = 0.0  # duration of the steps alone
    before: float = 0.0  # duration of the run before it was resumed [seconds]
    attempts: Attempts = field(init=False)  # attempts to plant

    def __post_init__(self) -> None:
        self.attempts = Attempts.none(len(self.view.host_params))

    def stepped(self, step: Step) -> None:
        """Count a step."""
        self.view = step.after
        self.attempts.count(step.view, step.outcome.actions, step.outcome.refused)
        for actions, refused in step.further:
            self.attempts.count_further(actions, refused)
        self.germinated += planted(step)
        self.steps += 1
        self.seconds += step.seconds


@dataclass
class Keeper(Observer):
    """Writes the checkpoints of an episode. Without a store it writes none.

    `whole` is a copy of the state after the last step, if examples are read by batch: reading may fail within a step.
    """

    store: Checkpoints | None
    growth: Growth
    episode: Episode
    whole: tuple[int, tuple[dict[str, Tensor], Any]] | None = None  # steps, and what `flatten` returned

    def going(self, view: View) -> bool:
        """Write a checkpoint if one is due."""
        self.when_due()
        if self.store is not None and self.growth.engine.population.data.problems[0].source is not None:
            self.whole = self.episode.steps, flatten(self._state())
        return True

    def broken(self) -> None:
        """Write a checkpoint of the last whole step, if it is known."""
        if self.whole is None or self.store is None or self.whole[0] == self.store.last:
            return
        steps, copied = self.whole
        try:
            self.growth.run.hub.flush()
            self.store.begin(steps, unflatten(*copied))
            self.store.join()
        except Exception as error:
            self.growth.watch.note(f"no checkpoint could be written after a step failed: {error}")

    def failed(self, view: View) -> None:
        """Write a checkpoint of the steps so far; the controller's error is raised again afterwards."""
        try:
            self.at_end()
        except Exception as error:
            self.growth.watch.note(f"no checkpoint could be written after the controller failed: {error}")

    def when_due(self) -> None:
        """Write a checkpoint if the intervals of the config say that one is due."""
        if self.store is not None and self.store.due(self.episode.steps):
            self.now()

    def now(self) -> None:
        """Write a checkpoint, unless no step was taken since the last."""
        episode, store = self.episode, self.store
        if store is None or episode.steps == store.last:
            return
        hub = self.growth.run.hub
        store.join()
        emit_checkpoints(hub, store)
        hub.flush()
        store.begin(episode.steps, self._state())

    def _state(self) -> dict[str, Any]:
        episode, client = self.episode, self.growth.client
        assert isinstance(client, Resumable)
        return {
            **self.growth.run.hub.state(),
            "episode": {
                "steps": episode.steps,
                "germinated": episode.germinated,
                "seconds": episode.seconds,
                "before": episode.before + time.perf_counter() - self.growth.started,
            },
            "attempts": as_tree(episode.attempts),
            "client": client.state(),
            "engine": self.growth.engine.snapshot(),
        }

    def at_end(self) -> None:
        """Write the last checkpoint and wait until it is complete.

        The work that follows takes a while, and a second signal would end the process without waiting for the file.
        """
        self.now()
        if self.store is not None:
            self.store.join()


@dataclass(frozen=True)
class Shown(Observer):
    """Reports every step to the progress display."""

    engine: VectorizedEngine
    episode: Episode
    watch: Watch

    def stepped(self, step: Step) -> None:
        """Report a step that the episode has counted."""
        episode, rollbacks = self.episode, int(self.engine.governor.record.found.sum())
        self.watch.step(step.after, self.engine.rows * episode.steps / episode.seconds, rollbacks)


class Played(NamedTuple):
    """The result of an episode, which an interrupt may have cut short."""

    status: Literal["finished", "interrupted", "failed"]  # failed if every environment was rolled back in every step
    steps: int
    germinated: int  # seeds planted, over all environments
    seconds: float  # duration of the steps alone


class Written(NamedTuple):
    """The environments whose networks were written."""

    exported: list[int]
    untraced: list[int]  # the ones that torch.export could not trace


def _play(growth: Growth, episode: Episode) -> Played:
    """Play to the end of the episode or to an interrupt."""
    client, engine, interrupt, watch = growth.client, growth.engine, growth.interrupt, growth.watch
    keeper = Keeper(growth.run.store if isinstance(client, Resumable) else None, growth, episode)
    play(
        engine,
        client,
        Until(lambda: interrupt.asked),
        growth.journal,
        keeper,
        episode,
        Shown(engine, episode, watch),
        first=episode.decided,
    )
    keeper.at_end()
    client.update()
    status: Literal["finished", "interrupted", "failed"] = "finished" if engine.over else "interrupted"
    if episode.steps and (engine.governor.record.rollbacks[: engine.config.envs] == episode.steps).all():
        status = "failed"
    return Played(status, episode.steps, episode.germinated, episode.seconds)


def _restored(engine: VectorizedEngine, client: PolicyClient, state: Mapping[str, Any]) -> Episode:
    """Restore the episode of a checkpoint, with the engine and the controller."""
    if not isinstance(client, Resumable):
        raise InputError(
            f"the controller is a {type(client).__name__}, which cannot be resumed; give it the methods state and load_state"
        )
    view = engine.restore(state["engine"])
    client.load_state(state["client"])
    episode = Episode(view, None, **state["episode"])
    episode.attempts = Attempts(**state["attempts"])
    return episode


def _asked(growth: Growth, episode: Episode) -> Summary:
    """Return the settings and the progress, for the summary of a run that fails."""
    task, config, engine = growth.task, growth.config, growth.engine
    return {
        "status": "failed",
        "task": config.task,
        "controller": config.controller,
        **({"controller_digest": growth.client.digest} if isinstance(growth.client, Shipped) else {}),
        "envs": config.envs,
        "steps": config.steps,
        "steps_done": episode.steps,
        "epochs_done": epochs_of(episode.steps, config, task),
        "seed": config.seed,
        "device": str(engine.device),
        "rows": engine.rows,
    }


def _static(growth: Growth, played: Played, figures: Summary) -> dict[str, Trained | Absent]:
    """Train the static networks that the config asks for. The twins are rows of the population, and are trained already."""
    config, engine = growth.config, growth.engine
    twin = None
    if config.twin:
        metric, loss = (np.array(figures[f"test_{name}"]["host"], np.float64) for name in (figures["metric"], "loss"))
        params = engine.population.body.table.host_params[: config.envs].copy()
        twin = Trained(metric, loss, params, seconds=None)
    until = None
    if engine.stopping is not None:
        stopped = engine.stopping.stopped[: config.envs]
        until = np.where(stopped < 0, played.steps, stopped)
    note, interrupt = growth.watch.note, growth.interrupt
    return train_baselines(growth.task, config, grown_of(engine), played.steps, twin, interrupt, note, until)


def _growth(
    engine: VectorizedEngine, topologies: Sequence[Mapping[str, Any]], ended: Seeds, germinated: int
) -> Summary:
    """Return the seeds that grew, by slot, and the numbers of other seeds; `ended` (E, S) are the seeds after the last step."""
    grown = [{seed["slot"]: seed["blueprint"] for seed in topology["seeds"]} for topology in topologies]
    unfinished = [
        [name for name, live in zip(engine.space.slots, row, strict=True) if live]
        for row in among(ended.stage, UNDER_WAY).tolist()
    ]
    kept, left = sum(map(len, grown)), sum(map(len, unfinished))
    fossil, best = ended.stage == Stage.FOSSILIZED, engine.view().seeds.stage == Stage.FOSSILIZED
    discarded = int((fossil & ~best).sum())
    seeds = {
        "germinated": germinated,
        "fossilized": kept,
        "unfinished": left,
        "discarded": discarded,  # fossilized after the best step, which early stopping restored
        "pruned": germinated - kept - left - discarded,
    }
    return {"seeds": seeds, "grown": grown, "unfinished": unfinished}


def _explanations(growth: Growth, episode: Episode, played: Played) -> list[str]:
    """Return sentences that say what did not happen, and why.

    A run that failed gets none, because its error is the reason for everything.
    """
    if played.status == "failed":
        return []
    return [
        *explanations(episode.attempts, growth.engine.space, growth.client, growth.config.controller),
        *unfinished(episode.view, growth.config.gates, episode.attempts.allowed_last),
        *thin_splits(growth.task),
    ]


def _write_networks(
    growth: Growth, folder: Path, networks: Sequence[tuple[nn.Module, dict[str, Any]]], figures: Summary
) -> Written:
    """Export the networks that the config asks for into the run folder, that of the best environment also as `models/best`."""
    engine, watch = growth.engine, growth.watch
    written = Written(_exported(growth.config, figures["best"]["env"]), [])
    if written.exported:
        watch.note(f"exporting {counted(len(written.exported), 'network')}")
    reasons: dict[str, str] = {}  # by kind: why torch.export cannot trace a network
    for env in written.exported:
        problem = growth.task.instance(int(engine.space.instance[env]))
        example = map_leaves(lambda leaf: leaf[:2].cpu(), problem.probe.x)
        path = folder / MODELS / f"env-{env:03d}"
        kind = _kind(networks[env][1])
        failure = save_network(path, *networks[env], example, growth.run.retry, reasons.get(kind))
        if failure is not None:
            reasons[kind] = failure
            written.untraced.append(env)
    best = figures["best"]["env"]
    if best in written.exported:
        source, target = (folder / MODELS / name for name in (f"env-{best:03d}", BEST))
        # A copy and not a link, because links in a run folder are not followed.
        growth.run.retry(
            target, lambda: write_folder(target, {path.name: path.read_bytes() for path in source.iterdir()})
        )
    if written.untraced:
        some = f"{len(written.untraced)} of {counted(len(written.exported), 'network')}"
        have, them = ("has", "it") if len(written.untraced) == 1 else ("have", "them")
        why = "; or ".join(dict.fromkeys(reasons.values()))
        watch.note(f"{some} {have} no {PROGRAM}, as torch.export cannot trace {them}: {why}")
    return written


def _kind(topology: Mapping[str, Any]) -> str:
    """Return a text that is the same for networks that torch.export traces alike: the host, and the seeds by slot."""
    seeds = [[seed[name] for name in ("slot", "blueprint", "blend")] for seed in topology["seeds"]]
    return json.dumps([topology["host"], seeds], sort_keys=True)


def _exported(config: Config, best: int) -> list[int]:
    """Return the environments whose networks are exported."""
    return {"none": [], "best": [best], "all": list(range(config.envs))}[config.models]


def _run_row(engine: VectorizedEngine | None, config: Config, status: Any) -> RunRow:
    """Return a row of a run; without an engine, which did not fit into memory, its slots and hosts are not known."""
    return RunRow(
        status=status,
        task=config.task,
        controller=config.controller,
        envs=config.envs,
        steps=config.steps,
        seed=config.seed,
        device=str(resolve_device(config.device) if engine is None else engine.device),
        slots=() if engine is None else engine.space.slots,
        blueprints=() if engine is None else [blueprint.name for blueprint in engine.space.blueprints],
        host_param_counts=() if engine is None else engine.population.body.table.host_params[: config.envs],
    )
