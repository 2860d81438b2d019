"""Checks of the contract of [`~trl_dataeff.selection.base.Selector`]. Each raises an `AssertionError` that says what is wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.selection.base import Selector, SelectorContext
from trl_dataeff.testing.data import BATCH_GROUPS, PROMPTS, Check, Make, make_context, make_groups, random_states


def _bound(make: Make, context: SelectorContext | None = None) -> Selector:
    selector: Selector = make()
    selector.bind(context or make_context())
    return selector


def _batch(selector: Selector, rng: torch.Generator, number: int) -> np.ndarray:
    """One generation batch: reference rollouts, a proposal, and its groups, a third of them of each kind. Returns ids."""
    observed: list[RolloutGroup] = []

    def roll_out(ids: np.ndarray) -> list[RolloutGroup]:
        groups = make_groups(ids, _success(ids, number), selector.predict(ids))
        for group in groups:
            group.origin = "reference"
        observed.extend(groups)
        return groups

    if selector.uses_references:
        selector.roll_out_references(roll_out, rng)
    ids = selector.propose(min(selector.context.batch_groups, selector.context.num_prompts), rng)
    observed.extend(make_groups(ids, _success(ids, number), selector.predict(ids)))
    selector.observe(observed)
    return ids


def _success(ids: np.ndarray, number: int) -> np.ndarray:
    """Of each prompt in generation batch `number`: 0, 1, or in between, and a few without a score."""
    rng = np.random.default_rng(number)
    success = np.choose(np.asarray(ids) % 3, [0.0, 1.0, rng.choice([0.25, 0.5, 0.75])])
    return np.where(rng.random(len(ids)) < 0.05, np.nan, success)


def _after(make: Make, batches: int, seed: int = 0) -> tuple[Selector, torch.Generator]:
    selector, rng = _bound(make), torch.Generator().manual_seed(seed)
    for number in range(batches):
        _batch(selector, rng, number)
    return selector, rng


def _assert_proposal(ids: Any, n: int, size: int) -> None:
    assert isinstance(ids, np.ndarray), f"propose({n}) returned a {type(ids).__name__}; it must return a NumPy array"
    assert ids.shape == (n,), f"propose({n}) returned shape {ids.shape}; it must return ({n},)"
    assert ids.dtype.kind in "iu", f"propose({n}) returned {ids.dtype}; it must return integers"
    assert 0 <= ids.min() <= ids.max() < size, f"propose({n}) returned ids outside of [0, {size}): {ids}"
    assert len(np.unique(ids)) == n, f"propose({n}) repeats prompts: {ids}"


def check_proposals_are_distinct_prompts(make: Make) -> None:
    """Whatever n, in whatever order, several times in a generation batch."""
    selector, rng = _bound(make), torch.Generator().manual_seed(0)
    for number in range(4):
        for n in (BATCH_GROUPS, 1, PROMPTS // 2, PROMPTS, 3):
            _assert_proposal(selector.propose(n, rng), n, PROMPTS)
        _batch(selector, rng, number)


def check_smallest_runs(make: Make) -> None:
    """One prompt; a batch of one group; a batch that takes all prompts."""
    for size, batch in ((1, 1), (5, 1), (5, 5)):
        selector, rng = _bound(make, make_context(size, batch)), torch.Generator().manual_seed(0)
        for number in range(3):
            _assert_proposal(_batch(selector, rng, number), batch, size)


def check_randomness_comes_from_rng_alone(make: Make) -> None:
    """Equal generators give equal proposals, and global random states are neither read nor changed."""
    proposals = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        before = random_states()
        selector, rng = _after(make, 3)
        proposals.append(selector.propose(BATCH_GROUPS, rng).tolist())
        assert random_states() == before, "a global random state was changed; draw from `rng` alone"
    assert proposals[0] == proposals[1], (
        "proposals differ between runs with equal `rng`: they depend on something else"
    )


def check_state_restores_the_next_proposals(make: Make) -> None:
    """State that goes through a file gives the same next ten generation batches, predictions included."""
    first, rng = _after(make, 5)
    first.propose(3, rng)  # within a generation batch
    state = load(save({k: np.ascontiguousarray(v) for k, v in first.state_dict().items()}))
    second, other = _bound(make), torch.Generator()
    second.load_state_dict(state)
    other.set_state(rng.get_state())
    everything = np.arange(PROMPTS)
    for number in range(10, 20):
        ids = _batch(first, rng, number)
        restored = _batch(second, other, number)
        assert ids.tolist() == restored.tolist(), f"proposals differ after load_state_dict: {ids} and {restored}"
        np.testing.assert_array_equal(first.predict(everything), second.predict(everything), "predictions differ")


def check_state_is_a_copy_of_arrays(make: Make) -> None:
    """State has names and arrays, and does not change when the selector learns on."""
    selector, rng = _after(make, 2)
    state = selector.state_dict()
    assert all(isinstance(name, str) and isinstance(value, np.ndarray) for name, value in state.items()), (
        f"state_dict() must map names to NumPy arrays; got { ({k: type(v).__name__ for k, v in state.items()}) }"
    )
    before = {name: value.copy() for name, value in state.items()}
    for number in range(2, 5):
        _batch(selector, rng, number)
    for name, value in before.items():
        np.testing.assert_array_equal(state[name], value, f"state_dict()[{name!r}] is not a copy")


def check_bind_starts_a_new_run(make: Make) -> None:
    """A selector that is bound again proposes as a new one does."""
    used, _ = _after(make, 4)
    used.bind(make_context())
    new, rng, other = _bound(make), torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for number in range(3):
        assert _batch(used, rng, number).tolist() == _batch(new, other, number).tolist(), "bind() must reset all state"


def check_predictions(make: Make) -> None:
    """
    Success rates and probabilities in [0, 1] or NaN, one per prompt, and what predictions are worth; asking for them changes
    nothing.
    """
    for batches in (0, 3):
        selector, rng = _after(make, batches)
        ids = selector.propose(BATCH_GROUPS, rng)
        predicted = np.asarray(selector.predict(ids))
        assert predicted.shape == (BATCH_GROUPS,), f"predict() of {BATCH_GROUPS} prompts has shape {predicted.shape}"
        known = predicted[~np.isnan(predicted)]
        assert ((known >= 0) & (known <= 1)).all(), (
            f"predict() must return success rates in [0, 1] or NaN: {predicted}"
        )
        np.testing.assert_array_equal(predicted, selector.predict(ids), "predict() changes its own results")
        chances = np.asarray(selector.predict_effective(ids))
        assert chances.shape == (BATCH_GROUPS,), (
            f"predict_effective() of {BATCH_GROUPS} prompts has shape {chances.shape}"
        )
        known = chances[~np.isnan(chances)]
        assert ((known >= 0) & (known <= 1)).all(), (
            f"predict_effective() must return probabilities in [0, 1] or NaN: {chances}"
        )
        strength = np.asarray(selector.strength(ids))
        assert strength.shape == (BATCH_GROUPS,), f"strength() of {BATCH_GROUPS} prompts has shape {strength.shape}"
        worth = strength[~np.isnan(strength)]
        assert ((worth >= 0) & np.isfinite(worth)).all(), f"strength() must return numbers >= 0 or NaN: {strength}"


def check_unusual_groups(make: Make) -> None:
    """Batches that are all easy, all hard or without scores; prompts that were not proposed, or occur twice."""
    selector, rng = _bound(make), torch.Generator().manual_seed(0)
    everything = np.arange(PROMPTS)
    for success in (1.0, 0.0, np.nan, 0.5):
        ids = selector.propose(BATCH_GROUPS, rng)
        selector.observe(make_groups(ids, np.full(BATCH_GROUPS, success)))
        selector.observe(make_groups(everything, np.full(PROMPTS, success)))
        _assert_proposal(selector.propose(BATCH_GROUPS, rng), BATCH_GROUPS, PROMPTS)
    selector.observe(make_groups([3, 3, 3], [0.0, 1.0, 0.5]))
    _assert_proposal(selector.propose(PROMPTS, rng), PROMPTS, PROMPTS)


def check_metrics(make: Make) -> None:
    """Names and numbers, before and after the first generation batch."""
    for batches in (0, 1, 3):
        selector, _ = _after(make, batches)
        for name, value in selector.metrics().items():
            assert isinstance(name, str), f"metrics() has the name {name!r}; names are strings"
            assert isinstance(value, (int, float, np.number)), f"metrics()[{name!r}] is {value!r}; it must be a number"


SELECTOR_CHECKS: list[Check] = [
    check_proposals_are_distinct_prompts,
    check_smallest_runs,
    check_randomness_comes_from_rng_alone,
    check_state_restores_the_next_proposals,
    check_state_is_a_copy_of_arrays,
    check_bind_starts_a_new_run,
    check_predictions,
    check_unusual_groups,
    check_metrics,
]
