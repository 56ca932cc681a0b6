"""Grow on a data frame with text and missing values, and predict raw frames: a transformer is saved with the network.

python examples/own_frame.py  # needs pandas
"""

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import esper

rng = np.random.default_rng(0)
people = pd.DataFrame(
    {"age": rng.integers(18, 80, 800).astype(float), "city": rng.choice(["Rome", "Oslo", "Lima"], 800)}
)
bought = np.where((people.age > 50) == (people.city == "Oslo"), "yes", "no")
people.loc[rng.choice(800, 40), "age"] = np.nan
people.loc[rng.choice(800, 40), "city"] = None

splits = {"train": range(500), "probe": range(500, 600), "validation": range(600, 700), "test": range(700, 800)}
preprocess = make_column_transformer(
    (make_pipeline(SimpleImputer(), StandardScaler()), ["age"]),
    (OneHotEncoder(handle_unknown="ignore"), ["city"]),
).fit(people.iloc[splits["train"]])  # on training rows alone, so that the test stays one

features = preprocess.transform(people[:1]).shape[1]
host = esper.mlp(inputs=features, width=4, classes=2, blocks=1)
task = esper.task("shop", people, bought, host=host, splits=splits, preprocess=preprocess)
summary = esper.grow(task, {"envs": 2, "steps": 16, "baselines": ["twin"]}, run="runs/shop", overwrite=True)
print("grown", summary["grown"], "test accuracy", [round(value, 2) for value in summary["test_accuracy"]["grown"]])

network = esper.load("runs/shop")
new = pd.DataFrame({"city": ["Oslo", "Rome", None], "age": [70, None, 30]})  # raw rows, columns by name
print(new.assign(bought=network.predict(new)))
