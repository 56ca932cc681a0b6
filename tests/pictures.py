"""Make small images for tests: a task, a body of convolutional hosts, and CIFAR-10 files in the published format."""

import numpy as np
import torch

from bodies import planted_body
from esper.kasmina.blueprints import BLUEPRINTS
from esper.leyline.data.task import Pixels, Split, Task
from esper.leyline.lifecycle.slots import Kind
from esper.tasks.hosts import CNN, MAP_MENU
from esper.tasks.objectives import Classification
from esper.tasks.splits import Splits

MAPS = tuple(name for kind, name in BLUEPRINTS if kind == Kind.MAP)
INPUTS = (2, 9, 8)
HOST = CNN(inputs=INPUTS, channels=(3, 5), hidden=(2, 3), outputs=3)
PIXELS = Pixels((100.0, 120.0), (50.0, 60.0))


def drawn(count, *, seed=0, inputs=INPUTS):
    """Draw byte images whose brighter half tells the class."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 200, (count, *inputs), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 3, (count,), generator=generator)
    x[y == 1, :, : inputs[1] // 2] += 55
    x[y == 2, :, :, : inputs[2] // 2] += 55
    return Split(x, y)


def pictures(*, host=HOST, menu=MAP_MENU, pixels=PIXELS):
    """Make a task that trains in milliseconds."""
    train, probe, validation, test = (drawn(n, seed=n) for n in (96, 40, 24, 30))
    return Task(
        name="pictures",
        summary="bright halves",
        host=host,
        **Splits(train, probe, validation, test)._asdict(),
        objective=Classification(3),
        menu=menu,
        pixels=pixels,
    )


def map_body(rows=3, menu=MAPS, *, host=HOST, dtype=torch.float32, **options):
    """Build a body of freshly drawn convolutional hosts; row r is drawn with key r."""
    return planted_body(host, Kind.MAP, rows, menu, dtype, **options)


def cifar_records(count, seed):
    """Draw (count, 3073) bytes: labels, and images."""
    records = np.random.default_rng(seed).integers(0, 256, (count, 3073)).astype(np.uint8)
    records[:, 0] = np.arange(count) % 10
    return records


def write_cifar(folder, count=40):
    """Write the six files of the published binary version, with fewer images in each."""
    place = folder / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    for index, name in enumerate([*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]):
        (place / name).write_bytes(cifar_records(count, index).tobytes())
    return place
