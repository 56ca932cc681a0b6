"""Runs exported to TensorBoard, Weights & Biases, MLflow and trackio, read back with the readers of these packages."""

import io
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import esper
from esper.cli import main
from esper.karn.exporters import as_markdown, final_table
from esper.leyline.distribution import TARGETS
from esper.leyline.messages import RunWarning
from exported import curves_of_steps
from thinning import crossed

pytestmark = [pytest.mark.third_party, pytest.mark.filterwarnings("ignore")]
missing = [name for name in TARGETS if find_spec(name) is None]
if missing:
    pytest.skip(f"not installed: pip install -e '.[{','.join(missing)}]'", allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "exporters.md"
SETTINGS = {"envs": 3, "steps": 16, "models": "best", "baselines": ["twin"], "checkpoint": {"every_steps": 5}}
KILLED = """
import os, signal, sys
import esper
from esper.nissa.rows import StepRow

class Kill:
    def write(self, row):
        if isinstance(row, StepRow) and row.step == 8:
            os.kill(os.getpid(), signal.SIGKILL)
    def close(self):
        pass

esper.grow("iris", SETTINGS, controller="random-valid", run=sys.argv[1], outputs=[Kill()], progress=False)
"""
KILLED_IN_STORE = """
import os, signal, sys, threading, time
from pathlib import Path
from esper.karn.exporters import MLflow

folder = Path(sys.argv[1])

def kill():
    while not (folder / "mlflow.part").exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
MLflow(folder).open("first", "0123456789abcdef", {})
"""
KILLED_AT_WORK = """
import os, signal, sys
from pathlib import Path
import esper
from esper.karn.exporters import MAKE
from esper.karn.exporters import export_of

folder, name, into, place = sys.argv[1:]
run = esper.open_run(Path(folder))
kept = getattr(MAKE[name], place)

def killed(*values):
    if place == "flush":
        kept(*values)
    if place == "flush" or values[1] == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    kept(*values)

setattr(MAKE[name], place, killed)
with export_of(run, name, Path(into)) as (export, _):
    export.update()
"""
TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
names = SQLiteStorage.get_runs("esper")
print(json.dumps({name: SQLiteStorage.get_logs("esper", name) for name in names}, default=str))
"""


def read_tensorboard(store):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    runs = {}
    for folder in sorted(path for path in store.iterdir() if not path.name.startswith(".")):
        read = EventAccumulator(str(folder), {"tensors": 0, "images": 0}).Reload()
        run = runs[folder.name] = SimpleNamespace(curves={}, tables=[], images=[])
        for tag in read.Tags()["tensors"]:
            values = [(each.step, make_ndarray(each.tensor_proto)) for each in read.Tensors(tag)]
            if read.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
                run.curves[tag] = [(x, value.item()) for x, value in values]
            elif tag.startswith("final_table"):
                run.tables += [value.item().decode() for _, value in values]
        run.images += [(each.height, each.width) for tag in read.Tags()["images"] for each in read.Images(tag)]
    return runs


def read_wandb(store):
    runs = {}
    for path in sorted(store.glob("wandb/offline-run-*/run-*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", str(path), "--json"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        for line in map(json.loads, lines):
            if line["type"] == "run":
                name, identity = line["run"]["display_name"], line["run"]["run_id"]
                run = runs.setdefault(name, SimpleNamespace(curves={}, tables=[], images=[], identity=identity))
                assert run.identity == identity
            if line["type"] == "history":
                items = line["history"]["item"]
                for key, value in items.items():
                    if not key.startswith(("_", "final_table", "architecture")):
                        run.curves.setdefault(key, []).append((items["_step"], value))
                if "final_table.path" in items:
                    table = json.loads((path.parent / "files" / items["final_table.path"]).read_text())
                    run.tables.append((table["columns"], table["data"]))
                    run.images.append((items["architecture.height"], items["architecture.width"]))
    return runs


def read_mlflow(store):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "esper"]
    runs = {}
    for found in client.search_runs([experiment.experiment_id]):
        name, run = found.info.run_name, SimpleNamespace(curves={}, tables=[], images=[])
        assert name not in runs
        runs[name] = run
        for key in found.data.metrics:
            run.curves[key] = [(each.step, each.value) for each in client.get_metric_history(found.info.run_id, key)]
        files = {each.path for each in client.list_artifacts(found.info.run_id)}
        if "final_table.json" in files:
            table = mlflow.artifacts.load_dict(f"{found.info.artifact_uri}/final_table.json")
            run.tables.append((table["columns"], table["data"]))
        if "architecture.png" in files:
            from matplotlib.image import imread

            run.images.append(imread(client.download_artifacts(found.info.run_id, "architecture.png")).shape[:2])
    return runs


def read_trackio(store):
    environment = os.environ | {"TRACKIO_DIR": str(store)}
    done = subprocess.run([sys.executable, "-c", TRACKIO], env=environment, check=True, capture_output=True, text=True)
    runs = {}
    for name, logs in json.loads(done.stdout.splitlines()[-1]).items():
        run, curves = SimpleNamespace(tables=[], images=[]), defaultdict(list)
        for log in logs:
            for key, value in log.items():
                if key == "final_table":
                    rows = [list(row.values()) for row in value["_value"]]
                    run.tables.append((list(value["_value"][0]), rows))
                elif key == "architecture":
                    from matplotlib.image import imread

                    run.images.append(imread(store / "media" / value["file_path"]).shape[:2])
                elif key not in ("step", "timestamp"):
                    curves[key].append((log["step"], value))
        run.curves = dict(curves)
        runs[name] = run
    return runs


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


def exported(folder, target, into, *options):
    """Export a run by the command, here or, where a target needs another folder, in a process; return what it prints."""
    arguments = ["export-events", str(folder), "--to", target, "--into", str(into), *options]
    if target == "trackio":  # has one folder a process
        done = subprocess.run([sys.executable, "-m", "esper", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
    with redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code
    return said.getvalue()


def check_whole(run, folder):
    """Check that the run in the target has the numbers of the journal, each once and in order, one image and the final table."""
    assert run.curves == curves_of_steps(folder)
    for values in run.curves.values():
        assert np.all(np.diff([x for x, _ in values]) > 0)
    table = final_table(esper.open_run(folder).summary)
    cells = [list(table.columns), [list(row) for row in table.rows]]
    assert run.tables in ([(cells[0], cells[1])], [as_markdown(table)])
    assert len(run.images) == 1
    assert run.images[0][1] == 1300


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Grow a run with all exporters that is killed behind its checkpoint, and then continued."""
    folder = tmp_path_factory.mktemp("runs") / "iris"
    settings = SETTINGS | {"telemetry": {"exporters": list(TARGETS)}}
    code = KILLED.replace("SETTINGS", repr(settings))
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=False, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert [row.step for row in esper.open_run(folder).rows("step")][-1] == 8
    esper.resume(folder, progress=False)
    assert list(folder.glob("events-cut-*.jsonl")), "rows behind the checkpoint are written again"
    return folder


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_that_was_killed_and_resumed_is_one_run_in_the_target_with_every_number_once(resumed, target):
    runs = READERS[target](resumed.parent / "exports" / target)
    assert list(runs) == ["iris"]
    check_whole(runs["iris"], resumed)


@pytest.mark.parametrize("target", TARGETS)
def test_an_export_afterwards_equals_the_one_while_the_run_went_on(resumed, target, tmp_path):
    said = exported(resumed, target, tmp_path / "after")
    named = re.escape(f"{tmp_path / 'after'}: {target} has 16 points up to x = 15, as the run iris-")
    assert re.fullmatch(rf"{named}\w{{6}}\n", said)
    (after,), (live,) = (
        READERS[target](store).values() for store in (tmp_path / "after", resumed.parent / "exports" / target)
    )
    assert after.curves == live.curves
    assert after.tables == live.tables
    exported(resumed, target, tmp_path / "after", "--follow")
    (again,) = READERS[target](tmp_path / "after").values()
    assert again.curves == live.curves
    assert again.tables == live.tables


@pytest.mark.parametrize(("target", "place"), crossed(list(TARGETS), ["scalars", "flush"]))
def test_an_exporter_that_was_killed_at_work_loses_no_point_and_writes_none_twice(
    resumed, target, place, tmp_path, monkeypatch
):
    # a process of wandb that outlives the killed one would hold its run
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    command = [sys.executable, "-c", KILLED_AT_WORK, str(resumed), target, str(tmp_path / "store"), place]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    exported(resumed, target, tmp_path / "store")
    (run,) = READERS[target](tmp_path / "store").values()
    check_whole(run, resumed)


@pytest.mark.parametrize("target", TARGETS)
def test_names_of_users_break_no_target_and_a_run_that_was_killed_is_said_to_be(target, tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 3))
    task = esper.task("<b>`x`\x1b[31m|\"'$%{}/..\n漢", x, (x[:, 0] > 0).astype(int), host=esper.mlp(3, 4, 2, blocks=1))
    folder = tmp_path / "a <b>'\"`$(x)\x1b 漢"
    esper.grow(
        task, {"envs": 2, "steps": 3, "models": "none", "baselines": []}, controller="never", run=folder, progress=False
    )
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    summary = folder / "summary.json"
    kept = summary.read_bytes()
    (folder / "events.jsonl").write_bytes(b"".join(lines[:-4]))
    summary.unlink()
    said = exported(folder, target, tmp_path / "store")
    assert "was killed: what it has written so far is exported, without image and final table" in said
    (run,) = READERS[target](tmp_path / "store").values()
    assert (run.curves, run.tables, run.images) == (curves_of_steps(folder), [], [])
    (folder / "events.jsonl").write_bytes(b"".join(lines))
    summary.write_bytes(kept)
    exported(folder, target, tmp_path / "store")
    (run,) = READERS[target](tmp_path / "store").values()
    check_whole(run, folder)


