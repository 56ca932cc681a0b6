"""Open a browser whose pages are watched, and check pages by the rules of accessibility."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from browsers import watched
from served import make_runs, serving

AXE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def browser():
    """Open Debian's chromium, driven by the client of Playwright."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("needs the browser chromium, as from apt-get install chromium")
    with sync_playwright() as player:
        opened = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    """Open a watched page on a screen of usual size."""
    with watched(browser) as opened:
        yield opened


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Make runs that have ended; see `served.make_runs`."""
    return make_runs(tmp_path_factory.mktemp("browsed").resolve())


@pytest.fixture
def open_page(page):
    """Return a context that serves; the page is left before it ends, because a browser says so when a server goes away."""

    @contextmanager
    def opened(*arguments):
        with serving(*arguments) as (process, address):
            yield process, address
            page.goto("about:blank")

    return opened


@pytest.fixture(scope="session")
def violations():
    """Find what axe-core says is wrong, a line each: the rule, what it asks for, and the first element that breaks it."""
    if not AXE.exists():
        pytest.fail("needs axe-core, which make install-browser fetches from npm")
    script = AXE.read_text(encoding="utf-8")

    def found(page):
        page.evaluate(script)  # by the protocol of the browser, which the policy of the page does not forbid
        checked = page.evaluate("async () => await axe.run(document)")
        assert checked["passes"]
        return [
            f"{each['id']} ({each['impact']}): {each['help']}: {each['nodes'][0]['html'][:160]}: "
            f"{each['nodes'][0]['failureSummary']}"
            for each in checked["violations"]
        ]

    return found
