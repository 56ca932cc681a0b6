"""Test where a run may be written, and what of a folder an overwriting run removes."""

import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from crashes import at_every_call
from esper.leyline.config.tree import Config, dump_config
from esper.leyline.messages import InputError
from esper.runs.configuration import training_configs
from esper.runs.folder.environment import describe_environment
from esper.runs.folder.run_folder import check_folder, create_folder, list_contents
from esper.runs.grow import grow
from esper.runs.train import train
from esper.store.files import MARK, is_run
from esper.tamiyo.catalog import get_controller
from populations import blobs, small_config

ENVIRONMENT = json.dumps(describe_environment(torch.device("cpu"), Config()))


def make_run(folder):
    (folder / "models" / "env-000").mkdir(parents=True)
    (folder / "config.yaml").write_text(MARK + dump_config(Config()))
    (folder / "environment.json").write_text(ENVIRONMENT)
    for name in ("events.jsonl", "summary.json", "models/env-000/topology.json"):
        (folder / name).write_text("old")
    return folder


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_new_or_an_empty_folder_is_taken(tmp_path, make):
    folder = tmp_path / "run"
    make(folder)
    check_folder(folder)
    create_folder(folder)
    assert folder.is_dir()


def test_parents_are_made(tmp_path):
    create_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_checking_makes_nothing(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_refused_and_kept(tmp_path):
    folder = make_run(tmp_path / "run")
    with pytest.raises(InputError, match=r"already holds a run.*--overwrite"):
        create_folder(folder)
    assert (folder / "summary.json").read_text() == "old"


def test_overwriting_removes_what_is_ours_and_nothing_else(tmp_path):
    folder, notes = make_run(tmp_path / "run"), []
    mine = ["bert/model.bin", "notes.txt", ".config.yaml", ".hidden"]
    for name in mine:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    create_folder(folder, True, notes.append)
    assert sorted(content(folder)) == sorted(mine)
    assert not is_run(folder)
    (note,) = notes
    assert all(str(folder / name) in note for name in (".hidden", ".config.yaml", "bert"))
    assert "and 1 more" in note


@pytest.mark.parametrize(
    "files",
    [
        {"config.yaml": "lr: 1", "models/bert.bin": "w"},
        {"config.yaml": "lr: 1", "environment.json": ENVIRONMENT, "report.html": "w"},
        {"config.yaml": dump_config(Config()), "models/env-000/model.safetensors": "w"},
        {"config.yaml": dump_config(Config()), "environment.json": "{}", "summary.json": "w"},
        {"config.yaml": "a: [", "environment.json": ENVIRONMENT},
    ],
)
def test_a_folder_whose_config_no_run_wrote_is_left_as_it_is(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = content(tmp_path)
    with pytest.raises(InputError, match=r"leaves .* as it is; name another folder"):
        create_folder(tmp_path, overwrite=True)
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        *("models/env-000/notes.txt", "models/bert.bin", "controller/notes.txt", "checkpoints/step-000001/x"),
        *("checkpoints/of-bert/step-1", "lock", "events.jsonl/x"),
    ],
)
def test_a_file_of_others_that_the_new_run_would_write_over_is_named_and_nothing_is_removed(tmp_path, name):
    folder = make_run(tmp_path / "run")
    (folder / "events.jsonl").unlink()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("mine")
    before = content(folder)
    with pytest.raises(InputError, match=r"a run would overwrite .*, which Esper did not write"):
        create_folder(folder, overwrite=True)
    assert content(folder) == before


