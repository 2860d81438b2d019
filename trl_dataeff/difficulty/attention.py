r"""
`AttentionDifficultyPredictor`: attention over reference groups (arXiv 2506.05316, section 3.2).

    z = LayerNorm(MLP(LayerNorm(e)))                 two towers: one for queries, one for reference groups
    p~ = sum_i a_i p_i,   a = softmax_i(z_q . z_i / sqrt(width))
    p = sigmoid(logit(p~) / temperature + bias)      temperature and bias from the mean and deviation of all p_i
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trl_dataeff.difficulty.base import (
    DifficultyPredictor,
    Embeddings,
    ObservedGroups,
    PredictorError,
    check_labels,
    check_width,
    chunks,
    take,
)
from trl_dataeff.difficulty.training import FEWEST, Task, leave_one_out, own_random_state, train


SCORES = 2**23  # attention scores that are held at a time
CLAMP = 1e-4
ATTENDED = 512  # groups that a run attends to: a prediction of all prompts costs N times these
ONLINE_EPOCHS = 4  # of a fit in a run, which continues the last one


class References(NamedTuple):
    """Reference groups: projections `z` `(K, width)`, success rates `p` `(K,)`, weights `weight` `(K,)`; float32."""

    z: torch.Tensor
    p: torch.Tensor
    weight: torch.Tensor


class AttentionDifficultyPredictor(DifficultyPredictor, nn.Module):
    """
    The paper's predictor: attention over reference groups. Its parameters have the names of the authors' checkpoint.
    Before it is fitted, both towers are equal and the calibration is the identity, so that it averages the success rates
    of similar prompts.

    Args:
        embedding_width (`int`): width h of the embeddings.
        width (`int`, *optional*, defaults to `896`): width of the projections.
        dropout (`float`, *optional*, defaults to `0.1`): dropout of the towers while they are fitted.
        seed (`int`, *optional*, defaults to `0`): seed of the initial parameters. The global random state is not changed.

    Attributes:
        references ([`References`] or `None`): groups that `predict` attends to; [`set_references`] sets them.
    """

    def __init__(self, embedding_width: int, width: int = 896, dropout: float = 0.1, seed: int = 0):
        super().__init__()
        self._embedding_width, self.width, self.dropout = embedding_width, width, dropout
        self.references: References | None = None
        with own_random_state(seed):
            self.regressor = Regressor(embedding_width, width, dropout)
        self.eval()

    @property
    def fitted(self) -> bool:
        return self.references is not None

    @property
    def embedding_width(self) -> int:
        return self._embedding_width

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def project_queries(self, E: Embeddings) -> torch.Tensor:
        """Projections, float32 `(N, width)`, of prompts to predict, from embeddings `(N, h)`."""
        return self._project(self.regressor.sim_head.query_proj, E)

    def project_references(self, E: Embeddings) -> torch.Tensor:
        """Projections, float32 `(K, width)`, of reference prompts, from embeddings `(K, h)`."""
        return self._project(self.regressor.sim_head.ref_proj, E)

    @torch.no_grad()
    def _project(self, tower: nn.Module, E: Embeddings) -> torch.Tensor:
        check_width(E, self.embedding_width)
        projected = torch.empty(len(E), self.width, device=self.device)  # filled piece by piece: never held twice
        start = 0
        for rows in chunks(E, self.embedding_width, self.device):
            projected[start : start + len(rows)] = tower(rows)
            start += len(rows)
        return projected

    def attend(
        self,
        zq: torch.Tensor,
        zr: torch.Tensor,
        p_ref: torch.Tensor,
        weight: torch.Tensor | None = None,
        exclude: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Calibrated success rates of queries, `(N,)` in (0, 1). Without `weight` and `exclude`: the published predictions.

        The calibration takes the weighted mean and the unbiased weighted deviation of all references; the deviation of
        one reference is 0. A query without any reference left has 0.5 before calibration.

        Args:
            zq (`torch.Tensor` of shape `(N, width)`), zr (`torch.Tensor` of shape `(K, width)`): projections of the queries and of
                the references.
            p_ref (`torch.Tensor` of shape `(K,)`): success rates of the references in [0, 1].
            weight (`torch.Tensor` of shape `(K,)`, *optional*): factors >= 0 of the references' attention, not all 0.
            exclude (`torch.Tensor` of shape `(N,)`, *optional*): int64, the reference that a query may not attend to;
                -1 for none.

        Raises:
            PredictorError: shapes disagree, a success rate is NaN, or all weights are 0.
        """
        weight = torch.ones_like(p_ref) if weight is None else weight
        if not len(p_ref) or zr.shape != (len(p_ref), zq.shape[1]) or weight.shape != p_ref.shape:
            raise PredictorError(
                f"Queries {tuple(zq.shape)}, references {tuple(zr.shape)}, success rates {tuple(p_ref.shape)} and "
                f"weights {tuple(weight.shape)} do not fit: (N, width), (K, width), (K,) and (K,) with K > 0 do."
            )
        if bool(p_ref.isnan().any()) or not float(weight.sum()) > 0:
            raise PredictorError("References need known success rates, and one weight above 0 at the least.")
        rows = max(1, SCORES // len(p_ref))
        keys, log_weight = zr.T / math.sqrt(zr.shape[1]), weight.log()
        pieces = [
            attention_average(
                zq[i : i + rows], keys, log_weight, p_ref, None if exclude is None else exclude[i : i + rows]
            )
            for i in range(0, len(zq), rows)
        ]
        mean, deviation = weighted_moments(p_ref, weight)
        out = self.regressor.mlp(torch.stack([mean, deviation]))
        temperature = nn.functional.softplus(out[0]).clamp(0.01, 10)
        averages = torch.cat([zq.new_empty(0, dtype=torch.float32), *pieces])
        return torch.sigmoid(torch.logit(averages, CLAMP) / temperature + torch.tanh(out[1]))

    def set_references(self, E: Embeddings, p: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Set the groups that `predict` attends to; arguments and errors are those of [`fit`]. The towers do not change."""
        p, weight = check_labels(E, p, weight)
        z = self.project_references(E)
        used = weight > 0
        self.references = References(z[used], p[used].to(self.device), weight[used].to(self.device))

    def fit(
        self, E: Embeddings, p: torch.Tensor, weight: torch.Tensor | None = None, seed: int = 0, epochs: int = 20
    ) -> None:
        """
        Continue to fit the towers, each group predicted from the others, and set the references. With fewer than 32
        groups only the references change. See [`DifficultyPredictor.fit`] and [`~trl_dataeff.difficulty.training.train`].

        Args:
            seed (`int`, *optional*, defaults to `0`): seed of the held-out groups, the batches and dropout.
            epochs (`int`, *optional*, defaults to `20`): maximum number of epochs.
        """
        check_width(E, self.embedding_width)
        rates, weights = check_labels(E, p, weight)
        self.fit_tasks(E, leave_one_out(rates, weights, seed), seed, epochs)
        self.set_references(E, p, weight)

    def fit_tasks(self, E: Embeddings, tasks: Sequence[Task], seed: int, epochs: int) -> None:
        """
        Fit the towers and the calibration by binary cross-entropy on success rates, each group predicted from others of its
        task, whose rows index the embeddings `E` `(N, h)`. See [`~trl_dataeff.difficulty.training.train`].
        """
        train(self, tasks, lambda *batch: self._loss(E, *batch), seed, epochs)

    def _loss(self, E: Embeddings, task: Task, queries: np.ndarray, references: np.ndarray) -> torch.Tensor:
        head = self.regressor.sim_head
        zq = head.query_proj(take(E, task.rows[queries]).to(self.device))
        zr = head.ref_proj(take(E, task.rows[references]).to(self.device))
        place = np.searchsorted(references, queries).clip(max=len(references) - 1)
        exclude = torch.from_numpy(np.where(references[place] == queries, place, -1)).to(self.device)
        p, weight = task.p.to(self.device), task.weight.to(self.device)
        predicted = self.attend(zq, zr, p[references], weight[references], exclude)
        share = weight[queries] / weight[queries].sum()
        return (share * nn.functional.binary_cross_entropy(predicted, p[queries], reduction="none")).sum()

    def project(self, E: Embeddings) -> torch.Tensor:
        return self.project_queries(E)

    @torch.no_grad()
    def predict_projected(self, Z: torch.Tensor) -> torch.Tensor:
        if self.references is None or not len(self.references.p):
            raise PredictorError("The predictor has no references: call `fit` or `set_references` first.")
        return self.attend(Z, self.references.z, self.references.p, self.references.weight)

    def capacity(self, batch_groups: int) -> int:
        return ATTENDED

    def refit(self, groups: ObservedGroups, seed: int) -> bool:
        """Continue to fit the towers, if there are at least 32 groups."""
        if len(groups) < FEWEST:
            return False
        self.fit(groups.embeddings(), groups.p, groups.weight, seed=seed, epochs=ONLINE_EPOCHS)
        return True

    def update(self, groups: ObservedGroups) -> None:
        """Attend to these groups. Without any that has a weight above 0, nothing can be predicted."""
        if bool((groups.weight > 0).any()):
            self.set_references(groups.embeddings(), groups.p, groups.weight)
        else:
            self.references = None

    @torch.no_grad()
    def predict_pool(self, Z: torch.Tensor, groups: ObservedGroups) -> torch.Tensor:
        """Success rates `(N,)`; no prompt attends to its own group."""
        if self.references is None:
            raise PredictorError("The predictor has no references: call `update` with groups first.")
        exclude = torch.full((len(Z),), -1)
        exclude[groups.ids[groups.weight > 0]] = torch.arange(len(self.references.p))
        return self.attend(Z, *self.references, exclude.to(self.device))

    def settings(self) -> dict[str, Any]:
        return {"embedding_width": self.embedding_width, "width": self.width, "dropout": self.dropout}

    def tensors(self) -> dict[str, torch.Tensor]:
        references = {} if self.references is None else self.references._asdict()
        return {
            **self.state_dict(),
            **{f"references.{name}": value for name, value in references.items()},
        }

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.load_state_dict({name: value for name, value in tensors.items() if not name.startswith("references.")})
        self.references = None
        if "references.z" in tensors:
            given = References(*(tensors[f"references.{name}"].to(self.device) for name in References._fields))
            if given.z.shape != (len(given.p), self.width) or given.weight.shape != given.p.shape:
                raise ValueError("the shapes of its references disagree")
            self.references = given


class _Towers(nn.Module):
    def __init__(self, embedding_width: int, width: int, dropout: float):
        super().__init__()
        self.query_proj = _tower(embedding_width, width, dropout)
        self.ref_proj = _tower(embedding_width, width, dropout)
        self.ref_proj.load_state_dict(self.query_proj.state_dict())


class Regressor(nn.Module):
    def __init__(self, embedding_width: int, width: int, dropout: float):
        super().__init__()
        self.sim_head = _Towers(embedding_width, width, dropout)
        last = nn.Linear(10, 2)
        self.mlp = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), last)
        nn.init.zeros_(last.weight)
        with torch.no_grad():  # temperature softplus(log(e - 1)) = 1, bias tanh(0) = 0
            last.bias.copy_(torch.tensor([math.log(math.e - 1), 0.0]))


def _tower(embedding_width: int, width: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(embedding_width),
        nn.Linear(embedding_width, width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(width, width),
        nn.LayerNorm(width),
    )


def attention_average(
    zq: torch.Tensor,
    keys: torch.Tensor,
    log_weight: torch.Tensor,
    p_ref: torch.Tensor,
    exclude: torch.Tensor | None,
) -> torch.Tensor:
    """Attention averages of success rates: `(n, width) x (width, K) -> (n, K)`, `(n, K) x (K,) -> (n,)`."""
    scores = torch.addmm(log_weight, zq.float(), keys)
    if exclude is None:
        return torch.softmax(scores, dim=1) @ p_ref
    rows = torch.nonzero(exclude >= 0).squeeze(1)
    scores = scores.index_put((rows, exclude[rows]), scores.new_tensor(-math.inf))
    alone = scores.detach().amax(dim=1) == -math.inf
    if bool(alone.any()):
        scores = scores.masked_fill(alone[:, None], 0.0)
    return torch.where(alone, 0.5, torch.softmax(scores, dim=1) @ p_ref)


def weighted_moments(p: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean and unbiased deviation, scalars: with equal weights those of `torch.mean` and `torch.std`."""
    share = weight / weight.sum()
    mean = (share * p).sum()
    freedom = 1 - (share**2).sum()
    variance = (share * (p - mean) ** 2).sum() / freedom.clamp_min(1e-6)
    return mean, variance.sqrt()
