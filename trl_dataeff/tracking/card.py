"""What the model card says of a run: its methods, its rollouts, and the papers to cite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_dataeff.tracking.metrics import PREFIX, try_to_write
from trl_dataeff.utils import __version__, is_number


BEFORE = "### Framework versions"  # a heading of TRL's card
SELECTORS = {
    "UniformSelector": "uniform selection",
    "DotsSelector": "DOTS selection",
    "GresoSelector": "GRESO selection",
    "PaperDotsSelector": "DOTS selection as published",
}
#: Papers by what `methods_used` says of their methods
PAPERS = {"DOTS": "2506.05316", "replayed": "2506.05316", "GRESO": "2506.02177", "dynamic sampling": "2503.14476"}


def selection_title(selector: str) -> str:
    """What a selector of this class does, in two words."""
    return SELECTORS.get(selector, selector)


def methods_used(about: Mapping[str, Any], last: Mapping[str, float]) -> list[str]:
    """What set a run apart from plain GRPO, in words, from its `run.json` (empty for plain TRL) and the last value of each metric."""
    found = [selection_title(about["selector"])] if about.get("selector") else []
    replayed = last.get(f"{PREFIX}rollouts_replayed", 0)
    if replayed > 0:
        found.append(f"{replayed / last[f'{PREFIX}rollouts_trained']:.0%} of the trained rollouts replayed")
    if last.get(f"{PREFIX}rounds", 0) >= 1:
        found.append(f"{last[f'{PREFIX}rollouts_discarded']:,.0f} rollouts dropped by dynamic sampling")
    return found


def complete_card(path: Path, about: Mapping[str, Any], logs: Sequence[Mapping[str, Any]]) -> None:
    """Add what happened in the run (`run.json`, and the Trainer's logs) to the model card at `path`, as TRL has just written it."""
    last = {name: value for log in logs for name, value in log.items() if is_number(value)}
    methods = ", ".join(methods_used(about, last)) or "plain GRPO"
    section = f"### Data-efficient GRPO\n\nTrained with `trl_dataeff` {__version__}: {methods}."
    if (generated := last.get(f"{PREFIX}rollouts_generated")) is not None:
        section += f" {generated:,.0f} rollouts were generated in {last['step']:,.0f} optimizer steps."
    papers = sorted({paper for method, paper in PAPERS.items() if method in methods})
    if papers:
        section += " Please cite " + ", ".join(f"[arXiv:{p}](https://arxiv.org/abs/{p})" for p in papers) + "."
    text = path.read_text(encoding="utf-8").replace(BEFORE, f"{section}\n\n{BEFORE}", 1)
    try_to_write(path, lambda: path.write_text(text, encoding="utf-8"))
