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
CLAMP = 1e-4  # bounds of the average success rate whose logit is taken
NO_REFERENCE = -1  # in the place of the index of a reference
ATTENDED = 512  # groups that a run attends to: a prediction of all prompts costs N times these

LEARNING_RATE = 1e-3
PATIENCE = 4  # epochs without an improvement after which fitting stops
QUERIES = 256  # groups predicted in a step, and references that they are predicted from
FEWEST_STEPS = 8  # of an epoch
MOST_STEPS = 32
HELD_OUT = 0.2  # share of the groups that decide when fitting stops
FEWEST_GROUPS = 32  # groups that the towers are fitted to
ONLINE_EPOCHS = 4  # of a fit in a run, which continues the last one


class References(NamedTuple):
    """
    Reference groups.

    Attributes:
        z (`torch.Tensor` of shape `(K, width)`): float32, projections of their prompts.
        p (`torch.Tensor` of shape `(K,)`): float32, success rates.
        weight (`torch.Tensor` of shape `(K,)`): float32, weights > 0.
    """

    z: torch.Tensor = torch.empty(0, 0, dtype=torch.float32)
    p: torch.Tensor = torch.empty(0, dtype=torch.float32)
    weight: torch.Tensor = torch.empty(0, dtype=torch.float32)


class TrainingBatch(NamedTuple):
    """
    What a step of fitting predicts, and from what.

    Attributes:
        task ([`Groups`]): groups of one policy.
        queries (`np.ndarray` of shape `(q,)`): int64, groups of the task that are predicted.
        references (`np.ndarray` of shape `(r,)`): int64, groups of the task that they are predicted from, ascending.
    """

    task: Groups
    queries: np.ndarray
    references: np.ndarray


