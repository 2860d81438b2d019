"""The report of a run: what its page and its summary in the terminal say."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from trl_dataeff.analysis.advice import advice_of
from trl_dataeff.analysis.page import Cell, Column, Page, Table
from trl_dataeff.tracking import summaries
from trl_dataeff.tracking.drawing import count, duration, smooth
from trl_dataeff.tracking.examples import examples_of
from trl_dataeff.tracking.figures import plots_of
from trl_dataeff.tracking.recorded import RecordedRun


MOST_PROMPTS = 40  # of a table
MOST_COLUMNS = 4  # of the dataset, that are shown unless others are named
METHODS = {
    "UniformSelector": "uniform selection",
    "DotsSelector": "DOTS",
    "GresoSelector": "GRESO",
    "DotsGresoSelector": "DOTS with GRESO",
    "NoneType": "prompts in the order of the dataset",
}
NOTES = {
    "always solved": "Every completion of every group had the highest reward: these prompts carried no gradient.",
    "never solved": "No completion of any group was rewarded. They are too hard, or the reward function does not accept a right answer.",
    "became solvable": "No completion of the first group was rewarded, and some of the last one were.",
}


def make_page(run: RecordedRun, by: Sequence[str] | None = None) -> Page:
    """
    The report of a run.

    Args:
        run ([`RecordedRun`]): the run.
        by (`Sequence[str]`, *optional*): columns of the dataset for the heat maps; by default the first `MOST_COLUMNS` that have
            few values.
    """
    columns = summaries.columns_of(run)[:MOST_COLUMNS] if by is None else by
    arguments = run.about.get("arguments", {})
    changed = {name: _text(arguments[name]) for name in run.about.get("changed", []) if name in arguments}
    settings = {"changed": changed, "all": {name: _text(value) for name, value in sorted(arguments.items())}}
    return Page(
        title=f"Run {run.name}",
        subtitle=subtitle(run),
        tiles=tiles(run),
        advice=advice_of(run),
        missing=[*run.missing, *_absent(run)],
        plots=plots_of(run, columns),
        tables=prompt_tables(run),
        command=str(run.about.get("command", "")),
        settings=settings if arguments else {},
    )


def subtitle(run: RecordedRun) -> str:
    """Model, method, size of the dataset, and when the run began, as far as they are known."""
    dataset = run.about.get("dataset") or {}
    resumed = len(run.about.get("resumed") or [])
    parts = [
        run.about.get("model"),
        method(run),
        f"{dataset['size']:,} prompts" if dataset.get("size") else None,
        f"started {run.about['started'][:16].replace('T', ' ')}" if run.about.get("started") else None,
        f"resumed {resumed} time{'s' * (resumed > 1)}" if resumed else None,
    ]
    return " · ".join(str(part) for part in parts if part)


def method(run: RecordedRun) -> str:
    """How prompts were selected, and what else was on."""
    if not run.about:
        return ""
    selector = str((run.about.get("settings") or {}).get("selector", ""))
    parts = [METHODS.get(selector, selector)]
    if run.argument("replay_fraction") and run.argument("fresh_groups") == "adaptive":
        parts.append("replay, adaptive number of fresh groups")
    elif run.argument("replay_fraction"):
        parts.append(f"replay of {run.argument('replay_fraction'):.0%}")
    if run.argument("dynamic_sampling"):
        parts.append("dynamic sampling")
    if run.argument("sequential_rollouts"):
        parts.append("sequential rollouts")
    if run.argument("advantage_baseline") == "tracked":
        parts.append("tracked baseline")
    return " + ".join(parts)


def tiles(run: RecordedRun) -> list[tuple[str, str]]:
    """The numbers at the top: value and what it is."""
    found = []
    for name, text, label in (
        ("rollouts", count, "rollouts generated"),
        ("tokens", count, "tokens generated"),
        ("step", count, "optimizer steps"),
        ("seconds", duration, "of training"),
    ):
        values = run.series(name)[1]
        if len(values):
            found.append((text(float(values[-1])), label))
    if not found and run.groups is not None:
        sizes = run.groups["completions"] if "completions" in run.groups.column_names else None
        if sizes is not None and not sizes.null_count:
            found.append((count(pc.sum(sizes).as_py() or 0), "rollouts generated"))
        else:
            what = "rollouts generated" if run.group_size else "groups"
            found.append((count(len(run.groups) * (run.group_size or 1)), what))
    trained, generated = run.last("dataeff/rollouts_trained"), run.last("rollouts")
    if generated > 0 and np.isfinite(trained):
        found.append((f"{trained / generated:.2f}", "trained on per completion generated"))
    if run.groups is not None and len(run.groups):
        found.append((f"{pc.mean(pc.equal(run.groups['kind'], 'effective')).as_py():.0%}", "of the groups effective"))
    elif (shares := summaries.kind_shares(run)[1]).size:
        found.append((f"{shares[0].mean():.0%}", "of the groups effective"))
    for metric, label in (("reward", "reward in training"), (run.held_out, "held-out reward")):
        values = run.series(metric)[1] if metric else np.empty(0)
        if len(values):
            means = smooth(values)  # as the figure has them
            found.append((f"{means[0]:.2f} → {means[-1]:.2f}", label))
    return found


def summary(run: RecordedRun) -> list[str]:
    """The report for a terminal."""
    lines = [f"Run {run.name}", *([f"  {subtitle(run)}"] if subtitle(run) else [])]
    width = max((len(value) for value, _ in tiles(run)), default=0)
    lines += [f"  {value:>{width}}  {label}" for value, label in tiles(run)]
    found = {name: len(table) for name, table in summaries.outcomes(run).items() if len(table)}
    if found:
        lines.append("  prompts: " + ", ".join(f"{number:,} {name}" for name, number in found.items()))
    lines += [f"  ! {item.what} {item.do}" for item in advice_of(run)]
    lines += [f"  - {text}" for text in [*run.missing, *_absent(run)]]
    return lines


def _absent(run: RecordedRun) -> list[str]:
    if run.groups is None and not any("groups.parquet" in text for text in run.missing):
        return [
            "Groups and prompts are not shown: there is no `dataeff/groups.parquet`. Runs of `DataEfficientGRPOTrainer` write it."
        ]
    if run.groups is not None and not len(run.groups):
        return ["Groups are not shown: `dataeff/groups.parquet` is empty."]
    if not run.lines:
        return ["Metrics are not shown: there is no `dataeff/metrics.jsonl`."]
    return []


def prompt_tables(run: RecordedRun) -> list[Table]:
    """Prompts by what became of them, with examples of logged completions."""
    tables = summaries.outcomes(run)
    shown = {name: table.head(MOST_PROMPTS) for name, table in tables.items()}
    texts: dict[int, str] = {}
    extra: list[str] = []
    if run.prompts is not None:
        wanted = pd.concat(list(shown.values()))["prompt_id"]
        prompts = run.prompts.to_pandas().set_index("prompt_id")
        prompts = prompts[prompts.index.isin(wanted)]
        texts = prompts["prompt"].astype(str).to_dict()
        extra = summaries.columns_of(run)[:2]
    examples = examples_of(run.path, texts.values())
    found = []
    for name, table in tables.items():
        if not len(table):
            continue
        columns = [Column("prompt", True), Column("text"), *(Column(column) for column in extra)]
        columns += [Column(title, True) for title in ("groups", "first", "last")]
        rows = []
        for row in shown[name].itertuples():
            text = texts.get(row.prompt_id, "")
            cells = [
                Cell(str(row.prompt_id), row.prompt_id),
                Cell(_short(text), None, _details(text, examples.get(text))),
            ]
            cells += [Cell(_short(str(prompts.at[row.prompt_id, column]), 30)) for column in extra]
            cells.append(Cell(str(row.groups), row.groups))
            cells += [Cell(f"{rate:.0%}", rate) for rate in (row.first, row.last)]
            rows.append(cells)
        more = f" The {MOST_PROMPTS} with the most groups." if len(table) > MOST_PROMPTS else ""
        found.append(Table(f"{len(table):,} prompt{'s' * (len(table) > 1)} {name}", columns, rows, NOTES[name] + more))
    return found


def _details(text: str, example: dict[str, object] | None) -> list[dict[str, str]]:
    parts = [{"label": "prompt", "text": text}] if len(text) > len(_short(text)) or "\n" in text else []
    if example is not None:
        rewards = ", ".join(f"{name} {value:.3g}" for name, value in example["rewards"].items())  # type: ignore[attr-defined]
        parts.append({"label": f"completion at step {example['step']}: {rewards}", "text": str(example["completion"])})
    return parts


def _short(text: str, longest: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
