"""Check that files and folders are whole or absent."""

import os
import subprocess
import sys

import pytest

from crashes import at_every_call
from esper.store.disk import find_folder, remove, write_atomic, write_folder

OLD, NEW = {"a": b"1", "b": b"2" * 9}, {"a": b"3" * 9, "c": b""}


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_written_whole_under_its_name_alone(tmp_path):
    write_atomic(tmp_path / "a.json", "one")
    write_atomic(tmp_path / "a.json", b"two")
    assert content(tmp_path) == {"a.json": b"two"}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "a.json").mkdir()  # a rename over a folder fails
    with pytest.raises(OSError, match=r"a\.json"):
        write_atomic(tmp_path / "a.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


WRITER = """
import sys
from pathlib import Path
from esper.store.disk import write_atomic, write_folder
mine = sys.argv[1].encode() * 4000
for _ in range(60):
    write_atomic(Path("a.json"), mine)
    write_folder(Path("f"), {"x": mine, "y": mine})
"""


@pytest.mark.campaign
def test_two_processes_may_write_one_name_at_the_same_time(tmp_path):
    both = [subprocess.Popen([sys.executable, "-c", WRITER, mine], cwd=tmp_path) for mine in "ab"]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "f"}
    written = [(tmp_path / "a.json").read_bytes(), content(tmp_path / "f")]
    assert written[0] in (b"a" * 4000, b"b" * 4000)
    assert written[1] in ({"x": b"a" * 4000, "y": b"a" * 4000}, {"x": b"b" * 4000, "y": b"b" * 4000})


def test_a_folder_takes_the_place_of_the_old_one(tmp_path):
    for files in (OLD, NEW):
        write_folder(tmp_path / "f", files)
        assert content(tmp_path / "f") == files
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_crash_between_any_two_system_calls_leaves_the_old_folder_or_the_new(tmp_path, monkeypatch):
    folder, found = tmp_path / "f", []
    for _ in at_every_call(monkeypatch, lambda: write_folder(folder, OLD), lambda: write_folder(folder, NEW)):
        found.append(content(find_folder(folder)))
        assert found[-1] in (OLD, NEW)
    assert len(found) > 10, "or this test shows nothing"
    assert sorted(found, key=lambda files: files == NEW) == found
    assert found[-1] == NEW


def test_a_crash_while_another_one_is_made_up_for_loses_nothing_either(tmp_path, monkeypatch):
    folder, aside = tmp_path / "f", tmp_path / ".f.old"

    def prepare():
        remove(folder)
        remove(aside)
        write_folder(folder, OLD)
        os.rename(folder, aside)  # as a crash between the two renames leaves it

    for _ in at_every_call(monkeypatch, prepare, lambda: write_folder(folder, NEW)):
        assert content(find_folder(folder)) in (OLD, NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_folder_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path):
    write_folder(tmp_path / "f", OLD)
    with pytest.raises(OSError, match="absent"):
        write_folder(tmp_path / "f", {"absent/a": b""})
    assert content(tmp_path / "f") == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_link_aside_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".f.old").symlink_to(tmp_path / "elsewhere")
    assert find_folder(tmp_path / "f") == tmp_path / "f"


def test_removing_follows_no_link(tmp_path):
    write_folder(tmp_path / "f", OLD)
    (tmp_path / "link").symlink_to(tmp_path / "f")
    remove(tmp_path / "link")
    remove(tmp_path / "absent")
    assert content(tmp_path / "f") == OLD
