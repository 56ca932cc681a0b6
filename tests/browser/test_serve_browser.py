"""Open what is served in a real browser: nothing is refused, nothing else is asked for, and a run that goes on moves."""

import json
import re
import shutil
import signal
import sys
from urllib.parse import urlsplit

import pytest

from processes import begun
from served import begin

pytest.importorskip("starlette", reason="the extra web is not installed")
pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")

from esper.karn.serve.library import key_of
from esper.store.lock import LOCK, describe_process

pytestmark = pytest.mark.browser
PATIENCE = 60_000
"""Longest wait for something that a run writes, on a machine with much else to do [milliseconds]."""


def test_the_page_of_a_run_moves_with_it_and_keeps_what_the_reader_chose(runs, tmp_path, page, open_page):
    run = tmp_path / "growing"
    shutil.copytree(runs / "finished", run)
    lines = begin(run, 24)
    (run / LOCK).write_text(json.dumps(describe_process()))
    with open_page(tmp_path) as (_, address):
        page.goto(f"{address}/runs/{key_of(run)}")
        curve = page.locator("#curves polyline.line").first
        before, steps = curve.get_attribute("points"), int(page.locator("#step").get_attribute("max"))
        page.locator("#step").fill("1")
        page.locator("#env").select_option("2")
        page.locator("#env").focus()
        page.evaluate("document.querySelector('#growth').scrollIntoView()")
        top = page.locator("#map").bounding_box()["y"]
        with open(run / "events.jsonl", "ab") as file:
            file.write(b"".join(lines[24:-4]))
        page.wait_for_function(
            "before => document.querySelector('#curves polyline.line').getAttribute('points') !== before", arg=before
        )
        assert int(page.locator("#step").get_attribute("max")) > steps
        assert page.locator("#step").input_value() == "1"
        assert page.locator("#env").input_value() == "2"
        assert page.evaluate("document.activeElement.id") == "env"
        assert page.locator("#step-shown").inner_text() == "step 1"
        assert abs(page.locator("#map").bounding_box()["y"] - top) < 200
        shutil.copy(runs / "finished" / "summary.json", run)
        with open(run / "events.jsonl", "ab") as file:
            file.write(b"".join(lines[-4:]))
        (run / LOCK).unlink()
        page.get_by_text("The run has ended").wait_for()
        assert "Grown networks beside static ones" in page.content()


def test_the_curves_of_a_run_that_grows_at_this_moment_move_until_it_ends(tmp_path, page, open_page, violations):
    run = tmp_path / "now"
    settings = ["--envs", "8", "--steps", "5000", "--set", "models=none", "--set", "baselines=[]"]
    with (
        open_page(tmp_path) as (_, address),
        begun(
            [
                sys.executable,
                "-m",
                "esper",
                "grow",
                "iris",
                "--controller",
                "random-valid",
                *settings,
                "--run",
                str(run),
            ]
        ) as process,
    ):
        page.goto(address)
        page.get_by_role("link", name="now", exact=True).click(timeout=PATIENCE)
        curve, moved = "#curves polyline.line", set()
        page.locator(curve).first.wait_for(timeout=PATIENCE)
        for _ in range(3):
            before = page.locator(curve).first.get_attribute("points")
            moved.add(before)
            page.wait_for_function(
                "before => document.querySelector('#curves polyline.line').getAttribute('points') !== before",
                arg=before,
                timeout=PATIENCE,
            )
        assert len(moved) == 3
        assert "still goes on" in page.locator("#result").inner_text()
        assert violations(page) == []
        process.send_signal(signal.SIGTERM)
        page.get_by_text("The run has ended").wait_for(timeout=PATIENCE)
        assert violations(page) == []


def test_the_slider_draws_the_network_of_every_step(runs, page, open_page):
    with open_page(runs) as (_, address):
        page.goto(f"{address}/runs/{key_of(runs / 'finished')}")
        seen = set()
        for step in range(8):
            page.locator("#step").fill(str(step))
            assert page.locator("#step-shown").inner_text() == f"step {step}"
            seen.add(page.locator("#network").get_attribute("aria-label").partition(":")[2])
        assert len(seen) > 1
        page.locator("#growth svg.timeline").first.focus()
        page.keyboard.press("ArrowRight")
        assert "environment" in page.locator("#words").inner_text()


def test_runs_are_found_compared_and_their_decisions_filtered(runs, page, open_page):
    with open_page(runs) as (_, address):
        page.goto(address)
        page.get_by_label("Search").fill("iris")
        page.get_by_role("button", name="Show").click()
        page.get_by_label("Compare finished").check()
        page.get_by_label("Compare deep/killed").check()
        page.get_by_role("button", name="Compare the chosen runs").click()
        page.get_by_role("heading", name="How the runs compare").wait_for()
        page.get_by_role("link", name="All runs").click()
        page.get_by_role("link", name="finished").click()
        page.get_by_role("link", name="Decisions", exact=True).first.click()
        page.get_by_label("Carried out").select_option("no")
        page.get_by_role("button", name="Show").click()
        rows = [json.loads(line) for line in (runs / "finished" / "events.jsonl").read_text().splitlines()]
        refused = [row for row in rows if row["kind"] == "decision" and not row["carried_out"]]
        assert page.locator("tbody tr").count() == len(refused)
        with page.expect_download() as download:
            page.get_by_role("link", name="Download these decisions").click()
        assert [json.loads(line) for line in download.value.path().read_text().splitlines()] == refused


def test_a_new_run_appears_in_the_list_and_ticks_stay(runs, tmp_path, page, open_page):
    shutil.copytree(runs / "finished", tmp_path / "first")
    with open_page(tmp_path) as (_, address):
        page.goto(address)
        page.get_by_label("Compare first").check()
        shutil.copytree(runs / "finished", tmp_path / "second")
        page.get_by_role("link", name="second").wait_for()
        assert page.get_by_label("Compare first").is_checked()


def test_the_form_of_the_token_opens_the_pages(runs, tmp_path, page, open_page):
    with open_page(runs, "--host", "0.0.0.0") as (process, address):
        token = process.stdout.readline().split()[1]
        local = f"http://127.0.0.1:{urlsplit(address).port}/"
        page.goto(local + "login")
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Open").click()
        page.get_by_role("heading", name="Runs", exact=True).wait_for()
        assert page.context.cookies()[0]["httpOnly"]
        assert page.evaluate("document.cookie") == ""
        assert re.search("4 runs", page.content())
