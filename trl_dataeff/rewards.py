r"""
Reward functions for answers that can be checked, which TRL does not have. Each is 1.0 for right and 0.0 for wrong.

All compare with the dataset's column `answer`, or `solution` in rows without it, and give `None` (no score) for a row
without a gold answer. A completion is plain text, or messages, of which the last one of the assistant counts. Its answer is
what it marks as such after its reasoning (`</think>`): the last `\boxed{...}`, else `<answer>...</answer>`, else `#### ...`.
"""

from __future__ import annotations

import importlib.util
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


__all__ = ["exact_answer_reward", "math_verify_reward", "numeric_answer_reward"]

#: A completion as a reward function gets it: plain text, or the messages of a conversation.
Completion = str | list[dict[str, Any]]

#: Two numbers that are not both whole are the same if they differ by less than both of these.
RELATIVE_TOLERANCE = Fraction(1, 1000)
ABSOLUTE_TOLERANCE = Fraction(1, 100)
#: A longer row of digits is a model that does not stop, and Python refuses to read one of more than 4,300.
MAX_CHARACTERS = 200
PARSING_TIMEOUT_S = 10
VERIFY_TIMEOUT_S = 5

_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_WORD = re.compile(r"(?<!\\)\b[^\W\d_]{3,}")
_AROUND = " \t\n\r.,;:!?\"'`*$“”‘’«»()[]"  # noqa: RUF001

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


def exact_answer_reward(
    completions: Sequence[Completion],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that checks whether the completion is the gold answer, word for word.

    Compares the marked answer, or else the whole completion after its reasoning. Case, spaces and the punctuation around it
    do not count.

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
    return _scored("exact_answer_reward", completions, answer, solution, _exact_score)


def numeric_answer_reward(
    completions: Sequence[Completion],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that checks whether the completion's number is the gold number, however it is written.

    Compares the number of the marked answer, or else the last number after the reasoning. Thousands separators, decimals,
    signs, fractions (`3/4`, `1 3/4`, `\frac{3}{4}`), powers of ten (`1e-3`), percentages, currencies and units are
    understood. Whole numbers must be equal; others may differ by less than a thousandth of the gold number and less than
    0.01. A percentage matches a number that is meant as a share or in percent (`75%`: 75 and 0.75).

    Arguments and errors are those of [`exact_answer_reward`]. Gold answers are numbers, text with one number, or text with
    a marked answer, as in GSM8K; a row whose gold answer is not a number gets `None`.

    Example:

    ```python
    >>> numeric_answer_reward(["So 1,200 in all.", r"\boxed{7}", "none"], answer=["#### 1200", 8, "3"])
    [1.0, 0.0, 0.0]
    ```
    """
    return _scored("numeric_answer_reward", completions, answer, solution, _numeric_score)


def math_verify_reward(
    completions: Sequence[Completion],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that checks with math-verify whether the completion's answer equals the gold answer.

    Like TRL's `accuracy_reward`, and beyond it: takes plain text as well as conversations, reads `answer` as well as
    `solution`, understands `#### 42` in gold answers, and accepts an answer outside of LaTeX (`so it is 34`).

    Arguments and errors are those of [`exact_answer_reward`]. Gold answers are LaTeX with or without `$`, numbers, or text
    with a marked answer; a row whose gold answer cannot be parsed gets `None`. Raises an `ImportError` without math-verify.
    """
    require_math_verify("math_verify_reward")
    return _scored("math_verify_reward", completions, answer, solution, _math_score)


def require_math_verify(name: str) -> None:
    """Raise an `ImportError` that names the extra if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError(f"`{name}` needs math-verify: pip install math-verify")


def _scored(
    name: str,
    completions: Sequence[Completion],
    answer: Sequence[Any] | None,
    solution: Sequence[Any] | None,
    score: Callable[[str, str], float | None],
) -> list[float | None]:
    """By row, `score` of the texts of the completion and of its gold answer; `None` without a gold answer."""
    if answer is None and solution is None:
        raise ValueError(
            f"`{name}` compares with the dataset's column `answer` or `solution`, and got neither. Add one, or name "
            "the column that has it (`answer_column` in a recipe)."
        )
    missing = [None] * len(completions)
    rows = zip(
        completions, missing if answer is None else answer, missing if solution is None else solution, strict=True
    )
    golds = ((c, a if _is_given(a) else b) for c, a, b in rows)
    return [score(completion_text(c), str(gold)) if _is_given(gold) else None for c, gold in golds]


def _is_given(value: Any) -> bool:
    return value is not None and str(value).strip() != ""


# Where the answer stands in a completion


def completion_text(completion: Completion) -> str:
    """The text of a completion; empty without a message of the assistant, or if it has no content (a tool call)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content if part.get("type", "text") == "text")
    return ""


def marked_answer(text: str) -> str | None:
    """The answer that a text marks as such, or `None`."""
    for opening in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for i in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[opening.end() : i].strip()
    for pattern in (_TAGGED, _HASHES):
        matches: list[str] = pattern.findall(text)
        if matches:
            return matches[-1].strip()
    return None


def _without_reasoning(text: str) -> str:
    return text.rpartition("</think>")[2]


# How answers are compared


def _exact_score(text: str, gold: str) -> float:
    return float(_normalized(text) == _normalized(gold))


def _normalized(text: str) -> str:
    """The answer of a text in lower case, with single spaces, and without the punctuation around it."""
    text = _without_reasoning(text)
    marked = marked_answer(text)
    text = text if marked is None else marked
    folded = re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text)).strip().casefold()
    # A text of punctuation alone is an answer too
    return folded.strip(_AROUND) or folded


