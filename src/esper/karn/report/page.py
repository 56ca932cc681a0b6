"""Make the page about one run, from its model: sections of sentences, tables and figures, in one file without requests."""

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from esper.karn import evaluation
from esper.karn.reader import fitting_files, open_run, read_model
from esper.karn.report import frame, grown
from esper.karn.report.decided import decisions_section, faults_section
from esper.karn.report.drawing import COLOURS, Series, curves
from esper.karn.report.frame import Content, Pictures, ReportSection, flat_settings
from esper.karn.report.trained import training_sections
from esper.karn.run_model import NO_SEED, RunModel
from esper.karn.terminal import console
from esper.karn.terminal.console import Table
from esper.leyline.config.arguments import to_path
from esper.leyline.config.parsing import parse_json
from esper.leyline.config.tree import Config
from esper.leyline.data.objective import objective
from esper.leyline.intervals import differences, t_interval
from esper.leyline.lifecycle.vocabulary import Stage
from esper.leyline.messages import InputError, RunWarning, counted, printable, warn
from esper.store.disk import read_kept
from esper.store.files import EVALUATION, REPORT, SUMMARY, is_run, to_json

# largest number of classes of which the page shows a confusion matrix; the summary has larger ones too
MOST_CLASSES = 20
_LARGEST = 256 * 2**20  # bytes of the record of an evaluation that are read
WORDS: Mapping[str, str] = {
    "added parameters": "parameters of the seeds that act on a network or were kept",
    "alpha": "strength of a seed, from 0 to 1; in BLENDING it moves to its target, step by step",
    "blueprint": "a kind of seed; the menu names those that may be planted",
    "contribution": "metric of a network less its metric with the seed switched off, on the probe split",
    "environment": "one network in training with its seeds; all of them together are the population",
    "gate": "the conditions on a seed before it may act (ADVANCE) or be kept (FOSSILIZE)",
    "incubation gain": "loss of a network less its loss with the seed switched on, for a seed in TRAINING; above 0 it is good",
    "interaction": "what two seeds bring together beyond what each brings alone; below 0 they do the same work twice",
    "J": "the metric less rent",
    "probe split": "examples on which gates and contributions are measured; networks do not train on them",
    "rent": "a price for added parameters: reward.rent * ln(1 + added parameters / host parameters); a host smaller than "
    "reward.rent_size counts as that many parameters",
    "rollback": "a network that failed is restored to its last healthy snapshot",
    "run seed": "the number from which all random numbers of the run are drawn; no seed of a network",
    "seed": "a small module that is planted in a slot of the host, and kept or pruned",
    "slot": "a place in the host where one seed can be planted",
    "standard error": "how much a mean would vary if it were measured anew; z is a number of standard errors",
    "twin": "the same host on the same data that never grows",
    **{stage.name: stage.meaning for stage in Stage},
}
"""The words of a report that have a meaning of their own."""


def write_report(run: str | PathLike[str], out: str | PathLike[str] | None = None) -> Path:
    """Write one self-contained page about a run, whether it goes on, has ended or was killed, and return its path.

    The page is `report.html` in the folder, or `out`. It makes no request to any network. `run` may also be the folder of an
    evaluation (`esper eval`). Raises InputError if the folder is neither, a file of it is damaged, or the page cannot be
    written.
    """
    folder = to_path(run, "run")
    return frame.write_page(folder / REPORT if out is None else to_path(out, "out"), read_content(folder))


def draw_report(run: str | PathLike[str], folder: str | PathLike[str], form: str = "png") -> Pictures:
    """Draw every figure of the report as a picture for papers, and return the paths and what there was nothing to draw of.

        esper.draw_report("runs/demo", "figures", "pdf").paths

    `form` is png, pdf or svg. Raises as `esper.report`, and InputError if the folder cannot be written or `form` is unknown.
    """
    return frame.write_pictures(read_content(to_path(run, "run")), to_path(folder, "folder"), form)


def read_content(folder: Path) -> Content:
    """Return what the page of a run folder, or of the folder of an evaluation, shows. InputError as `write_report`."""
    path = folder / EVALUATION
    if path.is_file() and not is_run(folder):
        mend = "put back what esper eval wrote, or evaluate again with --overwrite"
        record = parse_json(read_kept(path, _LARGEST, mend), path, mend)
        try:
            return evaluation.content_of(record, folder.resolve().name)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} does not hold an evaluation ({error!r}); {mend}") from None
    opened = open_run(folder)
    with fitting_files(folder):
        return content_of(read_model(opened), opened.folder.resolve().name)


