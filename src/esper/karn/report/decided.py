"""Write the sections of a report on what was decided and why, and on what went wrong."""

from collections.abc import Sequence

import numpy as np

from esper.karn.report.drawing import ForestRow, forest
from esper.karn.report.frame import ReportSection
from esper.karn.run_model import DRAWN_DECISIONS, LISTED, NAN, RunModel
from esper.karn.terminal.console import Table
from esper.leyline.intervals import plus_minus
from esper.leyline.lifecycle.vocabulary import Refusal, Stage, Vital, meaning_of
from esper.leyline.messages import counted, listed
from esper.nissa.rows import LifecycleRow

NAMED = 8  # most environments or steps that a sentence names
SLOW = 5  # a step is named as slow if it took this many times the median time of a step


def decisions_section(model: RunModel) -> ReportSection | None:
    """Return what was decided and why, and what was refused."""
    if model.head is None:
        return None
    tables, figures = [], []
    if model.tallies:
        # What a contribution and a gate are, with the numbers of this run.
        gates, sizes = model.config.get("gates") or {}, ((model.summary or {}).get("examples") or {}).get("probe")
        examples = (
            f"the {counted(sizes, 'example')} of the probe split" if isinstance(sizes, int) else "the probe split"
        )
        lines = [
            f"The contribution of a seed is the metric of its network less the metric with the seed switched off, on {examples}; "
            "in the reasons of single decisions, ± is its standard error over these examples.",
        ]
        if gates.get("certify") is not None:
            lines.append(
                "A seed is kept only if it is certified by examples that neither training nor the probe reads; the chance that "
                f"the environments that share these examples certify a seed that does not help is at most {gates['certify']:g} "
                "(gates.certify)."
            )
        bounds = []
        for what, key, least in (
            ("before a seed acts, its gain", "gain_z", 0.0),
            ("before it is kept, its contribution", "contribution_z", gates.get("min_contribution", 0.0)),
        ):
            if key in gates:
                errors = "less its standard error" if gates[key] == 1 else f"less {gates[key]:g} of its standard errors"
                bounds.append(f"{what} {errors} must exceed {least:g} (gates.{key})")
        if gates.get("permissive"):
            lines.append(
                "Gates, the conditions on a seed before it may act or be kept, ask only that it was measured (gates.permissive)."
            )
        elif bounds:
            lines.append(f"Gates are conditions on a seed: {'; '.join(bounds)}.")
        # Rent is charged where the sizes of the hosts are known.
        reward, hosts = model.config.get("reward") or {}, model.head.host_param_counts
        size = max(float(np.mean(hosts)), reward.get("rent_size") or 0) if len(hosts) and "rent" in reward else None
        rows = [
            (
                each.blueprint,
                each.slot,
                "-" if np.isnan(each.price) else f"{each.price:,.0f}",
                "-" if size is None or np.isnan(each.price) else f"{reward['rent'] * np.log1p(each.price / size):.4f}",
                f"{each.tried:,}",
                f"{each.kept:,}",
                f"{each.pruned:,}",
                plus_minus(each.contribution, each.error, absent="not measured"),
                f"{each.measured:,}",
                "-" if np.isnan(each.steps_to_keep) else f"{each.steps_to_keep:.1f}",
            )
            for each in model.tallies
        ]
        names = ("blueprint", "slot", "parameters", "rent", "tried", "kept", "pruned", "contribution")
        caption = (
            "What became of the seeds. A contribution here is the mean over the seeds that were measured, when they were kept "
            "or pruned, ± its standard error over seeds; parameters are the mean of those planted, and rent is what a host of "
            "mean size pays for so many"
        )
        tables.append(Table(caption, (*names, "seeds measured", "steps until kept"), rows, texts=(1,)))
        lines.append(
            "A seed is worth its parameters where its contribution is above its rent. It is not measured where no seed acted "
            "when it was kept or pruned."
        )
        if model.rounds:
            lines.append(
                "Tables and figure are about the episodes of the training; those of validations are left out. Hosts change every "
                "round, so no rent is named."
            )
        if model.decided.idle:
            removed = counted(sum(each.pruned for each in model.tallies), "seed")
            lines.append(
                f"Of {removed} that were pruned, {model.decided.idle} had a gain of exactly 0 when they were pruned in TRAINING: "
                "switching them on changed no loss at all. That is so where a seed has not learned anything yet, or where the "
                "host lets nothing of it through, for example because all units behind its slot are dead (the sensor dead is 1)."
            )
    else:
        lines = ["No seed was planted.", *(model.summary or {}).get("explanations", [])]
    if model.decided.measured:
        drawn_rows = []
        for each in model.decided.ends:
            name = f"{each.blueprint} at {each.slot}, environment {each.env}, step {each.step}"
            mean, error = (NAN if value is None else value for value in (each.contribution_mean, each.contribution_se))
            words = f"{name}: {plus_minus(mean, error)}, {each.why}"
            drawn_rows.append(ForestRow(name, mean, mean - error, mean + error, _fate(each), words))
        title = "Contributions when seeds were kept or pruned"
        figures.append(forest(title, drawn_rows, "contribution to the metric, with one standard error"))
        count = model.decided.measured
        drawn = f"; {DRAWN_DECISIONS} of {count:,}, both ends of the order" if count > DRAWN_DECISIONS else ""
        lines.append(
            "The figure has the contribution of every seed when it was kept (green) or pruned (red), with one standard error "
            f"to each side{drawn}."
        )
    if model.refused:
        ordered = sorted(model.refusals.items(), key=lambda each: -each[1][0])
        refused = [
            (
                f"{env}",
                op,
                slot or "-",
                blueprint or "-",
                f"{count:,}",
                f"{first}" if first == last else f"{first} to {last}",
                meaning_of(Refusal, reason),
            )
            for (reason, env, op, slot, blueprint), (count, first, last) in ordered[:LISTED]
        ]
        more = f", the first {LISTED} rows of {len(ordered):,}" if len(ordered) > LISTED else ""
        caption = f"Decisions that were refused, {sum(model.refused.values()):,} in all{more}"
        columns = ["environment", "decision", "slot", "blueprint", "times", "steps", "reason"]
        tables.append(Table(caption, columns, refused, texts=(1, 2, 3, 6)))
    elif model.population is not None:
        lines.append("No decision was refused.")
    for title, first, count in (
        ("Plantings", model.decided.plantings, model.decided.planted),
        ("Keeps and prunes", model.decided.first, model.decided.total),
    ):
        if not first:
            continue
        trained, ends = any(isinstance(each.round, int) for each in first), title != "Plantings"
        columns = [*["round"] * trained, "step", "environment", "slot", "blueprint", *["decision"] * ends, "reason"]
        cells = []
        for each in first:
            place = *[f"{each.round}"] * trained, f"{each.step}", f"{each.env}", each.slot, each.blueprint or ""
            cells.append((*place, *[_fate(each)] * ends, each.why or ""))
        more = f", the first {LISTED} of {count:,}" if count > LISTED else ""
        caption, texts = f"{title} with their reasons{more}", range(2 + trained, len(columns))
        tables.append(Table(caption, columns, cells, texts))
    return ReportSection("decisions", "Decisions and why", lines, tables, figures)


