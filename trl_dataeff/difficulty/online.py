"""`RollingDifficulty`: success rates of all prompts, from a predictor that is fitted to the groups of the run itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trl_dataeff.difficulty.predictor import DifficultyPredictor, Embeddings, Groups, check_width


class RollingDifficulty:
    """
    Success rates of all prompts, predicted from the newest groups of a run. A group counts `0.5 ** (age / half_life)`, its age in
    generation batches. The predictor is updated before each prediction, and refitted every `fit_every` generation batches.

    Args:
        embeddings (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): of all prompts, by prompt id; read some rows at a time.
        predictor ([`DifficultyPredictor`]): changed in place. A logistic predictor that was fitted before is
            regularised towards its coefficients.
        capacity (`int`, *optional*): groups that are kept, the newest ones. Defaults to `predictor.capacity(1)`; in a
            run, give `predictor.capacity(batch_groups)`.
        half_life (`float`, *optional*, defaults to `20.0`): generation batches after which a group counts half.
        fit_every (`int`, *optional*, defaults to `16`): generation batches between two calls of `predictor.refit`; 0
            for none.
        seed (`int`, *optional*, defaults to `0`): seed of those fits.

    Attributes:
        ids, rates, batches (`np.ndarray` of shape `(n,)`): prompt, success rate and generation batch of each group that is
            kept, oldest first; int64, float32 and int64.

    Raises:
        PredictorError: the predictor was fitted to embeddings of another width.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        predictor: DifficultyPredictor,
        *,
        capacity: int | None = None,
        half_life: float = 20.0,
        fit_every: int = 16,
        seed: int = 0,
    ):
        check_width(embeddings, predictor.embedding_width)
        self.embeddings, self.predictor = embeddings, predictor
        self.capacity = predictor.capacity(1) if capacity is None else capacity
        self.half_life, self.fit_every, self.seed = half_life, fit_every, seed
        self.ids = np.empty(0, dtype=np.int64)
        self.rates = np.empty(0, dtype=np.float32)
        self.batches = np.empty(0, dtype=np.int64)
        self._fitted_at = -1
        self._projected: torch.Tensor | None = None
        predictor.start(embeddings)

    def observe(self, prompt_ids: np.ndarray, success_rates: np.ndarray, batch: int) -> None:
        """
        Enter the groups of generation batch number `batch`, not below that of earlier groups: prompts `(n,)`, in the order in
        which they were rolled out, and success rates `(n,)` in [0, 1]; groups with NaN are ignored. A prompt's newest group
        replaces its older one.
        """
        ids, rates = _known(prompt_ids, success_rates)
        ids, rates = np.concatenate([self.ids, ids]), np.concatenate([self.rates, rates])
        batches = np.concatenate([self.batches, np.full(len(ids) - len(self.batches), batch, dtype=np.int64)])
        kept = newest(ids)[-self.capacity :]
        self.ids, self.rates, self.batches = ids[kept], rates[kept], batches[kept]

    def refresh(self, batch: int, half_life: float | None = None) -> np.ndarray:
        """
        Success rates of all prompts in generation batch `batch`, float32 `(N,)` in [0, 1]. Without a group: 0.5, or what the
        predictor predicts if it was fitted before the run. `half_life` takes the place of that of the groups' weights.
        """
        self._refit(batch)
        return self._predict(self._weighted(batch, half_life or self.half_life))

    def predict_with_references(self, prompt_ids: np.ndarray, success_rates: np.ndarray, batch: int) -> np.ndarray:
        """
        Predict all prompts in generation batch `batch` from reference rollouts alone, `(K,)`, with equal weights (the paper's
        method). Returns what [`refresh`] does. The predictor is refitted when due, to the groups entered by `observe`.
        """
        self._refit(batch)
        ids, rates = _known(prompt_ids, success_rates)
        kept = newest(ids)
        return self._predict(Groups(ids[kept], rates[kept], np.ones(len(kept), dtype=np.float32)))

    def rescale(self, scale: float, offset: float) -> None:
        """Map the groups' rates to `scale * rate + offset`, in [0, 1]: the range of rewards has changed."""
        self.rates = np.clip(scale * self.rates + offset, 0, 1).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """What restores the groups and what the predictor has been fitted to."""
        return {
            "ids": self.ids.copy(),
            "rates": self.rates.copy(),
            "batches": self.batches.copy(),
            "fitted_at": self._fitted_at,
            "predictor": {name: value.detach().numpy().copy() for name, value in self.predictor.tensors().items()},
        }

    def load_state_dict(self, state: dict[str, Any], *, predictor: bool = True) -> None:
        """
        Restore what `state_dict` returned; without `predictor` only the groups, to which it is fitted again (other embeddings).
        Raises a `KeyError` or `RuntimeError` if the state is that of another predictor.
        """
        if predictor:
            tensors = {name: torch.from_numpy(value.copy()) for name, value in state["predictor"].items()}
            self.predictor.load_tensors(tensors)
        self.ids, self.rates, self.batches = state["ids"].copy(), state["rates"].copy(), state["batches"].copy()
        self._fitted_at = state["fitted_at"] if predictor else -1
        self._projected = None

    def _weighted(self, batch: int, half_life: float) -> Groups:
        weight = np.power(0.5, (batch - self.batches) / half_life).astype(np.float32)
        return Groups(self.ids, self.rates, weight)

    def _refit(self, batch: int) -> None:
        """Every `fit_every` generation batches; at first as soon as the predictor has groups enough."""
        if not self.fit_every or (self._fitted_at >= 0 and batch - self._fitted_at < self.fit_every):
            return
        if self.predictor.refit(self.embeddings, self._weighted(batch, self.half_life), self.seed + batch):
            self._fitted_at, self._projected = batch, None

    def _predict(self, groups: Groups) -> np.ndarray:
        if self._projected is None:
            self._projected = self.predictor.project(self.embeddings)
        self.predictor.update(self.embeddings, self._projected, groups)
        if not self.predictor.fitted:
            return np.full(len(self.embeddings), 0.5, dtype=np.float32)
        return self.predictor.predict_projected(self._projected, groups).numpy()


