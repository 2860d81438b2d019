"""What a model card says of the run: method, settings, data, rollouts, figures, command, and what to cite."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
from transformers.utils import logging

from trl_dataeff.tracking import drawing, figures
from trl_dataeff.tracking.recorded import NoRunError, RecordedRun, read_run


logger = logging.get_logger(__name__)
CARD = "README.md"
TITLE = "## Data-efficient GRPO"
BEFORE = "### Framework versions"  # a heading of TRL's card
PICTURES = "figures"  # folder of the figures, beside the card
SHOWN = ("progress-rollouts", "kinds", "flow")
PAPERS = {
    "dots": ("sun2025dots", "2506.05316", "Improving Data Efficiency for LLM Reinforcement Fine-tuning Through Difficulty-targeted Online Data Selection and Rollout Replay", 2025),
    "greso": ("zheng2025greso", "2506.02177", "Act Only When It Pays: Efficient Reinforcement Learning for LLM Reasoning via Selective Rollouts", 2025),
    "dapo": ("yu2025dapo", "2503.14476", "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025),
    "sequential": ("kim2026pilot", "2605.26606", "Spend Your Rollouts Where It Counts: Rollout Allocation for Group-Based RL Post-Training", 2026),
    "tracked": ("xu2025spo", "2509.13232", "Single-stream Policy Optimization", 2025),
}  # fmt: skip


def describe_run(output_dir: Path, *, base_model: str, draws: bool) -> None:
    """[`complete_card`] of a run's folder. Where nothing of the run was written, or the card cannot be, it stays as it is."""
    try:
        complete_card(output_dir / CARD, read_run(output_dir), base_model=base_model, draws=draws)
    except NoRunError:
        return
    except OSError as error:
        logger.warning(f"{output_dir / CARD} could not be completed ({error}).")


def copy_card(output_dir: str, model_dir: str | None, writes: bool) -> None:
    """The card and its figures beside a model that is saved elsewhere."""
    if model_dir is None or not writes or os.path.realpath(model_dir) == os.path.realpath(output_dir):
        return
    with suppress(OSError):
        shutil.copy(Path(output_dir, CARD), Path(model_dir, CARD))
        if Path(output_dir, PICTURES).is_dir():
            shutil.copytree(Path(output_dir, PICTURES), Path(model_dir, PICTURES), dirs_exist_ok=True)


def complete_card(path: Path, run: RecordedRun, *, base_model: str, draws: bool) -> None:
    """
    Add what is known of the run to TRL's model card, in the place of what an earlier call added.

    Args:
        path (`Path`): the card, `README.md`.
        run ([`RecordedRun`]): the run.
        base_model (`str`): name or path of the model that training began with; replaces TRL's link to no model.
        draws (`bool`): whether figures are drawn, if matplotlib is installed; else those of an earlier call are kept.
    """
    text = path.read_text(encoding="utf-8")
    text = text.replace("[None](https://huggingface.co/None)", f"`{base_model}`" if base_model else "another model")
    text = text.replace('model="None"', f'model="{path.parent.resolve().name}"')
    pictures = _draw(run, path.parent / PICTURES) if draws else _drawn(path.parent / PICTURES)
    section = "\n\n".join([TITLE, *_parts(run, pictures)])
    head, found, tail = text.partition(BEFORE)
    text = f"{head.rstrip()}\n\n{section}\n\n{found}{tail}" if found else f"{text.rstrip()}\n\n{section}\n"
    citations = _citations(run)
    path.write_text(f"{text.rstrip()}\n\n{citations}\n" if citations else text, encoding="utf-8")


