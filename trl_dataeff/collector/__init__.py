"""
One generation batch, from proposal to history.

    collector.py    RolloutCollector: proposes, has rounds generated, classifies, replays, updates history and buffer
    rounds.py       GenerationBatch, and the sizes of rounds
    advantages.py   advantages that TRL normalises over the batch
    build.py        from the configuration to a collector; whether a checkpoint fits a run
    state.py        to a checkpoint and back
"""

from trl_dataeff.collector.build import make_collector
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.rounds import GenerationBatch


__all__ = ["GenerationBatch", "RolloutCollector", "make_collector"]
