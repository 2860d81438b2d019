"""A selector of one's own: its contract in training, exact resume, and its faults, which are named with its class."""

import numpy as np
import pytest
import torch

from tests.factories.comparison import groups_since
from tests.factories.groups import generator
from tests.factories.selectors import LeastSolved, WithReferences
from tests.factories.tiny import even_length_reward, run
from tests.factories.training import Watched, mixed_reward, number
from trl_dataeff.selection.base import CheckedSelector
from trl_dataeff.testing import make_context


def train(folder, selector, resume=None, **options) -> Watched:
    options = {"rewards": mixed_reward, "max_steps": 6, **options}
    return run(folder, Watched, resume=resume, trainer={"selector": selector}, **options)


MODES = {
    "single pass": {},
    "dynamic sampling": {"max_rollout_rounds": 4},
    "replay": {"replay": "share", "rewards": even_length_reward, "steps_per_generation": 2},
    "all": {"replay": "share", "max_rollout_rounds": 4, "steps_per_generation": 2, "rollout_margin": 2.0},
}


@pytest.mark.parametrize("mode", MODES)
def test_its_contract_is_kept(tmp_path, mode):
    """
    Bound once and before anything else; what it proposes is generated, but for prompts that the batch has already; it
    observes every batch, once and whole.
    """
    selector = LeastSolved()
    rolled_out = []
    rewards_of_mode = MODES[mode].get("rewards", mixed_reward)

    def reward(prompts, **kwargs):
        rolled_out.extend(number(prompt) for prompt in prompts[::4])
        return rewards_of_mode(prompts=prompts, **kwargs)

    trainer = train(tmp_path, selector, **{**MODES[mode], "rewards": reward})
    assert trainer.selector is selector
    assert selector.calls[0][0] == "bind"
    ((context,),) = selector.called("bind")
    batch_groups = len(trainer.batches[0].trained)
    assert (context.num_prompts, context.batch_groups, context.group_size) == (24, batch_groups, 4)
    assert context.seed == trainer.args.seed
    assert context.embeddings().shape == (24, 32)

    observed = [groups for (groups,) in selector.called("observe")]
    generated = [batch.generated for batch in trainer.batches]
    assert [list(map(id, groups)) for groups in observed] == [list(map(id, groups)) for groups in generated]
    proposed = np.concatenate([ids for (ids,) in selector.called("propose")])
    assert [group.prompt_id for groups in generated for group in groups] == rolled_out
    not_yet_rolled_out = iter(proposed.tolist())
    assert all(prompt in not_yet_rolled_out for prompt in rolled_out), "in the order in which they were proposed"
    if mode in ("single pass", "replay"):
        assert proposed.tolist() == rolled_out
    assert all(len(group.rewards) == 4 for groups in generated for group in groups)
    assert trainer.generated == 4 * len(rolled_out)
    if mode in ("dynamic sampling", "all"):
        assert max(batch.rounds for batch in trainer.batches) > 1
        assert any(batch.dropped for batch in trainer.batches)
    for batch in trainer.batches:
        assert batch.selector_metrics.keys() == {"batches", "solved/sum", "not yet defined"}


def test_its_predictions_are_made_before_it_observes_and_are_in_the_table(tmp_path):
    selector = LeastSolved()
    trainer = train(tmp_path, selector)
    solved = np.zeros(24)
    expected = []
    for batch in trainer.batches:
        expected += [1 / (2 + solved[group.prompt_id]) for group in batch.generated]
        for group in batch.generated:
            solved[group.prompt_id] += group.success_rate
    np.testing.assert_allclose(groups_since(tmp_path, 0)["predicted"], expected, rtol=1e-6)
    np.testing.assert_allclose(selector.solved, solved)


@pytest.mark.parametrize("mode", ["single pass", "replay"])
def test_references_are_rolled_out_and_observed_once_before_it_proposes(tmp_path, mode):
    selector = WithReferences()
    trainer = train(tmp_path, selector, **MODES[mode])
    calls = [name for name, *_ in selector.calls]
    assert calls == ["bind", *["references", "observe", "propose", "observe"] * len(trainer.batches)]
    observed = [groups for (groups,) in selector.called("observe")]
    for i, ((ids,), batch) in enumerate(zip(selector.called("references"), trainer.batches, strict=True)):
        references, others = observed[2 * i : 2 * i + 2]
        assert [group.prompt_id for group in references] == ids.tolist()
        assert [batch.origins[group] for group in references] == ["reference"] * 5
        assert {batch.origins[group] for group in others} <= {"fresh"}
        assert list(map(id, [*references, *others])) == list(map(id, batch.generated))


