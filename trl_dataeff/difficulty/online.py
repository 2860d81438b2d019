"""`RollingDifficulty`: success rates of all prompts, from a predictor that is fitted to the groups of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trl_dataeff.difficulty.predictor import DifficultyPredictor, Embeddings, Groups, check_width


UNKNOWN_RATE = 0.5  # success rate that is predicted before anything is known
NEVER = -1  # generation batch of the last fit, before the first one


class RollingDifficulty:
    """
    Success rates of all prompts, predicted from the newest groups of a run. A group counts `0.5 ** (age / half_life)`,
    its age in generation batches. The predictor is updated before each prediction, and refitted every `fit_every`
    generation batches.

    Args:
        embeddings (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): of all prompts, by prompt id; read some rows at
            a time.
        predictor ([`DifficultyPredictor`]): changed in place. A logistic predictor that was fitted before is
            regularised towards its coefficients.
        capacity (`int`, *optional*): groups that are kept, the newest ones. Defaults to `predictor.capacity(1)`; in a
            run, give `predictor.capacity(batch_groups)`.
        half_life (`float`, *optional*, defaults to `20.0`): generation batches after which a group counts half.
        fit_every (`int`, *optional*, defaults to `16`): generation batches between two calls of `predictor.refit`; 0
            for none.
        seed (`int`, *optional*, defaults to `0`): seed of those fits.

    Attributes:
        ids (`np.ndarray` of shape `(n,)`): int64, prompt of each group that is kept, oldest first.
        rates (`np.ndarray` of shape `(n,)`): float32, success rate of each.
        batches (`np.ndarray` of shape `(n,)`): int64, generation batch of each.

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
        self.embeddings = embeddings
        self.predictor = predictor
        self.capacity = predictor.capacity(1) if capacity is None else capacity
        self.half_life = half_life
        self.fit_every = fit_every
        self.seed = seed
        self.ids = np.empty(0, dtype=np.int64)
        self.rates = np.empty(0, dtype=np.float32)
        self.batches = np.empty(0, dtype=np.int64)
        self._fitted_at = NEVER
        self._projected: torch.Tensor | None = None  # (N, d), made when it is first needed
        predictor.start(embeddings)

    def observe(self, prompt_ids: np.ndarray, success_rates: np.ndarray, batch: int) -> None:
        """
        Enter the groups of a generation batch. A prompt's newest group replaces its older one.

        Args:
            prompt_ids (`np.ndarray` of shape `(n,)`): prompts, in the order in which they were rolled out.
            success_rates (`np.ndarray` of shape `(n,)`): in [0, 1]; groups with NaN are ignored.
            batch (`int`): number of the generation batch, not below that of earlier groups.
        """
        new_ids, new_rates = _known(prompt_ids, success_rates)
        new_batches = np.full(len(new_ids), batch, dtype=np.int64)
        ids = np.concatenate([self.ids, new_ids])
        rates = np.concatenate([self.rates, new_rates])
        batches = np.concatenate([self.batches, new_batches])
        kept = newest(ids)[-self.capacity :]
        self.ids = ids[kept]
        self.rates = rates[kept]
        self.batches = batches[kept]

    def refresh(self, batch: int, half_life: float | None = None) -> np.ndarray:
        """
        Predict the success rates of all prompts in a generation batch, from the groups entered so far.

        Args:
            batch (`int`): number of the generation batch.
            half_life (`float`, *optional*): of the groups' weights, in the place of the predictor's own.

        Returns:
            `np.ndarray` of shape `(N,)`: float32 in [0, 1]. Without a group: 0.5, or what the predictor predicts if it
                was fitted before the run.
        """
        self._refit_if_due(batch)
        return self._predict(self._weighted_groups(batch, half_life or self.half_life))

    def predict_with_references(self, prompt_ids: np.ndarray, success_rates: np.ndarray, batch: int) -> np.ndarray:
        """
        Predict the success rates of all prompts in a generation batch from reference rollouts alone, with equal
        weights (the paper's method). The predictor is refitted when due, to the groups entered by `observe`.

        Args:
            prompt_ids (`np.ndarray` of shape `(K,)`): reference prompts.
            success_rates (`np.ndarray` of shape `(K,)`): in [0, 1]; groups with NaN are ignored.
            batch (`int`): number of the generation batch.

        Returns:
            `np.ndarray` of shape `(N,)`: what [`refresh`] returns.
        """
        self._refit_if_due(batch)
        ids, rates = _known(prompt_ids, success_rates)
        kept = newest(ids)
        equal_weights = np.ones(len(kept), dtype=np.float32)
        return self._predict(Groups(ids[kept], rates[kept], equal_weights))

    def rescale(self, scale: float, offset: float) -> None:
        """
        Map the groups' success rates, since the range of rewards has changed.

        Args:
            scale (`float`): a rate becomes `scale * rate + offset`, in [0, 1].
            offset (`float`): see `scale`.
        """
        self.rates = np.clip(scale * self.rates + offset, 0, 1).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """What restores the groups and what the predictor has been fitted to."""
        predictor = {name: value.detach().numpy().copy() for name, value in self.predictor.tensors().items()}
        return {
            "ids": self.ids.copy(),
            "rates": self.rates.copy(),
            "batches": self.batches.copy(),
            "fitted_at": self._fitted_at,
            "predictor": predictor,
        }

    def load_state_dict(self, state: dict[str, Any], *, predictor: bool = True) -> None:
        """
        Restore what `state_dict` returned.

        Args:
            state (`dict[str, Any]`): what `state_dict` returned.
            predictor (`bool`, *optional*, defaults to `True`): without it, only the groups are restored, and the
                predictor is fitted to them again, with other embeddings.

        Raises:
            KeyError or RuntimeError: the state is that of another predictor.
        """
        if predictor:
            tensors = {name: torch.from_numpy(value.copy()) for name, value in state["predictor"].items()}
            self.predictor.load_tensors(tensors)
        self.ids = state["ids"].copy()
        self.rates = state["rates"].copy()
        self.batches = state["batches"].copy()
        self._fitted_at = state["fitted_at"] if predictor else NEVER
        self._projected = None

    def _weighted_groups(self, batch: int, half_life: float) -> Groups:
        age = batch - self.batches
        weight = np.power(0.5, age / half_life).astype(np.float32)
        return Groups(self.ids, self.rates, weight)

    def _refit_if_due(self, batch: int) -> None:
        """Refit every `fit_every` generation batches; at first as soon as the predictor has groups enough."""
        if not self.fit_every:
            return
        if self._fitted_at != NEVER and batch - self._fitted_at < self.fit_every:
            return
        groups = self._weighted_groups(batch, self.half_life)
        was_fitted = self.predictor.refit(self.embeddings, groups, self.seed + batch)
        if was_fitted:
            self._fitted_at = batch
            self._projected = None

    def _predict(self, groups: Groups) -> np.ndarray:
        if self._projected is None:
            self._projected = self.predictor.project(self.embeddings)
        self.predictor.update(self.embeddings, self._projected, groups)
        if not self.predictor.fitted:
            return np.full(len(self.embeddings), UNKNOWN_RATE, dtype=np.float32)
        return self.predictor.predict_projected(self._projected, groups).numpy()


