"""Test checkpoints: trees as files, atomic writing, and what is refused when they are read."""

import errno
import hashlib
import json
import math
import os
import shutil
import threading
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crashes import at_every_call
from esper.leyline.config.tree import CheckpointConfig
from esper.leyline.messages import InputError
from esper.store.checkpoint import BEST, FACTS, LATEST, TENSORS, Checkpoints
from esper.store.tensors import flatten, unflatten

KEPT = CheckpointConfig(every_steps=5, every_seconds=0, keep=3)


def state(number):
    return {
        "step": number,
        "body": {"value": torch.arange(number * 100.0), "steps": np.arange(number)},
        "seq": [1, None],
    }


def same(one, other):
    """Return whether two trees are equal bit for bit, kinds and dtypes included."""
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same(one.numpy(), other.numpy())
    if isinstance(one, np.ndarray):
        alike = isinstance(other, np.ndarray) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return type(one) is type(other) and one == other


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "run"
    made.mkdir()
    (made / "config.yaml").write_text("task: blobs\n")
    return made


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Write the checkpoints of steps 1, 2 and 3."""
    made = tmp_path_factory.mktemp("three")
    (made / "config.yaml").write_text("task: blobs\n")
    store = Checkpoints(made, KEPT)
    for number in (1, 2, 3):
        store.write(number, state(number))
    return made / "checkpoints"


@pytest.fixture
def written(folder, three):
    """Return a run folder with the checkpoints of steps 1, 2 and 3."""
    shutil.copytree(three, folder / "checkpoints")
    return folder


def read(folder):
    notes = []
    return Checkpoints(folder, KEPT).read(notes.append), notes


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats()
    | st.text("aé$\n", max_size=3)
    | st.builds(
        lambda kind, size: np.arange(size).astype(kind),
        st.sampled_from(["?", "i1", "i2", "i4", "i8", "f4", "f8"]),
        st.integers(0, 3),
    )
    | st.builds(lambda values: torch.tensor(values, dtype=torch.float32), st.lists(st.floats(width=32), max_size=3))
)
names = st.text("abc", min_size=1, max_size=3)
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(names, trees, max_size=4))
def test_a_tree_comes_back_as_it_was(tree):
    tensors, plain = flatten(tree)
    assert same(unflatten(tensors, json.loads(json.dumps(plain, allow_nan=False))), tree)


def test_arrays_are_called_by_their_dotted_place():
    tensors, plain = flatten({"body": {"host": [np.zeros(1), torch.ones(2)]}, "step": 3})
    assert list(tensors) == ["body.host.0", "body.host.1"]
    assert plain == {"body": {"host": [{"$array": "body.host.0"}, {"$tensor": "body.host.1"}]}, "step": 3}


def test_a_flattened_tree_stays_what_it_is_while_the_run_goes_on():
    column, array = torch.zeros(3), np.zeros(3)
    tensors, _ = flatten({"a": column, "b": array, "shared": array})
    column += 1
    array += 1
    assert not any(tensor.any() for tensor in tensors.values())


def test_what_no_file_holds_is_no_leaf():
    with pytest.raises(TypeError, match="a\\.b is a object"):
        flatten({"a": {"b": object()}})


def test_the_last_checkpoint_is_read_back(written):
    found, notes = read(written)
    assert (found.number, notes) == (3, [])
    assert same(found.state, state(3))


def test_where_there_is_none_nothing_is_read(folder):
    assert read(folder) == (None, [])


def test_the_last_ones_are_kept(folder):
    store = Checkpoints(folder, CheckpointConfig(keep=2))
    for number in (1, 2, 3, 4):
        store.write(number, state(number))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [LATEST, "step-000003", "step-000004"]


def test_retention_never_removes_what_latest_names(written):
    """Check a run that went on from an earlier checkpoint and writes one that is not the last by number."""
    Checkpoints(written, CheckpointConfig(keep=1)).write(2, state(2))
    found, _ = read(written)
    assert found.number == 2


def pointed(folder, pointer):
    """Check the folder that a pointer names by the sha256 that it tells, and return its name."""
    name, digest = (folder / "checkpoints" / pointer).read_text().split()
    assert hashlib.sha256((folder / "checkpoints" / name / FACTS).read_bytes()).hexdigest() == digest
    return name


writes = st.lists(st.tuples(st.integers(-3, 4), st.booleans(), st.integers(1, 3)), min_size=1, max_size=8)


@settings(max_examples=12, deadline=None)
@given(writes)
def test_retention_never_removes_the_latest_or_the_best(tmp_path_factory, writes):
    """Check runs that go on, that go on from further back (a step below 0), and whose `keep` is changed."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text("task: blobs\n")
    number, best = 0, None
    for step, better, keep in writes:
        number = max(1, number + step)
        Checkpoints(folder, CheckpointConfig(keep=keep)).write(number, {"number": number}, better)
        if better:
            best = number
        elif best == number:
            best = None  # its place was taken
        assert pointed(folder, LATEST) == f"step-{number:06d}"
        assert read(folder)[0].number == number
        assert (folder / "checkpoints" / BEST).exists() == (best is not None)
        if best is not None:
            assert pointed(folder, BEST) == f"step-{best:06d}"
        kept = [path.name for path in (folder / "checkpoints").glob("step-*")]
        assert len(kept) <= keep + 2