@pytest.mark.slow
def test_a_store_of_mlflow_is_made_whole_though_an_exporter_was_killed_on_the_way_and_two_begin_at_once(tmp_path):
    store = tmp_path / "store"
    (store / ".esper").mkdir(parents=True)
    (store / ".esper" / "target").write_text("mlflow\n")
    done = subprocess.run([sys.executable, "-c", KILLED_IN_STORE, str(store)], check=False, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    assert (store / "mlflow.part").exists()
    assert not (store / "mlflow.db").exists()
    command = [sys.executable, "-m", "esper", "export-events", "--to", "mlflow", "--into", str(store)]
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        settings = {"envs": 2, "steps": 3, "models": "none", "baselines": []}
        esper.grow("iris", settings, controller="never", run=folder, progress=False)
    begun = [subprocess.Popen([*command, str(folder)], stderr=subprocess.PIPE) for folder in folders]
    assert [(process.communicate()[1], process.returncode)[1] for process in begun] == [0, 0]
    runs = {name.rpartition("-")[0]: run for name, run in read_mlflow(store).items()}
    assert not (store / "mlflow.part").exists()
    for folder in folders:
        check_whole(runs[folder.name], folder)


def test_the_python_of_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)):
        exec(compile(block, f"exporters.md, block {index}", "exec"), namespace)
    assert namespace["medians"] == curves_of_steps(tmp_path / "runs" / "first")["metric/median"]


