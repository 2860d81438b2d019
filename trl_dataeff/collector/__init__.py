"""
One generation batch, from the proposal of prompts to the groups that are trained on.

    collector.py   RolloutCollector: what happens in a generation batch, step by step
    batch.py       which groups get its places, and what it consists of in the end
    rounds.py      how many groups a round of rollouts generates
    build.py       from the configuration to the arguments of a collector
"""

from trl_dataeff.collector.batch import GenerationBatch
from trl_dataeff.collector.build import (
    Plan,
    check_rewards,
    check_same_settings,
    hash_same_prompts,
    make_classifier,
    make_collector,
    plan_runs,
    run_settings,
    say_what_is_on,
)
from trl_dataeff.collector.collector import RolloutCollector


__all__ = [
    "GenerationBatch",
    "Plan",
    "RolloutCollector",
    "check_rewards",
    "check_same_settings",
    "hash_same_prompts",
    "make_classifier",
    "make_collector",
    "plan_runs",
    "run_settings",
    "say_what_is_on",
]
