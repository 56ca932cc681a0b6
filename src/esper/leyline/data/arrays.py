"""Read tensors, arrays, lists and data frames of a user through NumPy; data frames are read without importing pandas."""

from collections.abc import Iterable
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.messages import InputError, kind_of


@runtime_checkable
class Frame(Protocol):
    """Holds named columns, as `pandas.DataFrame` does."""

    columns: Iterable[Any]

    def to_numpy(self) -> NDArray[Any]: ...

    def __getitem__(self, name: Any) -> Any: ...


def as_tensor(value: Any, what: str, dtype: torch.dtype) -> Tensor:
    """Turn real numbers into a detached tensor on the CPU, as `real` does; float64 that is no tensor becomes `dtype`.

    InputError if they are not real numbers.
    """
    if isinstance(value, Tensor):
        return real(value.detach().cpu(), what)
    tensor = real(torch.from_numpy(np.array(numeric_array(value, what))), what)
    return tensor.to(dtype) if tensor.dtype == torch.float64 else tensor


def real(values: Tensor, what: str) -> Tensor:
    """Turn real numbers into a dtype that torch computes with: unsigned whole numbers of 16 bits and more become int64."""
    if values.is_complex():
        raise InputError(f"{what} holds complex numbers; give their real and imaginary parts as numbers of their own")
    if values.dtype not in (torch.uint16, torch.uint32, torch.uint64):  # torch indexes and compares with few others
        return values
    found = values.long()
    if values.dtype == torch.uint64 and (found < 0).any():
        largest = int(found[found < 0].max()) + 2**64
        raise InputError(f"{what} holds {largest:,}; give whole numbers below {2**63:,}")
    return found


def numeric_array(value: Any, what: str) -> NDArray[Any]:
    """Turn an array, list or data frame into an array of numbers, NaN where missing. InputError if a value is no number."""
    if isinstance(value, Frame):
        names = list(value.columns)
        check_different(names, what)
        columns = [_column(np.asarray(value[name]), f"column {name!r} of {what}", name) for name in names]
        return np.stack(columns, 1) if columns else np.empty((len(value.to_numpy()), 0))
    return _column(to_array(value, what), what)


def check_different(names: list[Any], what: str) -> None:
    """Raise InputError if two columns of a data frame have one name."""
    if len(set(names)) < len(names):
        raise InputError(f"{what} has several columns of one name among {names}; give every column a name of its own")


def column_names(value: Any) -> tuple[str, ...] | None:
    """Return the names of a data frame's columns; None if the value is not a data frame, or if a name is not a text."""
    names = tuple(value.columns) if isinstance(value, Frame) else ()
    return tuple(map(str, names)) if names and all(isinstance(name, str) for name in names) else None


def select_columns(value: Any, names: tuple[str, ...] | None, what: str) -> Any:
    """Return the named columns of a data frame, in order; a value without names unchanged. InputError if one is missing."""
    given = column_names(value)
    if names is None or given is None:
        return value
    missing = [name for name in names if name not in given]
    if missing:
        raise InputError(
            f"{what} lacks the column {missing[0]!r}; give the {len(names)} columns {', '.join(names)[:200]}"
        )
    return value if given == names else value[list(names)]


def to_array(value: Any, what: str) -> NDArray[Any]:
    """Return the value as an array. InputError if NumPy cannot convert it."""
    try:
        made = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        made = np.asarray(None)
    if made.dtype.kind == "O" and made.ndim == 0:
        raise InputError(
            f"{what} is {kind_of(value)} that cannot be read as an array of numbers; give a tensor or an array"
        )
    return made


def is_missing(value: object) -> bool:
    """Return whether an entry is a missing value: None, NaN, or NA and NaT of pandas."""
    return (
        value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, Real) and value != value)
    )


def _column(values: NDArray[Any], what: str, name: object = None) -> NDArray[Any]:
    """Return an array of numbers unchanged; an array of objects as float64. InputError if an entry is not a number."""
    if values.dtype.kind in "biufc":
        return values
    if values.dtype.kind != "O":
        first = f", such as {values.flat[0].item()!r}" if values.size else ""
        raise InputError(f"{what} holds {_KINDS.get(values.dtype.kind, str(values.dtype))}{first}; {_mend(what, name)}")
    flat = values.ravel().tolist()
    for index, entry in enumerate(flat):
        if is_missing(entry):
            flat[index] = np.nan
        elif not isinstance(entry, Real):
            raise InputError(f"{what} holds {str(entry)[:40]!r}, {kind_of(entry)}; {_mend(what, name)}")
    return np.array(flat, np.float64).reshape(values.shape)


_KINDS = {"U": "text", "T": "text", "S": "bytes of text", "M": "dates", "m": "durations"}


def _mend(what: str, name: object) -> str:
    """Return what to do about a column of this name that holds no numbers; None for what is no column of a frame."""
    if what == "y":
        return "give numbers, for labels the whole numbers of the classes"
    if name is None:
        return "give numbers alone; where they are categories, a column of 0 and 1 for each"
    return (
        f"give numbers alone, or make the task with preprocess=make_column_transformer((OneHotEncoder(), [{name!r}]), "
        "remainder='passthrough').fit(the training rows of x) of scikit-learn (`esper docs tasks`)"
    )
