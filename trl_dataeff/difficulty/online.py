"""`RollingDifficulty`: a predictor that is kept up to date, in a run, by the groups of the run itself."""

from __future__ import annotations

import numpy as np
import torch

from trl_dataeff.difficulty.base import DifficultyPredictor, Embeddings, PredictorError, check_width, take
from trl_dataeff.difficulty.predictor import AttentionDifficultyPredictor, LogisticDifficultyPredictor


EPOCHS = 4  # of a fit of the towers in a run; it goes on from the last one
FEWEST = 32  # groups that towers are fitted to, at the least
_PREDICTOR = "predictor."


class RollingDifficulty:
    """
    Success rates of all prompts, predicted from the groups that were rolled out lately. Each counts
    `0.5 ** (age / half_life)`, its age being in windows.

    A logistic predictor is fitted anew for each prediction. An attention predictor attends to the groups, no prompt to
    itself, and its towers are fitted every `fit_every` windows; what all prompts' embeddings become in them is computed
    only then.

    Predictions depend on the arguments, the groups entered and the windows alone: those after `load_state_dict` are the
    same to the last bit.

    Args:
        embeddings (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): of all prompts, by prompt id; a memory map is
            read a piece at a time.
        predictor ([`LogisticDifficultyPredictor`] or [`AttentionDifficultyPredictor`]): changed in place. What a
            logistic one that is fitted already knows is where its fits are drawn to.
        capacity (`int`, *optional*, defaults to `2048`): groups that are kept, the newest ones.
        half_life (`float`, *optional*, defaults to `20.0`): windows.
        fit_every (`int`, *optional*, defaults to `16`): windows between two fits of an attention predictor's towers; 0
            leaves them as they are.
        seed (`int`, *optional*, defaults to `0`): of those fits.

    Raises:
        PredictorError: the predictor was made for embeddings of another width.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        predictor: DifficultyPredictor,
        *,
        capacity: int = 2048,
        half_life: float = 20.0,
        fit_every: int = 16,
        seed: int = 0,
    ):
        if capacity < 1 or not half_life > 0 or fit_every < 0:
            raise ValueError(
                f"capacity is {capacity}, half_life {half_life} and fit_every {fit_every}; they have to be at least 1, "
                "above 0, and at least 0."
            )
        check_width(embeddings, predictor.embedding_width)
        self.embeddings, self.predictor = embeddings, predictor
        self.capacity, self.half_life, self.fit_every, self.seed = capacity, half_life, fit_every, seed
        self.ids = np.empty(0, dtype=np.int64)
        self.rates = np.empty(0, dtype=np.float32)
        self.windows = np.empty(0, dtype=np.int64)
        self._fitted_at = -1
        self._projected: torch.Tensor | None = None
        if isinstance(predictor, LogisticDifficultyPredictor):
            if predictor.embedding_width == 0:
                predictor.fit_basis(embeddings)
            predictor.anchor()
        elif not isinstance(predictor, AttentionDifficultyPredictor):
            raise PredictorError(f"A {type(predictor).__name__} cannot be kept up to date in a run.")

    def __len__(self) -> int:
        """Groups that are kept."""
        return len(self.ids)

    def observe(self, prompt_ids: np.ndarray, success_rates: np.ndarray, window: int) -> None:
        """
        Enter the groups of a window. A prompt's newest group takes the place of its older one.

        Args:
            prompt_ids (`np.ndarray` of shape `(n,)`): in the order in which the groups were rolled out.
            success_rates (`np.ndarray` of shape `(n,)`): in [0, 1]; groups with NaN are passed over.
            window (`int`): number of the window, not below that of the groups entered before.
        """
        ids, rates = self._known(prompt_ids, success_rates)
        ids, rates = np.concatenate([self.ids, ids]), np.concatenate([self.rates, rates])
        windows = np.concatenate([self.windows, np.full(len(ids) - len(self.windows), window, dtype=np.int64)])
        kept = newest(ids)[-self.capacity :]
        self.ids, self.rates, self.windows = ids[kept], rates[kept], windows[kept]

    def refresh(self, window: int) -> np.ndarray:
        """
        Predict all prompts from the groups that are kept.

        Args:
            window (`int`): number of the present window.

        Returns:
            `np.ndarray` of shape `(N,)` and dtype float32: success rates in [0, 1]. Without a group it is 0.5
            everywhere, or what a logistic predictor that was fitted before predicts.
        """
        self._fit_towers(window)
        weight = np.power(0.5, (window - self.windows) / self.half_life).astype(np.float32)
        return self._predict(self.ids, self.rates, weight)

    def predict_with_references(
        self, prompt_ids: np.ndarray, success_rates: np.ndarray, window: int | None = None
    ) -> np.ndarray:
        """
        Predict all prompts from these groups alone, all alike: the paper's way.

        Args:
            prompt_ids (`np.ndarray` of shape `(K,)`), success_rates (`np.ndarray` of shape `(K,)`): the reference
                groups; those with NaN are passed over.
            window (`int`, *optional*): number of the present window; if given, an attention predictor's towers are
                fitted when their time has come, to the groups that `observe` entered.

        Returns:
            `np.ndarray` of shape `(N,)` and dtype float32, see [`refresh`].
        """
        if window is not None:
            self._fit_towers(window)
        ids, rates = self._known(prompt_ids, success_rates)
        kept = newest(ids)
        return self._predict(ids[kept], rates[kept], np.ones(len(kept), dtype=np.float32))

    def state_dict(self) -> dict[str, np.ndarray]:
        tensors = self.predictor.tensors()
        return {
            "ids": self.ids.copy(),
            "rates": self.rates.copy(),
            "windows": self.windows.copy(),
            "fitted_at": np.array([self._fitted_at]),
            **{_PREDICTOR + name: value.detach().cpu().numpy().copy() for name, value in tensors.items()},
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """
        The inverse of `state_dict`; without the predictor's arrays only the groups are taken. Raises [`PredictorError`]
        if the state is that of another predictor or of another number of prompts.
        """
        ids = state["ids"]
        if len(ids) and ids.max() >= len(self.embeddings):
            raise PredictorError(
                f"The state has a group of prompt {ids.max()}; there are {len(self.embeddings)} prompts now. Resume "
                "with the same dataset."
            )
        given = {name.removeprefix(_PREDICTOR): value for name, value in state.items() if name.startswith(_PREDICTOR)}
        try:
            if given:
                self.predictor.load_tensors({name: torch.from_numpy(value.copy()) for name, value in given.items()})
        except (KeyError, ValueError, RuntimeError) as error:
            raise PredictorError(
                f"The state is not that of a {type(self.predictor).__name__} with these settings ({error}). Resume with "
                "the predictor that the run began with."
            ) from error
        check_width(self.embeddings, self.predictor.embedding_width)
        self.ids, self.rates, self.windows = ids.copy(), state["rates"].copy(), state["windows"].copy()
        self._fitted_at = int(state["fitted_at"][0]) if given else -1
        self._projected = None

    def _known(self, prompt_ids: np.ndarray, success_rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, rates = np.asarray(prompt_ids, dtype=np.int64), np.asarray(success_rates, dtype=np.float32)
        if ids.shape != rates.shape or ids.ndim != 1:
            raise ValueError(f"Prompt ids {ids.shape} and success rates {rates.shape} have to be of one shape, (n,).")
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self.embeddings):
            raise ValueError(f"Prompt ids from {ids.min()} to {ids.max()}: there are {len(self.embeddings)} prompts.")
        known = ~np.isnan(rates)
        return ids[known], rates[known]

    def _predict(self, ids: np.ndarray, rates: np.ndarray, weight: np.ndarray) -> np.ndarray:
        predictor, p, w = self.predictor, torch.from_numpy(rates), torch.from_numpy(weight)
        Z = self._all_projected()
        if isinstance(predictor, LogisticDifficultyPredictor):
            if len(ids):
                predictor.fit_projected(Z[torch.from_numpy(ids)], p, w)
            return predictor.predict_projected(Z).numpy() if predictor.fitted else self._unknown()
        assert isinstance(predictor, AttentionDifficultyPredictor)
        if not len(ids) or not weight.any():
            return self._unknown()
        predictor.set_references(take(self.embeddings, ids), p, w)
        assert predictor.references is not None
        exclude = torch.full((len(self.embeddings),), -1)
        exclude[torch.from_numpy(ids[weight > 0])] = torch.arange(len(predictor.references.p))
        with torch.no_grad():
            return predictor.attend(Z, *predictor.references, exclude.to(predictor.device)).cpu().numpy()

    def _unknown(self) -> np.ndarray:
        return np.full(len(self.embeddings), 0.5, dtype=np.float32)

    def _all_projected(self) -> torch.Tensor:
        if self._projected is None:
            self._projected = self.predictor.project(self.embeddings)
        return self._projected

    def _fit_towers(self, window: int) -> None:
        """Every `fit_every` windows; the first time as soon as there are groups enough."""
        predictor = self.predictor
        if not isinstance(predictor, AttentionDifficultyPredictor) or not self.fit_every or len(self) < FEWEST:
            return
        if self._fitted_at >= 0 and window - self._fitted_at < self.fit_every:
            return
        weight = torch.from_numpy(np.power(0.5, (window - self.windows) / self.half_life).astype(np.float32))
        E = take(self.embeddings, self.ids)
        predictor.fit(E, torch.from_numpy(self.rates), weight, seed=self.seed + window, epochs=EPOCHS)
        self._fitted_at, self._projected = window, None


def newest(ids: np.ndarray) -> np.ndarray:
    """Places, in order, of the last occurrence of each of the ids `(n,)`."""
    _, place = np.unique(ids[::-1], return_index=True)
    return np.sort(len(ids) - 1 - place)