def _known(prompt_ids: np.ndarray, success_rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and success rates, int64 and float32, of the groups whose rate is known."""
    known = ~np.isnan(success_rates)
    return prompt_ids[known].astype(np.int64), success_rates[known].astype(np.float32)


def newest(ids: np.ndarray) -> np.ndarray:
    """Indices, ascending, of the last occurrence of each id in `ids`, int64 `(n,)`."""
    _, place = np.unique(ids[::-1], return_index=True)
    return np.sort(len(ids) - 1 - place)


def pearson(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Pearson correlation in [-1, 1]; NaN with fewer than two pairs, or if one side does not vary."""
    known = ~(np.isnan(predicted) | np.isnan(observed))
    x, y = predicted[known].astype(np.float64), observed[known].astype(np.float64)
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return float("nan")
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


class PredictionRecord:
    """The newest predictions of success rates, at most `capacity`, with those observed then."""

    def __init__(self, capacity: int = 256):
        self.capacity = capacity
        self._rows = np.empty((0, 2), dtype=np.float32)  # predicted, observed

    def add(self, predicted: np.ndarray, observed: np.ndarray) -> None:
        """Enter predicted and observed success rates of groups, `(n,)` each; those with NaN are ignored."""
        rows = np.stack([predicted, observed], axis=1).astype(np.float32)
        self._rows = np.concatenate([self._rows, rows[~np.isnan(rows).any(axis=1)]])[-self.capacity :]

    def rescale(self, scale: float, offset: float) -> None:
        """Map all rates to `scale * rate + offset`, in [0, 1]: the range of rewards has changed."""
        self._rows = np.clip(scale * self._rows + offset, 0, 1)

    def metrics(self) -> dict[str, float]:
        """`predictor/pearson`: correlation of predicted and observed success rates; nothing until it is defined."""
        value = pearson(*self._rows.T)
        return {} if np.isnan(value) else {"predictor/pearson": value}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Arrays for `load_state_dict`."""
        return {"rows": self._rows.copy()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""
        self._rows = state["rows"].astype(np.float32)