@pytest.mark.parametrize("content", ["", "step-000001", "../step-000001 " + "0" * 64 + "\n"])
def test_a_damaged_best_keeps_nothing_and_harms_nothing(written, content):
    (written / "checkpoints" / BEST).write_text(content)
    Checkpoints(written, CheckpointConfig(keep=1)).write(4, state(4))
    found, notes = read(written)
    assert found.number == 4
    (note,) = notes
    assert note.startswith(f"{written / 'checkpoints' / BEST} names no checkpoint; ")


@pytest.mark.parametrize("damage", [Path.unlink, lambda facts: facts.write_bytes(facts.read_bytes()[:-1])])
def test_a_best_whose_checkpoint_is_damaged_is_told_and_the_latest_used(folder, damage):
    store = Checkpoints(folder, KEPT)
    store.write(1, state(1), best=True)
    store.write(2, state(2))
    damage(folder / "checkpoints" / "step-000001" / FACTS)
    found, (note,) = read(folder)
    assert found.number == 2
    assert "step-000001" in note
    assert note.endswith("; the next best checkpoint replaces it")


def test_a_checkpoint_is_due_by_steps_and_none_where_nothing_happened(folder):
    store = Checkpoints(folder, CheckpointConfig(every_steps=5, every_seconds=0))
    assert [number for number in range(12) if store.due(number)] == [5, 6, 7, 8, 9, 10, 11]
    store.write(6, state(6))
    assert [number for number in range(6, 13) if store.due(number)] == [11, 12]


def test_a_checkpoint_is_due_by_the_clock(folder):
    store = Checkpoints(folder, CheckpointConfig(every_seconds=1e-9))
    assert not store.due(0)
    assert store.due(1)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def emptied(path):
    path.write_bytes(b"")


def deleted(path):
    path.unlink()


def swapped(path):
    """Put another checkpoint's file in the place of one."""
    shutil.copy(path.parent.parent / "step-000001" / path.name, path)


def pickled(path):
    """Write a pickle that makes a folder where it is loaded."""
    path.write_bytes(b"cos\nmkdir\n(V" + str(path.parents[3] / "executed").encode() + b"\ntR.")


def linked(path):
    """Put a link to a file out of the run folder, of the right content, in the place of one."""
    outside = path.parents[3] / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def folder_there(path):
    """Put a folder in the place of the file."""
    path.unlink()
    path.mkdir()


DAMAGES = [truncated, flipped, emptied, deleted, swapped, pickled, linked, folder_there]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", [FACTS, TENSORS])
def test_a_damaged_file_is_refused_by_name_and_the_checkpoint_before_is_used(written, name, damage):
    path = written / "checkpoints" / "step-000003" / name
    damage(path)
    found, notes = read(written)
    assert found.number == 2
    assert all(str(path) in note for note in notes)
    assert notes
    assert same(found.state, state(2))
    assert not (written.parent / "executed").exists()


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d is not swapped], ids=lambda damage: damage.__name__)
def test_where_latest_is_damaged_the_newest_checkpoint_that_verifies_is_used(written, damage):
    path = written / "checkpoints" / LATEST
    if damage is linked:
        (written.parent / "outside").mkdir()
        (written / "checkpoints" / LATEST).rename(written.parent / "outside" / LATEST)
        path.symlink_to(written.parent / "outside" / LATEST)
    else:
        damage(path)
    flipped(written / "checkpoints" / "step-000003" / FACTS)
    found, notes = read(written)
    assert found.number == 2
    assert str(path) in notes[0]
    assert any("step-000003" in note for note in notes)


def test_where_latest_alone_is_damaged_nothing_else_is_lost(written):
    path = written / "checkpoints" / LATEST
    flipped(path)
    found, notes = read(written)
    assert found.number == 3
    assert str(path) in notes[0]


