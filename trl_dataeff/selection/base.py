"""
The contract of selectors, and their registry.

    bind(context)            once, when training starts
    propose(n, rng)          which prompts to generate rollouts for; one or more times per generation batch
    observe(groups)          what those rollouts gave; once per generation batch
    state_dict(), load_state_dict(state), metrics()

A selector of your own implements `propose`. It takes part in training as an instance
(`DataEfficientGRPOTrainer(..., selector=MySelector())`) by its dotted path (`selection="my_module.MySelector"`) or, once registered, by name.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from trl_dataeff.difficulty.predictor import Embeddings
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.utils import closest


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
        Embeddings of all prompts, `(N, h)`, made at the first call: by the policy as it is then, or by `prompt_embedding`.
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

    def bind(self, context: SelectorContext) -> None:
        """
        Start a run: called when training starts, before anything else. Any state of an earlier run is discarded here.

        Args:
            context ([`SelectorContext`]): the run.
        """
        self.context = context

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


_SELECTORS: dict[str, type[Selector]] = {}


def register_selector(name: str) -> Callable[[C], C]:
    """
    Class decorator that registers a [`Selector`], so that `selection="name"` finds it.

    Args:
        name (`str`): the name; it becomes the class attribute `name`.

    Raises:
        `ValueError`: the class is not a `Selector`, or the name belongs to another one.
    """

    def register(cls: C) -> C:
        if not issubclass(cls, Selector):
            raise ValueError(f"{cls.__name__} cannot be registered as {name!r}: it is no subclass of `Selector`.")
        taken = _SELECTORS.get(name, cls)
        if (taken.__module__, taken.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):  # a module may be imported again
            raise ValueError(
                f"The name {name!r} belongs to {taken.__module__}.{taken.__qualname__}. Choose another one."
            )
        _SELECTORS[name] = cls
        cls.name = name
        return cls

    return register


def selector_class(name: str) -> type[Selector]:
    """
    The class of a registered name, or of a dotted path such as `"my_module.MySelector"`, which is imported.

    Raises:
        `ValueError`: there is no such selector.
    """
    if name in _SELECTORS:
        return _SELECTORS[name]
    module, dot, attribute = name.rpartition(".")
    if not dot:
        raise ValueError(
            f"There is no selector {name!r}; known are {', '.join(map(repr, sorted(_SELECTORS)))}.{closest(name, _SELECTORS)} "
            "Your own is named by its dotted path, 'my_module.MySelector', or registered with @register_selector."
        )
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The selector {name!r} cannot be imported: {error}.") from error
    if not isinstance(cls, type) or not issubclass(cls, Selector):
        raise ValueError(f"{name} is {cls!r}; `selection` takes a subclass of `trl_dataeff.Selector`.")
    return cls


def make_selector(name: str, arguments: dict[str, Any] | None = None) -> Selector:
    """
    A selector, not bound yet.

    Args:
        name (`str`): `"uniform"`, `"dots"`, `"greso"`, a name of your own, or a dotted path.
        arguments (`dict`, *optional*): keyword arguments of its class.

    Raises:
        `ValueError`: there is no such selector, or its class does not take these arguments.
    """
    cls, arguments = selector_class(name), arguments or {}
    known = list(inspect.signature(cls).parameters)
    for argument in arguments:
        if argument not in known and "VAR_KEYWORD" not in {
            p.kind.name for p in inspect.signature(cls).parameters.values()
        }:
            raise ValueError(
                f"{cls.__name__} has no argument `{argument}`.{closest(argument, known)} It takes {', '.join(known) or 'none'}."
            )
    return cls(**arguments)


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


def _one_per_prompt(selector: Selector, method: str, prompt_ids: np.ndarray, what: str) -> np.ndarray:
    array = np.asarray(getattr(selector, method)(prompt_ids))
    if array.shape != prompt_ids.shape or array.dtype.kind not in "biuf":
        raise ValueError(
            f"{type(selector).__name__}.{method}() of {len(prompt_ids)} prompts returned shape {array.shape} and dtype "
            f"{array.dtype}; it must return one {what} per prompt, NaN where it is unknown."
        )
    return array.astype(np.float32)


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
