"""Check that no page breaks a rule of axe-core, light or dark, on a wide screen or on a phone."""

import json
import shutil

import pytest

import esper
from browsers import watched
from esper.store.lock import LOCK, describe_process
from served import NAME, begin, serving

pytest.importorskip("starlette", reason="the extra web is not installed")
pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")

from esper.karn.serve.library import key_of

pytestmark = pytest.mark.browser

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SCREENS = {
    "light": {"color_scheme": "light", "viewport": WIDE},
    "dark": {"color_scheme": "dark", "viewport": WIDE},
    "phone": {"color_scheme": "light", "viewport": PHONE, "has_touch": True, "is_mobile": True},
    "dark phone": {"color_scheme": "dark", "viewport": PHONE, "has_touch": True, "is_mobile": True},
}
PAGES = (
    "list", "ended run", "live run", "training", "run with strange names", "decisions", "no decisions", "files",
    "comparison", "error", "report", "comparison in a file",
)  # fmt: skip


@pytest.fixture(scope="module")
def addresses(runs, tmp_path_factory):
    """Serve the runs and return the address of every kind of page, by name."""
    folder = tmp_path_factory.mktemp("accessible").resolve()
    for name in ("finished", NAME):
        shutil.copytree(runs / name, folder / name)
    shutil.copytree(runs / "finished", folder / "growing")
    begin(folder / "growing", 40)
    (folder / "growing" / LOCK).write_text(json.dumps(describe_process()))
    settings = {"envs": 4, "steps": 3, "ppo": {"rounds": 3, "imitation_rounds": 0, "validate_envs": 2}}
    settings["reward"] = {"group_size": 2}
    esper.train(["iris"], settings, run=folder / "training", progress=False)
    esper.compare(folder / "finished", folder / "growing", out=folder / "comparison.html")
    key = {name: key_of(folder / name) for name in ("finished", "growing", "training", NAME)}
    with serving(folder) as (_, address):
        yield {
            "list": f"{address}/",
            "ended run": f"{address}/runs/{key['finished']}",
            "live run": f"{address}/runs/{key['growing']}",
            "training": f"{address}/runs/{key['training']}",
            "run with strange names": f"{address}/runs/{key[NAME]}",
            "decisions": f"{address}/runs/{key['finished']}/decisions?carried_out=no",
            "no decisions": f"{address}/runs/{key['finished']}/decisions?text=nothing-like-that",
            "files": f"{address}/runs/{key['finished']}/files",
            "comparison": f"{address}/compare?run={key['finished']}&run={key['growing']}",
            "error": f"{address}/runs/none",
            "report": (folder / "finished" / "report.html").as_uri(),
            "comparison in a file": (folder / "comparison.html").as_uri(),
        }


@pytest.fixture(scope="module", params=SCREENS)
def screen(request, browser):
    """Open a page on each kind of screen."""
    with watched(browser, missing=1, **SCREENS[request.param]) as page:
        yield page
        page.goto("about:blank")


@pytest.mark.parametrize("name", PAGES)
def test_no_page_breaks_a_rule_of_accessibility(screen, addresses, violations, name):
    screen.goto(addresses[name])
    screen.locator("main h1, header h1").first.wait_for()
    assert violations(screen) == []
