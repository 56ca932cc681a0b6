"""Train a classifier that starts with four units a layer and grows, beside fixed sizes and a search over them.

python examples/start_small.py
"""

import time

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import esper

x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)


def row(name, **settings):
    """Train a network, and print what it reached."""
    model = esper.GrowingClassifier(random_state=0, **settings)
    begun = time.process_time()
    model.fit(x, y)
    seconds, accuracy = time.process_time() - begun, model.score(x_test, y_test)
    print(f"{name:<28}{model.units_:>6}{accuracy:>10.3f}{seconds:>9.1f}")
    return model, seconds, accuracy


esper.GrowingClassifier(most_steps=100).fit(x, y)  # the first steps of a process are slower
print(f"{'network':<28}{'units':>6}{'accuracy':>10}{'seconds':>9}")
grown, _, _ = row("starts with 4, and grows", units=4)
fixed = [row(f"{units} from the start", units=units, most_units=units) for units in (4, 16, 64, 256)]
best, _, accuracy = min(fixed, key=lambda each: min(look.loss for look in each[0].looks_))
search = sum(seconds for _, seconds, _ in fixed)
print(f"{'the best of these four':<28}{best.units_:>6}{accuracy:>10.3f}{search:>9.1f}")
print(f"\n{grown.growth_}")
