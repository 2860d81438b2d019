"""
Which prompts to generate rollouts for.

    base.py          Selector, SelectorContext, @register_selector
    uniform.py       shuffled passes, as GRPOTrainer
    greso.py         skips prompts with repeated zero-variance groups; pool.py has their streaks
    dots.py          samples by estimated success rate; estimator.py and history.py have the estimates, weights.py the
                     draw, passes.py and exploration.py what else decides it
    dots_greso.py    both

A new selector is a new file here, imported below, or a module of your own (see docs/selectors.md).
"""

from trl_dataeff.selection.base import (
    Selector,
    SelectorContext,
    make_selector,
    register_selector,
    registered_selectors,
)
from trl_dataeff.selection.dots import DotsSelector
from trl_dataeff.selection.dots_greso import DotsGresoSelector
from trl_dataeff.selection.greso import GresoSelector
from trl_dataeff.selection.uniform import UniformSelector


__all__ = [
    "DotsGresoSelector",
    "DotsSelector",
    "GresoSelector",
    "Selector",
    "SelectorContext",
    "UniformSelector",
    "make_selector",
    "register_selector",
    "registered_selectors",
]
