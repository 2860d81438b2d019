"""
What type checkers see of the trainers' arguments. `make types` checks this file, and nothing runs it: mypy reports a
`type: ignore` where there is no error any more.
"""

from typing import Any

from trl import GRPOConfig

from trl_dataeff import CompactGRPOTrainer, DataEfficientGRPOTrainer, DotsSelector, Selector


def calls(reward: Any, args: GRPOConfig, selector: Selector) -> None:
    CompactGRPOTrainer("model", reward, args, train_dataset=None)
    CompactGRPOTrainer("model", reward, agrs=args)  # type: ignore[call-arg]
    CompactGRPOTrainer("model", reward, args="out")  # type: ignore[arg-type]
    CompactGRPOTrainer("model", reward, selector=selector)  # type: ignore[call-arg]
    DataEfficientGRPOTrainer("model", reward, args, train_dataset=None)
    DataEfficientGRPOTrainer("model", reward, args, selector=DotsSelector())
    DataEfficientGRPOTrainer("model", reward, agrs=args)  # type: ignore[call-overload]
    DataEfficientGRPOTrainer("model", reward, args="out")  # type: ignore[call-overload]
    DataEfficientGRPOTrainer("model", reward, args, selector="dots")  # type: ignore[call-overload]


class WithArgumentsOfItsOwn(DataEfficientGRPOTrainer):
    """Passes on what it is given, as a subclass of TRL's trainer does."""

    def __init__(self, *args: Any, bonus: float = 0.0, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bonus = bonus
