"""
Data-efficient GRPO for Hugging Face TRL: [`DataEfficientGRPOTrainer`] in place of `GRPOTrainer`.

Data flow of a generation batch, and the place of each part:

    trainer.py           the only subclass of GRPOTrainer: translates TRL's calls, delegates everything else
    collector/           one generation batch: propose -> generate -> classify -> replay -> update history
      selection/           which prompts to generate rollouts for: a new selector goes here
        difficulty/          predictions of success rates, from embeddings of the prompts
      rollouts/            groups of completions, how they are classified, and how they pass through TRL's `_generate`
      replay/              buffer.py: which groups are kept and evicted; correction.py: the loss of replayed groups
    tracking/            what a run records: metrics.py lists every metric, group_log.py writes groups.parquet
    checkpoint/          files that are complete or absent, and resuming from them
    fault_tolerance/     signals, non-finite steps, vLLM restarts, reward time limits: each off unless chosen
    config.py, fields.py, validation.py, callback.py, registry.py
    analysis/, cli/, testing.py, rewards/

A module imports only from the layers below its own; `tests/test_layers.py` has their order.

The public names are imported when they are first used: the command answers `--version` without importing torch.
"""

import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING

from packaging.version import Version

from trl_dataeff.version import __version__


if TYPE_CHECKING:
    from trl_dataeff.config import DataEfficientGRPOConfig
    from trl_dataeff.difficulty.base import DifficultyPredictor, register_predictor
    from trl_dataeff.replay.buffer import ReplayBuffer
    from trl_dataeff.rollouts.group import RolloutGroup
    from trl_dataeff.selection import (
        DotsGresoSelector,
        DotsSelector,
        GresoSelector,
        Selector,
        SelectorContext,
        UniformSelector,
        register_selector,
    )
    from trl_dataeff.selection.pool import PromptPool
    from trl_dataeff.trainer import DataEfficientGRPOTrainer

__all__ = [
    "DataEfficientGRPOConfig",
    "DataEfficientGRPOTrainer",
    "DifficultyPredictor",
    "DotsGresoSelector",
    "DotsSelector",
    "GresoSelector",
    "PromptPool",
    "ReplayBuffer",
    "RolloutGroup",
    "Selector",
    "SelectorContext",
    "UniformSelector",
    "__version__",
    "register_predictor",
    "register_selector",
]

_MODULES = {
    "DataEfficientGRPOConfig": "config",
    "DataEfficientGRPOTrainer": "trainer",
    "DifficultyPredictor": "difficulty.base",
    "DotsGresoSelector": "selection",
    "DotsSelector": "selection",
    "GresoSelector": "selection",
    "PromptPool": "selection.pool",
    "ReplayBuffer": "replay.buffer",
    "RolloutGroup": "rollouts.group",
    "Selector": "selection",
    "SelectorContext": "selection",
    "UniformSelector": "selection",
    "register_predictor": "difficulty.base",
    "register_selector": "selection",
}
_TESTED_TRL = ("1.16", "1.17")


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])


def _warn_untested_trl(installed: str) -> None:
    if not Version(_TESTED_TRL[0]) <= Version(Version(installed).base_version) < Version(_TESTED_TRL[1]):
        warnings.warn(
            f"trl_dataeff {__version__} is tested with trl {_TESTED_TRL[0]} and has not been tested with the "
            f"installed trl {installed}, whose trainer may differ where this one meets it. Install "
            f"'trl>={_TESTED_TRL[0]},<{_TESTED_TRL[1]}', or run this package's tests first.",
            stacklevel=3,
        )


_warn_untested_trl(importlib.metadata.version("trl"))
