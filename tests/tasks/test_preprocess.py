"""Test fitted transformers of scikit-learn in tasks: applied to raw frames, and saved with networks as plain data."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import ColumnTransformer, make_column_selector, make_column_transformer
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
)

import esper
from esper.leyline.data.preprocess import Preprocess, preprocess_from, preprocess_from_json
from esper.leyline.messages import InputError

N = 120
_RNG = np.random.default_rng(0)
FRAME = pd.DataFrame(
    {
        "age": np.where(_RNG.random(N) < 0.2, np.nan, _RNG.normal(40, 9, N)),
        "city": _RNG.choice(["Rome", "Oslo", "Bern"], N),
        "rooms": _RNG.integers(1, 5, N),
        "pool": _RNG.random(N) < 0.5,
        "heat": pd.Series(_RNG.choice(["gas", "oil", None], N), dtype=object).replace({None: np.nan}),
    }
)
Y = (FRAME["rooms"] + (FRAME["city"] == "Rome") > 3).map({True: "dear", False: "cheap"})
NUMBERS = ["age", "rooms"]
WHOLE = make_column_transformer(
    (make_pipeline(SimpleImputer(), StandardScaler()), NUMBERS),
    (OneHotEncoder(handle_unknown="ignore"), ["city", "heat"]),
    remainder="passthrough",
)


def most(strategy="most_frequent"):
    return SimpleImputer(strategy=strategy)


@pytest.mark.parametrize(
    ("transformer", "columns"),
    [
        (WHOLE, list(FRAME)),
        (StandardScaler(), NUMBERS),
        (StandardScaler(with_mean=False), NUMBERS),
        (StandardScaler(with_std=False), NUMBERS),
        (MinMaxScaler((-1, 2), clip=True), NUMBERS),
        (MaxAbsScaler(), ["rooms"]),
        (RobustScaler(with_centering=False), NUMBERS),
        (RobustScaler(), NUMBERS),
        (SimpleImputer(strategy="median"), NUMBERS),
        (SimpleImputer(strategy="constant", fill_value=-1), NUMBERS),
        (SimpleImputer(missing_values=2, strategy="mean"), ["rooms"]),
        (make_pipeline(most(), OneHotEncoder(drop="first")), ["city", "heat"]),
        (OneHotEncoder(drop="if_binary", sparse_output=False), ["city", "pool", "rooms"]),
        (OrdinalEncoder(), ["city", "pool"]),
        (OrdinalEncoder(encoded_missing_value=-5), ["heat"]),
        (OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1), ["city"]),
        (
            ColumnTransformer([("a", "passthrough", [2]), ("b", "drop", [0]), ("c", OrdinalEncoder(), [-1])]),
            list(FRAME),
        ),
        (
            ColumnTransformer([("a", StandardScaler(), slice("age", "age")), ("b", OneHotEncoder(), ["city"])]),
            list(FRAME),
        ),
        (ColumnTransformer([("a", most("mean"), make_column_selector(dtype_include="number"))]), list(FRAME)),
        (ColumnTransformer([("a", "passthrough", np.array([False, False, True, True, False]))]), list(FRAME)),
    ],
    ids=lambda value: "" if isinstance(value, list) else " ".join(str(value).split())[:60],
)
def test_plain_data_make_what_the_transformer_makes_also_behind_a_file(transformer, columns):
    frame = FRAME[columns]
    fitted = transformer.fit(frame.iloc[:80])
    wanted = fitted.transform(frame)
    wanted = np.asarray(wanted.toarray() if hasattr(wanted, "toarray") else wanted, np.float64)
    made = preprocess_from(fitted, frame)
    content = json.loads(json.dumps(made.model_dump(mode="json"), allow_nan=False))
    again = preprocess_from_json(content, wanted.shape[1], "topology.json")
    assert again == made
    np.testing.assert_allclose(again.apply(frame), wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(again.apply(frame[columns[::-1]].assign(other="x")), made.apply(frame))
    np.testing.assert_array_equal(again.apply(frame.to_numpy(object)), made.apply(frame))
    np.testing.assert_array_equal(again.apply(frame.to_numpy(object).tolist()[:3]), made.apply(frame.iloc[:3]))


def test_a_network_takes_raw_frames_before_and_after_it_is_saved(tmp_path):
    fitted = WHOLE.fit(FRAME.iloc[:80])
    host = esper.mlp(inputs=fitted.transform(FRAME).shape[1], width=8, classes=2, blocks=1)
    task = esper.task("homes", FRAME, Y, host=host, preprocess=fitted)
    numbers = esper.task("homes", fitted.transform(FRAME), Y, host=host)
    assert torch.equal(task.train.x, numbers.train.x)
    settings = {"envs": 1, "steps": 3, "baselines": [], "data": {"batches_per_step": 1}}
    esper.grow(task, settings, run=tmp_path / "r", progress=False)
    network = esper.load(tmp_path / "r")
    topology = json.loads((tmp_path / "r/models/best/topology.json").read_text())
    assert topology["format"] == 4
    few = FRAME.iloc[:7]
    expected = np.array(network.classes)[network(torch.tensor(fitted.transform(few)).float()).argmax(1)]
    assert network.predict(few[list(FRAME)[::-1]]).tolist() == expected.tolist()
    unseen = pd.DataFrame({"age": [None], "city": ["Paris"], "rooms": [3], "pool": [True], "heat": [None]})
    assert network.predict(unseen)[0] in ("dear", "cheap")
    with pytest.raises(InputError, match="x lacks the column 'heat'; give the columns age, city, rooms, pool, heat"):
        network.predict(few.drop(columns="heat"))
    with pytest.raises(InputError, match=r"x has shape \(1, 2\), but preprocess was fitted on 5 columns \(age, city"):
        network.predict([[1, 2]])
    with pytest.raises(InputError, match="column 'age' of x holds 'old', a str"):
        network.predict(few.astype({"age": object}).assign(age="old"))


def test_the_four_splits_are_transformed_each():
    fitted = WHOLE.fit(FRAME.iloc[:60])
    host = esper.mlp(inputs=fitted.transform(FRAME).shape[1], width=8, classes=2, blocks=1)
    cuts = {"train": slice(60), "probe": slice(60, 80), "validation": slice(80, 100), "test": slice(100, 120)}
    splits = {name: (FRAME.iloc[cut], Y.iloc[cut]) for name, cut in cuts.items()}
    task = esper.task("homes", splits=splits, host=host, preprocess=fitted)
    np.testing.assert_allclose(task.test.x, fitted.transform(FRAME.iloc[100:]), rtol=1e-6)


def test_a_category_that_was_not_fitted_is_named_where_the_encoder_refuses_it():
    made = preprocess_from(OneHotEncoder().fit(FRAME[["city"]]), FRAME[["city"]])
    with pytest.raises(
        InputError, match="column 'city' of x holds 'Paris', which preprocess was not fitted on; fit its"
    ):
        made.apply(pd.DataFrame({"city": ["Rome", "Paris"]}))


class Own:
    def transform(self, x):
        return x


@pytest.mark.parametrize(
    ("preprocess", "said"),
    [
        (
            StandardScaler(),
            "preprocess is a StandardScaler that is not fitted; fit it first, as preprocess.fit(x_train)",
        ),
        (make_pipeline(SimpleImputer(), StandardScaler()), "preprocess is a Pipeline that is not fitted"),
        (StandardScaler, "preprocess is the class StandardScaler; give a fitted transformer"),
        ("scale", "preprocess is a str; give a fitted transformer"),
        (Own(), "preprocess holds an Own, which cannot be saved with a network; use StandardScaler, MinMaxScaler"),
        (KNNImputer().fit(FRAME[NUMBERS]), "preprocess holds a KNNImputer, which cannot be saved with a network"),
        (
            make_pipeline(SimpleImputer(), PolynomialFeatures()).fit(FRAME[NUMBERS]),
            "preprocess holds a PolynomialFeatures",
        ),
        (
            SimpleImputer(add_indicator=True).fit(FRAME[NUMBERS]),
            "the SimpleImputer of preprocess has add_indicator=True",
        ),
        (
            OneHotEncoder(min_frequency=9).fit(FRAME[["rooms"]]),
            "the OneHotEncoder of preprocess has min_frequency, which",
        ),
        (StandardScaler().fit(FRAME[["rooms"]]), "has 2 columns"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_transformer_that_cannot_be_saved_is_one_sentence(preprocess, said):
    frame = FRAME[NUMBERS].to_numpy() if said == "has 2 columns" else FRAME[NUMBERS]
    with pytest.raises(InputError) as caught:
        esper.task("homes", frame, Y, host=esper.mlp(inputs=2, width=8, classes=2, blocks=1), preprocess=preprocess)
    if said == "has 2 columns":
        said = "x has shape (120, 2), but preprocess was fitted on 1 columns (rooms); give (N, 1)"
    assert said in str(caught.value)


@pytest.mark.parametrize("x", [{"a": np.ones((N, 2))}, (np.ones((N, 2)), np.ones((N, 2))), None])
def test_preprocess_takes_one_frame_or_array(x):
    with pytest.raises(InputError, match="preprocess was given, but the examples are"):
        esper.task("homes", x, Y, host=esper.mlp(inputs=2, width=8, classes=2, blocks=1), preprocess=Own())


@pytest.mark.parametrize(
    "damage",
    [
        {"step": {"kind": "scale", "subtract": [0.0], "divide": [1.0], "low": None, "high": None}},
        {"step": {"kind": "pickle"}},
        {"step": {"kind": "parts", "parts": [{"columns": [9], "step": {"kind": "keep"}}]}},
        {"names": ["age"]},
        {"count": 0},
        {"more": 1},
    ],
    ids=str,
)
def test_a_damaged_preprocess_is_named(damage):
    made = preprocess_from(StandardScaler().fit(FRAME[NUMBERS]), FRAME[NUMBERS])
    with pytest.raises(InputError, match=r"^topology\.json is damaged at 'preprocess': .*; export the network again"):
        preprocess_from_json({**made.model_dump(mode="json"), **damage}, 2, "topology.json")


def test_the_messages_for_text_and_missing_values_name_the_transformer_that_mends_them():
    host = esper.mlp(inputs=2, width=8, classes=2, blocks=1)
    with pytest.raises(InputError) as caught:
        esper.task("homes", FRAME[["city", "rooms"]], Y, host=host)
    mend = str(caught.value).partition("preprocess=")[2].partition(" of scikit-learn")[0]
    fitted = eval(mend.replace("the training rows of x", "x"), {"x": FRAME[["city", "rooms"]], **globals()})
    assert isinstance(preprocess_from(fitted, FRAME[["city", "rooms"]]), Preprocess)
    with pytest.raises(
        InputError, match=r"with preprocess=SimpleImputer\(\)\.fit\(the training rows of x\) of scikit-learn"
    ):
        esper.task("homes", FRAME[NUMBERS], Y, host=host)
    esper.task("homes", FRAME[NUMBERS], Y, host=host, preprocess=SimpleImputer().fit(FRAME[NUMBERS]))
