"""The quality of predictions, by hand and against numpy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trl_dataeff.difficulty.quality import PredictionRecord, calibration_error, mean_absolute_error, pearson


ALL = (pearson, mean_absolute_error, calibration_error)
shares = arrays(np.float64, st.integers(2, 60).map(lambda n: (2, n)), elements=st.floats(0, 1, width=32))


def test_by_hand():
    predicted, observed = np.array([0.05, 0.1, 0.19, 1.0]), np.array([0.0, 0.0, 0.5, 0.9])
    assert mean_absolute_error(predicted, observed) == pytest.approx((0.05 + 0.1 + 0.31 + 0.1) / 4)
    # bins [0, .1), [.1, .2), [.9, 1]: |.05 - 0|, |.145 - .25| of two, |1 - .9|
    assert calibration_error(predicted, observed) == pytest.approx((0.05 + 2 * 0.105 + 0.1) / 4)
    assert pearson(np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.4, 0.5])) == pytest.approx(0.9819805)


@given(shares)
def test_agrees_with_numpy_and_keeps_its_bounds(pair):
    predicted, observed = pair
    assert mean_absolute_error(predicted, observed) == pytest.approx(np.mean(np.abs(predicted - observed)))
    assert calibration_error(predicted, observed) <= mean_absolute_error(predicted, observed) + 1e-12
    if predicted.std() > 1e-6 and observed.std() > 1e-6:
        assert pearson(predicted, observed) == pytest.approx(np.corrcoef(predicted, observed)[0, 1], abs=1e-6)
        assert pearson(predicted, predicted) == pytest.approx(1)
        assert pearson(predicted, -predicted) == pytest.approx(-1)


@pytest.mark.parametrize("function", ALL)
def test_nan_pairs_are_left_out(function):
    rng = np.random.default_rng(0)
    predicted, observed = rng.random(30), rng.random(30)
    with_nan, observed_nan = predicted.copy(), observed.copy()
    with_nan[:5], observed_nan[3:9] = math.nan, math.nan
    assert function(with_nan, observed_nan) == function(predicted[9:], observed[9:])


@pytest.mark.parametrize("function", ALL)
def test_undefined_is_nan(function):
    assert math.isnan(function(np.array([]), np.array([])))
    assert math.isnan(function(np.array([math.nan, 0.5]), np.array([0.5, math.nan])))
    with pytest.raises(ValueError, match="have to be of one shape"):
        function(np.zeros(3), np.zeros(2))


def test_correlation_with_what_does_not_vary_is_nan():
    assert math.isnan(pearson(np.array([0.1, 0.1, 0.1]), np.array([0.2, 0.4, 0.5])))
    assert math.isnan(pearson(np.array([0.2, 0.4, 0.5]), np.array([0.0, 0.0, 0.0])))
    assert math.isnan(pearson(np.array([0.3]), np.array([0.4])))


def test_the_record_keeps_the_newest_of_each_kind():
    record, rng = PredictionRecord(capacity=4), np.random.default_rng(0)
    predicted, observed = rng.random(30).astype(np.float32), rng.random(30).astype(np.float32)
    predicted[7] = np.nan
    uniform, effective = np.arange(30) % 5 == 0, rng.random(30) < 0.5
    for start in range(0, 30, 6):
        piece = slice(start, start + 6)
        record.add(predicted[piece], observed[piece], uniform[piece], effective[piece])
    newest = [i for i in range(30) if uniform[i]][-4:]
    chosen = [i for i in range(30) if not uniform[i] and i != 7][-4:]
    metrics = record.metrics()
    assert metrics["predictor/pearson_explored"] == pytest.approx(pearson(predicted[newest], observed[newest]))
    assert metrics["predictor/pearson_selected"] == pytest.approx(pearson(predicted[chosen], observed[chosen]))
    both = sorted(newest + chosen)
    assert metrics["predictor/mae"] == pytest.approx(np.abs(predicted[both] - observed[both]).mean())
    assert metrics["effective_explored"] == pytest.approx(effective[newest].mean())
    assert metrics["effective_selected"] == pytest.approx(effective[chosen].mean())
    assert PredictionRecord().metrics() == {}
