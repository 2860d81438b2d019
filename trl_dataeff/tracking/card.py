"""What the model card says of a run: its model, its methods, its rollouts, and the papers to cite."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_dataeff.tracking.methods import methods_used
from trl_dataeff.tracking.metrics import try_to_write
from trl_dataeff.utils import PREFIX, __version__, is_number


#: A heading of TRL's card, before which ours is put
NEXT_HEADING = "### Framework versions"
#: What TRL's card says of a model that is not on the Hub, and of one that was not pushed to it
LINK_TO_NONE = "[None](https://huggingface.co/None)"
MODEL_NONE = 'model="None"'
#: A folder of the Hub's cache
_CACHED = re.compile(r"models--([^/\\]+)--([^/\\]+)[/\\]snapshots[/\\]")
#: arXiv numbers by a word in which `methods_used` names a paper's method
PAPERS = {
    "DOTS": "2506.05316",
    "replay": "2506.05316",
    "GRESO": "2506.02177",
    "dynamic sampling": "2503.14476",
}


def hub_id_of(model: str) -> str:
    """The id of a model on the Hub by its folder in the Hub's cache; any other name or path as it is."""
    found = _CACHED.search(model)
    return f"{found[1]}/{found[2]}" if found else model


def complete_card(path: Path, about: Mapping[str, Any], logs: Sequence[Mapping[str, Any]], output_dir: str) -> None:
    """
    Add what happened in a run to its model card, and fill in what TRL has no name for.

    Args:
        path (`Path`): the card, as TRL has just written it.
        about (`Mapping`): the run's `run.json`.
        logs (`Sequence[Mapping]`): the Trainer's logs, in order.
        output_dir (`str`): where the model is, if it was not pushed to the Hub.
    """
    highest: dict[str, float] = {}
    for log in logs:
        values = {name: value for name, value in log.items() if is_number(value)}
        highest.update({name: max(value, highest.get(name, value)) for name, value in values.items()})
    folder = Path(about["model"]).name
    base_model = f"the local model `{folder}`" if folder else "a model without a name"
    text = path.read_text(encoding="utf-8")
    text = text.replace(LINK_TO_NONE, base_model)
    text = text.replace(MODEL_NONE, f'model="{output_dir}"')
    text = text.replace(NEXT_HEADING, f"{_section(about, highest)}\n\n{NEXT_HEADING}", 1)
    try_to_write(path, lambda: path.write_text(text, encoding="utf-8"))


def _section(about: Mapping[str, Any], highest: Mapping[str, float]) -> str:
    """Our section of the card, in Markdown. The arguments are those of [`methods_used`]: counts grow in a run."""
    methods = ", ".join(methods_used(about, highest))
    sentences = [f"Trained with `trl_dataeff` {__version__}: {methods}."]
    generated = highest.get(f"{PREFIX}rollouts_generated")
    if generated is not None:
        sentences.append(f"{generated:,.0f} rollouts were generated in {highest['step']:,.0f} optimizer steps.")
    replayed = highest.get(f"{PREFIX}rollouts_replayed", 0)
    if replayed > 0:
        share = replayed / highest[f"{PREFIX}rollouts_trained"]
        sentences.append(f"{share:.0%} of the trained rollouts were replayed.")
    dropped = highest.get(f"{PREFIX}rollouts_discarded", 0)
    if dropped > 0:
        sentences.append(f"{dropped:,.0f} rollouts were dropped.")
    papers = {paper for method, paper in PAPERS.items() if method in methods}
    if papers:
        links = [f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" for paper in sorted(papers)]
        sentences.append(f"Please cite {', '.join(links)}.")
    return "### Data-efficient GRPO\n\n" + " ".join(sentences)
