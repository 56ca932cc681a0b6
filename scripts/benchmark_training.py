"""Measures the whole training loop: what a policy that acts, its rollout, its updates and rows of events add to the engine.

    python scripts/benchmark_hot_path.py --table training [--quick] [--json FILE] [--page FILE] [--repeats N] [--device cpu]

Every episode is played to its end by the controller that learns (`SimicClient`: act, store) with the reward `delta`, and
followed by a PPO update at the defaults; rows of events are written to a file. Ways of a case, such as the levels of telemetry,
take turns, episode by episode. Seconds by the clock, medians over episodes. EPS are environment steps a second, the update
included; *p95* is that of a whole step from one decision to the next. Shares are of an episode with its update: *engine* is the
step of all environments, *acting* a forward pass of the policy and the sampling, *storing* rewards and rollout, *updating* PPO,
and *rows* making and writing them. *of the engine* is the time of a loop that waits in every step, over that of this loop.

Cases: by E, with levels of telemetry; 25 rounds of four environments, 100 episodes in all, as a standard run; E = 8 by parameters
and live seeds, which neither come nor go where there are any; and with products in bfloat16 or compiled passes.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from floors import carry_out
from machine import machine_line

from esper.leyline.config.tree import Config, build_config
from esper.leyline.data.task import AnyTask
from esper.leyline.lifecycle.vocabulary import LIVE, Actions, Op, among
from esper.nissa.hub import Hub, JsonLines
from esper.runs.train import settings_of_policy
from esper.simic.client import SimicClient
from esper.simic.ppo import PPO
from esper.simic.rewards import get_reward
from esper.tamiyo.policy.controller import Language, Policy
from esper.tasks.catalog import get_task
from esper.tasks.small import digits_narrow
from esper.tolaria.engine import Observer, Step, VectorizedEngine, play
from esper.tolaria.journal import Journal
from esper.tolaria.runtime import multiplies_bfloat16

LEVELS = ("off", "run", "step", "debug")
SHARES = ("engine", "acting", "storing", "updating", "rows")
HELD = 10**6
"""Steps that no seed reaches: it cannot be kept or pruned before."""


@dataclass(frozen=True)
class TrainingCase:
    """Describes a population that a policy grows, and the ways that are compared."""

    envs: int
    width: int | None = None  # of a host of four equal blocks; None is digits-narrow's own host
    live: int = 0  # seeds that live in every environment from the first step to the last
    steps: int = 24
    levels: tuple[str, ...] = ("off",)
    ways: tuple[str, ...] = ("eager",)
    episodes: int | None = None  # how many are played; None is `--repeats`

    def title(self) -> str:
        """Name what differs from the other cases."""
        host = "" if self.width is None else f", blocks of {self.width}"
        return f"E = {self.envs}{host}, {self.live} live seeds, {self.steps} steps"


def cases(quick: bool) -> list[TrainingCase]:
    """List all cases."""
    if quick:
        return [
            TrainingCase(4, steps=3, levels=("off", "step")),
            TrainingCase(4, width=12, live=1, steps=3, ways=("eager", "bf16")),
        ]
    ways = ("eager", "bf16", "compiled")
    return [
        *(TrainingCase(envs, levels=LEVELS) for envs in (4, 64, 256)),
        TrainingCase(4, episodes=25),
        *(TrainingCase(8, width=width, live=live, steps=8) for width in (12, 74, 245) for live in (0, 1, 3)),
        TrainingCase(64, live=2, ways=ways, steps=8),
        TrainingCase(8, width=74, live=3, ways=ways, steps=8),
        TrainingCase(8, width=245, live=3, ways=ways[:2], steps=8),
    ]


class EpisodeSeconds(NamedTuple):
    """Holds the seconds of an episode with its update, and of its parts."""

    whole: float
    parts: Mapping[str, float]
    steps: Sequence[float]  # of each step, from one decision to the next


class Clock(Observer):
    """Adds up the seconds of the parts of an episode."""

    def __init__(self) -> None:
        self.parts, self.ends = dict.fromkeys(SHARES, 0.0), list[float]()

    def of(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts the seconds of its calls as those of a part."""

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.parts[name] += time.perf_counter() - begin

        return timed

    def stepped(self, step: Step) -> None:
        """Note the end of a step, its rows included."""
        self.ends.append(time.perf_counter())
        self.parts["engine"] += step.seconds