class AttentionDifficultyPredictor(DifficultyPredictor, nn.Module):
    """
    The paper's predictor: attention over reference groups. Its parameters have the names of the authors' checkpoint.
    Before it is fitted, it averages the success rates of similar prompts: both towers are equal, and the calibration
    is the identity.

    Args:
        embedding_width (`int`): width h of the embeddings.
        width (`int`, *optional*, defaults to `896`): width of the projections.
        dropout (`float`, *optional*, defaults to `0.1`): dropout of the towers while they are fitted.
        seed (`int`, *optional*, defaults to `0`): seed of the initial parameters. The global random state is not
            changed.

    Attributes:
        references ([`References`]): groups that `predict` attends to, at first none; [`set_references`] sets them.
    """

    embedding_width: int = 0

    def __init__(self, embedding_width: int, width: int = 896, dropout: float = 0.1, seed: int = 0):
        super().__init__()
        self.embedding_width = embedding_width
        self.width = width
        self.dropout = dropout
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
        Predict queries from references, and calibrate the predictions.

        Args:
            zq (`torch.Tensor` of shape `(N, width)`): projections of the queries.
            references ([`References`]): K reference groups.
            exclude (`torch.Tensor` of shape `(N,)`, *optional*): int64, the reference that each query does not attend
                to, -1 for none.

        Returns:
            `torch.Tensor` of shape `(N,)`: float32 in (0, 1). A query without any reference left has 0.5 before the
                calibration, which takes the weighted mean and the unbiased weighted deviation of all references.
        """
        if exclude is None:
            exclude = torch.full((len(zq),), NO_REFERENCE)
        keys = references.z.T / math.sqrt(self.width)  # (width, K)
        log_weight = references.weight.log()  # (K,)
        averages = []
        size = max(1, SCORES // len(references.p))
        for queries, excluded in zip(zq.split(size), exclude.split(size), strict=True):
            scores = torch.addmm(log_weight, queries, keys)  # (K,) + (n, width) x (width, K) -> (n, K)
            attention, sees_none = _attention(scores, excluded)  # (n, K), (n,)
            averages.append(torch.where(sees_none, 0.5, attention @ references.p))
        return self._calibrate(torch.cat(averages), references)

    def _calibrate(self, averages: torch.Tensor, references: References) -> torch.Tensor:
        """Calibrated success rates `(N,)` from averages of the references' success rates `(N,)`."""
        mean, deviation = weighted_moments(references.p, references.weight)
        raw = self.regressor.mlp(torch.stack([mean, deviation]))  # (2,)
        temperature = nn.functional.softplus(raw[0]).clamp(0.01, 10)
        bias = torch.tanh(raw[1])
        return torch.sigmoid(torch.logit(averages, CLAMP) / temperature + bias)

    @torch.no_grad()
    def predict_projected(self, Z: torch.Tensor, groups: Groups | None = None) -> torch.Tensor:
        exclude = torch.full((len(Z),), NO_REFERENCE)
        if groups is not None:
            # References are the groups with a weight above 0, in their order
            referenced = groups.ids[groups.weight > 0]
            exclude[referenced] = torch.arange(len(self.references.p))
        return self.attend(Z, self.references, exclude)

    @torch.no_grad()
    def set_references(self, E: Embeddings, p: Values, weight: Values | None = None) -> None:
        """
        Set the groups that `predict` attends to, those with a weight above 0. Arguments and errors are those of
        [`fit`].
        """
        rates, weights = check_labels(E, self.embedding_width, p, weight)
        used = weights > 0
        z = self.regressor.sim_head["ref_proj"](take(E, np.arange(len(E))))
        self.references = References(z[used], rates[used], weights[used])

    def fit(self, E: Embeddings, p: Values, weight: Values | None = None, seed: int = 0, epochs: int = 20) -> None:
        """
        Continue to fit the towers, each group predicted from the others, and set the references. A fifth of the groups
        is held out. With fewer than 32 groups only the references change.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(n, h)`): embedding of each group's prompt.
            p (`torch.Tensor` or `np.ndarray` of shape `(n,)`): success rates in [0, 1]; NaN ones are left out.
            weight (`torch.Tensor` or `np.ndarray` of shape `(n,)`, *optional*): weights >= 0 of the groups; all 1 if
                not given.
            seed (`int`, *optional*, defaults to `0`): see [`fit_tasks`].
            epochs (`int`, *optional*, defaults to `20`): see [`fit_tasks`].

        Raises:
            PredictorError: shapes disagree, or values are out of range.
        """
        checked_rates, checked_weights = check_labels(E, self.embedding_width, p, weight)
        rates = checked_rates.numpy()
        weights = checked_weights.numpy()
        rows = np.flatnonzero(weights > 0)
        if len(rows) >= FEWEST_GROUPS:
            order = np.random.default_rng(seed).permutation(len(rows))
            num_held_out = int(len(rows) * HELD_OUT)
            held_out = np.zeros(len(E), dtype=bool)
            held_out[rows[order[:num_held_out]]] = True
            task = Groups(rows, rates[rows], weights[rows])
            self.fit_tasks(E, [task], held_out, seed, epochs)
        self.set_references(E, rates, weights)

    def fit_tasks(self, E: Embeddings, tasks: Sequence[Groups], held_out: np.ndarray, seed: int, epochs: int) -> None:
        """
        Fit the towers and the calibration by binary cross-entropy on success rates with Adam, learning rate 1e-3, from
        the present parameters on. Each group is predicted from the others of its task.

        An epoch draws each task's groups 256 at a time, in 8 to 32 steps. Fitting stops after `epochs`, or after 4
        without an improvement, and keeps the parameters with the lowest loss on held-out prompts.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts.
            tasks (`Sequence[Groups]`): each has the groups of one policy. Without any, nothing is done.
            held_out (`np.ndarray` of shape `(N,)`): bool, prompts that are not fitted to.
            seed (`int`): seed of the batches and of the dropout.
            epochs (`int`): most epochs.
        """
        if not tasks:
            return
        rng = np.random.default_rng(seed)
        optimizer = torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)
        lowest_loss = self.held_out_loss(E, tasks, held_out)
        best_parameters = copy.deepcopy(self.state_dict())
        epochs_without_improvement = 0
        with _own_random_state(seed):
            for _ in range(epochs):
                self._fit_epoch(E, _batches(tasks, held_out, rng), optimizer)
                loss = self.held_out_loss(E, tasks, held_out)
                if loss < lowest_loss:
                    lowest_loss = loss
                    best_parameters = copy.deepcopy(self.state_dict())
                    epochs_without_improvement = 0
                else:
                    epochs_without_improvement += 1
                if epochs_without_improvement == PATIENCE:
                    break
        self.load_state_dict(best_parameters)

    def _fit_epoch(self, E: Embeddings, batches: Sequence[TrainingBatch], optimizer: torch.optim.Optimizer) -> None:
        self.train()
        for batch in batches:
            loss = self.loss(E, batch.task, batch.queries, batch.references)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.eval()

    def loss(self, E: Embeddings, task: Groups, queries: np.ndarray, references: np.ndarray) -> torch.Tensor:
        """
        Weighted mean loss of some groups of a task, each predicted from the references other than itself.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts.
            task ([`Groups`]): groups of one policy.
            queries (`np.ndarray` of shape `(q,)`): int64, groups of the task that are predicted.
            references (`np.ndarray` of shape `(r,)`): int64, groups of the task that they are predicted from,
                ascending.

        Returns:
            `torch.Tensor`: the loss, a scalar.
        """
        p = torch.from_numpy(task.p)
        weight = torch.from_numpy(task.weight)
        query_tower = self.regressor.sim_head["query_proj"]
        reference_tower = self.regressor.sim_head["ref_proj"]
        zq = query_tower(take(E, task.ids[queries]))  # (q, width)
        zr = reference_tower(take(E, task.ids[references]))  # (r, width)
        exclude = torch.from_numpy(_positions(queries, references))
        predicted = self.attend(zq, References(zr, p[references], weight[references]), exclude)
        share = weight[queries] / weight[queries].sum()
        bce = nn.functional.binary_cross_entropy(predicted, p[queries], reduction="none")
        return (share * bce).sum()

    @torch.no_grad()
    def held_out_loss(self, E: Embeddings, tasks: Sequence[Groups], held_out: np.ndarray) -> float:
        """
        Weighted mean loss of the tasks' held-out groups, each predicted from those that are not.

        Args:
            E (`torch.Tensor` or `np.ndarray` of shape `(N, h)`): embeddings of all prompts.
            tasks (`Sequence[Groups]`): each has the groups of one policy.
            held_out (`np.ndarray` of shape `(N,)`): bool, prompts.

        Returns:
            `float`: the loss; 0 if no task has both kinds of groups.
        """
        total = 0.0
        total_weight = 0.0
        for task in tasks:
            is_held_out = held_out[task.ids]
            if is_held_out.any() and not is_held_out.all():
                queries = np.flatnonzero(is_held_out)
                references = np.flatnonzero(~is_held_out)
                weight = float(torch.from_numpy(task.weight[is_held_out]).sum())
                total += float(self.loss(E, task, queries, references)) * weight
                total_weight += weight
        return total / total_weight if total_weight else 0.0

    def capacity(self, batch_groups: int) -> int:
        return ATTENDED

    def refit(self, E: Embeddings, groups: Groups, seed: int) -> bool:
        """Continue to fit the towers, if there are at least 32 groups. See [`DifficultyPredictor.refit`]."""
        if len(groups.ids) < FEWEST_GROUPS:
            return False
        self.fit(take(E, groups.ids), groups.p, groups.weight, seed=seed, epochs=ONLINE_EPOCHS)
        return True

    def update(self, E: Embeddings, Z: torch.Tensor, groups: Groups) -> None:
        """
        Attend to these groups. Without any that has a weight above 0, nothing can be predicted. See
        [`DifficultyPredictor.update`].
        """
        self.set_references(take(E, groups.ids), groups.p, groups.weight)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = dict(self.state_dict())
        if self.fitted:
            for name, value in self.references._asdict().items():
                tensors[f"references.{name}"] = value
        return tensors

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        parameters = dict(tensors)
        references = {}
        for name in References._fields:
            if f"references.{name}" in parameters:
                references[name] = parameters.pop(f"references.{name}")
        self.load_state_dict(parameters)
        self.references = References(**references)


