"""A selector as another package would write it."""

import numpy as np
import torch

from trl_dataeff import Selector


class LeastSolved(Selector):
    """Prompts with the fewest successes so far, but for chance. Notes each call of a method in `calls`."""

    exact = True

    def __init__(self):
        self.calls: list[tuple] = []

    def bind(self, context):
        super().bind(context)
        self.calls.append(("bind", context))
        self.solved = np.zeros(context.num_prompts)
        self.batches = 0

    def propose(self, n, rng):
        noise = torch.rand(self.context.num_prompts, generator=rng).numpy()
        ids = np.argsort(noise + self.solved)[:n]
        self.calls.append(("propose", ids.copy()))
        return ids

    def predict(self, prompt_ids):
        return (1 / (2 + self.solved[prompt_ids])).astype(np.float32)

    def observe(self, groups):
        self.calls.append(("observe", list(groups)))
        self.batches += 1
        for group in groups:
            self.solved[group.prompt_id] += np.nan_to_num(group.success_rate)

    def state_dict(self):
        return {"solved": self.solved.copy(), "batches": np.array([self.batches])}

    def load_state_dict(self, state):
        self.solved, self.batches = state["solved"].copy(), int(state["batches"][0])

    def metrics(self):
        return {"batches": self.batches, "solved/sum": self.solved.sum(), "not yet defined": float("nan")}

    def called(self, name: str) -> list[tuple]:
        """Arguments of the calls of a method, in order."""
        return [call[1:] for call in self.calls if call[0] == name]


class WithReferences(LeastSolved):
    """Learns from five random reference prompts in every generation batch."""

    def references(self, rng):
        ids = torch.randperm(self.context.num_prompts, generator=rng)[:5].numpy()
        self.calls.append(("references", ids))
        return ids
