"""Stop a machine between two system calls, as often as there are calls, or a process after some steps."""

import os

from esper.leyline.progress import Progress

CALLS = ("mkdir", "rmdir", "unlink", "rename", "replace", "truncate", "ftruncate", "fsync", "write", "open", "link")


class Crash(BaseException):
    """Stops the machine: nothing that runs after it has an effect."""


class Left(BaseException):
    """Ends the process."""


class Leaving(Progress):
    """Reports progress until the process is gone, after so many steps."""

    def __init__(self, after):
        self.after, self.notes, self.steps = after, [], 0

    def step(self, view, speed, rollbacks):
        self.steps += 1
        if self.steps == self.after:
            raise Left

    def note(self, text):
        self.notes.append(text)


def crashing(monkeypatch, at):
    """Let every system call that changes the disk fail from number `at` on; returns the list of those made."""
    made = []

    def counted(name, real):
        def call(*arguments, **named):
            if len(made) >= at:
                raise Crash
            made.append(name)
            return real(*arguments, **named)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    return made


def at_every_call(monkeypatch, prepare, act):
    """Run `prepare`, then `act` with a crash at each of its system calls in turn; yields after each, and after none at last."""
    at, whole = 0, False
    while not whole:
        prepare()
        with monkeypatch.context() as crashed:
            crashing(crashed, at)
            try:
                act()
                whole = True
            except Crash:
                at += 1
        yield
