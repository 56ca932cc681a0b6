"""Grow a population under a controller, and write its run folder."""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from esper.kasmina.blueprints import get_blueprint
from esper.kasmina.network.export import PROGRAM, save_network
from esper.leyline.config.tree import Config
from esper.leyline.data.batches import map_leaves
from esper.leyline.data.task import AnyTask, epochs_of, with_steps
from esper.leyline.lifecycle.view import View
from esper.leyline.lifecycle.vocabulary import Stage, among
from esper.leyline.messages import InputError, OutOfMemory, RolledBack, counted, describe_error
from esper.leyline.progress import Progress
from esper.leyline.protocols import Controller
from esper.nissa.events import digits
from esper.nissa.hub import Output
from esper.nissa.rows import EvaluationRow
from esper.runs import baselines, figures
from esper.runs.figures import Status, Summary
from esper.runs.folder.environment import describe_environment
from esper.runs.folder.interrupt import Interrupt
from esper.runs.folder.resume import NEW, Opening, fitting
from esper.runs.folder.run_folder import RunFolder
from esper.runs.verdict import Attempts, compared_networks, explanations, thin_splits, unfinished, verdict
from esper.runs.workers.sharded import ShardedEngine, ShardWorker, check_workers
from esper.runs.workers.workers import ALONE, ShardPool, WorkerOptions, sent, shared_facts, start_workers
from esper.store.disk import write_folder
from esper.store.files import BEST, MODELS
from esper.tamiyo.catalog import with_sensors
from esper.tolaria.early_stopping import UNDER_WAY, stopping_figures
from esper.tolaria.engine import Decision, Observer, Step, TaskEngine, Until, VectorizedEngine, decide, play
from esper.tolaria.journal import Journal
from esper.tolaria.runtime import PhaseTimer, Waits, resolve_device
from esper.tolaria.stacked.population import check_place, label_of, sound_splits


def grow(
    task: AnyTask,
    config: Config,
    client: Controller,
    folder: Path | None = None,
    watch: Progress | None = None,
    opening: Opening = NEW,
    outputs: Sequence[Output] = (),
    asked: WorkerOptions = ALONE,
) -> Summary:
    """Grow a population on a task for one episode, as `esper.grow` says, and return the summary.

    Checkpoints are written if the controller has a `state`. If the `opening` says resume, the run of the folder continues from
    its last checkpoint, or starts again if it has none, with the task, the config and the controller that it began with. With a
    change, `config` is the changed config, and a finished run can continue too. Of the workers that are `asked` for, this process
    decides for all environments, and writes the folder.
    """
    started, watch = time.perf_counter(), watch or Progress()
    if task.test is None:
        raise InputError(f"task {task.name!r} has no test split, which the final evaluation reads; give it one")
    for name in (*config.heuristic.narrow_blueprints, *config.heuristic.weak_blueprints):
        get_blueprint(name)  # the task need not have it in its menu, but it must exist
    placed = config.model_copy(update={"device": asked.devices[0]}) if asked.devices else config
    if not opening.resume:  # the workers of a run that continues may be on other devices
        config = placed
    if asked.any:
        check_workers(asked, config, client)
        torch.set_num_threads(1)  # as in the workers
    if (at := config.widen.at) and at[-1] >= (steps := with_steps(config, task).steps):
        raise InputError(
            f"widen.at names step {at[-1]}, and the run ends after {counted(steps, 'step')}, so that nothing would be trained "
            "with the new widths; raise steps, or leave that one out"
        )
    check_place(task, placed)  # before the folder, of which less can be wrong
    with (
        Interrupt(watch.answer) as interrupt,
        ExitStack() as further,
        RunFolder(folder, config, watch.note, interrupt, opening, [task], outputs) as run,
        ExitStack() as readers,
    ):
        try:
            lower = "envs, give fewer examples, or a Dataset with stream=True"
            timer = PhaseTimer(resolve_device(placed.device), label_of(config))
            with timer.memory("while the data and the networks were set up", lower):
                pool, sealed, sensing = None, task.sealed(), with_sensors(placed, client)
                if asked.any:
                    work = partial(ShardWorker, sent(sealed, asked.maker(task.name)))
                    facts = shared_facts([sealed])
                    pool = start_workers(ShardPool, asked, work, watch.note, facts, stop=lambda: interrupt.asked)
                    pool.devices, pool.patience = asked.devices or (None,), config.faults.worker_seconds
                    readers.callback(pool.close)
                engine = VectorizedEngine(sealed, sensing) if pool is None else ShardedEngine(pool, sealed, sensing)
                readers.callback(engine.population.close)
                episode = Episode(task, config, client, engine, pool, run, watch, started)
                journal = Journal(engine, run.hub)
                # checked now, so that the run does not fail at its end
                sound_splits(figures.test_splits(engine, task), sealed, config)
                episode.begin()
        except OutOfMemory:
            # the folder is made, so that the same run can be started by `esper resume` when there is room
            run.begin(lambda: describe_environment(resolve_device(config.device), config))
            names = {"task": config.task, "controller": config.controller, "envs": config.envs, "seed": config.seed}
            with run.recorded(lambda: {**names, "steps": config.steps, "steps_done": 0}):
                raise
        hosts = engine.population.host_params[: config.envs].copy()
        if engine.population.widened:  # in a run that goes on
            hosts[:] = figures.host_sizes(engine, task)[0]
        run.begin(lambda: describe_environment(engine.device, config), engine.space, hosts)
        if client.state() is None:
            run.store = None
        try:
            with run.recorded(episode.settings), engine.timer.memory("between steps", users=False):
                play(engine, client, Until(lambda: interrupt.asked), journal, episode, first=episode.decided)
                episode.save_at_end()
                client.update()
                status: Status = "finished" if engine.over else "interrupted"
                if episode.steps and (engine.governor.record.rollbacks[: config.envs] == episode.steps).all():
                    status = "failed"
                ending = interrupt
                if status == "interrupted":
                    interrupt.answered()
                    taken = counted(episode.steps, "step")
                    after = "; another Ctrl-C ends the run at once, without a summary"
                    if others := [name for name in config.baselines if name != "twin"]:
                        ending = further.enter_context(Interrupt(hangup=False))
                        after = f", then the static networks ({', '.join(others)}) train for {taken} too; another Ctrl-C leaves "
                        after += "those out"
                    watch.answer(
                        f"interrupted after {episode.steps:,} of {counted(config.steps, 'step')}: the networks are evaluated and "
                        f"exported as they are{after}"
                    )
                summary = _close(episode, journal, ending, status)
        except KeyboardInterrupt:
            # a further SIGINT, which ends the process at once
            run.save_kept(watch.answer, episode.whole)
            run.hub.emit(run.row("interrupted"))
            watch.answer("interrupted again: the run ends at once, without a summary")
            raise
        run.end(summary)
    return summary


