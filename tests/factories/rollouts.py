"""Files of rollouts, as TRL and others leave them behind."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd


#: A run whose shares are known: a visit is (step, prompt, rewards of its four completions)
VISITS = [
    *((1, "a", "0000"), (1, "b", "1111"), (1, "c", "0101")),
    *((2, "a", "0000"), (2, "b", "0111"), (2, "c", "1111")),
    *((3, "a", "0001"), (3, "b", "1111"), (3, "c", "1111")),
]


def completions(visits: Iterable[tuple[int, str, str]]) -> list[dict]:
    """Rows of completions, a digit of a visit's rewards each."""
    return [
        {"step": step, "prompt": f"prompt {prompt}", "completion": "x" * (4 * i + 4), "reward": float(digit)}
        for step, prompt, digits in visits
        for i, digit in enumerate(digits)
    ]


def write_tables(folder: Path, rows: Sequence[Mapping], **columns) -> Path:
    """TRL's completion tables, one a step, with an advantage; `columns` are further ones, `(row) -> value`."""
    frame = pd.DataFrame(rows)
    group = frame.groupby(["step", frame["prompt"].astype(str)])["reward"]
    frame["advantage"] = (frame["reward"] - group.transform("mean")) / (group.transform("std").fillna(0.0) + 1e-4)
    for name, value in columns.items():
        frame.insert(len(frame.columns) - 1, name, [value(row) for row in rows])
    frame = frame.rename(columns={"reward": "accuracy"})
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    for step, part in frame.groupby("step"):
        part.reset_index(drop=True).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    return folder


def write_lines(path: Path, rows: Iterable[Mapping]) -> Path:
    """JSON lines, compressed if the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
