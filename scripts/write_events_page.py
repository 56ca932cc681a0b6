"""Write docs/events.md from the classes of the rows, the one source of every field of events.jsonl."""

import inspect
from pathlib import Path

import msgspec.inspect

from esper.leyline.lifecycle.vocabulary import Stage
from esper.nissa.rows import KINDS, SCHEMA, PlayedRow, Row, axes_of

HEAD = f"""# The events of a run

`events.jsonl` holds one JSON object a line. `kind` names the kind of row; a field has one type over all kinds, so the
file can be read as one table, in which a field that a kind does not have is null. Figures of one environment are
numbers (`metric`); figures of all environments are lists under a name of their own (`metrics`). A quantity that was
not measured is null or left out, never 0: a field is left out where it would have its default, which the lists below name, and
in a list of lists null stands for a list of nulls. Numbers have the digits that are said of their kind, and a whole one has no
point. E is the number of environments, S that of slots; the [glossary](glossary.md) explains these and the other words.

The first row is a `run` row, and its `schema` is the version of the rows: {SCHEMA}. `telemetry.level` says which rows are
written; a training, which grows whole populations, leaves out the rows of every step (`step`, `gate`, `measurement`, `sensors`,
`reward`, `phases` and `gradients`) where it is not asked for them. After a network was restored, an `anomaly` row says so, and
for `telemetry.raise_steps` steps the level `run` writes what `step` does, and `step` what `debug` does. `gradients` rows are
written at level `debug`, or every `telemetry.gradients_every` steps; at level `debug` they have the norm of each parameter. At
level `step`, `sensors` and `phases` rows come every `telemetry.sensor_rows_every` steps, which is about 30 times in an episode
unless it is set.

```python
import json

import esper

settings = {{"envs": 2, "steps": 8, "models": "none"}}
summary = esper.grow(esper.get_task("iris"), settings, controller="random-valid", run="runs/events", overwrite=True)
rows = [json.loads(line) for line in open("runs/events/events.jsonl")]
print([row["metrics"] for row in rows if row["kind"] == "step"][-1])  # of both environments, after the last step
print([(row["slot"], row["to"]) for row in rows if row["kind"] == "lifecycle"])
```

## Reading the events

`esper.open_run` reads a run folder whether its run goes on, has ended or was killed. Rows of one kind are arrays by field, in
which nan is what was not measured:

```python
run = esper.open_run("runs/events")
print(run.status, run.steps["metrics"].shape, run.steps["stages"].shape)  # (T, E) and (T, E, S)
print(run.frame("lifecycle")[["step", "env", "slot", "to", "why"]].head())  # a pandas data frame
for tally in run.blueprints:  # of each blueprint at each slot: tried, kept, pruned, contribution, parameters
    print(tally.blueprint, tally.slot, tally.tried, tally.kept, tally.params_bought)
for row in run.follow():  # the rows so far, and then each new one until the run ends
    last = row
```

An object with the methods `write(row)` and `close()` gets every row while the run goes on, with or without a run folder:

```python
from esper.nissa.rows import DecisionRow


class Refusals:
    def __init__(self):
        self.rows = []

    def write(self, row):
        if isinstance(row, DecisionRow) and not row.carried_out:
            self.rows.append(row)

    def close(self):
        print(len(self.rows), "decisions were refused")


esper.grow("iris", settings, controller="random-valid", outputs=[Refusals()])
```

One thread calls the object and nothing else, so that a step does not wait for it. What must be used in the thread that made it,
such as a connection of sqlite3, is therefore opened at the first row. The object gets the rows in order, each once. A run that
ends, is interrupted or fails waits until the object has all of them, unless a further Ctrl-C comes; a process that is killed
loses those in the queue. All of them are in `events.jsonl`. Where the object falls behind by more than 4,096 rows, the run waits
for it, and `outputs` of the summary and the [`phases`](#phases) rows count how often and how long. If that is more than 3 % of
its time, a sentence in `esper watch` and at the end of the run says so. [The benchmark](benchmarks/telemetry.md) measures what a
slow object costs.

`esper.train` and `esper.resume` take `outputs` too. If `write` or `close` raises an error, a `RunWarning` is issued, and the run
goes on without the object. `esper.nissa.events.encode(row)` is the row as a line of JSON.

`esper events RUN` prints the rows, `--kind step` those of one kind, `--follow` also those to come. `--format csv` and
`--format parquet` write a table of one kind to `--out FILE`, which gets its name when it is whole; parquet and data frames need
`pip install 'esper-grow[frames]'`.

`esper export-events RUN --to tensorboard`, or `wandb`, `mlflow` or `trackio`, exports [curves](exporters.md) that are made
from the rows.

DuckDB reads the file without a schema: `select step, list_avg(metrics) from 'runs/events/events.jsonl' where kind = 'step'`.
pandas does with `pandas.read_json("runs/events/events.jsonl", lines=True)`.
"""

