"""Make disks without room: a small file system that is really full, and one that says so of files of some name."""

import errno
import os
import re
import subprocess
from pathlib import Path

import pytest


class Tmpfs:
    """Offers a file system of a megabyte in memory."""

    def __init__(self, path):
        self.path, self.filler = path, path / "filler"

    def fill(self, left=0):
        """Leave no room, but for `left` bytes."""
        with open(self.filler, "ab", buffering=0) as file:
            for size in (4096, 1):
                with pytest.raises(OSError, match="No space left"):
                    _pour(file, size)
            os.ftruncate(file.fileno(), max(0, file.tell() - left))

    def free(self):
        self.filler.unlink(missing_ok=True)


def _pour(file, size):
    while True:
        file.write(b"\0" * size)


@pytest.fixture
def tmpfs(tmp_path):
    """Make a small file system in memory; skips where nothing may be mounted, which takes root."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield Tmpfs(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def full_device():
    """Return the path of a device on which every write finds no room. Linux has one."""
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("needs a device that is always full")
    return path


class Full:
    """Answers for the disk: writes to files whose path has a pattern fail, the first `times` of them that come."""

    def __init__(self, pattern, times):
        self.pattern, self.times, self.failed = re.compile(pattern), times, []
        self.write, self.fsync = os.write, os.fsync

    def _check(self, descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if len(self.failed) < self.times and self.pattern.search(path):
            self.failed.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def os_write(self, descriptor, data):
        self._check(descriptor)
        return self.write(descriptor, data)

    def os_fsync(self, descriptor):
        self._check(descriptor)
        return self.fsync(descriptor)


@pytest.fixture
def full(monkeypatch):
    """Return full(pattern, times, call), which makes `os.write`, or `os.fsync`, find no room for files of some name."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to tell the name of what is written")

    def make(pattern, times=1, call="write"):
        disk = Full(pattern, times)
        monkeypatch.setattr(os, call, getattr(disk, f"os_{call}"))
        return disk

    return make
