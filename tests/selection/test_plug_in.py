"""A selector of one's own in training: as an instance and by its registered name."""

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
    plain_dataset,
    run,
)
from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer, Selector, UniformSelector, register_selector
from trl_dataeff.selection.base import check_proposal
from trl_dataeff.validation import resolve_selector


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
    "dynamic sampling": {"dynamic_sampling": True},
    "replay": {"replay_fraction": 0.5, "rewards": even_length_reward, "steps_per_generation": 2},
    "all": {"replay_fraction": 0.5, "dynamic_sampling": True, "steps_per_generation": 2, "rollout_margin": 2.0},
}


@pytest.fixture
def _named(registry):
    yield register_selector("least-solved")(LeastSolved)
    del LeastSolved.name


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

    def test_it_decides_what_is_trained_on(self, tmp_path):
        """Against uniform selection of the same seed, and against itself with another argument."""
        runs = [LeastSolved(), LeastSolved(), LeastSolved(weight=0.0), UniformSelector()]
        chosen = [prompts_by_batch(train(tmp_path / str(i), one)) for i, one in enumerate(runs)]
        assert chosen[0] == chosen[1]
        assert chosen[0] != chosen[2]
        assert chosen[0] != chosen[3]

    def test_a_second_call_of_train_binds_it_again(self, tmp_path):
        trainer = train(tmp_path, selector := LeastSolved())
        first = prompts_by_batch(trainer)
        trainer.train_dataset = plain_dataset(12)
        trainer.train()
        assert [context.num_prompts for (context,) in selector.called("bind")] == [24, 12]
        assert len(selector.solved) == 12
        assert selector.batches == len(first) == len(trainer.batches) - len(first)
        assert {i for ids in prompts_by_batch(trainer)[len(first) :] for i in ids} <= set(range(12))

    @pytest.mark.parametrize("mode", ["single pass", "replay"])
    def test_reference_rollouts(self, tmp_path, mode):
        """They are generated at most a batch at a time, before the first proposal, and observed with the rest."""
        selector = LeastSolved(references=5)
        trainer = train(tmp_path, selector, **MODES[mode])
        table = pd.read_parquet(tmp_path / "dataeff" / "groups.parquet")
        batches = len(trainer.batches)
        assert table[table["origin"] == "reference"].groupby("step").size().tolist() == [5] * batches
        calls = selector.called("roll_out_references")
        assert len(calls) == batches
        for (ids, groups), batch in zip(calls, trainer.batches, strict=True):
            assert [group.prompt_id for group in groups] == ids.tolist()
            assert list(map(id, groups)) == list(map(id, batch.generated[:5]))
            assert {batch.origins[id(group)] for group in groups} == {"reference"}
            assert {batch.origins[id(group)] for group in batch.generated[5:]} <= {"fresh"}
        names = [call[0] for call in selector.calls]
        assert names[:3] == ["bind", "roll_out_references", "propose"]
        assert names.index("observe") > names.index("propose")

    def test_references_where_no_round_can_be_generated(self, tmp_path):
        config = DataEfficientGRPOConfig(output_dir=tmp_path, use_cpu=True, bf16=False)
        with pytest.raises(
            ValueError, match=r"LeastSolved generates reference rollouts .* tools that may answer with images"
        ):
            resolve_selector(config, LeastSolved(references=2), "tools that may answer with images", sharded=False)

    def test_a_stream_has_no_prompts_to_select(self, tmp_path):
        stream = {"train_dataset": plain_dataset().to_iterable_dataset()}
        with pytest.raises(ValueError, match=r"`selector=LeastSolved\(\.\.\.\)` needs a map-style dataset"):
            train(tmp_path, LeastSolved(), train=False, trainer=stream)


