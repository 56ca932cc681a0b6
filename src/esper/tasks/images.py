"""Tasks whose examples are images: handwritten digits of 8 x 8 pixels, and CIFAR-10."""

from dataclasses import replace

import torch

from esper.leyline.data.batches import Batch, picked
from esper.leyline.data.task import Pixels, Split, Task, one_tensor
from esper.tasks.cifar import read_cifar10
from esper.tasks.hosts.factories import CNN, MAP_MENU, ResidualCNN
from esper.tasks.objectives import Classification
from esper.tasks.splits import cut, dealt

_DIGITS = "1,797 handwritten digits as images of 8 x 8 pixels in 10 classes"
DIGITS = f"{_DIGITS}; a residual CNN"
DIGITS_NARROW = f"{_DIGITS}; a CNN that is narrow in both of its blocks"
DIGITS_SIZES = (1024, 256, 128, 389)  # train, probe, validation, test; 16 batches of 64 are one epoch
CIFAR10 = "60,000 photographs of 32 x 32 pixels in 10 classes, from files of your own (`esper docs images`); a slim CNN"
HELD = 0.05  # share of CIFAR's training images that is in the probe split, and again in the validation split
HOST = ResidualCNN(inputs=(1, 8, 8), channels=(8, 16), outputs=10)


def digits_image() -> Task:
    """Scikit-learn's digits (Alpaydin and Kaynak, UCI 1998) as uint8 images of one channel, on a residual CNN.

    The splits hold the same examples as those of `digits`.
    """
    from sklearn.datasets import load_digits  # a second of imports that no other task needs

    data = load_digits()
    x = torch.from_numpy(data.images).to(torch.uint8)[:, None]  # values from 0 to 16
    y = torch.from_numpy(data.target).to(torch.int64)
    splits = cut(x, y, dealt(y, DIGITS_SIZES, seed=0))
    return Task(
        name="digits-image",
        summary=DIGITS,
        host=HOST,
        **splits._asdict(),
        objective=Classification(10),
        menu=MAP_MENU,
        defaults={"steps": 24, "data": {"batch_size": 64, "batches_per_step": 16}},
        pixels=standardizing(splits.train.x),
    )


def digits_image_narrow(channels: tuple[int, ...] = (8, 16), hidden: tuple[int, ...] = (3, 4)) -> Task:
    """`digits-image` on a damaged host without skip connections, both of whose blocks are too narrow: a test of controllers.

    Raises InputError if a size is under 1.
    """
    host = CNN(inputs=(1, 8, 8), channels=channels, hidden=hidden, outputs=10)
    return replace(digits_image(), name="digits-image-narrow", summary=DIGITS_NARROW, host=host)


def cifar10(channels: tuple[int, ...] = (8, 16, 32)) -> Task:
    """CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009), from local files.

    A twentieth of the published training images is the probe split, and another twentieth the validation split. The published
    test images are the test split. Training images are shifted by up to 4 pixels and mirrored at random.

    Raises InputError if the files are missing, incomplete, damaged or of a format that `esper docs images` does not list.
    """
    published, test = read_cifar10()
    held = max(round(HELD * len(published.y)), 2)
    parts = dealt(published.y, (len(published.y) - 2 * held, held, held), seed=0)
    train, probe, validation = (Split(picked(published.x, part), published.y[part]) for part in parts)
    return Task(
        name="cifar10",
        summary=CIFAR10,
        host=CNN(inputs=(3, 32, 32), channels=channels, outputs=10),
        train=train,
        probe=probe,
        validation=validation,
        test=test,
        objective=Classification(10),
        menu=MAP_MENU,
        defaults={"steps": 24, "data": {"batch_size": 64, "batches_per_step": 32}, "optimizer": {"lr": 2e-3}},
        pixels=standardizing(train.x, pad=4, flip=True),
    )


def standardizing(x: Batch, *, pad: int = 0, flip: bool = False) -> Pixels:
    """The `Pixels` by which every channel of x (N, C, H, W) uint8 has mean 0 and standard deviation 1 over N, H and W."""
    levels = torch.arange(256, dtype=torch.float64)
    means, deviations = [], []
    for channel in one_tensor(x, "pixels").unbind(1):
        share = torch.bincount(channel.reshape(-1).to(torch.int64), minlength=256) / channel.numel()
        mean = float((share * levels).sum())
        means.append(mean)
        deviations.append(max(float((share * (levels - mean).square()).sum()) ** 0.5, 1e-6))
    return Pixels(tuple(means), tuple(deviations), pad, flip)
