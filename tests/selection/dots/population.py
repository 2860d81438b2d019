"""Simulated prompts whose difficulty can be read from their embeddings, and runs of selectors over them."""

import numpy as np

from tests.factories.groups import classified, generator
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.selection import Selector, make_selector
from trl_dataeff.selection.base import SelectorContext


SIZE = 400
EVERYTHING = np.arange(SIZE)
GROUP_SIZE = 8
BATCH = 16


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


class Population:
    """400 prompts whose success rate `p` is a function of their embedding, 70 % of them unsolvable; groups of 8."""

    weights = np.ones(1)

    def __init__(self, name: str, known_range=(), known_rates=None, kinds=None, **arguments):
        """
        A run of the selector `name`. `known_range`: total rewards that are known before the run; `known_rates` and
        `kinds`: those of [`SelectorContext`].
        """
        self.known_rates = known_rates
        self.kinds = kinds
        self.rng = np.random.default_rng(0)
        self.draws = generator()
        self.embeddings = self.rng.normal(size=(SIZE, 12)).astype(np.float16)
        score = 3.0 * self.embeddings[:, 0].astype(float)
        self.p = sigmoid((score - np.quantile(score, 0.7)) * 3)
        self.classifier = GroupClassifier(self.weights)
        self.classifier.scale.observe(np.array(known_range))
        self.seen = np.zeros(SIZE, dtype=bool)
        self.selector = self.another(name, **arguments)

    def another(self, name: str, **arguments) -> Selector:
        """Another selector of the same run."""
        selector = make_selector(name, arguments)
        context = SelectorContext(
            SIZE,
            BATCH,
            group_size=GROUP_SIZE,
            seed=42,
            embed=lambda: self.embeddings,
            scale=self.classifier.scale,
            known_rates=self.known_rates,
            kinds=self.kinds,
        )
        selector.bind(context)
        return selector

    def rewards(self, ids) -> np.ndarray:
        """Rewards of new completions, `(n, 8, 1)`."""
        p = self.p[ids, None, None]
        right = self.rng.random((len(ids), GROUP_SIZE, 1)) < p
        return np.where(np.isnan(p), np.nan, right).astype(np.float32)

    def observe(self, ids, penalty=0.0, is_reference=False):
        """Generate and observe groups of `ids`; `penalty` is added to a single reward."""
        rewards = self.rewards(ids)
        rewards[0, 0, 0] += penalty
        groups = classified(ids, rewards, self.classifier, is_reference=is_reference)
        self.seen[ids] = True
        self.selector.observe(groups)
        return groups

    def batch(self, n=BATCH, penalty=0.0):
        """A generation batch of n groups."""
        ids = self.selector.propose(n, self.draws)
        return self.observe(ids, penalty)


def share_effective(population: Population, batches: int, since: int, penalty=0.0) -> float:
    """Of the groups from batch `since` on; `penalty` is added to one reward of the batch before."""
    effective = []
    for i in range(batches):
        groups = population.batch(penalty=penalty if i == since - 1 else 0.0)
        if i >= since:
            effective += [group.effective for group in groups]
    return np.mean(effective)
