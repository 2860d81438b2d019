"""Quality of predicted success rates. Pairs in which either value is NaN are left out."""

from __future__ import annotations

import numpy as np


BINS = 10


def pearson(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Pearson correlation in [-1, 1]; NaN with fewer than two pairs, or if one side does not vary."""
    x, y = _pairs(predicted, observed)
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def mean_absolute_error(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Mean of `|predicted - observed|`; NaN without a pair."""
    x, y = _pairs(predicted, observed)
    return float(np.abs(x - y).mean()) if len(x) else float("nan")


def calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
    """
    Expected calibration error in [0, 1]; NaN without a pair. Predictions fall into 10 bins of equal width. The distance
    between a bin's mean prediction and its mean observation is averaged over bins, weighted by their predictions.
    """
    x, y = _pairs(predicted, observed)
    if not len(x):
        return float("nan")
    bins = np.clip((x * BINS).astype(np.int64), 0, BINS - 1)
    return float(np.abs(np.bincount(bins, x - y, BINS)).sum() / len(x))


class PredictionRecord:
    """
    The newest predictions, made before the rollouts, with the success rates then observed.

    Args:
        capacity (`int`, *optional*, defaults to `256`): groups that are kept of those drawn uniformly, and as many of
            those selected.
    """

    def __init__(self, capacity: int = 256):
        self.capacity = capacity
        # Predicted, observed, whether drawn uniformly, whether effective
        self._rows = np.empty((0, 4), dtype=np.float32)

    def add(self, predicted: np.ndarray, observed: np.ndarray, uniform: np.ndarray, effective: np.ndarray) -> None:
        """
        Enter groups; those with NaN are ignored.

        Args:
            predicted (`np.ndarray` of shape `(n,)`): predicted success rates.
            observed (`np.ndarray` of shape `(n,)`): observed success rates.
            uniform (`np.ndarray` of shape `(n,)`): bool, whether the prompt was drawn uniformly.
            effective (`np.ndarray` of shape `(n,)`): bool, whether the group carries a gradient.
        """
        rows = np.stack([predicted, observed, uniform, effective], axis=1).astype(np.float32)
        rows = np.concatenate([self._rows, rows[~np.isnan(rows).any(axis=1)]])
        newer_of_its_kind = np.where(rows[:, 2] == 1, *(np.cumsum(rows[::-1, 2] == kind)[::-1] for kind in (1, 0)))
        self._rows = rows[newer_of_its_kind <= self.capacity]

    def rescale(self, scale: float, offset: float) -> None:
        """Map all rates to `scale * rate + offset`: the reward's range has widened."""
        self._rows[:, :2] = scale * self._rows[:, :2] + offset

    def metrics(self) -> dict[str, float]:
        """Metrics by name, such as `predictor/pearson`; those that are not defined yet are left out."""
        predicted, observed, uniform, effective = self._rows.T
        chosen = uniform == 0
        values = {
            "predictor/pearson": pearson(predicted, observed),
            "predictor/pearson_explored": pearson(predicted[~chosen], observed[~chosen]),
            "predictor/pearson_selected": pearson(predicted[chosen], observed[chosen]),
            "predictor/mae": mean_absolute_error(predicted, observed),
            "predictor/calibration_error": calibration_error(predicted, observed),
            "effective_explored": _mean(effective[~chosen]),
            "effective_selected": _mean(effective[chosen]),
        }
        return {name: value for name, value in values.items() if not np.isnan(value)}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Arrays for `load_state_dict`."""
        return {"rows": self._rows.copy()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""
        self._rows = state["rows"].astype(np.float32)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _pairs(predicted: np.ndarray, observed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(predicted, dtype=np.float64), np.asarray(observed, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"Predictions {x.shape} and observations {y.shape} have to be of one shape, (n,).")
    known = ~(np.isnan(x) | np.isnan(y))
    return x[known], y[known]
