"""Evaluate contenders on one task, for studies, without the rules that every evaluation of `esper eval` compares with."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.leyline.data.task import AnyTask
from esper.leyline.progress import Pace
from esper.runs.evaluation.contenders import ROWS, Contender, unheard
from esper.runs.evaluation.evaluation import Design, Entry, Runner, compared
from esper.runs.evaluation.record import Evaluation


def evaluate(
    task: AnyTask,
    contenders: Sequence[Contender],
    *,
    instances: int,
    seeds: int,
    part: str = "heldout",
    first: int = 0,
    settings: Sequence[Mapping[str, Any]] = (),
    static: Sequence[str] = (),
    sized_by: str | None = None,
    folder: Path | None = None,
    rows: int = ROWS,
    watch: Callable[[str], None] = unheard,
    pace: Pace | None = None,
) -> Evaluation:
    """Grow N instances with R seeds under every contender, and evaluate the networks as exported on the test split.

    Instance n with seed r has the same initial host, the same order of data and the same initial seeds under every
    contender. The seeds are consecutive, from that of the config. static: names of static networks, which become
    further contenders, of the sizes that the contender `sized_by` grew on the same instances. folder: stores the
    results of populations, which are reused. rows: largest number of environments that are grown together; the results
    do not depend on it.
    """
    assert contenders
    design = Design(task, settings, seeds, part, first, instances, rows)
    for contender in contenders:
        design.check(contender)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    runner = Runner(folder, watch)
    runner.pace = pace
    return compared(design, runner, contenders, len(contenders), Entry(), static, sized_by)
