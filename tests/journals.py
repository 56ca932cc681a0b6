"""Read the rows of a journal for the comparison of two runs."""

import json
from pathlib import Path

CLOCKED = ("time", "seconds", "phase_seconds", "reading_p95", "env_steps_per_second", "controller_share")
"""Fields in which a clock has a part."""
COVERED = ("covered", "device_reads")
"""Fields of `phases` rows, the first of which after a resume covers only the steps since then."""


def events(folder):
    """Read the rows of a run without their numbers, which must have no gap, and without what differs between equal runs.

    Rows of checkpoints are left out, because their places depend on when a run was interrupted, and so is the environment.
    """
    path = Path(folder, "events.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [row.pop("seq") for row in rows] == list(range(len(rows)))
    return [_timeless(row) for row in rows if row["kind"] not in ("checkpoint", "environment")]


def _timeless(value):
    if isinstance(value, dict):
        return {name: _timeless(item) for name, item in value.items() if name not in (*CLOCKED, *COVERED)}
    return [_timeless(item) for item in value] if isinstance(value, list) else value
