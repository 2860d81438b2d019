r"""
Reward functions for answers that can be checked, which TRL does not have. Each is 1.0 for right and 0.0 for wrong.

All compare with the dataset's column `answer`, or `solution` in rows without it, and give `None` (no score) for a row
without a gold answer. A completion is plain text, or messages, of which the last one of the assistant counts. Its
answer is what it marks as such after its reasoning (`</think>`): the last `\boxed{...}`, else the last
`<answer>...</answer>`, else what follows the last `####` that begins with a number or ends the text (any other is a
heading).

The time of `exact_answer_reward` and `numeric_answer_reward` grows linearly with the length of a completion, whatever
it holds. `math_verify_reward` has time limits.
"""

from __future__ import annotations

import importlib.util
import math
import re
import time
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from trl_dataeff.math_verifier import MathVerifier


__all__ = ["exact_answer_reward", "math_verify_reward", "numeric_answer_reward"]

Completions = Sequence[str | list[dict[str, Any]]]  # plain text, or the messages of conversations
Column = Sequence[Any] | None

#: Longest number that is read, in characters. Python refuses to read a number of more than 4,300 digits.
MAX_NUMBER_CHARACTERS = 200
#: Longest text whose Unicode characters are normalized, which takes quadratic time for a run of combining accents.
MAX_NORMALIZED_CHARACTERS = 10_000

#: Time limits of `math_verify_reward`, which takes milliseconds for an ordinary completion. A batch of n completions
#: may take `SECONDS_PER_BATCH + n * MEAN_SECONDS_PER_COMPLETION`.
MAX_SECONDS_PER_COMPLETION = 5.0
MEAN_SECONDS_PER_COMPLETION = 0.25
SECONDS_PER_BATCH = 60.0

# The beginning of a box, a brace, or an escaped brace (`\{`), which belongs to no pair
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\?[{}]")
_ANSWER_OPENS = re.compile(r"<answer>", re.IGNORECASE)
_ANSWER_CLOSES = re.compile(r"</answer>", re.IGNORECASE)
# Exactly four number signs, and the rest of their line
_ANSWER_LINE = re.compile(r"(?<!#)####(?!#)[ \t]*(\S.*)")
# A line that begins with a number or a fraction, and not with the number of a heading (`2. Conclusion`)
_NUMBER_FIRST = re.compile(r"[^\w#]*(?:[0-9](?![0-9]*[.)]\s)|[dt]?frac\{)")

# `\text{...}`, `\textbf{...}`, `\mathrm{...}`, `\mbox{...}` and the like
_LATEX_TEXT = re.compile(r"\\(?:text|math|mbox)\w*\s*\{([^{}]*)\}")
# What is around mathematics and changes nothing: `\(`, `\[`, `\left`, `\displaystyle` and the like
_LATEX_LAYOUT = re.compile(r"\\(?:[()\[\]]|(?:left|right|displaystyle|q?quad|bf)(?![A-Za-z]))")
# A thousands separator of LaTeX: `1{,}000`, `1\,000`, `1\!000`, `1,\!000`
_LATEX_SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|,?\\!)")
# A space of LaTeX: `\,`, `\ ` and the like
_LATEX_SPACE = re.compile(r"\\[,;:! ]")
# `\frac{a}{b}` that does not follow a factor or the whole part of a mixed number
_LATEX_FRACTION = re.compile(r"(?<![\w}])\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}+-])(?P<sign>[-+]))?"  # a sign that is not an operator between two operands
    r"(?:\\?[$€£] ?)?"
    r"(?P<whole>[0-9]+ (?=[0-9]+ ?/))?"  # of a mixed number, which is not read: `1 3/4` is not 3/4
    r"(?P<numerator>"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"  # `1,000,000.5` or `1000000.5`
    r"|\.[0-9]+"  # or `.5`
    r")"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?!\w))?"
    r"(?: ?/ ?(?P<denominator>[0-9]+)(?!\.?[0-9]))?"  # a whole number: in `1/2.5` it is not 2
    r"(?: ?\\?%)?"
)
# What makes a number a part of a larger expression. A slash between letters belongs to units (`km/h`)
_EXPRESSION = re.compile(r"[\\^*_+<>|√π]|(?<![A-Za-z])/|/(?![A-Za-z])")
# What is between two answers: `x = 2 or x = 3`. A comma may also separate thousands
_BETWEEN_ANSWERS = re.compile(r",(?![0-9]{3}(?![0-9]))|;|\b(?:and|or)\b")
# A sign that is apart from its number: `- 5`
_SIGN_APART = re.compile(r"^\s*([-+])\s+(?=\S)")
# An interval that is open at one end, `[1, 2)`
_HALF_OPEN = re.compile(r"\[.*\)|\(.*\]", re.DOTALL)
_AROUND_TEXT = " \t\n\r.,;:!?\"'`*$“”‘’«»()[]"  # noqa: RUF001

