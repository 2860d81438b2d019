"""Reward functions for answers that can be checked, for use beside TRL's. Each is 1.0 for right and 0.0 for wrong."""

from trl_dataeff.rewards.exact import exact_answer_reward
from trl_dataeff.rewards.math import math_verify_reward
from trl_dataeff.rewards.numeric import numeric_answer_reward


__all__ = ["exact_answer_reward", "math_verify_reward", "numeric_answer_reward"]
