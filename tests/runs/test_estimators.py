"""Check that growing estimators find a size, say which and why, and keep to the rules of scikit-learn."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import esper
from esper.leyline.messages import InputError
from esper.runs import estimators
from thinning import crossed


@pytest.fixture(scope="module")
def digits():
    return train_test_split(*load_digits(return_X_y=True), random_state=0)


@pytest.fixture(scope="module")
def grown(digits):
    x, _, y, _ = digits
    return esper.GrowingClassifier(units=4, random_state=0).fit(x, y)


def test_a_classifier_grows_from_four_units_to_what_the_digits_need_and_says_so(digits, grown):
    assert grown.score(digits[1], digits[3]) > 0.95
    sizes = list(dict.fromkeys(look.units for look in grown.looks_))
    assert sizes[:3] == [4, 16, 64]
    assert grown.units_ in sizes
    assert grown.network_[2].in_features == grown.network_[2].out_features == grown.units_
    first = " -> ".join(f"{size:,}" for size in sizes)
    assert grown.growth_.startswith(f"2 hidden layers of {first} units; the network of step ")
    assert f"has {grown.units_:,}: " in grown.growth_
    assert (
        f"ended after {grown.n_iter_:,} steps, because the loss on the 202 examples that are held back" in grown.growth_
    )
    assert [look.steps for look in grown.looks_] == list(range(50, grown.n_iter_ + 1, 50))


def test_a_growing_network_is_far_above_one_that_may_not_grow(digits, grown):
    x, x_test, y, y_test = digits
    small = esper.GrowingClassifier(units=4, most_units=4, random_state=0).fit(x, y)
    assert small.units_ == 4
    assert "more would exceed most_units=4" in small.growth_
    assert grown.score(x_test, y_test) > small.score(x_test, y_test)


def test_probabilities_are_those_of_the_network_and_predictions_the_largest(digits, grown):
    x = digits[1][:9]
    with torch.no_grad():
        inputs = torch.tensor(grown.scaler_.transform(x), dtype=torch.float32)
        wanted = grown.network_(inputs).double().softmax(1)
    assert np.allclose(grown.predict_proba(x), wanted, atol=1e-6)
    assert np.array_equal(grown.predict(x), grown.classes_[grown.predict_proba(x).argmax(1)])


def test_a_fit_is_that_of_its_random_state_and_leaves_the_random_numbers_of_torch_alone(digits, grown):
    x, x_test, y, _ = digits
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = clone(grown).fit(x, y)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(again.predict_proba(x_test), grown.predict_proba(x_test))
    loaded = pickle.loads(pickle.dumps(grown))
    assert np.array_equal(loaded.predict_proba(x_test), grown.predict_proba(x_test))


def test_a_regressor_keeps_the_scale_and_the_shape_of_its_targets():
    x, y = load_diabetes(return_X_y=True)
    model = esper.GrowingRegressor(random_state=0, most_steps=400)
    assert cross_val_score(model, x, y, cv=2).mean() > 0.3
    both = model.fit(x, np.stack([y, -2 * y], 1)).predict(x)
    assert both.shape == (len(x), 2)
    assert np.corrcoef(both[:, 0], both[:, 1])[0, 1] < -0.9
    assert model.fit(x, y).predict(x).shape == (len(x),)


def test_it_is_a_step_of_a_pipeline():
    x, y = load_digits(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), esper.GrowingClassifier(most_steps=100, random_state=0)).fit(x, y)
    assert pipeline[-1].n_iter_ == 100
    assert pipeline[-1].growth_.endswith("ended after the most steps that were allowed, 100")


def test_an_anytime_plan_passes_through_whole_factors_of_the_units_and_is_that_of_its_random_state(digits):
    x, x_test, y, y_test = digits
    settings = {"units": 2, "factor": 2, "most_units": 4, "rate": 6e-3, "patience": 3}
    model = esper.GrowingClassifier(**settings, plan="anytime", random_state=0)
    pipeline = make_pipeline(StandardScaler(), model).fit(x, y)
    model = pipeline[-1]
    assert list(dict.fromkeys(look.units for look in model.looks_)) == [2, 4]
    assert model.growth_.startswith("2 hidden layers of 2 -> 4 units; the network of step ")
    assert model.units_ == model.network_[2].in_features
    inputs = pipeline[0].transform(x)
    small = clone(model).set_params(most_units=2, most_steps=model.n_iter_).fit(inputs, y)
    assert small.units_ == 2
    assert "more would exceed most_units=2" in small.growth_
    assert pipeline.score(x_test, y_test) > small.score(pipeline[0].transform(x_test), y_test)
    again = clone(model).fit(inputs, y)
    assert np.array_equal(again.predict_proba(x_test), model.predict_proba(x_test))
    assert again.growth_ == model.growth_


def test_an_anytime_plan_says_that_size_does_not_matter_where_the_loss_stops_falling_before_the_first_growth():
    x, y = load_diabetes(return_X_y=True)
    model = esper.GrowingRegressor(plan="anytime", random_state=0)
    assert cross_val_score(model, x, y, cv=2).mean() > 0.3
    model.fit(x, y)
    assert {look.units for look in model.looks_} == {16}
    assert (
        "has 16: no larger size was tried, as the loss on examples that are held back stopped falling" in model.growth_
    )
    assert ", and it learns by heart, as the loss is " in model.growth_


@pytest.mark.parametrize(("plan", "knee"), crossed([None, "anytime"], [(16, 16), (64, 64), (3, 4)]))
def test_a_network_that_starts_at_the_knee_has_the_units_up_to_which_a_step_costs_the_same(
    digits, monkeypatch, plan, knee
):
    free, first = knee
    timed = []

    def shortest(steps, device):
        for step in steps:
            step()
        timed.append([len(each.args[0][0].weight) for each in steps])
        return [1e-3 * max(units / free, 1) for units in timed[-1]]

    monkeypatch.setattr(estimators, "shortest", shortest)
    x, _, y, _ = digits
    settings = {"units": 4, "most_units": 64, "factor": 4, "plan": plan, "most_steps": 100, "random_state": 0}
    model = esper.GrowingClassifier(**settings, start="knee").fit(x, y)
    slower = [4, min(4 * first, 64)]  # timed again, as other work may have come between
    assert timed == [[4, 4**power] for power in (2, 3) if 4**power <= first] + [slower, slower] * (first < 64)
    assert model.looks_[0].units == first
    assert (
        f"so training starts with {first}, the largest of these within a fifth of the smallest's seconds"
        in model.growth_
    )
    # Timing leaves nothing behind: it is the fit that starts with so many units.
    same = esper.GrowingClassifier(**{**settings, "units": first}).fit(x, y)
    assert model.looks_ == same.looks_
    assert np.array_equal(model.predict_proba(x), same.predict_proba(x))


def test_where_no_larger_size_can_be_the_sentence_says_that_none_was_timed(digits):
    x, _, y, _ = digits
    model = esper.GrowingClassifier(units=4, most_units=15, start="knee", most_steps=50, random_state=0).fit(x, y)
    assert model.growth_.endswith("; training starts with 4 units, as no larger size can be")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"start": "small"}, "start is 'small'; give None, to start with `units`, or 'knee'"),
        ({"layers": 0}, "layers is 0; give a whole number from 1 on"),
        ({"units": 2.5}, "units is 2.5; give a whole number"),
        ({"patience": True}, "patience is True; give a whole number"),
        ({"factor": 1}, "factor is 1; give a number above 1"),
        ({"held_out": 1.0}, "held_out is 1.0; give a number above 0 and below 1"),
        ({"rate": "fast"}, "rate is 'fast'; give a number above 0"),
        ({"most_units": 8}, "most_units is 8, below units, 16; give at least as many"),
        ({"plan": "slow"}, "plan is 'slow'; give None or 'anytime'"),
        ({"plan": "anytime", "factor": 1.5}, "factor is 1.5, and plan='anytime' takes whole factors alone"),
        ({"plan": "anytime", "rate": 1e30}, "give a smaller rate than 1e+30"),
        ({"rate": 1e30}, "give a smaller rate than 1e+30"),
    ],
)
def test_a_parameter_that_cannot_be_is_named(settings, sentence):
    x, y = load_digits(return_X_y=True)
    with pytest.raises(InputError) as caught:
        esper.GrowingClassifier(**settings).fit(x, y)
    assert sentence in str(caught.value)


def test_a_sentence_about_a_size_is_true(digits):
    x, _, y, _ = digits
    for steps, path, why in ((50, "16", "the training ended then"), (100, "16 -> 64", "the training ended then")):
        model = esper.GrowingClassifier(most_steps=steps, random_state=0).fit(x, y)
        assert model.growth_.startswith(f"2 hidden layers of {path} units; the network of step {steps} has ")
        assert f": {why}; ended after the most steps that were allowed, {steps}" in model.growth_
        assert model.units_ == int(path.split()[-1])


def test_units_that_do_not_fit_into_memory_are_refused_before_any_is_allocated(digits):
    x, _, y, _ = digits
    wanted = r"with units=10,000,000 in 2 layers takes at least 1,862,\d+\.\d GiB of memory, and .* free on cpu; give fewer units"
    for estimator in (esper.GrowingClassifier, esper.GrowingRegressor):
        with pytest.raises(InputError, match=wanted):
            estimator(units=10**7, most_units=10**7).fit(x, y)


def test_few_rows_constant_columns_and_values_that_are_too_large():
    x, y = load_diabetes(return_X_y=True)
    for rows in (2, 3, 5):
        assert esper.GrowingRegressor(most_steps=50).fit(x[:rows], y[:rows]).predict(x).shape == y.shape
    x[:, 2] = 0.1
    model = esper.GrowingRegressor(most_steps=100, random_state=0).fit(x, y)
    other = x.copy()
    other[:, 2] += 1e-9
    assert np.allclose(model.predict(other), model.predict(x), rtol=1e-4)
    other[3, 2] = 1e300
    with pytest.raises(InputError, match="row 3 of X has a value that float32 cannot hold"):
        model.predict(other)
    with torch.no_grad():
        assert esper.GrowingRegressor(most_steps=50).fit(x, y).n_iter_ == 50


UNEQUAL = {"check_methods_subset_invariance": "a sum of float32 depends on how many rows are summed beside it, by 1e-7"}
"""Rules of scikit-learn that cannot hold, with the reason."""


@pytest.mark.campaign
@parametrize_with_checks(
    [esper.GrowingClassifier(most_steps=200, plan="anytime"), esper.GrowingRegressor(most_steps=200)],
    expected_failed_checks=lambda estimator: UNEQUAL,
)
def test_scikit_learn_accepts_them(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [esper.GrowingClassifier(most_steps=200), esper.GrowingRegressor(most_steps=200, plan="anytime")],
    expected_failed_checks=lambda estimator: UNEQUAL,
)
def test_scikit_learn_accepts_them_with_the_other_plan(estimator, check):
    check(estimator)
