"""Logged completions of prompts: TRL's `completions/*.parquet` (`log_completions=True`)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trl_dataeff.tracking.prompt_table import prompt_text


LONGEST = 600  # characters of a completion
MOST_FILES = 200
_KNOWN = {"step", "prompt", "completion", "advantage"}


def examples_of(output_dir: Path, prompts: Iterable[str]) -> dict[str, dict[str, object]]:
    """
    The last logged completion of each of these prompts with the highest advantage.

    Args:
        output_dir (`Path`): of the run.
        prompts (`Iterable[str]`): their texts, as `prompt_text` gives them.

    Returns:
        `dict`: by prompt, `step`, `completion` (its beginning) and `rewards` by reward function; without prompts that no file has.
    """
    wanted = set(prompts)
    found: dict[str, dict[str, object]] = {}
    for path in sorted((output_dir / "completions").glob("completions_*.parquet"), reverse=True)[:MOST_FILES]:
        if len(found) == len(wanted):
            break
        try:
            rows = pq.read_table(path).to_pylist()
        except (OSError, ValueError, pa.ArrowException):
            continue
        rows.sort(key=_advantage, reverse=True)
        for row in rows:
            text = prompt_text(row.get("prompt"))
            if text in wanted and text not in found:
                rewards = {
                    name: row[name] for name in row if name not in _KNOWN and isinstance(row[name], (int, float))
                }
                completion = prompt_text(row.get("completion"))[:LONGEST]
                found[text] = {"step": row.get("step"), "completion": completion, "rewards": rewards}
    return found


def _advantage(row: dict[str, object]) -> float:
    value = row.get("advantage")
    return value if isinstance(value, float) else 0.0