STAGES = f"""## Stages

Lists of stages hold numbers: {", ".join(f"{stage.value} {stage.name}" for stage in Stage)}.
[lifecycle.md](lifecycle.md) explains them.
"""

NAMES = {
    msgspec.inspect.IntType: "integer",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.StrType: "string",
    msgspec.inspect.LiteralType: "string",
    msgspec.inspect.BoolType: "boolean",
}


def main() -> None:
    (Path(__file__).parents[1] / "docs" / "events.md").write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the whole page."""
    return "\n".join(
        [
            HEAD,
            _section("Every row", Row),
            _section("Every row of an episode", PlayedRow),
            *(_section(_kind(row), row) for row in KINDS.values()),
            STAGES,
        ]
    )


def fields(row: type[Row]) -> dict[str, tuple[str, bool, str]]:
    """Return type, whether it can be null, and meaning, by name in the file, of the fields that not all kinds of rows have."""
    found = msgspec.inspect.type_info(row)
    assert isinstance(found, msgspec.inspect.StructType)
    known = (
        ()
        if row is Row
        else (PlayedRow if issubclass(row, PlayedRow) and row is not PlayedRow else Row).__struct_fields__
    )
    types = {field.name: field.type for field in msgspec.structs.fields(row)}
    return {
        field.encode_name: (*type_name(field.type), _meaning(field.type, axes_of(types[field.name])))
        for field in found.fields
        if field.name not in known
    }


def type_name(kind: msgspec.inspect.Type) -> tuple[str, bool]:
    """Return the JSON type, and whether null is one of its values."""
    match kind:
        case msgspec.inspect.Metadata(type=inner):
            return type_name(inner)
        case msgspec.inspect.UnionType(types=types):
            (inner,) = [each for each in types if not isinstance(each, msgspec.inspect.NoneType)]
            return type_name(inner)[0], True
        case msgspec.inspect.CollectionType(item_type=item) | msgspec.inspect.ListType(item_type=item):
            return f"list of {type_name(item)[0]}", False
        case msgspec.inspect.DictType(value_type=value):
            return f"map of string to {type_name(value)[0]}", False
    return NAMES[type(kind)], False


def _meaning(kind: msgspec.inspect.Type, axes: str) -> str:
    """Return the description of a field, behind the shape of its lists; the lists of a map have theirs in the description."""
    assert isinstance(kind, msgspec.inspect.Metadata), "every field says what it means"
    assert kind.extra_json_schema is not None
    shape = f"({axes},) " if len(axes) == 1 else f"({', '.join(axes)}) "
    return f"{shape if axes and type_name(kind)[0].startswith('list') else ''}{kind.extra_json_schema['description']}"


def _kind(row: type[Row]) -> str:
    return f"`{row.__struct_config__.tag}`"


def _section(title: str, row: type[Row]) -> str:
    lines = (
        f"| `{name}` | {kind}{' or null' if null else ''} | {meaning} |"
        for name, (kind, null, meaning) in fields(row).items()
    )
    explained = inspect.cleandoc(row.__doc__ or "")
    return "\n".join([f"## {title}\n", f"{explained}\n", "| field | type | meaning |", "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    main()
