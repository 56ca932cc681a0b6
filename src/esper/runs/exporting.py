"""Exporters beside a run: each is a process of its own that follows the events, so that no step waits for it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from esper.leyline.config import Config
from esper.leyline.errors import InputError, RunWarning, warn
from esper.leyline.exporters import check_installed
from esper.nissa.rows import Row

PATIENCE = 120.0
"""How long a run that has ended waits for an exporter to finish [seconds]."""
_PACKAGES = str(Path(__file__).parents[2])


def check_exporters(config: Config, folder: Path | None) -> None:
    """InputError if the exporters of a config cannot run."""
    names = config.telemetry.exporters
    if names and folder is None:
        raise InputError(
            f"telemetry.exporters is {', '.join(names)}, and exporters read the run folder; name one (--run, run=)"
        )
    if names and config.telemetry.level == "off":
        raise InputError("telemetry.exporters needs events, and telemetry.level is off; set it to step or run")
    for name in names:
        check_installed(name)


class Exporter:
    """An output that starts `esper export-events` at the first row and waits for it at the end. The process reads the file."""

    def __init__(self, folder: Path, target: str) -> None:
        self.folder, self.target = folder, target
        self._process: subprocess.Popen[bytes] | None = None
        self._dropped = False

    def write(self, row: Row) -> None:
        """Start the process, or report that it has ended too early; the row itself is in the file."""
        if self._process is None and not self._dropped:
            self._start()
        elif self._process is not None and self._process.poll() is not None:
            self._drop(self._process)

    def close(self) -> None:
        """Tell the process that the run has ended, and wait for its last rows."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._warn(f"is not done after {PATIENCE:.0f} seconds and goes on by itself")
            return
        if process.returncode:
            self._drop(process)
        else:
            self._said.close()

    def _start(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # what the process prints; a pipe would make it wait
        command = [sys.executable, "-P", "-m", "esper"]  # -P: the current folder may hold modules of other names
        command += ["export-events", str(self.folder), "--to", self.target, "--beside-run"]
        paths = [path for path in (os.environ.get("PYTHONPATH"), _PACKAGES) if path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._said,
            env=environment,
            start_new_session=True,  # so that a Ctrl-C ends the run in good order before it ends the exporter
        )

    def _drop(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        self._process, self._dropped = None, True
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        self._said.close()
        self._warn(f"failed and was dropped, and the run is not affected: {lines[-1].removeprefix('error: ')}")

    def _warn(self, what: str) -> None:
        mend = f"`esper export-events {self.folder} --to {self.target}` exports the run afterwards"
        warn(f"the exporter to {self.target} {what}; {mend}", RunWarning)
