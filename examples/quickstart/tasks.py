"""The questions: easy, learnable and hopeless ones for this model, with answers that can be checked word for word.

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
        share (`float`): The kind's part of the training questions.
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
    """The largest of two or three numbers."""
    for numbers, listed in _lists(seed):
        yield f"Largest of {listed}?", str(max(numbers))


def smallest(seed: int) -> Iterator[tuple[str, str]]:
    """The smallest of two or three numbers."""
    for numbers, listed in _lists(seed):
        yield f"Smallest of {listed}?", str(min(numbers))


def letters(seed: int) -> Iterator[tuple[str, str]]:
    """How often a letter stands in a word of three to eight letters (reasoning-gym's `letter_counting`)."""
    for entry in _reasoning_gym("letter_counting", seed, min_words=1, max_words=1):
        word = entry["metadata"]["span"][0].lower()
        letter = entry["metadata"]["target_letter"]
        if 3 <= len(word) <= 8 and word.isalpha():
            yield f'How many "{letter}" in "{word}"?', entry["answer"]


def repeat(seed: int) -> Iterator[tuple[str, str]]:
    """A number of two digits, given back."""
    rng = random.Random(seed)
    while True:
        number = rng.randint(10, 99)
        yield f"Repeat {number}", str(number)


def products(seed: int) -> Iterator[tuple[str, str]]:
    """Two numbers of two digits, multiplied: an answer of four digits."""
    rng = random.Random(seed)
    while True:
        a = rng.randint(32, 99)
        b = rng.randint(32, 99)
        yield f"{a} * {b} =", str(a * b)


def sums(seed: int) -> Iterator[tuple[str, str]]:
    """Three numbers of three digits, added."""
    rng = random.Random(seed)
    while True:
        numbers = rng.sample(range(100, 1000), 3)
        yield f"{' + '.join(map(str, numbers))} =", str(sum(numbers))


#: `repeat` is easy: the initial model solves most of them. `products` and `sums` are hopeless: it solves none
TASKS: dict[str, Task] = {
    "repeat": Task(("Repeat 35", "35"), 0.2, repeat),
    "largest": Task(("Largest of 3 7?", "7"), 0.15, largest),
    "smallest": Task(("Smallest of 7 3?", "3"), 0.15, smallest),
    "letters": Task(('How many "o" in "book"?', "2"), 0.1, letters),
    "products": Task(("12 * 15 =", "180"), 0.2, products),
    "sums": Task(("212 + 31 =", "243"), 0.2, sums),
}


def make_questions(train: int = 80, held_out: int = 120, seed: int = 0) -> tuple[list[Question], list[Question]]:
    """Make two sets of questions that have none in common, each in random order.

    Args:
        train (`int`, *optional*, defaults to `80`): Questions to train on, of each task its share.
        held_out (`int`, *optional*, defaults to `120`): Questions to measure with, of each task as many.
        seed (`int`, *optional*, defaults to `0`): The same questions for the same seed.

    Returns:
        `tuple[list[Question], list[Question]]`: The first and the second set.
    """
    train_set: list[Question] = []
    held_out_set: list[Question] = []
    for name, task in TASKS.items():
        for_training = math.ceil(train * task.share)
        for_measuring = math.ceil(held_out / len(TASKS))
        questions = _distinct(name, task, for_training + for_measuring, seed)
        random.Random(seed).shuffle(questions)
        train_set += questions[:for_training]
        held_out_set += questions[for_training:]
    random.Random(seed).shuffle(train_set)
    random.Random(seed).shuffle(held_out_set)
    # Numbers were rounded up
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


def _lists(seed: int) -> Iterator[tuple[list[int], str]]:
    """Two or three different numbers, all of one digit or all of two, and as text."""
    rng = random.Random(seed)
    while True:
        digits = rng.randint(1, 2)
        candidates = range(10 ** (digits - 1), 10**digits)
        numbers = rng.sample(candidates, rng.randint(2, 3))
        yield numbers, " ".join(str(number) for number in numbers)


def _reasoning_gym(name: str, seed: int, **options: Any) -> Iterator[dict[str, Any]]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "The questions of the quickstart are made by `reasoning-gym`, which is not installed here. Run "
            "`pip install reasoning-gym`, or let `make quickstart` do it."
        ) from error
    return iter(reasoning_gym.create_dataset(name, seed=seed, size=1_000_000, **options))
