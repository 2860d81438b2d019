r"""Reward 1 for the gold number, however it is written: `1,234.50`, `-3/4`, `\frac{3}{4}`, `75%`, `$12`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trl_dataeff.rewards.text import Completion, marked_answer, score_answers, without_reasoning


#: Two numbers that are not both whole are the same if they differ by less than both of these.
RELATIVE_TOLERANCE = Fraction(1, 1000)
ABSOLUTE_TOLERANCE = Fraction(1, 100)
#: A longer row of digits is a model that does not stop, and Python refuses to read one of more than 4,300.
MAX_CHARACTERS = 200

# Digits with thousands separators or without, and a sign that is not an operator between two operands
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_SIGN = r"(?:(?<![\w.)\]}])[-+])?"
_FRAC = rf"(?P<fsign>{_SIGN})(?:(?P<fwhole>[0-9]+)\s*)?\\[dt]?frac\s*\{{\s*(?P<fnum>-?[0-9]+)\s*\}}\s*\{{\s*(?P<fden>[0-9]+)\s*\}}"
_PLAIN = (
    rf"(?P<sign>{_SIGN})(?:(?P<whole>[0-9]+)[ ]+(?=[0-9]+/[0-9]))?(?P<number>{_DIGITS})"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![\w]))?(?:\s*/\s*(?P<den>[0-9]+)(?![0-9/]|\.[0-9]))?"
)
_NUMBER = re.compile(rf"(?:{_FRAC}|{_PLAIN})(?P<percent>\s*\\?%)?")
_UNITS = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s*\{[^{}]*\}|\\[,;:! ]|\\circ|\\degree|\\(?:left|right)\b"
)


@dataclass(frozen=True)
class Number:
    """A number as it is written: its value (of `75%`: 75), and whether it is a percentage."""

    value: Fraction
    percent: bool = False


def numeric_answer_reward(
    completions: Sequence[Completion],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that checks whether the completion's number is the gold number: 1.0 if so, else 0.0.

    The completion's number is the one it marks as its answer (`\boxed{...}`, `<answer>...</answer>`, `#### ...`), or
    else the last number after its reasoning (`</think>`). Thousands separators, decimals, signs, fractions
    (`3/4`, `1 3/4`, `\frac{3}{4}`), powers of ten (`1e-3`), percentages, currencies and units are understood. Whole
    numbers must be equal; others may differ by less than a thousandth of the gold number and less than 0.01. A
    percentage matches a number that is meant as a share or in percent (`75%`: 75 and 0.75).

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions to be evaluated, plain or conversational.
        answer (`list`, *optional*):
            Gold answers: numbers, text with one number, or text with a marked answer, as in GSM8K (`... #### 42`). A
            row without one falls back on `solution`.
        solution (`list`, *optional*):
            Gold answers of the rows without `answer`.
        **kwargs:
            Other columns and what the trainer passes; not used.

    Returns:
        `list[float | None]`:
            1.0 or 0.0; `None` for a row whose gold answer is missing or not a number, which the trainer leaves out.

    Example:

    ```python
    >>> from trl_dataeff.rewards import numeric_answer_reward

    >>> numeric_answer_reward(["So 1,200 in all.", r"\boxed{7}", "none"], answer=["#### 1200", 8, "3"])
    [1.0, 0.0, 0.0]
    ```
    """
    return score_answers("numeric_answer_reward", completions, answer, solution, _score)


def answer_number(text: str) -> Number | None:
    """Return the number that a completion gives as its answer; `None` if it gives none."""
    text = without_reasoning(text)
    marked = marked_answer(text)
    if marked is not None:
        return single_number(marked)
    matches = list(_NUMBER.finditer(_cleaned(text)))
    return _number(matches[-1]) if matches else None


def gold_number(text: str) -> Number | None:
    """Return the number of a gold answer; `None` if it has none, or several and marks none of them."""
    marked = marked_answer(text)
    return single_number(text if marked is None else marked)


def single_number(text: str) -> Number | None:
    r"""
    Return the one number of a short answer such as `$1,200$`, `x = -3`, `12 apples` or `\frac{1}{2}`.

    An answer with several numbers, or with mathematics around its number (`2\sqrt{3}`, `3\pi`, `2^{10}`), is `None`:
    to read one of its numbers would be wrong.
    """
    text = _cleaned(_UNITS.sub(" ", text)).rpartition("=")[2].rpartition("≈")[2]
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1:
        return None
    around = text[: matches[0].start()] + text[matches[0].end() :]
    return None if re.search(r"[\\^*/_+<>|]|[√π]", around) else _number(matches[0])


def same_number(number: Number, gold: Number) -> bool:
    """Return whether two numbers are the same, as `numeric_answer_reward` describes."""
    if number.percent == gold.percent:
        return _close(number.value, gold.value)
    percent, plain = (number, gold) if number.percent else (gold, number)
    return _close(percent.value, plain.value) or _close(percent.value / 100, plain.value)


def _score(text: str, gold: str) -> float | None:
    expected = gold_number(gold)
    if expected is None:
        return None
    number = answer_number(text)
    return float(number is not None and same_number(number, expected))


def _close(value: Fraction, gold: Fraction) -> bool:
    if value.denominator == 1 and gold.denominator == 1:
        return value == gold
    difference = abs(value - gold)
    return value == gold or (difference < RELATIVE_TOLERANCE * abs(gold) and difference < ABSOLUTE_TOLERANCE)


def _cleaned(text: str) -> str:
    """Return `text` with one spelling of minus, of thousands separators, and no currency sign before a number."""
    text = text.replace("−", "-").replace("–", "-").replace("{,}", ",").replace("\\!", "")  # noqa: RUF001
    return re.sub(r"\\?[$€£]\s*(?=[-+]?[.0-9\\])", "", text)


def _number(match: re.Match[str]) -> Number | None:
    if len(match[0]) > MAX_CHARACTERS:
        return None
    part = match.groupdict()
    if part["fden"] is not None:
        sign, whole, numerator, denominator = part["fsign"], part["fwhole"], Fraction(part["fnum"]), part["fden"]
    else:
        sign, whole, denominator = part["sign"], part["whole"], part["den"] or "1"
        numerator = Fraction(part["number"].replace(",", "")) * Fraction(10) ** int(part["exponent"] or 0)
    if int(denominator) == 0:
        return None
    value = numerator / int(denominator) + int(whole or 0)
    return Number(-value if sign == "-" else value, part["percent"] is not None)