# The beginning of mathematics in LaTeX: `$`, `\(` or `\[`
_LATEX_DELIMITER = re.compile(r"(?<!\\)\$|\\[(\[]")
# A word of prose: neither a command (`\sqrt`) nor its argument (`{pmatrix}`)
_WORD = re.compile(r"(?<![\\{])\b[^\W\d_]{3,}")

_math_verifier = MathVerifier()


def exact_answer_reward(
    completions: Completions, answer: Column = None, solution: Column = None, **kwargs: Any
) -> list[float | None]:
    r"""
    Reward function that checks whether the completion is the gold answer, word for word.

    Compares the marked answer, or else the whole completion after its reasoning. Case, spaces, the punctuation around
    it, and LaTeX for text (`\text{Paris}`) do not count.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or conversational.
        answer (`list`, *optional*):
            Gold answers: text, or numbers.
        solution (`list`, *optional*):
            Gold answers of the rows that have none in `answer`.
        **kwargs:
            Other columns, and what the trainer passes. Not used.

    Returns:
        `list[float | None]`: 1.0 or 0.0 for each completion; `None` for a row without a gold answer.

    Raises:
        `ValueError`: the dataset has neither `answer` nor `solution`.

    Example:

    ```python
    >>> exact_answer_reward(["Paris.", "I think Rome", r"It is \boxed{paris}"], answer=["Paris", "Rome", "Paris"])
    [1.0, 0.0, 1.0]
    ```
    """

    def score(text: str, gold: str) -> float:
        return float(_normalized(_answer(text)) == _normalized(_answer(gold)))

    return _scores(score, completions, answer, solution)


def numeric_answer_reward(
    completions: Completions, answer: Column = None, solution: Column = None, **kwargs: Any
) -> list[float | None]:
    r"""
    Reward function that checks whether the completion's number is the gold number, however it is written.

    Compares the number of the marked answer, or else the last number after the reasoning. Numbers are compared
    exactly: 0.5 is 1/2, and 0.333 is not 1/3. Reads signs, decimals, thousands separators (`1,000`, `1{,}000`,
    `1\,000`), powers of ten (`1e-3`) and fractions (`3/4`, `\frac{3}{4}`). A currency or percent sign and the words
    around a number do not count: `75%` is 75, and not 0.75.

    Everything else is left to [`math_verify_reward`]: mixed numbers (`1 3/4`), roots, powers, degrees, and units with
    exponents. A marked answer with such an expression, or with several numbers, is wrong.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or conversational.
        answer (`list`, *optional*):
            Gold answers: numbers, text with one number, or text with a marked answer, as in GSM8K.
        solution (`list`, *optional*):
            Gold answers of the rows that have none in `answer`.
        **kwargs:
            Other columns, and what the trainer passes. Not used.

    Returns:
        `list[float | None]`: 1.0 or 0.0 for each completion; `None` for a row whose gold answer is missing or not a
        number.

    Raises:
        `ValueError`: the dataset has neither `answer` nor `solution`.

    Example:

    ```python
    >>> numeric_answer_reward(["so $1,200.", r"\boxed{\frac{1}{2}}", "0.333"], answer=["#### 1200", 0.5, "1/3"])
    [1.0, 1.0, 0.0]
    ```
    """

    def score(text: str, gold: str) -> float | None:
        expected = single_number(_answer(gold))
        if expected is None:
            return None
        return float(answer_number(text) == expected)

    return _scores(score, completions, answer, solution)


