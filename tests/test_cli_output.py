"""Check that a command whose output goes nowhere comes to its end, and that its folder is whole."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from esper.cli import main
from esper.runs.folder.resume import read_config
from esper.store.checkpoint import Checkpoints
from processes import begun

pytestmark = [pytest.mark.usefixtures("elsewhere"), pytest.mark.campaign]

GROW = ["grow", "iris", "--envs", "2", "--models", "none", "--set", "data.batches_per_step=1"]
ESPER = f"{sys.executable} -m esper"

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell that redirects")


def status(folder):
    return json.loads(Path(folder, "summary.json").read_text())["status"]


@needs_bash
def test_a_run_ends_well_though_stderr_breaks_and_stdout_is_full(full_device):
    line = f"{{ {ESPER} {' '.join(GROW)} --steps 3 --run r 2>&3 >{full_device}; echo $? >code; }} 3>&1 | true"
    subprocess.run(["bash", "-c", line], check=True, timeout=120)
    assert Path("code").read_text() == "0\n"
    assert status("r") == "finished"
    assert not Path("r/lock").exists()


@needs_bash
def test_a_run_without_stderr_in_a_narrow_ascii_terminal_prints_its_figures():
    line = f"COLUMNS=20 PYTHONIOENCODING=ascii {ESPER} {' '.join(GROW)} --steps 3 --run r 2>&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    out = done.stdout.decode("ascii")
    assert " +-0." in out
    assert "..." not in out
    assert status("r") == "finished"


def test_the_end_of_its_terminal_ends_a_run_as_sigterm_does():
    command = [sys.executable, "-m", "esper", *GROW, "--steps", "1000000", "--run", "r"]
    with begun(command) as process:
        assert process.stderr.readline().startswith("step 1/")
        process.stdout.close()
        process.stderr.close()
        for _ in range(2):  # as the kernel and the shell send one each
            process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=120) == 130
    assert status("r") == "interrupted"
    assert not Path("r/lock").exists()
    assert Checkpoints(Path("r"), read_config(Path("r")).checkpoint).read(pytest.fail) is not None


def test_a_command_whose_result_is_its_output_fails_where_that_cannot_be_written(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as end:
            main(["config"])
        assert end.value.code == 1
    assert capsys.readouterr().err == "error: the output could not be written: No space left on device\n"
