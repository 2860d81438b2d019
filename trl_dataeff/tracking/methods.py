"""What a run does that plain GRPO does not, in words: for the model card, the table of `report`, and a run's start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_dataeff.utils import PREFIX


#: Titles by the class of the selector
SELECTORS = {
    "UniformSelector": "uniform selection",
    "DotsSelector": "DOTS selection",
    "GresoSelector": "GRESO selection",
    "PaperDotsSelector": "DOTS selection as published",
}


def selection_title(selector: str) -> str:
    """What a selector of this class does, in two words; for a class of another package, its name."""
    return SELECTORS.get(selector, selector)


def selector_of(about: Mapping[str, Any]) -> str:
    """The class of a run's selector, by its `run.json`. Where TRL's dataloader draws the prompts, there is none."""
    return about.get("selector") or "UniformSelector"


def methods_used(about: Mapping[str, Any], highest: Mapping[str, float]) -> list[str]:
    """
    What a run did, in words.

    Args:
        about (`Mapping`): its `run.json`; empty for a run of plain TRL.
        highest (`Mapping`): the highest value of each of its metrics. One that is not logged is of a method that was
            off.

    Returns:
        `list[str]`: a phrase for each method, how prompts were chosen first.
    """
    methods = []
    if f"{PREFIX}rollouts_replayed" in highest:
        methods.append("replay")
    if highest.get(f"{PREFIX}rounds", 0) >= 1:
        methods.append("dynamic sampling")
    selector = selector_of(about)
    if selector == "UniformSelector" and not methods:
        methods.append("plain GRPO")
    else:
        methods.insert(0, selection_title(selector))
    if highest.get(f"{PREFIX}update/tokens_saved", 0) > 0:
        methods.append("faster update")
    return methods
