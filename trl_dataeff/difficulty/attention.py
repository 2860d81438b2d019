r"""
`AttentionDifficultyPredictor`: attention over reference groups (arXiv 2506.05316, section 3.2).

    z = LayerNorm(MLP(LayerNorm(e)))                 two towers: one for queries, one for reference groups
    p~ = sum_i a_i p_i,   a = softmax_i(z_q . z_i / sqrt(width))
    p = sigmoid(logit(p~) / temperature + bias)      temperature and bias from the mean and deviation of all p_i
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from trl_dataeff.difficulty.predictor import (
    DifficultyPredictor,
    Embeddings,
    ObservedGroups,
    Values,
    check_labels,
    check_width,
    project_rows,
    take,
)


SCORES = 2**23  # attention scores that are held at a time
CLAMP = 1e-4
ATTENDED = 512  # groups that a run attends to: a prediction of all prompts costs N times these

LEARNING_RATE = 1e-3
PATIENCE = 4
QUERIES = 256  # groups predicted in a step, and references that they are predicted from
FEWEST_STEPS, MOST_STEPS = 8, 32  # of an epoch
HELD_OUT = 0.2
FEWEST = 32  # groups that the towers are fitted to
ONLINE_EPOCHS = 4  # of a fit in a run, which continues the last one


class References(NamedTuple):
    """Reference groups: projections `z` `(K, width)`, success rates `p` `(K,)`, weights `weight` > 0 `(K,)`; float32."""

    z: torch.Tensor = torch.empty(0, 0)
    p: torch.Tensor = torch.empty(0)
    weight: torch.Tensor = torch.empty(0)


class Task(NamedTuple):
    """
    Groups of one policy, each of another prompt. Each group is predicted from the others.

    Attributes:
        rows (`np.ndarray` of shape `(n,)`): row of each group's embedding.
        p (`torch.Tensor` of shape `(n,)`): success rates in [0, 1].
        weight (`torch.Tensor` of shape `(n,)`): weights > 0.
        held_out (`np.ndarray` of shape `(n,)` and dtype bool): groups that decide when to stop. The network is neither
            fitted to them nor predicts from them.
    """

    rows: np.ndarray
    p: torch.Tensor
    weight: torch.Tensor
    held_out: np.ndarray


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
        references ([`References`]): groups that `predict` attends to, at first none; [`set_references`] sets them.
    """

    def __init__(self, embedding_width: int, width: int = 896, dropout: float = 0.1, seed: int = 0):
        super().__init__()
        self._embedding_width, self.width, self.dropout = embedding_width, width, dropout
        self.references = References()
        with _own_random_state(seed):
            self.regressor = Regressor(embedding_width, width, dropout)
        self.eval()

    @property
    def fitted(self) -> bool:
        return len(self.references.p) > 0

    @property
    def embedding_width(self) -> int:
        return self._embedding_width

    def project(self, E: Embeddings) -> torch.Tensor:
        """Projections, float32 `(N, width)`, of prompts to predict, from embeddings `(N, h)`."""
        return self._project("query_proj", E)

    def project_references(self, E: Embeddings) -> torch.Tensor:
        """Projections, float32 `(K, width)`, of reference prompts, from embeddings `(K, h)`."""
        return self._project("ref_proj", E)

    @torch.no_grad()
    def _project(self, tower: str, E: Embeddings) -> torch.Tensor:
        return project_rows(E, self.embedding_width, self.regressor.sim_head[tower], self.width)

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
                the references; K > 0.
            p_ref (`torch.Tensor` of shape `(K,)`): success rates of the references in [0, 1].
            weight (`torch.Tensor` of shape `(K,)`, *optional*): factors >= 0 of the references' attention, not all 0.
            exclude (`torch.Tensor` of shape `(N,)`, *optional*): int64, the reference that a query may not attend to;
                -1 for none.
        """
        weight = torch.ones_like(p_ref) if weight is None else weight
        exclude = torch.full((len(zq),), -1) if exclude is None else exclude
        keys, log_weight = zr.T / math.sqrt(zr.shape[1]), weight.log()
        rows = max(1, SCORES // len(p_ref))
        averages = torch.cat(
            [
                attention_average(queries, keys, log_weight, p_ref, excluded)
                for queries, excluded in zip(zq.split(rows), exclude.split(rows), strict=True)
            ]
        )
        out = self.regressor.mlp(torch.stack(weighted_moments(p_ref, weight)))
        temperature = nn.functional.softplus(out[0]).clamp(0.01, 10)
        return torch.sigmoid(torch.logit(averages, CLAMP) / temperature + torch.tanh(out[1]))

    @torch.no_grad()
    def predict_projected(self, Z: torch.Tensor, groups: ObservedGroups | None = None) -> torch.Tensor:
        exclude = torch.full((len(Z),), -1)
        if groups is not None:
            exclude[groups.ids[groups.weight > 0]] = torch.arange(len(self.references.p))
        return self.attend(Z, *self.references, exclude)

    def set_references(self, E: Embeddings, p: Values, weight: Values | None = None) -> None:
        """
        Set the groups that `predict` attends to, those with a weight above 0. Arguments and errors are those of [`fit`]. The
        towers do not change.
        """
        rates, weights = check_labels(E, p, weight)
        z, used = self.project_references(E), weights > 0
        self.references = References(z[used], rates[used], weights[used])

    def fit(self, E: Embeddings, p: Values, weight: Values | None = None, seed: int = 0, epochs: int = 20) -> None:
        """
        Continue to fit the towers, each group predicted from the others, and set the references. A fifth of the groups is held
        out. With fewer than 32 groups only the references change. See [`DifficultyPredictor.fit`] and [`fit_tasks`].

        Args:
            seed (`int`, *optional*, defaults to `0`): seed of the held-out groups, the batches and dropout.
            epochs (`int`, *optional*, defaults to `20`): maximum number of epochs.
        """
        check_width(E, self.embedding_width)
        rates, weights = check_labels(E, p, weight)
        rows = np.flatnonzero(weights > 0)
        if len(rows) >= FEWEST:
            held_out = np.zeros(len(rows), dtype=bool)
            held_out[np.random.default_rng(seed).permutation(len(rows))[: int(len(rows) * HELD_OUT)]] = True
            self.fit_tasks(E, [Task(rows, rates[rows], weights[rows], held_out)], seed, epochs)
        self.set_references(E, p, weight)

    def fit_tasks(self, E: Embeddings, tasks: Sequence[Task], seed: int, epochs: int) -> None:
        """
        Fit the towers and the calibration by binary cross-entropy on success rates with Adam, learning rate 1e-3, from the
        present parameters on.

        An epoch draws each task's groups 256 at a time, in 8 to 32 steps. The parameters with the lowest loss on held-out
        groups are kept, the initial ones included. Fitting stops after 4 epochs without an improvement.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings, which the tasks' rows index.
            tasks (sequence of [`Task`]): without any, nothing happens.
            seed (`int`): of the batches and of dropout.
            epochs (`int`): maximum number of epochs.
        """
        if not tasks:
            return
        rng = np.random.default_rng(seed)
        optimizer = torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)
        best, kept, waited = self.held_out_loss(E, tasks), copy.deepcopy(self.state_dict()), 0
        with _own_random_state(seed):
            for _ in range(epochs):
                self.train()
                for batch in _batches(tasks, rng):
                    loss = self.loss(E, *batch)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                self.eval()
                now = self.held_out_loss(E, tasks)
                waited += 1
                if now < best:
                    best, kept, waited = now, copy.deepcopy(self.state_dict()), 0
                if waited == PATIENCE:
                    break
        self.load_state_dict(kept)

    def loss(self, E: Embeddings, task: Task, queries: np.ndarray, references: np.ndarray) -> torch.Tensor:
        """
        Weighted mean loss, a scalar, of a task's groups `queries` `(q,)`, each predicted from its groups `references` `(r,)`,
        ascending, other than itself.
        """
        towers = self.regressor.sim_head
        zq, zr = towers["query_proj"](take(E, task.rows[queries])), towers["ref_proj"](take(E, task.rows[references]))
        place = np.searchsorted(references, queries).clip(max=len(references) - 1)
        exclude = torch.from_numpy(np.where(references[place] == queries, place, -1))
        predicted = self.attend(zq, zr, task.p[references], task.weight[references], exclude)
        share = task.weight[queries] / task.weight[queries].sum()
        return (share * nn.functional.binary_cross_entropy(predicted, task.p[queries], reduction="none")).sum()

    @torch.no_grad()
    def held_out_loss(self, E: Embeddings, tasks: Sequence[Task]) -> float:
        """Weighted mean loss of the tasks' held-out groups, each predicted from those that are not; 0 without any."""
        total = weights = 0.0
        for task in tasks:
            queries, references = np.flatnonzero(task.held_out), np.flatnonzero(~task.held_out)
            if len(queries) and len(references):
                weight = float(task.weight[queries].sum())
                total += float(self.loss(E, task, queries, references)) * weight
                weights += weight
        return total / weights if weights else 0.0

    def capacity(self, batch_groups: int) -> int:
        return ATTENDED

    def refit(self, E: Embeddings, groups: ObservedGroups, seed: int) -> bool:
        """Continue to fit the towers, if there are at least 32 groups."""
        if len(groups.ids) < FEWEST:
            return False
        self.fit(take(E, groups.ids), groups.p, groups.weight, seed=seed, epochs=ONLINE_EPOCHS)
        return True

    def update(self, E: Embeddings, Z: torch.Tensor, groups: ObservedGroups) -> None:
        """Attend to these groups. Without any that has a weight above 0, nothing can be predicted."""
        self.set_references(take(E, groups.ids), groups.p, groups.weight)

    def settings(self) -> dict[str, Any]:
        return {"embedding_width": self.embedding_width, "width": self.width, "dropout": self.dropout}

    def tensors(self) -> dict[str, torch.Tensor]:
        references = {f"references.{name}": value for name, value in self.references._asdict().items()}
        return self.state_dict() | (references if self.fitted else {})

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        stored = {f"references.{name}": name for name in References._fields}
        self.load_state_dict({name: value for name, value in tensors.items() if name not in stored})
        self.references = References(**{stored[name]: value for name, value in tensors.items() if name in stored})