class Faulty(WithReferences):
    """`faults` replace methods."""

    def __init__(self, **faults):
        super().__init__()
        self.__dict__.update(faults)


def checked(**faults) -> CheckedSelector:
    """As the collector of a run on 24 prompts calls it."""
    selector = CheckedSelector(Faulty(**faults))
    selector.bind(make_context(24))
    return selector


PROPOSALS = {
    "one twice": (np.array([0, 1, 2, 0]), r"\[0, 1, 2, 0\].*distinct"),
    "too large": (np.arange(21, 25), r"\[0, 24\).*\[21, 22, 23, 24\]"),
    "negative": (np.arange(4) - 1, r"\[0, 24\).*\[-1, 0, 1, 2\]"),
    "too few": (np.arange(3), r"\(3,\).* 4 prompt ids"),
    "a matrix": (np.arange(4)[:, None], r"\(4, 1\)"),
    "none": (None, r"\(\).*object"),
    "floats": (np.arange(4.0), "float64.*integers"),
    "texts": (["0", "1", "2", "3"], "<U1"),
}


@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "propose") for name in PROPOSALS), *((name, "references") for name in PROPOSALS if name != "too few")],
)
def test_wrong_ids_are_an_error(name, method):
    ids, named = PROPOSALS[name]
    selector = checked(**{method: lambda *_: ids})
    if method == "propose":
        with pytest.raises(ValueError, match=rf"Faulty\.propose\(4\).*{named}"):
            selector.propose(4, generator())
    else:
        with pytest.raises(ValueError, match=rf"Faulty\.references\(\).*{named}"):
            selector.references(generator())


@pytest.mark.parametrize("predicted", [None, np.zeros(24), ["a", "b"], np.full((2, 1), 0.5)], ids=str)
def test_predictions_of_another_shape_are_an_error(predicted):
    with pytest.raises(ValueError, match=r"Faulty\.predict\(\)"):
        checked(predict=lambda ids: predicted).predict(np.array([3, 5]))


@pytest.mark.parametrize("value", [None, "a", np.zeros(3)], ids=str)
def test_metrics_that_are_not_numbers_are_an_error(value):
    with pytest.raises(TypeError, match=r"Faulty\.metrics\(\)\['a'\]"):
        checked(metrics=lambda: {"a": value}).metrics()


@pytest.mark.parametrize("state", [{"n": torch.ones(1)}, {"n": {"m": np.array(["a"])}}, None], ids=str)
def test_a_state_that_cannot_be_saved_is_an_error_from_the_start(state):
    with pytest.raises(TypeError, match=r"Faulty\.state_dict\(\)"):
        checked(state_dict=lambda: state)


def fail(*args):
    raise RuntimeError("Can't call numpy()")


def wrong_ids(*args):
    return np.zeros(2, dtype=int)


@pytest.mark.parametrize("method", ["propose", "references", "state_dict"])
def test_a_fault_ends_a_run_before_anything_is_generated(tmp_path, method):
    fault = fail if method == "state_dict" else wrong_ids
    faults = {"references": lambda rng: [], method: fault}
    rewarded = []
    with pytest.raises((ValueError, TypeError), match=rf"Faulty\.{method}\("):
        train(tmp_path, Faulty(**faults), rewards=lambda completions, **_: rewarded.append(1))
    assert not rewarded


@pytest.mark.parametrize("error", [KeyError("n"), RuntimeError("size mismatch")], ids=repr)
def test_a_state_that_does_not_fit_is_said(tmp_path, error):
    def load(state):
        raise error

    train(tmp_path, Faulty(), save_strategy="steps", save_steps=1, max_steps=1)
    with pytest.raises(ValueError, match=r"Faulty"):
        train(tmp_path, Faulty(load_state_dict=load), str(tmp_path / "checkpoint-1"))
