"""`PaperDotsSelector` on simulated prompts, and in training."""

import numpy as np

from tests.factories.comparison import groups_since
from tests.factories.configurations import train_briefly
from tests.selection.dots.population import BATCH, EVERYTHING, GROUP_SIZE, Population
from trl_dataeff.difficulty.logistic import LogisticDifficultyPredictor
from trl_dataeff.difficulty.online import RollingDifficulty


class Paper(Population):
    """
    20 reference prompts, whose success rates are seen as they are, and a temperature at which the nearest to 0.5 are
    taken.
    """

    def __init__(self):
        super().__init__("dots_paper", (0.0, 1.0), temperature=1e-9, reference_size=20, predictor="logistic")
        self.references = np.empty(0, dtype=np.int64)

    def rewards(self, ids):
        return np.repeat(self.p[ids], GROUP_SIZE).reshape(-1, GROUP_SIZE, 1).astype(np.float32)

    def begin(self):
        """Reference rollouts, if the selector asks for them."""
        ids = self.selector.references(self.draws)
        if len(ids):
            self.references = ids
            self.observe(ids, is_reference=True)

    def propose(self, n=BATCH):
        return self.selector.propose(n, self.draws)

    def batch(self, n=BATCH):
        self.begin()
        ids = self.propose(n)
        self.observe(ids)
        return ids

    def nearest(self) -> np.ndarray:
        """All prompts but the references, by their predicted distance from 0.5, which is all that the draw knows."""
        predicted = self.selector.predict(EVERYTHING).astype(float)
        order = np.argsort(np.abs(predicted - 0.5), kind="stable")
        return order[~np.isin(order, self.references)]


def test_predictions_of_the_paper_rest_on_the_references_alone():
    """A logistic regression on the references; what other groups give changes nothing until the next references."""
    paper = Paper()
    paper.batch()
    alone = RollingDifficulty(paper.embeddings, LogisticDifficultyPredictor())
    rates = paper.p[paper.references].astype(np.float32)
    expected = alone.predict_with_references(paper.references, rates, 0)
    for _ in range(2):
        np.testing.assert_allclose(paper.selector.predict(EVERYTHING), expected, atol=1e-5)
        paper.batch()
    assert np.abs(paper.selector.predict(EVERYTHING) - expected).max() > 0.01


def test_further_rounds_of_the_paper_continue_the_draw():
    """Two batches of 16, alike, were drawn; three rounds in the first one take more, and the next batch still more."""
    paper = Paper()
    paper.begin()
    rounds = [paper.propose() for _ in range(3)]
    assert set(np.concatenate(rounds[:2])) == set(paper.nearest()[:32])
    assert set(rounds[0]) != set(paper.nearest()[:16])  # the nearer half goes to either of them
    assert set(rounds[2]) == set(paper.nearest()[32:48])
    given = np.concatenate(rounds)
    paper.observe(given)
    assert not set(paper.batch(8)) & set(given)


def test_a_draw_that_has_too_few_prompts_left_takes_those_of_an_earlier_batch_again():
    paper = Paper()
    for _ in range(2):
        assert len(set(paper.batch(300))) == 300


def test_the_papers_references_are_rolled_out_for_every_second_batch(tmp_path):
    arguments = {"reference_size": 6, "predictor": "logistic"}
    train_briefly(tmp_path, selection="dots_paper", selector_args=arguments, max_steps=8)
    table = groups_since(tmp_path, 0)
    assert table["predicted"].notna().all()
    references = table[table["origin"] == "reference"]
    assert references.groupby("step").size().to_dict() == {0: 6, 2: 6, 4: 6, 6: 6}
    by_step = table.groupby("step")
    assert (by_step["prompt_id"].nunique() == by_step.size()).all()
