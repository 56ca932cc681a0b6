"""Actors on Ray: a local cluster, or the one at an address (https://docs.ray.io/en/latest/ray-core/actors.html)."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from esper.leyline.distribution import pip_install
from esper.leyline.errors import InputError
from esper.runs.actor_work import Answers
from esper.runs.processes import pickled, unpickled


class RayCrew:
    """A crew of Ray actors, each with one CPU, and with a GPU where its device is one."""

    def __init__(self, size: int, work: object, devices: Sequence[str | None], address: str | None) -> None:
        """address: of a cluster; None is that of the variable RAY_ADDRESS, or a local cluster that ends with the run.

        Raises InputError if Ray is not installed, or the cluster cannot be reached.
        """
        try:
            import ray
        except ImportError:
            raise InputError(f"cluster is ray, which is not installed; give {pip_install('ray')}") from None
        self.size, self._devices, self._ray = size, devices, ray
        self._content = pickled(work)
        self._actors: dict[int, Any] = {}
        self._answers: dict[Any, int] = {}  # actors by the answers that are awaited
        self._own = not ray.is_initialized()
        if self._own:
            local = address is None and "RAY_ADDRESS" not in os.environ
            options = {"num_cpus": size, "include_dashboard": False} if local else {"address": address or "auto"}
            try:
                ray.init(log_to_driver=False, logging_level="ERROR", **options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = address or os.environ.get("RAY_ADDRESS", "this machine")
                raise InputError(
                    f"no Ray cluster can be reached at {where} ({error}); start one, or leave the address out"
                ) from None

    def start(self, actor: int) -> None:
        """Start an actor."""
        device = self._devices[actor % len(self._devices)]
        gpus = 1 if (device or "").startswith("cuda") else 0
        options = self._ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)
        # Ray shows each actor its own GPU alone, as cuda:0
        self._actors[actor] = options(RayActor).remote(self._content, "cuda:0" if gpus else device, sys.path)
        self._answers[self._actors[actor].ready.remote()] = actor

    def send(self, actor: int, message: bytes) -> None:
        """Send a message. Ray delivers messages in order."""
        self._answers[self._actors[actor].answer.remote(message)] = actor

    def receive(self, seconds: float) -> list[tuple[int, bytes | None]]:
        """Wait for answers. An actor whose process or machine has ended is lost."""
        done, _ = self._ray.wait(list(self._answers), num_returns=1, timeout=seconds)
        found: list[tuple[int, bytes | None]] = []
        for future in done:
            actor = self._answers.pop(future)
            try:
                answer = self._ray.get(future)
            except self._ray.exceptions.RayActorError:
                if (actor, None) not in found:
                    found.append((actor, None))
                for other in [each for each, its in self._answers.items() if its == actor]:
                    del self._answers[other]
                continue
            if answer:  # weights have an empty answer
                found.append((actor, answer))
        return found

    def close(self) -> None:
        """End all actors, and a local cluster."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._answers.clear()
        if self._own and self._ray.is_initialized():
            self._ray.shutdown()


class RayActor:
    """The class of the Ray actors."""

    def __init__(self, content: bytes, device: str | None, path: Sequence[str]) -> None:
        torch.set_num_threads(1)
        sys.path.extend(each for each in path if each not in sys.path)
        self._answers = Answers(lambda: unpickled(content).make(device))

    def ready(self) -> bytes:
        """Make the work, and return the first answer."""
        return self._answers.ready()

    def answer(self, message: bytes) -> bytes:
        """Return the answer to a message; none is empty."""
        return self._answers.answer(message) or b""
