"""Keep what a campaign has found so far: JSON lines, one a case, which an interrupted campaign goes on from."""

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def append(path: Path, record: Record) -> None:
    """Add one line in one write, so that a campaign that is killed leaves whole lines."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, json.dumps(record, allow_nan=False).encode() + b"\n")
    finally:
        os.close(descriptor)


def records(path: Path) -> list[Record]:
    """Read the lines of a file, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(head: list[str], lines: list[list[object]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(map(str, line))} |" for line in [head, ["---"] * len(head), *lines]]