class Loop:
    """Holds a population, the controller that learns on it, and the file of its rows."""

    def __init__(self, case: TrainingCase, task: AnyTask, way: str, level: str, device: str, path: Path) -> None:
        self.case, self.device = case, device
        births = 2 * case.live
        lifecycle = {"max_seeds": case.live, "max_training_seeds": case.live, "min_prune_age": HELD}
        self.config: Config = build_config(
            task.defaults,
            {"envs": case.envs, "steps": case.steps + births, "device": device, "baselines": []},
            {"lifecycle": lifecycle, "gates": {"permissive": True, "min_training_steps": 0, "min_holding_steps": HELD}}
            if case.live
            else {},
            {"amp": "bf16"} if way == "bf16" else {"compile": "on"} if way == "compiled" else {},
        )
        self.engine = VectorizedEngine(task, self.config)
        language = Language.of([self.engine.space], self.config.ppo.packages)
        ppo = self.config.ppo
        policy = Policy.fresh(language, 0, settings_of_policy(self.config), ppo.decisions_per_step, ppo.undo_bias)
        self.client = SimicClient(PPO(policy, ppo, self.config.seed), get_reward(self.config.reward))
        self.hub = Hub([JsonLines(path)], level)  # type: ignore[arg-type]
        self.number = 0

    def begin(self) -> None:
        """Begin an episode whose environments have their live seeds."""
        self.engine.reset(episode=self.number)
        self.number += 1
        for slot in range(self.case.live):
            for op in (Op.GERMINATE, Op.ADVANCE):
                carry_out(self.engine, op, slot, np.arange(self.case.envs))
        assert among(self.engine.state.seeds.stage, LIVE).sum() == self.case.live * self.case.envs

    def play(self) -> EpisodeSeconds:
        """Play an episode and update the policy."""
        self.begin()
        clock, client = Clock(), self.client
        journal = Journal(self.engine, self.hub, None, lambda: client.paid)
        journal.stepped = clock.of("rows", journal.stepped)  # type: ignore[method-assign]
        act, further, store = client.act, client.further, client.store
        client.act, client.further = clock.of("acting", act), clock.of("acting", further)  # type: ignore[method-assign]
        client.store = clock.of("storing", store)  # type: ignore[method-assign]
        begin = time.perf_counter()
        try:
            play(self.engine, client, journal, clock)
        finally:
            client.act, client.further, client.store = act, further, store  # type: ignore[method-assign]
        clock.of("updating", client.update)()
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        whole = time.perf_counter() - begin
        clock.parts["engine"] -= clock.parts["acting"] + clock.parts["storing"]
        return EpisodeSeconds(whole, clock.parts, np.diff([begin, *clock.ends]).tolist())

    def waiting(self) -> float:
        """Play an episode whose environments wait, without rows and rollout; returns its seconds."""
        self.begin()
        wait, begin = Actions.wait(self.case.envs), time.perf_counter()
        while not self.engine.over:
            self.engine.step(wait)
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def measure(case: TrainingCase, repeats: int, device: str) -> dict[str, Any]:
    """Play one episode of every way of a case in turn, `repeats` times; the first of each is left out."""
    torch.set_num_threads(1)
    task = (
        get_task("digits-narrow") if case.width is None else digits_narrow(hidden=(case.width,) * 4, width=case.width)
    )
    ways = [(way, level) for way in case.ways for level in case.levels]
    ways = [(way, level) for way, level in ways if way != "bf16" or multiplies_bfloat16(torch.device(device))]
    rows, repeats = [], case.episodes or repeats
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            (way, level): Loop(case, task, way, level, device, Path(folder) / f"{way}-{level}") for way, level in ways
        }
        played: dict[tuple[str, str], list[EpisodeSeconds]] = {name: [] for name in loops}
        waited: dict[tuple[str, str], list[float]] = {name: [] for name in loops}
        for turn in range(repeats + 1):
            for name, loop in loops.items():
                found, alone = loop.play(), loop.waiting()
                if turn:
                    played[name].append(found)
                    waited[name].append(alone)
        params = int(next(iter(loops.values())).engine.population.body.table.host_params.max())
        for (way, level), episodes in played.items():
            whole = statistics.median(each.whole for each in episodes)
            row = {"E": case.envs, "host parameters": params, "live": case.live, "way": way, "level": level}
            row |= {"episodes": len(episodes) * case.envs, "seconds": sum(each.whole for each in episodes)}
            row |= {"EPS": case.envs * case.steps / whole}
            row |= {"p95 [ms]": 1e3 * float(np.quantile([step for each in episodes for step in each.steps], 0.95))}
            for name in SHARES:
                row[name] = statistics.median(each.parts[name] / each.whole for each in episodes)
            alone = zip(waited[way, level], episodes, strict=True)
            row["of the engine"] = statistics.median(seconds / each.whole for seconds, each in alone)
            rows.append(row)
    return {"title": case.title(), "case": asdict(case), "rows": rows}


