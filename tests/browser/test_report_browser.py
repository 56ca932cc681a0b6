"""Test the report that is opened as a file, as by someone to whom it was sent: what moves, what is printed, and small screens."""

import pytest

import esper
from browsers import watched

pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Write the report of a growth that keeps seeds; return the run and the address of the report."""
    run = tmp_path_factory.mktemp("reported").resolve() / "iris"
    esper.grow("iris", {"envs": 4, "steps": 10, "models": "none"}, controller="random-valid", run=run, progress=False)
    return esper.open_run(run), (run / "report.html").as_uri()


def test_the_curves_of_the_report_go_through_the_medians_of_the_run(report, page):
    run, address = report
    page.goto(address)
    points = page.locator("#result svg.lines").first.locator("polyline.line").first.get_attribute("points")
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    metrics = run.steps["metrics"]
    assert len(places) == len(metrics)
    medians = [sorted(row)[1] + sorted(row)[2] for row in metrics.tolist()]
    for (_, first), (_, second), before, after in zip(places, places[1:], medians, medians[1:], strict=False):
        assert (second < first) == (after > before + 1e-9) or abs(second - first) < 0.11  # upwards is a smaller y
    assert page.locator("#curves svg[role=img]").first.get_attribute("aria-label")


def test_the_slider_and_the_environment_of_the_report_draw_its_networks(report, page):
    run, address = report
    page.goto(address)
    stages, names = run.steps["stages"], [stage.name for stage in esper.Stage]
    for step in (0, 5, 9):
        for env in (0, 3):
            page.locator("#step").fill(str(step))
            page.locator("#env").select_option(str(env))
            said = page.locator("#network").get_attribute("aria-label")
            grown = [
                names[stage] for stage in stages[step, env] if names[stage] not in ("DORMANT", "PRUNED", "EMBARGOED")
            ]
            assert said.startswith(f"environment {env} at step {step}: ")
            assert [name for name in said.replace("(", " ").replace(",", " ").split() if name in names] == grown
    assert page.locator("#counts tbody tr").count() == stages.shape[2]


def test_the_keys_walk_through_a_timeline_and_tell_the_reasons(report, page, violations):
    run, address = report
    page.goto(address)
    figure = page.locator("#growth svg.timeline").first
    reasons = {row.why for row in run.rows("lifecycle") if row.why}
    figure.focus()
    said = set()
    for _ in range(figure.locator(".stay").count()):
        page.keyboard.press("ArrowRight")
        said.add(page.locator("#words").inner_text())
    assert len(said) > 1
    assert all(words.startswith("environment ") for words in said)
    assert any(reason in words for reason in reasons for words in said)
    assert violations(page) == []


def test_a_printed_report_has_no_controls_and_all_sections(report, page):
    page.goto(report[1])
    page.emulate_media(media="print")
    assert page.locator("#curves svg").first.is_visible()
    for control in ("nav", "#step", "#env"):
        assert not page.locator(control).first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_the_report_without_scrolling_sideways(report, browser, scheme):
    with watched(browser, color_scheme=scheme, viewport={"width": 360, "height": 740}, is_mobile=True) as page:
        page.goto(report[1])
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        back, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        light = [sum(map(float, colour[4:-1].split(", "))) for colour in (back, ink)]
        assert (light[0] > light[1]) == (scheme == "light")
