"""Groups of completions, and embeddings from which difficulty can be predicted, made without a model."""

import numpy as np
import torch

from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.group import EFFECTIVE, RolloutGroup, Rollouts


def make_group(prompt_id=3, g=2, **fields) -> RolloutGroup:
    """A group with everything that it can carry; `fields` replace those of the group and of its rollouts."""
    parts = {
        "prompt_tokens": np.array([5, 6, 7], dtype=np.int32),
        "completion_tokens": [np.arange(i + 1, dtype=np.int32) for i in range(g)],
        "completions": [f"text {i} ä" for i in range(g)],
    }
    parts.update({name: fields.pop(name) for name in list(fields) if name in Rollouts.__dataclass_fields__})
    rollouts = Rollouts(**parts)
    values = {
        "prompt_id": prompt_id,
        "step": 4,
        "round": 1,
        "rewards": np.array([[0.5], [np.nan]], dtype=np.float32)[:g],
        "totals": np.array([0.5, np.nan], dtype=np.float32)[:g],
        "success_rate": 0.5,
        "kind": EFFECTIVE,
        "lengths": np.arange(1, g + 1, dtype=np.int32),
        "truncated": np.arange(g) % 2 == 1,
        "owner": 1,
    }
    return RolloutGroup(**{**values, **fields}, rollouts=rollouts)


def visit(prompt_id: int, kind: int, step: int = 0, rate: float = 0.5) -> RolloutGroup:
    """A group without rollouts, as buffers and selectors observe it."""
    totals = np.full(2, rate, dtype=np.float32)
    return RolloutGroup(prompt_id, step, 0, totals[:, None], totals, rate, kind, np.array([3, 4]), np.zeros(2, bool))


def classified(
    ids: np.ndarray, rewards: np.ndarray, classifier: GroupClassifier, is_reference: bool = False
) -> list[RolloutGroup]:
    """Groups of prompts `ids` with these rewards `(n, G, F)`, as the collector makes them."""
    lengths = np.full(rewards.shape[:2], 5, dtype=np.int32)
    truncated = np.zeros_like(lengths, bool)
    return classifier.groups(ids, rewards, lengths, truncated, step=0, round=0, is_reference=is_reference)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def difficulty_problem(n: int, h: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of low rank with a mean of their own, `(n, h)`, and success rates of 8 completions, `(n,)`."""
    rng = generator(seed)
    latent = torch.randn(n, 6, generator=rng) * torch.linspace(2, 0.5, 6)
    E = latent @ torch.randn(6, h, generator=generator(1)) + 5 * torch.randn(h, generator=generator(2))
    E = E + 0.05 * torch.randn(n, h, generator=rng)
    chance = torch.sigmoid(1.5 * latent[:, 0] - latent[:, 1])
    return E, torch.binomial(torch.full((n,), 8.0), chance, generator=rng) / 8