def show(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown, of every way of every case."""
    columns = list(results[0]["rows"][0])

    def cell(name: str, value: Any) -> str:
        if name in SHARES:
            return f"{value:.1%}"
        return (
            f"{value:,.2f}" if name == "of the engine" else f"{value:,.1f}" if isinstance(value, float) else str(value)
        )

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for result in results:
        lines += ["| " + " | ".join(cell(name, row[name]) for name in columns) + " |" for row in result["rows"]]
    return lines


def findings(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say what a policy that plants costs beside one that waits, by the size of the hosts, and what rows of level step cost."""

    def times(ratios: Sequence[float]) -> str:
        least, most = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
        return least if least == most else f"{least} to {most}"

    planting: dict[int, list[float]] = {}
    off: dict[int, float] = {}  # seconds, by E
    for row in rows:
        if not row["live"]:
            planting.setdefault(int(float(f"{row['host parameters']:.1g}")), []).append(1 / row["of the engine"])
        if row["level"] == "off":
            off.setdefault(row["E"], row["seconds"])
    costs = ", ".join(
        f"{times(ratios)} for hosts of some {size:,} parameters" for size, ratios in sorted(planting.items())
    )
    step = ", ".join(
        f"{row['seconds'] / off[row['E']]:.2f} for {row['E']} environments (rows {row['rows']:.1%})"
        for row in rows
        if row["level"] == "step"
    )
    return (
        "The time of a loop in which a policy plants, over that of one that waits in every step: "
        f"{costs}. It goes to seeds of many kinds, each in a stack of its own, and not to the policy, its rollout or the rows. "
        f"The time at level `step` over that at level `off`, by the clock: {step or 'not measured'}. Such ratios hold the noise "
        "of the other processes, so the bound of 2 % in `scripts/check_speed.py` is on another figure: the seconds of the "
        "processor in which rows are made and written, as a share of those of the steps at level `off` "
        "([telemetry](telemetry.md))."
    )


def page(report: Mapping[str, Any]) -> str:
    """Return the page of the figures, in Markdown."""
    begin, _, rest = (__doc__ or "").partition("\n\n    ")
    _, _, explained = rest.partition("\n\n")
    command = "python scripts/benchmark_hot_path.py --table training"
    lines = [
        "# Benchmark: the training loop",
        "",
        begin,
        "",
        f"`{command}`: {machine_line(dict(report))}." + ("" if "capability" in report else " It has not run on a GPU."),
        "",
        findings([row for result in report["results"] for row in result["rows"]]),
        "",
        explained.strip(),
        "",
    ]
    return "\n".join([*lines, *show(report["results"]), ""])
