"""Summary of a run, from its logs and its table of groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from trl_dataeff.tracking.files import PREFIX


RECORDED = Path(__file__).with_name("plain_grpo.json")
#: Kinds of groups, in words
KINDS = {
    "effective": "in groups with right and wrong answers, which carry a gradient",
    "easy": "in groups with right answers alone: no gradient",
    "hard": "in groups with wrong answers alone: no gradient",
}


class Run(NamedTuple):
    """Steps, completions (generated = trained + dropped + waiting for a next step), and success rates of rollouts."""

    steps: int
    generated: int
    trained: int  # once or more often
    replayed: int  # times that one was trained on again
    dropped: int
    first_success: float
    last_success: float

    @property
    def waiting(self) -> int:
        return self.generated - self.trained - self.dropped


class Recorded(NamedTuple):
    """What plain GRPO reached: from `python -m examples.quickstart`, with the recipe's seed and as many rollouts."""

    command: str
    rollouts: int
    success: dict[str, float]

    @classmethod
    def load(cls) -> Recorded:
        return cls(**json.loads(RECORDED.read_text(encoding="utf-8")))

    def save(self) -> None:
        RECORDED.write_text(json.dumps(self._asdict(), indent=2) + "\n", encoding="utf-8")


def count_kinds(output_dir: str | Path) -> dict[str, int]:
    """Number of effective, easy and hard groups, from the run's `groups.parquet`."""
    table = pq.read_table(Path(output_dir) / "dataeff" / "groups.parquet", columns=["kind"])
    return {entry["values"]: entry["counts"] for entry in table["kind"].value_counts().to_pylist()}


def sum_up(logs: list[dict[str, Any]], window: int = 5) -> Run:
    """Sum up a run.

    Args:
        logs (`list[dict]`): What the trainer logged, in order.
        window (`int`, *optional*, defaults to `5`): Logs at the start, and at the end, whose success rates are
            averaged. Half of the logs if there are fewer than twice as many.

    Returns:
        [`Run`]: The cumulative counts of the last log, and the two averages.

    Raises:
        ValueError: If no log has a count of rollouts.
    """
    steps = [log for log in logs if PREFIX + "rollouts_generated" in log]
    if not steps:
        raise ValueError(
            f"None of the {len(logs)} logs has `{PREFIX}rollouts_generated`. Train at least `logging_steps` steps."
        )
    last = steps[-1]
    replayed = last.get(PREFIX + "rollouts_replayed", 0)
    rates = [log[PREFIX + "success_rate"] for log in steps if PREFIX + "success_rate" in log]
    n = max(1, min(window, len(rates) // 2))
    return Run(
        steps=last["step"],
        generated=round(last[PREFIX + "rollouts_generated"]),
        trained=round(last[PREFIX + "rollouts_trained"] - replayed),
        replayed=round(replayed),
        dropped=round(last.get(PREFIX + "rollouts_discarded", 0)),
        first_success=_mean(rates[:n]),
        last_success=_mean(rates[-n:]),
    )


def render(
    run: Run,
    seconds: float,
    model: str | Path,
    before: dict[str, float] | None,
    after: dict[str, float] | None,
    n: int,
    groups: dict[str, int],
    plain: Recorded | None = None,
) -> str:
    """Return the summary as text.

    Args:
        run ([`Run`]): What was trained.
        seconds (`float`): How long the training command took.
        model (`str` or `Path`): Where the adapter is.
        before (`dict`, *optional*): Success rates by task on held-out questions before training. Without them, the
            summary has the rollouts' own.
        after (`dict`, *optional*): The same after training.
        n (`int`): Number of held-out questions.
        groups (`dict`): Number of groups of each kind.
        plain ([`Recorded`], *optional*): What to compare with.
    """
    lines = _training_lines(run, seconds, groups)
    lines.append("")
    if before is None or after is None:
        lines += [
            "Success    of the first and of the last rollouts (other questions, so only roughly comparable)",
            f"           {run.first_success:4.0%} at the start, {run.last_success:.0%} at the end",
        ]
    else:
        lines += _success_lines(before, after, n, plain)
    lines += ["", f"Model      {model}  (a LoRA adapter)"]
    return "\n".join(lines)


def _training_lines(run: Run, seconds: float, groups: dict[str, int]) -> list[str]:
    minutes, rest = divmod(round(seconds), 60)
    lines = [
        "",
        f"Trained {run.steps} steps in {minutes} min {rest:02d} s.",
        "",
        f"Rollouts   {run.generated:,} generated",
    ]
    total = sum(groups.values())
    for kind, words in KINDS.items():
        share = groups.get(kind, 0) / total
        lines.append(f"           {share:4.0%} {words}")
    lines.append(f"           {run.trained:,} trained on")
    if run.replayed:
        lines.append(f"           {run.replayed:,} times one of them was trained on again (replay)")
    if run.dropped:
        lines.append(f"           {run.dropped:,} dropped: their groups carry no gradient")
    if run.waiting:
        lines.append(f"           {run.waiting:,} waiting: kept for a next step that was not reached")
    return lines


def _success_lines(before: dict[str, float], after: dict[str, float], n: int, plain: Recorded | None) -> list[str]:
    columns = {"before": before, "after": after}
    if plain is not None:
        columns["plain GRPO"] = plain.success
    names = "".join(f"   {name}" for name in columns)
    lines = [
        f"Success    on {n} questions that were not trained on, one sampled answer each",
        f"           {'':10}{names}",
    ]
    for task in before:
        cells = [f"{rates[task]:>{len(name) + 3}.0%}" for name, rates in columns.items()]
        lines.append(f"           {task:10}{''.join(cells)}")
    if plain is not None:
        lines += [
            "",
            f"           plain GRPO: GRPOTrainer with the same seed and {plain.rollouts:,} rollouts, recorded by",
            f"           {plain.command}",
        ]
    return lines


def _mean(values: list[float]) -> float:
    if not values:
        return float("nan")
    return sum(values) / len(values)
