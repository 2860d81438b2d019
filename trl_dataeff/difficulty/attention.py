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
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from trl_dataeff.difficulty.predictor import DifficultyPredictor, Embeddings, Groups, Values, check_labels, take


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


class AttentionDifficultyPredictor(DifficultyPredictor, nn.Module):
    """
    The paper's predictor: attention over reference groups. Its parameters have the names of the authors' checkpoint. Before it is
    fitted, it averages the success rates of similar prompts: both towers are equal, and the calibration is the identity.

    Args:
        embedding_width (`int`): width h of the embeddings.
        width (`int`, *optional*, defaults to `896`): width of the projections.
        dropout (`float`, *optional*, defaults to `0.1`): dropout of the towers while they are fitted.
        seed (`int`, *optional*, defaults to `0`): seed of the initial parameters. The global random state is not changed.

    Attributes:
        references ([`References`]): groups that `predict` attends to, at first none; [`set_references`] sets them.
    """

    embedding_width: int = 0

    def __init__(self, embedding_width: int, width: int = 896, dropout: float = 0.1, seed: int = 0):
        super().__init__()
        self.embedding_width, self.width, self.dropout = embedding_width, width, dropout
        self.references = References()
        with _own_random_state(seed):
            self.regressor = Regressor(embedding_width, width, dropout)
        self.eval()

    @property
    def fitted(self) -> bool:
        return len(self.references.p) > 0

    @torch.no_grad()
    def project_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self.regressor.sim_head["query_proj"](rows)

    def attend(self, zq: torch.Tensor, references: References, exclude: torch.Tensor | None = None) -> torch.Tensor:
        """
        Calibrated success rates of queries with projections `zq` `(N, width)`: `(N,)` in (0, 1). A query does not attend to the
        reference `exclude` (int64 `(N,)`, -1 for none); one without any reference left has 0.5 before calibration, which takes
        the weighted mean and the unbiased weighted deviation of all references.
        """
        exclude = torch.full((len(zq),), -1) if exclude is None else exclude
        keys, log_weight = references.z.T / math.sqrt(self.width), references.weight.log()
        averages = []
        n = max(1, SCORES // len(references.p))
        for queries, excluded in zip(zq.split(n), exclude.split(n), strict=True):
            scores = torch.addmm(log_weight, queries, keys)  # (n, width) x (width, K) -> (n, K)
            rows = torch.nonzero(excluded >= 0).squeeze(1)
            scores = scores.index_put((rows, excluded[rows]), scores.new_tensor(-math.inf))
            alone = scores.detach().amax(dim=1) == -math.inf
            attention = torch.softmax(scores.masked_fill(alone[:, None], 0.0), dim=1)
            averages.append(torch.where(alone, 0.5, attention @ references.p))
        out = self.regressor.mlp(torch.stack(weighted_moments(references.p, references.weight)))
        temperature = nn.functional.softplus(out[0]).clamp(0.01, 10)
        return torch.sigmoid(torch.logit(torch.cat(averages), CLAMP) / temperature + torch.tanh(out[1]))

    @torch.no_grad()
    def predict_projected(self, Z: torch.Tensor, groups: Groups | None = None) -> torch.Tensor:
        exclude = torch.full((len(Z),), -1)
        if groups is not None:
            exclude[groups.ids[groups.weight > 0]] = torch.arange(len(self.references.p))
        return self.attend(Z, self.references, exclude)

    @torch.no_grad()
    def set_references(self, E: Embeddings, p: Values, weight: Values | None = None) -> None:
        """Set the groups that `predict` attends to, those with a weight above 0. Arguments and errors are those of [`fit`]."""
        rates, weights = check_labels(E, self.embedding_width, p, weight)
        used = weights > 0
        z = self.regressor.sim_head["ref_proj"](take(E, np.arange(len(E))))
        self.references = References(z[used], rates[used], weights[used])

    def fit(self, E: Embeddings, p: Values, weight: Values | None = None, seed: int = 0, epochs: int = 20) -> None:
        """
        Continue to fit the towers, each group predicted from the others, and set the references. A fifth of the groups is held
        out. With fewer than 32 groups only the references change. See [`DifficultyPredictor.fit`], and [`fit_tasks`] for
        `seed` and `epochs`.
        """
        rates, weights = (value.numpy() for value in check_labels(E, self.embedding_width, p, weight))
        rows = np.flatnonzero(weights > 0)
        if len(rows) >= FEWEST:
            held_out = np.zeros(len(E), dtype=bool)
            held_out[rows[np.random.default_rng(seed).permutation(len(rows))[: int(len(rows) * HELD_OUT)]]] = True
            self.fit_tasks(E, [Groups(rows, rates[rows], weights[rows])], held_out, seed, epochs)
        self.set_references(E, rates, weights)

    def fit_tasks(self, E: Embeddings, tasks: Sequence[Groups], held_out: np.ndarray, seed: int, epochs: int) -> None:
        """
        Fit the towers and the calibration by binary cross-entropy on success rates with Adam, learning rate 1e-3, from the
        present parameters on. Each group is predicted from the others of its task, which has the groups of one policy.

        An epoch draws each task's groups 256 at a time, in 8 to 32 steps. Fitting stops after `epochs`, or after 4 without an
        improvement, and keeps the parameters with the lowest loss on `held_out` prompts (bool `(N,)`).
        """
        if not tasks:
            return
        rng = np.random.default_rng(seed)
        optimizer = torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)
        best, kept, waited = self.held_out_loss(E, tasks, held_out), copy.deepcopy(self.state_dict()), 0
        with _own_random_state(seed):
            for _ in range(epochs):
                self.train()
                for batch in _batches(tasks, held_out, rng):
                    loss = self.loss(E, *batch)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                self.eval()
                now, waited = self.held_out_loss(E, tasks, held_out), waited + 1
                if now < best:
                    best, kept, waited = now, copy.deepcopy(self.state_dict()), 0
                if waited == PATIENCE:
                    break
        self.load_state_dict(kept)

    def loss(self, E: Embeddings, task: Groups, queries: np.ndarray, references: np.ndarray) -> torch.Tensor:
        """Weighted mean loss of a task's groups `queries` `(q,)`, each predicted from the others of `references` `(r,)`, ascending."""
        towers, p, weight = self.regressor.sim_head, torch.from_numpy(task.p), torch.from_numpy(task.weight)
        zq, zr = towers["query_proj"](take(E, task.ids[queries])), towers["ref_proj"](take(E, task.ids[references]))
        place = np.searchsorted(references, queries).clip(max=len(references) - 1)
        exclude = torch.from_numpy(np.where(references[place] == queries, place, -1))
        predicted = self.attend(zq, References(zr, p[references], weight[references]), exclude)
        share = weight[queries] / weight[queries].sum()
        return (share * nn.functional.binary_cross_entropy(predicted, p[queries], reduction="none")).sum()

    @torch.no_grad()
    def held_out_loss(self, E: Embeddings, tasks: Sequence[Groups], held_out: np.ndarray) -> float:
        """Weighted mean loss of the tasks' held-out groups, each predicted from those that are not; 0 without any."""
        total = weights = 0.0
        for task in tasks:
            out = held_out[task.ids]
            if out.any() and not out.all():
                weight = float(torch.from_numpy(task.weight[out]).sum())
                total += float(self.loss(E, task, np.flatnonzero(out), np.flatnonzero(~out))) * weight
                weights += weight
        return total / weights if weights else 0.0

    def capacity(self, batch_groups: int) -> int:
        return ATTENDED

    def refit(self, E: Embeddings, groups: Groups, seed: int) -> bool:
        """Continue to fit the towers, if there are at least 32 groups."""
        if len(groups.ids) < FEWEST:
            return False
        self.fit(take(E, groups.ids), groups.p, groups.weight, seed=seed, epochs=ONLINE_EPOCHS)
        return True

    def update(self, E: Embeddings, Z: torch.Tensor, groups: Groups) -> None:
        """Attend to these groups. Without any that has a weight above 0, nothing can be predicted."""
        self.set_references(take(E, groups.ids), groups.p, groups.weight)

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


def _batches(
    tasks: Sequence[Groups], held_out: np.ndarray, rng: np.random.Generator
) -> list[tuple[Groups, np.ndarray, np.ndarray]]:
    """Queries and references of an epoch. Each batch draws references of its own."""
    batches: list[tuple[Groups, np.ndarray, np.ndarray]] = []
    while len(batches) < FEWEST_STEPS:
        for task in tasks:
            groups = rng.permutation(np.flatnonzero(~held_out[task.ids]))
            for start in range(0, len(groups), QUERIES):
                references = rng.choice(groups, min(len(groups), QUERIES), replace=False)
                batches.append((task, groups[start : start + QUERIES], np.sort(references)))
    return [batches[i] for i in rng.permutation(len(batches))[:MOST_STEPS]]
