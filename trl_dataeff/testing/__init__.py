"""
Conformance suites for selectors and difficulty predictors, for this package's tests and for yours.

With pytest:

    from trl_dataeff.testing import parametrize_with_checks

    @parametrize_with_checks([MySelector, lambda: MySelector(sharpness=2.0)])
    def test_conformance(make, check):
        check(make)

Without: `check_plugin(MySelector)` runs all checks and raises the first failure. Each check takes a function without arguments
that makes a new selector or predictor. A predictor that needs the width of embeddings gets `EMBEDDING_WIDTH`.

    selectors.py     the checks of selectors
    predictors.py    the checks of predictors
    data.py          embeddings, contexts and groups that they use
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from trl_dataeff.difficulty.base import DifficultyPredictor
from trl_dataeff.selection.base import Selector
from trl_dataeff.testing.data import EMBEDDING_WIDTH, Check, Make, embeddings, make_context, make_groups
from trl_dataeff.testing.predictors import PREDICTOR_CHECKS
from trl_dataeff.testing.selectors import SELECTOR_CHECKS


__all__ = [
    "EMBEDDING_WIDTH",
    "PREDICTOR_CHECKS",
    "SELECTOR_CHECKS",
    "check_plugin",
    "checks_of",
    "embeddings",
    "make_context",
    "make_groups",
    "parametrize_with_checks",
]

F = TypeVar("F", bound=Callable[..., Any])


def parametrize_with_checks(factories: Iterable[Make]) -> Callable[[F], F]:
    """
    Decorator that runs a pytest function once for each factory and each check of its kind. The function takes `make` and
    `check`, and calls `check(make)`.

    Args:
        factories: each is a class, or a function without arguments, that makes a new [`Selector`] or
            [`DifficultyPredictor`].
    """
    import pytest

    cases = [(make, check) for make in factories for check in checks_of(make)]
    ids = [f"{_name(make)}-{check.__name__.removeprefix('check_')}" for make, check in cases]
    return pytest.mark.parametrize(("make", "check"), cases, ids=ids)


def checks_of(make: Make) -> list[Check]:
    """The checks for what `make` makes. Raises a `TypeError` if that is neither a selector nor a predictor."""
    plugin = make()
    if isinstance(plugin, Selector):
        return SELECTOR_CHECKS
    if isinstance(plugin, DifficultyPredictor):
        return PREDICTOR_CHECKS
    raise TypeError(
        f"{_name(make)} makes a {type(plugin).__name__}, which is neither a Selector nor a DifficultyPredictor."
    )


def check_plugin(make: Make) -> None:
    """Run all checks on what `make` makes. Raises the first failure, an `AssertionError`."""
    for check in checks_of(make):
        check(make)


def _name(make: Make) -> str:
    return getattr(make, "__name__", type(make).__name__)
