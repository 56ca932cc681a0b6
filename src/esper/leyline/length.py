"""The length of an episode, in steps or in passes over the train split (epochs)."""

import math

from esper.leyline.config import LARGE, Config
from esper.leyline.errors import InputError
from esper.leyline.task import AnyTask, Mixture
from esper.leyline.text import counted


def epochs_of(steps: int, config: Config, task: AnyTask) -> float | None:
    """The passes over the train split that the steps amount to; None for a mixture, whose train splits differ in size."""
    if isinstance(task, Mixture):
        return None
    return round(steps * config.data.batch_size * config.data.batches_per_step / task.examples, 4)


def with_steps(config: Config, task: AnyTask) -> Config:
    """The config with `steps` computed from `epochs`; unchanged if `epochs` is None.

        steps = ceil(epochs * N / (data.batch_size * data.batches_per_step))

    N is the number of examples in the train split. InputError if the config also sets other `steps`, and for a mixture, whose
    train splits differ in size.
    """
    if config.epochs is None:
        return config
    if isinstance(task, Mixture):
        raise InputError(
            f"epochs is {config.epochs:g}, but the instances of {task.name} have train splits of several sizes; give steps"
        )
    seen, examples = config.data.batch_size * config.data.batches_per_step, task.examples
    steps = max(
        1, math.ceil(round(config.epochs * examples / seen, 9))
    )  # 0.1 epochs of 10,240 examples are 1 step of 1,024
    if steps > LARGE:
        raise InputError(
            f"epochs is {config.epochs:g}, which is {counted(steps, 'step')}; give a number that comes to {LARGE:,} or less"
        )
    if "steps" in config.model_fields_set and config.steps != steps:
        raise InputError(
            f"steps is {config.steps} and epochs is {config.epochs:g}, which is {counted(steps, 'step')} of "
            f"{counted(seen, 'example')}; give one of the two"
        )
    return config.model_copy(update={"steps": steps})
