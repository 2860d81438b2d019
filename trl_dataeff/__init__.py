"""
Data-efficient GRPO for Hugging Face TRL: [`DataEfficientGRPOTrainer`] in place of `GRPOTrainer`.

Data flow of a generation batch, and the place of each part (folders side by side; the arrow means "uses"):

    trainer.py           the only subclass of GRPOTrainer: overrides TRL's methods, and delegates to
    -> collector/        one generation batch. collector.py: propose -> generate -> classify -> replay -> update
       -> selection/     which prompts to generate rollouts for. A new selector is a file here, with @register_selector
          -> difficulty/ success rates predicted from embeddings of the prompts
       -> rollouts/      groups of completions. capture.py: what TRL's methods take and return; playback.py: groups as TRL asks
                         for them; classification.py; checks.py; skipping.py: rows without a gradient
       -> replay/        buffer.py: which groups are kept and evicted; correction.py: the loss of replayed groups
    callback.py          what is done at the Trainer's events; signals.py: `save_on_signal`
    tracking/            what a run records. metrics.py: all metrics; groups.py: a row per group; card.py: the model card
    checkpoint/          files that are complete or absent, and resuming from them
    config.py            GRPOConfig with our fields; validation.py checks them with the dataset, and says what is on
    testing.py           conformance suite for your own selectors
    utils.py             atomic files, hashes, and errors that only the user can fix; compat.py: what we rely on in TRL
    analysis/, cli/
    rewards.py           functions for answers that can be checked; math_verifier.py: math-verify in its own process

A module imports only from the layers below its own; `tests/test_layers.py` has their order.

The public names are imported when they are first used: the command answers `--version` without importing torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trl_dataeff.utils import __version__


if TYPE_CHECKING:
    from trl_dataeff.config import DataEfficientGRPOConfig as DataEfficientGRPOConfig
    from trl_dataeff.replay.buffer import ReplayBuffer as ReplayBuffer
    from trl_dataeff.rollouts.group import RolloutGroup as RolloutGroup
    from trl_dataeff.selection import DotsSelector as DotsSelector
    from trl_dataeff.selection import GresoSelector as GresoSelector
    from trl_dataeff.selection import PaperDotsSelector as PaperDotsSelector
    from trl_dataeff.selection import Selector as Selector
    from trl_dataeff.selection import SelectorContext as SelectorContext
    from trl_dataeff.selection import UniformSelector as UniformSelector
    from trl_dataeff.selection import register_selector as register_selector
    from trl_dataeff.trainer import DataEfficientGRPOTrainer as DataEfficientGRPOTrainer

_MODULES = {
    "DataEfficientGRPOConfig": "config",
    "DataEfficientGRPOTrainer": "trainer",
    "DotsSelector": "selection",
    "GresoSelector": "selection",
    "PaperDotsSelector": "selection",
    "ReplayBuffer": "replay.buffer",
    "RolloutGroup": "rollouts.group",
    "Selector": "selection",
    "SelectorContext": "selection",
    "UniformSelector": "selection",
    "register_selector": "selection",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
