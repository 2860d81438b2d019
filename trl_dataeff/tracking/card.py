"""What the model card says of a run: its methods, its rollouts, and the papers to cite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_dataeff.tracking.methods import methods_used
from trl_dataeff.tracking.metrics import try_to_write
from trl_dataeff.utils import PREFIX, __version__, is_number


#: A heading of TRL's card, before which ours is put
NEXT_HEADING = "### Framework versions"
#: arXiv numbers by a word in which `methods_used` names a paper's method
PAPERS = {
    "DOTS": "2506.05316",
    "replayed": "2506.05316",
    "GRESO": "2506.02177",
    "dynamic sampling": "2503.14476",
}


def complete_card(path: Path, about: Mapping[str, Any], logs: Sequence[Mapping[str, Any]]) -> None:
    """
    Add what happened in a run to its model card.

    Args:
        path (`Path`): the card, as TRL has just written it.
        about (`Mapping`): the run's `run.json`.
        logs (`Sequence[Mapping]`): the Trainer's logs, in order.
    """
    last: dict[str, float] = {}
    for log in logs:
        last.update({name: value for name, value in log.items() if is_number(value)})
    text = path.read_text(encoding="utf-8")
    completed = text.replace(NEXT_HEADING, f"{_section(about, last)}\n\n{NEXT_HEADING}", 1)
    try_to_write(path, lambda: path.write_text(completed, encoding="utf-8"))


def _section(about: Mapping[str, Any], last: Mapping[str, float]) -> str:
    """Our section of the card, in Markdown. The arguments are those of [`methods_used`]."""
    methods = ", ".join(methods_used(about, last))
    sentences = [f"Trained with `trl_dataeff` {__version__}: {methods}."]
    generated = last.get(f"{PREFIX}rollouts_generated")
    if generated is not None:
        sentences.append(f"{generated:,.0f} rollouts were generated in {last['step']:,.0f} optimizer steps.")
    papers = {paper for method, paper in PAPERS.items() if method in methods}
    if papers:
        links = [f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" for paper in sorted(papers)]
        sentences.append(f"Please cite {', '.join(links)}.")
    return "### Data-efficient GRPO\n\n" + " ".join(sentences)
