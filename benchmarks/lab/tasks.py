"""The tasks: six families of short text problems with one right answer each.

Four are learnable (rotate, vowels, interleave, second), two are there to be unsolvable (multiply, sum). A task is made
from a generator and a length, so that the same generator state gives the same task.

Prompts are `<letter><parameters>:<text>=`, answers are bare text; the model ends its answer with the end token:

    R3:abcde=      deabc         rotate left by 3
    V:banana=      bnn           drop the vowels
    I:ace,bdf=     abcdef        interleave two strings, the first beginning
    S:abcdef=      ace           every second letter, beginning with the first
    M:123*456=     56088         multiply
    A:12+345+67=   424           sum
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
VOWELS = "aeiou"
#: Length of a task of the learnable families: its input letters in all, both ends included.
LENGTHS = range(2, 15)
#: "Length" of the arithmetic families: digits of a factor, numbers of a sum.
FACTOR_DIGITS = range(3, 6)
SUMMANDS = range(3, 6)
MAX_ANSWER = max(LENGTHS)


@dataclass(frozen=True)
class Task:
    """One prompt and its only right answer. `family` and `length` name the cell that it belongs to."""

    family: str
    length: int
    prompt: str
    answer: str

    @property
    def cell(self) -> tuple[str, int]:
        return self.family, self.length


def _letters(rng: np.random.Generator, n: int) -> str:
    return "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), n))


def _rotate(rng: np.random.Generator, length: int) -> tuple[str, str]:
    text = _letters(rng, length)
    k = int(rng.integers(1, min(length, 10)))
    return f"R{k}:{text}=", text[k:] + text[:k]


def _vowels(rng: np.random.Generator, length: int) -> tuple[str, str]:
    text = _letters(rng, length)
    while not set(text) - set(VOWELS):  # an empty answer is no task
        text = _letters(rng, length)
    consonants = [letter for letter in text if letter not in VOWELS]
    return f"V:{text}=", "".join(consonants)


def _interleave(rng: np.random.Generator, length: int) -> tuple[str, str]:
    first = _letters(rng, (length + 1) // 2)
    second = _letters(rng, length // 2)
    # The first string may be one longer: its last letter gets a space as its partner, which is removed
    pairs = zip(first, second.ljust(len(first)), strict=True)
    answer = "".join(a + b for a, b in pairs).rstrip()
    return f"I:{first},{second}=", answer


def _second(rng: np.random.Generator, length: int) -> tuple[str, str]:
    text = _letters(rng, length)
    return f"S:{text}=", text[::2]


def _number(rng: np.random.Generator, digits: int) -> int:
    return int(rng.integers(10 ** (digits - 1), 10**digits))


def _multiply(rng: np.random.Generator, length: int) -> tuple[str, str]:
    a = _number(rng, length)
    b = _number(rng, length)
    return f"M:{a}*{b}=", str(a * b)


def _sum(rng: np.random.Generator, length: int) -> tuple[str, str]:
    numbers = []
    for _ in range(length):
        digits = int(rng.integers(3, 5))
        numbers.append(_number(rng, digits))
    summands = "+".join(str(number) for number in numbers)
    return f"A:{summands}=", str(sum(numbers))


_MAKERS: dict[str, Callable[[np.random.Generator, int], tuple[str, str]]] = {
    "rotate": _rotate,
    "vowels": _vowels,
    "interleave": _interleave,
    "second": _second,
    "multiply": _multiply,
    "sum": _sum,
}
LEARNABLE_FAMILIES = ("rotate", "vowels", "interleave", "second")
ARITHMETIC = ("multiply", "sum")


def lengths_of(family: str) -> range:
    """The lengths in which a family comes."""
    special = {"multiply": FACTOR_DIGITS, "sum": SUMMANDS}
    return special.get(family, LENGTHS)


#: Every (family, length), in a fixed order.
CELLS = [(family, length) for family in _MAKERS for length in lengths_of(family)]


def make_task(rng: np.random.Generator, family: str, length: int) -> Task:
    """A random task of one cell."""
    prompt, answer = _MAKERS[family](rng, length)
    return Task(family, length, prompt, answer)
