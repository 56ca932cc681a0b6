"""Run workers in the process of a test, and define a task that no worker can import."""

from esper.runs.workers.transports import MessageAnswers

SHY = """
import multiprocessing
import torch, esper

if multiprocessing.parent_process() is not None:
    raise OSError("the disk with the data is not mounted")

def task():
    x, y = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
    return esper.task("shy", x, y, host=lambda: esper.mlp(inputs=2, width=4, classes=2, blocks=1)())
"""
"""A module of one's own whose task can be made in the first process alone."""


class Beside:
    """Runs real workers in this process, some of which are lost instead of giving a certain answer."""

    def __init__(self, size, work, losses=()):
        self.numbers, self.work, self.losses = range(size), work, list(losses)
        self.workers, self.answers, self.starts, self.closed = {}, [], 0, False

    def start(self, worker):
        self.starts += 1
        self.workers[worker] = MessageAnswers(lambda: self.work(None))
        self.answers.append((worker, self.workers[worker].answer(None)))

    def send(self, worker, message):
        answer = self.workers[worker].answer(message)
        self.answers.append((worker, None if self.losses and self.losses.pop(0) else answer))

    def receive(self, seconds):
        found, self.answers = self.answers[-1:], self.answers[:-1]  # the last first
        return found

    def silent(self):
        return {}

    def close(self):
        self.closed = True
