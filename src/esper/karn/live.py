"""What a window on a run shows, kept up to date row by row in bounded memory. T steps, E environments, S slots."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from esper.leyline.stages import Stage
from esper.nissa.rows import (
    DecisionRow,
    EpisodeRow,
    LifecycleRow,
    MeasurementRow,
    RollbackRow,
    RoundRow,
    Row,
    RunRow,
    StepRow,
)

Floats = NDArray[np.float64]

POINTS = 512
"""Most points of a curve; when it has twice as many, every second one is dropped."""
LOGGED = 12
"""Last events of each environment that are kept."""
TROUBLES = 200
"""Last rollbacks that are kept."""
TIMED = 32
"""Last steps or rounds from which the pace is worked out."""

EMPTY = frozenset({Stage.DORMANT, Stage.PRUNED, Stage.EMBARGOED})


class Curve:
    """Values over steps or rounds, at most `POINTS` to 2 `POINTS` of them. Which are kept does not depend on how they come in."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[tuple[float, ...]] = []
        self._every, self._count = 1, 0

    def add(self, x: float, *y: float) -> None:
        """The values at one place."""
        if self._count % self._every == 0:
            self.x.append(x)
            self.y.append(y)
        self._count += 1
        if len(self.x) >= 2 * POINTS:
            self.x, self.y, self._every = self.x[::2], self.y[::2], 2 * self._every


class Cell(NamedTuple):
    """One slot of one environment.

    Attributes:
        stage (Stage): its stage
        alpha (float): its dose
        blueprint (str or None): the seed in it
        contribution (float): contribution of the seed to the metric; nan if it was not measured
        error (float): its standard error
    """

    stage: Stage
    alpha: float
    blueprint: str | None
    contribution: float
    error: float