def results(folder):
    """Return the rows without those on the time that something took, and without numbers and times."""
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kinds = ("step", "decision", "lifecycle", "measurement", "rollback", "episode", "evaluation")
    return [{key: row[key] for key in row if key not in ("seq", "time")} for row in rows if row["kind"] in kinds]


def test_an_exporter_that_fails_is_dropped_and_the_results_are_the_same_to_the_bit(tmp_path):
    settings = SETTINGS | {"models": "all"}
    esper.grow("iris", settings, controller="heuristic", run=tmp_path / "alone" / "r", progress=False)
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "tensorboard").write_text("a file")
    with pytest.warns(RunWarning, match="the exporter to tensorboard failed, and the run is not") as caught:
        esper.grow(
            "iris",
            settings | {"telemetry": {"exporters": "tensorboard"}},
            controller="heuristic",
            run=tmp_path / "r",
            progress=False,
        )
    assert sum(each.category is RunWarning for each in caught) == 1
    assert "cannot be read as a folder" in str(caught[0].message)
    assert results(tmp_path / "r") == results(tmp_path / "alone" / "r")
    weights = [sorted((tmp_path / place / "models").glob("env-*/*.safetensors")) for place in ("r", "alone/r")]
    assert [path.read_bytes() for path in weights[0]] == [path.read_bytes() for path in weights[1]]
    assert len(weights[0]) == 3
