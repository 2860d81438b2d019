"""What both DOTS selectors do with their predictions when embeddings or the range of rewards change."""

import numpy as np
import pytest

from tests.selection.dots.population import BATCH, EVERYTHING, Population
from trl_dataeff.difficulty.online import pearson


OF_PAPER = {"reference_size": 20, "predictor": "logistic"}


def test_other_embeddings_of_a_resumed_run(caplog_transformers):
    """As on other hardware: this is said, and the groups of the run are fitted with the new ones."""
    population = Population("dots")
    for _ in range(6):
        population.batch()
    population.embeddings = population.embeddings[:, ::-1].copy()
    resumed = population.another("dots")
    resumed.load_state_dict(population.selector.state_dict())
    np.testing.assert_array_equal(resumed.predict(EVERYTHING), population.selector.predict(EVERYTHING))
    assert "embeddings differ from those of the run" in caplog_transformers.text
    groups = population.batch()
    resumed.observe(groups)
    after = resumed.predict(EVERYTHING)
    assert not np.array_equal(after, population.selector.predict(EVERYTHING))
    unseen = ~population.seen
    assert pearson(after[unseen], population.p[unseen]) > 0.8


def widening(name: str, batches: int, **arguments) -> tuple[Population, Population]:
    """
    Two runs over the same groups. In the fourth batch a reward of -3 widens the range from [0, 1]; the second run has
    known the wider range from the start.
    """
    narrow = Population(name, **arguments)
    wide = Population(name, (-3.0, 1.0), **arguments)
    for i in range(batches):
        for run in (narrow, wide):
            references = run.selector.references(run.draws)
            if len(references):
                run.observe(references, is_reference=True)
        ids = narrow.selector.propose(BATCH, narrow.draws)
        wide.selector.propose(BATCH, wide.draws)
        for run in (narrow, wide):
            run.observe(ids, penalty=-4.0 if i == 3 else 0.0)
            run.draws.manual_seed(i)
    return narrow, wide


def test_every_expert_of_dots_predicts_in_a_wider_range_as_if_it_had_known_it():
    """By the evidence of each prompt and the groups of the run; how far each is trusted follows later."""
    narrow, wide = widening("dots", 12)
    a = narrow.selector.state_dict()
    b = wide.selector.state_dict()
    for part, name in (("difficulty", "rates"), ("history", "successes"), ("history", "trials")):
        np.testing.assert_allclose(a["success"][part][name], b["success"][part][name], atol=1e-5, err_msg=name)
    np.testing.assert_allclose(a["success"]["predicted"], b["success"]["predicted"], atol=1e-5)
    np.testing.assert_allclose(a["record"]["rows"][:, 1], b["record"]["rows"][:, 1], atol=1e-6)
    predicted = narrow.selector.predict(EVERYTHING)
    difference = np.abs(predicted - wide.selector.predict(EVERYTHING))
    assert difference.mean() < 0.05
    assert difference.max() < 0.15


def test_the_paper_predicts_in_the_wider_range_from_the_next_references_on():
    narrow, wide = widening("dots_paper", 5, **OF_PAPER)
    predicted = narrow.selector.predict(EVERYTHING)
    np.testing.assert_allclose(predicted, wide.selector.predict(EVERYTHING), atol=1e-6)
    for _ in range(3):
        ids = narrow.selector.propose(BATCH, narrow.draws)
        np.testing.assert_array_equal(ids, wide.selector.propose(BATCH, wide.draws))


@pytest.mark.parametrize(("name", "arguments"), [("dots", {}), ("dots_paper", OF_PAPER)])
def test_a_resumed_run_may_give_a_narrower_range(name, arguments):
    run, _ = widening(name, 5, **arguments)
    scale = run.selector.context.scale
    scale.low = 0.4
    scale.high = 0.6
    scale.fixed = True
    run.observe(run.selector.propose(BATCH, run.draws))
    predicted = run.selector.predict(EVERYTHING)
    assert 0 <= predicted.min() < predicted.max() <= 1
