"""The decisions of a run that a filter selects."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from esper.karn.schema import MEND
from esper.leyline.errors import InputError
from esper.leyline.lifecycle.actions import Op
from esper.nissa.events import decode
from esper.nissa.rows import DecisionRow
from esper.store.disk import open_regular
from esper.store.files import EVENTS

FATES = {"yes": True, "no": False}
OPERATIONS = tuple(op.name for op in Op if op != Op.WAIT)


class Filter(NamedTuple):
    """Which decisions are shown; None, and an empty text, select all."""

    env: int | None = None
    slot: str | None = None
    op: str | None = None
    carried_out: bool | None = None  # whether the decision was carried out
    text: str = ""  # occurs in the reason of the decision or of its refusal, in any case of letters

    def accepts(self, row: DecisionRow) -> bool:
        return (
            self.env in (None, row.env)
            and self.slot in (None, row.slot)
            and self.op in (None, row.op)
            and self.carried_out in (None, row.carried_out)
            and self.text.casefold() in f"{row.why or ''}\n{row.refusal or ''}".casefold()
        )


def read_filter(query: Mapping[str, str]) -> Filter:
    """The filter of a form. InputError if a field has a value that it cannot have."""
    env, op, fate = (query.get(name, "") for name in ("env", "op", "carried_out"))
    if env and not (env.isascii() and env.isdigit() and len(env) < 10):
        raise InputError(f"env is {env[:40]!r}; give the number of an environment")
    if op and op not in OPERATIONS:
        raise InputError(f"op is {op[:40]!r}; give one of {', '.join(OPERATIONS)}")
    if fate and fate not in FATES:
        raise InputError(f"carried_out is {fate[:40]!r}; give one of {', '.join(FATES)}")
    return Filter(
        int(env) if env else None, query.get("slot") or None, op or None, FATES.get(fate), query.get("text", "")
    )


def decisions(folder: Path, wanted: Filter) -> Iterator[tuple[bytes, DecisionRow]]:
    """The lines of events.jsonl that hold the selected decisions, with their rows. InputError if the file is damaged.

    Only lines of decisions are decoded, and nothing is kept.
    """
    path = folder / EVENTS
    if not path.exists():
        return
    with open_regular(path, MEND) as file:
        for number, line in enumerate(file, 1):
            if b'"decision"' not in line or not line.endswith(b"\n"):
                continue
            try:
                row = decode(line)
            except InputError as error:
                raise InputError(f"line {number} of {path}: {error}") from None
            if isinstance(row, DecisionRow) and wanted.accepts(row):
                yield line, row


def where(row: DecisionRow) -> str:
    """The episode of a decision, and in a training its cohort and round."""
    if row.cohort is msgspec.UNSET:
        return str(row.episode)
    return f"{row.episode} ({row.cohort}, round {row.round})"
