"""Where the answer stands in a completion: plain text and conversations, reasoning, `\\boxed{}`, `#### 42`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any


#: A completion as a reward function gets it: plain text, or the messages of a conversation.
Completion = str | list[dict[str, Any]]

_REASONING_END = "</think>"
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def completion_text(completion: Completion) -> str:
    """
    Return the text of a completion.

    Args:
        completion (`str` or `list[dict]`):
            Plain text, or messages, of which the last one of the assistant counts. Content in parts is joined.

    Returns:
        `str`:
            The text; empty if there is no message of the assistant, or one without content (a tool call).
    """
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content if part.get("type", "text") == "text")
    return ""


def without_reasoning(text: str) -> str:
    """Return what follows the last `</think>`; the whole text if there is none."""
    return text.rpartition(_REASONING_END)[2]


def marked_answer(text: str) -> str | None:
    r"""
    Return the answer that a text marks as such: the last `\boxed{...}`, else the last `<answer>...</answer>`, else what
    follows the last `####` on its line; `None` if it marks none. Braces inside `\boxed{}` are matched.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    for pattern in (_TAGGED, _HASHES):
        matches: list[str] = pattern.findall(text)
        if matches:
            return matches[-1].strip()
    return None


def final_answer(text: str) -> str:
    """Return the answer that a text marks after its reasoning, or all of the text after its reasoning."""
    text = without_reasoning(text)
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def score_answers(
    name: str,
    completions: Sequence[Completion],
    answer: Sequence[Any] | None,
    solution: Sequence[Any] | None,
    score: Callable[[str, str], float | None],
) -> list[float | None]:
    """
    Compare each completion with its gold answer: the column `answer`, and where it is missing the column `solution`.

    Args:
        name (`str`):
            Reward function that asks, for the message.
        completions (`list`):
            Completions, as many as there are rows.
        answer, solution (`list`, *optional*):
            Columns of the dataset.
        score (`Callable`):
            Texts of a completion and of its gold answer -> score.

    Returns:
        `list[float | None]`:
            Scores; `None` where a row has no gold answer.
    """
    if answer is None and solution is None:
        raise ValueError(
            f"`{name}` compares with the dataset's column `answer` or `solution`, and got neither. Add one, or name "
            "the column that has it (`answer_column` in a recipe)."
        )
    missing = [None] * len(completions)
    pairs = zip(answer if answer is not None else missing, solution if solution is not None else missing, strict=True)
    golds = (first if _is_given(first) else second for first, second in pairs)
    return [
        score(completion_text(completion), str(gold)) if _is_given(gold) else None
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _is_given(value: Any) -> bool:
    return value is not None and str(value).strip() != ""


def _last_boxed(text: str) -> str | None:
    for opening in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for i in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[opening.end() : i].strip()
    return None
