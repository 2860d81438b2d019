"""The gradient of a few rows, computed in two ways with the trainer's loss, and without a trace of it in the run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging
from trl import GRPOTrainer

from trl_dataeff.compact import packing
from trl_dataeff.compact.check import Outcome, in_words
from trl_dataeff.compact.exact import has_hooks
from trl_dataeff.compact.micro_batches import MicroBatch
from trl_dataeff.compact.prompts import takes_columns, takes_positions


logger = logging.get_logger(__name__)
#: A relative difference of gradients up to this counts as rounding in any type
LEAST_TOLERANCE = 1e-3
#: How many times the difference that other rounding makes counts as rounding, and the most that does. In bfloat16 that
#: differs between models by an order of magnitude, and positions are rounded in each layer
TOLERATED = 4.0
LARGEST_TOLERANCE = 0.5
#: Computing the same rows again changes their gradient by less
SAME_RESULT = 0.01
#: Lower bound of the norm by which a parameter's difference is divided, as a share of the whole gradient's norm
SMALLEST_SHARE = 0.01


class GradientTrial:
    """
    Computes the gradient of rows in two ways.

    With DeepSpeed, or where parameters have hooks, log-probs are compared instead.

    Args:
        trainer ([`~trl.GRPOTrainer`]): whose loss it is.
        model (`torch.nn.Module`): the model that the loss gets.
        policy (`torch.nn.Module`): the same without the wrapping of accelerate and PEFT.
        loss_of (`Callable`): the loss of a micro-batch, a scalar, and its log-probs `(rows, T)`.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        model: torch.nn.Module,
        policy: torch.nn.Module,
        loss_of: Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor | None]],
    ):
        self.trainer = trainer
        self.accelerator = trainer.accelerator
        self.model = model
        self.policy = policy
        self.loss_of = loss_of
        # Noted by the trainer
        self.micro_batch: MicroBatch | None = None
        self.other_inputs = ""
        self.logps: torch.Tensor | None = None

    @cached_property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @cached_property
    def compares_logps(self) -> bool:
        """Whether a backward pass would change the run on some process. A collective."""
        changes_run = self.trainer.is_deepspeed_enabled or any(map(has_hooks, self.parameters))
        return bool(self.accelerator.gather(torch.tensor([changes_run], device=self.accelerator.device)).any())

    def counts_positions(self) -> bool:
        return takes_positions(self.policy)

    def counts_columns(self) -> bool:
        return takes_columns(self.policy)

    def compare(
        self, first: Sequence[MicroBatch], second: Sequence[MicroBatch], *, in_evaluation: bool = False
    ) -> Outcome:
        self.other_inputs = ""
        if self.compares_logps and self.accelerator.is_main_process:
            logger.warning_once(
                "`compact_update`: log-probs are compared instead of gradients, because a backward pass would change "
                "the run: DeepSpeed and hooks of parameters act within it."
            )
        with self._without_trace(in_evaluation), torch.set_grad_enabled(not self.compares_logps):
            state = RandomState(self.accelerator.device)
            logps = self._compute(first, 1.0)
            draws = not state.is_present()
            norms = self._norms(logps)
            state.restore()
            error = ""
            differences = torch.zeros_like(norms)
            try:
                others = self._compute(second, -1.0)
                differences = self._norms(_difference(logps, others))
            except Exception as exception:
                error = in_words(exception)
            flags = torch.tensor([draws, bool(error), bool(self.other_inputs)], device=norms.device).float()
            some_draw, some_fail, some_get_others = (self._of_processes(flags) > 0).tolist()
            norms = self._of_processes(norms)
            difference = _relative(self._of_processes(differences), norms)
            tolerance = LEAST_TOLERANCE
            if difference > LEAST_TOLERANCE and not some_fail:
                again, otherwise = self._again(first, state)
                # By a generator of its own, or by what it counts
                some_draw = some_draw or _relative(self._of_processes(again), norms) > SAME_RESULT
                effect = _relative(self._of_processes(otherwise), norms)
                tolerance = min(max(TOLERATED * effect, LEAST_TOLERANCE), LARGEST_TOLERANCE)
        return Outcome(
            difference=difference,
            tolerance=tolerance,
            draws=some_draw,
            other_inputs=self.other_inputs or ("something else than the micro-batch" if some_get_others else ""),
            error=error or ("an exception on another process" if some_fail else ""),
        )

    def _again(self, micro_batches: Sequence[MicroBatch], state: RandomState) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Squared norms of the differences that computing the same again makes to each parameter's gradient, or to
        log-probs, and those that other rounding makes.
        """
        differences = []
        for rounding in (nullcontext(), rounded_otherwise(self.policy)):
            self._drop_gradients()
            state.restore()
            logps = self._compute(micro_batches, 1.0)
            state.restore()
            with rounding:
                others = self._compute(micro_batches, -1.0)
            differences.append(self._norms(_difference(logps, others)))
        return differences[0], differences[1]

    def _of_processes(self, own: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.accelerator.gather(own.unsqueeze(0)).sum(0).cpu()
        return total

    def _compute(self, micro_batches: Sequence[MicroBatch], sign: float) -> list[torch.Tensor]:
        """
        Add `sign` times the gradient to that of the parameters. If log-probs are compared, return those
        instead: `(rows, T)` of each micro-batch, 0 for padding.
        """
        logps = []
        scaler = self.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()  # so that no gradient is too small for float16
        for micro_batch in micro_batches:
            loss, own_logps = self.loss_of(micro_batch)
            if self.compares_logps and own_logps is not None:
                logps.append(own_logps * micro_batch.inputs["completion_mask"])
            if not self.compares_logps:
                (sign * scale * loss).backward()
        return logps

    def _norms(self, logps: Sequence[torch.Tensor]) -> torch.Tensor:
        """Squared norm of the gradient of each parameter of this process, or of log-probs."""
        values: Sequence[torch.Tensor | None] = logps
        if not self.compares_logps:
            values = [parameter.grad for parameter in self.parameters]
        norms = []
        for value in values:
            if value is None:
                norms.append(torch.zeros((), device=self.accelerator.device))
                continue
            own = value.to_local() if hasattr(value, "to_local") else value  # of this process, if it is sharded
            norms.append(torch.linalg.vector_norm(own, dtype=torch.float32).square())
        return torch.stack(norms)

    @contextmanager
    def _without_trace(self, in_evaluation: bool) -> Iterator[None]:
        """Within this context, gradients start at none; afterwards all is as before."""
        state = RandomState(self.accelerator.device)
        gradients = [parameter.grad for parameter in self.parameters]
        modules = list(self.policy.modules())
        modes = [module.training for module in modules]
        metrics = {name: list(values) for name, values in self.trainer._metrics["train"].items()}
        report_to = self.trainer.args.report_to
        self.trainer.args.report_to = []  # TRL's profiling logs there
        # As it is without accelerate's scaling of gradients among processes
        synchronization: AbstractContextManager[None] = nullcontext()
        if isinstance(self.model, DistributedDataParallel):
            synchronization = self.model.no_sync()
        self._drop_gradients()
        if in_evaluation:
            for module in modules[1:]:  # not of the policy itself, by which TRL knows that it trains
                module.training = False
        try:
            with as_before([self.trainer, *modules]), synchronization:
                yield
        finally:
            packing.end()
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            self.trainer.args.report_to = report_to
            self.trainer._metrics["train"].clear()
            self.trainer._metrics["train"].update(metrics)
            state.restore()

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _difference(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Between log-probs of the same rows, which may be split and cut in another way."""
    if not first:
        return []
    width = min(values.size(1) for values in (*first, *second))
    return [torch.cat([values[:, :width] for values in first]) - torch.cat([values[:, :width] for values in second])]


