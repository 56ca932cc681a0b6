"""Check that a command makes the pictures of the documentation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
NAMES = ("report.png", "dashboard.png", "terminal.png")

pytestmark = pytest.mark.browser


@pytest.mark.usefixtures("browser")
def test_one_command_makes_the_pictures(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "pictures.py"), "--quick", "--out", str(tmp_path)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    for name in NAMES:
        made, shipped = Image.open(tmp_path / name), Image.open(ROOT / "docs" / "assets" / name)
        assert made.size == shipped.size
        assert len(made.convert("RGB").getcolors(2**24)) > 8, "the picture is empty"
        assert (ROOT / "docs" / "assets" / name).stat().st_size < 200_000
