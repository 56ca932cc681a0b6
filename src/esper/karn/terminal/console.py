"""Print the tables and lines of commands at their end. They are never cut, however narrow the terminal is."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.segment import Segments
from rich.table import Table as RichTable
from rich.text import Text

from esper.leyline.intervals import differences, mean_and_error, plus_minus, t_interval
from esper.leyline.messages import counted, listed, printable

_LONG_WAIT = 0.03  # share of a run that the wait for outputs may have without being mentioned
SHOWN_GROWN = 4  # kinds of grown seeds by slot that are printed; the report has all of them
FEW = 4  # with fewer environments, a line says that the intervals are wide
FEW_EXAMPLES = 30  # a warning is shown for splits with fewer examples
_WIDE = 11  # width of the column of parameters, so that the table fits into 80 columns [characters]


class Table(NamedTuple):
    """Holds a table; the first cell of a row is its name, and `texts` are the columns of words, which may wrap."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: Sequence[int] = ()


def print_table(console: Console, table: Table) -> None:
    """Print a table without its caption. Columns are never cut; in a narrower terminal, long lines continue on the next line.

    rich itself would replace the end of a number by an ellipsis, or leave out a column.
    """
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(map(printable, table.columns)):
        justify: Literal["left", "right"] = "left" if index in (0, *table.texts) else "right"
        cells, whole = [printable(row[index]) for row in table.rows], index not in table.texts
        width = max(map(cell_len, (name, *cells))) if whole else None
        drawn.add_column(Text(name), justify=justify, no_wrap=whole, min_width=width, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    least = Measurement.get(console, console.options.update(width=10_000), drawn).minimum
    options = console.options.update(width=max(console.width, least))
    lines = console.render_lines(drawn, options, pad=False, new_lines=True)
    console.print(Segments(chain.from_iterable(lines)), crop=False, no_wrap=True, overflow="ignore", end="")


def print_lines(console: Console, *lines: str) -> None:
    """Print texts without markup, with control characters escaped; in a narrower terminal a line continues on the next one."""
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def worker_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return how many workers played for the summary of a run or the record of an evaluation, and the time that they waited."""
    workers = summary.get("workers")
    if workers is None:
        return []
    lost = f", {workers['lost']} lost and replaced" if workers["lost"] else ""
    return [
        f"{counted(workers['number'], 'worker')}{lost}, {workers['waiting_seconds']:,.1f} s lost in waiting, together"
    ]


def output_lines(waited: float, whole: float) -> list[str]:
    """Return what to do where a run of `whole` seconds waited long for full queues of outputs [seconds]."""
    if waited <= _LONG_WAIT * whole:
        return []
    return [
        f"the run waited {waited:,.1f} s, {waited / whole:.0%} of its time, because an output was slower than its rows came; "
        "give it fewer (telemetry.level=run), or make its write faster"
    ]


def print_training(summary: Mapping[str, Any], console: Console, folder: str | None = None) -> None:
    """Print the summary of a training."""
    best, rounds = summary["best_validation_objective"], counted(summary["rounds_done"], "round")
    if best is None:
        lines = [f"{rounds}; no controller was validated, so none was kept"]
    else:
        place = "after imitation" if summary["best_round"] < 0 else f"round {summary['best_round'] + 1}"
        lines = [f"best of {rounds}: {place}, validation J {best:.4f}"]
        lines.append("J: the metric of the task less rent for added parameters (reward.rent)")
    lines += trouble_lines(summary)
    for wrong in summary.get("anomalies", {}).values():
        since, times = f"from round {wrong['first_round'] + 1} on", counted(wrong["rounds"], "round")
        lines.append(f"{since}, in {times}: {wrong['sentence']}; {wrong['mend']}")
    last = [f"{name.replace('_', ' ')} {v:.3g}" for name, v in summary["last_rounds"].items() if v is not None]
    if last:
        lines.append(f"last rounds: {', '.join(last)}")
    if summary["controller_share"] is not None:
        lines.append(f"deciding and learning took {summary['controller_share']:.1%} of the time")
    lines += [*worker_lines(summary), *_waits(summary)]
    if best is not None and folder is not None:
        lines.append(f"{folder}/controller: esper grow TASK --controller {folder}; esper eval {folder}")
    print_lines(console, *lines)


def print_summary(summary: Mapping[str, Any], console: Console, folder: str | None = None) -> None:
    """Print the summary of a run: grown networks beside static ones, the verdict, and at most eight lines.

    Everything else is in the report and in summary.json.
    """
    verdict = [summary["verdict"]] if "verdict" in summary else []
    place = [] if folder is None else [f"run folder: {folder}"]
    rest = "summary.json and `esper report`" if folder is None else f"esper report {shlex.quote(folder)}"
    took = [f"took: {summary['seconds']:.1f} seconds", *worker_lines(summary), *place, f"everything else: {rest}"]
    print_lines(console, heading_line(summary))
    print_table(console, comparison_table(summary))
    print_lines(console, *verdict, *closing_lines(summary, brief=True), "; ".join(took))


def closing_lines(summary: Mapping[str, Any], brief: bool = False) -> list[str]:
    """Return a line for each of these: how to read the table, what grew, what became of the seeds, and what must not be missed.

    brief: whether few kinds of grown seeds are named, and one reason why seeds were not kept, which gives at most seven lines.
    """
    static, envs, seeds = summary.get("baselines", {}), summary["envs"], summary["seeds"]
    reading = ["no static network was trained for comparison; --baselines (the key baselines) names some"]
    if static:
        paired = ", paired over environments, with its 95 % t interval" if envs > 1 else ""
        reading = [f"difference: grown less the network of the row{paired}"]
    if envs == 1:
        reading.append("one environment gives no interval; --envs 16 (envs=16 in Python) gives one")
    else:
        reading.append("figures: mean ± standard error over environments")
    if 1 < envs < FEW:
        reading.append(f"intervals over {envs} environments are wide; --envs 16 (envs=16 in Python) narrows them")
    reading.append(f"J = {summary['objective_formula']}: the metric less rent for added parameters (reward.rent)")

    counts = Counter((blueprint, slot) for grown in summary["grown"] for slot, blueprint in grown.items())
    grew = [f"{blueprint} at {slot} in {count} of {envs}" for (blueprint, slot), count in counts.most_common()]
    kinds = listed(grew, SHOWN_GROWN if brief else len(grew)) or "nothing"
    host = "; the host is a network that was grown before, with its seeds and weights" if summary.get("regrown") else ""
    names = ("germinated", "fossilized", "pruned", "unfinished", *(("discarded",) if seeds["discarded"] else ()))
    left_out = "; unfinished seeds are left out of the networks" if seeds["unfinished"] else ""
    if seeds["discarded"]:
        left_out += "; discarded ones were fossilized after the best step"
    outcomes = f"seeds: {', '.join(f'{seeds[name]} {name}' for name in names)}{left_out}"
    why = [f"why: {sentence}" for sentence in summary.get("explanations", [])]
    if brief and len(why) > 1:
        why = [f"{why[0]} (and {counted(len(why) - 1, 'more reason')})"]
    special = [
        f"{name}: {'absent: ' * ('absent' in each)}{each[key]}"
        for name, each in static.items()
        for key in ("absent", "note")
        if key in each
    ]
    best, warnings = summary["best"], [line for line in split_lines(summary) if line.startswith("warning")]
    chosen = summary["metric"] if best["select"] == "metric" else "J"
    value = "" if best["validation"] is None else f", {best['validation']:.4f}"
    named = f"best: environment {best['env']}, by validation {chosen}{value} (select={best['select']})"
    found = [
        reading,
        [f"grew: {kinds}{host}"],
        [outcomes, *trouble_lines(summary), *_waits(summary)],
        *([line] for line in why),
        special,
        [*warnings, *rare_class_lines(summary)],
        [named, *early_stopping_lines(summary), *widening_lines(summary)],
    ]
    return ["; ".join(each) for each in found if each]


def heading_line(summary: Mapping[str, Any]) -> str:
    """Return one line with task, controller, environments, steps, seed, device and status."""
    length = f"{summary['steps_done']} of {counted(summary['steps'], 'step')}"
    epochs = summary.get("epochs_done")
    if epochs is not None:
        shown = f"{epochs:,.1f}".removesuffix(".0") if epochs >= 1 else f"{epochs:.2g}"
        length += f" ({shown} {'epoch' if epochs == 1 else 'epochs'})"
    names = f"{summary['task']}, {summary['controller']}: {counted(summary['envs'], 'environment')}"
    status = "" if summary["status"] == "finished" else f", {summary['status']}"
    return f"{names}, {length}, run seed {summary['seed']}, {summary['device']}{status}"


def comparison_table(summary: Mapping[str, Any]) -> Table:
    """Return the table of the grown networks and of each static network, with the paired difference, grown less static.

    Metrics are means ± standard error. Differences are means with a 95 % t interval over environments.
    """
    metric = summary["metric"]
    grown = summary[f"test_{metric}"]["grown"]
    rows = [_row("grown", estimate(grown, ".4f"), "", summary["grown_params"], _growth_seconds(summary))]
    others = {**summary.get("baselines", {}), "constant": summary.get("constant")}
    for name, static in others.items():
        if static is None:
            continue
        values = static.get(f"test_{metric}")
        paired = "" if values is None else f"{t_interval(differences(grown, values)):+.3f}"
        shown = "absent" if values is None else estimate(values, ".4f")
        rows.append(_row(name, shown, paired, static.get("params", ()), static.get("seconds")))
    columns = ("", f"test {printable(metric)}", "difference [95 %]", "parameters", "seconds")
    return Table("Grown networks beside static ones, on the test split", columns, rows)


def _row(name: str, metric: str, paired: str, params: Sequence[int], seconds: float | None) -> tuple[str, ...]:
    mean, error = mean_and_error(params)
    size = f"{mean:,.0f} ± {error:,.0f}" if error > 0 else f"{mean:,.0f}" if params else ""
    if len(size) > _WIDE:
        size = f"{mean:,.0f}"
    time = "" if seconds is None else f"{seconds:,.1f}" if seconds < 1000 else f"{seconds:,.0f}"
    return printable(name), metric, paired, size, time


DESCRIPTIONS: Mapping[str, str] = {
    "twin": "the host alone",
    "same-size": "the grown network with its seeds from step 0",
    "plain": "a new host of at least the grown size, without bottlenecks",
    "skips": "the host with an identity skip around every segment where one fits",
}
"""A description of each baseline."""


def _growth_seconds(summary: Mapping[str, Any]) -> float | None:
    """Return the time of the steps of the population, twins included [seconds]; None if unknown."""
    eps = summary["env_steps_per_second"]
    return None if eps is None else summary["rows"] * summary["steps_done"] / eps


def table_notes(summary: Mapping[str, Any]) -> list[str]:
    """Return the notes below a page's table: J of grown networks and twins, what its rows are, and the size of the test split."""
    objective, static = summary["test_objective"], summary.get("baselines", {})
    worth = f"J on the test split: grown {estimate(objective['grown'], '.4f')}"
    if objective["host"] is not None:
        paired = differences(objective["grown"], objective["host"])
        worth += f", twin {estimate(objective['host'], '.4f')}, difference {estimate(paired, '+.4f')}"
    lines = [worth]
    if static:
        lines.append(f"static networks: {'; '.join(f'{name} is {DESCRIPTIONS[name]}' for name in static)}")
    if "constant" in summary:
        lines.append(
            "constant: the most frequent class of the train split, or its mean target, as the prediction for everything"
        )
    if summary["metric"] == "r2":
        lines.append(
            "r2: the share of the variance that is explained; 1 is perfect, 0 is as good as predicting the mean"
        )
    if "twin" in static:
        lines.append(
            "the twins train in the same population as the grown networks; the seconds of the grown networks are those of both"
        )
    return [*lines, *split_lines(summary)[:1]]


def rare_class_lines(summary: Mapping[str, Any]) -> list[str]:
    """Give the balanced accuracy in a line where a class is rare, which the accuracy hardly counts, and say what helps it."""
    found = summary.get("rare_classes")
    if found is None:
        return []
    names = printable(listed(found["rare"], SHOWN_GROWN))
    tested = counted(sum(found["examples"]), "test example")
    line = f"rare classes ({names}; {tested}): balanced accuracy {estimate(found['grown']['balanced_accuracy'], '.4f')} grown"
    if found["host"] is not None:
        line += f", {estimate(found['host']['balanced_accuracy'], '.4f')} twin"
    mend = "esper.task(..., class_weights='balanced') weighs them like others"
    if found["weighted"]:
        mend = "more examples of them help"
    return [f"{line}; {mend}; F1, ROC AUC and confusion matrix are in the report"]


def early_stopping_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return lines with the steps to which early stopping restored the networks, and the reason why it ended the run."""
    best = summary["best_step"]
    if best is None:
        return []
    first, last = min(best["grown"]), max(best["grown"])
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lines = [f"networks: restored to their best by the validation split, of {steps}"]
    return [*lines, f"stopped early: {summary['stopped_because']}"] if summary["stopped_early"] else lines


def widening_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return lines with the steps after which all networks became wider, the sizes of their hosts, and the steps not reached."""
    lines = []
    if found := summary.get("widened"):
        sizes = [found[0]["host_params_before"], *(each["host_params"] for each in found)]
        hosts = " -> ".join(f"{size:,}" for size in sizes)
        steps = _named_steps([each["step"] for each in found])
        lines.append(f"all networks became wider after {steps}: hosts of {hosts} parameters")
    if ahead := summary.get("widen_ahead"):
        done = counted(summary["steps_done"], "step")
        lines.append(f"no network became wider after {_named_steps(ahead)} (widen.at), as the run ended after {done}")
    return lines


def _named_steps(steps: Sequence[int]) -> str:
    return ("steps " if len(steps) > 1 else "step ") + ", ".join(f"{step}" for step in steps)


def trouble_lines(summary: Mapping[str, Any]) -> list[str]:
    """Count in lines the rollbacks and refused operations by reason, and the updates that overflowed in float16."""
    lines = []
    for kind, label in (("rollbacks", "rolled back"), ("refused", "refused")):
        reasons = [f"{count:,} {name.replace('_', ' ')}" for name, count in summary[kind].items()]
        lines += [f"{label}: {', '.join(reasons)}"] if reasons else []
    if any((skipped := summary.get("skipped_updates", {"grown": []}))["grown"]):
        counts, updates = skipped["grown"], skipped["updates"]
        worst = max(range(len(counts)), key=counts.__getitem__)
        line = f"skipped: {sum(counts):,} of {updates * len(counts):,} updates, whose gradients overflowed in float16"
        many = f"; environment {worst} skipped {counts[worst]:,} of {updates:,}, so set amp to bf16 or off"
        lines.append(line + many * (counts[worst] > updates / 2))
    return lines


def added_params(summary: Mapping[str, Any]) -> list[int]:
    """Return (E,) parameters of the seeds that were kept."""
    grown, host = summary["grown_params"], summary["host_params"]
    hosts = host if isinstance(host, list) else [host] * len(grown)
    return [whole - own for whole, own in zip(grown, hosts, strict=True)]


def _waits(summary: Mapping[str, Any]) -> list[str]:
    outputs = summary.get("outputs")
    return [] if outputs is None else output_lines(outputs["waiting_seconds"], summary["seconds"])


def estimate(values: Sequence[float | None] | None, form: str) -> str:
    """Return mean and standard error of the values that are not None, as 0.9866 ± 0.0021."""
    return plus_minus(*mean_and_error(values), form)


def time_line(summary: Mapping[str, Any]) -> str:
    """Return a line with where the time of a run went."""
    eps, growing = summary["env_steps_per_second"], _growth_seconds(summary)
    static = sum(static.get("seconds") or 0.0 for static in summary.get("baselines", {}).values())
    took = f"took: {summary['seconds']:.1f} seconds"
    if growing is not None:
        twins = ", twins included" if summary["rows"] > summary["envs"] else ""
        took += f", {growing:.1f} of them for {counted(summary['steps_done'], 'step')} of {counted(summary['rows'], 'network')}"
        speed = f"{eps:,.0f}" if eps >= 10 else f"{eps:.2g}"
        took += (
            f"{twins} ({speed} environment steps per second), the rest for setting up, evaluating and exporting them"
        )
    return took + (f"; the other static networks took {static:.1f} seconds more" if static >= 0.05 else "")


def split_lines(summary: Mapping[str, Any]) -> list[str]:
    """Give the size of the test split, what intervals cover, and warnings about small splits; nothing if sizes are unknown."""
    sizes = summary.get("examples")
    if sizes is None:
        return []
    shared = isinstance(sizes["test"], int)  # by all environments
    sizes = {part: [found] if isinstance(found, int) else found for part, found in sizes.items()}
    low, high = min(sizes["test"]), max(sizes["test"])
    line = f"test split: {counted(low, 'example') if low == high else f'{low:,} to {high:,} examples'}"
    if summary["envs"] > 1 and shared:
        line += ", the same for every environment; intervals and ± cover the choice of starts, not of these examples"
    elif summary["envs"] > 1:
        line = (
            f"{line.replace('split', 'splits')}, for every environment another problem with examples of its own; intervals and ± "
            "cover the choice of problems, examples and starts together"
        )
    lines = [line]
    for part, why in (
        ("test", "the test figures and their differences may be quite different on other examples"),
        ("probe", "the gates decide on it, so seeds may be kept or pruned by chance"),
    ):
        if min(sizes[part]) < FEW_EXAMPLES:
            lines.append(f"warning: the {part} split has only {counted(min(sizes[part]), 'example')}; {why}")
    return lines
