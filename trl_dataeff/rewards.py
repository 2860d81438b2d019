r"""
Reward functions for answers that can be checked, which TRL does not have. Each is 1.0 for right and 0.0 for wrong.

All compare with the dataset's column `answer`, or `solution` in rows without it, and give `None` (no score) for a row
without a gold answer. A completion is plain text, or messages, of which the last one of the assistant counts. Its answer is
what it marks as such after its reasoning (`</think>`): the last `\boxed{...}`, else `<answer>...</answer>`, else `#### ...`.
"""

from __future__ import annotations

import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple


__all__ = ["exact_answer_reward", "math_verify_reward", "numeric_answer_reward"]

Completions = Sequence[str | list[dict[str, Any]]]  # plain text, or the messages of conversations
Column = Sequence[Any] | None

MAX_CHARACTERS = 200  # of a number; Python refuses to read one of more than 4,300 digits

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKED = (
    re.compile(r"(?si)<answer>(.*?)</answer>"),
    re.compile(r"####(?!#)[ \t]*([^\w\n#]*(?:\d(?!\d*[.)][ \t]+\S)|(?<=\\)[dt]?frac).*|\S.*(?=\Z|\n\s*\Z))"),
)
_AROUND = " \t\n\r.,;:!?\"'`*$“”‘’«»()[]"  # noqa: RUF001

_SIGN = r"(?:(?<![\w.)\]}])[-+])?"  # which is not an operator between two operands
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_FRAC = rf"(?P<fsign>{_SIGN})(?:(?P<fwhole>[0-9]+)\s*)?\\[dt]?frac\s*\{{\s*(?P<fnum>-?[0-9]+)\s*\}}\s*\{{\s*(?P<fden>[0-9]+)\s*\}}"
_PLAIN = (
    rf"(?P<sign>{_SIGN})(?:(?P<whole>[0-9]+)[ ]+(?=[0-9]+/[0-9]))?(?P<number>{_DIGITS})"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![\w]))?(?:\s*/\s*(?P<den>[0-9]+)(?![0-9/]|\.[0-9]))?"
)
_NUMBER = re.compile(rf"(?:{_FRAC}|{_PLAIN})(?P<percent>\s*\\?%)?")
_UNITS = re.compile(
    r"\^?\s*\{?\\(?:circ|degree)\b\}?|(?<=[A-Za-z])/(?=[A-Za-z])"
    r"|\\(?:text|mathrm|textbf|mathbf|operatorname)\s*\{(?!\s*[-+.\d])[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?"
    r"|\\[,;:! ]|\\(?:left|right|(?:text|math)\w*)\b"
)


class Number(NamedTuple):
    """A number as it is written: its value (of `75%`: 75), and whether it is a percentage."""

    value: Fraction
    is_percent: bool = False


def exact_answer_reward(
    completions: Completions, answer: Column = None, solution: Column = None, **kwargs: Any
) -> list[float | None]:
    r"""
    Reward function that checks whether the completion is the gold answer, word for word.

    Compares the marked answer, or else the whole completion after its reasoning. Case, spaces, the punctuation around it, and
    LaTeX for text (`\text{Paris}`) do not count.

    Args:
        completions (`list[str]` or `list[list[dict]]`): completions, plain or conversational.
        answer (`list`, *optional*), solution (`list`, *optional*): gold answers, and those of the rows without `answer`.
        **kwargs: other columns and what the trainer passes; not used.

    Returns:
        `list[float | None]`: 1.0 or 0.0; `None` for a row without gold answer.

    Raises:
        `ValueError`: the dataset has neither `answer` nor `solution`.

    Example:

    ```python
    >>> exact_answer_reward(["Paris.", "I think Rome", r"It is \boxed{paris}"], answer=["Paris", "Rome", "Paris"])
    [1.0, 0.0, 1.0]
    ```
    """
    return _scored(lambda text, gold: float(_normalized(text) == _normalized(gold)), completions, answer, solution)


def numeric_answer_reward(
    completions: Completions, answer: Column = None, solution: Column = None, **kwargs: Any
) -> list[float | None]:
    r"""
    Reward function that checks whether the completion's number is the gold number, however it is written.

    Compares the number of the marked answer, or else the last number after the reasoning. Thousands separators, decimals,
    signs, fractions (`3/4`, `1 3/4`, `\frac{3}{4}`), powers of ten (`1e-3`), percentages, currencies and units are
    understood. Whole numbers must be equal; others may differ by less than a thousandth of the gold number and less than
    0.01. A percentage matches a number that is meant as a share or in percent (`75%`: 75 and 0.75).

    Arguments and errors are those of [`exact_answer_reward`]. Gold answers are numbers, text with one number, or text with
    a marked answer, as in GSM8K; a row whose gold answer is not a number gets `None`.
    """
    return _scored(_numeric_score, completions, answer, solution)


def math_verify_reward(
    completions: Completions, answer: Column = None, solution: Column = None, **kwargs: Any
) -> list[float | None]:
    r"""
    Reward function that checks with math-verify whether the completion's answer equals the gold answer.

    Like TRL's `accuracy_reward`, and beyond it: takes plain text as well as conversations, reads `answer` as well as
    `solution`, understands `<answer>` and `#### 42`, and accepts an answer outside of LaTeX (`so it is 34`). Of several boxes
    the last one counts.

    Arguments and errors are those of [`exact_answer_reward`]. Gold answers are LaTeX with or without `$`, numbers, or text
    with a marked answer; a row whose gold answer cannot be parsed gets `None`. Raises an `ImportError` without math-verify.
    """
    return _scored(_math_score, completions, answer, solution)