def test_a_run_that_was_killed_before_it_wrote_its_environment_is_overwritten(tmp_path):
    (tmp_path / "config.yaml").write_text(MARK + dump_config(Config()))
    (tmp_path / ".environment.json.0123456789abcdef.tmp").write_text("{")
    create_folder(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_everything_that_whole_runs_write_is_known_for_esper_s(tmp_path):
    often = {"checkpoint": {"every_steps": 1, "every_seconds": 0}}
    config = small_config({"controller": "random-valid"}, {"steps": 2, "envs": 1, "models": "all"}, often)
    grow(blobs(), config, get_controller("random-valid", config), tmp_path / "grown")
    short = {"envs": 2, "steps": 2, "data": {"batch_size": 12, "batches_per_step": 1}, "reward": {"group_size": 2}}
    ppo = {"ppo": {"rounds": 1, "update_epochs": 1, "imitation_rounds": 0, "validate_envs": 2, "validate_every": 1}}
    train([blobs()], training_configs([blobs()], "quick", short, ppo, often), tmp_path / "trained")
    for folder in (tmp_path / "grown", tmp_path / "trained"):
        found = list_contents(folder)
        assert (found.others, found.in_the_way) == ([], [])
        create_folder(folder, overwrite=True)
        assert list(folder.iterdir()) == []


def test_overwriting_may_crash_at_any_system_call_and_be_done_again(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()

    def prepare():
        if list(folder.iterdir()):
            create_folder(folder, overwrite=True)  # what the crash left is still Esper's run, or empty
        folder.rmdir()
        make_run(folder)

    tries = sum(1 for _ in at_every_call(monkeypatch, prepare, lambda: create_folder(folder, overwrite=True)))
    assert tries > 5
    assert list(folder.iterdir()) == []


def test_overwriting_removes_what_a_kill_left_beside_the_controller(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / ".controller.old").mkdir()
    create_folder(folder, overwrite=True)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["checkpoints", "report.html", "models/env-001"])
def test_a_link_that_has_the_name_of_a_file_of_esper_is_not_followed_and_not_removed(tmp_path, name):
    folder = make_run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "keep.txt").write_text("mine")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path)
    with pytest.raises(InputError, match=rf"a run would overwrite {folder / name}, which Esper did not write"):
        create_folder(folder, overwrite=True)
    assert content(tmp_path) == before


def test_a_config_that_is_a_link_makes_no_run(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").rename(tmp_path / "config.yaml")
    (folder / "config.yaml").symlink_to(tmp_path / "config.yaml")
    with pytest.raises(InputError, match="does not begin as the config of an Esper run"):
        create_folder(folder, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_other_files_is_refused_even_to_overwrite(tmp_path, overwrite):
    (tmp_path / "summary.json").write_text("not of a run")
    with pytest.raises(InputError, match="holds other files and no run"):
        create_folder(tmp_path, overwrite)
    assert (tmp_path / "summary.json").exists()


def test_a_folder_of_a_run_that_was_killed_before_it_had_a_config_is_empty(tmp_path):
    (tmp_path / ".config.yaml.0123456789abcdef.tmp").write_text("task: dig")
    create_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_overwriting_removes_what_a_kill_left_half_written(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / ".summary.json.0123456789abcdef.tmp").write_text("{")
    create_folder(folder, overwrite=True)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("content", ["", '{"pid": 1, "host": "a", "started": 1, "since": "b", "command": []}'])
def test_a_folder_that_holds_but_a_lock_is_empty(tmp_path, content):
    (tmp_path / "lock").write_text(content)
    create_folder(tmp_path)
    assert not is_run(tmp_path)
    assert (tmp_path / "lock").exists()


def test_a_file_that_is_called_like_the_lock_is_another_file(tmp_path):
    (tmp_path / "lock").write_text("of my bicycle")
    with pytest.raises(InputError, match="holds other files"):
        create_folder(tmp_path)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_way_is_named(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        check_folder(tmp_path / "file" / below)


@contextmanager
def unprivileged():
    """Run as another user for a moment, where this one is root, who may write anywhere."""
    if os.getuid():
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_folder_without_permission_is_refused():
    with tempfile.TemporaryDirectory() as folder:  # others may not enter tmp_path
        Path(folder).chmod(0o555)
        with unprivileged(), pytest.raises(InputError, match="no permission"):
            check_folder(Path(folder) / "run")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that nobody may write to")
def test_a_file_system_that_takes_no_folder_is_refused():
    with pytest.raises(InputError, match="name another folder"):
        create_folder(Path("/proc/esper-run"))
