"""Embeddings and success rates from which difficulty can be predicted."""

import torch


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
