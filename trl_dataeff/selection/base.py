"""The contract of selectors, `Selector`; their registry; and `CheckedSelector`, as which the collector calls one."""

from __future__ import annotations

import importlib
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from trl_dataeff.difficulty.predictor import Embeddings
from trl_dataeff.rollouts.distributed import Processes, broadcast_from_main
from trl_dataeff.rollouts.group import RolloutGroup
from trl_dataeff.rollouts.scale import RewardScale
from trl_dataeff.utils import closest, listed


C = TypeVar("C", bound=type)

#: Codes of NumPy's numeric dtypes: bool, signed and unsigned integers, and floats.
NUMERIC_KINDS = "biuf"


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
        known_rates (`np.ndarray` of shape `(N,)`, *optional*): float32, success rates of prompts that the dataset has
            (`success_rate_column`), in [0, 1] or NaN.
        kinds (`np.ndarray` of shape `(N,)`, *optional*): int64, kind of each prompt by the dataset (`stratify_by`),
            from 0 to K - 1.
        dataset_hash (`str`, *optional*, defaults to `""`): content hash of the prompts.
        number_prompts (`Callable`, *optional*): numbers all prompts by their content, int64 `(N,)`, as a run of the
            default does in its table of groups.
        resumed (`bool`, *optional*, defaults to `False`): whether [`Selector.load_state_dict`] follows.
    """

    num_prompts: int
    batch_groups: int
    group_size: int
    seed: int = 0
    embed: Callable[[], Embeddings] | None = field(default=None, repr=False)
    scale: RewardScale = field(default_factory=RewardScale)
    known_rates: np.ndarray | None = field(default=None, repr=False)
    kinds: np.ndarray | None = field(default=None, repr=False)
    dataset_hash: str = ""
    number_prompts: Callable[[], np.ndarray] | None = field(default=None, repr=False)
    resumed: bool = False

    def success_rates(self, groups: Sequence[RolloutGroup]) -> np.ndarray:
        """
        Success rates of groups by all rewards seen so far.

        Args:
            groups (`Sequence[RolloutGroup]`): n groups.

        Returns:
            `np.ndarray` of shape `(n,)`: float32, in [0, 1], or NaN for a group without a score.
        """
        return self.scale.success_rates(groups).astype(np.float32)

    def embeddings(self) -> Embeddings:
        """
        Embeddings of all prompts. They are made at the first call, by the policy as it is then or by
        `prompt_embedding`. Call it in `bind`, so that a resumed run gets the same.

        Returns:
            `torch.Tensor` or `np.ndarray` of shape `(N, h)`: row i is prompt i.

        Raises:
            ValueError: the prompts of this run cannot be embedded.
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
    (`DataEfficientGRPOTrainer(..., selector=MySelector())`), by its dotted path (`selection="my_module.MySelector"`)
    or, once registered, by name.

    It decides the same on every process: it may use its own state and `rng`, which are equal on all processes, and
    nothing else. Everything but `propose` has a default. The constructor only stores its arguments; `bind` does the
    work.

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
        """
        Start a run. Called when training starts, before anything else. Any state of an earlier run is discarded here.

        Args:
            context ([`SelectorContext`]): the run.
        """
        self.context = context

    @abstractmethod
    def propose(self, n: int, rng: torch.Generator) -> np.ndarray:
        """
        Propose prompts. Called one or more times per generation batch. A prompt that the batch has already, in a
        leftover group or from an earlier call, is not rolled out again: the selector is asked for others.

        Args:
            n (`int`): number of prompts, at most `context.num_prompts`.
            rng (`torch.Generator`): the only source of randomness.

        Returns:
            `np.ndarray` of shape `(n,)`: int64 prompt ids without repetition.
        """

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        """
        Predict success rates of proposed prompts. They are logged, and compared with the observed ones later.

        Args:
            prompt_ids (`np.ndarray` of shape `(n,)`): prompts.

        Returns:
            `np.ndarray` of shape `(n,)`: float32, NaN where the rate is unknown (the default).
        """
        return np.full(len(prompt_ids), np.nan, dtype=np.float32)

    def references(self, rng: torch.Generator) -> np.ndarray:
        """
        Choose prompts whose rollouts [`observe`] gets before the first proposal of a generation batch. With several
        processes k is rounded down to a multiple of their number. TRL must be able to generate outside of its own
        pass over a batch.

        Args:
            rng (`torch.Generator`): the only source of randomness.

        Returns:
            `np.ndarray` of shape `(k,)`: int64 prompt ids without repetition; none by default.
        """
        return np.empty(0, dtype=np.int64)

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """
        Learn from all groups generated for a batch, at its end; with references, also before it, from the groups of
        these, whose `is_reference` is true.

        Args:
            groups (`Sequence[RolloutGroup]`): in the order of their generation, dropped ones included; none if nothing
                had to be generated. A prompt may occur more than once, and a group's success rate may be NaN.
        """

    def state_dict(self) -> dict[str, Any]:
        """
        Copy all state that decides later proposals, except `rng`.

        Returns:
            `dict[str, Any]`: numeric NumPy arrays, JSON values and dicts of these, by name.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Restore what `state_dict` returned. Called after `bind`.

        Args:
            state (`dict[str, Any]`): what `state_dict` returned.
        """

    def metrics(self) -> dict[str, float]:
        """
        Numbers to log.

        Returns:
            `dict[str, float]`: logged as `dataeff/selector/<name>`. The log has the latest value, not a mean.
        """
        return {}