def _parts(run: RecordedRun, pictures: list[tuple[str, str]]) -> list[str]:
    parts = [f"Trained with `trl_dataeff` {run.about.get('trl_dataeff', '')}: {_method(run)}."]
    parts.append("| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in _facts(run)))
    parts += [f"![{title}]({PICTURES}/{name}.png)" for name, title in pictures]
    changed = {
        name: run.argument(name) for name in run.about.get("changed", []) if name not in ("output_dir", "logging_dir")
    }
    if changed:
        settings = "\n".join(f"{name}: {json.dumps(value)}" for name, value in changed.items())
        parts.append(f"Settings that differ from their defaults:\n\n{_fenced(settings, 'yaml')}")
    if run.about.get("command"):
        parts.append(f"Command:\n\n{_fenced(run.about['command'], 'shell')}")
    return parts


def _fenced(text: str, language: str) -> str:
    fence = "`" * (3 + ("```" in text) * 3)
    return f"{fence}{language}\n{text}\n{fence}"


def used(run: RecordedRun) -> dict[str, str]:
    """The methods that were on, in words, by their papers in `PAPERS` (`replay` is from that of DOTS)."""
    selector, found = str((run.about.get("settings") or {}).get("selector", "")), {}
    if "Dots" in selector:
        found["dots"] = "prompts selected by predicted success rates (DOTS)"
    if "Greso" in selector:
        found["greso"] = "prompts with repeated zero-variance groups skipped (GRESO)"
    if run.argument("replay_fraction") and run.argument("fresh_groups") == "adaptive":
        found["replay"] = "batches completed with recent rollouts, by an adaptive number of fresh groups"
    elif run.argument("replay_fraction"):
        found["replay"] = f"{run.argument('replay_fraction'):.0%} of each batch replayed from recent rollouts"
    if run.argument("dynamic_sampling"):
        found["dapo"] = "zero-variance groups dropped and replaced (dynamic sampling)"
    if run.argument("sequential_rollouts"):
        found["sequential"] = "groups stopped after half of their completions where the rest promises no gradient"
    if run.argument("advantage_baseline") == "tracked":
        found["tracked"] = "rewards compared with predicted ones (tracked baseline)"
    return found


def _method(run: RecordedRun) -> str:
    return "GRPO with " + ", ".join(used(run).values()) if used(run) else "GRPO with prompts selected uniformly"


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    dataset = run.about.get("dataset") or {}
    facts = [("prompts in the dataset", f"{dataset['size']:,}")] if dataset.get("size") else []
    if dataset.get("hash"):
        facts.append(("dataset fingerprint", f"`{dataset['hash'][:16]}`"))
    rewards = (run.about.get("settings") or {}).get("reward_functions")
    if rewards:
        facts.append(("reward functions", ", ".join(f"`{name}`" for name in rewards)))
    for name, text, label in (
        ("rollouts", "{:,.0f}", "rollouts generated"),
        ("tokens", "{:,.0f}", "tokens generated"),
        ("step", "{:,.0f}", "optimizer steps"),
    ):
        values = run.series(name)[1]
        if len(values):
            facts.append((label, text.format(values[-1])))
    seconds = run.series("seconds")[1]
    if len(seconds):
        facts.append(("time of training", drawing.duration(float(seconds[-1]))))
    replayed = run.last("dataeff/rollouts_replayed")
    if replayed > 0:
        facts.append(("rollouts replayed", f"{replayed:,.0f}"))
    for metric, label in (("reward", "reward in training"), (run.held_out, "held-out reward")):
        values = run.series(metric)[1] if metric else np.empty(0)
        if len(values):
            facts.append((f"{label}, first and last", f"{values[0]:.3f}, {values[-1]:.3f}"))
    return facts


def _draw(run: RecordedRun, folder: Path) -> list[tuple[str, str]]:
    try:
        drawing.check_library()
    except drawing.FiguresMissing:
        return []
    plots = [plot for plot in figures.plots_of(run) if plot.name in SHOWN]
    folder.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        drawing.save_png(plot, folder / f"{plot.name}.png")
    return [(plot.name, plot.title) for plot in plots]


def _drawn(folder: Path) -> list[tuple[str, str]]:
    return [(name, name) for name in SHOWN if (folder / f"{name}.png").exists()]


def _citations(run: RecordedRun) -> str:
    keys = list(dict.fromkeys("dots" if name == "replay" else name for name in used(run)))
    entries = [
        f"@article{{{PAPERS[key][0]},\n  title  = {{{{{PAPERS[key][2]}}}}},\n  year   = {PAPERS[key][3]},\n  eprint = {{arXiv:{PAPERS[key][1]}}},\n}}"
        for key in keys
    ]
    return "Cite the methods that were used as:\n\n" + _fenced("\n\n".join(entries), "bibtex") if entries else ""
