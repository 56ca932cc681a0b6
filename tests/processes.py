"""Run commands as processes that a failed test does not leave behind."""

import subprocess
from contextlib import contextmanager


@contextmanager
def begun(command):
    """Start a command as a process whose output is read; it is killed at the end, as `Popen` alone would wait for it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