def report_at_end(folder: Path, record: Mapping[str, Any] | None = None) -> None:
    """Write the report of a run that has ended, or of an evaluation, from its record, which is in the folder only afterwards.

    That of a run is left out if `report` is false in its config or the page is newer than the summary. The figures are safe by
    then and a report can be written again, so an error only issues a RunWarning.
    """
    summary, path = folder / SUMMARY, folder / REPORT
    try:
        if record is not None:
            frame.write_page(path, evaluation.content_of(json.loads(to_json(record)), folder.resolve().name))
        elif open_run(folder).config.get("report", True):
            whole = path.exists() and summary.exists() and path.stat().st_mtime_ns >= summary.stat().st_mtime_ns
            if not whole:
                write_report(folder)
    except (InputError, OSError) as error:
        warn(f"no report was written: {error}", RunWarning)


def content_of(model: RunModel, name: str) -> Content:
    """Return the page of a model: first the verdict, what grew where and the curve beside its twin, and last the settings."""
    if model.sizes:
        restored = faults_section(model) if model.rollbacks else None
        parts = [each for each in (grown.size_section(model), restored, _machine(model)) if each is not None]
        return Content(name, heading(model), parts, missing=missing_parts(model))
    verdicts, lines, tables, notes = results(model)
    words = Table("Words of this page", ("word", "meaning"), list(WORDS.items()), texts=(1,))
    sections = (
        ReportSection("result", "What came out", verdicts, figures=grown.first_figures(model)),
        *training_sections(model),
        ReportSection("results", "Results", lines, tables, notes=notes) if tables else None,
        grown.growth_section(model),
        grown.curves_section(model),
        decisions_section(model),
        grown.worth_section(model),
        grown.sensors_section(model),
        faults_section(model),
        _asked(model),
        _machine(model),
        ReportSection("glossary", "Words", tables=[words]),
    )
    shown = [section for section in sections if section is not None]
    return Content(name, heading(model), shown, _data(model), missing_parts(model))


def missing_parts(model: RunModel) -> list[str]:
    """Return what a page leaves out because the run has none of it, with the reason."""
    if model.head is None:
        return ["everything over time: the run kept no events (telemetry.level)"]
    if model.sizes:
        unknown = all(row.loss is None for row in model.sizes)
        return ["the loss over time: growth had no probe, or has not looked at it (probe=, loss=)"] if unknown else []
    if model.rounds:
        return ["curves, stages and sensors of single networks: the page of a training shows its rounds"]
    why = {
        "curves, stages and seeds over time: the run kept no rows of steps (telemetry.level)": model.population,
        "contributions over time: no seed was measured, or the run kept no rows of it (telemetry.level)": model.contributions,
        "sensors: none were measured (probe.sensors_every), or the run kept no rows of them": model.sensed,
        "seconds of each step: the run kept no rows of them (telemetry.level)": model.phases,
    }
    return [sentence for sentence, found in why.items() if not found]


def _asked(model: RunModel) -> ReportSection:
    config, head = model.config, model.head
    lines = []
    if head is not None:
        what = f"{counted(head.envs, 'network')} on the task {head.task}, for {counted(head.steps, 'step')} an episode"
        ppo = config.get("ppo") or {}
        imitation = ppo.get("imitation_rounds")
        rounds = f"{counted(imitation, 'round')} of imitation and then " if imitation else ""
        rounds += counted(ppo["rounds"], "round") if "rounds" in ppo else "rounds"
        asked = f"The controller {head.controller} was asked to grow"
        if config.get("controller") == "ppo":
            asked = f"A controller was to be trained in {rounds} by growing, in every round,"
        lines.append(f"{asked} {what}.")
        lines.append(f"Slots: {', '.join(head.slots)}. Menu: {', '.join(head.blueprints)}.")
    seeds = (config.get("lifecycle") or {}).get("max_seeds")
    if seeds is not None:
        lines.append(
            f"At most {counted(seeds, 'seed')} may be in an environment at once, kept ones included (lifecycle.max_seeds)."
        )
    lines.append("The words of this page are explained at its end.")
    # What rent is, and what it costs these hosts to double.
    reward, hosts = config.get("reward") or {}, [] if head is None else list(head.host_param_counts)
    rent, least = reward.get("rent"), reward.get("rent_size", 0)
    if rent is not None:
        value = "minus the loss" if reward.get("objective") == "log_loss" else "the metric"
        charged = f"max(host parameters, {least:,})" if least > min(hosts, default=0) else "host parameters"
        line = (
            f"J is {value} less rent, a price for added parameters: reward.rent * ln(1 + added / {charged}); "
            f"reward.rent is {rent:g}"
        )
        if hosts:
            sizes = sorted({min(hosts), max(hosts)})
            paid = " to ".join(f"{-float(objective(0.0, size, size, rent, least)):.3g}" for size in sizes)
            of = " to ".join(f"{size:,}" for size in sizes)
            line += f", so a host of {of} parameters that grows to twice its size pays {paid}"
        lines.append(f"{line}.")
    if model.changed:
        lines.append(f"Changed when the run was resumed: {', '.join(model.changed)}.")
    usual = dict(flat_settings(Config().model_dump(mode="json")))
    own = [(key, value, usual[key]) for key, value in flat_settings(config) if key in usual and usual[key] != value]
    caption = (
        "Settings that differ from the defaults of Esper, those that the task or esper train brings along included"
    )
    tables = [Table(caption, ("key", "value", "default"), own, texts=(1, 2))]
    return ReportSection("asked", "What was asked", lines, tables if own else [])


