"""
The contract of selectors, and their registry.

    bind(context)            once, when training starts
    propose(n, rng)          which prompts to generate rollouts for; one or more times per generation batch
    observe(groups)          what those rollouts gave; once per generation batch
    state_dict(), load_state_dict(state), metrics()

A selector of your own implements `propose`. It takes part in training as an instance
(`DataEfficientGRPOTrainer(..., selector=MySelector())`) or, once registered, by name (`selection="mine"`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from trl_dataeff.difficulty.base import Embeddings
from trl_dataeff.registry import PluginRegistry
from trl_dataeff.rollouts.group import RolloutGroup


C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class SelectorContext:
    """
    What a selector may know of the run.

    Args:
        num_prompts (`int`): N, prompts of the training dataset; a prompt's id is its row index.
        batch_groups (`int`): B, groups trained on per generation batch, of all processes.
        group_size (`int`): G, completions per prompt (`num_generations`).
        seed (`int`, *optional*, defaults to `0`): seed of the run.
        embed (`Callable`, *optional*): makes the embeddings of all prompts, `(N, h)`.
    """

    num_prompts: int
    batch_groups: int
    group_size: int
    seed: int = 0
    embed: Callable[[], Embeddings] | None = field(default=None, repr=False)

    def embeddings(self) -> Embeddings:
        """
        Embeddings of all prompts, `(N, h)`, made at the first call: by the policy as it is then, or by `dots_embedding`.
        Call it in `bind`, so that a resumed run gets the same.

        Raises:
            `ValueError`: the prompts of this run cannot be embedded.
        """
        return self._embeddings

    @cached_property
    def _embeddings(self) -> Embeddings:
        if self.embed is None:
            raise ValueError("This run has no embeddings of its prompts; give `SelectorContext` an `embed` function.")
        return self.embed()


class EarlierGroups(NamedTuple):
    """
    What groups of an earlier run showed of n prompts of this dataset, in the order of their last groups.

    Attributes:
        ids: prompts, int64 of shape `(n,)`, each once.
        rates: mean success rates, float32 of shape `(n,)`, in [0, 1].
        effective: shares of effective groups, float32 of shape `(n,)`.
        counts: groups, int64 of shape `(n,)`.
    """

    ids: np.ndarray
    rates: np.ndarray
    effective: np.ndarray
    counts: np.ndarray


class Selector(ABC):
    """
    Decides which prompts to generate rollouts for.

    A selector decides the same on every process: it may use its own state and `rng`, which are equal on all processes,
    and nothing else. Everything but `propose` has a default. The constructor only stores its arguments; `bind` does the
    work.

    Attributes:
        name (`str`): name that the class is registered as, see [`register_selector`].
        exact (`bool`): whether proposals are equal on all processes to the last bit because nothing is computed that
            rounds. If not (the default), the main process's proposals are used everywhere.
        uses_references (`bool`): whether [`roll_out_references`] generates rollouts. TRL must then be able to generate
            outside of its own pass over a batch.
        context ([`SelectorContext`]): the run, from `bind` on.
    """

    name: ClassVar[str] = ""
    exact: bool = False
    uses_references: bool = False
    context: SelectorContext

    def __init__(
        self,
    ) -> None:  # so that the error of an unknown argument names it, also with cooperative base classes
        super().__init__()

    def bind(self, context: SelectorContext) -> None:
        """
        Start a run: called when training starts, before anything else. Any state of an earlier run is discarded here.

        Args:
            context ([`SelectorContext`]): the run.
        """
        self.context = context

    def start_from(self, earlier: EarlierGroups) -> bool:
        """
        Begin with what an earlier run showed (`history_from`), as a prior that this run's own groups outweigh. Called after
        [`bind`], but not when a run is resumed.

        Returns:
            `bool`: whether the selector makes use of it. By default it does not, and `history_from` is an error.
        """
        return False

    @abstractmethod
    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        """
        Propose prompts.

        Args:
            n (`int`): how many, at most `context.num_prompts`.
            rng (`torch.Generator`): the only source of randomness.

        Returns:
            `np.ndarray` of shape `(n,)` and dtype int64: prompt ids without repetition.
        """

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Success rates expected of proposed prompts, float32 `(n,)`; NaN where unknown. Logged, and compared later."""
        return np.full(len(prompt_ids), np.nan, dtype=np.float32)

    def predict_effective(self, prompt_ids: np.ndarray) -> np.ndarray:
        """
        Probabilities that groups of proposed prompts are effective, `(n,)`; NaN where unknown. They decide how many prompts
        are proposed, with `fresh_groups="adaptive"`. By default those of `num_generations` independent completions that
        succeed with the predicted rates.
        """
        p, size = np.clip(self.predict(prompt_ids), 0, 1).astype(np.float64), self.context.group_size
        chance: np.ndarray = 1 - p**size - (1 - p) ** size
        return chance

    def strength(self, prompt_ids: np.ndarray) -> np.ndarray:
        """
        How many completions each of these predictions is worth, float32 `(n,)`, finite and at least 0; NaN where unknown. The
        tracked baseline weighs them by it.
        """
        return np.full(len(prompt_ids), np.nan, dtype=np.float32)

    def explored(self, prompt_ids: np.ndarray) -> np.ndarray:
        """
        Which of the proposed prompts were drawn uniformly, bool `(n,)`: on them, predictions are checked without the bias
        of selection. Logged.
        """
        return np.zeros(len(prompt_ids), dtype=bool)

    def roll_out_references(
        self, roll_out: Callable[[np.ndarray], Sequence[RolloutGroup]], rng: torch.Generator
    ) -> None:
        """
        Generate rollouts of prompts of your choice before the first proposal of a generation batch, and learn from
        them. Needs `uses_references = True`. [`observe`] gets these groups too.

        Args:
            roll_out (`Callable`): prompt ids `(k,)` -> their groups. With several processes the ids are those of the main
                process, cut to a multiple of the number of processes.
            rng (`torch.Generator`): the only source of randomness.
        """

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """
        Learn from a generation batch. Called once per batch, unless nothing was generated for it.

        Args:
            groups: all groups generated for it, dropped ones included, in order. A prompt may occur more than once; a
                group's success rate may be NaN.
        """

    def rescale(self, scale: float, offset: float) -> None:
        """
        Called when the reward's range has widened, so that a success rate r of an earlier group is `scale * r + offset`
        now. Map stored rates, if there are any.
        """

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of all state that decides later proposals, as arrays (`rng` is saved by the trainer)."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state_dict` returned. Called after `bind`."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log, under `dataeff/selector/<name>`. The log has the latest value, not a mean."""
        return {}


_SELECTORS = PluginRegistry(Selector, "selector", "trl_dataeff.selectors", ValueError)  # type: ignore[type-abstract]


def register_selector(name: str) -> Callable[[C], C]:
    """
    Class decorator that registers a [`Selector`], so that `selection="name"` finds it. A package can offer its class in the
    entry point group `trl_dataeff.selectors` instead.

    Args:
        name (`str`): the name; it becomes the class attribute `name`.

    Raises:
        `ValueError`: the name belongs to another class, or the class is not a `Selector`.
    """
    return _SELECTORS.register(name)


def registered_selectors() -> list[str]:
    """Names of all selectors, in alphabetical order, those of entry points included."""
    return _SELECTORS.names()


def make_selector(name: str, arguments: dict[str, Any] | None = None) -> Selector:
    """
    The selector of a registered name, not bound yet.

    Args:
        name (`str`): `"uniform"`, `"dots"`, `"greso"`, `"dots+greso"`, or a name of your own.
        arguments (`dict`, *optional*): keyword arguments of its class.

    Raises:
        `ValueError`: there is no such selector, or its class does not take these arguments.
    """
    cls, arguments = _SELECTORS.get(name), arguments or {}
    try:
        return cls(**arguments)
    except TypeError as error:
        takes = ", ".join(_argument_names(cls)) or "none"
        raise ValueError(
            f"The selector {name!r} cannot be created with the arguments {arguments} ({error}). {cls.__name__} takes: {takes}."
        ) from error


def _argument_names(cls: type) -> list[str]:
    """Of its constructor, and of those of its base classes to which `**keywords` are handed on."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in base.__dict__:
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return names


