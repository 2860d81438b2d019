"""The contract of selectors, `Selector`; their registry; and `CheckedSelector`, as which the collector calls one."""

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
from trl_dataeff.rollouts.distributed import Processes, broadcast_from_main
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.rollouts.scale import RewardScale
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
        scale ([`RewardScale`], *optional*): the range of total rewards, which widens during the run.
        dataset_hash (`str`, *optional*, defaults to `""`): content hash of the prompts.
        resumed (`bool`, *optional*, defaults to `False`): whether [`Selector.load_state_dict`] follows.
    """

    num_prompts: int
    batch_groups: int
    group_size: int
    seed: int = 0
    embed: Callable[[], Embeddings] | None = field(default=None, repr=False)
    scale: RewardScale = field(default_factory=RewardScale)
    dataset_hash: str = ""
    resumed: bool = False

    def success_rates(self, groups: Sequence[RolloutGroup]) -> np.ndarray:
        """Success rates of groups by all rewards seen so far, in [0, 1] or NaN: float32 `(n,)`."""
        return self.scale.success_rates(groups).astype(np.float32)

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
    Decides which prompts to generate rollouts for. A selector takes part in training as an instance
    (`DataEfficientGRPOTrainer(..., selector=MySelector())`), by its dotted path (`selection="my_module.MySelector"`) or, once
    registered, by name.

    It decides the same on every process: it may use its own state and `rng`, which are equal on all processes, and nothing
    else. Everything but `propose` has a default. The constructor only stores its arguments; `bind` does the work.

    Attributes:
        name (`str`): name that the class is registered as, see [`register_selector`].
        exact (`bool`): whether proposals are equal on all processes to the last bit because nothing is computed that
            rounds. If not (the default), the main process's proposals are used everywhere.
        context ([`SelectorContext`]): the run, from `bind` on.
    """

    name: ClassVar[str] = ""
    exact: bool = False
    context: SelectorContext

    def bind(self, context: SelectorContext) -> None:
        """Start a run: called when training starts, before anything else. Any state of an earlier run is discarded here."""
        self.context = context

    @abstractmethod
    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        """
        Propose n prompts, at most `context.num_prompts`: ids without repetition, int64 `(n,)`. `rng` is the only source of
        randomness. Called one or more times per generation batch.
        """

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Success rates expected of proposed prompts, float32 `(n,)`; NaN where unknown. Logged, and compared later."""
        return np.full(len(prompt_ids), np.nan, dtype=np.float32)

    def references(self, rng: torch.Generator) -> np.ndarray:
        """
        Prompts whose rollouts [`observe`] gets before the first proposal of a generation batch: ids without repetition, int64
        `(k,)`, none by default. With several processes k is rounded down to a multiple of their number. TRL must be able to
        generate outside of its own pass over a batch. `rng` is the only source of randomness.
        """
        return np.empty(0, dtype=np.int64)

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """
        Learn from all groups generated for a batch, dropped ones included, in order, at its end; with references, also before it,
        from groups whose `origin` is `"reference"`. A prompt may occur more than once; a group's success rate may be NaN. There
        are none if nothing had to be generated.
        """

    def state_dict(self) -> dict[str, Any]:
        """A copy of all state that decides later proposals, but `rng`: numeric NumPy arrays, JSON values and dicts of these, by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called after `bind`."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log, under `dataeff/selector/<name>`. The log has the latest value, not a mean."""
        return {}


_SELECTORS: dict[str, type[Selector]] = {}


def register_selector(name: str) -> Callable[[C], C]:
    """
    Class decorator that registers a [`Selector`], so that `selection="name"` finds it; the name becomes the class attribute
    `name`. Raises a `ValueError` if the class is not a `Selector`, or the name belongs to another one.
    """

    def register(cls: C) -> C:
        if not issubclass(cls, Selector):
            raise ValueError(f"{cls.__name__} cannot be registered as {name!r}: it is no subclass of `Selector`.")
        taken = _SELECTORS.get(name, cls)
        if f"{taken.__module__}.{taken.__qualname__}" != f"{cls.__module__}.{cls.__qualname__}":  # else imported again
            raise ValueError(
                f"The name {name!r} belongs to {taken.__module__}.{taken.__qualname__}. Choose another one."
            )
        _SELECTORS[name] = cls
        cls.name = name
        return cls

    return register


def make_selector(name: str, arguments: dict[str, Any] | None = None) -> Selector:
    """
    A selector, not bound yet, by a registered `name` or a dotted path such as `"my_module.MySelector"`, with keyword arguments
    of its class. Raises a `ValueError` if the selector is unknown, or its class does not take these arguments.
    """
    cls, arguments = _selector_class(name), arguments or {}
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for unknown in [] if takes_any else [argument for argument in arguments if argument not in parameters]:
        hint, takes = closest(unknown, parameters), ", ".join(parameters) or "none"
        raise ValueError(f"{cls.__name__} has no argument `{unknown}`.{hint} It takes {takes}.")
    return cls(**arguments)


