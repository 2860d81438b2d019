"""
Which prompts to generate rollouts for.

    base.py          Selector, SelectorContext, @register_selector
    resolve.py       the selector that a configuration asks for
    uniform.py       shuffled passes, as GRPOTrainer
    greso.py         skips prompts with repeated zero-variance groups
    dots/            DOTS: draws prompts whose groups are likely to carry a gradient; also as published, with reference
                     rollouts

A new selector is a new file here, imported below, or a module of your own (see docs/selectors.md).
"""

from trl_dataeff.selection.base import Selector, SelectorContext, make_selector, register_selector
from trl_dataeff.selection.dots import DotsSelector, PaperDotsSelector
from trl_dataeff.selection.greso import GresoSelector
from trl_dataeff.selection.resolve import resolve_selector
from trl_dataeff.selection.uniform import UniformSelector


__all__ = [
    "DotsSelector",
    "GresoSelector",
    "PaperDotsSelector",
    "Selector",
    "SelectorContext",
    "UniformSelector",
    "make_selector",
    "register_selector",
    "resolve_selector",
]