def _relative(differences: torch.Tensor, norms: torch.Tensor) -> float:
    """
    The relative difference of the whole gradient, or half of that of the parameter whose gradient differs most, if
    that is more. Infinite where it is not a number.

    Args:
        differences (`torch.Tensor` of shape `(n,)`): squared norm of the difference, by parameter.
        norms (`torch.Tensor` of shape `(n,)`): squared norm of the gradient, by parameter.
    """
    whole = norms.sum().sqrt()
    relative = differences.sqrt() / norms.sqrt().clamp(min=float(SMALLEST_SHARE * whole))
    both = torch.stack([differences.sum().sqrt() / whole, relative.max() / 2])
    if not differences.any():  # also of a gradient that is 0 in both ways
        return 0.0
    return float(both.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


@contextmanager
def rounded_otherwise(model: Any) -> Iterator[None]:
    """
    Within this context, a model computes from other embeddings: every other number is larger by a unit in its last
    place, and the others are smaller by it. All later results are then rounded otherwise, too, about as much as where
    the same is computed in another order. They do not change where the model does not say which module embeds tokens.
    """

    def round_otherwise(module: torch.nn.Module, inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
        device = embeddings.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else embeddings.dtype
        is_tf32 = device == "cuda" and torch.get_float32_matmul_precision() != "highest"
        unit = torch.finfo(torch.float16 if dtype == torch.float32 and is_tf32 else dtype).eps
        # In a type in which the unit is not lost
        exact = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        signs = 1 - 2 * (torch.arange(exact.size(-1), device=exact.device) % 2)
        return (exact * (1 + unit * signs)).to(embeddings.dtype)

    try:
        module = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        yield
        return
    hook = module.register_forward_hook(round_otherwise)
    try:
        yield
    finally:
        hook.remove()


class RandomState:
    """The state of the random number generators when it is made.

    Args:
        device (`torch.device`): of the model.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._python, self._numpy, self._torch = self._read()

    def _read(self) -> tuple[Any, Any, list[torch.Tensor]]:
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            states.append(torch.get_device_module(self.device).get_rng_state())
        return random.getstate(), np.random.get_state(legacy=False), states  # noqa: NPY002 - a model may use it

    def is_present(self) -> bool:
        """Whether nothing was drawn since."""
        python, numpy, states = self._read()
        equal = [torch.equal(now, then) for now, then in zip(states, self._torch, strict=True)]
        return python == self._python and str(numpy) == str(self._numpy) and all(equal)

    def restore(self) -> None:
        """Draw from here again."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch[0])
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(self._torch[1])


@contextmanager
def as_before(objects: Sequence[Any]) -> Iterator[None]:
    """
    After this context, the attributes of objects are as they were before: values, what containers hold, and the
    numbers in tensors and generators, but for parameters and for large tensors.
    """
    copies = [_Copy(each) for each in objects]
    try:
        yield
    finally:
        for copy in copies:
            copy.restore()


_LARGE = 2**20  # numbers of a tensor
_OF_TORCH = frozenset(vars(torch.nn.Module()))


class _Copy:
    """
    The attributes of an object, and the buffers of a module.

    Args:
        owner: the object.
    """

    def __init__(self, owner: Any):
        self.owner = owner
        # Parameters and hooks are torch's, which moves those of sharded modules
        self.attributes = {name: value for name, value in vars(owner).items() if name not in _OF_TORCH}
        values = list(self.attributes.values())
        if isinstance(owner, torch.nn.Module):
            values += [owner._buffers, *owner._buffers.values()]
        self.contents = [(value, _content_of(value)) for value in values]

    def restore(self) -> None:
        attributes = vars(self.owner)
        for name in attributes.keys() - self.attributes.keys() - _OF_TORCH:
            del attributes[name]
        attributes.update(self.attributes)
        for value, content in self.contents:
            _restore(value, content)


def _content_of(value: Any) -> Any:
    if isinstance(value, dict | list | set | deque):
        return value.copy()
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.numel() <= _LARGE:
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else None


def _restore(value: Any, content: Any) -> None:
    if content is None:
        return
    if isinstance(value, torch.Tensor):
        if not torch.equal(value, content):
            with torch.no_grad():
                value.copy_(content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content
    elif not _holds_same(value, content):
        value.clear()
        if isinstance(value, list | deque):
            value.extend(content)
        else:
            value.update(content)


def _holds_same(value: Any, content: Any) -> bool:
    """Whether a container holds the same objects, in the same order."""
    if len(value) != len(content):
        return False
    pairs = zip(value.items(), content.items(), strict=True) if isinstance(value, dict) else None
    if pairs is not None:
        return all(key == known_key and item is known for (key, item), (known_key, known) in pairs)
    return all(item is known for item, known in zip(value, content, strict=True))
