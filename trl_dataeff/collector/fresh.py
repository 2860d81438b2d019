"""How many fresh groups a generation batch takes, where that is adaptive (`fresh_groups="adaptive"`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Proposal(NamedTuple):
    """Prompt ids `(n,)`, and the expected number of effective groups among theirs."""

    ids: np.ndarray
    expected: float


def propose_for_target(
    propose: Callable[[int], np.ndarray],
    chances: Callable[[np.ndarray], np.ndarray],
    available: Callable[[np.ndarray], int],
    *,
    least: int,
    target: float,
    batch_groups: int,
    multiple: int,
) -> Proposal:
    """
    Propose prompts until the expected number of effective groups, the sum of their chances, is `target` and replay can fill
    the rest of the batch, or until they fill the batch themselves.

    A chance is at most 1, so the first proposal has `ceil(target)` prompts. Each further one has as many as are missing by the
    mean chance of those before it, so that a few proposals suffice and the target is hardly exceeded.

    Args:
        propose (`Callable`): `k -> (k,)` prompt ids.
        chances (`Callable`): prompt ids `(k,)` -> probabilities that their groups are effective, `(k,)`, without NaN.
        available (`Callable`): prompt ids proposed so far -> stored groups of other prompts.
        least (`int`): at least so many prompts are proposed; at most `batch_groups`.
        target (`float`): expected number of effective groups, above 0.
        batch_groups (`int`): B, groups trained on per generation batch; a multiple of `multiple`.
        multiple (`int`): the number of prompts is a multiple of this (processes).
    """
    ids, known, expected = np.empty(0, dtype=np.int64), np.empty(0), 0.0
    missing = max(least, math.ceil(target))
    while missing > 0 and len(ids) < batch_groups:
        proposed = propose(min(math.ceil(missing / multiple) * multiple, batch_groups - len(ids)))
        ids, known = np.concatenate([ids, proposed]), np.concatenate([known, chances(proposed)])
        expected = math.fsum(known)  # exact, so equal on all processes
        lacking, mean, room = target - expected, expected / len(ids), batch_groups - len(ids)
        missing = max(room if lacking >= room * mean else math.ceil(lacking / mean), room - available(ids))
    return Proposal(ids, expected)
