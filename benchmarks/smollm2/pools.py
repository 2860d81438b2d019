"""The three pools, by how much of them the model can learn, and the questions to measure with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from benchmarks.smollm2.questions import LEARNABLE, UNSOLVABLE, Question, questions


HELD_OUT_OF_A_KIND = 20
HELD_OUT_SEED = 10_000


@dataclass(frozen=True)
class Pool:
    """`size` questions, a share of them unsolvable, the others of the kinds `learnable`, each as many."""

    unsolvable: float
    learnable: tuple[str, ...] = tuple(LEARNABLE)
    size: int = 384

    def counts(self) -> dict[str, int]:
        """Questions of each kind."""
        unsolvable = round(self.unsolvable * self.size)
        return {
            **_split(self.size - unsolvable, self.learnable),
            **_split(unsolvable, tuple(UNSOLVABLE)),
        }


POOLS = {
    "mixed": Pool(unsolvable=1 / 3),
    "unsolvable": Pool(unsolvable=0.7),
    "learnable": Pool(unsolvable=0.0),
}


def _split(n: int, kinds: tuple[str, ...]) -> dict[str, int]:
    return {kind: n // len(kinds) + (i < n % len(kinds)) for i, kind in enumerate(kinds)}


@cache
def held_out() -> list[Question]:
    """As many questions of each learnable kind; in no pool."""
    return questions(dict.fromkeys(LEARNABLE, HELD_OUT_OF_A_KIND), HELD_OUT_SEED)


def training_questions(pool: Pool, seed: int) -> list[Question]:
    """The pool's questions for `seed`, in random order."""
    return questions(pool.counts(), seed, frozenset(q.prompt for q in held_out()))