FURTHER_PROPOSALS = 2  # of as many prompts as are missing
_SELECTORS: dict[str, type[Selector]] = {}


def register_selector(name: str) -> Callable[[C], C]:
    """
    Class decorator that registers a [`Selector`], so that `selection="name"` finds it.

    Args:
        name (`str`): becomes the class attribute `name`.

    Returns:
        `Callable`: the decorator, which returns the class.

    Raises:
        ValueError: the class is not a `Selector`, or the name belongs to another one.
    """

    def register(cls: C) -> C:
        if not issubclass(cls, Selector):
            raise ValueError(f"{cls.__name__} cannot be registered as {name!r}: it is no subclass of `Selector`.")
        registered = _SELECTORS.get(name, cls)
        # Compared by path, because a module that is imported again defines the same class as another object
        if _path_of(registered) != _path_of(cls):
            raise ValueError(f"The name {name!r} belongs to {_path_of(registered)}. Choose another one.")
        _SELECTORS[name] = cls
        cls.name = name
        return cls

    return register


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def make_selector(name: str, arguments: dict[str, Any] | None = None) -> Selector:
    """
    Make a selector. It is not bound yet.

    Args:
        name (`str`): a registered name, or a dotted path such as `"my_module.MySelector"`.
        arguments (`dict[str, Any]`, *optional*): keyword arguments of its class.

    Returns:
        [`Selector`]: a new instance.

    Raises:
        ValueError: the selector is unknown, or its class does not take these arguments.
    """
    cls = _selector_class(name)
    arguments = arguments or {}
    _check_arguments(cls, arguments)
    return cls(**arguments)