def _close(episode: "Episode", journal: Journal, ending: Interrupt, status: Status) -> Summary:
    """Evaluate and export the grown networks, and train the static networks until `ending`; return the summary.

    Static networks train for the steps that the growth took, also where it was interrupted, if `ending` is another interrupt
    than that of the growth.
    """
    task, config, engine, run, watch = episode.task, episode.config, episode.engine, episode.run, episode.watch
    ended, envs = engine.view().seeds, slice(0, config.envs)
    exported = engine.finish()
    if exported is not None:
        journal.close(exported, ended)
    tested = figures.final_figures(engine, task, config)
    for split in ("test", "validation"):
        metric, loss, worth = (tested[f"{split}_{name}"] for name in (tested["metric"], "loss", "objective"))
        ours = {"metrics": metric["grown"], "losses": loss["grown"], "objectives": worth["grown"]}
        run.hub.emit(EvaluationRow(split=split, **ours, twin_metrics=metric["host"]))
    networks = [engine.export(env) for env in range(config.envs)]
    exported_envs, untraced = ([], []) if run.path is None else _write_networks(episode, run.path, networks, tested)
    seconds = time.perf_counter() - episode.started

    # The static networks that the config asks for. The twins are rows of the population, and are trained already.
    host_params, twin, until = engine.population.host_params[envs], None, None
    static, cut = dict[str, baselines.BaselineResult | baselines.Absent](), list[str]()
    if config.twin:
        metric, loss = (np.array(tested[f"test_{name}"]["host"], np.float64) for name in (tested["metric"], "loss"))
        static["twin"] = twin = baselines.BaselineResult(metric, loss, host_params.copy(), seconds=None)
    if engine.stopping is not None:
        stopped = engine.stopping.stopped[envs]
        until = np.where(stopped < 0, episode.steps, stopped)
    placed = config.model_copy(update={"device": engine.config.device})  # a run may continue on another device
    results = baselines.grown_of(engine)
    train = partial(baselines.train_baseline, until=until, twin=twin, stop=lambda: ending.asked, pool=episode.pool)
    hint = "; Ctrl-C leaves out the static networks that are not trained yet"  # said once
    for name in (each for each in config.baselines if each != "twin"):
        static[name] = baselines.INTERRUPTED
        if not ending.asked and not cut:
            with suppress(KeyboardInterrupt):
                watch.note(f"training the baseline {name} for {counted(episode.steps, 'step')}{hint}")
                hint = ""
                static[name] = train(name, task, placed, results, episode.steps)
        if static[name] is baselines.INTERRUPTED:
            cut.append(name)
    if cut:
        status = "interrupted"
        watch.answer(f"interrupted: the static networks {', '.join(cut)} are left out")

    # The seeds that grew, by slot; `ended` (E, S) are the seeds after the last step.
    grown = [{seed["slot"]: seed["blueprint"] for seed in topology["seeds"]} for _, topology in networks]
    under_way = among(ended.stage, UNDER_WAY).tolist()
    left_out = [[name for name, live in zip(engine.space.slots, row, strict=True) if live] for row in under_way]
    kept, left = sum(map(len, grown)), sum(map(len, left_out))
    fossil, best = ended.stage == Stage.FOSSILIZED, engine.view().seeds.stage == Stage.FOSSILIZED
    discarded = int((fossil & ~best).sum())  # fossilized after the best step, which early stopping restored
    germinated = int(episode.attempts.planted.sum())
    seeds = {"germinated": germinated, "fossilized": kept, "unfinished": left, "discarded": discarded}
    explained: list[str] = []
    if status != "failed":  # otherwise the error is the reason for everything
        explained = [
            *explanations(episode.attempts, engine.space, episode.client, config.controller),
            *unfinished(episode.view, config.gates, episode.attempts.allowed_last),
            *thin_splits(task),
        ]
    phases, waits = {**engine.timer.seconds, "writing": run.hub.seconds}, engine.population.waits
    summary = {
        **episode.settings(),
        "status": status,
        **tested,
        "baselines": {name: baselines.as_record(trained, tested["metric"]) for name, trained in static.items()},
        "compared": compared_networks(tested["test_objective"]["grown"], static, host_params, config.reward),
        "seeds": {**seeds, "pruned": germinated - kept - left - discarded},
        "grown": grown,
        "unfinished": left_out,
        **figures.widening_figures(engine, task),
        **stopping_figures(engine.stopping, config, episode.steps),
        "exported": exported_envs,
        "untraced": untraced,
        **engine.governor.record.counts(),
        **engine.seed_history.lists,
        **figures.effort_figures(engine),
        "explanations": explained,
        **({} if episode.pool is None else {"workers": episode.pool.summary()}),
        "seconds": round(seconds, 3),
        "env_steps_per_second": digits(engine.rows * episode.steps / episode.seconds) if episode.steps else None,
        "phase_seconds": {name: round(seconds, 4) for name, seconds in phases.items()},
        **({} if waits is None or not episode.steps else {"reading_p95": digits(Waits.p95(waits.counts))}),
    }
    if status == "failed":
        summary["error"] = describe_error(RolledBack(engine.governor.record.counts()["rollbacks"]))
    return {"verdict": verdict(summary, config.reward), **summary}


