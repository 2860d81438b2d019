"""The conformance suites: every plug-in of the package passes, and a plug-in with any one fault does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trl_dataeff import DotsGresoSelector, DotsSelector, GresoSelector, Selector, UniformSelector
from trl_dataeff.difficulty.attention import AttentionDifficultyPredictor
from trl_dataeff.difficulty.base import registered_predictors
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.selection import registered_selectors
from trl_dataeff.testing import EMBEDDING_WIDTH, checks_of, parametrize_with_checks


def paper_dots():
    return DotsSelector(objective="target", reference="paper", reference_size=16, refresh_batches=2)


def attention_dots():
    return DotsSelector(predictor="attention", predictor_args={"width": 8}, refresh_batches=2)


def instance_dots():
    return DotsSelector(predictor=LogisticDifficultyPredictor(components=4), exploration=0.5)


def uniform_in_order():
    return UniformSelector(shuffle=False)


def attention():
    return AttentionDifficultyPredictor(EMBEDDING_WIDTH, width=16)


SELECTORS = [UniformSelector, uniform_in_order, GresoSelector, DotsSelector, paper_dots, attention_dots, instance_dots]
SELECTORS += [DotsGresoSelector]
PREDICTORS = [LogisticDifficultyPredictor, attention]


@parametrize_with_checks([*SELECTORS, *PREDICTORS])
def test_conformance(make, check):
    check(make)


def test_every_registered_plugin_is_among_them():
    tested = {make().name for make in (*SELECTORS, *PREDICTORS)}
    built_in = {"uniform", "greso", "dots", "dots+greso", "logistic", "attention"}
    assert built_in <= set(registered_selectors()) | set(registered_predictors())
    assert tested == built_in


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


class ChancesAbove1(Plain):
    def predict_effective(self, prompt_ids):
        return np.full(len(prompt_ids), 1.5)


class NegativeStrength(Plain):
    def strength(self, prompt_ids):
        return np.full(len(prompt_ids), -1.0)


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
    ChancesAbove1: "predictions",
    NegativeStrength: "predictions",
    FailsWithoutScores: "unusual_groups",
    MetricsOfArrays: "metrics",
}


def failures(make) -> set[str]:
    """Names of the checks that fail."""
    failed = set()
    for check in checks_of(make):
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


# The same for predictors


class Unclipped(LogisticDifficultyPredictor):
    def predict_projected(self, Z):
        return super().predict_projected(Z) * 1.5


class Constant(LogisticDifficultyPredictor):
    def predict_projected(self, Z):
        return torch.full((len(Z),), 0.5)


class RandomFit(LogisticDifficultyPredictor):
    def predict_projected(self, Z):
        return (super().predict_projected(Z) + 0.01 * torch.rand(len(Z))).clamp(0, 1)


class CountsUnknown(LogisticDifficultyPredictor):
    def fit(self, E, p, weight=None):
        super().fit(E, torch.nan_to_num(p, nan=0.0), weight)


class AcceptsAnything(LogisticDifficultyPredictor):
    def fit(self, E, p, weight=None):
        p = p[: len(E)] if len(p) == len(E) else torch.cat([p, p[-1:]])
        super().fit(E, p.clamp(0, 1), None if weight is None else weight.clamp(min=0))


class LosesTensors(LogisticDifficultyPredictor):
    def load_tensors(self, tensors):
        super().load_tensors({**tensors, "intercept": torch.zeros(1)})


class FailsInARun(LogisticDifficultyPredictor):
    def predict_pool(self, Z, groups):
        return torch.zeros(3)


PREDICTOR_FAULTS = {
    Unclipped: "predictions_follow_success_rates",
    Constant: "predictions_follow_success_rates",
    RandomFit: "fits_repeat",
    CountsUnknown: "unknown_and_weightless_groups_do_not_count",
    AcceptsAnything: "wrong_input_is_an_error",
    LosesTensors: "settings_and_tensors_restore_it",
    FailsInARun: "it_runs_online",
}


@pytest.mark.parametrize("faulty", PREDICTOR_FAULTS, ids=lambda cls: cls.__name__)
def test_a_fault_of_a_predictor_is_found(faulty):
    assert PREDICTOR_FAULTS[faulty] in failures(faulty)


def test_what_is_neither_is_an_error():
    with pytest.raises(TypeError, match="dict, which is neither a Selector nor a DifficultyPredictor"):
        checks_of(dict)
