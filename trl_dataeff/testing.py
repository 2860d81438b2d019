"""
Conformance suite for selectors, for this package's tests and for yours.

With pytest:

    from trl_dataeff.testing import parametrize_with_checks

    @parametrize_with_checks([MySelector, lambda: MySelector(sharpness=2.0)])
    def test_conformance(make, check):
        check(make)

Without: `check_selector(MySelector)` runs all checks and raises the first failure. Each check takes a function without
arguments that makes a new selector, and calls it as training does, through [`CheckedSelector`], which checks what
every method returns.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from trl_dataeff.checkpoint.state import load_state, save_state
from trl_dataeff.rollouts.classification import GroupClassifier
from trl_dataeff.rollouts.group import Origin, RolloutGroup
from trl_dataeff.rollouts.scale import RewardScale
from trl_dataeff.selection.base import CheckedSelector, SelectorContext


EMBEDDING_WIDTH = 16
#: Prompts of the dataset
PROMPTS = 60
#: Groups of a generation batch
BATCH_GROUPS = 8
#: Completions of a group
GROUP_SIZE = 4
#: Share of groups without a score
UNSCORED = 0.05

Make: TypeAlias = Callable[[], Any]
Check: TypeAlias = Callable[[Make], None]
F = TypeVar("F", bound=Callable[..., Any])


def parametrize_with_checks(factories: Iterable[Make]) -> Callable[[F], F]:
    """
    Run a pytest function once for each factory and each check.

    Args:
        factories (`Iterable[Callable]`): classes, or functions without arguments, that make a new [`Selector`].

    Returns:
        `Callable`: a decorator. The function that it decorates takes `make` and `check`, and calls `check(make)`.
    """
    import pytest

    cases = []
    ids = []
    for make in factories:
        factory_name = getattr(make, "__name__", type(make).__name__)
        for check in CHECKS:
            cases.append((make, check))
            ids.append(f"{factory_name}-{check.__name__.removeprefix('check_')}")
    return pytest.mark.parametrize(("make", "check"), cases, ids=ids)


def check_selector(make: Make) -> None:
    """
    Run all checks.

    Args:
        make (`Callable`): class, or function without arguments, that makes a new [`Selector`].

    Raises:
        `Exception`: the first failure.
    """
    for check in CHECKS:
        check(make)


def embeddings(size: int = PROMPTS) -> np.ndarray:
    """Embeddings of prompts, float16 `(size, EMBEDDING_WIDTH)`, always the same; the first column tells difficulty."""
    values = np.random.default_rng(0).normal(size=(size, EMBEDDING_WIDTH)) * 0.3
    values[:, 0] = np.linspace(-2, 2, size)
    return values.astype(np.float16)


def make_context(num_prompts: int = PROMPTS, batch_groups: int = BATCH_GROUPS) -> SelectorContext:
    """A context like the one of a small run."""
    return SelectorContext(
        num_prompts,
        batch_groups,
        GROUP_SIZE,
        seed=0,
        embed=lambda: embeddings(num_prompts),
        scale=RewardScale.of((0.0, 1.0)),
    )


def make_groups(
    prompt_ids: Sequence[int] | np.ndarray, success: Sequence[float] | np.ndarray, origin: Origin = "fresh"
) -> list[RolloutGroup]:
    """
    Make groups with rewards of 0 and 1, as the collector makes them.

    Args:
        prompt_ids (`np.ndarray` of shape `(n,)`): prompt of each group.
        success (`np.ndarray` of shape `(n,)`): share of completions that succeed, rounded to whole ones; NaN for a
            group whose completions got no score.
        origin (`str`, *optional*, defaults to `"fresh"`): `"reference"` for those of reference prompts.

    Returns:
        `list[RolloutGroup]`: the n groups.
    """
    success = np.asarray(success, dtype=np.float64)
    num_successes = np.round(np.nan_to_num(success) * GROUP_SIZE)
    is_success = np.arange(GROUP_SIZE) < num_successes[:, None]  # (n, GROUP_SIZE)
    rewards = is_success.astype(np.float32)[:, :, None]  # of one reward function
    rewards[np.isnan(success)] = np.nan
    lengths = np.full(is_success.shape, 5, dtype=np.int32)
    truncated = np.zeros_like(is_success)
    classifier = GroupClassifier(np.ones(1), reward_range=(0.0, 1.0))
    is_reference = origin == "reference"
    return classifier.groups(prompt_ids, rewards, lengths, truncated, step=0, round=0, is_reference=is_reference)


def _random_states() -> list[Any]:
    """Global random states of Python, NumPy and torch, comparable."""
    numpy_state: Any = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return [
        random.getstate(),
        numpy_state["key"].tolist(),
        numpy_state["pos"],
        torch.get_rng_state().tolist(),
    ]


def _bound(make: Make, context: SelectorContext | None = None) -> tuple[CheckedSelector, torch.Generator]:
    """A new selector at the start of a run, and the generator that it draws from."""
    selector = CheckedSelector(make())
    selector.bind(context or make_context())
    return selector, torch.Generator().manual_seed(0)


def _after(make: Make, batches: int) -> tuple[CheckedSelector, torch.Generator]:
    """A new selector after this many generation batches, and the generator that it draws from."""
    selector, rng = _bound(make)
    for number in range(batches):
        _run_batch(selector, rng, number)
    return selector, rng


def _run_batch(selector: CheckedSelector, rng: torch.Generator, number: int, n: int = BATCH_GROUPS) -> np.ndarray:
    """
    Go through a generation batch: reference rollouts, a proposal, and its groups.

    Args:
        selector ([`CheckedSelector`]): the selector.
        rng (`torch.Generator`): the generator that it draws from.
        number (`int`): number of the generation batch, on which success depends.
        n (`int`, *optional*, defaults to `BATCH_GROUPS`): groups of the batch.

    Returns:
        `np.ndarray` of shape `(n,)`: the prompts that it proposed.
    """
    references = selector.references(rng)
    if len(references) > 0:
        selector.observe(make_groups(references, _success(references, number), "reference"))
    ids = selector.propose(n, rng)
    selector.observe(make_groups(ids, _success(ids, number)))
    return ids


def _success(ids: np.ndarray, number: int) -> np.ndarray:
    """Success of each prompt in generation batch `number`: 0, 1, or in between by its id, and NaN for a few."""
    rng = np.random.default_rng(number)
    in_between = rng.choice([0.25, 0.5, 0.75])
    success = np.choose(np.asarray(ids) % 3, [0.0, 1.0, in_between])
    is_unscored = rng.random(len(ids)) < UNSCORED
    return np.where(is_unscored, np.nan, success)


def check_proposals_are_distinct_prompts(make: Make) -> None:
    """Whatever n, in whatever order, several times in a generation batch."""
    selector, rng = _bound(make)
    for number in range(4):
        for n in (BATCH_GROUPS, 1, PROMPTS // 2, PROMPTS, 3):
            selector.propose(n, rng)
        _run_batch(selector, rng, number)


def check_smallest_runs(make: Make) -> None:
    """One prompt; a batch of one group; a batch that takes all prompts."""
    for size, batch in ((1, 1), (5, 1), (5, 5)):
        selector, rng = _bound(make, make_context(size, batch))
        for number in range(3):
            _run_batch(selector, rng, number, batch)


def check_randomness_comes_from_rng_alone(make: Make) -> None:
    """Equal generators give equal proposals, and global random states are neither read nor changed."""
    proposals = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        before = _random_states()
        selector, rng = _after(make, 3)
        proposals.append(selector.propose(BATCH_GROUPS, rng).tolist())
        assert _random_states() == before, "a global random state was changed; draw from `rng` alone"
    assert proposals[0] == proposals[1], (
        "proposals differ between runs with equal `rng`: they depend on something else"
    )


def check_state_restores_the_next_proposals(make: Make) -> None:
    """State that goes through a file gives the same next ten generation batches, predictions included."""
    first, rng = _after(make, 5)
    first.propose(3, rng)  # the state is then one within a generation batch
    with tempfile.TemporaryDirectory() as folder:
        save_state(Path(folder), "state", {"selector": first.state_dict()})
        state = load_state(Path(folder), "state")["selector"]
    second, second_rng = _bound(make)
    second.load_state_dict(state)
    second_rng.set_state(rng.get_state())
    everything = np.arange(PROMPTS)
    for number in range(10, 20):
        ids = _run_batch(first, rng, number)
        restored = _run_batch(second, second_rng, number)
        assert ids.tolist() == restored.tolist(), f"proposals differ after load_state_dict: {ids} and {restored}"
        np.testing.assert_array_equal(first.predict(everything), second.predict(everything), "predictions differ")


def check_state_is_a_copy(make: Make) -> None:
    """State can be saved, and does not change when the selector learns on."""
    selector, rng = _after(make, 2)
    state = selector.state_dict()
    before = copy.deepcopy(state)
    for number in range(2, 5):
        _run_batch(selector, rng, number)
    np.testing.assert_equal(state, before, "state_dict() is not a copy")


def check_bind_starts_a_new_run(make: Make) -> None:
    """A selector that is bound again proposes as a new one does."""
    used, _ = _after(make, 4)
    used.bind(make_context())
    used_rng = torch.Generator().manual_seed(0)
    new, new_rng = _bound(make)
    for number in range(3):
        proposed_by_used = _run_batch(used, used_rng, number).tolist()
        proposed_by_new = _run_batch(new, new_rng, number).tolist()
        assert proposed_by_used == proposed_by_new, "bind() must reset all state"


def check_predictions_and_metrics(make: Make) -> None:
    """Success rates in [0, 1] or NaN, one per prompt, and numbers by name; asking for predictions changes nothing."""
    for batches in (0, 1, 3):
        selector, rng = _after(make, batches)
        selector.metrics()
        ids = selector.propose(BATCH_GROUPS, rng)
        predicted = selector.predict(ids)
        is_valid = np.isnan(predicted) | ((predicted >= 0) & (predicted <= 1))
        assert is_valid.all(), f"predict() must return success rates in [0, 1] or NaN: {predicted}"
        np.testing.assert_array_equal(predicted, selector.predict(ids), "predict() changes its own results")


def check_unusual_groups(make: Make) -> None:
    """Batches that are all easy, all hard or without scores; prompts that were not proposed, or occur twice."""
    selector, rng = _bound(make)
    everything = np.arange(PROMPTS)
    for success in (1.0, 0.0, np.nan, 0.5):
        ids = selector.propose(BATCH_GROUPS, rng)
        selector.observe(make_groups(ids, np.full(BATCH_GROUPS, success)))
        selector.observe(make_groups(everything, np.full(PROMPTS, success)))
        selector.propose(BATCH_GROUPS, rng)
    selector.observe(make_groups([3, 3, 3], [0.0, 1.0, 0.5]))
    selector.propose(PROMPTS, rng)


CHECKS: list[Check] = [
    check_proposals_are_distinct_prompts,
    check_smallest_runs,
    check_randomness_comes_from_rng_alone,
    check_state_restores_the_next_proposals,
    check_state_is_a_copy,
    check_bind_starts_a_new_run,
    check_predictions_and_metrics,
    check_unusual_groups,
]