class Regressor(nn.Module):
    def __init__(self, embedding_width: int, width: int, dropout: float):
        super().__init__()
        self.sim_head = nn.ModuleDict(
            {name: _tower(embedding_width, width, dropout) for name in ("query_proj", "ref_proj")}
        )
        self.sim_head["ref_proj"].load_state_dict(self.sim_head["query_proj"].state_dict())
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
    zq: torch.Tensor, keys: torch.Tensor, log_weight: torch.Tensor, p_ref: torch.Tensor, exclude: torch.Tensor
) -> torch.Tensor:
    """Attention averages of success rates: `(n, width) x (width, K) -> (n, K)`, `(n, K) x (K,) -> (n,)`."""
    scores = torch.addmm(log_weight, zq, keys)
    rows = torch.nonzero(exclude >= 0).squeeze(1)
    scores = scores.index_put((rows, exclude[rows]), scores.new_tensor(-math.inf))
    alone = scores.detach().amax(dim=1) == -math.inf
    scores = scores.masked_fill(alone[:, None], 0.0)
    return torch.where(alone, 0.5, torch.softmax(scores, dim=1) @ p_ref)


def weighted_moments(p: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean and unbiased deviation, scalars: with equal weights those of `torch.mean` and `torch.std`."""
    share = weight / weight.sum()
    mean = (share * p).sum()
    freedom = 1 - (share**2).sum()
    variance = (share * (p - mean) ** 2).sum() / freedom.clamp_min(1e-6)
    return mean, variance.sqrt()


@contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Seed the CPU's random state inside the block; restore it afterwards."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed GPUs, too
        yield


def _batches(tasks: Sequence[Task], rng: np.random.Generator) -> list[tuple[Task, np.ndarray, np.ndarray]]:
    """Queries and references of an epoch. Each batch draws references of its own."""
    batches: list[tuple[Task, np.ndarray, np.ndarray]] = []
    while len(batches) < FEWEST_STEPS:
        for task in tasks:
            groups = rng.permutation(np.flatnonzero(~task.held_out))
            for start in range(0, len(groups), QUERIES):
                references = rng.choice(groups, min(len(groups), QUERIES), replace=False)
                batches.append((task, groups[start : start + QUERIES], np.sort(references)))
    return [batches[i] for i in rng.permutation(len(batches))[:MOST_STEPS]]