class Regressor(nn.Module):
    """
    Parameters of the predictor, by the names of the authors' checkpoint. Both towers begin equal, and the calibration
    as the identity.

    Args:
        embedding_width (`int`): width of the embeddings.
        width (`int`): width of the projections.
        dropout (`float`): dropout of the towers.
    """

    def __init__(self, embedding_width: int, width: int, dropout: float):
        super().__init__()
        query_tower = _tower(embedding_width, width, dropout)
        reference_tower = _tower(embedding_width, width, dropout)
        reference_tower.load_state_dict(query_tower.state_dict())
        self.sim_head = nn.ModuleDict({"query_proj": query_tower, "ref_proj": reference_tower})
        last = nn.Linear(10, 2, dtype=torch.float32)
        self.mlp = nn.Sequential(nn.Linear(2, 10, dtype=torch.float32), nn.ReLU(), last)
        nn.init.zeros_(last.weight)
        with torch.no_grad():  # temperature softplus(log(e - 1)) = 1, bias tanh(0) = 0
            last.bias.copy_(torch.tensor([math.log(math.e - 1), 0.0], dtype=torch.float32))


def _tower(embedding_width: int, width: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(embedding_width, dtype=torch.float32),
        nn.Linear(embedding_width, width, dtype=torch.float32),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(width, width, dtype=torch.float32),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(width, width, dtype=torch.float32),
        nn.LayerNorm(width, dtype=torch.float32),
    )


