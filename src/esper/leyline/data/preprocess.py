"""Keep fitted transformers of scikit-learn as plain data: saved as JSON, loaded without code, applied with NumPy. N examples.

A table is a list of named columns, each an array (N,) of numbers or objects.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from esper.leyline.data.arrays import Frame, check_different, is_missing, numeric_array, to_array
from esper.leyline.messages import InputError, in_words, kind_of, with_article

Value = bool | int | float | str | None
"""An entry of a table as a file holds it; None for a missing value, whichever (None, NaN, NA)."""

_LARGEST = 2**19  # characters of JSON


class Column(NamedTuple):
    """Holds a column of a table."""

    name: str  # name of the feature that the column came from
    values: NDArray[Any]  # (N,) entries of the column


class _Step(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Keep(_Step):
    """Keeps every column as it is."""

    kind: Literal["keep"] = "keep"

    def apply(self, table: list[Column]) -> list[Column]:
        return table


class Scale(_Step):
    """Computes (x - subtract) / divide of each column, clipped to [low, high] where these are given."""

    kind: Literal["scale"] = "scale"
    subtract: list[float]
    divide: list[float]
    low: float | None = None
    high: float | None = None

    def apply(self, table: list[Column]) -> list[Column]:
        scaled = []
        for column, subtract, divide in zip(table, self.subtract, self.divide, strict=True):
            values = (_numbers(column) - subtract) / divide
            if self.low is not None and self.high is not None:
                values = np.clip(values, self.low, self.high)
            scaled.append(Column(column.name, values))
        return scaled


class Impute(_Step):
    """Puts `fill` in place of `missing` in each column; a column whose fill is None is left out."""

    kind: Literal["impute"] = "impute"
    missing: Value
    fill: list[Value]

    def apply(self, table: list[Column]) -> list[Column]:
        filled = []
        for column, fill in zip(table, self.fill, strict=True):
            if fill is None:
                continue
            entries = column.values.tolist()
            absent = [is_missing(entry) if self.missing is None else entry == self.missing for entry in entries]
            values = [fill if gone else entry for entry, gone in zip(entries, absent, strict=True)]
            filled.append(Column(column.name, np.array(values, object)))
        return filled


class OneHot(_Step):
    """Turns each column into one column of 0 and 1 for every category, without the one at the index `dropped`."""

    kind: Literal["one-hot"] = "one-hot"
    categories: list[list[Value]]
    dropped: list[int | None]
    unknown: Literal["refuse", "zeros"]

    def apply(self, table: list[Column]) -> list[Column]:
        made = []
        for column, categories, dropped in zip(table, self.categories, self.dropped, strict=True):
            index = _index(column, categories, refuse=self.unknown == "refuse")
            kept = [place for place in range(len(categories)) if place != dropped]
            made += [Column(column.name, (index == place).astype(np.float64)) for place in kept]
        return made


class Ordinal(_Step):
    """Maps entries to their index among the categories of their column; to `unknown` for others, `missing` for missing values."""

    kind: Literal["ordinal"] = "ordinal"
    categories: list[list[Value]]
    refuse: bool
    unknown: float | None  # None is NaN, here and below
    missing: float | None

    def apply(self, table: list[Column]) -> list[Column]:
        made = []
        for column, categories in zip(table, self.categories, strict=True):
            index = _index(column, categories, refuse=self.refuse)
            values = index.astype(np.float64)
            values[index < 0] = np.nan if self.unknown is None else self.unknown
            if None in categories:
                values[index == categories.index(None)] = np.nan if self.missing is None else self.missing
            made.append(Column(column.name, values))
        return made


class StepsInOrder(_Step):
    """Applies steps one after the other."""

    kind: Literal["chain"] = "chain"
    steps: list["Step"]

    def apply(self, table: list[Column]) -> list[Column]:
        for step in self.steps:
            table = step.apply(table)
        return table


class Part(_Step):
    """Names columns of a table, by index, and the step that they go through."""

    columns: list[Annotated[int, Field(ge=0)]]
    step: "Step"


class Parts(_Step):
    """Puts the columns that each part makes side by side."""

    kind: Literal["parts"] = "parts"
    parts: list[Part]

    def apply(self, table: list[Column]) -> list[Column]:
        return [column for part in self.parts for column in part.step.apply([table[at] for at in part.columns])]


Step = Annotated[Keep | Scale | Impute | OneHot | Ordinal | StepsInOrder | Parts, Field(discriminator="kind")]
for _model in (StepsInOrder, Part, Parts):
    _model.model_rebuild()


class Preprocess(_Step):
    """Transforms raw features as a fitted transformer does."""

    names: list[str] | None  # columns of the frame that it was fitted on; None if that had no names
    count: Annotated[int, Field(ge=1, le=_LARGEST)]  # number of those columns
    step: Step  # what it does with them

    def apply(self, x: Any, what: str = "x") -> NDArray[np.float64]:
        """Transform raw features (N, columns) to numbers (N, F). InputError if a column is missing, or holds what it must not."""
        table = self._table(x, what)
        if not table or not len(table[0].values):
            raise InputError(f"{what} holds no examples; give at least one row")
        return np.stack([_numbers(column) for column in self.step.apply(table)], 1)

    def _table(self, x: Any, what: str) -> list[Column]:
        if isinstance(x, Frame):
            names = list(x.columns)
            check_different(names, what)
            if self.names is None and len(names) != self.count:
                raise InputError(
                    f"{what} has {len(names)} columns, but preprocess was fitted on {self.count}; give those"
                )
            for name in self.names or ():
                if name not in names:
                    raise InputError(
                        f"{what} lacks the column {name!r}; give the columns {', '.join(self.names or ())[:200]}"
                    )
            return [Column(str(name), np.asarray(x[name])) for name in (names if self.names is None else self.names)]
        if isinstance(x, Tensor):
            x = x.detach().cpu().numpy()
        array = to_array(np.array(x, object) if isinstance(x, list | tuple) else x, what)
        if array.ndim != 2 or array.shape[1] != self.count:
            named = f" ({', '.join(self.names)[:200]})" if self.names is not None else ""
            raise InputError(
                f"{what} has shape {array.shape}, but preprocess was fitted on {self.count} columns{named}; give "
                f"(N, {self.count})"
            )
        names = self.names if self.names is not None else [str(at) for at in range(self.count)]
        return [Column(name, array[:, at]) for at, name in enumerate(names)]


def preprocess_from_json(content: Any, features: int, where: str) -> Preprocess:
    """Read what `Preprocess.model_dump` made of a transformer to so many features. InputError if it is damaged."""
    reason = f"it does not make the {features} features that the network takes"
    try:
        made = Preprocess.model_validate(content)
        empty = [Column(str(at), np.empty(0, object)) for at in range(made.count)]
        if len(made.step.apply(empty)) == features and len(made.names or empty) == made.count:
            return made
    except (ValueError, IndexError, RecursionError) as error:  # a step has more or fewer columns than it is for
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else reason
    raise InputError(f"{where} is damaged at 'preprocess': {reason}; export the network again")


def preprocess_from(fitted: Any, x: Any) -> Preprocess:
    """Read a fitted transformer of scikit-learn. InputError if it is not fitted, or cannot be saved as plain data."""
    if isinstance(fitted, type) or not callable(getattr(fitted, "transform", None)):
        what = f"the class {fitted.__name__}" if isinstance(fitted, type) else kind_of(fitted)
        raise InputError(
            f"preprocess is {what}; give a fitted transformer of scikit-learn, such as a ColumnTransformer"
        )
    if type(fitted).__module__.split(".")[0] == "sklearn":
        from sklearn.exceptions import NotFittedError
        from sklearn.utils.validation import check_is_fitted

        try:
            check_is_fitted(fitted)
        except NotFittedError:
            raise InputError(
                f"preprocess is {kind_of(fitted)} that is not fitted; fit it first, as preprocess.fit(x_train), on "
                "training examples alone"
            ) from None
    step, names = _read(fitted), getattr(fitted, "feature_names_in_", None)
    made = Preprocess(
        names=None if names is None else [str(name) for name in names], count=int(fitted.n_features_in_), step=step
    )
    if len(made.model_dump_json()) > _LARGEST:
        raise InputError(
            f"preprocess has categories of more than {_LARGEST:,} characters in all, which is too much to be saved with a "
            "network; encode fewer, or transform the features yourself"
        )
    ours = made.apply(x)
    with in_words("preprocess cannot transform x", "fit it on the columns of x"):
        theirs = fitted.transform(x)
    wanted = numeric_array(theirs.toarray() if hasattr(theirs, "toarray") else theirs, "what preprocess returns")
    if wanted.shape != ours.shape or not np.allclose(ours, wanted, rtol=1e-6, atol=1e-9, equal_nan=True):
        raise InputError(
            "preprocess returns other numbers than its parts as they would be saved with the network; transform the features "
            "yourself, and leave preprocess out"
        )
    return made


def _read(fitted: Any) -> Any:
    """Return the step that a fitted transformer is. InputError if it is not supported, or has an option that is not read."""
    name = type(fitted).__name__
    if fitted is None or fitted == "passthrough" or (name == "FunctionTransformer" and fitted.func is None):
        return Keep()
    try:
        match name if type(fitted).__module__.split(".")[0] == "sklearn" else "":
            case "StandardScaler":
                return _scale(fitted, fitted.mean_ if fitted.with_mean else None, fitted.scale_)
            case "RobustScaler":
                return _scale(fitted, fitted.center_, fitted.scale_)
            case "MaxAbsScaler":
                return _scale(fitted, None, fitted.scale_)
            case "MinMaxScaler":
                low, high = map(float, fitted.feature_range) if fitted.clip else (None, None)
                return _scale(fitted, -fitted.min_ / fitted.scale_, 1 / fitted.scale_, low, high)
            case "SimpleImputer":
                if fitted.add_indicator:
                    raise _unsaved(fitted, "add_indicator=True")
                fill = [_value(each, fitted) for each in fitted.statistics_]
                return Impute(missing=_value(fitted.missing_values, fitted), fill=fill)
            case "OneHotEncoder":
                categories = _categories(fitted)
                dropped = [None] * len(categories) if fitted.drop_idx_ is None else fitted.drop_idx_
                return OneHot(
                    categories=categories,
                    dropped=[None if each is None else int(each) for each in dropped],
                    unknown="refuse" if fitted.handle_unknown == "error" else "zeros",
                )
            case "OrdinalEncoder":
                unknown, missing = (
                    None if value is None or is_missing(value) else float(value)
                    for value in (fitted.unknown_value, fitted.encoded_missing_value)
                )
                refuse = fitted.handle_unknown == "error"
                return Ordinal(categories=_categories(fitted), refuse=refuse, unknown=unknown, missing=missing)
            case "ColumnTransformer":
                if fitted.transformer_weights:
                    raise _unsaved(fitted, "transformer_weights")
                chosen = [(part, _columns(fitted, given)) for _, part, given in fitted.transformers_ if part != "drop"]
                return Parts(parts=[Part(columns=each, step=_read(part)) for part, each in chosen if each])
            case "Pipeline":
                return StepsInOrder(steps=[_read(step) for _, step in fitted.steps])
    except ValidationError as error:
        raise InputError(
            f"the {name} of preprocess cannot be saved with a network: {error.errors()[0]['msg']}; transform the features "
            "yourself, and leave preprocess out"
        ) from None
    raise InputError(
        f"preprocess holds {with_article(name)}, which cannot be saved with a network; use StandardScaler, MinMaxScaler, "
        "MaxAbsScaler, RobustScaler, SimpleImputer, OneHotEncoder, OrdinalEncoder, ColumnTransformer, Pipeline, or transform "
        "the features yourself, and leave preprocess out"
    )


def _scale(own: Any, subtract: Any, divide: Any, low: float | None = None, high: float | None = None) -> Scale:
    subtract = np.zeros(own.n_features_in_) if subtract is None else np.asarray(subtract, float)
    divide = np.ones(own.n_features_in_) if divide is None else np.asarray(divide, float)
    if not np.isfinite([subtract, divide]).all():
        raise _unsaved(own, "a column without a finite number")
    return Scale(subtract=subtract.tolist(), divide=divide.tolist(), low=low, high=high)


def _columns(own: Any, chosen: Any) -> list[int]:
    """Return the indices of the columns that a part of a ColumnTransformer was given as names, indices, a slice or a mask."""
    count, names = own.n_features_in_, [str(name) for name in getattr(own, "feature_names_in_", ())]
    if isinstance(chosen, slice):
        start = names.index(chosen.start) if isinstance(chosen.start, str) else chosen.start
        stop = names.index(chosen.stop) + 1 if isinstance(chosen.stop, str) else chosen.stop  # names include the last
        return list(range(count))[start : stop : chosen.step]
    listed = np.atleast_1d(np.asarray(chosen, object)).tolist()
    if listed and all(isinstance(each, bool | np.bool_) for each in listed):
        return [at for at, each in enumerate(listed) if each]
    return [names.index(each) if isinstance(each, str) else int(each) % count for each in listed]


def _categories(own: Any) -> list[list[Value]]:
    for name in ("min_frequency", "max_categories"):
        if getattr(own, name) is not None:
            raise _unsaved(own, name)
    found = [[_value(each, own) for each in categories] for categories in own.categories_]
    if any(categories.count(None) > 1 for categories in found):
        raise _unsaved(own, "both None and NaN as categories")
    return found


def _unsaved(own: Any, option: str) -> InputError:
    return InputError(
        f"the {type(own).__name__} of preprocess has {option}, which cannot be saved with a network; leave that out, or "
        "transform the features yourself"
    )


def _value(value: Any, own: Any) -> Value:
    """Return an entry of a table as plain data. InputError if it is neither a number nor a text."""
    plain = value.item() if isinstance(value, np.generic) else value
    if is_missing(plain):
        return None
    if isinstance(plain, bool | int | float | str) and (isinstance(plain, str) or np.isfinite(plain)):
        return plain
    raise _unsaved(own, f"the category {str(value)[:40]!r}, {kind_of(value)},")


def _numbers(column: Column) -> NDArray[np.float64]:
    """Return the entries as float64, NaN for missing ones. InputError if one is not a number."""
    return numeric_array(column.values, f"column {column.name!r} of x").astype(np.float64)


def _index(column: Column, categories: Sequence[Value], *, refuse: bool) -> NDArray[np.int64]:
    """Return the index of every entry among the categories, -1 for another one, or InputError if that is to be refused."""
    places = {category: place for place, category in enumerate(categories)}
    entries = [None if is_missing(entry) else entry for entry in column.values.tolist()]
    try:
        index = np.array([places.get(entry, -1) for entry in entries], np.int64)
    except TypeError:  # an entry that has no hash, such as a list
        raise InputError(
            f"column {column.name!r} of x holds entries that are neither numbers nor text; give those"
        ) from None
    if refuse and (index < 0).any():
        entry = entries[int(np.argmax(index < 0))]
        shown = "a missing value" if entry is None else repr(str(entry)[:40])
        raise InputError(
            f"column {column.name!r} of x holds {shown}, which preprocess was not fitted on; fit its encoder with "
            "handle_unknown='ignore', or leave that example out"
        )
    return index
