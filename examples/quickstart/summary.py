"""Summary of a run, from its logs and its table of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from trl_dataeff.utils import PREFIX


#: Kinds of groups, in words
KINDS = {
    "effective": "in groups with right and wrong answers, which carry a gradient",
    "easy": "in groups with right answers alone: no gradient",
    "hard": "in groups with wrong answers alone: no gradient",
}


class Run(NamedTuple):
    """
    Steps, completions (generated = trained + dropped + waiting for a next step), success rates of rollouts, and the
    mean over the steps of the share of the tokens of TRL's update that ours computed; None if that was not logged.
    """

    steps: int
    generated: int
    trained: int  # once or more often
    replayed: int  # times that one was trained on again
    dropped: int
    first_success: float
    last_success: float
    tokens_computed: float | None

    @property
    def waiting(self) -> int:
        return self.generated - self.trained - self.dropped


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
    saved = [log[PREFIX + "update/tokens_saved"] for log in steps if PREFIX + "update/tokens_saved" in log]
    tokens_computed = 1 - _mean(saved) if saved else None
    return Run(
        steps=last["step"],
        generated=round(last[PREFIX + "rollouts_generated"]),
        trained=round(last[PREFIX + "rollouts_trained"] - replayed),
        replayed=round(replayed),
        dropped=round(last.get(PREFIX + "rollouts_discarded", 0)),
        first_success=_mean(rates[:n]),
        last_success=_mean(rates[-n:]),
        tokens_computed=tokens_computed,
    )


def render(
    run: Run,
    seconds: float,
    model: str | Path,
    before: dict[str, float] | None,
    after: dict[str, float] | None,
    n: int,
    groups: dict[str, int],
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
    """
    lines = _training_lines(run, seconds, groups)
    lines.append("")
    if before is None or after is None:
        lines += [
            "Success    of the first and of the last rollouts (other questions, so only roughly comparable)",
            f"           {run.first_success:4.0%} at the start, {run.last_success:.0%} at the end",
        ]
    else:
        lines += _success_lines(before, after, n)
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
    if run.tokens_computed is not None:
        lines += [
            "",
            f"Update     {run.tokens_computed:4.0%} of the tokens that TRL's would compute: no padding, no rows",
            "                without a gradient, and each prompt once",
        ]
    return lines


def _success_lines(before: dict[str, float], after: dict[str, float], n: int) -> list[str]:
    lines = [
        f"Success    on {n} questions that were not trained on, one sampled answer each",
        f"           {'':10}   before   after",
    ]
    for task in before:
        lines.append(f"           {task:10}{before[task]:>9.0%}{after[task]:>8.0%}")
    return lines


def _mean(values: list[float]) -> float:
    if not values:
        return float("nan")
    return sum(values) / len(values)
