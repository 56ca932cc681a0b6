"""Write docs/assets/report.png: a run on digits-narrow, and a picture of its report. Needs chromium and pillow."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

import esper

TARGET = Path(__file__).parents[1] / "docs" / "assets" / "report.png"
WIDTH, HEIGHT = 1000, 1500


def main() -> None:
    """Grow, report, and take the picture."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: no chromium was found; install it, as with apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "digits-narrow"
        settings = {"envs": 16, "steps": 24, "models": "none"}
        esper.grow("digits-narrow", settings, controller="heuristic", run=run, progress=False)
        picture = Path(folder) / "report.png"
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={WIDTH},{HEIGHT}",
        ]
        command = [browser, *options, f"--screenshot={picture}", (run / "report.html").as_uri()]
        subprocess.run(command, check=True, capture_output=True)
        Image.open(picture).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(TARGET, optimize=True)
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
