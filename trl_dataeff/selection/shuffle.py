"""Shuffled orders that are looked at piece by piece, so that a pass over millions of prompts costs nothing to start."""

from __future__ import annotations

import numpy as np
import torch


_SMALL = 1 << 16
_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))


class ShuffledOrder:
    """
    A pseudo-random permutation of `0 ... size - 1`, given by its key.

    Up to 65,536 elements it is `torch.randperm`. Beyond, it is a Feistel network of six rounds over the next even
    power of two, walked until the value falls into the range (cycle walking; Black and Rogaway, "Ciphers with arbitrary
    finite domains", 2002): any piece of it is computed on its own, in time and memory of that piece.

    Args:
        size (`int`): number of elements.
        key (`int`): in [0, 2^62); equal keys give equal orders.
    """

    def __init__(self, size: int, key: int):
        self.size = size
        self.key = key
        generator = torch.Generator().manual_seed(key)
        if size <= _SMALL:
            self._order = torch.randperm(size, generator=generator).numpy()
        else:
            self._half_bits = np.uint64((int(size - 1).bit_length() + 1) // 2)
            self._keys = torch.randint(2**62, (_ROUNDS,), generator=generator).numpy().astype(np.uint64)

    def take(self, start: int, stop: int) -> np.ndarray:
        """Elements `start` to `stop - 1` of the order, int64 of shape `(stop - start,)`; `stop` at most `size`."""
        if self.size <= _SMALL:
            return self._order[start:stop]
        values = self._permute(np.arange(start, stop, dtype=np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._permute(values[outside])
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = values >> self._half_bits, values & mask
        for key in self._keys:
            mixed = (right ^ key) * _MULTIPLIERS[0]
            mixed = (mixed ^ (mixed >> np.uint64(29))) * _MULTIPLIERS[1]
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << self._half_bits) | right
