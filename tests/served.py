"""Runs to be served, and a server of them in a process of its own."""

import json
import shutil
import sys
import threading
from contextlib import contextmanager

import esper
from pages import EVIL
from processes import begun

NAME = EVIL.replace("/", "|")
"""A name of a folder that tries what EVIL does."""
TOKEN = "a-token-of-some-length"


def make_runs(folder):
    """Make folders of a finished, a killed, a damaged and a strangely named run, some levels deep."""
    settings = {"envs": 3, "steps": 8, "models": "none", "baselines": [], "telemetry": {"level": "step"}}
    run = folder / "finished"
    esper.grow("iris", settings, controller="random-valid", run=run, progress=False)
    refuse_some(run / "events.jsonl")
    esper.report(run)
    for env in range(3):
        (run / "models" / f"env-{env:03}").mkdir(parents=True)
        (run / "models" / f"env-{env:03}" / "model.safetensors").write_bytes(bytes([env]) * 1000)
        (run / "models" / f"env-{env:03}" / "topology.json").write_text("{}")
    for name in ("deep/killed", "damaged", NAME):
        shutil.copytree(run, folder / name)
    begin(folder / "deep" / "killed", 9)
    (folder / "damaged" / "events.jsonl").write_text('{"kind": "nothing"}\n')
    events = folder / NAME / "events.jsonl"
    rows = read(events)
    slot = rows[0]["slots"][0]
    for row in rows:
        row.update({key: EVIL for key in ("task", "controller", "why") if row.get(key) is not None})
    write(events, [renamed(row, slot, EVIL) for row in rows])
    return folder


def renamed(tree, old, new):
    """Replace every entry and every key of a tree that is one text by another."""
    if isinstance(tree, dict):
        return {renamed(key, old, new): renamed(value, old, new) for key, value in tree.items()}
    if isinstance(tree, list):
        return [renamed(value, old, new) for value in tree]
    return new if tree == old else tree


def read(events):
    """Read the rows of a journal."""
    return [json.loads(line) for line in events.read_text().splitlines()]


def write(events, rows):
    """Write a journal."""
    events.write_text("".join(f"{json.dumps(row, separators=(',', ':'))}\n" for row in rows))


def refuse_some(events):
    """Refuse every third decision, as no rule that chooses among valid decisions would have it."""
    rows = read(events)
    for row in [row for row in rows if row["kind"] == "decision"][::3]:
        row.update(carried_out=False, refusal="not_in_time", why="nobody knows")
    write(events, rows)


def begin(run, rows):
    """Make a finished run one that was killed after some rows; returns the lines of all."""
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    (run / "events.jsonl").write_bytes(b"".join(lines[:rows]))
    (run / "summary.json").unlink()
    return lines


@contextmanager
def served_here(folders, token=None):
    """Serve in a thread of this process, on a free port of this machine; yields the address."""
    from esper.karn.serve.access import Door
    from esper.karn.serve.app import create_app
    from esper.karn.serve.library import Library
    from esper.karn.serve.server import Server, listen

    with listen("127.0.0.1", 0) as listening:
        address = listening.getsockname()
        server = Server(create_app(Library(folders), Door(token, "127.0.0.1", True, address[1])))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield address
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def serving(*arguments, files=None):
    """Run `esper serve` on a free port; yields the process and its address. `files` is the most that it may open."""
    command = [sys.executable, "-m", "esper", "serve", "--port", "0", *map(str, arguments)]
    limited = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"] if files else []
    with begun([*limited, *command]) as process:
        words = process.stdout.readline().split()
        assert words[:2] == ["serving", "at"], process.stderr.read()
        yield process, words[2].rstrip("/")
