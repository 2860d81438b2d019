"""What is compared on the log."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.real_log.replaying import GROUP_SIZE, Log, Method
from trl_dataeff.selection import DotsSelector, GresoSelector, PaperDotsSelector, Selector, UniformSelector
from trl_dataeff.selection.dots.beta_binomial import chance_at
from trl_dataeff.selection.dots.selector import LOWEST_CHANCE


class PerfectDots(DotsSelector):
    """DOTS with a perfect prediction: it knows every prompt's success rate in the log around the present time."""

    def __init__(self, log: Log, now: Callable[[], float]):
        super().__init__()
        self.log = log
        self.now = now

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        return self.log.around(self.now())[prompt_ids].astype(np.float32)

    def chances(self) -> torch.Tensor:
        p = torch.from_numpy(self.log.around(self.now()))
        return chance_at(p, GROUP_SIZE).clamp_min(LOWEST_CHANCE)


def _published(log: Log, now: Callable[[], float]) -> Selector:
    # Half a batch of 64 prompts, as the paper's 256 of 512; fewer would be too few to predict from
    return PaperDotsSelector(reference_size=32, predictor="logistic")


METHODS = {
    "uniform": Method("uniform", lambda log, now: UniformSelector()),
    "greso": Method("GRESO", lambda log, now: GresoSelector()),
    "dots_paper": Method("DOTS as published", _published),
    "dots": Method("DOTS", lambda log, now: DotsSelector()),
    "kinds": Method("DOTS, four kinds", lambda log, now: DotsSelector(), has_kinds=True),
    "column": Method("DOTS, column", lambda log, now: DotsSelector(), has_column=True),
    "perfect": Method("perfect prediction", PerfectDots),
}
