"""Summary of a run: what happened in each pass over the questions, and success before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from trl_dataeff.utils import PREFIX


#: Of the logs. A run has no metric of what is switched off
METRICS = [
    "selector/uniform_effective_ratio",
    "rollouts_replayed",
    "update/tokens",
    "update/tokens_saved",
    "update/seconds",
    "time/generation_s",
]
KINDS = ["effective", "easy", "hard"]
MARGIN = " " * 11


def by_pass(logs: Sequence[dict[str, Any]], groups: pd.DataFrame, prompts: int) -> pd.DataFrame:
    """Sum up the passes of a run.

    Args:
        logs (`Sequence[dict]`): What the trainer logged, in order.
        groups (`pd.DataFrame`): The run's `groups.parquet`.
        prompts (`int`): Number of prompts of the dataset.

    Returns:
        `pd.DataFrame`: A row for each pass, which is as many groups as there are prompts; the last one may have fewer.
        Columns: the groups `generated`, and the shares of them that are `effective`, `easy` and `hard`; `uniform`, the
        share of effective groups that uniform draws would have found, as the selector estimates it; the groups
        `replayed`; tokens that the update `computed` and that it `left out`; seconds of `update` and `generation`.
        What the run did not log is NaN.

    Raises:
        ValueError: If no log has a count of rollouts.
    """
    logs = [log for log in logs if PREFIX + "rollouts_generated" in log]
    if not logs:
        raise ValueError(f"No log has `{PREFIX}rollouts_generated`. Train at least `logging_steps` steps.")
    metrics = pd.DataFrame(logs).reindex(columns=[PREFIX + name for name in METRICS])
    metrics.columns = METRICS
    last_step = pd.Series([log["step"] for log in logs])
    steps = last_step.diff().fillna(last_step)
    replayed = metrics["rollouts_replayed"] / groups["completions"].iloc[0]
    computed = steps * metrics["update/tokens"]
    by_log = pd.DataFrame(
        {
            "replayed": replayed.diff().fillna(replayed),
            "computed": computed,
            "left out": computed / (1 - metrics["update/tokens_saved"]) - computed,
            "update": steps * metrics["update/seconds"],
            "generation": steps * metrics["time/generation_s"],
        }
    )
    pass_of_group = np.arange(len(groups)) // prompts + 1
    # A log is of the pass of the newest group that was generated before it
    groups_before = np.searchsorted(groups["step"], last_step)
    pass_of_log = pass_of_group[groups_before - 1]

    shares = pd.crosstab(pass_of_group, groups["kind"].to_numpy(), rownames=["pass"], normalize="index")
    passes = shares.reindex(columns=KINDS, fill_value=0.0)
    passes.insert(0, "generated", pd.Series(pass_of_group).value_counts())
    passes["uniform"] = metrics["selector/uniform_effective_ratio"].groupby(pass_of_log).mean()
    return passes.join(by_log.groupby(pass_of_log).sum(min_count=1))


def render_training(passes: pd.DataFrame, steps: int, prompts: int, seconds: float) -> str:
    """Return what happened in training as text.

    Args:
        passes (`pd.DataFrame`): See [`by_pass`].
        steps (`int`): Optimizer steps.
        prompts (`int`): Questions that were trained on.
        seconds (`float`): How long the training command took.
    """
    minutes, rest = divmod(round(seconds), 60)
    lines = ["", f"Trained {steps} steps in {minutes} min {rest:02d} s, a pass for each {prompts} groups."]
    columns = {"generated": "{:,.0f}", "effective": "{:.0%}", "easy": "{:.0%}", "hard": "{:.0%}"}
    lines += ["", "Groups", *_table(passes, {**columns, "uniform": "{:.0%}", "replayed": "{:,.0f}"})]
    lines.append(f"{MARGIN}effective: right and wrong answers, so a gradient; easy, hard: none")
    if passes["uniform"].notna().any():
        lines.append(f"{MARGIN}uniform: what uniform draws would find, by the selector's estimate")
    columns = {"computed": "{:,.0f}", "left out": "{:,.0f}"}
    lines += ["", "Update     tokens of the update, and seconds"]
    lines += _table(passes, {**columns, "update": "{:,.0f} s", "generation": "{:,.0f} s"})
    if passes["computed"].notna().any():
        share = passes["computed"].sum() / (passes["computed"] + passes["left out"]).sum()
        lines.append(f"{MARGIN}In all, {share:.0%} of the tokens of TRL's update were computed")
    return "\n".join(lines)


def render_success(before: dict[str, float], after: dict[str, float], n: int) -> str:
    """Return the success rates on `n` held-out questions, by task, before and after training, as text."""
    rates = pd.DataFrame({"before": before, "after": after})
    lines = ["", f"Success    on {n} questions that were not trained on, one sampled answer each"]
    return "\n".join(lines + _table(rates, {"before": "{:.0%}", "after": "{:.0%}"}))


def _table(values: pd.DataFrame, formats: dict[str, str]) -> list[str]:
    """The columns of `formats` that have a value, aligned to the right behind the names of the rows."""
    columns = [[values.index.name or "", *map(str, values.index)]]
    for name, form in formats.items():
        if values[name].notna().any():
            columns.append([name, *["-" if np.isnan(value) else form.format(value) for value in values[name]]])
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for name, *cells in zip(*columns, strict=True):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append(MARGIN + "  ".join([name.ljust(widths[0]), *aligned]))
    return lines
