"""Compute slowly what an export must hold, from the file of events, and define a target that keeps it in memory."""

from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np

from esper.karn.exporters import Export
from esper.karn.reader import open_run
from esper.nissa.events import read_events
from esper.nissa.rows import LifecycleRow, RollbackRow, StepRow

OF_STEPS = {
    "metric": ("metrics", max),
    "twin_metric": ("twin_metrics", max),
    "loss": ("losses", min),
    "train_loss": ("train_losses", min),
    "added_params": ("added_param_counts", None),
}
COUNTED = {"GERMINATED": "seeds/planted", "FOSSILIZED": "seeds/kept", "PRUNED": "seeds/pruned"}


def spread(name, values, best):
    known = [value for value in values or () if value is not None]
    if not known:
        return {}
    found = {
        f"{name}/{part}": float(np.quantile(known, q)) for part, q in (("q25", 0.25), ("median", 0.5), ("q75", 0.75))
    }
    return found | ({f"{name}/best": float(best(known))} if best else {})


def curves_of_steps(folder):
    """Compute the curves of a grown run by name, each a list of (x, value)."""
    curves, counts = defaultdict(list), Counter()
    for row in read_events(folder / "events.jsonl"):
        if isinstance(row, LifecycleRow) and row.to_stage in COUNTED:
            counts[COUNTED[row.to_stage]] += 1
        if isinstance(row, RollbackRow) and not row.twin:
            counts["rollbacks"] += 1
        if isinstance(row, StepRow):
            values = {name: float(counts[name]) for name in (*COUNTED.values(), "rollbacks")}
            for name, (field, best) in OF_STEPS.items():
                values |= spread(name, getattr(row, field), best)
            for name, value in values.items():
                curves[name].append((row.step, value))
    return dict(curves)


class Kept:
    """Keeps in memory what it got by run, as a target of an export, and checks that x never decreases."""

    def __init__(self):
        self.runs, self.said = {}, []

    def open(self, name, identity, facts):
        self.now = {"curves": defaultdict(list), "images": [], "tables": [], "facts": facts, "x": -1, "id": identity}
        self.runs[name] = self.now
        self.said.append("open")

    def scalars(self, x, time, values):
        assert x >= self.now["x"]
        self.now["x"] = x
        for name, value in values.items():
            self.now["curves"][name].append((x, value))

    def image(self, name, pixels, x):
        self.now["images"].append((name, pixels.shape, x))

    def table(self, name, table, x):
        self.now["tables"].append((name, table, x))

    def flush(self):
        self.said.append("flush")

    def close(self):
        self.said.append("close")


def carried(folder, target, more=lambda: False):
    """Export a run to a target in memory, and return what was exported. `more` writes further rows, as long as it is true."""
    export = Export(open_run(folder), folder.name, target)
    try:
        while more():
            export.update()
        status = export.end(lambda run, summary: None)
    finally:
        export.close()
    return SimpleNamespace(status=status, points=export.points, x=export.x, final=export.is_final)