def _selector_class(name: str) -> type[Selector]:
    if name in _SELECTORS:
        return _SELECTORS[name]
    module, dot, attribute = name.rpartition(".")
    if not dot:
        raise ValueError(
            f"`selection` is {name!r}; known are {', '.join(map(repr, ['auto', *sorted(_SELECTORS)]))}.{closest(name, _SELECTORS)} "
            "Your own is named by its dotted path, 'my_module.MySelector', or registered with @register_selector."
        )
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The selector {name!r} cannot be imported: {error}.") from error
    if not isinstance(cls, type) or not issubclass(cls, Selector):
        raise ValueError(f"{name} is {cls!r}; `selection` takes a subclass of `trl_dataeff.Selector`.")
    return cls


def uses_references(selector: Selector) -> bool:
    """Whether a selector may ask for reference rollouts."""
    return type(selector).references is not Selector.references


def is_storable(value: Any) -> bool:
    """Whether a checkpoint can hold a value: a numeric array, a JSON value, or a dict of these by name."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and "/" not in name and is_storable(part) for name, part in value.items())
    if isinstance(value, list):
        return all(is_storable(part) and not isinstance(part, np.ndarray) for part in value)
    return (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf")
    )


def check_request(n: int, size: int) -> None:
    """Raise a `ValueError` if `n` distinct prompts cannot be taken from `size`."""
    if not 0 < n <= size:
        raise ValueError(f"{n} prompts were requested; {size} prompts give from 1 to {size} without repetition.")


class CheckedSelector:
    """
    A selector as the collector calls it: what it returns is checked, by errors that name its class, and its ids are the same on
    every process.
    """

    def __init__(self, selector: Selector, processes: Processes = Processes()):  # noqa: B008 (immutable)
        self.selector, self.processes = selector, processes
        self.name = type(selector).__name__

    def bind(self, context: SelectorContext) -> None:
        """Start a run. State that cannot be saved is an error now, not at the first checkpoint."""
        self.selector.context = context
        self.selector.bind(context)
        self.state_dict()

    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        """Ids of n prompts, int64 `(n,)`. Raises a `ValueError` if they are not distinct rows of the dataset."""
        return self._distinct(self._agreed(self.selector.propose(n, rng)), n, f"propose({n})")

    def references(self, rng: torch.Generator) -> np.ndarray:
        """Ids of reference prompts, int64 `(k,)`, k a multiple of the number of processes."""
        if not uses_references(self.selector):
            return np.empty(0, dtype=np.int64)
        ids = self._agreed(self.selector.references(rng))
        count = np.size(ids)
        ids = self._distinct(ids, count, "references()") if count else np.empty(0, dtype=np.int64)
        return ids[: count // self.processes.world_size * self.processes.world_size]

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        self.selector.observe(groups)

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Success rates, float32 `(n,)`. Raises a `ValueError` if they have another shape or are not numeric."""
        array = np.asarray(self.selector.predict(prompt_ids))
        if array.shape != prompt_ids.shape or array.dtype.kind not in "biuf":
            raise ValueError(
                f"{self.name}.predict() of {len(prompt_ids)} prompts returned shape {array.shape} and dtype {array.dtype}; it "
                "must return one success rate per prompt, NaN where it is unknown."
            )
        return array.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Its state. Raises a `TypeError` if that cannot be made, or cannot be saved."""
        try:
            state = self.selector.state_dict()
        except Exception as error:  # as a TypeError, which no handler takes for a full disk
            raise TypeError(f"{self.name}.state_dict() failed ({type(error).__name__}: {error}).") from error
        if not isinstance(state, dict) or not is_storable(state):
            raise TypeError(
                f"{self.name}.state_dict() returned {state!r:.200}; it must return numeric NumPy arrays, JSON values or dicts of "
                "these, by name."
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.selector.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """Floats by name. Raises a `TypeError` if a value is not a number."""
        metrics = self.selector.metrics()
        for key, value in metrics.items():
            if not isinstance(key, str) or not isinstance(value, (int, float, np.number)):
                raise TypeError(f"{self.name}.metrics()[{key!r}] is {value!r:.200}; it must be a number.")
        return {key: float(value) for key, value in metrics.items()}

    def _agreed(self, ids: np.ndarray) -> np.ndarray:
        """The main process's ids, unless they are equal on all processes to the last bit."""
        exact = self.processes.world_size == 1 or self.selector.exact
        return ids if exact else broadcast_from_main(ids)

    def _distinct(self, ids: Any, n: int, call: str) -> np.ndarray:
        ids, size = np.asarray(ids), self.selector.context.num_prompts
        if ids.shape != (n,) or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{self.name}.{call} returned an array of shape {ids.shape} and dtype {ids.dtype}; it must return {n} prompt ids "
                "as integers."
            )
        if ids.min() < 0 or ids.max() >= size or len(np.unique(ids)) < n:
            raise ValueError(
                f"{self.name}.{call} returned repeated ids or ids outside of [0, {size}): {ids[:8].tolist()}... They must be "
                "distinct rows of the training dataset."
            )
        return np.array(ids, dtype=np.int64)
