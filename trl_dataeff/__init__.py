"""
Data-efficient GRPO for Hugging Face TRL: [`DataEfficientGRPOTrainer`] in the place of `GRPOTrainer`.

The way of the data, which is also the order of the modules:

    dataset -> PromptPool -> Selector -> rollout rounds -> effective groups -> + replayed groups -> GRPO loss
               (pool.py)   (selection/)  (rollout.py; TRL   |  (group.py)          ^  (replay/ratio.py)
                  ^             ^         generates, scores) v                     |
                  +-- history --+------- RolloutLedger <- observe(group) -> ReplayBuffer
                                |         (ledger.py)                      (replay/buffer.py)
                        predictions <- embeddings of all prompts
                            (difficulty/)

The public names are imported when they are first used: the command answers `--version` without loading torch.
"""

import importlib
import importlib.metadata
import warnings
from typing import TYPE_CHECKING

from packaging.version import Version

from trl_dataeff.version import __version__


if TYPE_CHECKING:
    from trl_dataeff.config import DataEfficientGRPOConfig
    from trl_dataeff.replay.buffer import ReplayBuffer
    from trl_dataeff.rollouts.group import RolloutGroup
    from trl_dataeff.selection import DotsGresoSelector, DotsSelector, GresoSelector, Selector, UniformSelector
    from trl_dataeff.selection.pool import PromptPool
    from trl_dataeff.trainer import DataEfficientGRPOTrainer

__all__ = [
    "DataEfficientGRPOConfig",
    "DataEfficientGRPOTrainer",
    "DotsGresoSelector",
    "DotsSelector",
    "GresoSelector",
    "PromptPool",
    "ReplayBuffer",
    "RolloutGroup",
    "Selector",
    "UniformSelector",
    "__version__",
]

_HOMES = {
    "DataEfficientGRPOConfig": "config",
    "DataEfficientGRPOTrainer": "trainer",
    "DotsGresoSelector": "selection",
    "DotsSelector": "selection",
    "GresoSelector": "selection",
    "PromptPool": "selection.pool",
    "ReplayBuffer": "replay.buffer",
    "RolloutGroup": "rollouts.group",
    "Selector": "selection",
    "UniformSelector": "selection",
}
_TESTED_TRL = ("1.16", "1.17")


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def _warn_of_an_untested_trl(installed: str) -> None:
    if not Version(_TESTED_TRL[0]) <= Version(Version(installed).base_version) < Version(_TESTED_TRL[1]):
        warnings.warn(
            f"trl_dataeff {__version__} is tested with trl {_TESTED_TRL[0]} and has not been tested with the "
            f"installed trl {installed}, whose trainer may differ where this one meets it. Install "
            f"'trl>={_TESTED_TRL[0]},<{_TESTED_TRL[1]}', or run this package's tests first.",
            stacklevel=3,
        )


_warn_of_an_untested_trl(importlib.metadata.version("trl"))
