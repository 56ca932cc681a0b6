"""Grow a population of networks on arrays of your own, compare it with static networks, and predict.

python examples/own_data.py
"""

from sklearn.datasets import load_digits

import esper

data = load_digits()
labels = [f"a {digit}" for digit in data.target]  # labels may be anything: predictions come back as they were given

task = esper.task("digits", data.data, labels, host=esper.mlp(inputs=64, width=6, classes=10), standardize=True)
summary = esper.grow(
    task, {"envs": 2, "steps": 12, "baselines": ["twin", "plain"]}, run="runs/own-digits", overwrite=True
)
esper.show(summary)  # the closing table of the command: what growth brought beside what does not grow

network = esper.load("runs/own-digits")  # of the best environment, by the validation split
print(network.predict(data.data[:3]).tolist(), "should be", labels[:3])
