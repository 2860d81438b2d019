"""
DOTS (arXiv 2506.05316): draw prompts whose groups are likely to carry a gradient.

    selector.py      DotsSelector, without reference rollouts
    estimator.py     its estimates of every prompt's success rate
    history.py       what they know from prompts' own groups
    beta_binomial.py the chance of a gradient, and likelihoods
    sampling.py      weights of prompts, draws without replacement, passes over the prompts, and shares of kinds
    earlier.py       what an earlier run showed
    predicting.py    what both selectors share
    published.py     PaperDotsSelector, the method as published, with reference rollouts
"""

from trl_dataeff.selection.dots.published import PaperDotsSelector
from trl_dataeff.selection.dots.selector import DotsSelector


__all__ = ["DotsSelector", "PaperDotsSelector"]
