"""
Completions as columns of numbers, and what their columns are called in the files of several frameworks.

    TRL 1.16     completions/completions_00010.parquet: `step`, `prompt`, `completion`, a column per reward function, those
                 of `log_extra`, and `advantage` (`GRPOTrainer.log`, with `log_completions=True`)
    verl         `trainer.rollout_data_dir`/10.jsonl: `input`, `output`, `gts`, `score`, `step`
                 (`RayPPOTrainer._dump_generations`)
    prime-rl     rollouts/step_10/train_rollouts.jsonl: `example_id`, `prompt`, `completion`, `reward`, ...
                 (`save_rollouts`, verifiers' `RolloutOutput`)
    OpenRLHF     `input`, `output`, `reward` (`openrlhf.cli.batch_inference`); its trainers write no rollouts
    open-instruct  `prompt_idx`, `reward`, `step`, `response_tokens` (`RolloutRecord`)

Other names are given by the user. A prompt is known by a hash of its text, its messages, or its number.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from trl_dataeff.utils import UserError


class UnreadableRollouts(UserError):
    """What is wrong with a file of rollouts, in one sentence. `corrupt`: it is one, but cannot be read."""

    def __init__(self, message: str, corrupt: bool = False):
        super().__init__(message)
        self.corrupt = corrupt


@dataclass(frozen=True)
class Format:
    """A framework's names for `prompt`, `completion`, `reward`, `step` and `tokens`, and what tells it from others."""

    name: str
    marks: tuple[str, ...]
    columns: Mapping[str, str]


TRL = Format("TRL completion tables", ("step", "prompt", "completion", "advantage"), {"prompt": "prompt", "completion": "completion", "step": "step"})  # fmt: skip
FORMATS = (
    TRL,
    Format("verl rollouts", ("input", "output", "score"), {"prompt": "input", "completion": "output", "reward": "score", "step": "step"}),
    Format("prime-rl rollouts", ("example_id", "reward"), {"prompt": "prompt", "completion": "completion", "reward": "reward", "step": "step"}),
    Format("OpenRLHF rollouts", ("input", "output", "reward"), {"prompt": "input", "completion": "output", "reward": "reward", "step": "step"}),
    Format("open-instruct rollouts", ("prompt_idx", "reward"), {"prompt": "prompt_idx", "tokens": "response_tokens", "reward": "reward", "step": "step"}),
)  # fmt: skip
#: Names that are tried in files of no known framework
USUAL = {
    "prompt": ("prompt", "input", "question", "query", "problem", "prompt_id", "example_id"),
    "completion": ("completion", "output", "response", "completions", "outputs", "responses"),
    "reward": ("reward", "score", "rewards", "scores", "total_reward"),
    "step": ("step", "global_step", "training_step", "iteration", "train_step"),
    "tokens": ("tokens", "completion_tokens", "response_tokens", "completion_length", "response_length", "completion_ids"),
}  # fmt: skip
ROLES = tuple(USUAL)
TEXTS, TEXT_LENGTH = 4096, 2000  # prompts whose text is kept, and how much of it
SHOWN = 8  # columns, in a message


class Prompts:
    """Numbers of prompts, in the order in which they occur; the texts of the first ones are kept."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.texts: list[str] = []

    def number(self, text: str) -> int:
        """The number of a prompt."""
        key = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).digest()
        found = self._numbers.setdefault(key, len(self._numbers))
        if found == len(self.texts) < TEXTS:
            self.texts.append(text[:TEXT_LENGTH])
        return found


@dataclass(frozen=True)
class Rows:
    """
    Completions as columns `(n,)`; NaN where something is not known. `content` is a hash of the text, 0 where it is not needed, and
    `reward_columns` what `reward` is the sum of.
    """

    step: np.ndarray
    prompt: np.ndarray
    reward: np.ndarray
    advantage: np.ndarray
    tokens: np.ndarray
    characters: np.ndarray
    content: np.ndarray
    file: Path
    format: str
    reward_columns: str
    several_rewards: bool = False
    has_steps: bool = True
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.step)

    def take(self, chosen: np.ndarray) -> Rows:
        """The chosen rows, by a mask or by positions."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in ARRAYS})

    @classmethod
    def joined(cls, parts: list[Rows]) -> Rows:
        """The rows of several files, one after the other."""
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
        notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        has_steps = all(part.has_steps for part in parts)
        if not has_steps and len(parts) > 1:  # a file is a step
            columns["step"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return replace(parts[0], **columns, notes=notes, has_steps=has_steps or len(parts) > 1)


ARRAYS = tuple(f.name for f in fields(Rows) if f.type == "np.ndarray")


def shown(files: list[Path]) -> str:
    """The files of a run, in a message."""
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"


def resolve(file: Path, names: list[str], given: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The format of a file with columns `names`, and its columns by role."""
    found = next((f for f in FORMATS if set(f.marks) <= set(names)), None)
    chosen = {role: name for role in ROLES for name in reversed(USUAL[role]) if name in names}
    if found:
        chosen.update({role: name for role, name in found.columns.items() if name in names})
        if "reward" not in found.columns and "reward" not in given:
            chosen.pop("reward", None)
    wanted = [name for role, text in given.items() for name in (terms_of(text) if role == "reward" else [text])]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise UnreadableRollouts(f"{file} has no column {missing[0]!r} (--map). It has {listed_columns(names)}.")
    chosen.update(given)
    lacking = [
        role for role in ("prompt", "reward") if role not in chosen and not (found and role not in found.columns)
    ]
    if lacking:
        raise UnreadableRollouts(
            f"{file} has no column for the {' and the '.join(lacking)}; it has {listed_columns(names)}. Name it: "
            f"--map {','.join(f'{role}=COLUMN' for role in lacking)}."
        )
    return found.name if found else "rollouts", chosen


def listed_columns(names: list[str]) -> str:
    """The first columns of a file, in a message."""
    return (", ".join(names[:SHOWN]) or "no column") + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )


def terms_of(reward: str) -> dict[str, float]:
    """`"accuracy+0.5*format"` as weights by column."""
    terms = {}
    for term in filter(None, reward.split("+")):
        weight, times, name = term.strip().rpartition("*")
        try:
            terms[name.strip()] = float(weight) if times else 1.0
        except ValueError:
            terms[term.strip()] = 1.0
    return terms


def _step_of_path(file: Path, folders: int) -> int | None:
    """The step in a path such as `rollouts/step_12/train_rollouts.jsonl`, `12.jsonl` or `completions_00012.parquet`."""
    # A folder for each step may have a file for each process
    of_folder = re.fullmatch(r"(?:global\D?)?step\D?(\d+)", file.parent.name) if folders > 1 else None
    found = of_folder or re.search(r"(\d+)\.\w+(\.gz)?$", file.name) or re.search(r"step\D?(\d+)", file.parent.name)
    return int(found.group(1)) if found else None


def no_rows(file: Path, kind: str) -> Rows:
    """The rows of an empty file."""
    none = np.empty(0)
    return Rows(none.astype(np.int64), none.astype(np.int64), none, none, none, none, none, file, kind, "")


def with_steps(rows: Rows, file: Path, recorded: bool, folders: int) -> Rows:
    """Steps from the path, where the rows have none, and the path is one of several."""
    if recorded:
        return rows
    step = _step_of_path(file, folders) if folders else None
    if step is None:
        return replace(rows, has_steps=False)
    return replace(rows, step=np.full(len(rows), step), has_steps=True)