def check_request(n: int, size: int) -> None:
    """Raise a `ValueError` if `n` distinct prompts cannot be taken from `size`."""
    if not 0 < n <= size:
        raise ValueError(f"{n} prompts were requested; {size} prompts give from 1 to {size} without repetition.")


def checked_state(selector: Selector) -> dict[str, np.ndarray]:
    """
    `selector.state_dict()`.

    Raises:
        `TypeError`: it fails, or returns something else than numeric arrays by name. The message has the selector's class.
    """
    name = type(selector).__name__
    try:
        state = selector.state_dict()
    except Exception as error:  # as a TypeError, which no handler takes for a full disk
        raise TypeError(f"{name}.state_dict() failed ({type(error).__name__}: {error}).") from error
    numeric = isinstance(state, dict) and all(
        isinstance(key, str) and isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
        for key, value in state.items()
    )
    if not numeric:
        raise TypeError(f"{name}.state_dict() returned {state!r:.200}; it must return numeric NumPy arrays by name.")
    return state


def checked_predictions(selector: Selector, prompt_ids: np.ndarray) -> np.ndarray:
    """
    `selector.predict(prompt_ids)` as float32 `(n,)`.

    Raises:
        `ValueError`: it has another shape, or is not numeric. The message has the selector's class.
    """
    return _one_per_prompt(selector, "predict", prompt_ids, "success rate")


