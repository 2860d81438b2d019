"""
The questions: kinds of graded difficulty with one right answer each, some of them unsolvable for the model.

A prompt is two short examples of the kind and the question, a line each, so that a completion ends with its line:

    Smallest of 3 7? 3
    Smallest of 35 66 30? 30
    Smallest of 12 45 78?
"""

from __future__ import annotations

import importlib
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from examples.quickstart import tasks


Stream = Callable[[int], Iterator[tuple[str, str]]]

END_OF_LINE = "Ċ"  # the tokenizer's name for "\n"


class Kind(NamedTuple):
    """A kind of question: the two examples shown before each, and a stream of questions and answers from a seed."""

    examples: tuple[str, str]
    stream: Stream


class Question(NamedTuple):
    """`prompt` has the examples; a completion is right if it is `answer` and the end of the line."""

    kind: str
    prompt: str
    answer: str


def _numbers(question: str, answer: Callable[[list[int]], int]) -> Stream:
    """Questions on two to four different numbers, all of one digit or all of two."""

    def stream(seed: int) -> Iterator[tuple[str, str]]:
        rng = random.Random(seed)
        while True:
            digits = rng.randint(1, 2)
            candidates = range(10 ** (digits - 1), 10**digits)
            numbers = rng.sample(candidates, rng.randint(2, 4))
            listed = " ".join(str(number) for number in numbers)
            yield question.format(listed), str(answer(numbers))

    return stream


def _products(first: range, second: range) -> Stream:
    def stream(seed: int) -> Iterator[tuple[str, str]]:
        rng = random.Random(seed)
        while True:
            a = rng.choice(first)
            b = rng.choice(second)
            yield f"{a} * {b} =", str(a * b)

    return stream


def reasoning_gym(name: str, seed: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Entries of a task of that library, of which there are as many as anyone asks for."""
    library = importlib.import_module("reasoning_gym")  # which the tests can do without
    return iter(library.create_dataset(name, seed=seed, size=1_000_000, **options))


def letters(seed: int) -> Iterator[tuple[str, str]]:
    """The quickstart's questions on letters, in fewer tokens."""
    for question, answer in tasks.letters(seed):
        yield question.removeprefix("How many "), answer


def gcd(seed: int) -> Iterator[tuple[str, str]]:
    """The greatest common divisor of two numbers up to 30."""
    for entry in reasoning_gym("gcd", seed, min_value=2, max_value=30):
        listed = " ".join(str(number) for number in entry["metadata"]["numbers"])
        yield f"GCD of {listed}?", entry["answer"]


def sums(seed: int) -> Iterator[tuple[str, str]]:
    """Two or three numbers of one or two digits, added and subtracted (reasoning-gym's `chain_sum`)."""
    for entry in reasoning_gym("chain_sum", seed, min_terms=2, max_terms=3, min_digits=1, max_digits=2):
        yield f"{entry['metadata']['expression']} =", entry["answer"]


def backwards(seed: int) -> Iterator[tuple[str, str]]:
    """A word of five to eight letters, backwards (reasoning-gym's `spell_backward`)."""
    for entry in reasoning_gym("spell_backward", seed, min_word_len=5, max_word_len=8):
        word = entry["metadata"]["word"].lower()
        yield f'"{word}" backwards?', word[::-1]


def count_even(numbers: list[int]) -> int:
    return sum(number % 2 == 0 for number in numbers)


#: Learnable, from questions that are mostly solved to questions that hardly ever are
LEARNABLE = {
    "largest": Kind(("Largest of 3 7? 7", "Largest of 8 2? 8"), _numbers("Largest of {}?", max)),
    "smallest": Kind(("Smallest of 7 3? 3", "Smallest of 2 8? 2"), _numbers("Smallest of {}?", min)),
    "second": Kind(("Second of 7 3? 3", "Second of 2 8? 8"), _numbers("Second of {}?", operator.itemgetter(1))),
    "even": Kind(("Even in 7 4? 1", "Even in 6 8? 2"), _numbers("Even in {}?", count_even)),
    "letters": Kind(('"o" in "book"? 2', '"a" in "cat"? 1'), letters),
    "gcd": Kind(("GCD of 12 8? 4", "GCD of 9 6? 3"), gcd),
    "sums": Kind(("2 + 6 = 8", "14 - 5 = 9"), sums),
    "products": Kind(("2 * 6 = 12", "3 * 13 = 39"), _products(range(2, 13), range(11, 40))),
}
#: Unsolvable: no sampled completion is ever right
UNSOLVABLE = {
    "large_products": Kind(("12 * 15 = 180", "212 * 31 = 6572"), _products(range(100, 1000), range(100, 1000))),
    "backwards": Kind(('"cat" backwards? tac', '"book" backwards? koob'), backwards),
}
KINDS = LEARNABLE | UNSOLVABLE


def questions(counts: dict[str, int], seed: int, without: frozenset[str] = frozenset()) -> list[Question]:
    """`counts[kind]` different questions of each kind in random order, none of them with a prompt in `without`."""
    asked: list[Question] = []
    for name, count in counts.items():
        kind = KINDS[name]
        examples = "\n".join(kind.examples)
        stream = kind.stream(1_000_000 * (seed + 1))  # neighbouring seeds of reasoning-gym share questions
        seen = set(without)
        own: list[Question] = []
        while len(own) < count:
            question, answer = next(stream)
            prompt = f"{examples}\n{question}"
            if prompt not in seen:
                seen.add(prompt)
                own.append(Question(name, prompt, f" {answer}"))
        asked += own
    random.Random(seed).shuffle(asked)
    return asked
