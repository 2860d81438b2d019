"""
One generation batch, from proposal to history.

    collector.py    RolloutCollector: proposes, has rounds generated, classifies, replays, updates history and buffer
    rounds.py       fill_batch(): which groups are trained on, left over, dropped; sizes of rounds
    sequential.py   SequentialGroups: which groups continue after half of their completions
    advantages.py   AdvantageWeights: how much replayed groups count
    build.py        from the configuration to a collector; whether a checkpoint fits a run
    state.py        to a checkpoint and back
"""

from trl_dataeff.collector.build import make_collector
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.rounds import GenerationBatch


__all__ = ["GenerationBatch", "RolloutCollector", "make_collector"]
