"""Run folders, settings and names that were crafted to do harm end in one sentence, and steer no terminal."""

import hashlib
import io
import json
import os
import re
import shutil
import stat

import pytest
import yaml
from rich.console import Console

import esper
from esper.api import load
from esper.cli import main
from esper.karn.comparison import content_of as comparison_content
from esper.karn.comparison import read_comparison, result_table
from esper.karn.evaluation import draw_evaluation, print_evaluation
from esper.karn.reader import read_model
from esper.karn.report.page import content_of
from esper.karn.terminal.console import print_summary
from esper.kasmina.network.export import MODEL, TOPOLOGY
from esper.leyline.config.parsing import parse_yaml
from esper.leyline.config.tree import build_config, dump_config, parse_setting
from esper.leyline.messages import InputError, printable
from esper.runs.configuration import load_config_file
from esper.store.checkpoint import FACTS
from esper.store.disk import SUMS, checksum_of, sums_of
from esper.tasks.catalog import get_task
from populations import small_config

CLEAR = "\x1b[2J\x9b31m\u202e"  # clears the screen, takes another colour, turns the text around
CLEARED = r"\x1b[2J\x9b31m\u202e"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    config = small_config(
        task="iris", envs=2, steps=2, data={"batch_size": 16}, checkpoint={"every_steps": 1}, models="best"
    )
    esper.grow(get_task("iris"), config, controller="never", run=folder)
    return folder


@pytest.fixture
def run(ran, tmp_path):
    shutil.copytree(ran, tmp_path / "r")
    return tmp_path / "r"


@pytest.fixture
def stopped(run):
    """Leave a run so that it goes on where it is resumed."""
    (run / "summary.json").unlink()
    return run


@pytest.fixture
def network(run):
    return next((run / "models").glob("env-*"))


def esper_command(*arguments):
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    return int(left.value.code or 0)