def _known(prompt_ids: np.ndarray, success_rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and success rates, int64 and float32, of the groups whose rate is known."""
    known = ~np.isnan(success_rates)
    return prompt_ids[known].astype(np.int64), success_rates[known].astype(np.float32)


def newest(ids: np.ndarray) -> np.ndarray:
    """
    Find the last occurrence of each id.

    Args:
        ids (`np.ndarray` of shape `(n,)`): int64.

    Returns:
        `np.ndarray` of shape `(k,)`: int64 indices, ascending, one per different id.
    """
    _, first_from_the_end = np.unique(ids[::-1], return_index=True)
    return np.sort(len(ids) - 1 - first_from_the_end)


def pearson(predicted: np.ndarray, observed: np.ndarray) -> float:
    """
    Pearson correlation.

    Args:
        predicted (`np.ndarray` of shape `(n,)`): predicted success rates; pairs with NaN are ignored.
        observed (`np.ndarray` of shape `(n,)`): observed success rates; likewise.

    Returns:
        `float`: in [-1, 1]; NaN with fewer than two pairs, or if one side does not vary.
    """
    known = ~(np.isnan(predicted) | np.isnan(observed))
    x = predicted[known].astype(np.float64)
    y = observed[known].astype(np.float64)
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return float("nan")
    x = x - x.mean()
    y = y - y.mean()
    correlation = (x @ y) / np.sqrt((x @ x) * (y @ y))
    return float(np.clip(correlation, -1.0, 1.0))  # rounding may take it outside


class PredictionRecord:
    """
    The newest predictions of success rates, with those observed then.

    Args:
        capacity (`int`, *optional*, defaults to `256`): predictions that are kept.
    """

    def __init__(self, capacity: int = 256):
        self.capacity = capacity
        self._rows = np.empty((0, 2), dtype=np.float32)  # predicted, observed

    def add(self, predicted: np.ndarray, observed: np.ndarray) -> None:
        """
        Enter success rates of groups; those with NaN are ignored.

        Args:
            predicted (`np.ndarray` of shape `(n,)`): predicted success rates.
            observed (`np.ndarray` of shape `(n,)`): observed success rates.
        """
        new_rows = np.stack([predicted, observed], axis=1).astype(np.float32)
        is_known = ~np.isnan(new_rows).any(axis=1)
        rows = np.concatenate([self._rows, new_rows[is_known]])
        self._rows = rows[-self.capacity :]

    def rescale(self, scale: float, offset: float) -> None:
        """
        Map all success rates, since the range of rewards has changed.

        Args:
            scale (`float`): a rate becomes `scale * rate + offset`, in [0, 1].
            offset (`float`): see `scale`.
        """
        self._rows = np.clip(scale * self._rows + offset, 0, 1)

    def metrics(self) -> dict[str, float]:
        """`predictor/pearson`: correlation of predicted and observed success rates; nothing until it is defined."""
        predicted, observed = self._rows.T
        correlation = pearson(predicted, observed)
        if np.isnan(correlation):
            return {}
        return {"predictor/pearson": correlation}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Arrays for `load_state_dict`."""
        return {"rows": self._rows.copy()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned."""
        self._rows = state["rows"].astype(np.float32)
