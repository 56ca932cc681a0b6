"""Actors in the process of a test."""

from esper.runs.actor_work import Answers


class Beside:
    """A crew of real actors in this process, some of which are lost instead of giving a certain answer."""

    def __init__(self, size, work, losses=()):
        self.size, self.work, self.losses = size, work, list(losses)
        self.actors, self.answers, self.starts, self.closed = {}, [], 0, False

    def start(self, actor):
        self.starts += 1
        self.actors[actor] = Answers(lambda: self.work.make(None))
        self.answers.append((actor, self.actors[actor].ready()))

    def send(self, actor, message):
        answer = self.actors[actor].answer(message)
        if answer is not None:
            self.answers.append((actor, None if self.losses and self.losses.pop(0) else answer))

    def receive(self, seconds):
        found, self.answers = self.answers[-1:], self.answers[:-1]  # the last first
        return found

    def close(self):
        self.closed = True
