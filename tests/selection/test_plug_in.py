"""A selector of one's own in training: as an instance and by its dotted path."""

import numpy as np
import pandas as pd
import pytest

from tests.factories import (
    LeastSolved,
    Watched,
    assert_same_end,
    even_length_reward,
    history,
    mixed_reward,
    run,
)
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer


def train(folder, selector=None, trainer_class=Watched, **options):
    """A short run, by `selector` if it is given."""
    given = {} if selector is None else {"selector": selector}
    arguments = {"trainer": {**given, **options.pop("trainer", {})}, "selection": "auto", **options}
    return run(
        trainer_class, DataEfficientGRPOConfig, folder, **{"rewards": mixed_reward, "max_steps": 6, **arguments}
    )


def prompts_by_batch(trainer) -> list[list[int]]:
    return [[group.prompt_id for group in batch.generated] for batch in trainer.batches]


MODES = {
    "single pass": {},
    "dynamic sampling": {"max_rollout_rounds": 4},
    "replay": {"replay": "share", "rewards": even_length_reward, "steps_per_generation": 2},
    "all": {"replay": "share", "max_rollout_rounds": 4, "steps_per_generation": 2, "rollout_margin": 2.0},
}


class TestInstance:
    @pytest.mark.parametrize("mode", MODES)
    def test_its_contract_is_kept(self, tmp_path, mode):
        """Bound once and before anything else; what it proposes is generated; it observes every batch, once and whole."""
        selector = LeastSolved()
        trainer = train(tmp_path, selector, **MODES[mode])
        assert trainer.selector is trainer.collector.selector is selector
        assert selector.calls[0][0] == "bind"
        ((context,),) = selector.called("bind")
        batch_groups = len(trainer.batches[0].trained)
        assert (context.num_prompts, context.batch_groups, context.group_size) == (24, batch_groups, 4)
        assert context.seed == trainer.args.seed
        assert context.embeddings().shape == (24, 32)

        generated = [batch.generated for batch in trainer.batches if batch.generated]
        observed = [groups for (groups,) in selector.called("observe")]
        assert [list(map(id, groups)) for groups in observed] == [list(map(id, groups)) for groups in generated]
        proposed = np.concatenate([ids for (ids,) in selector.called("propose")])
        assert proposed.tolist() == [group.prompt_id for groups in generated for group in groups]
        assert all(len(group.rewards) == 4 for groups in generated for group in groups)
        assert trainer.generated == 4 * len(proposed)
        if mode in ("dynamic sampling", "all"):
            assert max(batch.rounds for batch in trainer.batches) > 1
            assert any(batch.dropped for batch in trainer.batches)
        for batch in trainer.batches:
            assert batch.selector_metrics.keys() == {"batches", "solved/sum", "not yet defined"}

    def test_its_predictions_are_in_the_table(self, tmp_path):
        trainer = train(tmp_path, selector := LeastSolved())
        table = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
        assert table["predicted"][:2].tolist() == [0.5, 0.5]
        solved, expected = np.zeros(24), []
        for batch in trainer.batches:
            expected += [1 / (2 + solved[group.prompt_id]) for group in batch.generated]
            for group in batch.generated:
                solved[group.prompt_id] += group.success_rate
        np.testing.assert_allclose(table["predicted"], expected, rtol=1e-6)
        np.testing.assert_allclose(selector.solved, solved)

    @pytest.mark.parametrize("mode", ["single pass", "replay"])
    def test_reference_rollouts(self, tmp_path, mode):
        """They are generated at most a batch at a time, before the first proposal, and observed with the rest."""
        selector = LeastSolved(references=5)
        trainer = train(tmp_path, selector, **MODES[mode])
        for (ids, groups), batch in zip(selector.called("roll_out_references"), trainer.batches, strict=True):
            assert [group.prompt_id for group in groups] == ids.tolist()
            assert list(map(id, groups)) == list(map(id, batch.generated[:5]))
            assert [batch.origins[id(group)] for group in batch.generated].count("reference") == len(groups) == 5
        names = [call[0] for call in selector.calls]
        assert names[:3] == ["bind", "roll_out_references", "propose"]
        assert names.index("observe") > names.index("propose")


SAVES = {"trainer_class": DataEfficientGRPOTrainer, "save_strategy": "steps", "save_steps": 5, "max_steps": 14}


@pytest.mark.parametrize("mode", MODES)
def test_resume_is_exact(tmp_path, mode):
    whole = train(tmp_path / "whole", LeastSolved(), **SAVES, **MODES[mode])
    resumed = train(tmp_path / "resumed", LeastSolved(), train=False, **SAVES, **MODES[mode])
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert resumed.selector.calls[0][0] == "bind"
    assert history(resumed.state.log_history) == history(whole.state.log_history)
    assert_same_end(whole, resumed)
    assert resumed.selector.batches == whole.selector.batches
    np.testing.assert_array_equal(resumed.selector.solved, whole.selector.solved)


WRONG = {
    "one twice": (lambda n: np.array([*range(n - 1), 0]), "repeated ids or ids outside of"),
    "the last one too large": (lambda n: 25 - n + np.arange(n), r"outside of \[0, 24\)"),
    "negative": (lambda n: np.arange(n) - 1, r"outside of \[0, 24\)"),
    "too few": (lambda n: np.arange(n - 1), r"shape \(\d+,\) and dtype int64; it takes \d+ prompt ids as integers"),
    "a matrix": (lambda n: np.arange(n)[:, None], r"shape \(\d+, 1\)"),
    "none": (lambda n: None, r"shape \(\) and dtype object"),
    "floats": (lambda n: np.arange(n, dtype=np.float64), "dtype float64; it takes"),
    "texts": (lambda n: [str(i) for i in range(n)], "dtype <U"),
}


class Wrong(LeastSolved):
    """Proposes, or asks to roll out as references, what `make` makes of 4."""

    def __init__(self, make, references=0):
        super().__init__(references=references)
        self.make = make

    def propose(self, n, rng):
        return self.make(n)

    def roll_out_references(self, roll_out, rng):
        roll_out(self.make(4))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("mode", ["single pass", "all", "references"])
def test_a_wrong_proposal_ends_a_run_before_anything_is_generated(tmp_path, name, mode):
    make_wrong, message = WRONG[name]
    if mode == "references" and name in ("too few", "none"):
        pytest.skip("as many as are asked for are right")
    trainer = train(tmp_path, Wrong(make_wrong, 4 * (mode == "references")), train=False, **MODES.get(mode, {}))
    asked = r"roll_out_references asked for" if mode == "references" else r"propose\(\d+\) returned"
    with pytest.raises(ValueError, match=rf"Wrong\.{asked} .*{message}"):
        trainer.train()
    assert trainer.generated == 0