def checked_strengths(selector: Selector, prompt_ids: np.ndarray) -> np.ndarray:
    """
    `selector.strength(prompt_ids)` as float32 `(n,)`.

    Raises:
        `ValueError`: it has another shape, is not numeric, infinite or below 0. The message has the selector's class.
    """
    strengths = _one_per_prompt(selector, "strength", prompt_ids, "number of completions")
    wrong = strengths[(strengths < 0) | np.isinf(strengths)]
    if len(wrong):
        raise ValueError(
            f"{type(selector).__name__}.strength() returned {wrong[0]}; a prediction is worth a finite number of completions "
            "of at least 0, or NaN where that is unknown."
        )
    return strengths


def _one_per_prompt(selector: Selector, method: str, prompt_ids: np.ndarray, what: str) -> np.ndarray:
    array = np.asarray(getattr(selector, method)(prompt_ids))
    if array.shape != prompt_ids.shape or array.dtype.kind not in "biuf":
        raise ValueError(
            f"{type(selector).__name__}.{method}() of {len(prompt_ids)} prompts returned shape {array.shape} and dtype "
            f"{array.dtype}; it must return one {what} per prompt, NaN where it is unknown."
        )
    return array.astype(np.float32)


def checked_chances(selector: Selector, prompt_ids: np.ndarray, unknown: float) -> np.ndarray:
    """
    `selector.predict_effective(prompt_ids)` as float64 `(n,)`, `unknown` in the place of NaN.

    Raises:
        `ValueError`: it has another shape, or values outside of [0, 1]. The message has the selector's class.
    """
    chances = np.asarray(selector.predict_effective(prompt_ids), dtype=np.float64)
    if chances.shape != prompt_ids.shape or ((chances < 0) | (chances > 1)).any():
        raise ValueError(
            f"{type(selector).__name__}.predict_effective() of {len(prompt_ids)} prompts returned {chances!r:.200}; it must "
            "return one probability per prompt, NaN where it is unknown."
        )
    return np.where(np.isnan(chances), unknown, chances)


def checked_metrics(selector: Selector) -> dict[str, float]:
    """
    `selector.metrics()` as floats by name.

    Raises:
        `TypeError`: a value is not a number. The message has the selector's class.
    """
    metrics = selector.metrics()
    for key, value in metrics.items():
        if not isinstance(key, str) or not isinstance(value, (int, float, np.number)):
            raise TypeError(f"{type(selector).__name__}.metrics()[{key!r}] is {value!r:.200}; it must be a number.")
    return {key: float(value) for key, value in metrics.items()}


def check_proposal(ids: Any, n: int, size: int, name: str, *, references: bool = False) -> np.ndarray:
    """
    A selector's proposal as int64 `(n,)`.

    Args:
        ids: what the selector returned or, with `references`, what it asked to generate reference rollouts of.
        n (`int`): how many there must be.
        size (`int`): N, number of prompts.
        name (`str`): of the selector's class.
        references (`bool`, *optional*, defaults to `False`): whether `ids` are those of reference rollouts.

    Raises:
        `ValueError`: it has another shape or dtype, a repeated id, or one outside of [0, size). The message has `name`.
    """
    source = f"{name}.roll_out_references asked for" if references else f"{name}.propose({n}) returned"
    ids = np.asarray(ids)
    if ids.shape != (n,) or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{source} an array of shape {ids.shape} and dtype {ids.dtype}; it takes {n} prompt ids as integers."
        )
    if ids.min() < 0 or ids.max() >= size or len(np.unique(ids)) < n:
        raise ValueError(
            f"{source} repeated ids or ids outside of [0, {size}): {ids[:8].tolist()}... They must be distinct rows of the "
            "training dataset."
        )
    return np.array(ids, dtype=np.int64)
