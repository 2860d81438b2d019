"""
The pools: four of short questions, by how much of them the model can learn and how many there are, and two of
reasoning-gym's tasks, with short answers and with worked solutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from benchmarks.lab.evaluate import success
from benchmarks.lab.tasks import Task
from benchmarks.lab.train import columns
from benchmarks.smollm2.gym import Gym
from benchmarks.smollm2.questions import END_OF_LINE, LEARNABLE, UNSOLVABLE, Question, questions
from benchmarks.smollm2.worked import SeveralWorked, Worked


HELD_OUT_OF_A_KIND = 20
HELD_OUT_SEED = 10_000


@dataclass(frozen=True)
class Pool:
    """`size` questions, a share of them unsolvable, the others of the kinds `learnable`, each as many."""

    unsolvable: float
    learnable: tuple[str, ...] = tuple(LEARNABLE)
    size: int = 384
    max_completion: ClassVar[int] = 5  # tokens
    end: ClassVar[str] = END_OF_LINE  # the token that ends a completion
    micro_batch: ClassVar[int | None] = None  # rows; None: those of a step
    temperature: ClassVar[float] = 1.0
    generates: ClassVar[None] = None  # by Transformers

    def rows(self, seed: int, tokenizer) -> list[dict[str, Any]]:
        """The dataset to train on."""
        rows = []
        for question in training_questions(self, seed):
            right = [*tokenizer(question.answer)["input_ids"], tokenizer.eos_token_id]
            rows.append({"prompt": question.prompt, "kind": question.kind, "right": right})
        return rows

    @staticmethod
    def reward(
        completions: list[str], completion_ids: list[list[int]], right: list[list[int]], **columns: Any
    ) -> list[float]:
        """1 for the tokens of the right answer and the end of its line, else 0, as a reward function of TRL.

        Texts would not do: `<|im_end|>` is decoded as nothing, so that some other completions have the right text.
        """
        return [float(list(ids) == answer) for ids, answer in zip(completion_ids, right, strict=True)]

    @staticmethod
    def quality(model, tokenizer) -> dict[str, Any]:
        """Measure a model on the held-out questions.

        Returns:
            Exact success rates at temperature 1, and the share that greedy decoding answers right.
        """
        tasks = [Task(question.kind, 0, question.prompt, question.answer) for question in held_out()]
        return columns(tasks, success(model, tokenizer, tasks))

    def counts(self) -> dict[str, int]:
        """Questions of each kind."""
        unsolvable = round(self.unsolvable * self.size)
        return {
            **_split(self.size - unsolvable, self.learnable),
            **_split(unsolvable, tuple(UNSOLVABLE)),
        }


POOLS: dict[str, Pool | Gym] = {
    "mixed": Pool(unsolvable=1 / 3),
    "several": Pool(unsolvable=1 / 3, size=128),
    "unsolvable": Pool(unsolvable=0.7),
    "learnable": Pool(unsolvable=0.0),
    "gym": Gym(),
    "worked": Worked(),
    "several_worked": SeveralWorked(),
}


def _split(n: int, kinds: tuple[str, ...]) -> dict[str, int]:
    """`n` questions, spread evenly over kinds; the first ones get what is left over."""
    each, left_over = divmod(n, len(kinds))
    return {kind: each + 1 if i < left_over else each for i, kind in enumerate(kinds)}


@cache
def held_out() -> list[Question]:
    """As many questions of each learnable kind; in no pool."""
    return questions(dict.fromkeys(LEARNABLE, HELD_OUT_OF_A_KIND), HELD_OUT_SEED)


def training_questions(pool: Pool, seed: int) -> list[Question]:
    """The pool's questions for `seed`, in random order."""
    held_out_prompts = frozenset(question.prompt for question in held_out())
    return questions(pool.counts(), seed, held_out_prompts)