@dataclass(eq=False)
class Episode(Observer):
    """Counts the steps of a run's episode, shows them, and writes the checkpoints."""

    task: AnyTask
    config: Config  # the config of the user; that of the engine also has the sensors that the controller needs
    client: Controller
    engine: TaskEngine[Any]
    pool: ShardPool | None  # the workers that hold the networks of the engine; None where this process does
    run: RunFolder
    watch: Progress
    started: float  # time.perf_counter() at the start, as if the run had never been interrupted [seconds]
    view: View = field(init=False)  # the view for the next decision
    decided: Decision | None = None  # the next decision, if it was made already
    attempts: Attempts = field(init=False)  # attempts to plant
    steps: int = 0
    seconds: float = 0.0  # duration of the steps alone

    def begin(self) -> None:
        """Begin a new episode with its first decision, or restore that of the checkpoint from which the run continues."""
        found, client, config = self.run.found, self.client, self.config
        if found is None:
            self.view = self.engine.reset()
            self.attempts = Attempts.none(len(self.view.host_params))
            # a controller that does not fit the task raises here, before anything is written
            self.decided = decide(client, self.view, self.engine.trial)
            return
        with fitting(found):
            client.load_state(found.state["client"])
            self.view = self.engine.restore(found.state["engine"])
            self.steps, self.seconds = (found.state["episode"][name] for name in ("steps", "seconds"))
            self.started -= found.state["episode"]["before"]
            self.attempts = Attempts(**found.state["attempts"])
        if self.steps > config.steps:
            raise InputError(f"steps is {config.steps}, but the run has taken {self.steps}; give {self.steps} or more")

    def going(self, view: View) -> bool:
        """Write a checkpoint if one is due."""
        store = self.run.store
        if store is not None and store.due(self.steps):
            self.run.save(self.steps, self._state)
        if store is not None and self.engine.reads:
            with self.engine.remembering():
                self.run.keep(self.steps, self._state())
        return True

    def stepped(self, step: Step) -> None:
        """Count a step, and report it to the progress display."""
        self.view = step.after
        self.attempts.count(step.view, (step.outcome.actions, step.outcome.refused), *step.further)
        self.steps += 1
        self.seconds += step.seconds
        trace = self.engine.trace
        if trace is not None and (wider := trace.widening) is not None:
            layers = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in wider.widths.items())
            stays = "".join(f"; {name} stays: {why}" for name, why in wider.left_out.items())
            self.watch.note(f"all networks became wider after step {self.steps}: {layers}{stays}")
        rollbacks = int(self.engine.governor.record.found.sum())
        self.watch.step(step.after, self.engine.rows * self.steps / self.seconds, rollbacks)

    def broken(self) -> None:
        """Write a checkpoint of the last whole step, if it is known."""
        self.run.save_kept(whole=self.whole)

    def whole(self, state: dict[str, Any]) -> None:
        """Complete a state of the last whole step by what the workers kept of it."""
        self.engine.remembered(state["engine"])

    def failed(self, view: View) -> None:
        """Write a checkpoint of the steps so far; the controller's error is raised again afterwards."""
        try:
            self.save_at_end()
        except Exception as error:
            self.watch.note(f"no checkpoint could be written after the controller failed: {error}")

    def save_at_end(self) -> None:
        """Write the last checkpoint and wait for it, as a second signal later on would end the process at once."""
        self.run.save(self.steps, self._state)
        if self.run.store is not None:
            self.run.store.join()

    def _state(self) -> dict[str, Any]:
        return {
            "episode": {
                "steps": self.steps,
                "seconds": self.seconds,
                "before": time.perf_counter() - self.started,
            },
            "attempts": dict(vars(self.attempts)),
            "client": self.client.state(),
            "engine": self.engine.snapshot(),
        }

    def settings(self) -> Summary:
        """Return the settings and the progress, as in the summary of a run that fails."""
        config = self.config
        return {
            "status": "failed",
            "task": config.task,
            "controller": config.controller,
            **({"controller_digest": self.client.digest} if self.client.digest else {}),
            "envs": config.envs,
            "steps": config.steps,
            "steps_done": self.steps,
            "epochs_done": epochs_of(self.steps, config, self.task),
            "seed": config.seed,
            "device": str(self.engine.device),
            "rows": self.engine.rows,
            **({} if (waits := self.run.hub.waits()) is None else {"outputs": waits}),
            **({} if (waits := self.watch.waits()) is None else {"progress": waits}),
        }