def math_verify_reward(
    completions: Completions, answer: Column = None, solution: Column = None, **kwargs: Any
) -> list[float | None]:
    r"""
    Reward function that checks with math-verify whether the completion's answer equals the gold answer.

    Like TRL's `accuracy_reward`, and beyond it: takes plain text as well as conversations, reads `answer` as well as
    `solution`, understands `<answer>` and `#### 42`, and accepts an answer outside of LaTeX (`so it is 34`). Of
    several boxes the last one counts.

    Ordinary completions take milliseconds. One that takes more than 5 seconds (`MAX_SECONDS_PER_COMPLETION`) counts as
    wrong, with a warning. A batch of n completions takes at most 60 + n / 4 seconds (`SECONDS_PER_BATCH` and
    `MEAN_SECONDS_PER_COMPLETION`); those that are not compared by then get no score, with a warning. math-verify runs
    in another process, so these limits hold in every thread. On Windows a comparison cannot be stopped.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or conversational.
        answer (`list`, *optional*):
            Gold answers: LaTeX with or without `$`, numbers, or text with a marked answer.
        solution (`list`, *optional*):
            Gold answers of the rows that have none in `answer`.
        **kwargs:
            Other columns, and what the trainer passes. Not used.

    Returns:
        `list[float | None]`: 1.0 or 0.0 for each completion; `None` for a row whose gold answer is missing or cannot
        be parsed, or for which no time is left.

    Raises:
        `ValueError`: the dataset has neither `answer` nor `solution`.
        `ImportError`: math-verify is not installed.

    Example:

    ```python
    >>> math_verify_reward([r"\boxed{\sqrt{12}}", "It is $x + 1$."], answer=[r"2\sqrt{3}", "x - 1"])
    [1.0, 0.0]
    ```
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("`math_verify_reward` needs math-verify: pip install math-verify")
    batch_seconds = SECONDS_PER_BATCH + len(completions) * MEAN_SECONDS_PER_COMPLETION
    deadline = time.monotonic() + batch_seconds

    def warn_of_the_batch() -> None:
        _warn(
            f"math-verify has taken {batch_seconds:g} seconds for a batch of {len(completions)} completions. Those "
            "that it has not compared get no score."
        )

    def score(text: str, gold: str) -> float | None:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            warn_of_the_batch()
            return None
        seconds = min(MAX_SECONDS_PER_COMPLETION, seconds_left)
        try:
            return _math_verifier.compare(_for_math_verify(text), _in_dollars(_answer(gold)), seconds)
        except TimeoutError:
            if seconds_left < MAX_SECONDS_PER_COMPLETION:
                warn_of_the_batch()
                return None
            _warn(
                f"math-verify took too long for a completion (limit: {MAX_SECONDS_PER_COMPLETION:g} seconds), or "
                "crashed. Such completions count as wrong. This warning is shown once."
            )
            return 0.0

    return _scores(score, completions, answer, solution)


def _warn(message: str) -> None:
    """Show a warning; Python shows each message once."""
    warnings.warn(message, RuntimeWarning, stacklevel=1)


def _scores(
    score: Callable[[str, str], float | None], completions: Completions, answer: Column, solution: Column
) -> list[float | None]:
    """Return the `score` of each row's completion and gold answer without their reasoning; `None` without a gold."""
    if answer is None and solution is None:
        raise ValueError("The dataset has neither `answer` nor `solution`. Name the gold answers' column `answer`.")
    absent = [None] * len(completions)
    answers = absent if answer is None else answer
    solutions = absent if solution is None else solution
    scores: list[float | None] = []
    for completion, gold_answer, gold_solution in zip(completions, answers, solutions, strict=True):
        gold = gold_answer if _is_given(gold_answer) else gold_solution
        if not _is_given(gold):
            scores.append(None)
            continue
        text = completion_text(completion)
        scores.append(score(_after_reasoning(text), _after_reasoning(str(gold))))
    return scores


