"""Test a page that follows its run, and the server as a process: how it begins, what it prints, and how it ends."""

import http.client
import json
import shutil
import signal
import socket
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest

from pages import Page
from served import begin, make_runs, serving

pytest.importorskip("starlette", reason="the extra web is not installed")

from starlette.testclient import TestClient

from esper.cli import main
from esper.karn.reader import open_run, read_model
from esper.karn.report.frame import render_content
from esper.karn.report.page import content_of
from esper.karn.run_model import RunModel
from esper.karn.serve import library
from esper.karn.serve.access import Door
from esper.karn.serve.app import RouteContext, create_app
from esper.karn.serve.library import Followed, Library, key_of
from esper.store.lock import LOCK, describe_process

HANDSHAKE = 60  # seconds after which a silent server fails a test


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("live").resolve())


@pytest.fixture
def growing(runs, tmp_path):
    """Make a run with its first rows, and a function that appends the next ones."""
    run = tmp_path / "growing"
    shutil.copytree(runs / "finished", run)
    lines = begin(run, 6)

    def append(count):
        start = len((run / "events.jsonl").read_bytes().splitlines())
        with open(run / "events.jsonl", "ab") as file:
            file.write(b"".join(lines[start : start + count]))

    return run, append


def asked(address, path, version="", **headers):
    """Ask for a page that has a version, and return the answer: status, version, whether no other will follow, and text."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=HANDSHAKE)
    connection.request("GET", path, headers={"X-Version": version, **headers})
    answer = connection.getresponse()
    return answer.status, answer.getheader("X-Version"), answer.getheader("X-Ended"), answer.read().decode()


def changed(address, path, version=""):
    """Ask until there is a next version of a page, and return the version and its text."""
    until = time.monotonic() + HANDSHAKE
    while time.monotonic() < until:
        status, later, _, text = asked(address, path, version)
        if status == 200:
            return later, text
        assert status == 204
        time.sleep(0.1)
    raise AssertionError(f"{path} has not changed")


def test_a_page_that_follows_in_any_parts_is_the_page_of_the_whole(growing, monkeypatch):
    monkeypatch.setattr(library, "LEAST", 0.0)
    monkeypatch.setattr(library, "SHARE", float("inf"))
    run, append = growing
    followed, versions = Followed(run), set()
    for count in (0, 1, 2, 7, 1000):
        append(count)
        shown = followed.page()
        versions.add(shown.version)
        assert shown.content == render_content(content_of(read_model(open_run(run)), run.name))
    assert len(versions) == 5
    cut = (run / "events.jsonl").read_bytes().splitlines(keepends=True)[:8]
    (run / "events.jsonl").write_bytes(b"".join(cut))  # as a resume does
    assert followed.page().content == render_content(content_of(read_model(open_run(run)), run.name))


def test_a_page_is_not_made_again_before_it_is_due_or_where_nothing_changed(growing, monkeypatch):
    made = []
    monkeypatch.setattr(library, "render_content", lambda content: made.append(content) or "page")
    monkeypatch.setattr(library, "LEAST", 1e9)
    run, append = growing
    followed = Followed(run)
    first = followed.page()
    append(3)
    assert followed.page() is first
    assert followed.version == first.version
    monkeypatch.setattr(followed, "_due", 0.0)
    assert followed.version != first.version
    assert len({followed.page().version for _ in range(3)}) == 1
    monkeypatch.setattr(followed, "_due", 0.0)
    followed.page()
    assert len(made) == 2


def test_a_report_that_takes_long_comes_after_the_page(runs, growing, monkeypatch):
    run, _ = growing
    ready = threading.Event()
    monkeypatch.setattr(library, "render_content", lambda content: ready.wait(HANDSHAKE) and render_content(content))
    monkeypatch.setattr("esper.karn.serve.app.PATIENCE", 0.0)
    browser = TestClient(create_app(Library([run]), Door(None, "127.0.0.1", True, 1)), "http://127.0.0.1:1")
    shown = browser.get(f"/runs/{key_of(run)}")
    assert "its report appears here" in shown.text
    assert 'data-version=""' in shown.text
    ready.set()
    assert "What was asked" in browser.get(f"/runs/{key_of(run)}/content").text


def test_the_rows_of_runs_that_nobody_looks_at_any_more_are_forgotten(runs, tmp_path):
    folders = [tmp_path / str(number) for number in range(library.KEPT + 1)]
    for folder in folders:
        folder.mkdir()
        shutil.copy(runs / "finished" / "config.yaml", folder)
    follow = RouteContext(Library([tmp_path])).follow
    first, *others = [follow(folder) for folder in folders]
    assert follow(folders[-1]) is others[-1]
    assert follow(folders[0]) is not first


def test_rows_gathered_one_by_one_are_the_model_of_the_whole(runs):
    run, fed = open_run(runs / "finished"), RunModel()
    for row in run.rows():
        fed.write(row)
        fed.complete(run)
    whole = content_of(read_model(run), "run")
    assert render_content(content_of(fed.complete(run), "run")) == render_content(whole)


def test_the_status_in_the_list_is_the_status_of_the_run(runs):
    entries = [entry for entry in Library([runs]).entries() if entry.error is None]
    assert {entry.status for entry in entries} == {"finished", "killed"}
    for entry in entries:
        assert entry.status == open_run(entry.folder).status


@pytest.mark.campaign
def test_the_server_tells_of_new_rows_and_new_runs_and_ends_at_once_when_it_is_interrupted(runs, growing):
    run, append = growing
    (run / LOCK).write_text(json.dumps(describe_process()))  # this process passes for the one that writes the run
    with serving(runs / "finished", run.parent) as (process, address):
        path, whole = f"/runs/{key_of(run)}/content", f"/runs/{key_of(runs / 'finished')}/content"
        listed, _ = changed(address, "/content")
        version, _ = changed(address, whole)
        assert asked(address, whole, version) == (204, None, "1", "")
        version, before = changed(address, path)
        assert "still goes on" in Page(before).said
        assert asked(address, path, version) == (204, None, None, "")
        append(8)
        later, text = changed(address, path, version)
        assert later != version
        assert text != before
        (run / LOCK).unlink()
        last, text = changed(address, path, later)
        assert "was killed before it ended" in Page(text).said
        assert asked(address, path, last) == (204, None, "1", "")
        assert changed(address, "/content", listed)[0] != listed
        process.send_signal(signal.SIGINT)
        assert process.wait(HANDSHAKE) == 0
        assert process.stderr.read() == ""


def test_a_server_that_others_reach_prints_a_token_once_and_answers_nobody_without_it(runs):
    with serving(runs, "--host", "0.0.0.0") as (process, address):
        name, token = process.stdout.readline().split()
        assert name == "token:"
        local = f"http://127.0.0.1:{urlsplit(address).port}"
        for path in ("/", f"/?token={token}", "/content", "/assets/serve.js", "/login?token=x"):
            connection = http.client.HTTPConnection(urlsplit(local).netloc, timeout=HANDSHAKE)
            connection.request("GET", path)
            assert connection.getresponse().status == (200 if "login" in path else 401)
        assert asked(local, "/content", Authorization=f"Bearer {token}")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(HANDSHAKE) == 0
        assert process.stdout.read() + process.stderr.read() == ""


def test_a_port_in_use_is_said_so(runs, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        main(["serve", str(runs), "--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2
    assert "is in use; end what uses it, or give --port 0" in capsys.readouterr().err


def test_without_its_libraries_the_command_names_the_extra(runs, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("esper.karn.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(runs)])
    assert ended.value.code == 2
    assert (
        "needs starlette and uvicorn, which are not installed; run pip install 'esper-grow[web]'"
        in capsys.readouterr().err
    )