def _math_score(text: str, gold: str) -> float | None:
    from math_verify import parse, verify

    # math-verify stops a parse by SIGALRM, which only the main thread may use
    in_main_thread = threading.current_thread() is threading.main_thread()
    parsing_timeout = PARSING_TIMEOUT_S if in_main_thread else None
    gold_parsed = parse(_as_latex(gold), parsing_timeout=parsing_timeout)
    if not gold_parsed:
        return None
    text_parsed = parse(_without_reasoning(text), parsing_timeout=parsing_timeout)
    return float(verify(gold_parsed, text_parsed, timeout_seconds=VERIFY_TIMEOUT_S if in_main_thread else None))


def _as_latex(gold: str) -> str:
    r"""A gold answer as math-verify reads it whole: bare LaTeX (`2\sqrt{3}`) gets its dollar signs."""
    marked = marked_answer(gold)
    text = gold.strip() if marked is None else marked
    is_bare = "$" not in text and r"\(" not in text and r"\[" not in text and not _WORD.search(text)
    return f"${text}$" if is_bare else text


@dataclass(frozen=True)
class Number:
    """A number as it is written: its value (of `75%`: 75), and whether it is a percentage."""

    value: Fraction
    percent: bool = False


def _numeric_score(text: str, gold: str) -> float | None:
    marked = marked_answer(gold)
    expected = single_number(gold if marked is None else marked)
    if expected is None:
        return None
    number = answer_number(text)
    return float(number is not None and _same_number(number, expected))


def answer_number(text: str) -> Number | None:
    """The number that a completion gives as its answer; `None` if it gives none."""
    text = _without_reasoning(text)
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
    text = _cleaned(_UNITS.sub(" ", text)).rpartition("=")[2].rpartition("≈")[2]
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1:
        return None
    around = text[: matches[0].start()] + text[matches[0].end() :]
    return None if re.search(r"[\\^*/_+<>|]|[√π]", around) else _number(matches[0])


def _same_number(number: Number, gold: Number) -> bool:
    if number.percent == gold.percent:
        return _close(number.value, gold.value)
    percent, plain = (number, gold) if number.percent else (gold, number)
    return _close(percent.value, plain.value) or _close(percent.value / 100, plain.value)


def _close(value: Fraction, gold: Fraction) -> bool:
    if value.denominator == 1 and gold.denominator == 1:
        return value == gold
    difference = abs(value - gold)
    return value == gold or (difference < RELATIVE_TOLERANCE * abs(gold) and difference < ABSOLUTE_TOLERANCE)


def _cleaned(text: str) -> str:
    """`text` with one spelling of minus, of thousands separators, and no currency sign before a number."""
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