def _attention(scores: torch.Tensor, excluded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Attention of queries over references.

    Args:
        scores (`torch.Tensor` of shape `(n, K)`): of each query for each reference.
        excluded (`torch.Tensor` of shape `(n,)`): int64, the reference that each query does not attend to, -1 for
            none.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: attention `(n, K)`, each row with sum 1; and whether a query has no
            reference left, bool `(n,)`, so that its attention means nothing.
    """
    rows = torch.nonzero(excluded >= 0).squeeze(1)
    scores = scores.index_put((rows, excluded[rows]), scores.new_tensor(-math.inf))
    sees_none = scores.detach().amax(dim=1) == -math.inf
    # A softmax over scores that are all -inf would be NaN, also in the gradient
    finite = scores.masked_fill(sees_none[:, None], 0.0)
    return torch.softmax(finite, dim=1), sees_none


def _positions(queries: np.ndarray, references: np.ndarray) -> np.ndarray:
    """
    Where each query is among the references.

    Args:
        queries (`np.ndarray` of shape `(q,)`): int64, groups.
        references (`np.ndarray` of shape `(r,)`): int64, groups, ascending.

    Returns:
        `np.ndarray` of shape `(q,)`: int64 indices of `references`, -1 for a query that is not among them.
    """
    positions = np.searchsorted(references, queries).clip(max=len(references) - 1)
    is_reference = references[positions] == queries
    return np.where(is_reference, positions, NO_REFERENCE)


def weighted_moments(p: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Weighted mean and unbiased deviation: with equal weights those of `torch.mean` and `torch.std`.

    Args:
        p (`torch.Tensor` of shape `(K,)`): values.
        weight (`torch.Tensor` of shape `(K,)`): weights > 0.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: mean and deviation, scalars.
    """
    share = weight / weight.sum()
    mean = (share * p).sum()
    biased_variance = (share * (p - mean) ** 2).sum()
    freedom = 1 - (share**2).sum()
    variance = biased_variance / freedom.clamp_min(1e-6)  # 0 / 1e-6 with a single value
    return mean, variance.sqrt()


@contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Seed the CPU's random state inside the block; restore it afterwards."""
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed GPUs, too
        yield


def _batches(tasks: Sequence[Groups], held_out: np.ndarray, rng: np.random.Generator) -> list[TrainingBatch]:
    """
    Queries and references of an epoch. Each batch draws references of its own.

    Args:
        tasks (`Sequence[Groups]`): each has the groups of one policy.
        held_out (`np.ndarray` of shape `(N,)`): bool, prompts that are left out.
        rng (`np.random.Generator`): source of randomness.

    Returns:
        `list[TrainingBatch]`: in random order, at most 32.
    """
    batches: list[TrainingBatch] = []
    while len(batches) < FEWEST_STEPS:
        for task in tasks:
            groups = rng.permutation(np.flatnonzero(~held_out[task.ids]))
            for start in range(0, len(groups), QUERIES):
                references = rng.choice(groups, min(len(groups), QUERIES), replace=False)
                batches.append(TrainingBatch(task, groups[start : start + QUERIES], np.sort(references)))
    order = rng.permutation(len(batches))
    return [batches[i] for i in order[:MOST_STEPS]]
