"""
Groups of earlier generation batches that are trained on again: stored, and corrected in the loss.

    buffer.py       the replay buffer
    logprobs.py     log-probs under the policy that sampled
    correction.py   the correction of the loss
    advantages.py   advantages that TRL normalises over the batch

This package adds keys to the batch that TRL returns. They live in its micro-batches until these have been trained on,
in a checkpoint too. B are rows, T tokens of a completion:

- `logprobs.STALE` (B,), bool: an earlier policy sampled the row.
  `behavior_per_token_logps` (B, T): log-probs under that policy, NaN where there are none.
  Written by `behavior_tensors` if any row of a process is stale; read by `correct` and its metrics.
- `batch_row` (B,), int64: the row in this process's batch, as micro-batches hold rows in any order.
  Written by `LogprobRecorder` and `ExclusionRecorder` if something is to be recorded from the loss; read by
  `LossCorrection.apply`.
"""
