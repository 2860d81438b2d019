"""`ReplaySwitch`: replay ends where the policy moves too fast for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ReplaySwitch:
    """
    Switches replay off, for the rest of a run, once the clip removes the gradient of too many replayed tokens.

    A token is clipped when the policy has moved away from the one that sampled it by more than the clip's range. Where that
    happens to many tokens of recent groups, the policy changes with every step about as much as it may: replay then adds
    steps in outdated directions. At the learning rates that are usual for GRPO a few hundredths are clipped.

    Args:
        most (`float`, *optional*): largest running share of clipped tokens; `None`: replay is never switched off.
        decay (`float`, *optional*, defaults to `0.9`): the running share is a mean over generation batches, whose weights
            fall by this factor. It begins at 0, so that it takes some batches to exceed `most`.

    Attributes:
        on: whether groups may be replayed.
        share: the running share.
        clipped, tokens: sums over the replayed tokens of the present generation batch.
    """

    most: float | None
    decay: float = 0.9
    on: bool = True
    share: float = 0.0
    clipped: float = 0.0
    tokens: float = 0.0

    def observe(self, clipped: float, tokens: float) -> None:
        """Enter a micro-batch: replayed tokens (or sequences) that were clipped, and how many there were."""
        self.clipped += clipped
        self.tokens += tokens

    def end_batch(self) -> bool:
        """Close a generation batch, which counts if it had replayed tokens. Whether replay has just been switched off."""
        if self.tokens:
            self.share = self.decay * self.share + (1 - self.decay) * self.clipped / self.tokens
        self.clipped = self.tokens = 0.0
        was_on, self.on = self.on, self.on and (self.most is None or self.share <= self.most)
        return was_on and not self.on

    def ended(self, step: int) -> str:
        """What to tell the user at the optimizer step `step` at which it was switched off."""
        return (
            f"Replay ends at step {step}: the running share of its tokens that are clipped is {self.share:.2f}, above "
            f"`replay_max_clipped={self.most}`. The policy moves too fast for older rollouts; the run goes on without "
            "them. To keep replay, lower `learning_rate`, or set `replay_max_clipped=None`."
        )

    def state_dict(self) -> dict[str, float]:
        """What changes during a run."""
        return {name: getattr(self, name) for name in ("on", "share", "clipped", "tokens")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The inverse of [`state_dict`]."""
        for name, value in state.items():
            setattr(self, name, value)
