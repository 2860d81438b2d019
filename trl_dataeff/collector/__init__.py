"""
One generation batch, from proposal to history.

    collector.py    RolloutCollector: proposes, has rounds generated, classifies, replays, updates selector and buffer
    rounds.py       GenerationBatch, the sizes of rounds, and what TRL computes over the batch
    build.py        from the configuration to a collector, and the settings on which its state depends
"""

from trl_dataeff.collector.build import hash_same_prompts, make_collector
from trl_dataeff.collector.collector import RolloutCollector
from trl_dataeff.collector.rounds import GenerationBatch


__all__ = ["GenerationBatch", "RolloutCollector", "hash_same_prompts", "make_collector"]
