"""
What becomes of a generation batch in the loss: its advantages, its rows, and the correction for earlier rollouts.

This package adds keys to the batch that TRL returns. They live in its micro-batches until these have been trained on,
in a checkpoint too. B are rows, T tokens of a completion:

- `logprobs.STALE` (B,), bool: an earlier policy sampled the row.
  `behavior_per_token_logps` (B, T): log-probs under that policy, NaN where there are none.
  Written by `behavior_tensors` if any row of a process is stale; read by `correct` and its metrics.
- `without_old_logps` (B,), bool: the row was left out of the pass for old log-probs.
  Written by `LossCorrection.prepare` if rows were; read by `LossCorrection.on_logps`, which puts the loss's own there.
- `batch_row` (B,), int64: the row in this process's batch, as micro-batches hold rows in any order.
  Written by `LogprobRecorder` and `ExclusionRecorder` if something is to be recorded from the loss; read by
  `LossCorrection.on_logps`.
- `compaction.FACTOR`: factor on the loss of a micro-batch without some of its rows.
  `compaction.FIRST_ROWS` (m,) and `PROMPT_OF_ROW` (B,), int64: which rows share one of m prompts.
  Written by `UpdateCompactor` as the first micro-batch of a generation batch enters the loss; read by the trainer's
  `_compute_loss`.
"""