def test_where_latest_names_what_is_not_there_it_is_told_by_name(written):
    path = written / "checkpoints" / LATEST
    path.write_text(path.read_text().replace("step-000003", "step-000007"))
    found, notes = read(written)
    assert found.number == 3
    assert str(path) in notes[0]


@pytest.mark.parametrize(
    "damage", [emptied, deleted, pickled, linked, folder_there], ids=lambda damage: damage.__name__
)
def test_where_latest_and_best_were_damaged_the_next_checkpoint_puts_them_right(written, damage):
    store = Checkpoints(written, KEPT)
    store.write(4, state(4), best=True)
    for name in (LATEST, BEST):
        damage(written / "checkpoints" / name)
    store.write(5, state(5), best=True)
    found, notes = read(written)
    assert (found.number, notes) == (5, [])
    assert (written / "checkpoints" / BEST).read_bytes() == (written / "checkpoints" / LATEST).read_bytes()


def test_that_the_only_checkpoint_is_gone_is_told(folder):
    Checkpoints(folder, KEPT).write(1, state(1))
    gone = folder / "checkpoints" / "step-000001"
    shutil.rmtree(gone)
    found, notes = read(folder)
    assert found is None
    assert str(gone) in notes[0]
    assert notes[0].endswith("; no checkpoint verifies")


@pytest.mark.parametrize("name", [FACTS, TENSORS])
def test_every_flipped_bit_of_a_checkpoint_that_latest_does_not_name_is_noticed(folder, name):
    Checkpoints(folder, KEPT).write(1, {"a": np.arange(3)})
    (folder / "checkpoints" / LATEST).unlink()
    path = folder / "checkpoints" / "step-000001" / name
    whole = path.read_bytes()
    for place in range(0, len(whole), 5):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        found, _ = read(folder)
        assert found is None or same(found.state, {"a": np.arange(3)})


def test_a_link_in_place_of_a_checkpoint_or_of_all_is_not_followed(written):
    newest = written / "checkpoints" / "step-000003"
    newest.rename(written.parent / "elsewhere")
    newest.symlink_to(written.parent / "elsewhere")
    found, notes = read(written)
    assert found.number == 2
    assert str(newest) in notes[0]
    (written / "checkpoints").rename(written.parent / "all")
    (written / "checkpoints").symlink_to(written.parent / "all")
    with pytest.raises(InputError, match="is a link"):
        read(written)


