r"""
DOTS: estimate what each prompt's success rate is now, and sample where a group teaches (arXiv 2506.05316).

A group of G completions has a gradient if they do not all get the same reward: with success rate p that has the
probability \(1 - p^G - (1 - p)^G\). Prompts are drawn without replacement, by weights that rise with it (`"effective"`)
or, as in the paper, fall with the distance from a target (`"target"`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers.utils import logging

from trl_dataeff.difficulty.base import Embeddings
from trl_dataeff.difficulty.online import RollingDifficulty
from trl_dataeff.difficulty.quality import PredictionRecord
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import Selector, check_request
from trl_dataeff.selection.history import SuccessHistory


logger = logging.get_logger(__name__)


def log_weight_effective(p: torch.Tensor, group_size: int, sharpness: float) -> torch.Tensor:
    r"""
    \(\kappa \log(1 - p^G - (1 - p)^G)\): the log-probability that a group has a gradient, sharpened.

    Args:
        p (`torch.Tensor`): success rates in [0, 1].
        group_size (`int`): G, at least 2.
        sharpness (`float`): kappa.

    Returns:
        `torch.Tensor`: float64, of the shape of `p`, at most 0; -inf where p is 0 or 1.
    """
    p = p.double()
    rare = torch.minimum(p, 1 - p)  # 1 - (1 - rare)^G without cancellation
    return sharpness * torch.log(-torch.expm1(group_size * torch.log1p(-rare)) - rare**group_size)


def log_weight_target(p: torch.Tensor, target: float, temperature: float) -> torch.Tensor:
    r"""
    \(-|p - \alpha| / \tau\), the paper's equation for sampling by difficulty.

    Args:
        p (`torch.Tensor`): success rates in [0, 1].
        target (`float`): alpha.
        temperature (`float`): tau.

    Returns:
        `torch.Tensor`: float64, of the shape of `p`, at most 0.
    """
    return -(p.double() - target).abs() / temperature


def gumbel_keys(log_weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """
    Keys whose descending order is a draw without replacement with probabilities proportional to `exp(log_weights)`
    (the Gumbel-max trick; Kool et al. 2019, arXiv 1903.06059). Prompts of weight 0 come last, in random order.
    """
    noise = -torch.empty(log_weights.shape, dtype=torch.float64).exponential_(generator=generator).log()
    return torch.where(log_weights.isneginf(), noise - 1e300, log_weights.double() + noise)


def gumbel_top_k(log_weights: torch.Tensor, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """
    Draw n different indices, each time with probabilities proportional to `exp(log_weights)` of those that are left.

    Everything is in log space and float64: a softmax at the paper's temperature underflows in float32, and
    `torch.multinomial` then returns rows of probability 0.

    Args:
        log_weights (`torch.Tensor` of shape `(N,)`): not normalised; -inf only where nothing else is left.
        n (`int`): at most N.
        generator (`torch.Generator`, *optional*): the only source of randomness.

    Returns:
        `torch.Tensor` of shape `(n,)` and dtype int64, in the order of the draw.

    Raises:
        `ValueError`: n is not in [0, N], or a weight is NaN.
    """
    if not 0 <= n <= len(log_weights):
        raise ValueError(f"{n} indices were asked for; {len(log_weights)} weights give from 0 to {len(log_weights)}.")
    if log_weights.isnan().any():
        raise ValueError("Weights of prompts are NaN: their predicted success rates are.")
    return gumbel_keys(log_weights, generator).topk(n).indices


class ReferenceSet(NamedTuple):
    """The paper's way: `size` prompts at random are rolled out every `every` windows, and predictions rest on them."""

    size: int
    every: int


