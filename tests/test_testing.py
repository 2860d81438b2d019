"""The conformance suite: every selector of the package passes, and a selector with any one fault does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trl_dataeff import DotsSelector, GresoSelector, Selector, UniformSelector
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.testing import CHECKS, parametrize_with_checks


def paper_dots():
    return DotsSelector(objective="target", reference="paper", reference_size=16, refresh_batches=2)


def attention_dots():
    return DotsSelector(predictor="attention", predictor_args={"width": 8}, refresh_batches=2)


def instance_dots():
    return DotsSelector(predictor=LogisticDifficultyPredictor(components=4), exploration=0.5)


def uniform_in_order():
    return UniformSelector(shuffle=False)


SELECTORS = [UniformSelector, uniform_in_order, GresoSelector, DotsSelector, paper_dots, attention_dots, instance_dots]


@parametrize_with_checks(SELECTORS)
def test_conformance(make, check):
    check(make)


# What a selector can do wrong, and the check that finds it


class Plain(Selector):
    """Correct: uniform draws, and a count of its generation batches."""

    def bind(self, context):
        super().bind(context)
        self.batches = 0

    def propose(self, n, rng):
        return torch.randperm(self.context.num_prompts, generator=rng)[:n].numpy()

    def observe(self, groups):
        self.batches += 1

    def state_dict(self):
        return {"batches": np.array([self.batches])}

    def load_state_dict(self, state):
        self.batches = int(state["batches"][0])


class Repeats(Plain):
    def propose(self, n, rng):
        return torch.randint(self.context.num_prompts, (n,), generator=rng).numpy()


class ReturnsAList(Plain):
    def propose(self, n, rng):
        return super().propose(n, rng).tolist()


class ReturnsFloats(Plain):
    def propose(self, n, rng):
        return super().propose(n, rng).astype(float)


class OutOfRange(Plain):
    def propose(self, n, rng):
        return super().propose(n, rng) + 1


class TooFew(Plain):
    def propose(self, n, rng):
        return super().propose(n, rng)[:16]


class NeedsManyPrompts(Plain):
    def propose(self, n, rng):
        assert self.context.num_prompts > 2
        return super().propose(n, rng)


class GlobalRandomness(Plain):
    def propose(self, n, rng):
        return torch.randperm(self.context.num_prompts)[:n].numpy()


class SeedsGlobally(Plain):
    def propose(self, n, rng):
        np.random.seed(0)  # noqa: NPY002
        return super().propose(n, rng)


class ForgetsItsState(Plain):
    def propose(self, n, rng):
        ids = super().propose(n, rng)
        return np.sort(ids) if self.batches % 2 else ids

    def load_state_dict(self, state):
        pass


class PredictsFromForgottenState(ForgetsItsState):
    def propose(self, n, rng):
        return Plain.propose(self, n, rng)

    def predict(self, prompt_ids):
        return np.full(len(prompt_ids), 0.1 * min(self.batches, 9), dtype=np.float32)


class SharesItsState(Plain):
    def bind(self, context):
        super().bind(context)
        self.counts = np.zeros(context.num_prompts)

    def observe(self, groups):
        self.counts += 1

    def state_dict(self):
        return {"counts": self.counts}

    def load_state_dict(self, state):
        self.counts = state["counts"].copy()


class StateOfNumbers(Plain):
    def state_dict(self):
        return {"batches": self.batches}


class BindKeepsState(Plain):
    batches = 0

    def bind(self, context):
        Selector.bind(self, context)

    def propose(self, n, rng):
        ids = super().propose(n, rng)
        return ids if self.batches < 3 else np.sort(ids)


class PredictsLogits(Plain):
    def predict(self, prompt_ids):
        return np.full(len(prompt_ids), -2.0)


class PredictsForAll(Plain):
    def predict(self, prompt_ids):
        return np.full(self.context.num_prompts, 0.5)


class FailsWithoutScores(Plain):
    def observe(self, groups):
        assert np.isfinite([group.success_rate for group in groups]).all()
        super().observe(groups)


class MetricsOfArrays(Plain):
    def metrics(self):
        return {"counts": np.zeros(3)}


FAULTS = {
    Repeats: "proposals_are_distinct_prompts",
    ReturnsAList: "proposals_are_distinct_prompts",
    ReturnsFloats: "proposals_are_distinct_prompts",
    OutOfRange: "proposals_are_distinct_prompts",
    TooFew: "proposals_are_distinct_prompts",
    NeedsManyPrompts: "smallest_runs",
    GlobalRandomness: "randomness_comes_from_rng_alone",
    SeedsGlobally: "randomness_comes_from_rng_alone",
    ForgetsItsState: "state_restores_the_next_proposals",
    PredictsFromForgottenState: "state_restores_the_next_proposals",
    SharesItsState: "state_is_a_copy_of_arrays",
    StateOfNumbers: "state_is_a_copy_of_arrays",
    BindKeepsState: "bind_starts_a_new_run",
    PredictsLogits: "predictions",
    PredictsForAll: "predictions",
    FailsWithoutScores: "unusual_groups",
    MetricsOfArrays: "metrics",
}


def failures(make) -> set[str]:
    """Names of the checks that fail."""
    failed = set()
    for check in CHECKS:
        try:
            check(make)
        except Exception:
            failed.add(check.__name__.removeprefix("check_"))
    return failed


def test_a_correct_selector_passes():
    assert failures(Plain) == set()


@pytest.mark.parametrize("faulty", FAULTS, ids=lambda cls: cls.__name__)
def test_a_fault_of_a_selector_is_found(faulty):
    assert FAULTS[faulty] in failures(faulty)
