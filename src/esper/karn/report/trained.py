"""Write the sections of a report on the training of a controller: learning, health, and what the policy does and reads."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from esper.karn.report.drawing import COLOURS, Figure, ForestRow, Series, curves, forest, on_axis
from esper.karn.report.frame import ReportSection
from esper.karn.run_model import NAN, RunModel
from esper.leyline.intervals import t_interval
from esper.leyline.messages import counted
from esper.nissa.rows import RoundRow

DRAWN_INPUTS = 24  # most inputs of the policy that the figure shows
LEARNING: Mapping[str, str] = {
    "return": "return: sum of the rewards of an episode, mean over environments",
    "validation_objective": "validation J of the networks that the greedy controller grows",
    "validation_kept": "seeds kept in a network of the validation",
    "kept": "seeds kept in an environment",
    "kept_share": "seeds kept, of those planted",
    "decisions": "decisions of an episode other than WAIT",
    "wait": "share of decisions that are WAIT",
    "rollbacks": "rollbacks in all environments together",
    "log_likelihood": "log likelihood of the teacher's decisions, in imitation [nats]",
}
"""The figures of a round that say what the policy achieves, in the order of the page, with their headings."""
HEALTH: Mapping[str, str] = {
    "explained_variance": "explained variance: 1 is a critic that is right, 0 or less one that knows nothing",
    "entropy": "entropy of a decision: 0 is a policy that has stopped exploring [nats]",
    "kl": "kl: how far the last pass of an update moved the policy [nats]",
    "clip_fraction": "share of decisions whose probability was clipped",
    "env_steps_per_second": "environment steps per second",
    "controller_share": "share of the time for deciding and learning",
}
"""Headings of the figures that say how the learner is; others of them have their name."""


def training_sections(model: RunModel) -> list[ReportSection]:
    """Show learning curves, the health of the learner, and what the policy does; return nothing if the run is no training."""
    if not model.rounds:
        return []
    names = list(dict.fromkeys(name for row in model.rounds for name in row.figures))
    training = [("", "grown", model.rounds)]
    learning = round_curves(training, [name for name in LEARNING if name in names], LEARNING)
    health = round_curves(training, [name for name in names if name not in LEARNING], HEALTH)
    many = counted(len(model.rounds), "round")
    wrong: dict[str, list[RoundRow]] = {}  # with the learner, by name
    for row in model.rounds:
        for name in row.anomalies:
            wrong.setdefault(name, []).append(row)
    found = [
        f"In {len(rows)} of {many}, from {_when(rows[0].round)} to {rows[-1].round}: {rows[-1].anomalies[name]}."
        for name, rows in wrong.items()
    ]
    should = "The critic should explain some of the variance of returns (above 0), and the entropy should fall slowly."
    healthy = [should, *(found or ["Nothing was found to be wrong with the learner."])]
    lines = [f"{many}; rounds below 0 are imitation. `esper docs training` explains every figure."]
    validated = [(row.round, row.figures.get("validation_objective")) for row in model.rounds]
    known = [(number, value) for number, value in validated if value is not None]
    if not known:
        lines.append("The controller was not validated.")
    else:
        first, last, best = known[0], known[-1], max(known, key=lambda each: each[1])
        every = (model.config.get("ppo") or {}).get("validate_every")
        when = "" if every is None else f", every {every} rounds and at the end (ppo.validate_every)"
        lines.append(
            f"Validated {counted(len(known), 'time')}{when}: J {first[1]:.4f} at first ({_when(first[0])}), {best[1]:.4f} at "
            f"best ({_when(best[0])}), {last[1]:.4f} at last ({_when(last[0])})."
        )
        before, after = model.validated.get(first[0], ()), model.validated.get(last[0], ())
        change = t_interval([b - a for a, b in zip(before, after, strict=False) if a is not None and b is not None])
        if first[0] != last[0] and len(before) == len(after) and change.size > 1:
            networks = counted(change.size, "network")
            verdict = f"Whether the policy changed is not resolved by {networks}"
            if change.above or change.below:
                verdict = f"The policy became {'better' if change.above else 'worse'}"
            lines.append(
                f"{verdict} from the first validation to the last: J {change:+.4f}, a paired 95 % interval over {networks}, on "
                "the same instances. It covers the choice of instances, not of the run seed."
            )
    # What the policy decides, round by round, and which inputs its decisions depend on.
    rounds = [row.round for row in model.rounds]
    operations = list(dict.fromkeys(name for _, counts in sorted(model.operations.items()) for name in counts))
    series = []
    for index, name in enumerate(operations):
        counts = [[float(model.operations.get(number, Counter())[name])] for number in rounds]
        series.append(Series(name, np.array(counts), f"run{index % COLOURS}"))
    policy: list[str] = []
    figures: list[Figure] = []
    if operations:
        figures.append(curves("Decisions of a round by operation", rounds, series, "round", "decisions"))
    else:
        policy.append("The run kept no rows of decisions (telemetry.level).")
    weights = (model.summary or {}).get("policy_inputs")
    if weights:
        strongest = sorted(weights.items(), key=lambda each: -each[1])[:DRAWN_INPUTS]
        read = [ForestRow(name, weight, NAN, NAN, "plain", f"{name}: {weight:.2f}") for name, weight in strongest]
        figures.append(forest("What the policy looks at", read, "squared weights in the first layer, 1 is the mean"))
        policy.append(
            "The last figure says what the policy looks at, after the last round: how strongly its first layer reads each "
            f"input, the {min(len(weights), DRAWN_INPUTS)} strongest of {len(weights)}. 1 is the mean of all inputs of the "
            "environment, or of a slot, and about what every input has before the training. `esper docs observation` explains "
            "every input; a ? behind a name is the flag that says whether it was measured."
        )
    else:
        policy.append("What the policy looks at is known when the training has ended.")
    return [
        ReportSection("training", "Training", lines, figures=learning),
        ReportSection("health", "Health of the learner", healthy, figures=health),
        ReportSection("policy", "What the policy does and looks at", policy, figures=figures),
    ]


def round_curves(
    trainings: Sequence[tuple[str, str, Sequence[RoundRow]]], names: Iterable[str], headings: Mapping[str, str]
) -> list[Figure]:
    """Draw figures of rounds, with a line for each training, which has a name, a style and rows; leave out those without values.

    A line whose training has an empty name has that of the figure.
    """
    rounds, figures = sorted({row.round for _, _, rows in trainings for row in rows}), []
    for name in names:
        series, words = [], name.replace("_", " ")
        for training, style, rows in trainings:
            values = np.array([[row.figures.get(name)] for row in rows], float)
            series.append(Series(training or words, on_axis(rounds, [row.round for row in rows], values), style))
        figures.append(curves(headings.get(name, words), rounds, series, "round", "", 180))
    return [figure for figure in figures if figure.absent is None]


def _when(number: int) -> str:
    return "after imitation" if number < 0 else f"round {number}"
