"""Commands as processes that a failed test does not leave behind."""

import subprocess
from contextlib import contextmanager


@contextmanager
def begun(command):
    """The process of a command whose output is read; it is killed at the end, as `Popen` alone would wait for it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
