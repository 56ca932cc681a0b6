"""Write the pictures of the documentation into docs/assets: report.png, dashboard.png and terminal.png.

    python scripts/pictures.py

They show one growth on digits-narrow with seed 0: its report, and what `esper serve` and `esper watch` show of it after two
thirds of its steps. Needs chromium and the extra dev.
"""

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import esper
from esper.karn.terminal.watch import Watch
from esper.store.files import EVENTS, REPORT, SUMMARY
from esper.store.lock import LOCK, describe_process

TARGET = Path(__file__).parents[1] / "docs" / "assets"
NAME = "digits-narrow"
SETTINGS = {"envs": 16, "steps": 24, "models": "none"}
QUICK = {"envs": 4, "steps": 6, "models": "none", "baselines": ["twin"]}
PAGE = {"width": 1000, "height": 1250}
TERMINAL = (100, 30)  # columns and lines
FONT = "DejaVu Sans Mono"
COLOURS = 256


def main() -> None:
    """Grow, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET, help="folder of the pictures")
    parser.add_argument("--quick", action="store_true", help="a growth of four environments for six steps")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: no chromium was found; install it, as with apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "ended" / NAME
        settings = QUICK if arguments.quick else SETTINGS
        esper.grow(NAME, settings, controller="heuristic", run=run, progress=False)
        begun = two_thirds(run, Path(folder) / "begun" / NAME)
        terminal = asyncio.run(screen(begun))
        with sync_playwright() as player, served(begun.parent) as address:
            browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            save(arguments.out / "report.png", picture(browser, (run / REPORT).as_uri()))
            save(arguments.out / "dashboard.png", picture(browser, address))
            save(arguments.out / "terminal.png", drawn(browser, terminal))
            browser.close()


def two_thirds(run: Path, folder: Path) -> Path:
    """Copy a run as it was after two thirds of its steps, with this process as the one that writes it."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns(SUMMARY, REPORT))
    lines = (run / EVENTS).read_bytes().splitlines(keepends=True)
    ends = [index for index, line in enumerate(lines) if json.loads(line)["kind"] == "step"]
    (folder / EVENTS).write_bytes(b"".join(lines[: ends[2 * len(ends) // 3] + 1]))
    (folder / LOCK).write_text(json.dumps(describe_process()))
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Start `esper serve`, and yield the address of its list."""
    command = [sys.executable, "-m", "esper", "serve", "--port", "0", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[2]
        finally:
            process.terminate()


def picture(browser: Browser, address: str) -> bytes:
    """Take a picture of the top of a page; of the only run, where the address is that of a list."""
    page = browser.new_page(viewport=PAGE, color_scheme="light")
    page.goto(address)
    if address.startswith("http"):
        page.get_by_role("link", name=NAME).click()
    page.locator("#curves svg").first.wait_for()
    taken: bytes = page.screenshot()
    page.close()
    return taken


async def screen(run: Path) -> str:
    """Return the terminal as SVG, with the second environment chosen."""
    app: Any = Watch(run)
    async with app.run_test(size=TERMINAL) as pilot:
        await pilot.pause()
        await pilot.press("down")
        await pilot.pause()
        shown: str = app.export_screenshot(title=f"esper watch runs/{NAME}")
        return shown


def drawn(browser: Browser, terminal: str) -> bytes:
    """Draw an SVG as a picture. The fonts that it would load from a server are replaced by one of this machine."""
    local = re.sub(r"@font-face\s*\{.*?\}", "", terminal, flags=re.DOTALL).replace("Fira Code", FONT)
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.set_content(
        f"<style>body {{ margin: 0 }} svg {{ width: 1000px; height: auto; display: block }}</style>{local}"
    )
    taken: bytes = page.locator("svg").first.screenshot()
    page.close()
    return taken


def save(path: Path, taken: bytes) -> None:
    """Write a picture with few colours, so that it stays small."""
    Image.open(BytesIO(taken)).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