def sentence(capsys, *arguments):
    """Return what a command that is refused says."""
    capsys.readouterr()
    assert esper_command(*arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def rewrite(run, change):
    """Change the state of the checkpoints, as someone who knows of the checksums."""
    for folder in (run / "checkpoints").glob("step-*"):
        facts = json.loads((folder / FACTS).read_text())
        change(facts)
        del facts["checksum"]
        text = json.dumps(facts | {"checksum": checksum_of(facts)})
        (folder / FACTS).write_text(text)
        (run / "checkpoints" / "latest").write_text(f"{folder.name} {hashlib.sha256(text.encode()).hexdigest()}\n")


# Files.


@pytest.mark.parametrize(
    "summary",
    [
        {"status": "finished"},
        {"rollbacks": 5},
        {"grown": [{"block0": {}}] * 2, "seeds": []},
        {"test_objective": {"host": ["x"], "grown": ["x"]}},
        {"host_params": 1e999},
    ],
)
def test_a_summary_that_is_none_is_worked_out_again(run, capsys, summary):
    known = json.loads((run / "summary.json").read_text())
    crafted = summary if summary == {"status": "finished"} else known | summary
    (run / "summary.json").write_text(json.dumps(crafted))
    assert esper_command("resume", run) == 0
    assert "run folder: " in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["test_accuracy"] == known["test_accuracy"]


def test_a_deeply_nested_state_with_a_valid_checksum_is_not_used(stopped, capsys):
    nested = json.loads("[" * 600 + "]" * 600)
    rewrite(stopped, lambda facts: facts["state"].update(seq=nested))
    assert esper_command("resume", stopped) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("seq", ["abc", 1.5, None, [], {}])
def test_a_state_whose_count_of_events_is_no_number_is_refused(stopped, capsys, seq):
    rewrite(stopped, lambda facts: facts["state"].update(seq=seq))
    assert "does not fit the task and the controller" in sentence(capsys, "resume", stopped)


@pytest.mark.parametrize("steps", ["1e999", "-1e999", "NaN", '"x"', "[[]]"])
def test_changes_that_hold_no_number_of_steps_are_refused(stopped, capsys, steps):
    digest = "0" * 64
    entry = f'[{{"time": 1, "steps": {steps}, "set": [], "from": "{digest}", "to": "{digest}"}}]'
    (stopped / "changes.json").write_text(entry)
    assert "does not hold the changes of a run" in sentence(capsys, "resume", stopped)


def test_a_lock_that_is_a_pipe_is_refused_and_stays(stopped, capsys):
    os.mkfifo(stopped / "lock")
    assert f"{stopped / 'lock'} is not a regular file" in sentence(capsys, "resume", stopped)
    assert stat.S_ISFIFO((stopped / "lock").stat().st_mode)


@pytest.mark.parametrize(
    "name", ["events.jsonl", "events-cut-1.jsonl", "summary.json", "changes.json", "models/env-000"]
)
def test_a_pipe_in_a_run_folder_is_refused_and_not_waited_for(stopped, capsys, name):
    path = stopped / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert f"{path} is not a regular file" in sentence(capsys, "resume", stopped)


@pytest.mark.parametrize("name", ["summary.json", "environment.json", "changes.json"])
def test_a_folder_in_the_place_of_a_file_is_refused_and_stays(stopped, capsys, name):
    (stopped / name).unlink(missing_ok=True)
    (stopped / name / "mine").mkdir(parents=True)
    assert f"{stopped / name} is a folder; remove it" in sentence(capsys, "resume", stopped)
    assert (stopped / name / "mine").is_dir()


def test_a_sparse_model_is_refused_by_its_size(network, capsys):
    os.truncate(network / MODEL, 2**40)
    with pytest.raises(InputError, match=r"it has 1,099,511,627,776 bytes, and the network takes at most 4,"):
        load(network)


def test_a_sparse_model_on_an_own_host_is_not_exported(ran, tmp_path, capsys):
    run = tmp_path / "r"
    shutil.copytree(ran, run)
    (network,) = (run / "models").glob("env-*")
    topology = json.loads((network / TOPOLOGY).read_text())
    (network / TOPOLOGY).write_text(json.dumps(topology | {"host": None, "parameters": 2**39}))
    (network / SUMS).unlink()
    os.truncate(network / MODEL, 2**40)
    assert "holds 1,099,511,627,776 bytes, and without its host" in sentence(
        capsys, "export", run, "--out", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_a_config_with_a_number_to_the_base_60_is_refused(stopped, capsys):
    text = (stopped / "config.yaml").read_text()
    for size, words in ((50_000, "seed is '1:1:1"), (450_000, "has more than 131,072 bytes")):
        (stopped / "config.yaml").write_text(text.replace("seed: 0", f"seed: {'1:' * size}1"))
        assert words in sentence(capsys, "resume", stopped)


# Files that were edited, as the report and the comparison read them.


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Grow a run whose rows are of every kind that a growth writes."""
    folder = tmp_path_factory.mktemp("recorded") / "r"
    settings = {"envs": 2, "steps": 4, "data": {"batch_size": 16}, "telemetry": {"level": "debug"}, "models": "none"}
    settings |= {"baselines": ["twin", "same-size"], "report": False}
    esper.grow("iris", settings, controller="random-valid", run=folder, progress=False)
    return folder


@pytest.fixture
def edited(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "edited")
    return tmp_path / "edited"


def edits(value):
    """Yield what a value may be replaced by."""
    yield from (None, -1, 10**30, "x", [])
    if isinstance(value, list) and value:
        yield from (value[:-1], [*value, value[0]])
        yield from (
            [inner, *value[1:]] for inner in (-1, 7, "x", [], value[0][:-1] if isinstance(value[0], list) else {})
        )
    elif isinstance(value, dict):
        yield from ({**value, key: inner} for key in list(value)[:3] for inner in (-1, "x", [], None))
        yield from ({key: inner for key, inner in value.items() if key != name} for name in list(value)[:3])


def each_edited(content):
    """Yield a mapping without one of its keys, or with another value there, for each key and value."""
    for name, value in content.items():
        yield {key: inner for key, inner in content.items() if key != name}
        yield from ({**content, name: other} for other in edits(value))


def read_all(folder, other):
    """Read a folder as its report and a comparison with another run do; gives the sentence if it is refused."""
    try:
        comparison = read_comparison([folder, other])
        content_of(comparison.runs[0].model, "r")
        comparison_content(comparison)
        result_table(comparison.runs)
    except InputError as refusal:
        return str(refusal)
    return None


def test_an_edited_row_is_read_or_named_with_its_line(edited, recorded):
    path, refused, kinds = edited / "events.jsonl", 0, set()
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        row = json.loads(line)
        if row["kind"] in kinds:
            continue
        kinds.add(row["kind"])
        for other in [*each_edited(row)][::2]:
            path.write_bytes(b"".join([*lines[:number], json.dumps(other).encode() + b"\n", *lines[number + 1 :]]))
            said = read_model_of(edited)
            refused += said is not None
            assert said is None or re.match(r"line \d+ of \S+events\.jsonl: |\S+events\.jsonl holds rows of ", said), (
                said
            )
    assert refused > 250
    assert len(kinds) >= 10


def read_model_of(folder):
    """Return the sentence with which the rows of a folder are refused; None if they are not."""
    try:
        read_model(esper.open_run(folder))
    except InputError as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize("name", ["summary.json", "environment.json", "config.yaml"])
def test_an_edited_file_is_read_or_named_with_its_key(edited, recorded, name):
    path, refused = edited / name, 0
    content = yaml.safe_load(path.read_text())  # JSON is YAML
    sections = [{**content, key: other} for key in ("gates", "seeds") for other in each_edited(content.get(key, {}))]
    every = [[], "x", {}, *[*sections, *each_edited(content)][:: 5 if name == "config.yaml" else 2]]
    for place, other in enumerate(every):
        path.write_text(json.dumps(other))
        said = read_of(edited, name)
        refused += said is not None
        if said is None and place % 8 == 0:  # what is of the schema can be shown
            said = read_all(edited, recorded)
        assert said is None or said.startswith(str(path)), said
    assert refused > 5


def read_of(folder, name):
    """Return the sentence with which a file of a folder is refused; None if it is not."""
    run = esper.open_run(folder)
    try:
        getattr(run, {"config.yaml": "checked_config"}.get(name, name.partition(".")[0]))
    except InputError as refusal:
        return str(refusal)
    return None


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("lifecycle", {"env": 7}, "env is 7, and the run has 2 environments"),
        ("lifecycle", {"slot": "cellar"}, "slot is 'cellar', and the run has the slots block0, block1"),
        ("lifecycle", {"to": "ASLEEP"}, "Invalid enum value 'ASLEEP' - at `$.to`"),
        ("step", {"stages": [[0, 9], [0, 0]]}, "Expected `int` <= 7 - at `$.stages[0][1]`"),
        ("step", {"metrics": [0.5]}, "metrics has 1 entry where the run has 2 environments"),
        ("step", {"alphas": [[0.0], [0.0]]}, "alphas has 1 entry where the run has 2 slots"),
    ],
)
def test_the_commands_name_the_line_of_a_row_that_is_not_of_its_run(edited, recorded, capsys, kind, change, sentence):
    path = edited / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    number = next(index for index, row in enumerate(rows) if row["kind"] == kind)
    rows[number] |= change
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for command in (("report", edited), ("compare", recorded, edited), ("events", edited)):
        line = said_by(capsys, *command)
        assert f"line {number + 1} of {path}: " in line
        assert sentence in line


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "is not the summary of a run: Expected `object`, got `array`"),
        ('{"grown_params": []}', "is not the summary of a run: Object missing required field"),
        ("{", "is not valid JSON"),
    ],
)
def test_the_commands_name_a_summary_that_is_none(edited, recorded, capsys, content, sentence):
    (edited / "summary.json").write_text(content)
    for command in (("report", edited), ("compare", recorded, edited)):
        assert f"{edited / 'summary.json'} {sentence}" in said_by(capsys, *command)


@pytest.mark.parametrize(
    ("entry", "value", "sentence"),
    [
        ("verdict", 5, "Expected `str`, got `int` - at `$.verdict`"),
        ("compared", {"twin": 7}, "Expected `object`, got `int` - at `$.compared[...]`"),
        ("rare_classes", {"rare": 3}, "Expected `array`, got `int` - at `$.rare_classes.rare`"),
    ],
)
def test_the_commands_name_an_entry_of_the_summary_that_is_of_another_type(edited, capsys, entry, value, sentence):
    path = edited / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {entry: value}))
    assert f"{path} is not the summary of a run: {sentence}" in said_by(capsys, "report", edited)


def said_by(capsys, *command):
    """Return the one line on stderr of a command that is refused."""
    capsys.readouterr()
    assert esper_command(*command) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


# Numbers of YAML.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("-3", -3),
        ("1e-3", 0.001),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("1_000", "1_000"),
        ("'5'", "5"),
        ("!!int 7", 7),
    ],
)
def test_a_number_is_one_of_yaml_1_2(text, value):
    found = parse_yaml(text, "x", "mend")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["0x" + "f" * 5000, "9" * 5000, "!!int " + "1:" * 5000 + "1", "!!float '" + "1:" * 5000 + "1'"]
)
def test_a_number_of_thousands_of_digits_is_refused(text):
    with pytest.raises(InputError, match=r"holds a number of [\d,]+ characters, of which at most 100 are read"):
        parse_setting(f"seed={text}")


@pytest.mark.parametrize("text", ["!!int x", "!!int ''", "!!float x", "!!int 1.5", "!!int 0xz"])
def test_what_is_tagged_a_number_and_is_none_is_refused(text):
    with pytest.raises(InputError, match="is not valid YAML"):
        parse_yaml(text, "x", "mend")


@pytest.mark.parametrize("name", ["0o17", "1e5", "1:30", "010", "1_000", ".inf", "0x1F", "yes", "null", "12"])
def test_a_text_that_reads_like_a_number_is_a_text_again_behind_a_file(tmp_path, name):
    config = build_config({"task": name, "ppo": {"rounds": 3}, "optimizer": {"lr": 1e-05}})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert build_config(load_config_file(str(tmp_path / "config.yaml"))) == config


# Terminals.


def test_what_steers_a_terminal_is_written_as_an_escape():
    assert printable(f"{CLEAR}\ud800\n\t\x07[red]é±🙂") == CLEARED + r"\ud800\n\t\x07[red]é±🙂"


def test_a_sentence_of_an_error_steers_no_terminal():
    assert str(InputError(f"a\nb {CLEAR}")) == f"a b {CLEARED}"


def test_a_lock_of_others_steers_no_terminal(stopped, capsys):
    owner = {"pid": 1, "host": CLEAR, "started": None, "since": CLEAR, "command": [CLEAR]}
    (stopped / "lock").write_text(json.dumps(owner))
    assert esper_command("resume", stopped) == 0
    said = capsys.readouterr()
    assert f"process 1 on {CLEARED}" in said.err
    assert "\x1b" not in said.err + said.out


def test_a_topology_of_others_steers_no_terminal(run, network, tmp_path, capsys):
    facts = json.loads((network / TOPOLOGY).read_text())
    seed = {"slot": CLEAR, "after": 1, "blueprint": CLEAR, "blend": "add", "alpha": 1.0, "reads": 16, "writes": 16}
    (network / TOPOLOGY).write_text(json.dumps(facts | {"seeds": [seed]}))
    named = [path for path in network.iterdir() if path.name != SUMS]
    (network / SUMS).write_bytes(sums_of({path.name: path.read_bytes() for path in named}))
    esper_command("export", run, "--out", tmp_path / "out")
    said = capsys.readouterr()
    assert CLEARED in said.out + said.err
    assert "\x1b" not in said.out + said.err


def test_a_link_of_others_steers_no_terminal(stopped, capsys):
    (stopped / f"events-{CLEAR}.jsonl").symlink_to("/nowhere")
    assert f"events-{CLEARED}.jsonl is a link" in sentence(capsys, "resume", stopped)


@pytest.mark.parametrize("name", ["[/]", "[link=https://example.org]here[/link]", "[red]x", CLEAR])
def test_names_of_others_are_printed_as_they_are_and_rendered_by_nothing(run, name):
    summary = json.loads((run / "summary.json").read_text())
    key = f"test_{summary['metric']}"
    summary |= {"metric": name, f"test_{name}": summary.pop(key), "task": name, "controller": name, "device": name}
    summary["constant"] = {f"test_{name}": summary["constant"][key]}
    summary["grown"] = [{name: name}] * 2
    output = io.StringIO()
    print_summary(summary, Console(file=output, force_terminal=True, width=200), name)
    assert output.getvalue().count(printable(name)) >= 5
    assert "\x1b[2J" not in output.getvalue()
    assert "\x1b]8" not in output.getvalue(), "a link"


@pytest.mark.parametrize("name", ["[/]", "$x", "$\\frac$", CLEAR])
def test_names_of_others_in_an_evaluation_are_printed_and_drawn_as_they_are(name):
    estimate = {"value": 0.5, "low": 0.25, "high": 0.75}
    row = {
        "name": name,
        **dict.fromkeys(("objective", "objective_iqm", "metric", "added_params", "kept"), estimate),
        "seconds": 1.0,
    }
    pair = {"controller": name, "rule": name, "difference": estimate, "probability": estimate}
    search = {
        "permissive_gates": False,
        "episodes": 1,
        "seconds": 1.0,
        "candidates": 1,
        "plan": name,
        "entries": [{"op": name}],
    }
    task = {
        "task": name,
        "metric": name,
        "sampled": False,
        "problems": 1,
        "runs_of_each": 2,
        "controllers": [row],
        "comparisons": [pair],
    }
    record = {
        "tasks": [task | {"search": search | {"probe_objective": 0.5}}],
        "together": None,
        "rules": [name],
        "confidence": 0.95,
        "draws": 10,
        "seeds": [0],
        "part": "heldout",
    }
    output = io.StringIO()
    print_evaluation(record, Console(file=output, force_terminal=True, width=200))
    assert printable(name) in output.getvalue()
    assert "\x1b[2J" not in output.getvalue()
    assert CLEAR.encode() not in draw_evaluation(record, "svg")