class LiveModel:
    """The state of a run as its rows have told it so far.

    head: the first row; None before it. status: of the last `run` row. episode, step: of the last step row, -1 before it.
    curves: by name, over steps, with the 10th, the 50th and the 90th percentile over environments; over rounds in a training.
    rows: number of rows read. rollbacks: of all environments. kept, pruned, planted: seeds so far.
    """

    def __init__(self, rounds: range | None = None) -> None:
        """`rounds` are those of a training, of which the ones of imitation are below 0; None for other runs."""
        self.rounds = rounds
        self.head: RunRow | None = None
        self.status = "starting"
        self.error: str | None = None
        self.episode = self.step = -1
        self.round, self._rounds_seen = 0, 0
        self.curves: dict[str, Curve] = {}
        self.troubles: deque[RollbackRow] = deque(maxlen=TROUBLES)
        self.rows = self.rollbacks = self.kept = self.pruned = self.planted = 0
        nothing = np.zeros((0, 0))
        self._stages = nothing.astype(np.int64)  # (E, S), as the next three
        self._alphas: Floats = nothing
        self._contributions: Floats = nothing
        self._errors: Floats = nothing
        self._seeds: dict[tuple[int, str], str | None] = {}
        self._logs: dict[int, deque[str]] = {}
        self._times: deque[float] = deque(maxlen=TIMED)

    def update(self, rows: Iterable[Row]) -> None:
        """Take in rows, in order."""
        for row in rows:
            self.rows += 1
            match row:
                case RunRow():
                    self._begin(row)
                case RoundRow():
                    self._take_round(row)
                case StepRow() if row.cohort is UNSET:
                    self._take_step(row)
                case LifecycleRow() if row.cohort is UNSET:
                    self._take_change(row)
                case DecisionRow() if row.cohort is UNSET:
                    self._take_decision(row)
                case MeasurementRow() if row.cohort is UNSET:
                    if row.contribution_means is not None and row.contribution_ses is not None:
                        self._contributions = np.array(row.contribution_means, np.float64)
                        self._errors = np.array(row.contribution_ses, np.float64)
                case RollbackRow():
                    self._take_rollback(row)
                case EpisodeRow() if row.cohort is UNSET:
                    grown = ", ".join(f"{name} at {slot}" for slot, name in row.grown.items()) or "nothing"
                    self._log(row.env, f"end of episode {row.episode}: grew {grown}")

    @property
    def slots(self) -> Sequence[str]:
        """Names of the slots."""
        return () if self.head is None else self.head.slots

    @property
    def envs(self) -> int:
        """Environments that are shown; 0 before the first step row."""
        return len(self._stages)

    def cell(self, env: int, slot: int) -> Cell:
        """One slot of one environment as it is now."""
        stage, alpha = self.state(env, slot)
        seed = None if stage in EMPTY else self._seeds.get((env, self.slots[slot]))
        value = error = float("nan")
        if seed is not None and env < len(self._contributions):
            value, error = float(self._contributions[env, slot]), float(self._errors[env, slot])
        return Cell(stage, alpha, seed, value, error)

    def state(self, env: int, slot: int) -> tuple[Stage, float]:
        """Stage and dose of one slot of one environment as it is now."""
        return Stage(int(self._stages[env, slot])), float(self._alphas[env, slot])

    def log(self, env: int) -> list[str]:
        """The last events of an environment, the newest first."""
        return list(reversed(self._logs.get(env, ())))

    def done(self) -> tuple[int, int]:
        """Steps that are done, and those of the episode; rounds in a training."""
        if self.rounds is not None:
            return (self.round - self.rounds.start + 1 if self._rounds_seen else 0), len(self.rounds)
        return self.step + 1, 0 if self.head is None else self.head.steps

    def seconds_left(self) -> float:
        """Time until the end of the episode or the training at the pace of the last steps or rounds; nan if unknown [seconds]."""
        done, whole = self.done()
        if not whole or len(self._times) < 2 or self.status != "running":
            return float("nan")
        pace = float(np.median(np.diff(self._times)))
        return pace * max(whole - done, 0)

    def _begin(self, row: RunRow) -> None:
        self.status, self.error = row.status, row.error
        if self.head is None or row.status == "running":
            self.head = row
            self._times.clear()

    def _take_round(self, row: RoundRow) -> None:
        self.round, self._rounds_seen = row.round, self._rounds_seen + 1
        self._times.append(row.time)
        for name, value in row.figures.items():
            if value is not None:
                self.curves.setdefault(name.replace("_", " "), Curve()).add(row.round, value, value, value)

    def _take_step(self, row: StepRow) -> None:
        if row.episode != self.episode:
            self.curves.clear()
        self.episode, self.step = row.episode, row.step
        self._stages, self._alphas = np.array(row.stages, np.int64), np.array(row.alphas, np.float64)
        # a measurement row follows if a seed was measured
        self._contributions, self._errors = np.full((2, *self._stages.shape), np.nan)
        self._times.append(row.time)
        figures = {
            "metric": row.metrics,
            "metric of the twins": row.twin_metrics,
            "loss": row.losses,
            "added parameters": row.added_param_counts,
        }
        for name, values in figures.items():
            known = np.array([value for value in (values if values is not None else ()) if value is not None], float)
            if known.size:
                self.curves.setdefault(name, Curve()).add(row.step, *np.percentile(known, (10, 50, 90)).tolist())

    def _take_change(self, row: LifecycleRow) -> None:
        self._seeds[row.env, row.slot] = row.blueprint
        self.planted += row.to_stage == Stage.GERMINATED.name
        self.kept += row.to_stage == Stage.FOSSILIZED.name
        self.pruned += row.to_stage == Stage.PRUNED.name
        seed = f"{row.blueprint} " if row.blueprint else ""
        why = f": {row.why}" if row.why else ""
        self._log(row.env, f"step {row.step}: {seed}at {row.slot} {row.from_stage} to {row.to_stage}{why}")

    def _take_decision(self, row: DecisionRow) -> None:
        if row.refusal is not None:
            where = row.slot or "no slot"
            self._log(row.env, f"step {row.step}: {row.op} at {where} refused: {row.refusal.replace('_', ' ')}")
        if row.probabilities is not None and row.value is not None:
            chosen = next((value for value in row.probabilities if value is not None), None)
            sure = "" if chosen is None else f", probability {chosen:.2f}"
            self._log(
                row.env, f"step {row.step}: the policy chose {row.op} at {row.slot}{sure}, value {row.value:+.3f}"
            )

    def _take_rollback(self, row: RollbackRow) -> None:
        self.rollbacks += 1
        self.troubles.append(row)
        if not row.twin and row.cohort is UNSET:
            self._log(row.env, f"step {row.step}: restored to its last snapshot: {row.reason.replace('_', ' ')}")

    def _log(self, env: int, words: str) -> None:
        self._logs.setdefault(env, deque(maxlen=LOGGED)).append(words)