class TestWhatIsGiven:
    """All of this is known before a model is loaded: the model's path does not exist."""

    @staticmethod
    def make(folder, selector=None, **options):
        return train(folder, selector, train=False, trainer={"model": "no/such/model"}, **options)

    @pytest.mark.parametrize("selection", ["uniform", "dots", "nonsense"])
    def test_an_instance_and_a_name(self, tmp_path, selection):
        with pytest.raises(
            ValueError, match=rf"Both `selector=LeastSolved\(\.\.\.\)` and `selection='{selection}'` are given"
        ):
            self.make(tmp_path, LeastSolved(), selection=selection)

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            (LeastSolved, "the class LeastSolved"),
            ("uniform", "a str"),
            (3, "a int"),
            (lambda n, rng: range(n), "a function"),
        ],
    )
    def test_a_selector_of_another_type(self, tmp_path, wrong, named):
        with pytest.raises(TypeError, match=rf"`selector` is {named}; it takes an instance of"):
            self.make(tmp_path, wrong)

    def test_arguments_for_an_instance(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"`selector_args` \(\{'weight': 2\.0\}\) are for .* give them to LeastSolved"
        ):
            self.make(tmp_path, LeastSolved(), selector_args={"weight": 2.0})

    def test_an_unknown_name(self, tmp_path):
        with pytest.raises(ValueError, match=r"no selector 'unifrom'.*Did you mean 'uniform'"):
            self.make(tmp_path, selection="unifrom")

    @pytest.mark.usefixtures("_named")
    def test_wrong_arguments_of_a_name(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"'least-solved' cannot be created .*LeastSolved takes: weight, references"
        ):
            self.make(tmp_path, selection="least-solved", selector_args={"wait": 2.0})
        with pytest.raises(
            ValueError, match=r"'dots' cannot be created .*'p_init'"
        ):  # the name that "auto" stands for
            self.make(tmp_path, selector_args={"p_init": 0.5})


@pytest.mark.usefixtures("_named")
class TestName:
    @pytest.mark.parametrize("arguments", [{"weight": 0.25}, '{"weight": 0.25}', None])
    def test_it_trains_as_the_instance_does(self, tmp_path, arguments):
        named = train(tmp_path / "named", selection="least-solved", selector_args=arguments)
        weight = 1.0 if arguments is None else 0.25
        assert type(named.selector) is LeastSolved
        assert named.selector.weight == weight
        same = train(tmp_path / "instance", LeastSolved(weight=weight))
        assert prompts_by_batch(named) == prompts_by_batch(same)
        assert history(named.state.log_history) == history(same.state.log_history)

    def test_a_plain_trainer_with_arguments_of_a_built_in_selector(self, tmp_path):
        """`selector_args` win over the fields."""
        trainer = train(tmp_path, selection="greso", greso_p_init=0.2, selector_args={"p_init": 0.9}, max_steps=1)
        assert trainer.selector.metrics()["p_easy"] == 0.9
        trainer = train(tmp_path, selection="greso", greso_p_init=0.2, max_steps=1)
        assert trainer.selector.metrics()["p_easy"] == 0.2


SAVES = {"trainer_class": DataEfficientGRPOTrainer, "save_strategy": "steps", "save_steps": 5, "max_steps": 14}


class TestResume:
    @pytest.mark.parametrize("mode", MODES)
    def test_it_is_exact(self, tmp_path, mode):
        whole = train(tmp_path / "whole", LeastSolved(), **SAVES, **MODES[mode])
        resumed = train(tmp_path / "resumed", LeastSolved(), train=False, **SAVES, **MODES[mode])
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
        assert resumed.selector.calls[0][0] == "bind"
        assert history(resumed.state.log_history) == history(whole.state.log_history)
        assert_same_end(whole, resumed)
        assert resumed.selector.batches == whole.selector.batches
        np.testing.assert_array_equal(resumed.selector.solved, whole.selector.solved)

    def test_without_its_state_it_is_not(self, tmp_path):
        """So that the test above can fail."""

        class Forgetful(LeastSolved):
            def load_state_dict(self, state):
                pass

        whole = train(tmp_path / "whole", Forgetful(), **SAVES)
        resumed = train(tmp_path / "resumed", Forgetful(), train=False, **SAVES)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
        assert history(resumed.state.log_history) != history(whole.state.log_history)

    def test_another_selector_does_not_continue_its_run(self, tmp_path):
        train(tmp_path, LeastSolved(), **SAVES)
        other = train(tmp_path, UniformSelector(), train=False, **SAVES)
        with pytest.raises(ValueError, match="selector = 'LeastSolved'; now it is 'UniformSelector'"):
            other.train(resume_from_checkpoint=True)


