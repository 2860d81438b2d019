"""
Data-efficient GRPO for Hugging Face TRL: [`DataEfficientGRPOTrainer`] in place of `GRPOTrainer`.

Data flow of a generation batch, and the place of each part (folders side by side; the arrow means "uses"):

    compact/             CompactGRPOTrainer: the faster update alone, below all that follows
    trainer.py           DataEfficientGRPOTrainer: adds selection and replay, and delegates to
    -> collector/        one generation batch: propose -> generate -> classify -> replay
       -> selection/     which prompts to generate rollouts for. A new selector is a file here, with @register_selector
          -> difficulty/ success rates predicted from embeddings of the prompts
    -> rows.py           the rows that a selector chose; run.py: the state of one call of `train`
    -> generation/       what passes through TRL's generation: rounds are recorded, groups are returned
    -> replay/           stored groups, and their correction in the loss
    rollouts/            groups of completions as data, and what their rewards say
    callback.py          what is done at the Trainer's events; signals.py: `save_on_signal`
    tracking/            what is seen of a run: all metrics, a row per group, the model card
    checkpoint/          files that are complete or absent, and resuming from them
    config.py            GRPOConfig with our fields; validation.py checks them with the dataset, and says what is on
    testing.py           conformance suite for your own selectors
    utils.py             atomic files, hashes, and errors that only the user can fix; compat.py: versions of TRL
    analysis/, cli/
    rewards.py           functions for answers that can be checked; math_verifier.py: math-verify in its own process

A module imports only from the layers below its own; `tests/test_layers.py` has their order.

The public names are imported when they are first used: the command answers `--version` without importing torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from trl_dataeff.utils import __version__


if TYPE_CHECKING:
    from trl_dataeff.compact import CompactGRPOTrainer
    from trl_dataeff.config import DataEfficientGRPOConfig
    from trl_dataeff.replay.buffer import ReplayBuffer
    from trl_dataeff.rollouts.group import RolloutGroup
    from trl_dataeff.selection import (
        DotsSelector,
        GresoSelector,
        PaperDotsSelector,
        Selector,
        SelectorContext,
        UniformSelector,
        register_selector,
    )
    from trl_dataeff.trainer import DataEfficientGRPOTrainer

__all__ = [
    "CompactGRPOTrainer",
    "DataEfficientGRPOConfig",
    "DataEfficientGRPOTrainer",
    "DotsSelector",
    "GresoSelector",
    "PaperDotsSelector",
    "ReplayBuffer",
    "RolloutGroup",
    "Selector",
    "SelectorContext",
    "UniformSelector",
    "__version__",
    "register_selector",
]
#: The module of each public name
_MODULES = {
    "CompactGRPOTrainer": "compact",
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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
