"""Read examples in worker processes of torch's DataLoader: tensors come back as bytes, and errors as text."""

import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from esper.leyline.messages import InputError, UserCodeError, first_line, in_words


def read_by_workers(
    read: Callable[[Any], Any], requests: Iterable[Any], workers: int, name: str, done: Callable[[int], str]
) -> Iterator[Any]:
    """Yield what `read` returns for each request, a tree of tensors, in the order of the requests.

    Two requests for each worker are taken before their results are asked for. `name` is that of the Dataset in messages, and
    `done` says in words how much so many results are. Closing the iterator ends the workers.

    Raises the InputError or UserCodeError that `read` raised, and InputError if a worker cannot be started, or ends.
    """
    loader = DataLoader(
        _Requested(read),
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        collate_fn=_identity,
        generator=torch.Generator(),  # seeds the workers without a draw from the caller's random state
        worker_init_fn=partial(_begin, torch.get_default_dtype()),
    )
    mend = "define the Dataset at the top of a module and open its files in __getitem__, or give workers=0"
    with in_words(f"the workers for the {name} could not be started", mend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about what cannot be pickled, which the sentence says
        results = iter(loader)
    # Once any loader of the process has begun in its main thread, torch raises the error of a worker that ended there, wherever
    # the main thread is. Without its number only the loop below raises it.
    signal_handling._remove_worker_pids(id(results))  # type: ignore[attr-defined]
    results._worker_pids_set = False  # type: ignore[attr-defined]
    count = 0
    try:
        for result in results:
            if isinstance(result, _Failure):
                if result.trace is None:
                    raise InputError(result.sentence)
                raise UserCodeError(result.sentence) from RuntimeError(f"in the worker:\n{result.trace}")
            yield pytree.tree_map(_Packed.tensor, result, is_leaf=lambda node: isinstance(node, _Packed))
            count += 1
    except (InputError, UserCodeError):
        raise
    except Exception as error:
        ends = [_ended(worker.exitcode) for worker in results._workers if worker.exitcode is not None]  # type: ignore[attr-defined]
        raise InputError(
            f"a worker ended while it read the {name}, after {done(count)}: {' and '.join(ends) or first_line(error)}; "
            "give workers=0 to see which example it is, or fewer workers where memory ran out"
        ) from error
    finally:
        del results  # ends the workers, also while the traceback of an error holds this frame


def _ended(code: int) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


class _Packed(NamedTuple):
    """Holds a tensor as an array, which is sent through a pipe; a tensor would need shared memory and an open file."""

    content: NDArray[Any]  # its axes in the order in which they lie in memory
    axes: list[int] | None  # where each axis of the tensor is among them; None where they are in order
    dtype: torch.dtype | None  # where NumPy does not know it; the content is then whole numbers of as many bits

    def tensor(self) -> Tensor:
        found = torch.from_numpy(self.content)
        if self.dtype is not None:
            found = found.view(self.dtype)
        return found if self.axes is None else found.permute(self.axes)


class _Failure(NamedTuple):
    """Holds an error as text, because some exceptions cannot be pickled."""

    sentence: str
    trace: str | None = None  # of the user's code; None where the input is bad


class _Requested(Dataset[Any]):
    """Wraps a function as a Dataset, whose items are its packed results."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __getitem__(self, request: Any) -> Any:
        try:
            found = self.read(request)
        except InputError as error:
            return _Failure(str(error))
        except UserCodeError as error:
            return _Failure(str(error), "".join(traceback.format_exception(error.__cause__)))

        return pytree.tree_map(_packed, found)


def _packed(tensor: Tensor) -> _Packed:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    axes = None if order == sorted(order) else [order.index(axis) for axis in range(tensor.dim())]
    content = tensor.permute(order).contiguous()
    try:
        return _Packed(content.numpy(), axes, None)
    except TypeError:  # bfloat16, and floating-point numbers of 8 bits
        return _Packed(content.view({1: torch.uint8, 2: torch.int16}[tensor.itemsize]).numpy(), axes, tensor.dtype)


def _begin(dtype: torch.dtype, worker: int) -> None:
    """Let a worker read in the dtype of the caller, leave Ctrl-C to it, and end with it."""
    torch.set_default_dtype(dtype)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_caller, daemon=True).start()


def _end_with_caller() -> None:
    """End a worker whose caller was killed, even where it reads an example: torch looks between two requests."""
    caller = multiprocessing.parent_process()
    assert caller is not None, "a worker was started by another process"
    caller.join()
    os._exit(1)


def _identity(result: Any) -> Any:
    return result
