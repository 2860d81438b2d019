r"""
DOTS: estimate each prompt's present success rate, and sample prompts whose groups carry a gradient (arXiv 2506.05316).

A group of G completions has a gradient if they do not all get the same reward: with success rate p that has the
probability \(1 - p^G - (1 - p)^G\). Prompts are drawn without replacement, by weights that rise with it up to a threshold
(`"effective"`) or, as in the paper, fall with the distance from a target (`"target"`), and in passes: a prompt that was drawn
is not drawn again while the others carry enough of the weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from trl_dataeff.difficulty.base import DifficultyPredictor, Embeddings
from trl_dataeff.difficulty.loading import check_predictor, make_predictor
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import PredictionRecord, RollingDifficulty
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import Selector, SelectorContext, check_request, register_selector
from trl_dataeff.selection.draw import (
    ExplorationShare,
    PromptPass,
    gumbel_top_k,
    log_chance_effective,
    log_weight_effective,
    log_weight_target,
    rate_of_difference,
)
from trl_dataeff.selection.earlier import EarlierGroups
from trl_dataeff.selection.estimate import HALF_LIVES, PromptEstimator, group_arrays, under
from trl_dataeff.selection.uniform import UniformSelector
from trl_dataeff.utils import check_choice, check_number, hash_rows


logger = logging.get_logger(__name__)

EFFECTIVE_PRIOR = 1.0  # strength of a predicted probability that a group is effective, in groups
FIT_EVERY = 16  # generation batches between two refits of an attention predictor's towers, if the run fits them


@register_selector("dots")
class DotsSelector(Selector):
    """
    Samples prompts by estimated success rates. An estimate joins the prediction from a prompt's embedding with the
    prompt's own recent groups (see [`SuccessHistory`]).

    Args:
        objective (`str`, *optional*, defaults to `"effective"`): weight of a success rate: `"effective"`
            ([`log_weight_effective`]) or `"target"` ([`log_weight_target`], the paper's).
        sharpness (`float`, *optional*, defaults to `4.0`), threshold (`float` or `None`, *optional*, defaults to `0.6`): of
            `"effective"`.
        target (`float`, *optional*, defaults to `0.5`), temperature (`float`, *optional*, defaults to `1e-3`): of
            `"target"`.
        coverage (`float`, *optional*, defaults to `0.7`): share of the weight of all prompts that is drawn before a prompt may
            be selected again (see [`PromptPass`]); 0 allows the same prompt in every batch. `reference="paper"` has no passes.
        exploration (`float`, *optional*, defaults to `0.05`): least share of each proposal that is drawn uniformly; the
            share is larger while selection is not seen to raise the effective share by a factor of 1.25 (see [`ExplorationShare`]).
        predictor (`str` or [`DifficultyPredictor`], *optional*, defaults to `"logistic"`): `"logistic"`,
            `"attention"`, the path of a saved or published predictor, or an instance.
        predictor_args (`dict`, *optional*): keyword arguments of a predictor that is named.
        reference (`str`, *optional*, defaults to `"rolling"`): `"rolling"` predicts from all recent groups, `"paper"`
            from reference rollouts of random prompts.
        reference_size (`int`, *optional*, defaults to `256`): prompts of such a reference set.
        refresh_batches (`int`, *optional*, defaults to `1`): generation batches between two predictions. With `"paper"`
            the prompts of all of them are drawn at once.
        history_prior (`float`, *optional*, defaults to `4.0`): strength of a prediction, in completions.
        half_lives (`Sequence[float]`, *optional*): generation batches after which a group counts half, one for each of the
            experts among which the estimator chooses (see [`PromptEstimator`]); 1, 3, 9 and 27 if not given.
        history_from (`str`, *optional*): `output_dir` of an earlier run on the same dataset, or its `dataeff/groups.parquet`,
            whose success rates are the first predictions; groups of this run outweigh them.
        shuffle (`bool`, *optional*, defaults to TRL's `shuffle_dataset`): without it, explored prompts come in the dataset's order.
    """

    def __init__(
        self,
        *,
        objective: str = "effective",
        sharpness: float = 4.0,
        threshold: float | None = 0.6,
        target: float = 0.5,
        temperature: float = 1e-3,
        coverage: float = 0.7,
        exploration: float = 0.05,
        predictor: str | DifficultyPredictor = "logistic",
        predictor_args: dict[str, Any] | None = None,
        reference: str = "rolling",
        reference_size: int = 256,
        refresh_batches: int = 1,
        history_prior: float = 4.0,
        half_lives: Sequence[float] | None = None,
        history_from: str | None = None,
        shuffle: bool = True,
    ):
        check_choice("objective", objective, ("effective", "target"))
        check_choice("reference", reference, ("rolling", "paper"))
        check_number("sharpness", sharpness, 0, above=True)
        check_number("threshold", threshold, 0, 1, above=True, none=True)
        check_number("temperature", temperature, 0, above=True)
        check_number("history_prior", history_prior, 0, above=True)
        for name, value in (("target", target), ("coverage", coverage), ("exploration", exploration)):
            check_number(name, value, 0, 1)
        for name, number in (("reference_size", reference_size), ("refresh_batches", refresh_batches)):
            check_number(name, number, 1, integer=True)
        for half_life in half_lives or ():
            check_number("half_lives", half_life, 0, above=True)
        if not isinstance(predictor, (str, DifficultyPredictor)):
            raise ValueError(
                f"`predictor` is a {type(predictor).__name__}; it takes 'logistic', 'attention', a path, or an instance."
            )
        if isinstance(predictor, str):
            check_predictor(predictor, predictor_args)
        self.objective, self.sharpness, self.threshold = objective, sharpness, threshold
        self.target, self.temperature = target, temperature
        self.coverage, self.exploration = coverage, exploration
        self.predictor, self.predictor_args = predictor, predictor_args
        self.uses_references = reference == "paper"
        self.reference_size = reference_size
        self.refresh_batches = refresh_batches
        self.history_prior, self.half_lives = history_prior, tuple(half_lives or HALF_LIVES)
        self.history_from, self.shuffle = history_from, shuffle

    def bind(self, context: SelectorContext) -> None:
        super().bind(context)
        self.embeddings = embeddings = context.embeddings()
        if isinstance(self.predictor, str):
            width = embeddings.shape[1]
            predictor, fitted_in_run = make_predictor(self.predictor, width, context.seed, self.predictor_args)
        else:  # a copy: another run starts from the same one
            predictor, fitted_in_run = copy.deepcopy(self.predictor), not self.predictor.fitted
        difficulty = RollingDifficulty(
            embeddings,
            predictor,
            capacity=predictor.capacity(context.batch_groups),
            half_life=self.half_lives[-1],
            fit_every=FIT_EVERY if fitted_in_run else 0,
            seed=context.seed,
        )
        self.success = PromptEstimator(difficulty, context.num_prompts, self.history_prior, self.half_lives)
        self.effective = PromptEstimator(self._rolling(), context.num_prompts, EFFECTIVE_PRIOR, self.half_lives)
        # How much rewards differ within groups. Its groups are kept from the start, and estimates made once it matters
        self._differences = self._rolling()
        self.difference: PromptEstimator | None = None
        self.record = PredictionRecord()
        self.exploring = ExplorationShare(self.exploration)
        self.batch = 0  # generation batches observed
        self._has_predictions = predictor.fitted  # before the run
        self._proposed = np.empty(0, dtype=np.int64)  # for this generation batch
        self._explored = np.empty(0, dtype=np.int64)
        self._uniform, self._uniform_rng = UniformSelector(self.shuffle), torch.Generator().manual_seed(context.seed)
        self._uniform.bind(context)
        self._pass = PromptPass(context.num_prompts, self.coverage)
        self._drawn = np.empty((3, 0))  # prompts proposed, their weights times N, and the share drawn uniformly
        self._order, self._taken = np.empty(0, dtype=np.int64), 0  # see _next_drawn

    def start_from(self, earlier: EarlierGroups) -> None:
        """Begin with what an earlier run showed, as a prior that this run's own groups outweigh. Called after [`bind`]."""
        self.success.start_from(earlier.ids, earlier.rates, earlier.counts * self.context.group_size)
        self.effective.start_from(earlier.ids, earlier.effective, earlier.counts)
        self._has_predictions = True

    def _rolling(self) -> RollingDifficulty:
        """Of another label than success, by a predictor of its own."""
        predictor = LogisticDifficultyPredictor()
        capacity = predictor.capacity(self.context.batch_groups)
        return RollingDifficulty(self.embeddings, predictor, capacity=capacity, half_life=self.half_lives[-1])

    def log_weights(self) -> torch.Tensor:
        """Log-weights of all prompts, float64 `(N,)`, finite."""
        if self.objective == "target":
            return log_weight_target(torch.from_numpy(self.success.mean()), self.target, self.temperature)
        return log_weight_effective(self._chances(slice(None)).log(), self.sharpness, self.threshold)

    def _chances(self, ids: np.ndarray | slice) -> torch.Tensor:
        """
        Probabilities that groups of prompts `ids` are effective, float64 `(n,)`, above 0. With the objective `"effective"`
        they are estimated twice, and averaged: from the success rate, and directly. A mean success rate of 0.1 may be that
        of prompts that are all solved sometimes, or of some that always are among many that never are.
        """
        estimator = self.success if self.difference is None else self.difference
        p = torch.from_numpy(estimator.estimates_of(ids)).double()  # (K, n)
        if self.difference is not None:
            p = rate_of_difference(p)
        p = p.clamp(1e-6, 1 - 1e-6)  # a weight of 0 is for excluded prompts
        by_rate = torch.from_numpy(estimator.weights) @ log_chance_effective(p, self.context.group_size).exp()
        if self.objective == "target":
            return by_rate  # the direct estimate is not refreshed
        return (by_rate + torch.from_numpy(self.effective.mean(ids)).double()) / 2

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        if not self._has_predictions:
            return np.full(len(prompt_ids), np.nan, dtype=np.float32)
        return self.success.mean(prompt_ids)

    def explored(self, prompt_ids: np.ndarray) -> np.ndarray:
        return np.isin(prompt_ids, self._explored)

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        size = self.context.num_prompts
        check_request(n, size)
        excluded = torch.zeros(size, dtype=torch.bool)
        if size - len(self._proposed) >= n:  # no prompt twice in a generation batch, as long as there are others
            excluded[torch.from_numpy(self._proposed)] = True
        log_weights, share = self.log_weights(), self.exploring.value
        if not self.uses_references:
            log_weights = self._pass.restrict(log_weights, excluded, n)
        weights = size * log_weights.softmax(0).numpy()
        uniform = int(share * n + torch.rand((), generator=rng, dtype=torch.float64).item())
        explored = self._explore(uniform, excluded)
        draw = self._next_drawn if self.uses_references else self._draw
        selected = draw(log_weights.masked_fill(excluded, -torch.inf), n - uniform, rng)
        ids = np.concatenate([explored, selected])
        self._pass.add(ids)
        self._proposed = np.concatenate([self._proposed, ids])
        self._explored = np.concatenate([self._explored, explored])
        self._drawn = np.concatenate([self._drawn, np.stack([ids, weights[ids], np.full(n, share)])], axis=1)
        return ids

    def _explore(self, n: int, excluded: torch.Tensor) -> np.ndarray:
        """The next n prompts of uniform passes that are not in `excluded`. Adds them to it, in place."""
        ids, in_vain = np.empty(0, dtype=np.int64), 0
        while len(ids) < n and in_vain < len(excluded):
            taken = self._uniform.propose(n - len(ids), self._uniform_rng)
            new = taken[~excluded[taken].numpy()]
            in_vain = 0 if len(new) else in_vain + len(taken)
            ids = np.concatenate([ids, new])
            excluded[taken] = True
        if len(ids) < n:  # all others are what passes leave out: the last prompts of a dataset that is not shuffled
            others = np.flatnonzero(~excluded.numpy())
            order = torch.randperm(len(others), generator=self._uniform_rng).numpy()
            others = others[order if self.shuffle else slice(None)][: n - len(ids)]
            ids = np.concatenate([ids, others])
            excluded[others] = True
        return ids

    def _draw(self, log_weights: torch.Tensor, n: int, rng: torch.Generator) -> np.ndarray:
        return gumbel_top_k(log_weights, n, rng).numpy()

    def _next_drawn(self, log_weights: torch.Tensor, n: int, rng: torch.Generator) -> np.ndarray:
        """
        The next n prompts of the draw that follows reference rollouts. It is made at once for all generation batches up to
        the next references, and in random order, so that these batches are alike. If they take more than that, the
        draw goes on without the prompts that it has given already, as long as there are others.
        """
        given, ahead = self._order[: self._taken], self._order[self._taken :]
        ahead = ahead[~log_weights[ahead].isneginf().numpy()]
        if len(ahead) < n:
            others = log_weights.index_fill(0, torch.from_numpy(self._order), -torch.inf)
            left = int((~others.isneginf()).sum())
            if left < n - len(ahead):
                others = log_weights.index_fill(0, torch.from_numpy(ahead), -torch.inf)
            count = n - len(ahead) if len(self._order) else min(self.refresh_batches * n, left)
            drawn = self._draw(others, count, rng)
            ahead = np.concatenate([ahead, drawn[torch.randperm(len(drawn), generator=rng).numpy()]])
        self._order = np.concatenate([given, ahead])
        self._taken += n
        return ahead[:n]

    def roll_out_references(
        self, roll_out: Callable[[np.ndarray], Sequence[RolloutGroup]], rng: torch.Generator
    ) -> None:
        """The paper's reference set: random prompts, every `refresh_batches`; all predictions rest on their groups."""
        if not self.uses_references or self.batch % self.refresh_batches:
            return
        groups = roll_out(torch.randperm(self.context.num_prompts, generator=rng)[: self.reference_size].numpy())
        ids, rates, _ = group_arrays(groups)
        self.success.predict_with_references(ids, rates)
        self._has_predictions = True
        self._proposed = ids
        self._order, self._taken = np.empty(0, dtype=np.int64), 0

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        ids, rates, trials = group_arrays(groups)
        predicted = np.array([group.predicted for group in groups], dtype=np.float32)
        from_references = np.array([group.origin == "reference" for group in groups], dtype=bool)
        effective = np.array([group.effective for group in groups], dtype=bool)
        explored = np.isin(ids, self._explored) | from_references
        self.record.add(predicted, rates, explored)
        self._observe_gain(ids, effective)
        self.batch += 1
        self.success.observe(ids, rates, trials, self.batch)
        labels = np.where(np.isnan(rates), np.nan, effective).astype(np.float32)
        self.effective.observe(ids, labels, np.ones_like(trials), self.batch)
        self._observe_differences(groups, ids, trials)
        if self.batch % self.refresh_batches == 0:
            self._refresh()
        self._proposed = self._explored = np.empty(0, dtype=np.int64)
        self._drawn = np.empty((3, 0))

    def _observe_gain(self, ids: np.ndarray, effective: np.ndarray) -> None:
        """Whether prompts of more weight had more effective groups. Reference prompts have no weight."""
        place = {prompt: i for i, prompt in enumerate(self._drawn[0].astype(np.int64).tolist())}
        known = np.isin(ids, self._drawn[0])
        _, weights, share = self._drawn[:, [place[prompt] for prompt in ids[known].tolist()]]
        self.exploring.observe(effective[known], weights, share)

    def _refresh(self) -> None:
        """Predict from all groups so far what is used. With `reference="paper"` success rates come from references alone."""
        if not self.uses_references:
            self.success.refresh()
            self._has_predictions = True
        if self.objective == "effective":
            self.effective.refresh()
        if self.difference is not None:
            self.difference.refresh()

    def _observe_differences(self, groups: Sequence[RolloutGroup], ids: np.ndarray, trials: np.ndarray) -> None:
        """Labels in [0, 1]: twice the share of pairs that differ, which has the mean 4 p (1 - p) for binary rewards."""
        labels = np.array([2 * min(group.spread, 0.5) for group in groups], dtype=np.float32)
        if self.difference is not None:
            self.difference.observe(ids, labels, trials, self.batch)
            return
        self._differences.observe(ids, labels, self.batch)
        if self.objective == "effective" and any(group.graded for group in groups):
            self.difference = self._estimator_of_differences()

    def _estimator_of_differences(self) -> PromptEstimator:
        return PromptEstimator(self._differences, self.context.num_prompts, self.history_prior, self.half_lives)

    def rescale(self, scale: float, offset: float) -> None:
        self.success.rescale(scale, offset)
        self.record.rescale(scale, offset)

    def state_dict(self) -> dict[str, np.ndarray]:
        difference = self._differences if self.difference is None else self.difference
        return {
            "graded": np.array([self.difference is not None]),
            **{f"difference.{name}": value for name, value in difference.state_dict().items()},
            "batch": np.array([self.batch, self._has_predictions]),
            "embeddings": _hash(self.embeddings),
            "proposed": self._proposed.copy(),
            "explored": self._explored.copy(),
            "in_pass": self._pass.drawn.copy(),
            "drawn": self._drawn.copy(),
            "order": self._order.copy(),
            "taken": np.array([self._taken]),
            **{f"uniform.{name}": value for name, value in self._uniform.state_dict().items()},
            "uniform_rng": self._uniform_rng.get_state().numpy(),
            **{f"success.{name}": value for name, value in self.success.state_dict().items()},
            **{f"effective.{name}": value for name, value in self.effective.state_dict().items()},
            **{f"exploring.{name}": value for name, value in self.exploring.state_dict().items()},
            **{f"record.{name}": value for name, value in self.record.state_dict().items()},
        }

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.batch, self._has_predictions = int(state["batch"][0]), bool(state["batch"][1])
        self._proposed, self._explored = state["proposed"].astype(np.int64), state["explored"].astype(np.int64)
        self._pass.drawn = state["in_pass"].astype(bool)
        self._drawn = state["drawn"].astype(np.float64)
        self._order, self._taken = state["order"].astype(np.int64), int(state["taken"][0])
        self._uniform.load_state_dict(under(state, "uniform."))
        self._uniform_rng.set_state(torch.from_numpy(state["uniform_rng"]))
        same_embeddings = np.array_equal(state["embeddings"], _hash(self.embeddings))
        if not same_embeddings:
            logger.warning(
                "The prompts' embeddings differ from those of the run that is resumed: another model or other hardware "
                "made them. The predictor is fitted again, to the new embeddings and the run's groups. The run continues, "
                "but not exactly as it would have."
            )
        difference: RollingDifficulty | PromptEstimator = self._differences
        if state["graded"][0]:
            difference = self.difference = self._estimator_of_differences()
        difference.load_state_dict(under(state, "difference."), predictor=same_embeddings)
        self.success.load_state_dict(under(state, "success."), predictor=same_embeddings)
        self.effective.load_state_dict(under(state, "effective."), predictor=same_embeddings)
        self.exploring.load_state_dict(under(state, "exploring."))
        self.record.load_state_dict(under(state, "record."))

    def metrics(self) -> dict[str, float]:
        return {**self.record.metrics(), "exploration": self.exploring.value}


def _hash(embeddings: Embeddings) -> np.ndarray:
    """Hash of up to 256 rows spread over the embeddings: whether two runs have the same."""
    return np.frombuffer(bytes.fromhex(hash_rows(embeddings, 256)), dtype=np.uint8)