def _is_given(gold: Any) -> bool:
    is_missing = isinstance(gold, float) and math.isnan(gold)  # as pandas has it
    return gold is not None and not is_missing and str(gold).strip() != ""


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """Return the text of a completion: empty if the assistant's last message is missing or has none (a tool call)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content)
    return ""


def _after_reasoning(text: str) -> str:
    return text.rpartition("</think>")[2]


def marked_answer(text: str) -> str | None:
    r"""Return the answer that a text marks by `\boxed{...}`, `<answer>...</answer>` or `#### ...`, or `None`."""
    box = _last_box(text)
    if box is not None:
        return box
    for part in reversed(_ANSWER_OPENS.split(text)[1:]):
        closing = _ANSWER_CLOSES.search(part)
        if closing is not None:
            return part[: closing.start()].strip()
    end = len(text.rstrip())
    for line in reversed(list(_ANSWER_LINE.finditer(text))):
        if line.end() >= end or _NUMBER_FIRST.match(line[1]):
            return line[1].strip()
    return None


def _last_box(text: str) -> str | None:
    r"""Return what is in the `\boxed{...}` that opens last of those that are closed, or `None`, in one pass."""
    contents = None
    last_start = -1
    open_braces: list[tuple[int, bool]] = []  # where what is in them begins, and whether they are those of a box
    for brace in _BRACE.finditer(text):
        if brace[0] in (r"\{", r"\}"):
            continue
        if brace[0] != "}":
            is_box = brace[0] != "{"
            open_braces.append((brace.end(), is_box))
        elif open_braces:
            start, is_box = open_braces.pop()
            if is_box and start > last_start:  # not a box around the last one
                contents = text[start : brace.start()].strip()
                last_start = start
    return contents


def _answer(text: str) -> str:
    """Return the answer that a text marks as such, or else all of it."""
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def _normalized(answer: str) -> str:
    """Return an answer in lower case, with single spaces, and without LaTeX for text and the punctuation around it."""
    answer = _LATEX_TEXT.sub(r"\1", answer)
    if len(answer) <= MAX_NORMALIZED_CHARACTERS:
        answer = unicodedata.normalize("NFKC", answer)
    folded = " ".join(answer.split()).casefold()
    if _HALF_OPEN.fullmatch(folded):
        return folded
    stripped = folded.strip(_AROUND_TEXT)
    if f".{stripped}" in folded and stripped[:1].isdigit():
        return f".{stripped}"  # a decimal
    return stripped or folded  # a text of punctuation alone is an answer too


def answer_number(text: str) -> Fraction | None:
    """Return the number of the marked answer of a text, or of a text without one the last number, or `None`."""
    marked = marked_answer(text)
    if marked is not None:
        return single_number(marked)
    numbers = list(_NUMBER.finditer(_without_latex(text)))
    return _value(numbers[-1]) if numbers else None


def single_number(answer: str) -> Fraction | None:
    r"""
    Return the one number of a short answer such as `$1,200$`, `x = -3` or `12 apples`, or `None`.

    It is `None` for an answer with several numbers or equations (`x = 2 or x = 3`), or with mathematics around its
    number (`2\sqrt{3}`, `3\pi`, `2^{10}`): to read one of them would be wrong.
    """
    plain = _without_latex(answer.strip(" *_")).replace("≈", "=")
    equations = [part for part in _BETWEEN_ANSWERS.split(plain) if "=" in part]
    if len(equations) > 1:
        return None
    right_side = _SIGN_APART.sub(r"\1", plain.rpartition("=")[2])
    numbers = list(_NUMBER.finditer(right_side))
    if len(numbers) != 1:
        return None
    number = numbers[0]
    around = right_side[: number.start()] + " " + right_side[number.end() :]
    return None if _EXPRESSION.search(around) else _value(number)


def _without_latex(text: str) -> str:
    """Return a text with plain minus signs, and with plain text for LaTeX's text, separators, spaces and fractions."""
    text = text.replace("−", "-").replace("–", "-")  # noqa: RUF001
    text = _LATEX_TEXT.sub(r"\1", text)
    text = re.sub(r"\\approx(?![A-Za-z])", "≈", _LATEX_LAYOUT.sub("", text))
    text = _LATEX_SEPARATOR.sub(",", text)
    text = _LATEX_SPACE.sub(" ", text)
    return _LATEX_FRACTION.sub(r"\1/\2", text)


def _value(number: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `_NUMBER`; `None` if it is too long to be read, mixed, or divided by zero."""
    denominator = number["denominator"] or "1"
    if len(number[0]) > MAX_NUMBER_CHARACTERS or number["whole"] or int(denominator) == 0:
        return None
    numerator = number["numerator"].replace(",", "") + (number["exponent"] or "")
    value = Fraction(numerator) / int(denominator)
    return -value if number["sign"] == "-" else value


def _for_math_verify(text: str) -> str:
    r"""Return the marked answer of a text in a form that math-verify reads whole, or else the text."""
    box = _last_box(text)
    if box is not None:
        return rf"\boxed{{{box}}}"
    marked = marked_answer(text)
    return text if marked is None else _in_dollars(marked)


def _in_dollars(answer: str) -> str:
    r"""Put bare LaTeX (`2\sqrt{3}`) between dollars, with which math-verify reads it whole; leave prose as it is."""
    is_prose = _WORD.search(_LATEX_TEXT.sub(" ", answer))
    if is_prose or _LATEX_DELIMITER.search(answer):
        return answer
    return f"${answer.strip(' *')}$"