def _fate(row: LifecycleRow) -> str:
    return "kept" if row.to_stage == "FOSSILIZED" else "pruned"


def faults_section(model: RunModel) -> ReportSection | None:
    """Show rollbacks, and what is out of the ordinary."""
    if model.head is None:
        return None
    lines, tables = [], []
    if model.rollbacks:
        slots = model.head.slots
        gone = [stay for stay in model.stays if stay.stage == Stage.PRUNED and stay.blueprint is not None]
        seeds = {(stay.env, stay.start, slots[stay.slot]): f"{stay.blueprint} at {slots[stay.slot]}" for stay in gone}
        trained = bool(model.rounds)
        rows = [
            (
                *([f"{row.round}"] if trained else []),
                f"{row.step}",
                f"{row.env}" + (" (twin)" if row.twin else " (validation)" if row.cohort == "validation" else ""),
                meaning_of(Vital, row.reason),
                "not finite" if row.loss is None else f"{row.loss:.4g}",
                ", ".join(seeds.get((row.env, row.step, slot), slot) for slot in row.pruned) or "none",
            )
            for row in model.rollbacks[:LISTED]
        ]
        columns = ("step", "environment", "what failed", "loss before it was restored", "seeds that were lost")
        names = (*(["round"] if trained else []), *columns)
        texts = [index + trained for index in (1, 2, 4)]
        tables.append(Table("Environments restored to a snapshot", names, rows, texts))
        lost = sum(len(row.pruned) for row in model.rollbacks)
        lines.append(
            f"{counted(len(model.rollbacks), 'rollback')}. Seeds that were lost in them: {lost}; they count as pruned, without "
            "a decision of the controller. `esper docs governor` has the limits behind each reason."
        )
        every = (model.config.get("governor") or {}).get("snapshot_every")
        if every is not None:
            lines.append(
                "A restored environment goes back to its last snapshot in health: it loses what it has trained since then, and "
                "all seeds that were not kept. Healthy environments are saved every "
                f"{counted(every, 'step')} (governor.snapshot_every)."
            )
    else:
        lines.append("No environment failed, so none was restored.")
    odd, population, summary = [], model.population, model.summary or {}
    if population is not None:
        bad = ~np.isfinite(population.metric) | ~np.isfinite(population.loss)
        if bad.any():
            steps, envs = counted(int(bad.sum()), "step"), _named(np.flatnonzero(bad.any(0)).tolist())
            odd.append(f"The metric or the loss was not finite at the end of {steps}, in {envs}.")
    scores = summary.get(f"test_{summary.get('metric')}") or {}
    if scores.get("host"):
        pairs = zip(scores["grown"], scores["host"], strict=True)
        worse = [env for env, (grown, host) in enumerate(pairs) if None not in (grown, host) and grown < host]
        if worse:
            odd.append(f"Grown networks that ended worse than their twin on the test split: {_named(worse)}.")
    if model.contributions and population is not None:
        kept = population.stage[-1] == Stage.FOSSILIZED
        bad = kept & (model.contributions[-1][1] < 0)
        if bad.any():
            odd.append(
                f"Kept seeds whose last contribution was below 0: {bad.sum()} of {kept.sum()}, in "
                f"{_named(np.flatnonzero(bad.any(1)).tolist())}. A contribution close to 0 may be so by chance."
            )
    if model.phases:
        whole = [sum(row.phase_seconds.values()) for row in model.phases]
        median = np.median(whole)
        slow = [row.step for row, seconds in zip(model.phases, whole, strict=True) if seconds > SLOW * median]
        if slow:
            odd.append(
                f"Steps that took more than {SLOW} times the median of {median:.2g} seconds: {listed(slow, NAMED)}."
            )
    lines += odd or ["No other anomaly was found."]
    return ReportSection("faults", "Rollbacks and anomalies", lines, tables)


def _named(envs: Sequence[int]) -> str:
    return f"environment{'s' * (len(envs) != 1)} {listed(envs, NAMED)}"
