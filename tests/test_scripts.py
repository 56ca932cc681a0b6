"""Run the scripts behind the figures in their quick form."""

import ast
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import benchmark_workers
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(name, *arguments, cwd):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / name), "--quick", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_imports_from_esper_and_from_other_scripts_is_there(script):
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        names = {each.name for each in node.names}
        if node.module.partition(".")[0] == "esper":
            module = importlib.import_module(node.module)
            packages = {name for name in names if not hasattr(module, name)}
            for name in packages:
                importlib.import_module(f"{node.module}.{name}")
        elif (other := SCRIPTS / f"{node.module}.py").is_file():
            assert names <= defined(ast.parse(other.read_text())), f"{script.name} imports from {other.name}"


def defined(tree):
    """Return the names at the top of a module."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {each.asname or each.name for each in node.names}
        else:
            found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    run("benchmark_hot_path.py", "--json", "figures.json", cwd=folder)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.slow
def test_the_benchmark_sets_the_engine_beside_its_floors(benchmark):
    grown, incubating = [result for result in benchmark["results"] if result["case"]["table"] == "states"]
    floors = {"bare stack", "bare, torch's loss"}
    assert set(grown["table"]) == {*floors, "engine auto", "engine vmap", "engine loop", "plain loop"}
    assert set(incubating["table"]) == {*floors, "engine auto"}
    for result in benchmark["results"]:
        assert all(row["eps"] > 0 and row["median_seconds"] <= row["p95_seconds"] for row in result["table"].values())
        assert all(
            set(phases) == {"apply", "train", "tick", "probe", "govern", "close"}
            for phases in result["phases"].values()
        )


@pytest.mark.slow
def test_the_benchmark_compares_cadences_of_attribution(benchmark):
    (cadences,) = [result for result in benchmark["results"] if result["case"]["table"] == "coalitions"]
    assert set(cadences["table"]) == {"every 1000000", "every 1"}


@pytest.mark.slow
def test_the_benchmark_reads_the_device_no_more_than_twice_a_step(benchmark):
    for result in benchmark["results"]:
        assert 1 <= result["reads"]["count"] <= 2
        assert list(result["reads"]["sites"]) == ["runtime.py:read_packet (numpy)"]


@pytest.mark.slow
def test_the_benchmark_says_what_a_population_takes_and_where_it_ran(benchmark):
    assert all(result["memory"]["population_mib"] > 0 for result in benchmark["results"])
    assert {"processor", "cores", "python", "torch", "esper", "load_average_before"} <= set(benchmark)


@pytest.mark.slow
def test_the_benchmark_of_the_training_loop_divides_an_episode_into_its_parts(tmp_path):
    run("benchmark_hot_path.py", "--table", "training", "--json", "figures.json", "--page", "page.md", cwd=tmp_path)
    results = json.loads((tmp_path / "figures.json").read_text())["results"]
    rows = [row for result in results for row in result["rows"]]
    assert [row["level"] for row in rows[:2]] == ["off", "step"]
    for row in rows:
        assert row["EPS"] > 0
        parts = sum(row[name] for name in ("engine", "acting", "storing", "updating", "rows"))
        assert 0.9 < parts <= 1.01  # medians, and what is between the parts
    assert (tmp_path / "page.md").read_text().count("\n| ") == len(rows) + 1


@pytest.mark.slow
def test_what_a_device_changes_is_nothing_where_it_is_the_cpu(tmp_path):
    run("compare_devices.py", "--json", "figures.json", cwd=tmp_path)
    for row in json.loads((tmp_path / "figures.json").read_text())["rows"]:
        assert row["bits twice"] is row["alone and among 4"] is row["alone and among 16"] is True
        assert row["from the CPU, an episode"] == 0


@pytest.mark.slow
def test_the_benchmark_of_images_sets_the_engine_beside_a_bare_loop(tmp_path):
    run("benchmark_images.py", "--json", "figures.json", cwd=tmp_path)
    results = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert [result["task"] for result in results] == ["digits-image-narrow", "photographs"]
    for result in results:
        for clock in ("wall", "processor"):
            assert set(result[clock]) - {"engine bf16"} == {"bare loop", "engine"}
            assert all(row["eps"] > 0 for row in result[clock].values())
        assert result["reads_per_step"] == 1


@pytest.mark.slow
def test_the_benchmark_of_reading_compares_examples_in_memory_with_those_that_are_read(tmp_path):
    run("benchmark_reading.py", "--workers", "1", "--kinds", "waits", "windows", "--out", "page.md", cwd=tmp_path)
    text = (tmp_path / "page.md").read_text()
    assert text.count("## Examples: ") == 2
    assert text.count("| in memory | ") == text.count("| read ahead by 1 worker | ") == 2


@pytest.mark.slow
def test_a_step_under_random_decisions_reads_the_device_no_more_than_twice(tmp_path):
    run("profile_gpu_sync.py", "--json", "reads.json", cwd=tmp_path)
    (result,) = json.loads((tmp_path / "reads.json").read_text())["results"]
    assert 1 <= result["reads_per_step"]["most"] <= 2
    assert list(result["sites"]) == ["runtime.py:read_packet (numpy)"]


@pytest.mark.slow
def test_the_benchmark_for_a_gpu_makes_every_table_on_a_cpu_too(tmp_path):
    out = run("benchmark_gpu.py", "--device", "cpu", "--json", "figures.json", cwd=tmp_path)
    report = json.loads((tmp_path / "figures.json").read_text())
    assert not {"driver", "cuda", "amp", "compile"} & set(report)  # what is known of a GPU alone
    tables = report["tables"]
    assert list(tables) == ["populations", "processes", "images", "cifar", "shares", "compiled", "waits", "memory"]
    assert {row["way"] for row in tables["populations"]} >= {"bare stack", "engine auto", "plain loop"}
    assert all(row["EPS"] > 0 for name in ("populations", "processes", "images") for row in tables[name])
    (compiled,), (waits,), (cifar,) = tables["compiled"], tables["waits"], tables["cifar"]
    assert compiled["compiled passes"] > 0 == compiled["eager passes"] == compiled["recompiles"]
    assert (waits["least"], waits["most"], waits["waits that CUDA names"]) == (1, 1, None)
    assert cifar["steps of an environment a second"] > 0
    assert cifar["images"].startswith("random bytes")
    assert all(row["TFLOP/s"] > 0 and 0 < row["of the copy"] < 1 for row in tables["shares"])
    assert [row["births and prunes"] for row in tables["memory"]] == [0, 4]
    assert out.count("\n## ") == 8


@pytest.mark.slow
def test_the_benchmark_of_telemetry_reads_the_device_once_at_every_level(tmp_path):
    run("benchmark_telemetry.py", "--out", "page.md", cwd=tmp_path)
    lines = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| iris |")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [cell[1] for cell in cells] == ["off", "run", "step", "debug"]
    assert {cell[-1] for cell in cells} == {"1"}
    assert cells[0][-3] == "0.00%"
    sizes = [float(cell[-2]) for cell in cells]
    assert sizes[0] == 0 < sizes[1] < sizes[2] < sizes[3]


@pytest.mark.slow
def test_the_benchmark_of_telemetry_gives_a_slow_output_every_row_with_and_without_a_queue(tmp_path):
    lines = [
        line for line in run("benchmark_telemetry.py", "--outputs", cwd=tmp_path).splitlines() if "| iris |" in line
    ]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [cell[1] for cell in cells] == [
        "none",
        "the step waits for it",
        "a queue of 4,096 rows",
        "a queue of 8 rows",
    ]
    assert len({cell[5] for cell in cells}) == 1
    assert cells[2][6] == "0"


@pytest.mark.slow
def test_the_operators_of_a_step_are_listed(tmp_path):
    run("profile_hot_path_operations.py", "--json", "operators.json", cwd=tmp_path)
    operators = json.loads((tmp_path / "operators.json").read_text())["operators"]
    assert "aten::baddbmm" in {row["operator"] for row in operators}


@pytest.mark.slow
def test_a_killed_training_with_workers_goes_on_with_as_many_and_its_waiting_is_a_time(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    victims = runpy.run_path(str(SCRIPTS / "faults" / "kill.py"))["VICTIMS"]
    (victim,) = (each for each in victims if "--workers" in each.arguments)
    (tmp_path / "config.yaml").touch()
    assert victim.next(tmp_path)[-2:] == ["--workers", "2"]
    timeless = runpy.run_path(str(SCRIPTS / "faults" / "runs.py"))["timeless"]
    assert timeless({"workers": {"number": 2, "lost": 0, "waiting_seconds": 1.5}}) == {
        "workers": {"number": 2, "lost": 0}
    }


@pytest.mark.slow
def test_runs_that_are_killed_finish_as_if_they_had_not_been(tmp_path):
    run("campaign_faults.py", "kill", "--count", "1", "--out", "faults", "--page", "faults.md", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "faults" / "kill.jsonl").read_text().splitlines()]
    assert sum(len(row["kills"]) for row in rows) == 2
    assert not any(row["code"] or row["differences"] or row["left_over"] for row in rows)
    assert not any(kill["refused"] for row in rows for kill in row["kills"])
    assert "| writing a checkpoint |" in (tmp_path / "faults.md").read_text()
    before = (tmp_path / "faults" / "kill.jsonl").stat().st_mtime_ns
    run("campaign_faults.py", "kill", "--count", "1", "--out", "faults", cwd=tmp_path)
    assert (tmp_path / "faults" / "kill.jsonl").stat().st_mtime_ns == before, "kept results were made anew"


@pytest.mark.slow
def test_damaged_checkpoints_are_refused_by_name(tmp_path):
    run("campaign_faults.py", "corrupt", "--out", "faults", "--page", "faults.md", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "faults" / "corrupt.jsonl").read_text().splitlines()]
    assert [row for row in rows if not row["well"]] == []
    assert len(rows) == 40
    assert "| all | 40 | 40 | 0 |" in (tmp_path / "faults.md").read_text()


@pytest.mark.slow
def test_a_disk_that_is_full_is_waited_for_or_the_run_is_resumed(tmp_path):
    run("campaign_faults.py", "disk", "--out", "faults", "--page", "faults.md", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "faults" / "disk.jsonl").read_text().splitlines()]
    assert [(row["back"], row["code"], row["differences"]) for row in rows] == [(True, 0, []), (False, 1, [])]
    assert "2 of 2 cases went as they should" in (tmp_path / "faults.md").read_text()


@pytest.mark.slow
def test_a_nan_in_one_environment_touches_no_other(tmp_path):
    run("campaign_faults.py", "nan", "--out", "faults", "--page", "faults.md", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "faults" / "nan.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert not any(row["others_touched"] for row in rows)
    assert all(row["rolled_back_in_its_step"] and row["terminal_and_penalised"] for row in rows)
    assert "5 of 5 cases went as they should" in (tmp_path / "faults.md").read_text()


@pytest.mark.slow
def test_the_governor_is_silent_where_all_goes_well_and_its_cost_is_measured(tmp_path):
    run("campaign_faults.py", "governor", "--out", "faults", "--page", "faults.md", cwd=tmp_path)
    *silent, cost = [json.loads(line) for line in (tmp_path / "faults" / "governor.jsonl").read_text().splitlines()]
    assert [row["rollbacks"] for row in silent] == [0, 0, 0]
    assert all(ratio > 0 for ratio in (*cost["with"], *cost["control"]))
    assert 0 < cost["share"] < 1
    assert "0 rollbacks over" in (tmp_path / "faults.md").read_text()


@pytest.mark.slow
def test_the_cost_of_checkpoints_is_measured(tmp_path):
    run("campaign_faults.py", "cost", "--out", "faults", "--page", "faults.md", cwd=tmp_path)
    sized, training = (json.loads(line) for line in (tmp_path / "faults" / "cost.jsonl").read_text().splitlines())
    assert sized["bytes"] > sized["json_bytes"] > 0
    assert all(ratio > 0 for clock in (*training["with"], *training["control"]) for ratio in clock)
    assert "| without, once more |" in (tmp_path / "faults.md").read_text()
    early, *_, late = (json.loads(line) for line in (tmp_path / "faults" / "rounds.jsonl").read_text().splitlines())
    assert late["rounds"] == 100 * early["rounds"]
    assert abs(late["bytes"] - early["bytes"]) < 10  # a number of more digits


@pytest.mark.slow
def test_golden_runs_name_what_differs(tmp_path):
    def golden(command, *names):
        line = [sys.executable, str(SCRIPTS / "golden_runs.py"), command, *names, "--file", "golden.json"]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)

    run = "grow-iris-schedule"
    assert golden("check", run).returncode == 2
    assert golden("record", run).returncode == 0
    recorded = json.loads((tmp_path / "golden.json").read_text())
    (machine,) = recorded
    recorded[machine][run]["summary.json: test_accuracy"] = "another"
    (tmp_path / "golden.json").write_text(json.dumps(recorded))
    checked = golden("check", run)
    assert (checked.returncode, checked.stdout.split(": ", 1)[1].strip()) == (1, "summary.json: test_accuracy")


@pytest.mark.campaign
def test_a_network_alone_is_timed_with_the_copy_beside_it_and_without(tmp_path):
    printed = run("benchmark_ghost.py", cwd=tmp_path)
    number = r"\d+\.\d+"
    timed = rf"{number} ms with the copy, {number} ms without \({number}\), {number} ms in a loop \({number}\)"
    line = rf"(digits-narrow|repair|MLP of width \d+): {timed}"
    *lines, machine = printed.splitlines()
    assert [re.fullmatch(line, each) is not None for each in lines] == [True] * 7
    assert machine.startswith("cpu, one thread, ")


@pytest.mark.slow
def test_the_benchmark_of_growth_counts_no_compilation_of_a_reserve(tmp_path):
    printed = run("benchmark_growth.py", "--backend", "eager", cwd=tmp_path)
    live, reserve = ([int(cell) for cell in line.split("|")[2:-1]] for line in printed.splitlines()[-2:])
    assert live[:4] == reserve[:4] == [3, 2, 1, 1]
    assert live[4] > 3
    assert reserve[4:] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratios", "passed", "tried"),
    [((0.81,), True, 1), ((0.5, 0.79, 0.9), True, 3), ((0.79, 0.79, 0.79, 0.9), False, 3)],
    ids=["fast", "the third try", "slow three times"],
)
def test_the_check_of_speed_fails_only_if_three_tries_are_a_fifth_slower(ratios, passed, tried, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    check = runpy.run_path(str(SCRIPTS / "check_speed.py"))["check"]
    left = iter(ratios)
    assert check("a case", lambda: next(left), recorded=1.0) is passed
    assert len(ratios) - len(list(left)) == tried
    assert ("SLOWER" in capsys.readouterr().out) is not passed


@pytest.mark.slow
def test_what_the_rows_of_a_step_take_is_measured(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    assert 0 < importlib.import_module("benchmark_telemetry").share_of_rows("iris", 2, 4) < 1


@pytest.mark.slow
def test_every_case_of_the_check_of_speed_has_a_recorded_ratio(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    recorded = json.loads((SCRIPTS / "speed_ratios.json").read_text())["ratios"]
    assert set(recorded) == set(runpy.run_path(str(SCRIPTS / "check_speed.py"))["measured_ratios"]())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "intact", "data"), [("pruned_cnn", "cnn", "images"), ("quantised_transformer", "transformer", "rows")]
)
def test_the_damaged_networks_are_healed_by_one_command(model, intact, data, tmp_path):
    place = f"{SCRIPTS / 'damaged_networks.py'}:"
    arguments = ["heal", place + model, "--intact", place + intact, "--data", place + data, "--out", "out"]
    subprocess.run([sys.executable, "-m", "esper", *arguments], cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "out" / "healing.json").read_text())["planted"]


def a_measured_worker(**over):
    known = {"steps": 3, "sleep": 2.0, "decide": [0.0], "prepare": [0.0], "descend": [0.0], "descents": 2}
    known |= {"statistics": 0, "gradients": 10, "latency": 0.0, "by_byte": 0.0, "add": 0.0, "uneven": [1.0]}
    return benchmark_workers.WorkerCosts(**known | over)


@pytest.mark.parametrize("workers", [1, 2, 5, 8, 512])
def test_a_simulated_round_without_work_is_its_sleep_and_hops_grow_with_the_logarithm_of_the_workers(workers):
    def seconds(**over):
        return benchmark_workers.simulated(a_measured_worker(**over), workers, workers)

    assert seconds() == (6.0, 1.0, 0.0)
    depth = (workers - 1).bit_length()
    # two sums, each up a tree and down another; other messages are small, but for the last, which has 10 bytes for each worker
    rings = seconds(by_byte=0.01, gradients=0)[0] - 6.0
    assert seconds(by_byte=0.01)[0] - 6.0 - rings == pytest.approx(2 * 2 * depth * 0.1)
    assert seconds(add=0.5)[0] == pytest.approx(6.0 + 2 * depth * 0.5)


def test_simulated_workers_share_cores_first_come_first_served_and_wait_for_the_slowest():
    known = a_measured_worker(descend=[0.25])
    assert benchmark_workers.simulated(known, 8, 2)[0] == pytest.approx(6.0 + 2 * 4 * 0.25)
    assert benchmark_workers.simulated(known, 8, 8) == pytest.approx((6.5, 6.0 / 6.5, 0.5 / 6.5))
    uneven = a_measured_worker(uneven=[0.5, 1.5])
    assert benchmark_workers.simulated(uneven, 512, 512, uneven=True)[:2] == pytest.approx((9.0, 2 / 3), rel=0.05)


@pytest.mark.campaign
def test_messages_between_two_processes_are_measured():
    small, by_byte, add = benchmark_workers.messages(100_000)
    assert small > 0
    assert add > 0
    assert small + by_byte * 100_000 > 0