def _machine(model: RunModel) -> ReportSection:
    tables, lines, summary = [], [], model.summary or {}
    if "grown_params" in summary:
        lines.append(console.time_line(summary))
    elif summary.get("seconds") is not None:
        lines.append(f"The run took {summary['seconds']:,.1f} seconds.")
        rows = [row for row in model.rounds if row.figures.get("controller_share") is not None]
        whole, imitation = sum(row.seconds for row in rows), sum(row.seconds for row in rows if row.round < 0)
        deciding = sum(row.seconds * (row.figures["controller_share"] or 0.0) for row in rows)
        if rows:
            lines.append(
                f"Its {counted(len(rows), 'round')} took {whole:,.1f} seconds, {imitation:,.1f} of them imitation; the "
                f"controller decided and learned for {deciding:,.1f} seconds, and networks were trained, measured and "
                "validated in the others."
            )
    program, *arguments = (model.environment or {}).get("command") or [""]
    if Path(program).name == "esper" and arguments and arguments[0] != "resume":
        lines += [
            f"The command was: {shlex.join(['esper', *arguments])}",
            "To repeat the run, give it with another folder or --overwrite, and with the versions of the table Machine. On a "
            "processor of the same kind with as many threads its figures are the same; `esper docs determinism` has more.",
        ]
    phases = summary.get("phase_seconds")
    if phases:
        whole = sum(phases.values())
        shares = [
            (name, f"{seconds:,.2f}", f"{seconds / whole:.0%}" if whole else "-") for name, seconds in phases.items()
        ]
        tables.append(Table("Time by phase of a step", ("phase", "seconds", "share"), shares))
    figures, settings = [], flat_settings(model.config)
    if model.phases:
        series = []
        for index, name in enumerate(dict.fromkeys(name for row in model.phases for name in row.phase_seconds)):
            seconds = np.array([[row.phase_seconds.get(name)] for row in model.phases], float)
            series.append(Series(name, seconds, f"run{index % COLOURS}"))
        steps = [row.step for row in model.phases]
        figures.append(curves("Seconds of a step by phase", steps, series, "step", "seconds"))
    if model.environment is not None:
        usual, machine = dict(settings), flat_settings(model.environment)
        # Settings of a task in a training only where they differ from the config.
        own = [
            each
            for each in machine
            if not (each[0].startswith("cohorts.") and usual.get(each[0].split(".", 2)[-1]) == each[1])
        ]
        tables.append(Table("Machine", ("name", "value"), own, texts=(1,)))
    tables.append(Table("Config", ("key", "value"), settings, texts=(1,)))
    return ReportSection("machine", "Time, machine and config", lines, tables, figures)


def _data(model: RunModel) -> Markup | None:
    """Return what the slider and the drawn network need, as JSON that no text in it can end."""
    population, head = model.population, model.head
    if population is None or head is None:
        return None
    known = {
        "slots": [printable(slot) for slot in head.slots],
        "blueprints": [printable(name) for name in head.blueprints],
        "stages": [stage.name for stage in Stage],
        "envs": population.metric.shape[1],
        "steps": population.steps.tolist(),
        "stage": population.stage.ravel().tolist(),
        "seed": population.seed.ravel().tolist(),
        "alpha": np.rint(100 * np.nan_to_num(population.alpha)).astype(int).ravel().tolist(),
    }
    assert NO_SEED < 0, "the page takes negative numbers for an empty slot"
    return Markup(json.dumps(known, separators=(",", ":")).replace("<", "\\u003c"))


def heading(model: RunModel) -> str:
    """Return what runs where, and how it stands, in one line."""
    head = model.head
    if model.summary is not None and "grown_params" in model.summary:
        return console.heading_line(model.summary)
    if head is None:
        return f"{model.status}; the run kept no events (telemetry.level)"
    what = f"{head.controller}: {counted(head.envs, 'environment')}, {counted(head.steps, 'step')} an episode"
    if model.sizes:
        last = model.sizes[-1]
        what = f"widened as a whole: {last.params:,} parameters after {counted(last.step, 'step')}"
    return f"{head.task}, {what}, run seed {head.seed}, {head.device}, {model.status}"


