"""
One generation batch, from proposal to history: `collector.py`. `build.py` makes a collector from the configuration.
"""

from trl_dataeff.collector.batch import GenerationBatch
from trl_dataeff.collector.build import hash_same_prompts, make_collector, plan_runs
from trl_dataeff.collector.collector import RolloutCollector


__all__ = [
    "GenerationBatch",
    "RolloutCollector",
    "hash_same_prompts",
    "make_collector",
    "plan_runs",
]
