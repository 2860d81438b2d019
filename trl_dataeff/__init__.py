"""
Data-efficient GRPO for Hugging Face TRL: [`DataEfficientGRPOTrainer`] in the place of `GRPOTrainer`.

The way of the data, which is also the order of the modules:

    dataset -> PromptPool -> Selector -> rollout rounds -> effective groups -> + carried groups -> GRPO loss
               (pool.py)   (selection/)  (rollout.py; TRL   |  (group.py)       (replay/ratio.py)
                  ^             ^         generates, scores) v
                  +-- history --+------- RolloutLedger <- observe(group)
                                          (ledger.py)
"""

import warnings

import trl
from packaging.version import Version

from trl_dataeff.config import DataEfficientGRPOConfig
from trl_dataeff.group import RolloutGroup
from trl_dataeff.pool import PromptPool
from trl_dataeff.selection import Selector, UniformSelector
from trl_dataeff.trainer import DataEfficientGRPOTrainer
from trl_dataeff.version import __version__


_TESTED_TRL = ("1.16", "1.17")
if not Version(_TESTED_TRL[0]) <= Version(Version(trl.__version__).base_version) < Version(_TESTED_TRL[1]):
    warnings.warn(
        f"trl_dataeff {__version__} is tested with trl {_TESTED_TRL[0]} and has not been tested with the installed "
        f"trl {trl.__version__}, whose trainer may differ where this one meets it. Install 'trl>={_TESTED_TRL[0]},"
        f"<{_TESTED_TRL[1]}', or run this package's tests first.",
        stacklevel=2,
    )

__all__ = [
    "DataEfficientGRPOConfig",
    "DataEfficientGRPOTrainer",
    "PromptPool",
    "RolloutGroup",
    "Selector",
    "UniformSelector",
    "__version__",
]