def _scored(
    score: Callable[[str, str], float | None], completions: Completions, answer: Column, solution: Column
) -> list[float | None]:
    """By row, `score` of the completion's text after its reasoning and of the gold answer; `None` without a gold answer."""
    if answer is None and solution is None:
        raise ValueError("The dataset has neither `answer` nor `solution`. Name the gold answers' column `answer`.")
    scores = []
    missing = [None] * len(completions)
    for completion, *columns in zip(completions, answer or missing, solution or missing, strict=True):
        golds = [str(value).rpartition("</think>")[2] for value in columns if value is not None and str(value).strip()]
        scores.append(score(completion_text(completion).rpartition("</think>")[2], golds[0]) if golds else None)
    return scores


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion; empty without a message of the assistant, or if it has no content (a tool call)."""
    if isinstance(completion, str):
        return completion
    last = next((m.get("content") or "" for m in completion[::-1] if m.get("role", "assistant") == "assistant"), "")
    return last if isinstance(last, str) else "".join(part.get("text", "") for part in last)


def marked_answer(text: str) -> str | None:
    """The answer that a text marks as such, or `None`."""
    for opening in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for i in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[opening.end() : i].strip()
    found: list[str] = next((matches for pattern in _MARKED if (matches := pattern.findall(text))), [])
    return found[-1].strip() if found else None


def _answer(text: str) -> str:
    """The answer that a text marks as such, or else all of it."""
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def _normalized(text: str) -> str:
    """The answer of a text in lower case, with single spaces, and without the punctuation around it."""
    answer = re.sub(r"\\(?:text|math)\w*\s*\{([^{}]*)\}", r"\1", _answer(text))
    folded = " ".join(unicodedata.normalize("NFKC", answer).split()).casefold()
    return folded.strip(_AROUND) or folded  # a text of punctuation alone is an answer too


def _math_score(text: str, gold: str) -> float | None:
    from math_verify import parse, verify

    # math-verify stops itself by SIGALRM, which only the main thread may use
    seconds = 10 if threading.current_thread() is threading.main_thread() else None
    expected = parse(_in_latex(_answer(gold)), parsing_timeout=seconds)
    marked = marked_answer(text)
    if marked is not None and _BOXED.search(text):
        text = rf"\boxed{{{marked}}}"
    elif marked is not None:  # in LaTeX, `60 km/h` would be a product
        text = marked if re.match(r"[-+.,\d/]+ [a-zA-Z]", marked) else _in_latex(marked)
    found = parse(text, parsing_timeout=seconds)
    return float(verify(expected, found, timeout_seconds=seconds)) if expected else None


def _in_latex(answer: str) -> str:
    r"""Bare LaTeX (`2\sqrt{3}`) with dollar signs, with which math-verify reads it whole."""
    prose = re.search(r"(?<!\\)\$|\\\(|\\\[|(?<![\\{])\b[^\W\d_]{3,}", _UNITS.sub(" ", answer))
    return answer if prose else f"${answer.strip(' *')}$"


def _numeric_score(text: str, gold: str) -> float | None:
    expected = single_number(_answer(gold))
    if expected is None:
        return None
    number = answer_number(text)
    if number is None:
        return 0.0
    if number.is_percent == expected.is_percent:
        return float(_is_close(number.value, expected.value))
    percent, plain = (number, expected) if number.is_percent else (expected, number)
    return float(any(_is_close(percent.value / scale, plain.value) for scale in (1, 100)))


def _is_close(value: Fraction, gold: Fraction) -> bool:
    both_whole = value.denominator == gold.denominator == 1
    return value == gold or (not both_whole and abs(value - gold) < min(abs(gold) / 1000, Fraction(1, 100)))


def answer_number(text: str) -> Number | None:
    """The number that a text gives as its answer; `None` if it gives none."""
    marked = marked_answer(text)
    if marked is not None:
        return single_number(marked)
    matches = list(_NUMBER.finditer(_cleaned(text)))
    return _number(matches[-1]) if matches else None


def single_number(text: str) -> Number | None:
    r"""
    The one number of a short answer such as `$1,200$`, `x = -3` or `12 apples`. An answer with several numbers, or with
    mathematics around its number (`2\sqrt{3}`, `3\pi`, `2^{10}`), is `None`: to read one of them would be wrong.
    """
    text = _UNITS.sub(" ", _cleaned(text.strip(" *_"))).rpartition("=")[2].rpartition("≈")[2]
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1 or re.search(r"[\\^*/_+<>|√π]", text[: matches[0].start()] + text[matches[0].end() :]):
        return None
    return _number(matches[0])


def _cleaned(text: str) -> str:
    """`text` with one spelling of minus, of thousands separators, and no currency sign before a number."""
    text = text.replace("−", "-").replace("–", "-").replace("{,}", ",").replace("\\!", "")  # noqa: RUF001
    return re.sub(r"\\?[$€£]\s*(?=[-+]?[.0-9\\])", "", text)


def _number(match: re.Match[str]) -> Number | None:
    part = match.groupdict()
    denominator = part["fden"] or part["den"] or "1"
    if len(match[0]) > MAX_CHARACTERS or int(denominator) == 0:
        return None
    power = Fraction(10) ** int(part["exponent"] or 0)
    numerator = Fraction((part["fnum"] or part["number"]).replace(",", "")) * power
    value = numerator / int(denominator) + int(part["fwhole"] or part["whole"] or 0)
    return Number(-value if "-" in (part["fsign"], part["sign"]) else value, part["percent"] is not None)
