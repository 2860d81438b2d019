"""DOTS where the text of a prompt says nothing about it: each prompt has the embedding of another one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trl_dataeff.selection import DotsSelector, SelectorContext


class ShuffledDots(DotsSelector):
    """DOTS selection, which can learn about a prompt from its own groups alone."""

    def bind(self, context: SelectorContext) -> None:
        embeddings = context.embeddings()
        order = np.random.default_rng(context.seed).permutation(len(embeddings))
        super().bind(replace(context, embed=lambda: embeddings[order]))
