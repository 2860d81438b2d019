"""Reward 1 for the gold answer, word for word."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from trl_dataeff.rewards.text import Completion, final_answer, score_answers


_AROUND = " \t\n\r.,;:!?\"'`*$“”‘’«»()[]"  # noqa: RUF001


def exact_answer_reward(
    completions: Sequence[Completion],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that checks whether the completion is the gold answer: 1.0 if so, else 0.0.

    Compared is what the completion marks as its answer (`\boxed{...}`, `<answer>...</answer>`, `#### ...`), or else the
    whole completion after its reasoning (`</think>`). Case, spaces and the punctuation around it do not count.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions to be evaluated, plain or conversational.
        answer (`list`, *optional*):
            Gold answers. A row without one falls back on `solution`.
        solution (`list`, *optional*):
            Gold answers of the rows without `answer`.
        **kwargs:
            Other columns and what the trainer passes; not used.

    Returns:
        `list[float | None]`:
            1.0 or 0.0; `None` for a row without gold answer, which the trainer leaves out.

    Example:

    ```python
    >>> from trl_dataeff.rewards import exact_answer_reward

    >>> exact_answer_reward(["Paris.", "I think Rome", r"It is \boxed{paris}"], answer=["Paris", "Rome", "Paris"])
    [1.0, 0.0, 1.0]
    ```
    """
    return score_answers("exact_answer_reward", completions, answer, solution, _score)


def _score(text: str, gold: str) -> float:
    return float(normalized(final_answer(text)) == normalized(final_answer(gold)))


def normalized(text: str) -> str:
    """Return `text` in lower case, with single spaces, and without the punctuation around it."""
    folded = re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text)).strip().casefold()
    # A text of punctuation alone is an answer too
    return folded.strip(_AROUND) or folded
