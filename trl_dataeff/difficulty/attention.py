r"""
`AttentionDifficultyPredictor`: attention over reference groups (arXiv 2506.05316, section 3.2).

    z = LayerNorm(MLP(LayerNorm(e)))                 two towers: one for queries, one for references
    p~ = sum_i a_i p_i,   a = softmax_i(z_q . z_i / sqrt(width))
    p = sigmoid(logit(p~) / temperature + bias)      temperature and bias from the mean and deviation of all p_i
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trl_dataeff.difficulty.base import (
    DifficultyPredictor,
    Embeddings,
    PredictorError,
    check_labels,
    check_width,
    chunks,
)


SCORES = 2**23  # attention scores that are held at a time
CLAMP = 1e-4


class References(NamedTuple):
    """Reference groups: projections `z` `(K, width)`, success rates `p` `(K,)`, weights `weight` `(K,)`; float32."""

    z: torch.Tensor
    p: torch.Tensor
    weight: torch.Tensor


class AttentionDifficultyPredictor(DifficultyPredictor, nn.Module):
    """
    The paper's predictor. Its parameters have the names that the paper's authors gave them. Before it is fitted both
    towers are the same and the calibration changes nothing: it averages what resembles the query.

    Args:
        embedding_width (`int`): width h of the embeddings.
        width (`int`, *optional*, defaults to `896`): width of the projections.
        dropout (`float`, *optional*, defaults to `0.1`): dropout of the towers, while they are fitted.
        seed (`int`, *optional*, defaults to `0`): of the first parameters; the global random state is left alone.

    Attributes:
        references ([`References`] or `None`): the groups that `predict` attends to; [`set_references`] changes them.
    """

    def __init__(self, embedding_width: int, width: int = 896, dropout: float = 0.1, seed: int = 0):
        super().__init__()
        self._embedding_width, self.width, self.dropout = embedding_width, width, dropout
        self.references: References | None = None
        with own_random_state(seed):
            self.regressor = _Regressor(embedding_width, width, dropout)
        self.eval()

    @classmethod
    def from_published(cls, path: str | Path) -> AttentionDifficultyPredictor:
        """Read a checkpoint of the paper's authors; see [`~trl_dataeff.difficulty.published.read_published`]."""
        from trl_dataeff.difficulty.published import read_published

        return read_published(path)

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
        """Float32 `(N, width)` from embeddings `(N, h)`: of prompts whose success rate is wanted."""
        return self._project(self.regressor.sim_head.query_proj, E)

    def project_references(self, E: Embeddings) -> torch.Tensor:
        """Float32 `(K, width)` from embeddings `(K, h)`: of prompts whose success rate is known."""
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
        Calibrated success rates of queries. Without `weight` and `exclude` these are the published predictions.

        The calibration sees the mean and the unbiased deviation of all references, weighted as they are; of a single
        one the deviation is 0. A query that is left without a reference counts as 0.5 before calibration.

        Args:
            zq (`torch.Tensor` of shape `(N, width)`): projections of the queries.
            zr (`torch.Tensor` of shape `(K, width)`): projections of the references.
            p_ref (`torch.Tensor` of shape `(K,)`): their success rates in [0, 1].
            weight (`torch.Tensor` of shape `(K,)`, *optional*): factors >= 0 of the references' attention, not all 0.
            exclude (`torch.Tensor` of shape `(N,)`, *optional*): int64, the reference that a query may not attend to;
                -1 for none.

        Returns:
            `torch.Tensor` of shape `(N,)`: in (0, 1).
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
            _attended(zq[i : i + rows], keys, log_weight, p_ref, None if exclude is None else exclude[i : i + rows])
            for i in range(0, len(zq), rows)
        ]
        mean, deviation = _moments(p_ref, weight)
        out = self.regressor.mlp(torch.stack([mean, deviation]))
        temperature = nn.functional.softplus(out[0]).clamp(0.01, 10)
        averages = torch.cat([zq.new_empty(0, dtype=torch.float32), *pieces])
        return torch.sigmoid(torch.logit(averages, CLAMP) / temperature + torch.tanh(out[1]))

    def set_references(self, E: Embeddings, p: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Attend to these groups from now on; the towers stay as they are. Arguments as of [`fit`]."""
        p, weight = check_labels(E, p, weight)
        z = self.project_references(E)
        used = weight > 0
        self.references = References(z[used], p[used].to(self.device), weight[used].to(self.device))

    def fit(
        self, E: Embeddings, p: torch.Tensor, weight: torch.Tensor | None = None, seed: int = 0, epochs: int = 20
    ) -> None:
        """
        Go on fitting the towers, leave-one-out: each group is predicted from all others, see
        [`~trl_dataeff.difficulty.training.train`]. Fewer than 32 groups change nothing but the references.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(n, h)`): embedding of each group's prompt.
            p (`torch.Tensor` of shape `(n,)`): success rates in [0, 1]; NaN ones are left out.
            weight (`torch.Tensor` of shape `(n,)`, *optional*): weights >= 0; all 1 if not given.
            seed (`int`, *optional*, defaults to `0`): of the held-out groups, the batches and dropout.
            epochs (`int`, *optional*, defaults to `20`): at most as many.
        """
        from trl_dataeff.difficulty.training import leave_one_out, train

        check_width(E, self.embedding_width)
        rates, weights = check_labels(E, p, weight)
        train(self, E, leave_one_out(rates, weights, seed), seed, epochs)
        self.set_references(E, p, weight)

    def project(self, E: Embeddings) -> torch.Tensor:
        return self.project_queries(E)

    @torch.no_grad()
    def predict_projected(self, Z: torch.Tensor) -> torch.Tensor:
        if self.references is None or not len(self.references.p):
            raise PredictorError("The predictor has no references: call `fit` or `set_references` first.")
        return self.attend(Z, self.references.z, self.references.p, self.references.weight)

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


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Seeds the random state within, and gives the former one back."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


class _Towers(nn.Module):
    def __init__(self, embedding_width: int, width: int, dropout: float):
        super().__init__()
        self.query_proj = _tower(embedding_width, width, dropout)
        self.ref_proj = _tower(embedding_width, width, dropout)
        self.ref_proj.load_state_dict(self.query_proj.state_dict())


class _Regressor(nn.Module):
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


def _attended(
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


def _moments(p: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean and unbiased deviation, scalars: with equal weights those of `torch.mean` and `torch.std`."""
    share = weight / weight.sum()
    mean = (share * p).sum()
    freedom = 1 - (share**2).sum()
    variance = (share * (p - mean) ** 2).sum() / freedom.clamp_min(1e-6)
    return mean, variance.sqrt()
