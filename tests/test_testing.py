"""The conformance suite: every selector of the package passes, and a selector with any one fault does not."""

import numpy as np
import pytest
import torch

from trl_dataeff import DotsSelector, GresoSelector, PaperDotsSelector, Selector, UniformSelector
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.testing import CHECKS, parametrize_with_checks


def paper_dots():
    return PaperDotsSelector(reference_size=16, predictor="logistic")


def attention_dots():
    return DotsSelector(predictor="attention", predictor_args={"width": 8})


def instance_dots():
    return DotsSelector(predictor=LogisticDifficultyPredictor(components=4))


def uniform_in_order():
    return UniformSelector(shuffle=False)


SELECTORS = [UniformSelector, uniform_in_order, GresoSelector, DotsSelector, paper_dots, attention_dots, instance_dots]


@parametrize_with_checks(SELECTORS)
def test_conformance(make, check):
    check(make)


class Plain(Selector):
    """Correct: uniform draws, and a count of its generation batches."""

    def bind(self, context):
        super().bind(context)
        self.batches = np.zeros(1)

    def propose(self, n, rng):
        return torch.randperm(self.context.num_prompts, generator=rng)[:n].numpy()

    def observe(self, groups):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches.copy()}

    def load_state_dict(self, state):
        self.batches = state["batches"].copy()


def with_(**methods) -> type[Plain]:
    return type("Faulty", (Plain,), methods)


def proposing(change) -> type[Plain]:
    return with_(propose=lambda self, n, rng: change(self, Plain.propose(self, n, rng), n))


def forgetful(**methods) -> type[Plain]:
    return with_(load_state_dict=lambda self, state: None, **methods)


def bind_keeping_state(self, context):
    Selector.bind(self, context)
    self.__dict__.setdefault("batches", np.zeros(1))


def propose_by_batch(self, n, rng):
    ids = Plain.propose(self, n, rng)
    return ids if self.batches[0] < 3 else np.sort(ids)


def seeds_globally(self, ids, n):
    np.random.seed(0)  # noqa: NPY002
    return ids


def needs_scores(self, groups):
    assert np.isfinite([group.success_rate for group in groups]).all()
    Plain.observe(self, groups)


FAULTS = [
    ("proposals_are_distinct_prompts", proposing(lambda self, ids, n: ids[np.zeros(n, int)])),
    ("proposals_are_distinct_prompts", proposing(lambda self, ids, n: ids[:16])),
    ("smallest_runs", proposing(lambda self, ids, n: ids if self.context.num_prompts > 2 else [])),
    ("randomness_comes_from_rng_alone", proposing(lambda self, ids, n: torch.randperm(60)[:n].numpy())),
    ("randomness_comes_from_rng_alone", proposing(seeds_globally)),
    ("state_restores_the_next_proposals", forgetful(propose=propose_by_batch)),
    (
        "state_restores_the_next_proposals",
        forgetful(predict=lambda self, ids: np.full(len(ids), 0.1 * min(self.batches[0], 9), dtype=np.float32)),
    ),
    ("state_is_a_copy", with_(state_dict=lambda self: {"batches": self.batches})),
    ("bind_starts_a_new_run", with_(bind=bind_keeping_state, propose=propose_by_batch)),
    ("predictions_and_metrics", with_(predict=lambda self, ids: np.full(len(ids), -2.0))),
    ("unusual_groups", with_(observe=needs_scores)),
    ("predictions_and_metrics", with_(metrics=lambda self: {"counts": np.zeros(3)})),
]


def failures(make) -> set[str]:
    failed = set()
    for check in CHECKS:
        try:
            check(make)
        except Exception:
            failed.add(check.__name__.removeprefix("check_"))
    return failed


def test_a_correct_selector_passes():
    assert failures(Plain) == set()


@pytest.mark.parametrize(("check", "faulty"), FAULTS)
def test_a_fault_of_a_selector_is_found(check, faulty):
    assert check in failures(faulty)
