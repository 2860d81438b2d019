"""The questions: short ones of graded difficulty, with answers that can be checked word for word.

What is deliberately not here: a language task. Each answer is a number, a few tokens long.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Question(NamedTuple):
    """`task` is the name of the kind of question; `answer` is the only right one."""

    task: str
    question: str
    answer: str


class Task(NamedTuple):
    """A kind of question.

    Args:
        example (`tuple[str, str]`): A question and its answer, shown before each question.
        share (`float`): The kind's part of the dataset.
        stream (`Callable`): Makes questions and answers without end from a seed.
    """

    example: tuple[str, str]
    share: float
    stream: Callable[[int], Iterator[tuple[str, str]]]


#: No answer is right for more than this part of a task's questions: always giving it is not worth learning
MOST_OF_ONE_ANSWER = 0.4
#: Questions drawn for one that is kept, before the stream counts as too narrow
PATIENCE = 200


def largest(seed: int) -> Iterator[tuple[str, str]]:
    """The largest of two to four numbers, all of one digit or all of two."""
    rng = random.Random(seed)
    while True:
        digits = rng.randint(1, 2)
        candidates = range(10 ** (digits - 1), 10**digits)
        numbers = rng.sample(candidates, rng.randint(2, 4))
        listed = " ".join(str(number) for number in numbers)
        yield f"Largest of {listed}?", str(max(numbers))


def letters(seed: int) -> Iterator[tuple[str, str]]:
    """How often a letter stands in a word of three to eight letters (reasoning-gym's `letter_counting`)."""
    for entry in _reasoning_gym("letter_counting", seed, min_words=1, max_words=1):
        word = entry["metadata"]["span"][0].lower()
        letter = entry["metadata"]["target_letter"]
        if 3 <= len(word) <= 8 and word.isalpha():
            yield f'How many "{letter}" in "{word}"?', entry["answer"]


def gcd(seed: int) -> Iterator[tuple[str, str]]:
    """The greatest common divisor of two numbers up to 30 (reasoning-gym's `gcd`)."""
    for entry in _reasoning_gym("gcd", seed, min_value=2, max_value=30):
        listed = " ".join(str(number) for number in entry["metadata"]["numbers"])
        yield f"GCD of {listed}?", entry["answer"]


def sums(seed: int) -> Iterator[tuple[str, str]]:
    """Two or three numbers of one or two digits, added and subtracted (reasoning-gym's `chain_sum`)."""
    for entry in _reasoning_gym("chain_sum", seed, min_terms=2, max_terms=3, min_digits=1, max_digits=2):
        yield f"{entry['metadata']['expression']} =", entry["answer"]


TASKS: dict[str, Task] = {
    "largest": Task(("Largest of 35 66 30?", "66"), 0.5, largest),
    "letters": Task(('How many "o" in "book"?', "2"), 0.3, letters),
    "gcd": Task(("GCD of 12 8?", "4"), 0.1, gcd),
    "sums": Task(("2 + 6 =", "8"), 0.1, sums),
}


def make_questions(train: int = 512, held_out: int = 160, seed: int = 0) -> tuple[list[Question], list[Question]]:
    """Make two sets of questions that have none in common, each with every task's share, in random order.

    Args:
        train (`int`, *optional*, defaults to `512`): Questions to train on.
        held_out (`int`, *optional*, defaults to `160`): Questions to measure with.
        seed (`int`, *optional*, defaults to `0`): The same questions for the same seed.

    Returns:
        `tuple[list[Question], list[Question]]`: The first and the second set.
    """
    train_set: list[Question] = []
    held_out_set: list[Question] = []
    for name, task in TASKS.items():
        for_training = math.ceil(train * task.share)
        for_measuring = math.ceil(held_out * task.share)
        questions = _distinct(name, task, for_training + for_measuring, seed)
        random.Random(seed).shuffle(questions)
        train_set += questions[:for_training]
        held_out_set += questions[for_training:]
    random.Random(seed).shuffle(train_set)
    random.Random(seed).shuffle(held_out_set)
    # Shares were rounded up
    return train_set[:train], held_out_set[:held_out]


def conversation(question: Question) -> list[dict[str, str]]:
    """The question after its task's example, as a conversation. The empty system message keeps it short."""
    asked, answered = TASKS[question.task].example
    return [
        {"role": "system", "content": ""},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answered},
        {"role": "user", "content": question.question},
    ]


def write_jsonl(path: Path, questions: list[Question]) -> None:
    """Write a dataset of `trl-dataeff grpo`: the columns `prompt`, `answer` and `task`."""
    lines = []
    for question in questions:
        row = {"prompt": conversation(question), "answer": question.answer, "task": question.task}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def _distinct(name: str, task: Task, n: int, seed: int) -> list[Question]:
    """`n` different questions, none of them the example, and not too many with one answer."""
    most = math.ceil(MOST_OF_ONE_ANSWER * n)
    example_question, _ = task.example
    seen = {example_question}
    answers: Counter[str] = Counter()
    questions: list[Question] = []
    for drawn, (question, answer) in enumerate(task.stream(seed)):
        if drawn > PATIENCE * n:
            raise ValueError(
                f"The task '{name}' has only {len(questions)} different questions and answers of the {n} that were "
                "asked for. Ask for fewer."
            )
        if question not in seen and answers[answer] < most:
            seen.add(question)
            answers[answer] += 1
            questions.append(Question(name, question, answer))
            if len(questions) == n:
                break
    return questions


def _reasoning_gym(name: str, seed: int, **options: Any) -> Iterator[dict[str, Any]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "The questions of the quickstart are made by `reasoning-gym`, which is not installed here. Run "
            "`pip install reasoning-gym`, or let `make quickstart` do it."
        ) from error
    return iter(reasoning_gym.create_dataset(name, seed=seed, size=1_000_000, **options))