def _write_networks(
    episode: Episode, folder: Path, networks: Sequence[tuple[nn.Module, dict[str, Any]]], tested: Summary
) -> tuple[list[int], list[int]]:
    """Export the networks that the config asks for, that of the best environment also as `models/best`.

    Returns the environments whose networks were written, and those of them that torch.export cannot trace.
    """
    engine, watch, best = episode.engine, episode.watch, tested["best"]["env"]
    exported: list[int] = {"none": [], "best": [best], "all": list(range(episode.config.envs))}[episode.config.models]
    untraced: list[int] = []
    if exported:
        watch.note(f"exporting {counted(len(exported), 'network')}")
    reasons: dict[str, str] = {}  # why torch.export cannot trace a network, by its host and the seeds in its slots
    for env in exported:
        problem = episode.task.instance(int(engine.space.instance[env]))
        example = map_leaves(lambda leaf: leaf[:2].cpu(), problem.probe.x)
        path = folder / MODELS / f"env-{env:03d}"
        topology = networks[env][1]
        seeds = [[seed[name] for name in ("slot", "blueprint", "blend")] for seed in topology["seeds"]]
        kind = json.dumps([topology["host"], seeds], sort_keys=True)
        failure = save_network(path, *networks[env], example, episode.run.retry, reasons.get(kind))
        if failure is not None:
            reasons[kind] = failure
            untraced.append(env)
    if best in exported:
        source, target = (folder / MODELS / name for name in (f"env-{best:03d}", BEST))
        # A copy and not a link, because links in a run folder are not followed.
        episode.run.retry(
            target, lambda: write_folder(target, {path.name: path.read_bytes() for path in source.iterdir()})
        )
    if untraced:
        some = f"{len(untraced)} of {counted(len(exported), 'network')}"
        have, them = ("has", "it") if len(untraced) == 1 else ("have", "them")
        why = "; or ".join(dict.fromkeys(reasons.values()))
        watch.note(f"{some} {have} no {PROGRAM}, as torch.export cannot trace {them}: {why}")
    return exported, untraced
