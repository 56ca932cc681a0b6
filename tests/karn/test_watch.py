"""Test the window in the terminal, at 80 by 24: what it shows of runs in any state, and that it only reads."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from textual.widgets import Static
from torch.utils.data import TensorDataset

import esper
from esper.cli import main
from esper.karn.terminal.watch import Watch, plot
from esper.leyline.messages import InputError
from esper.nissa.hub import Guarded
from pages import EVIL


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched") / "iris"
    settings = {"envs": 30, "steps": 10, "models": "none", "baselines": [], "data": {"batches_per_step": 2}}
    esper.grow("iris", settings, controller="random-valid", run=folder, progress=False)
    return folder


def driven(folder, keys=(), between=None, size=(80, 24)):
    """Return the lines of the screen after the keys; `between` is called before them, and looked at."""

    async def drive():
        app = Watch(folder, every=0.05)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            if between is not None:
                between(app)
                app.look()
            for key in keys:
                await pilot.press(key)
            await pilot.pause()
            return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]

    return asyncio.run(drive())


def test_the_window_shows_state_grid_curve_and_the_chosen_environment(run):
    lines = driven(run)
    assert len(lines) == 24
    assert all(len(line) == 80 for line in lines)
    screen = "\n".join(lines)
    assert "iris: iris, random-valid, 30 environments, cpu: finished" in screen
    assert "[####################] step 10 of 10" in screen
    assert "environment 0, step 9" in screen
    assert "metric (median, 10th and 90th percentile)" in screen
    stages = esper.open_run(run).steps["stages"][-1]
    signs = ".gtbhFxe"
    for env in range(10):
        (line,) = [line for line in lines if line[:5] == f"{env:>4} "]
        assert [line[5 + 3 * slot] for slot in range(stages.shape[1])] == [signs[stage] for stage in stages[env]]


def test_the_head_says_how_long_training_waits_for_examples_that_are_read_ahead(tmp_path):
    x = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    host = esper.mlp(inputs=6, width=8, classes=3)
    task = esper.task("t", TensorDataset(x, x[:, :3].argmax(1)), host=host, classes=3, stream=True)
    settings = {"envs": 2, "steps": 3, "models": "none", "baselines": [], "data": {"batches_per_step": 2}}
    esper.grow(task, settings, run=tmp_path / "run", progress=False)
    screen = "\n".join(driven(tmp_path / "run"))
    assert re.search(r"seeds: \d+ planted, .*; reading \d+ %, p95 [\d.e-]+ ms", screen)


def test_the_window_says_that_a_run_waits_for_its_outputs(run, tmp_path, monkeypatch):
    class Slow:
        def write(self, row):
            time.sleep(0.01)

        def close(self):
            pass

    monkeypatch.setattr(Guarded.__init__, "__defaults__", (None, 0))
    settings = {"envs": 2, "steps": 4, "models": "none", "baselines": []}
    esper.grow("iris", settings, controller="random-valid", run=tmp_path / "r", outputs=[Slow()], progress=False)
    assert "because an output was slower" in "\n".join(driven(tmp_path / "r", size=(400, 24)))
    assert "because an output was slower" not in "\n".join(driven(run, size=(400, 24)))


def test_keys_move_through_the_population_and_change_what_is_shown(run):
    screen = "\n".join(driven(run, ["up", "left", "down", "down", "right", "c"]))
    assert "environment 2, step 9" in screen
    assert "> 1 " in screen
    assert "loss (median" in screen
    lines = driven(run, ["end"])
    assert "environment 29, step 9" in "\n".join(lines)
    assert any(line.startswith("  29 ") for line in lines)
    assert "rollbacks: 0" in "\n".join(driven(run, ["a"]))
    assert "environment 0, step 9" in "\n".join(driven(run, ["a", "a"]))


def test_a_question_mark_explains_what_is_under_the_cursor(run):
    screen = " ".join(" ".join(driven(run, ["question_mark"], size=(120, 40))).split())
    assert "environment 0, slot block0: " in screen
    assert "F FOSSILIZED: the seed is a permanent part of the network" in screen


def constant(config):
    return lambda outcome: {"constant": np.zeros(len(outcome.before.metric))}


def test_what_is_wrong_with_a_learner_stands_in_the_window_on_the_page_and_at_the_end(tmp_path, capsys):
    settings = {"envs": 8, "steps": 2, "ppo": {"rounds": 2, "imitation_rounds": 0, "validate_envs": 2}}
    summary = esper.train("iris", settings, reward=constant, run=tmp_path / "t", progress=False)
    sentence = "the mean return was 0 in each of 2 rounds, 16 episodes"
    assert summary["anomalies"]["return_unchanged"]["sentence"] == sentence
    assert f"round 1: {sentence}" in " ".join("".join(driven(tmp_path / "t")).split())
    assert sentence in (tmp_path / "t" / "report.html").read_text()
    esper.show(summary)
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_without_colour_the_letters_say_the_stages(run, monkeypatch):
    coloured = driven(run)
    monkeypatch.setenv("NO_COLOR", "1")
    assert driven(run) == coloured


def cut(run, folder, rows, summary=False):
    shutil.copytree(run, folder)
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "events.jsonl").write_bytes(b"".join(lines[:rows]))
    if not summary:
        (folder / "summary.json").unlink()
    return lines


def test_a_window_follows_what_is_added_and_begins_anew_where_rows_were_cut_off(run, tmp_path):
    folder = tmp_path / "growing"
    lines = cut(run, folder, 40)
    events = folder / "events.jsonl"

    def add(app):
        with open(events, "ab") as file:
            file.writelines(lines[40:])

    assert "step 10 of 10" in "\n".join(driven(folder, between=add))

    def restart(app):
        assert app.tail._seen == len(lines)
        events.write_bytes(b"".join(lines[:12]))
        app.look()
        assert app.tail._seen == 12

    driven(folder, between=restart)


def test_what_has_not_changed_is_not_drawn_again(run, tmp_path, monkeypatch):
    monkeypatch.setattr("esper.karn.terminal.watch.PART", 4096)
    folder, drawn = tmp_path / "still", []
    lines = cut(run, folder, 40)

    def draws(app, act):
        """Count how many cells of the grid and how many texts are drawn for something that happens."""
        drawn.clear()
        act()
        return len(drawn)

    async def drive():
        app = Watch(folder, every=1000)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            change, say = app.grid.update_cell_at, Static.update
            monkeypatch.setattr(app.grid, "update_cell_at", lambda *cell: drawn.append(cell) or change(*cell))
            monkeypatch.setattr(
                Static, "update", lambda self, *args, **kwargs: drawn.append(self.id) or say(self, *args)
            )
            assert draws(app, app.look) == 0
            with open(folder / "events.jsonl", "ab") as file:
                file.writelines(lines[40:])
            while app.tail._seen < len(lines):  # a part of them may change nothing that is shown
                app.look()
                await pilot.pause()
            assert draws(app, app.look) == 0
            assert draws(app, lambda: app.action_next_curve()) == 1

    asyncio.run(drive())


def test_a_killed_run_is_called_killed(run, tmp_path):
    cut(run, tmp_path / "killed", 40)
    assert "killed" in driven(tmp_path / "killed")[0]


def test_a_window_waits_for_a_run_that_has_not_begun(run, tmp_path):
    assert "waiting for a run in" in driven(tmp_path / "soon")[0]
    begun = driven(tmp_path / "soon", between=lambda app: shutil.copytree(run, tmp_path / "soon"))
    assert "30 environments" in "\n".join(begun)


def test_watching_changes_no_file_of_the_run(run):
    def state():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run.rglob("*")}

    before = state()
    driven(run, ["down", "c", "a", "question_mark"])
    assert state() == before


def test_names_that_a_user_gave_cannot_colour_or_turn_the_screen(run, tmp_path):
    folder = tmp_path / EVIL.replace("/", "")
    shutil.copytree(run, folder)
    events = folder / "events.jsonl"
    events.write_text(events.read_text().replace('"block0"', '"\\u202e\\u001b[31m[red]"'))
    screen = "\n".join(driven(folder))
    assert "\x1b" not in screen
    assert "\u202e" not in screen
    assert "[red]" in screen


def test_bad_input_gets_one_sentence(run, tmp_path, capsys):
    for arguments, sentence in (
        (["watch", str(tmp_path)], "is not a run folder"),
        (["watch", str(run)], "esper watch needs a terminal"),
        (["grow", "iris", "--watch", "--run", str(tmp_path / "new")], "--watch needs a terminal"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_package_of_the_window_is_asked_for_by_its_extra(tmp_path, run):
    code = f"import sys; sys.modules['textual'] = None; from esper.cli import main; main(['watch', {str(run)!r}])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert ended.returncode == 2
    assert "pip install 'esper-grow[tui]'" in ended.stderr


def test_a_plot_has_its_lines_where_the_values_are():
    drawn = plot([0, 1, 2], [[0.0, 1.0, 0.0]], 30, 6)
    assert len(drawn) == 6
    assert drawn[0].lstrip().startswith("1 ")
    assert drawn[4].lstrip().startswith("0 ")
    top, bottom = (line[10:] for line in (drawn[0], drawn[4]))
    assert top.strip("\u2800")
    assert top[0] == "\u2800"
    assert bottom[0] != "\u2800"
    assert plot([], [], 30, 6)[0].startswith("nothing was measured yet")
    with pytest.raises(InputError):
        esper.open_run("/no/such/folder")