def test_a_checkpoint_of_another_run_is_refused_and_the_one_before_is_used(written, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text("task: spirals\n")
    Checkpoints(other, KEPT).write(4, state(4))
    shutil.copytree(other / "checkpoints" / "step-000004", written / "checkpoints" / "step-000004")
    shutil.copy(other / "checkpoints" / LATEST, written / "checkpoints" / LATEST)
    found, notes = read(written)
    assert found.number == 3
    assert "step-000004" in notes[0]
    assert "another run" in notes[0]
    assert notes[0].endswith("; step-000003, the newest that verifies, is used")


def test_where_the_config_was_changed_the_run_is_not_begun_again(written):
    (written / "config.yaml").write_text("task: other\n")
    with pytest.raises(InputError, match=r"config\.yaml was changed since"):
        read(written)


def test_another_format_is_refused_with_both_numbers(folder, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr("esper.store.checkpoint.FORMAT", 13)
        Checkpoints(folder, KEPT).write(1, state(1))
        facts = folder / "checkpoints" / "step-000001" / FACTS
    with pytest.raises(InputError, match=r"state\.json is of format 13, this Esper reads format 12; resume with"):
        read(folder)
    facts.write_text(facts.read_text().replace("checksum", "digest"))
    with pytest.raises(InputError, match="is of format 13"):  # whatever that format calls its checksum
        read(folder)


def test_a_crash_between_any_two_system_calls_leaves_the_last_checkpoint_readable(written, monkeypatch):
    Checkpoints(written, KEPT).write(3, state(3), best=True)
    Checkpoints(written, KEPT).write(4, state(4))
    shutil.rmtree(written / "checkpoints" / "step-000002")
    start = written.parent / "start"
    shutil.copytree(written, start)

    def prepare():
        shutil.rmtree(written)
        shutil.copytree(start, written)

    def act():
        Checkpoints(written, CheckpointConfig(keep=1)).write(5, state(5), best=True)

    numbers, best = [], []
    for _ in at_every_call(monkeypatch, prepare, act):
        found, notes = read(written)
        assert notes == []
        assert same(found.state, state(found.number))
        numbers.append(found.number)
        best.append(pointed(written, BEST))
        Checkpoints(written, CheckpointConfig(keep=1)).write(6, state(6))
        kept = {path.name for path in (written / "checkpoints").iterdir()}
        assert kept == {BEST, LATEST, best[-1], "step-000006"}
        assert read(written)[0].number == 6
    assert len(numbers) > 20, "or this test shows nothing"
    assert numbers == sorted(numbers)
    assert set(numbers) == {4, 5}
    assert best == sorted(best)
    assert set(best) == {"step-000003", "step-000005"}


# Writing while the run goes on.


class Held:
    """Holds up `os.fsync` until `let_go`; `reached` is set once someone waits in it."""

    def __init__(self, monkeypatch):
        self.reached, self.go, self.real = threading.Event(), threading.Event(), os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor):
        self.reached.set()
        assert self.go.wait(60)
        self.real(descriptor)

    def let_go(self):
        self.go.set()


def test_the_run_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(folder, monkeypatch):
    store, held, column = Checkpoints(folder, KEPT), Held(monkeypatch), torch.zeros(3)
    store.begin(1, {"column": column, "number": 1})
    assert held.reached.wait(60)
    column += 1
    assert store.last == 1
    assert not store.due(2)
    assert not (folder / "checkpoints" / LATEST).exists()
    held.let_go()
    store.join()
    assert same(read(folder)[0].state, {"column": torch.zeros(3), "number": 1})


def test_one_checkpoint_is_written_at_a_time(folder, monkeypatch):
    store, held = Checkpoints(folder, KEPT), Held(monkeypatch)
    store.begin(1, state(1))
    assert held.reached.wait(60)
    names = []

    def release():
        names.extend(path.name for path in (folder / "checkpoints").iterdir() if "000002" in path.name)
        held.let_go()

    threading.Timer(0.05, release).start()
    store.begin(2, state(2))
    store.join()
    assert names == []
    assert read(folder)[0].number == 2


def test_closing_waits_for_what_is_being_written(folder, monkeypatch):
    store, held = Checkpoints(folder, KEPT), Held(monkeypatch)
    store.begin(1, state(1))
    threading.Timer(0.05, held.let_go).start()
    store.close()
    assert read(folder)[0].number == 1


def begun(store, number):
    """Begin a checkpoint, and wait until its thread is done, whatever with."""
    store.begin(number, state(number))
    wait([store._writing[1]])


def test_what_is_left_is_waited_for_by_nobody_and_leaves_the_checkpoint_before(folder, monkeypatch):
    store, stuck, done = Checkpoints(folder, KEPT), threading.Event(), threading.Event()
    store.write(1, state(1))
    monkeypatch.setattr(store, "_put", lambda *_: stuck.wait(60))
    store.begin(2, state(2))
    store.leave(done.set)
    assert not done.is_set()
    assert read(folder)[0].number == 1
    stuck.set()
    assert done.wait(60)


def test_what_the_thread_fails_with_is_raised_at_the_next_step(folder, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    store = Checkpoints(folder, KEPT)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fsync)
        begun(store, 1)
    with pytest.raises(OSError, match="Input/output error"):
        store.due(2)
    store.write(3, state(3))
    assert read(folder)[0].number == 3


def test_where_the_thread_finds_no_room_the_run_waits_and_writes_the_same(folder, full, monkeypatch):
    tried, column = [], torch.zeros(3)

    def patience(path, write):
        tried.append((path.name, threading.current_thread() is threading.main_thread()))
        with pytest.raises(OSError, match="No space left"):
            write()
        write()

    store = Checkpoints(folder, KEPT, patience)
    full(r"state\.json$")
    store.begin(1, {"column": column})
    column += 1
    wait([store._writing[1]])
    assert not store.due(2)
    assert tried == [("step-000001", True)]
    assert same(read(folder)[0].state, {"column": torch.zeros(3)})


@pytest.mark.parametrize(
    "forge",
    [
        lambda facts: facts.pop("run"),
        lambda facts: facts.pop("files"),
        lambda facts: facts.update(files={TENSORS: None}),
        lambda facts: facts.update(steps="ten"),
        lambda facts: facts.update(state={"$tensor": "of another"}),
    ],
)
def test_facts_that_were_forged_are_refused_by_name_and_the_checkpoint_before_is_used(written, forge):
    path = written / "checkpoints" / "step-000003" / FACTS
    facts = json.loads(path.read_text())
    del facts["checksum"]
    forge(facts)
    checksum = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**facts, "checksum": checksum}))
    (written / "checkpoints" / LATEST).unlink()
    found, notes = read(written)
    assert found.number == 2
    assert any(str(path) in note for note in notes)
