"""
One generation batch, from proposal to history.

    collector.py    RolloutCollector: proposes, has rounds generated, classifies, replays, updates history and buffer
    batch.py        fill_batch(): which groups are trained on, left over, dropped; sizes of rounds
    fresh.py        propose_for_target(): how many fresh groups a batch takes, if that is adaptive
    sequential.py   SequentialGroups: which groups continue after half of their completions
    advantages.py   AdvantageWeights: how much replayed groups count, and advantages in the place of TRL's
    metrics.py      batch_metrics(): what a batch adds to the logs
    build.py        from the configuration to a collector
    settings.py     what the content of a checkpoint depends on, and whether one fits a run
    state.py        to a checkpoint and back
"""

from trl_dataeff.collector.batch import GenerationBatch
from trl_dataeff.collector.build import make_collector
from trl_dataeff.collector.collector import RolloutCollector


__all__ = ["GenerationBatch", "RolloutCollector", "make_collector"]
