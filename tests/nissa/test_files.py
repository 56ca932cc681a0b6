import os
from pathlib import Path

import pytest

from esper.leyline.errors import InputError
from esper.nissa.files import OWN, check_folder, create_folder, is_run


def make_run(folder):
    folder.mkdir(parents=True)
    for name in ("config.yaml", "events.jsonl", "summary.json"):
        (folder / name).write_text("old")
    (folder / "models" / "env-000").mkdir(parents=True)
    (folder / "models" / "env-000" / "topology.json").write_text("old")
    return folder


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
    folder = make_run(tmp_path / "run")
    (folder / "notes.txt").write_text("mine")
    create_folder(folder, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert not is_run(folder)


def test_overwriting_removes_what_a_kill_left_beside_the_controller(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / ".controller.old").mkdir()
    create_folder(folder, overwrite=True)
    assert list(folder.iterdir()) == []


def test_overwriting_follows_no_link_out_of_the_folder(tmp_path):
    folder = make_run(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "keep.txt").write_text("mine")
    (folder / "checkpoints").symlink_to(elsewhere)
    create_folder(folder, overwrite=True)
    assert (elsewhere / "keep.txt").read_text() == "mine"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_other_files_is_refused_even_to_overwrite(tmp_path, overwrite):
    (tmp_path / "summary.json").write_text("not of a run")
    with pytest.raises(InputError, match="holds other files and no run"):
        create_folder(tmp_path, overwrite)
    assert (tmp_path / "summary.json").exists()


def test_a_folder_of_a_run_that_was_killed_before_it_had_a_config_is_empty(tmp_path):
    (tmp_path / ".config.yaml.tmp").write_text("task: dig")
    create_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_overwriting_removes_what_a_kill_left_half_written(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / ".summary.json.tmp").write_text("{")
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


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="no permission"):
            check_folder(tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that nobody may write to")
def test_a_file_system_that_takes_no_folder_is_refused():
    with pytest.raises(InputError, match="name another folder"):
        create_folder(Path("/proc/esper-run"))


def test_the_config_goes_last():
    assert OWN[-1] == "config.yaml"