class DotsSelector(Selector):
    """
    Samples by estimated success rates. Estimates join the prediction from a prompt's embedding with what the prompt
    itself has given lately (see [`SuccessHistory`]).

    Args:
        difficulty ([`RollingDifficulty`]): predicts all prompts from the run's recent groups.
        history ([`SuccessHistory`]): evidence of each prompt's own.
        log_weights (`Callable`): success rates `(N,)` -> log-weights `(N,)`.
        exploration (`float`): share of each proposal that is drawn uniformly.
        refresh_windows (`int`, *optional*, defaults to `1`): windows between two predictions.
        references ([`ReferenceSet`], *optional*): predict from groups rolled out for that; by default from all groups.
    """

    def __init__(
        self,
        difficulty: RollingDifficulty,
        history: SuccessHistory,
        log_weights: Callable[[torch.Tensor], torch.Tensor],
        *,
        exploration: float,
        refresh_windows: int = 1,
        references: ReferenceSet | None = None,
    ):
        self.difficulty = difficulty
        self.history = history
        self.log_weights = log_weights
        self.exploration = exploration
        self.refresh_windows = refresh_windows
        self.references = references
        self.size = len(difficulty.embeddings)
        self.window = 0
        self.record = PredictionRecord()
        self._prior = difficulty.refresh(0)  # what the embeddings say
        self._knows = False
        self._proposed = np.empty(0, dtype=np.int64)  # in this window
        self._explored = np.empty(0, dtype=np.int64)

    def estimate(self) -> np.ndarray:
        """Success rate of every prompt as it is thought to be now, float32 `(N,)`."""
        return self.history.estimate(self._prior, self.window)

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        if not self._knows:
            return np.full(len(prompt_ids), np.nan, dtype=np.float32)
        return self.history.estimate(self._prior[prompt_ids], self.window, prompt_ids)

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        check_request(n, self.size)
        out = torch.zeros(self.size, dtype=torch.bool)
        if self.size - len(self._proposed) >= n:  # no prompt twice in a window, as long as there are others
            out[torch.from_numpy(self._proposed)] = True
        # Away from 0 and 1: a weight of 0 is for prompts that are out
        log_weights = self.log_weights(torch.from_numpy(self.estimate()).double().clamp(1e-6, 1 - 1e-6))
        uniform = int(self.exploration * n + torch.rand((), generator=rng, dtype=torch.float64).item())
        explored = gumbel_top_k(torch.zeros(self.size).masked_fill(out, -torch.inf), uniform, rng).numpy()
        out[torch.from_numpy(explored)] = True
        selected = self._draw(log_weights.masked_fill(out, -torch.inf), n - uniform, rng)
        ids = np.concatenate([explored, selected])
        self._proposed = np.concatenate([self._proposed, ids])
        self._explored = np.concatenate([self._explored, explored])
        return ids

    def _draw(self, log_weights: torch.Tensor, n: int, rng: torch.Generator) -> np.ndarray:
        return gumbel_top_k(log_weights, n, rng).numpy()

    def propose_references(self, rng: torch.Generator) -> np.ndarray:
        if self.references is None or self.window % self.references.every:
            return np.empty(0, dtype=np.int64)
        return torch.randperm(self.size, generator=rng)[: self.references.size].numpy()

    def observe_references(self, groups: Sequence[RolloutGroup]) -> None:
        ids, rates = _ids_and_rates(groups)
        self._prior = self.difficulty.predict_with_references(ids, rates, self.window)
        self._knows = True
        self._proposed = ids

    def observe(self, groups: Sequence[RolloutGroup], step: int) -> None:
        ids, rates = _ids_and_rates(groups)
        predicted = np.array([group.predicted for group in groups], dtype=np.float32)
        uniform = np.isin(ids, self._explored) | np.array([group.reference for group in groups], dtype=bool)
        self.record.add(predicted, rates, uniform)
        self.window += 1
        trials = np.array([(~np.isnan(group.rewards).all(axis=1)).sum() for group in groups], dtype=np.float32)
        self.history.observe(ids, rates, trials, self.window)
        self.difficulty.observe(ids, rates, self.window)
        if self.references is None and self.window % self.refresh_windows == 0:
            self._prior = self.difficulty.refresh(self.window)
            self._knows = True
        self._proposed = self._explored = np.empty(0, dtype=np.int64)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {
            "window": np.array([self.window, self._knows]),
            "embeddings": _checksum(self.difficulty.embeddings),
            "prior": self._prior.copy(),
            "proposed": self._proposed.copy(),
            "explored": self._explored.copy(),
            **{f"history.{name}": value for name, value in self.history.state_dict().items()},
            **{f"difficulty.{name}": value for name, value in self.difficulty.state_dict().items()},
            **{f"record.{name}": value for name, value in self.record.state_dict().items()},
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.window, self._knows = int(state["window"][0]), bool(state["window"][1])
        self._prior = state["prior"].astype(np.float32)
        self._proposed, self._explored = state["proposed"].astype(np.int64), state["explored"].astype(np.int64)
        same = np.array_equal(state["embeddings"], _checksum(self.difficulty.embeddings))
        if not same:
            logger.warning(
                "The prompts' embeddings are not those of the run that is resumed: they were made anew, by another "
                "model or on other hardware. The predictor is fitted to them and to the run's groups; the run goes on, "
                "but not exactly as it would have."
            )

        def of(prefix: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

        self.history.load_state_dict(of("history."))
        self.difficulty.load_state_dict(of("difficulty."), predictor=same)
        self.record.load_state_dict(of("record."))

    def metrics(self) -> dict[str, float]:
        return self.record.metrics()


def _checksum(embeddings: Embeddings) -> np.ndarray:
    """Of up to 256 rows spread over them: whether two runs have the same."""
    rows = np.unique(np.linspace(0, len(embeddings) - 1, min(len(embeddings), 256)).astype(np.int64))
    return np.frombuffer(hashlib.sha256(np.ascontiguousarray(embeddings[rows]).tobytes()).digest(), dtype=np.uint8)


def _ids_and_rates(groups: Sequence[RolloutGroup]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([group.prompt_id for group in groups], dtype=np.int64)
    return ids, np.array([group.success_rate for group in groups], dtype=np.float32)