def _check_arguments(cls: type[Selector], arguments: dict[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = [argument for argument in arguments if argument not in parameters]
    if unknown:
        hints = "".join(closest(argument, parameters) or _owners(argument) for argument in unknown)
        known = ", ".join(parameters) or "none"
        raise ValueError(
            f"{cls.__name__} has no argument {listed(unknown)} (`selector_args`).{hints} It takes {known}."
        )


def _owners(argument: str) -> str:
    """A sentence that names the registered selectors which take an argument; empty if none does."""
    owners = [name for name, cls in sorted(_SELECTORS.items()) if argument in inspect.signature(cls).parameters]
    if not owners:
        return ""
    return f" `{argument}` is an argument of {' and '.join(map(repr, owners))} (`selection`)."


def _selector_class(name: str) -> type[Selector]:
    if name in _SELECTORS:
        return _SELECTORS[name]
    module, dot, attribute = name.rpartition(".")
    if not dot:
        known = ", ".join(repr(choice) for choice in sorted(_SELECTORS))
        hint = closest(name, _SELECTORS)
        raise ValueError(
            f"`selection` is {name!r}; known are {known}.{hint} Your own is named by its dotted path, "
            "'my_module.MySelector', or registered with @register_selector."
        )
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"The selector {name!r} cannot be imported (`selection`): there is no module {error.name!r}, neither "
            f"installed nor in {os.getcwd()} nor in PYTHONPATH."
        ) from error
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The selector {name!r} cannot be imported (`selection`): {error}.") from error
    if not isinstance(cls, type) or not issubclass(cls, Selector):
        raise ValueError(f"{name} is {cls!r}; `selection` takes a subclass of `trl_dataeff.Selector`.")
    return cls


def uses_references(selector: Selector) -> bool:
    """Whether a selector may ask for reference rollouts: its class overrides `references`."""
    return type(selector).references is not Selector.references


def is_storable(value: Any) -> bool:
    """Whether a checkpoint can hold a value: a numeric array, a JSON value, or a dict of these by name."""
    if isinstance(value, dict):
        # The names of nested arrays are joined by "/" in the file
        return all(isinstance(name, str) and "/" not in name and is_storable(part) for name, part in value.items())
    if isinstance(value, list):
        # A list is stored as JSON, which has no arrays
        return all(is_storable(part) and not isinstance(part, np.ndarray) for part in value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in NUMERIC_KINDS
    return value is None or isinstance(value, (bool, int, float, str))


def check_request(n: int, size: int) -> None:
    """
    Check that n distinct prompts can be taken.

    Args:
        n (`int`): prompts requested.
        size (`int`): prompts there are.

    Raises:
        ValueError: n is not in [1, size].
    """
    if not 0 < n <= size:
        raise ValueError(f"{n} prompts were requested; {size} prompts give from 1 to {size} without repetition.")


class CheckedSelector:
    """
    A selector as the collector calls it: what it returns is checked, by errors that name its class, and its ids are
    the same on every process.

    Args:
        selector ([`Selector`]): the selector.
        processes ([`Processes`], *optional*): those of the run; by default this process is the only one.
    """

    def __init__(self, selector: Selector, processes: Processes = Processes()):  # noqa: B008 (immutable)
        self.selector = selector
        self.processes = processes
        self.name = type(selector).__name__

    @property
    def exact(self) -> bool:
        """Whether proposals are equal on all processes, see [`Selector`]."""
        return self.selector.exact

    def bind(self, context: SelectorContext) -> None:
        """Start a run. State that cannot be saved is an error now, not at the first checkpoint."""
        self.selector.context = context
        self.selector.bind(context)
        self.state_dict()

    def propose(self, n: int, rng: torch.Generator, taken: Collection[int] = ()) -> np.ndarray:
        """
        Propose prompts, see [`Selector.propose`]. Where the generation batch has one of them already, the selector is
        asked for others.

        Args:
            n (`int`): prompts to propose.
            rng (`torch.Generator`): source of randomness.
            taken (`Collection[int]`, *optional*): prompts that the generation batch has. They are proposed again only
                if too few others are there.

        Returns:
            `np.ndarray` of shape `(n,)`: int64 prompt ids, the same on every process.

        Raises:
            ValueError: the selector's are not distinct rows of the dataset.
        """
        in_batch = list(taken)
        first = self._proposal(n, rng)
        chosen = first[~np.isin(first, in_batch)]
        for _ in range(FURTHER_PROPOSALS):
            if len(chosen) == n:
                return chosen
            proposal = self._proposal(n - len(chosen), rng)
            is_free = ~np.isin(proposal, [*in_batch, *chosen])
            chosen = np.concatenate([chosen, proposal[is_free]])
        if len(chosen) < n:
            # Proposed prompts are distinct, so that enough of so many are free
            enough = min(n + len(in_batch), self.selector.context.num_prompts)
            proposal = self._proposal(enough, rng)
            free = proposal[~np.isin(proposal, [*in_batch, *chosen])]
            chosen = np.concatenate([chosen, free[: n - len(chosen)]])
        if len(chosen) < n:
            # The batch has all other prompts
            repeated = first[~np.isin(first, chosen)]
            chosen = np.concatenate([chosen, repeated[: n - len(chosen)]])
        return chosen

    def _proposal(self, n: int, rng: torch.Generator) -> np.ndarray:
        ids = self._same_everywhere(self.selector.propose(n, rng))
        return self._checked_ids(ids, n, f"propose({n})")

    def references(self, rng: torch.Generator) -> np.ndarray:
        """
        Choose reference prompts, see [`Selector.references`].

        Returns:
            `np.ndarray` of shape `(k,)`: int64 prompt ids, the same on every process; k is a multiple of their number.

        Raises:
            ValueError: they are not distinct rows of the dataset.
        """
        none = np.empty(0, dtype=np.int64)
        if not uses_references(self.selector):
            return none
        ids = self._same_everywhere(self.selector.references(rng))
        count = np.size(ids)
        if count == 0:
            return none
        ids = self._checked_ids(ids, count, "references()")
        per_process = count // self.processes.world_size
        return ids[: per_process * self.processes.world_size]

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Learn from groups, see [`Selector.observe`]."""
        self.selector.observe(groups)

    def predict(self, prompt_ids: np.ndarray) -> np.ndarray:
        """
        Predict success rates, see [`Selector.predict`].

        Returns:
            `np.ndarray` of shape `(n,)`: float32.

        Raises:
            ValueError: they have another shape, or are not numeric.
        """
        predicted = np.asarray(self.selector.predict(prompt_ids))
        if predicted.shape != prompt_ids.shape or predicted.dtype.kind not in NUMERIC_KINDS:
            raise ValueError(
                f"{self.name}.predict() of {len(prompt_ids)} prompts returned shape {predicted.shape} and dtype "
                f"{predicted.dtype}; it must return one success rate per prompt, NaN where it is unknown."
            )
        return predicted.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """
        Copy the selector's state, see [`Selector.state_dict`].

        Raises:
            TypeError: the state cannot be made, or cannot be saved.
        """
        try:
            state = self.selector.state_dict()
        except Exception as error:
            # As a TypeError, which no handler mistakes for a full disk
            raise TypeError(f"{self.name}.state_dict() failed ({type(error).__name__}: {error}).") from error
        if not isinstance(state, dict) or not is_storable(state):
            raise TypeError(
                f"{self.name}.state_dict() returned {state!r:.200}; it must return numeric NumPy arrays, JSON values "
                "or dicts of these, by name."
            )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.selector.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """
        Numbers to log, see [`Selector.metrics`].

        Raises:
            TypeError: a name is not a string, or a value is not a number.
        """
        metrics = self.selector.metrics()
        for key, value in metrics.items():
            if not isinstance(key, str) or not isinstance(value, (int, float, np.number)):
                raise TypeError(f"{self.name}.metrics()[{key!r}] is {value!r:.200}; it must be a number.")
        return {key: float(value) for key, value in metrics.items()}

    def _same_everywhere(self, ids: np.ndarray) -> np.ndarray:
        """The main process's ids, unless all processes have computed the same ones."""
        if self.processes.world_size == 1 or self.exact:
            return ids
        return broadcast_from_main(ids)

    def _checked_ids(self, returned: Any, n: int, call: str) -> np.ndarray:
        """What a method returned as int64 ids `(n,)`. Raises a `ValueError` unless they are n distinct prompts."""
        ids = np.asarray(returned)
        if ids.shape != (n,) or ids.dtype.kind not in "iu":
            raise ValueError(
                f"{self.name}.{call} returned an array of shape {ids.shape} and dtype {ids.dtype}; it must return {n} "
                "prompt ids as integers."
            )
        size = self.selector.context.num_prompts
        out_of_range = ids.min() < 0 or ids.max() >= size
        if out_of_range or len(np.unique(ids)) < n:
            raise ValueError(
                f"{self.name}.{call} returned repeated ids or ids outside of [0, {size}): {ids[:8].tolist()}... They "
                "must be distinct rows of the training dataset."
            )
        return np.array(ids, dtype=np.int64)