def results(model: RunModel) -> tuple[list[str], list[str], list[Table], list[str]]:
    """Return what came out: sentences with the verdict, further sentences, tables, and notes on how these are to be read."""
    summary = model.summary
    if model.sizes:
        section = grown.size_section(model)
        return list(section.lines), [], list(section.tables), []
    if summary is None:
        how = "still goes on" if model.status == "running" else "was killed before it ended"
        return [f"The run {how}, so there are no final figures yet."], [], [], []
    if "grown_params" not in summary:
        best = summary.get("best_validation_objective")
        if best is None:
            return ["No controller was validated, so none was kept."], [], [], []
        number = summary["best_round"]
        when = "after imitation" if number < 0 else f"after round {number}, counted from 0"
        return [f"The best controller reached a validation J of {best:.4f}, {when}."], [], [], []
    verdicts = [summary["verdict"]] if "verdict" in summary else []
    if model.status == "interrupted":
        done = f"{summary['steps_done']} of {counted(summary['steps'], 'step')}"
        verdicts.append(f"The run was interrupted after {done}; the figures are those of the networks at that time.")
    if "error" in summary:
        verdicts.append(f"The run failed: {summary['error']['message']}")
    metric, lines = f"test_{summary['metric']}", list[str]()
    scores = summary[metric]["grown"]
    static = {name: each[metric] for name, each in summary.get("baselines", {}).items() if each.get(metric) is not None}
    for name, values in static.items():
        gaps = differences(scores, values)
        paired = t_interval(gaps)
        if paired.size < 2:
            continue
        what = f"{name}, {console.DESCRIPTIONS.get(name, 'a static network')}"
        many, figures = counted(paired.size, "environment"), f"{paired:+.3f}"
        if not any(gaps):
            lines.append(f"The grown networks equal {what}, in all {many}.")
        elif paired.above or paired.below:
            word = "better" if paired.above else "worse"
            lines.append(f"The grown networks are {word} than {what}: {figures}, a paired 95 % interval over {many}.")
        else:
            lines.append(f"The difference between the grown networks and {what}, is not resolved by {many}: {figures}.")
    # Which environment has the lowest metric, what the host alone has there, and whether it learned anything.
    population = model.population
    known = [(score, env) for env, score in enumerate(scores) if score is not None]
    if len(known) > 1:
        score, env = min(known)
        there = [f"{_number(values[env])} of {name}" for name, values in static.items()]
        line = f"The lowest test {summary['metric']} is {_number(score)}, in environment {env}"
        line += f", beside {', '.join(there)}." if there else "."
        if population is not None:
            begin, end = population.loss[0, env], population.loss[-1, env]
            line += (
                f" Its loss on the probe split was {begin:.4g} after step {population.steps[0]} and {end:.4g} after step "
                f"{population.steps[-1]}."
            )
        lines.append(line)
    lines += console.closing_lines(summary)
    tables = [console.comparison_table(summary)]
    found = summary.get("rare_classes")
    if found is not None:  # figures in which every class counts alike, and the confusion matrices
        kinds = {name: found[key] for name, key in (("grown", "grown"), ("twin", "host")) if found[key] is not None}
        means = {"balanced accuracy": "balanced_accuracy", "F1": "f1_macro", "ROC AUC": "roc_auc"}
        rows = [(name, *(console.estimate(each[key], ".4f") for key in means.values())) for name, each in kinds.items()]
        rare = ", ".join(map(str, found["rare"]))
        caption = f"Every class counts alike, as some are rare ({rare}): means over classes, on the test split"
        tables.append(Table(caption, ("", *means), rows))
        names = list(map(str, found["classes"]))
        for name, each in kinds.items():
            if each["confusion"] is None or len(names) > MOST_CLASSES:
                continue
            counts = [
                (own, *(f"{count:,}" for count in row)) for own, row in zip(names, each["confusion"], strict=True)
            ]
            title = (
                f"Confusion matrix, {name}: test examples by class (row) and prediction (column), over all environments"
            )
            tables.append(Table(title, ("class", *names), counts))
    failed = Counter(row.env for row in model.rollbacks if not row.twin)
    rows = []
    for env, (seeds, added) in enumerate(zip(summary["grown"], console.added_params(summary), strict=True)):
        kept = ", ".join(f"{blueprint} at {slot}" for slot, blueprint in seeds.items())
        others = (_number(values[env]) for values in static.values())
        rows.append((str(env), _number(scores[env]), *others, f"{added:,}", kept or "none", f"{failed[env]}"))
    named = (f"grown, test {summary['metric']}", *static)
    columns = ("environment", *named, "added parameters", "seeds kept", "rollbacks")
    tables.append(Table("Results by environment", columns, rows, texts=(len(columns) - 2,)))
    return verdicts, lines, tables, console.table_notes(summary)


def _number(value: float | None) -> str:
    return "absent" if value is None else f"{value:.4f}"
