"""What the model card says of a run: what happened in it, and what to cite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_dataeff.tracking.metrics import PREFIX
from trl_dataeff.utils import __version__, is_number


BEFORE = "### Framework versions"  # a heading of TRL's card
REPLAYED, ROUNDS = f"{PREFIX}rollouts_replayed", f"{PREFIX}rounds"
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


def methods_used(about: Mapping[str, Any], last: Mapping[str, float]) -> list[str]:
    """
    What set a run apart from plain GRPO, in words: what was selected by, and what became of its rollouts. Settings that
    had no effect are not named.

    Args:
        about (`Mapping`): of `run.json`; empty for a run of plain TRL.
        last (`Mapping`): the last value of each metric by its full name.
    """
    found = [selection_title(about["selector"])] if about.get("selector") else []
    replayed = last.get(REPLAYED, 0)
    if replayed > 0:
        found.append(f"{replayed / last[f'{PREFIX}rollouts_trained']:.0%} of the trained rollouts replayed")
    if last.get(ROUNDS, 0) >= 1:
        found.append(f"{last[f'{PREFIX}rollouts_discarded']:,.0f} rollouts dropped by dynamic sampling")
    return found


def complete_card(path: Path, about: Mapping[str, Any], logs: Sequence[Mapping[str, Any]]) -> None:
    """Add what happened in the run (`run.json`, and the Trainer's logs) to the model card at `path`, as TRL has just written it."""
    last = {name: value for log in logs for name, value in log.items() if is_number(value)}
    model = f"`{about['model']}`" if about.get("model") else "another model"
    text = path.read_text(encoding="utf-8")
    text = text.replace("[None](https://huggingface.co/None)", model)
    text = text.replace('model="None"', f'model="{path.parent.resolve().name}"')
    facts = {
        "prompts": about.get("prompts") or None,
        "optimizer steps": last.get("step"),
        "rollouts generated": last.get(f"{PREFIX}rollouts_generated"),
        "rollouts replayed": last.get(REPLAYED),
    }
    rows = ["| | |", "|---|---|"]
    rows += [f"| {name} | {value:,.0f} |" for name, value in facts.items() if value is not None]
    rewards = [log["reward"] for log in logs if log.get("reward") is not None]
    if rewards:
        rows.append(f"| reward in training, first and last | {rewards[0]:.3f}, {rewards[-1]:.3f} |")
    methods = ", ".join(methods_used(about, last))
    section = f"## Data-efficient GRPO\n\nTrained with `trl_dataeff` {__version__}: {methods}.\n\n" + "\n".join(rows)
    head, found, tail = text.partition(BEFORE)
    text = f"{head.rstrip()}\n\n{section}\n\n{found}{tail.rstrip()}\n"
    path.write_text(text + _citations(about, last), encoding="utf-8")


def _citations(about: Mapping[str, Any], last: Mapping[str, float]) -> str:
    selector = about.get("selector") or ""
    used = ["dots"] if "Dots" in selector or last.get(REPLAYED, 0) > 0 else []
    used += ["greso"] if "Greso" in selector else []
    used += ["dapo"] if last.get(ROUNDS, 0) >= 1 else []
    if not used:
        return ""
    entries = (
        f"@article{{{key},\n  title  = {{{{{title}}}}},\n  year   = 2025,\n  eprint = {{arXiv:{eprint}}},\n}}"
        for key, eprint, title in (PAPERS[name] for name in used)
    )
    return "\nCite the methods that were used as:\n\n```bibtex\n" + "\n\n".join(entries) + "\n```\n"
