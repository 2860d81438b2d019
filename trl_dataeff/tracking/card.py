"""What the model card says of a run: what happened in it, and what to cite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_dataeff.tracking.metrics import PREFIX
from trl_dataeff.utils import __version__


TITLE = "## Data-efficient GRPO"
BEFORE = "### Framework versions"  # a heading of TRL's card
SELECTORS = {
    "UniformSelector": "uniform selection",
    "DotsSelector": "DOTS selection",
    "GresoSelector": "GRESO selection",
    "PaperDotsSelector": "DOTS selection as published",
}
PAPERS = {
    "dots": ("sun2025dots", "2506.05316", "Improving Data Efficiency for LLM Reinforcement Fine-tuning Through Difficulty-targeted Online Data Selection and Rollout Replay"),
    "greso": ("zheng2025greso", "2506.02177", "Act Only When It Pays: Efficient Reinforcement Learning for LLM Reasoning via Selective Rollouts"),
    "dapo": ("yu2025dapo", "2503.14476", "DAPO: An Open-Source LLM Reinforcement Learning System at Scale"),
}  # fmt: skip


def selection_title(selector: str) -> str:
    """What a selector of this class does, in two words."""
    return SELECTORS.get(selector, selector)


def methods_used(about: Mapping[str, Any], last: Callable[[str], float]) -> list[str]:
    """
    What set a run apart from plain GRPO, in words: what was selected by, and what became of its rollouts. Settings that
    had no effect are not named.

    Args:
        about (`Mapping`): of `run.json`; empty for a run of plain TRL.
        last (`Callable`): the last value of a metric by its full name, NaN if it was never logged.
    """
    selector = about.get("selector")
    found = [selection_title(str(selector))] if selector else []
    replayed, trained = last(f"{PREFIX}rollouts_replayed"), last(f"{PREFIX}rollouts_trained")
    if replayed > 0:
        found.append(f"{replayed / trained:.0%} of the trained rollouts replayed")
    if last(f"{PREFIX}rounds") >= 1:
        found.append(f"{last(f'{PREFIX}rollouts_discarded'):,.0f} rollouts dropped by dynamic sampling")
    return found


def complete_card(path: Path, about: Mapping[str, Any], logs: Sequence[Mapping[str, Any]]) -> None:
    """Add what happened in the run (`run.json`, and the Trainer's logs) to the model card at `path`, as TRL has just written it."""

    def last(metric: str) -> float:
        values = [log[metric] for log in logs if isinstance(log.get(metric), (int, float))]
        return float(values[-1]) if values else math.nan

    model = str(about.get("model", ""))
    text = path.read_text(encoding="utf-8")
    text = text.replace("[None](https://huggingface.co/None)", f"`{model}`" if model else "another model")
    text = text.replace('model="None"', f'model="{path.parent.resolve().name}"')
    section = f"{TITLE}\n\nTrained with `trl_dataeff` {__version__}: {', '.join(methods_used(about, last))}."
    facts = {
        "prompts": about.get("prompts") or math.nan,
        "optimizer steps": max((log["step"] for log in logs), default=math.nan),
        "rollouts generated": last(f"{PREFIX}rollouts_generated"),
        "rollouts replayed": last(f"{PREFIX}rollouts_replayed"),
    }
    rows = [f"| {name} | {value:,.0f} |" for name, value in facts.items() if not math.isnan(value)]
    rewards = [log["reward"] for log in logs if log.get("reward") is not None]
    if rewards:
        rows.append(f"| reward in training, first and last | {rewards[0]:.3f}, {rewards[-1]:.3f} |")
    section += "\n\n| | |\n|---|---|\n" + "\n".join(rows)
    head, found, tail = text.partition(BEFORE)
    text = f"{head.rstrip()}\n\n{section}\n\n{found}{tail.rstrip()}\n"
    path.write_text(text + _citations(about, last), encoding="utf-8")


def _citations(about: Mapping[str, Any], last: Callable[[str], float]) -> str:
    selector = str(about.get("selector", ""))
    used = {
        "dots": "Dots" in selector or last(f"{PREFIX}rollouts_replayed") > 0,
        "greso": "Greso" in selector,
        "dapo": last(f"{PREFIX}rounds") >= 1,
    }
    entries = [
        f"@article{{{key},\n  title  = {{{{{title}}}}},\n  year   = 2025,\n  eprint = {{arXiv:{eprint}}},\n}}"
        for key, eprint, title in (PAPERS[name] for name, was_used in used.items() if was_used)
    ]
    if not entries:
        return ""
    return "\nCite the methods that were used as:\n\n```bibtex\n" + "\n\n".join(entries) + "\n```\n"
