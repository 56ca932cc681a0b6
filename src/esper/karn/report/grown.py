"""Write the sections of a report on what grew: curves, stages, what seeds were worth, sensors, and sizes of a whole network."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from esper.karn.report.drawing import COLOURS, Figure, ForestRow, Series, curves, forest, heat_map, timeline
from esper.karn.report.frame import ReportSection
from esper.karn.run_model import NO_SEED, SIZE_CURVES, RunModel
from esper.karn.terminal.console import DESCRIPTIONS, Table
from esper.leyline.intervals import differences, mean_and_error, plus_minus, t_interval
from esper.leyline.lifecycle.vocabulary import IN_BUDGET, Refusal, Stage, among
from esper.leyline.messages import counted

DRAWN_READINGS = 48  # most columns of a figure of sensors or seeds
DRAWN_SEEDS = 12  # most rows of the figure of what grew where, those that most environments had for the longest time
Integers = NDArray[np.int64]
BANDS = "Lines are medians over environments; bands reach from the 10th to the 90th percentile."


def first_figures(model: RunModel) -> list[Figure]:
    """Draw what grew where over time, the metric over time beside that of the twins, and differences from static networks."""
    figures: list[Figure] = []
    population, head, summary = model.population, model.head, model.summary or {}
    metric = str(summary.get("metric", "metric"))
    if population is not None and head is not None:
        steps = _chosen(population.steps)
        counts = {
            f"{blueprint} at {slot}": (population.seed[steps, :, s] == k).sum(1)
            for s, slot in enumerate(head.slots)
            for k, blueprint in enumerate(head.blueprints)
            if (population.seed[:, :, s] == k).any()
        }
        most = sorted(counts, key=lambda name: -int(counts[name].sum()))[:DRAWN_SEEDS]
        names = [name for name in counts if name in most]
        if names:
            values = np.array([counts[name] for name in names], float)
            columns = [str(step) for step in population.steps[steps].tolist()]
            title = "What grew where over time: environments with each seed after each step"
            figures.append(heat_map(title, names, columns, values, "step"))
        grown = [Series("grown", population.metric, "grown")]
        if population.twin is not None:
            grown.append(Series("twin, which never grows", population.twin, "twin"))
        title = f"{metric} on the probe split"
        figures.append(curves(title, population.steps.tolist(), grown, "step", metric))
    rows = []
    for name, static in summary.get("baselines", {}).items() if "grown_params" in summary else ():
        values = static.get(f"test_{metric}")
        if values is None:
            continue
        found = t_interval(differences(summary[f"test_{metric}"]["grown"], values))
        if not np.isnan(found.mean):
            style = "kept" if found.above else "pruned" if found.below else "plain"
            what = f"{name}, {DESCRIPTIONS.get(name, 'a static network')}"
            rows.append(ForestRow(name, found.mean, found.low, found.high, style, f"{what}: {found:+.4f}"))
    if rows:
        title = "The grown networks less each static network, on the test split"
        figures.append(forest(title, rows, f"difference of {metric}, paired, with its 95 % interval"))
    return figures


def curves_section(model: RunModel) -> ReportSection | None:
    """Show loss and added parameters over the steps."""
    population = model.population
    if population is None:
        return None
    steps = population.steps.tolist()
    losses = [Series("probe", population.loss, "grown"), Series("training", population.train_loss, "third")]
    added = [Series("added", population.added.astype(float), "grown")]
    figures = [
        curves("Loss", steps, losses, "step", "loss"),
        curves("Added parameters", steps, added, "step", "parameters"),
    ]
    return ReportSection("curves", "Over time", [BANDS], figures=figures)


def growth_section(model: RunModel) -> ReportSection | None:
    """Return the stages of every slot, and whether a limit held growth back."""
    population, head = model.population, model.head
    if population is None or head is None:
        return None
    first, last = int(population.steps[0]), int(population.steps[-1]) + 1
    envs = population.metric.shape[1]
    figures = []
    for s, slot in enumerate(head.slots):
        stays = [stay for stay in model.stays if stay.slot == s]
        figures.append(timeline(slot, stays, envs, first, last))
    # Whether the limits on seeds and parameters were reached, and how many decisions they closed or refused.
    lifecycle = model.config.get("lifecycle") or {}
    seeds, incubating = lifecycle.get("max_seeds"), lifecycle.get("max_training_seeds")
    stage = population.stage[:-1]  # before every decision but the first
    free = (stage == Stage.DORMANT).any(2)
    full = among(stage, IN_BUDGET).sum(2) >= seeds if seeds is not None else np.zeros(free.shape, bool)
    busy = np.zeros(free.shape, bool)
    if incubating is not None:
        busy = ~full & (((stage == Stage.TRAINING) | (stage == Stage.GERMINATED)).sum(2) >= incubating)
    lines = []
    for name, limit, closed in (
        ("in an environment at once (lifecycle.max_seeds)", seeds, full & free),
        ("in TRAINING at once (lifecycle.max_training_seeds)", incubating, busy & free),
    ):
        if limit is None:
            continue
        line = f"At most {counted(limit, 'seed')} {name}: "
        if not closed.any():
            lines.append(f"{line}it was never what stood against planting into an empty slot.")
            continue
        line += (
            f"it closed planting at {closed.sum():,} of {free.sum():,} decisions with an empty slot, in "
            f"{closed.any(0).sum()} of {counted(closed.shape[1], 'environment')}."
        )
        opened = closed[:-1] & ~closed[1:] & free[1:]
        if opened.any():
            planted = (population.seed[1:-1] == NO_SEED) & (population.seed[2:] != NO_SEED)
            cases = f"{(opened & planted.any(2)).sum()} of {counted(int(opened.sum()), 'case')}"
            line += f" Where it opened again, a seed was planted at once in {cases}."
        lines.append(line)
    reward, governor = (model.config.get(key) or {} for key in ("reward", "governor"))
    caps = {
        "governor.param_limit, which refuses seeds": governor.get("param_limit"),
        "reward.param_budget, above which the reward has a penalty": reward.get("param_budget"),
    }
    limits = [f"{value} of the host's parameters ({key})" for key, value in caps.items() if value is not None]
    most = population.added.max()
    lines.append(f"Limits on parameters: {'; '.join(limits) or 'none'}. Most that were added at once: {most:,}.")
    held = {reason: model.refused[reason.name.lower()] for reason in Refusal if reason > Refusal.MASKED}
    refused = ", ".join(f"{count:,} because {reason.meaning}" for reason, count in held.items() if count)
    lines.append(
        f"Plantings that the controller chose and a limit refused: {refused or 'none'}. A controller is shown which decisions "
        "are open and chooses among them, so a limit mostly shows in the decisions that it closed."
    )
    lines += [
        "One line for each environment, time to the right; a paler colour is a smaller alpha, the strength at which a seed "
        "acts. GERMINATED and PRUNED last less than a step and are drawn as marks. Point at a stage or a mark, or move to a "
        "figure with the tab key and through it with the arrow keys, to read what it is and why.",
    ]
    seeds, names = population.seed[-1], list(head.blueprints)
    counts = [[(seeds[:, s] == k).sum() for k in (*range(len(names)), NO_SEED)] for s in range(seeds.shape[1])]
    title = f"Environments with each seed in each slot, after step {population.steps[-1]}"
    paper = heat_map(title, list(head.slots), [*names, "empty"], np.array(counts).astype(float), "blueprint")
    return ReportSection("growth", "What grew, where and when", lines, figures=figures, papers=[paper])


def worth_section(model: RunModel) -> ReportSection | None:
    """Show contributions over time, Shapley values and interactions."""
    if not model.contributions or model.head is None:
        return None
    steps, measured = zip(*model.contributions, strict=True)
    slots, values = model.head.slots, np.array(measured)
    series = [Series(slot, values[:, :, s], f"run{s % COLOURS}") for s, slot in enumerate(slots)]
    figures: list[Figure] = [curves("Contribution of the seeds in each slot", steps, series, "step", "contribution")]
    lines = [BANDS, "A contribution counts for seeds that act, with alpha above 0."]
    section = ReportSection("worth", "What the seeds were worth", lines, figures=figures)
    shapley, interaction = model.coalitions.get("shapley"), model.coalitions.get("interaction")
    if shapley is None or not np.isfinite(shapley).any():
        lines.append(
            "Shapley values and interactions were not measured (probe.coalitions_every, or never two seeds at once)."
        )
        return section
    rows = []
    for slot, column in zip(slots, shapley.T, strict=True):
        known = column[np.isfinite(column)]
        if known.size:
            mean, low, high, count = t_interval(known.tolist())
            name = f"{slot}, {counted(count, 'environment')}"
            rows.append(ForestRow(name, mean, low, high, "kept" if mean > 0 else "pruned", f"{name}: {mean:+.4f}"))
    figures.append(forest("Shapley values by slot", rows, "Shapley value, with its 95 % interval over environments"))
    lines.append(
        "A Shapley value shares the metric that all seeds of a network brought together fairly among them. It is the last that "
        "was measured in an environment; the figure has means over environments with 95 % t intervals."
    )
    pairs = []
    for first, second in combinations(range(len(slots)), 2):
        found = [] if interaction is None else interaction[:, first, second].tolist()
        if finite := [each for each in found if np.isfinite(each)]:
            name = f"{slots[first]} with {slots[second]}"
            pairs.append((name, plus_minus(*mean_and_error(finite)), f"{len(finite)}"))
    if not pairs:
        lines.append("No environment had two seeds that acted together when interactions were measured.")
        return section
    caption = "Interactions of pairs of seeds: means over environments ± standard error, of the last that were measured"
    return section._replace(tables=[Table(caption, ("slots", "interaction", "environments"), pairs)])


def sensors_section(model: RunModel) -> ReportSection | None:
    """Return the growth sensors of every slot over time, beside what was decided there."""
    if not model.sensed or model.head is None:
        return None
    taken, (sensors, *_), measured = zip(*model.sensed, strict=True)
    chosen = _chosen(taken)
    steps, figures = np.array(taken)[chosen], []
    for s, slot in enumerate(model.head.slots):
        names, rows = ["planted", "pruned", "kept"], []
        for stage in (Stage.GERMINATED, Stage.PRUNED, Stage.FOSSILIZED):
            # How many fall between the step before and each step, this one included.
            at = [stay.start for stay in model.stays if stay.slot == s and stay.stage == stage]
            place = np.searchsorted(steps, np.array(at, int))
            rows.append(np.bincount(place[place < len(steps)], minlength=len(steps)).astype(float))
        for name, medians in zip(sensors, np.array(measured)[chosen, s].T, strict=True):
            known = medians[np.isfinite(medians)]
            names.append(f"{name} ({known.min():.3g} to {known.max():.3g})" if known.size else name)
            rows.append(medians)
        columns = [str(step) for step in steps.tolist()]
        figures.append(heat_map(slot, names, columns, np.vstack(rows), "step", by_row=True))
    lines = [
        "Sensors are measurements of the stream at a slot that show where a network is short of something; "
        "`esper docs observation` explains each. A cell is the median over environments, darker where it is larger; every row "
        "has its own scale, from its least to its largest value in brackets.",
        "The rows above the sensors count the seeds that were planted, pruned and kept since the column before.",
    ]
    return ReportSection("sensors", "Sensors beside what was decided", lines, figures=figures)


def size_section(model: RunModel) -> ReportSection:
    """Return what came out, and the sizes and the loss over the steps, of a run that has rows of sizes."""
    last, grown = model.sizes[-1], [row for row in model.sizes if row.widths]
    first = model.head.host_param_counts[0] if model.head is not None else last.params
    sizes = " -> ".join(f"{number:,}" for number in [first, *(row.params for row in grown)])
    lines = [
        f"{sizes} parameters after {counted(last.step, 'step')} and {counted(last.seen, 'target')}.",
        f"{'It is' if grown else 'Nothing grew: it is'} not larger, as {model.why_not_larger}.",
    ]
    rows = [
        (
            f"{row.step:,}",
            f"{row.seen:,}",
            f"{row.params:,}",
            ", ".join(f"{layer} {widths[0]} to {widths[1]}" for layer, widths in row.widths.items()),
            "not looked at" if row.loss is None else f"{row.loss:.4g}",
            f"{row.seconds or 0.0:.2f}",
            row.why or "",
        )
        for row in grown
    ]
    names = ("step", "targets seen", "parameters", "widths", "loss on the probe", "seconds", "why it became wider")
    table = Table("Growths", names, rows, texts=(3, 6))
    figures = list[Figure]()
    for field, name in SIZE_CURVES.items():
        known = [(row.step, float(value)) for row in model.sizes if (value := getattr(row, field)) is not None]
        steps, values = zip(*known, strict=True) if known else ((), ())
        figures.append(curves(name, steps, [Series(name, np.array(values)[:, None], "grown")], "step", "", 180))
    shown = [figure for figure in figures if figure.absent is None]
    return ReportSection("result", "What came out", lines, [table] if rows else [], shown)


def _chosen(steps: Sequence[int] | Integers) -> Integers:
    """Return the indices of at most `DRAWN_READINGS` steps, the first and the last among them."""
    return np.unique(np.linspace(0, len(steps) - 1, min(len(steps), DRAWN_READINGS)).round().astype(int))