class Wrong(Selector):
    """Proposes what `make` makes of n."""

    def __init__(self, make):
        self.make = make

    def propose(self, n, rng):
        return self.make(n)


WRONG = {
    "repeated": (lambda n: np.zeros(n, dtype=np.int64), "repeated ids or ids outside of"),
    "one twice": (lambda n: np.array([*range(n - 1), 0]), "repeated ids or ids outside of"),
    "too large": (lambda n: 24 + np.arange(n), r"outside of \[0, 24\)"),
    "the last one too large": (lambda n: 25 - n + np.arange(n), r"outside of \[0, 24\)"),
    "negative": (lambda n: np.arange(n) - 1, r"outside of \[0, 24\)"),
    "too few": (lambda n: np.arange(n - 1), r"shape \(\d+,\) and dtype int64; it takes \d+ prompt ids as integers"),
    "too many": (lambda n: np.arange(n + 1), r"shape \(\d+,\) and dtype int64"),
    "a matrix": (lambda n: np.arange(n)[:, None], r"shape \(\d+, 1\)"),
    "none": (lambda n: None, r"shape \(\) and dtype object"),
    "floats": (lambda n: np.arange(n, dtype=np.float64), "dtype float64; it takes"),
    "booleans": (lambda n: np.ones(n, dtype=bool), "dtype bool"),
    "texts": (lambda n: [str(i) for i in range(n)], "dtype <U"),
}


@pytest.mark.parametrize("name", WRONG)
class TestWrongProposals:
    def test_the_error_names_the_class(self, name):
        make, message = WRONG[name]
        with pytest.raises(ValueError, match=rf"Wrong\.propose\(4\) returned .*{message}"):
            check_proposal(make(4), 4, 24, "Wrong")

    @pytest.mark.parametrize("mode", ["single pass", "all"])
    def test_it_ends_a_run_before_anything_is_generated(self, tmp_path, name, mode):
        make, message = WRONG[name]
        trainer = train(tmp_path, Wrong(make), train=False, **MODES[mode])
        with pytest.raises(ValueError, match=rf"Wrong\.propose\(\d+\) returned .*{message}"):
            trainer.train()
        assert trainer.generated == 0


@pytest.mark.parametrize("ids", [np.array([23, 0, 7], np.int32), [23, 0, 7], np.array([23, 0, 7], np.uint8)])
def test_proposals_of_any_integers_are_taken(ids):
    checked = check_proposal(ids, 3, 24, "Right")
    assert checked.tolist() == [23, 0, 7]
    assert checked.dtype == np.int64


@pytest.mark.parametrize("name", ["negative", "repeated", "floats", "a matrix"])
def test_references_are_checked_too(tmp_path, name):
    """A negative id would take a row from the end."""
    make, _ = WRONG[name]

    class WrongReferences(LeastSolved):
        def roll_out_references(self, roll_out, rng):
            roll_out(make(4))

    trainer = train(tmp_path, WrongReferences(references=4), train=False)
    with pytest.raises(ValueError, match=r"WrongReferences\.roll_out_references asked for"):
        trainer.train()
    assert trainer.generated == 0


def test_no_reference_need_be_asked_for(tmp_path):
    class Rarely(LeastSolved):
        def roll_out_references(self, roll_out, rng):
            assert list(roll_out(np.array([]))) == []

    trainer = train(tmp_path, Rarely(references=4), max_steps=2)
    assert {origin for batch in trainer.batches for origin in batch.origins.values()} == {"fresh"}
