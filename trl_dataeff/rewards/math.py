"""Reward 1 for a mathematically equal answer, by math-verify (extra `math`)."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

from trl_dataeff.rewards.text import Completion, marked_answer, score_answers, without_reasoning


PARSING_TIMEOUT_S = 10
VERIFY_TIMEOUT_S = 5

_WORD = re.compile(r"(?<!\\)\b[^\W\d_]{3,}")


def math_verify_reward(
    completions: Sequence[Completion],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that checks with math-verify whether the completion's answer equals the gold answer: 1.0 or 0.0.

    Like TRL's `accuracy_reward`, and beyond it: takes plain text as well as conversations, reads `answer` as well as
    `solution`, understands `#### 42` in gold answers, and accepts an answer outside of LaTeX (`so it is 34`). Needs
    `pip install math-verify`.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions to be evaluated, plain or conversational.
        answer (`list`, *optional*):
            Gold answers: LaTeX with or without `$`, a number, or text with a marked answer (`\boxed{...}`, `#### ...`).
            A row without one falls back on `solution`.
        solution (`list`, *optional*):
            Gold answers of the rows without `answer`.
        **kwargs:
            Other columns and what the trainer passes; not used.

    Returns:
        `list[float | None]`:
            1.0 or 0.0; `None` for a row whose gold answer is missing or cannot be parsed, which the trainer leaves out.

    Example:

    ```python
    >>> from trl_dataeff.rewards import math_verify_reward

    >>> math_verify_reward([r"It is \boxed{\frac{2}{6}}.", "It is 34."], answer=[r"\frac{1}{3}", "35"])
    [1.0, 0.0]
    ```
    """
    require_math_verify("math_verify_reward")
    return score_answers("math_verify_reward", completions, answer, solution, _score)


def require_math_verify(name: str) -> None:
    """Raise an `ImportError` that names the extra if math-verify is not installed."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ImportError(f"`{name}` needs math-verify: pip install math-verify") from error


def _score(text: str, gold: str) -> float | None:
    from math_verify import parse, verify

    # math-verify stops a parse by SIGALRM, which only the main thread may use
    in_main_thread = threading.current_thread() is threading.main_thread()
    parsing_timeout = PARSING_TIMEOUT_S if in_main_thread else None
    gold_parsed = parse(_as_latex(gold), parsing_timeout=parsing_timeout)
    if not gold_parsed:
        return None
    text_parsed = parse(without_reasoning(text), parsing_timeout=parsing_timeout)
    return float(verify(gold_parsed, text_parsed, timeout_seconds=VERIFY_TIMEOUT_S if in_main_thread else None))


def _as_latex(gold: str) -> str:
    r"""Return a gold answer as math-verify reads it whole: bare LaTeX (`2\sqrt{3}`) gets its dollar signs."""
    marked = marked_answer(gold)
    text = gold.strip() if marked is None else marked
    is_bare = "$" not in text and r"\(" not in text and r"\[" not in text and not _WORD.search(text)
    return f"${text}$" if is_bare else text
